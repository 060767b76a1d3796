"""What the page of ``dualwrite serve`` says, as values made from snapshots: what blocks readers, and what happens next.

The template only lays them out. It is for a person who is called at night and has a phone: words, not codes; no JavaScript.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, select_autoescape

from dualwrite.cli.report import batch_outlooks, blocks_words, groups_words, partitions_words, row_word, will_do
from dualwrite.protocol.blocking import Deed, Ended, counted, weight
from dualwrite.protocol.supervision import SILENT_SO_FAR, UNTRIED, Action, Reason
from dualwrite.recovery.recover import settled_with

if TYPE_CHECKING:
    from dualwrite.protocol.blocking import ActionRecord, Blocker
    from dualwrite.protocol.findings import CheckResult
    from dualwrite.protocol.supervision import Planned, Tries
    from dualwrite.recovery.recover import IdStatus
    from dualwrite.serving.actions import Form, Preview
    from dualwrite.serving.supervisor import Snapshot
    from dualwrite.stores.sql.ledger import UnfinishedBatch

_MINUTE_S: Final = 60
_NOTICED_S: Final = 1.0
"""Other programs' transactions that are younger are left out: programs at work always have some open."""
_NEED_A_PERSON: Final = frozenset({Reason.WENT_BACK, Reason.CLOCK, Reason.FAILED})
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Referrer-Policy": "same-origin",  # with "no-referrer" a browser would not tell us where a form comes from
    "X-Content-Type-Options": "nosniff",
}
"""Of every page."""
_TITLES: Final = {
    Deed.SETTLE: "Settle {}",
    Deed.TERMINATE: "Terminate the transaction of {}",
    Deed.ACKNOWLEDGE: "Acknowledge the losses of {}",
    Deed.REPLAY: "Send again what was moved aside of {}",
    Deed.DROP: "Delete what was moved aside of {}",
}
_LINKS: Final = {
    Deed.SETTLE: "settle",
    Deed.TERMINATE: "terminate",
    Deed.ACKNOWLEDGE: "acknowledge",
    Deed.REPLAY: "send again",
    Deed.DROP: "delete",
}
_TEMPLATES: Final = Environment(
    loader=PackageLoader("dualwrite.serving", "."), autoescape=select_autoescape(default=True), trim_blocks=True
)


@dataclass(frozen=True)
class Link:
    """Where an action is confirmed."""

    words: str
    address: str


@dataclass(frozen=True)
class HistoryRow:
    """One action of the past. All fields are text to show, but for ``alarming``."""

    begun: str
    who: str
    what: str
    why: str
    outcome: str
    alarming: bool


@dataclass(frozen=True)
class OpenRow:
    """One unsettled id, or an open transaction that is not ours. All fields are text to show, but for the flags."""

    name: str
    blocks: str
    age: str
    time_left: str
    decision: str
    owner: str
    action: str
    because: str
    tries: str
    alarming: bool
    is_ours: bool = True
    links: Sequence[Link] = ()


@dataclass(frozen=True)
class WaitingRow:
    """What waits of one writer. All fields are text to show, but for ``alarming`` and ``links``."""

    name: str
    messages: str
    size: str
    oldest: str
    aside: str
    action: str
    because: str
    tries: str
    alarming: bool
    links: Sequence[Link] = ()


@dataclass(frozen=True)
class BatchRow:
    """A batch of a Spark sink that is not completed. All fields are text to show, but for ``alarming``."""

    name: str
    sink: str
    phase: str
    partitions: str
    started: str
    nobody_since: str
    because: str
    alarming: bool


@dataclass(frozen=True)
class LossRow:
    """One loss that nobody has acknowledged. All fields are text to show, but for ``links``."""

    name: str
    outcome: str
    detected: str
    detail: str
    partitions: str
    links: Sequence[Link] = ()


@dataclass(frozen=True)
class TargetView:
    """One target.

    Attributes:
        name: Its name.
        summary: One line that says whether a person is needed.
        alarming: Whether one is.
        role: Who leads.
        age: For how long ago it shows the state; empty before the first round.
        error: Why the last round failed.
        open: What is unsettled, and open transactions of others, what blocks most first.
        waiting: What waits.
        batches: Batches of Spark sinks that are not completed.
        losses: What is lost, or may be.
        findings: Conditions that a person should fix, in words.
        history: What people and services did last.
        acts: Whether there are actions.
    """

    name: str
    summary: str
    alarming: bool
    role: str
    age: str
    error: str | None
    open: Sequence[OpenRow]
    waiting: Sequence[WaitingRow]
    batches: Sequence[BatchRow]
    losses: Sequence[LossRow]
    findings: Sequence[str]
    history: Sequence[HistoryRow]
    acts: bool = False


def render(
    snapshots: Iterable[Snapshot], now_s: float, *, refresh_s: float, enabled: Collection[Deed] = frozenset()
) -> str:
    """The page. ``now_s`` is the time by the supervisors' clock, ``refresh_s`` how often a browser loads it again."""
    targets = [view(snapshot, now_s, enabled) for snapshot in snapshots]
    return _TEMPLATES.get_template("page.html").render(
        targets=targets, alarming=any(target.alarming for target in targets), refresh_s=max(2, round(refresh_s))
    )


def render_action(
    *,
    target: str = "",
    deed: Deed | None = None,
    subject: str = "",
    preview: Preview | None = None,
    form: Form | None = None,
    cookie: str = "",
    asks_user: bool = False,
    refusal: str | None = None,
) -> str:
    """The page that confirms an action. It never loads itself again: somebody may be filling in its form."""
    return _TEMPLATES.get_template("action.html").render(
        target=target,
        title="dualwrite" if deed is None else _TITLES[deed].format(subject),
        preview=preview,
        form=form,
        cookie=cookie,
        asks_user=asks_user,
        refusal=refusal,
    )


def render_done(target: str, record: ActionRecord) -> str:
    """The page that says how an action ended. While that is not known, it loads itself again."""
    return _TEMPLATES.get_template("done.html").render(
        target=target, row=_history_row(record), running=record.outcome is None
    )


def view(snapshot: Snapshot, now_s: float, enabled: Collection[Deed] = frozenset()) -> TargetView:
    """One target as the page shows it."""
    found = snapshot.round
    if found is None:
        return TargetView(
            name=snapshot.target,
            summary="no answer yet" if snapshot.error else "looking for the first time",
            alarming=snapshot.error is not None,
            role="",
            age="",
            error=snapshot.error,
            open=(),
            waiting=(),
            batches=(),
            losses=(),
            findings=(),
            history=(),
        )
    plans = {planned.writer: planned for planned in snapshot.plans}
    losses = [
        LossRow(
            incident.transactional_id,
            incident.outcome.value,
            f"{incident.detected_at:%Y-%m-%d %H:%M:%S}",
            incident.detail,
            partitions_words(incident.state.partitions),
            _links(snapshot.target, incident.transactional_id, enabled, Deed.ACKNOWLEDGE),
        )
        for incident in found.incidents
    ]
    people = sum(planned.reason in _NEED_A_PERSON for planned in snapshot.plans)
    aside = sum(one.aside for one in found.waiting)
    blocking = sum(one.calls_for_a_person for one in found.blockers)
    alarming = bool(snapshot.error or losses or people or aside or blocking)
    return TargetView(
        name=snapshot.target,
        summary=_summary(snapshot, losses=len(losses), people=people, aside=aside, blocking=blocking),
        alarming=alarming,
        role=_role(snapshot),
        age=duration(now_s - snapshot.round_s),
        error=snapshot.error,
        open=_open(snapshot, plans, enabled),
        waiting=_waiting(snapshot, plans, enabled),
        batches=[_batch_row(one, words) for one, words in batch_outlooks(found.batches, found.items)],
        losses=losses,
        findings=[*map(_finding_words, snapshot.findings), *found.warnings],
        history=[_history_row(record) for record in found.history],
        acts=bool(enabled),
    )


def _summary(snapshot: Snapshot, *, losses: int, people: int, aside: int, blocking: int) -> str:
    if snapshot.error:
        return "a server does not answer: this is what was seen last"
    words = [f"{counted(losses, 'loss', 'losses')} to acknowledge"] if losses else []
    words += [f"{counted(people, 'writer')} that cannot be settled"] if people else []
    words += [f"{counted(aside, 'message')} refused by Kafka"] if aside else []
    words += [f"{counted(blocking, 'transaction')} holding back readers for minutes"] if blocking else []
    if words:
        return ", ".join(words)
    settling = sum(planned.action is Action.SETTLE for planned in snapshot.plans)
    return f"{counted(settling, 'writer')} to settle" if settling else "nobody is needed"


def _finding_words(one: CheckResult) -> str:
    return f"{one.status.value}: {one.check}: {one}. To fix it: {one.remedy}"


def _role(snapshot: Snapshot) -> str:
    assert snapshot.round is not None
    leader = snapshot.round.leader
    if snapshot.leads:
        return "this replica settles"
    if leader is None or leader.owner is None:
        return "no replica settles yet"
    return f"this replica stands by; {leader.owner.partition(' on ')[0]} settles"


def _history_row(record: ActionRecord) -> HistoryRow:
    intent = record.intent
    if record.outcome is None:
        outcome = "not known: it still runs, or its process was killed"
    else:
        outcome = f"{record.outcome.value}: {record.result}" if record.result else record.outcome.value
    return HistoryRow(
        begun=f"{record.begun_at:%Y-%m-%d %H:%M:%S}",
        who=f"{intent.actor} ({intent.program})",
        what=f"{intent.deed.value} {intent.subject}: {intent.detail}",
        why=intent.reason,
        outcome=outcome,
        alarming=record.outcome in {None, Ended.FAILED},
    )


def _links(target: str, subject: str, enabled: Collection[Deed], *deeds: Deed) -> list[Link]:
    place, chosen = f"/act/{quote(target)}", quote(subject, safe="")
    return [Link(_LINKS[deed], f"{place}/{deed.value}?id={chosen}") for deed in deeds if deed in enabled]


def _open(snapshot: Snapshot, plans: dict[str, Planned], enabled: Collection[Deed]) -> list[OpenRow]:
    """Everything that is unsettled or open, what blocks most first."""
    assert snapshot.round is not None
    names = {item.row.transactional_id for item in snapshot.round.items} | plans.keys()
    left = {one.kafka_id: one for one in snapshot.round.blockers}
    rows: list[tuple[tuple[float, ...], str, OpenRow]] = []
    for item in snapshot.round.items:
        blocker = left.pop(item.row.kafka_id(item.incarnation), None)
        if item.needs_recovery:
            planned = plans.get(settled_with(item.row.transactional_id, names))
            unseen = (0, 0, -len(item.partitions), -(item.waits_for_s or 0.0))
            row = _open_row(item, blocker, planned, snapshot, enabled)
            rows.append((unseen if blocker is None else weight(blocker), row.name, row))
    rows += [
        (weight(one), one.kafka_id, _other_row(one, snapshot.target, enabled))
        for one in left.values()
        if one.open_for_s >= _NOTICED_S
    ]
    return [row for _, _, row in sorted(rows, key=lambda row: row[:2])]


def _open_row(
    item: IdStatus, blocker: Blocker | None, planned: Planned | None, snapshot: Snapshot, enabled: Collection[Deed]
) -> OpenRow:
    is_open = item.open_for_s is not None
    return OpenRow(
        name=item.row.transactional_id,
        blocks=(partitions_words(item.partitions) or "-") if blocker is None else _blocks(blocker),
        age=duration(item.waits_for_s),
        time_left="no limit" if is_open and item.aborted_in_s is None else duration(item.aborted_in_s),
        decision=_decision(item),
        owner=item.row.owner,
        action="-" if planned is None else f"settle: {will_do(item)}" if _settles(planned) else _leaves(planned),
        because="" if planned is None else planned.because,
        tries="" if planned is None else _tries(snapshot.tries.get(planned.writer, UNTRIED), snapshot.now_s),
        alarming=_alarms(blocker) or (planned is not None and planned.reason in _NEED_A_PERSON),
        links=[
            *(() if planned is None else _links(snapshot.target, planned.writer, enabled, Deed.SETTLE)),
            *(_links(snapshot.target, item.row.transactional_id, enabled, Deed.TERMINATE) if is_open else ()),
        ],
    )


def _decision(item: IdStatus) -> str:
    """What the database has decided, and what of its row shows that."""
    word, state = row_word(item), item.row.prepared
    if word == "-":
        return "undecided: would be aborted; its row does not name it"
    named = f"its row names producer {state.producer_id}, epoch {state.epoch}"
    seen = ", which is what Kafka shows as open" if item.decided_is_open else ""
    return f"decided: will be committed; {named}{seen}" if word == "decided" else f"{word}; {named}"


def _other_row(one: Blocker, target: str, enabled: Collection[Deed]) -> OpenRow:
    """A transaction that no row of this target names."""
    return OpenRow(
        name=one.kafka_id,
        blocks=_blocks(one),
        age=duration(one.open_for_s),
        time_left="no limit" if one.aborted_in_s is None else duration(one.aborted_in_s),
        decision="not ours: not known here",
        owner=one.maker,
        action="none: not ours",
        because=one.way_on,
        tries="",
        alarming=_alarms(one),
        is_ours=False,
        links=_links(target, one.kafka_id, enabled, Deed.TERMINATE),
    )


def _alarms(blocker: Blocker | None) -> bool:
    return blocker is not None and blocker.calls_for_a_person


def _blocks(one: Blocker) -> str:
    return blocks_words(one) + (f"; groups that stand still: {groups_words(one)}" if one.groups else "")


def _waiting(snapshot: Snapshot, plans: dict[str, Planned], enabled: Collection[Deed]) -> list[WaitingRow]:
    assert snapshot.round is not None
    shown = []
    for one in sorted(snapshot.round.waiting, key=lambda one: (-one.waiting.rows, one.writer)):
        planned = plans.get(one.writer)
        about = "" if one.waiting.exact else "about "
        shown.append(
            WaitingRow(
                name=one.writer,
                messages=f"{about}{one.waiting.rows:,}",
                size=f"{about}{one.waiting.size:,} bytes",
                oldest=duration(one.waiting.oldest_s),
                aside=f"{one.aside:,}",
                action="-" if planned is None else "settle" if _settles(planned) else _leaves(planned),
                because="" if planned is None else planned.because,
                tries="" if planned is None else _tries(snapshot.tries.get(one.writer, UNTRIED), snapshot.now_s),
                alarming=one.aside > 0,
                links=[
                    *_links(snapshot.target, one.writer, enabled, *([Deed.SETTLE] if one.waiting.rows else [])),
                    *_links(snapshot.target, one.writer, enabled, *([Deed.REPLAY, Deed.DROP] if one.aside else [])),
                ],
            )
        )
    return shown


def _batch_row(one: UnfinishedBatch, words: str) -> BatchRow:
    batch = one.batch
    return BatchRow(
        name=batch.batch_id,
        sink=batch.sink,
        phase=batch.phase,
        partitions=f"{batch.written_partitions} of {batch.partition_count}",
        started="-" if batch.started_at is None else f"{batch.started_at:%Y-%m-%d %H:%M:%S}",
        nobody_since="-" if one.nobody_since is None else f"{one.nobody_since:%Y-%m-%d %H:%M:%S}",
        because=words,
        alarming=batch.phase == "failed" or one.nobody_since is not None,
    )


def _settles(planned: Planned) -> bool:
    return planned.action is Action.SETTLE


def _leaves(planned: Planned) -> str:
    if planned.due_in_s is None or planned.reason not in SILENT_SO_FAR:
        return "leave"
    return f"leave; settle in {duration(planned.due_in_s)} if its owner stays silent"


def _tries(tries: Tries, now_s: float) -> str:
    if tries.last_s is None:
        return "none"
    last = f"last {duration(now_s - tries.last_s)} ago"
    return f"{last}, next in {duration(max(0.0, tries.next_s - now_s))}" if tries.failures else last


def duration(seconds: float | None) -> str:
    """A time for people: ``12 s``, ``3 min 20 s``, ``5 h 10 min``, ``2 d 3 h``; ``-`` for none."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", _MINUTE_S, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit} {rest} {smaller}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"
