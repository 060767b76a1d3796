"""What people do on the page of ``dualwrite serve``: who may, what would be lost or sent, the action, and how it ended.

Nothing is done without three steps: a page that says exactly what would be done, a form with a reason, and the intent stored in
the database. The action itself is that of the commands (:mod:`dualwrite.writing.by_hand`). The form confirms what was shown:
messages by their numbers, losses by their states, a transaction by what the servers said of it. If that has changed
since, nothing is done, and the page shows it again.

A page of another site cannot act: its form has another origin, and does not know the value of our cookie. A request counts as
that of a user only with the token, or with the header of a trusted proxy.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, urlsplit

from anyio import CapacityLimiter, sleep, to_thread
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from dualwrite.cli.report import partitions_words, will_do
from dualwrite.clock import Deadline
from dualwrite.errors import DualWriteError
from dualwrite.protocol.blocking import Deed
from dualwrite.protocol.members import LeaseState
from dualwrite.protocol.supervision import Reason, View, plan, why_not_by_hand
from dualwrite.protocol.values import TransactionStatus
from dualwrite.recovery.claim import default_owner
from dualwrite.recovery.recover import connected_coordinator, settled_with, status
from dualwrite.serving.page import HEADERS, duration, render_action, render_done
from dualwrite.serving.supervisor import look
from dualwrite.stores.sql.database import opened
from dualwrite.writing import by_hand
from dualwrite.writing.by_hand import By, new_action_id

if TYPE_CHECKING:
    from dualwrite.interfaces import Database
    from dualwrite.protocol.blocking import ActionRecord
    from dualwrite.protocol.supervision import Seen
    from dualwrite.recovery.recover import IdStatus
    from dualwrite.serving.configuration import ActionRules, Target

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_COOKIE: Final = "dualwrite-form"
_MOST_BYTES: Final = 65536
_MOST_MESSAGES: Final = 500
"""How many messages one form drops or replays: each is named in it."""
_LONGEST_REASON: Final = 1000
_LONGEST_NAME: Final = 100
_AT_ONCE: Final = 4
_WRONG_TOKEN_S: Final = 1.0
_ACTION_ID: Final = re.compile(r"[0-9a-f]{32}")
_COOKIE_S: Final = 12 * 3600


@dataclass(frozen=True)
class Preview:
    """What an action would do, before it is done.

    Attributes:
        consequences: What will be lost, sent or fenced, in sentences.
        items: The transactions, messages or losses that it is about.
        seen: Names exactly these: the form sends it back.
        refused: Why it cannot be done; None if it can.
        gives_up: Whether it loses what the database has decided, which takes a tick of its own.
    """

    consequences: Sequence[str] = ()
    items: Sequence[str] = ()
    seen: str = ""
    refused: str | None = None
    gives_up: bool = False


@dataclass(frozen=True)
class Form:
    """What a person has filled in."""

    user: str = ""
    reason: str = ""
    seen: str = ""
    action_id: str = field(default_factory=new_action_id)
    lose_decided: bool = False


class Refused(Exception):
    """The form is not carried out; the words are for its page."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


# Who may act


def user_of(request: Request, given: Mapping[str, str], rules: ActionRules) -> str:
    """Who sends this form.

    Raises:
        Refused: It comes from elsewhere, from nobody, or with a wrong token.
    """
    origin = request.headers.get("origin", "")
    own = rules.origin or f"{urlsplit(origin).scheme}://{request.headers.get('host', '')}"
    if origin != own or request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise Refused(403, f"this form comes from {origin or 'an unknown place'}, not from this page")
    cookie = request.cookies.get(_COOKIE, "")
    if not cookie or not _same(cookie, given.get("form", "")):
        raise Refused(403, "this form is not of this browser, or is too old: look at it again, and send it again")
    if rules.user_header is not None:
        return proxy_user(request, rules)
    assert rules.token is not None
    if not _same(given.get("token", ""), rules.token):
        raise Refused(403, "the token is wrong")
    return given.get("user", "").strip()


def proxy_user(request: Request, rules: ActionRules) -> str:
    """The user that a trusted proxy names.

    Raises:
        Refused: Nobody is named, or not by a trusted proxy.
    """
    assert rules.user_header is not None
    peer = request.client.host if request.client is not None else ""
    try:
        trusted = any(ip_address(peer) in network for network in rules.trusted_proxies)
    except ValueError:
        trusted = False
    user = request.headers.get(rules.user_header, "").strip()
    if not trusted or not user:
        raise Refused(403, f"no trusted proxy names a user in {rules.user_header}: come through the proxy")
    return user


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


# What would be done


def preview(deed: Deed, subject: str, target: Target, database: Database) -> Preview:
    """Ask the servers what an action would do now. Changes nothing."""
    if deed is Deed.SETTLE:
        return _settling(subject, target, database)
    if deed is Deed.TERMINATE:
        return _terminating(subject, target, database)
    if deed is Deed.ACKNOWLEDGE:
        return _acknowledging(subject, database)
    return _aside(deed, subject, database)


def _settling(writer: str, target: Target, database: Database) -> Preview:
    found = look(replace(target, prefix=writer), database)
    seen = next((one for one in found.seen if one.writer == writer), None)
    if seen is None:
        return Preview(refused="nothing of it is unsettled, and nothing waits")
    names = {one.row.transactional_id for one in found.items} | {writer}
    items = [
        _item_words(one)
        for one in found.items
        if one.needs_recovery and settled_with(one.row.transactional_id, names) == writer
    ]
    items += [f"{seen.waiting:,} messages that wait in the database: sent"] if seen.waiting else []
    if (why_not := why_not_by_hand(seen, target.rule)) is not None:
        return Preview(_instead(seen, why_not[0], target), items, refused=why_not[1])
    return Preview(
        consequences=[
            "What the database has decided is committed in Kafka. What it has not decided is aborted, on both sides.",
            "Messages that wait are sent. Nothing takes them back.",
            "All lanes of this writer are claimed. Its owner showed no sign of life; one that lives all the same is fenced.",
        ],
        items=items,
    )


def _instead(seen: Seen, reason: Reason, target: Target) -> list[str]:
    """What a person can do where settling is refused."""
    if reason is Reason.WENT_BACK:
        return [f"Compare both sides, then run `dualwrite recover {seen.writer} --after-restore`."]
    if reason is Reason.SLOT:
        return ["End the Spark job that holds it, or wait until its lease has expired."]
    if reason is Reason.LEASED:
        return [
            "Its owner can end it by itself. If it hangs, stop its process: what it left is settled once its lease has expired."
        ]
    due_in_s = plan(seen, View(now_s=0.0, answering_s=inf), target.rule).due_in_s
    return [
        f"Its owner may be alive. If it stays silent, the service settles it in {duration(due_in_s)}.",
        f"If you know that it is dead, `dualwrite recover {seen.writer}` settles it now.",
    ]


def _item_words(item: IdStatus) -> str:
    return f"{item.row.transactional_id}: {will_do(item)}{_span_words(item)}"


def _span_words(item: IdStatus) -> str:
    age = f", open for {duration(item.waits_for_s)}" if item.waits_for_s is not None else ""
    return f"{age}, in {partitions_words(item.partitions)}" if item.partitions else age


def _terminating(asked: str, target: Target, database: Database) -> Preview:
    every = status(asked, kafka=target.kafka, database=database, timeout_s=target.timeout_s)
    items = [one for one in every if one.row.transactional_id == asked]
    if not items:
        return _terminating_another(asked, target)
    is_open = [one for one in items if one.kafka_status is TransactionStatus.ONGOING]
    if not is_open:
        return Preview(refused="no transaction of it is open")
    given_up = [one for one in is_open if one.decided_is_open]
    consequences: list[str] = []
    if given_up:
        places = "; ".join(partitions_words(one.partitions) for one in given_up)
        consequences += [
            "THE DATABASE HAS DECIDED THIS TRANSACTION. Its rows stay in the database.",
            f"Its messages in {places or 'Kafka'} are lost: no consumer ever reads them, and nothing sends them again.",
            "An incident records the loss. To commit the messages instead, settle the id.",
        ]
    else:
        consequences.append("The database has not decided it: it is aborted on both sides, its rows and its messages.")
    consequences.append(_owner_words(items[0], asked, database))
    shown = [f"{one.row.kafka_id(one.incarnation)}{_span_words(one)}" for one in is_open]
    exactly = "|".join(
        f"{one.row.kafka_id(one.incarnation)} {one.row.prepared} {one.decided_is_open}" for one in is_open
    )
    return Preview(consequences, shown, hashlib.sha256(exactly.encode()).hexdigest(), gives_up=bool(given_up))


def _owner_words(item: IdStatus, asked: str, database: Database) -> str:
    fenced = "it is fenced: it must open the writer again, all of whose lanes are settled"
    lease = next((one for one in database.lease_list(asked, "") if one.state is LeaseState.HELD), None)
    if lease is not None:
        return f"ITS OWNER IS ALIVE, {lease.owner}: its lease is held for {duration(lease.left_s)} more. So {fenced}."
    if database.living([asked]):
        return f"A TASK HOLDS ITS SLOT, {item.row.owner}. So {fenced}."
    age_s = (database.now() - item.row.updated_at).total_seconds()
    return f"Its owner, {item.row.owner}, changed its row last {duration(age_s)} ago. If it is alive, {fenced}."


def _terminating_another(kafka_id: str, target: Target) -> Preview:
    deadline = Deadline(target.timeout_s)
    with connected_coordinator(target.kafka) as coordinator:
        view = coordinator.describe([kafka_id], deadline)[kafka_id]
    if view.status is not TransactionStatus.ONGOING:
        return Preview(refused=f"no transaction of it is open: Kafka shows {view.status.value}")
    age = "" if view.started_ms is None else f", open for {duration(max(0.0, time.time() - view.started_ms / 1000))}"
    places = partitions_words(view.partitions)
    return Preview(
        [
            "NO ROW OF THIS DATABASE NAMES THIS ID: another program made it. Only that program knows what it has decided.",
            f"Ask it first. If it has decided this transaction, its messages{f' in {places}' if places else ''} are lost.",
            "The producer of this id is fenced, alive or not.",
        ],
        [f"{kafka_id}: producer {view.producer_id}, epoch {view.epoch}{age}{f', in {places}' if places else ''}"],
        f"{view.producer_id}:{view.epoch}",
    )


def _acknowledging(transactional_id: str, database: Database) -> Preview:
    found = [one for one in database.store().incidents(transactional_id) if one.transactional_id == transactional_id]
    if not found:
        return Preview(refused="no loss of it is left to acknowledge")
    return Preview(
        [
            "These losses are reported no longer: not here, not by `dualwrite status`, and no alert counts them.",
            "They stay in the database.",
            "Nothing is sent by this. Publish the messages of their rows again first, if consumers need them.",
        ],
        [
            f"{one.outcome.value}, found {one.detected_at:%Y-%m-%d %H:%M:%S} UTC, in {partitions_words(one.state.partitions)}: "
            f"{one.detail}"
            for one in found
        ],
        "\n".join(one.prepared_transaction_state for one in found),
    )


def _aside(deed: Deed, writer: str, database: Database) -> Preview:
    rows = by_hand.outbox_of(database)
    found, count = rows.aside(writer, limit=_MOST_MESSAGES), rows.count_aside(writer)
    if not found:
        return Preview(refused="no message of it was moved aside")
    those = f"{len(found):,} of {count:,} messages" if count > len(found) else f"{count:,} messages"
    if deed is Deed.DROP:
        consequences = [f"{those} are deleted for good. Nobody will read them, and nothing sends them again."]
    else:
        consequences = [
            f"{those} wait again, behind all that wait already, and are sent next.",
            "Later messages of their keys may have been sent meanwhile. They stay before them.",
            "What Kafka still refuses is moved aside again.",
        ]
    items = [
        f"{one.number}: {one.topic}{'' if one.partition is None else f' {one.partition}'}, {len(one.value or b''):,} bytes, "
        f"moved aside {one.moved_at:%Y-%m-%d %H:%M:%S} UTC: {one.reason}"
        for one in found
    ]
    return Preview(consequences, items, ",".join(str(one.number) for one in found))


# The deed


def carry_out(deed: Deed, subject: str, form: Form, target: Target, database: Database) -> None:
    """Do what the form confirms, and store it with its reason.

    Raises:
        Refused: It cannot be done, or is not any more what was shown. Nothing was done or stored.
        DualWriteError: It was refused or has failed. The history says so, unless the intent could not be stored.
    """
    now = preview(deed, subject, target, database)
    if now.refused is not None:
        raise Refused(409, f"not done: {now.refused}")
    if deed is Deed.TERMINATE and now.seen != form.seen:
        raise Refused(409, "not done: it has changed since you looked; look at it again")
    if now.gives_up and not form.lose_decided:
        raise Refused(400, "not done: tick that you give up what the database has decided")
    by = By(form.user, form.reason, f"{target.kafka['client.id']} {default_owner()}", form.action_id)
    if deed is Deed.SETTLE:
        by_hand.settle(
            subject,
            kafka=target.kafka,
            database=database,
            by=by,
            open_for_s=target.rule.settle_after_s,
            timeout_s=target.timeout_s,
        )
    elif deed is Deed.TERMINATE:
        by_hand.terminate(
            subject,
            kafka=target.kafka,
            database=database,
            by=by,
            lose_decided=form.lose_decided,
            timeout_s=target.timeout_s,
        )
    elif deed is Deed.ACKNOWLEDGE:
        by_hand.acknowledge(subject, form.seen.split("\n"), database=database, by=by)
    else:
        do = by_hand.drop if deed is Deed.DROP else by_hand.replay
        do(subject, _numbers(form.seen), database=database, by=by)


def _numbers(text: str) -> Sequence[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError as error:
        raise Refused(400, "the form does not name the messages: look at it again") from error


# The pages


class _Named(NamedTuple):
    """What a page's address names."""

    target: Target
    deed: Deed
    subject: str


class ActionPages:
    """The forms of the actions that are enabled, and what became of those that were sent."""

    def __init__(self, targets: Sequence[Target], rules: ActionRules) -> None:
        self._targets = {target.name: target for target in targets}
        self._rules = rules
        self._limiter: CapacityLimiter | None = None

    @property
    def routes(self) -> list[Route]:
        """Where they are."""
        return [
            Route("/act/{target}/{deed}", self.ask, methods=["GET"]),
            Route("/act/{target}/{deed}", self.act, methods=["POST"]),
            Route("/done/{target}/{action_id}", self.done),
        ]

    async def ask(self, request: Request) -> Response:
        """The page that says what would be done, with the form."""
        try:
            named = self._named(request)
            if self._rules.user_header is not None:
                proxy_user(request, self._rules)
        except Refused as refused:
            return self._refusal(refused)
        return await self._confirmation(request, named, Form())

    async def act(self, request: Request) -> Response:
        """Carry out a form, and lead to how it ended."""
        given: Mapping[str, str] = {}
        try:
            target, deed, subject = named = self._named(request)
            given = await _given(request)
            user = user_of(request, given, self._rules)
        except Refused as refused:
            if self._rules.token is not None and given:
                await sleep(_WRONG_TOKEN_S)  # slows down those who guess
            return self._refusal(refused)
        form = Form(
            user,
            given.get("reason", "").strip(),
            given.get("seen", ""),
            given.get("action_id", ""),
            given.get("lose_decided") == "yes",
        )
        try:
            if not 0 < len(form.reason) <= _LONGEST_REASON or not 0 < len(form.user) <= _LONGEST_NAME:
                raise Refused(400, "give your name and a reason: both are stored")
            if not _ACTION_ID.fullmatch(form.action_id):
                raise Refused(400, "the form has no number of its own: look at it again")
            await self._in_thread(target, lambda database: carry_out(deed, subject, form, target, database))
        except Refused as refused:
            again = replace(form, action_id=new_action_id())
            return await self._confirmation(request, named, again, refused)
        except DualWriteError as error:
            logger.warning("%s: %s %s by %s: %s", target.name, deed.value, subject, form.user, error)
            if await self._record(target, form.action_id) is None:
                words = Refused(503, f"not done, as the reason could not be stored: {type(error).__name__}: {error}")
                return await self._confirmation(request, named, form, words)
        else:
            logger.info("%s: %s %s by %s: %s", target.name, deed.value, subject, form.user, form.reason)
        return RedirectResponse(f"/done/{quote(target.name)}/{form.action_id}", 303, headers=HEADERS)

    async def done(self, request: Request) -> Response:
        """How an action ended, as the history has it."""
        try:
            target = self._target(request)
            if self._rules.user_header is not None:
                proxy_user(request, self._rules)
            record = await self._record(target, str(request.path_params["action_id"]))
            if record is None:
                raise Refused(404, "the history has no such action, or the database does not answer")
        except Refused as refused:
            return self._refusal(refused)
        return HTMLResponse(render_done(target.name, record), headers=HEADERS)

    def _target(self, request: Request) -> Target:
        target = self._targets.get(str(request.path_params["target"]))
        if target is None:
            raise Refused(404, "there is no such target")
        return target

    def _named(self, request: Request) -> _Named:
        target, subject = self._target(request), request.query_params.get("id", "")
        deed = next((one for one in self._rules.enabled if one.value == request.path_params["deed"]), None)
        if deed is None:
            raise Refused(404, "this action is not enabled here")
        if not subject or (deed is not Deed.TERMINATE and not subject.startswith(target.prefix)):
            raise Refused(404, f"this is no id of {target.name}")
        return _Named(target, deed, subject)

    def _refusal(self, refused: Refused) -> Response:
        return HTMLResponse(render_action(refusal=str(refused)), refused.status, headers=HEADERS)

    async def _confirmation(
        self, request: Request, named: _Named, form: Form, refused: Refused | None = None
    ) -> Response:
        target, deed, subject = named
        try:
            shown = await self._in_thread(target, lambda database: preview(deed, subject, target, database))
        except DualWriteError as error:
            shown = Preview(refused=f"{type(error).__name__}: {error}")
        cookie = request.cookies.get(_COOKIE) or secrets.token_urlsafe(32)
        answer = HTMLResponse(
            render_action(
                target=target.name,
                deed=deed,
                subject=subject,
                preview=shown,
                form=form,
                cookie=cookie,
                asks_user=self._rules.token is not None,
                refusal=None if refused is None else str(refused),
            ),
            200 if refused is None else refused.status,
            headers=HEADERS,
        )
        answer.set_cookie(
            _COOKIE,
            cookie,
            max_age=_COOKIE_S,
            path="/act",
            httponly=True,
            samesite="strict",
            secure=(self._rules.origin or "").startswith("https:"),
        )
        return answer

    async def _record(self, target: Target, action_id: str) -> ActionRecord | None:
        def read(database: Database) -> ActionRecord | None:
            history = database.history()
            return None if history is None else history.read(action_id)

        try:
            return await self._in_thread(target, read)
        except DualWriteError:
            logger.exception("%s: the history cannot be read", target.name)
            return None

    async def _in_thread(self, target: Target, work: Callable[[Database], Result]) -> Result:
        if self._limiter is None:
            self._limiter = CapacityLimiter(_AT_ONCE)

        def run() -> Result:
            with opened(target.url, target.schema) as database:
                return work(database)

        return await to_thread.run_sync(run, limiter=self._limiter)


async def _given(request: Request) -> Mapping[str, str]:
    """The fields of a form."""
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        raise Refused(400, "this is no form")
    body = b""
    async for some in request.stream():
        body += some
        if len(body) > _MOST_BYTES:
            raise Refused(413, "this form is too long")
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=20, errors="strict"))
    except ValueError as error:
        raise Refused(400, "this is no form") from error
