"""Decisions behind what people do by hand: end an open transaction by force, and delete ids for good.

Both destroy something, so both are allowed only where what the servers show leaves no doubt.

=====================  =================  =================  ==============================================
row                    Kafka              ``lose_decided``   step
=====================  =================  =================  ==============================================
names what is open     Ongoing            no                 refuse: recovery completes it
names what is open     Ongoing            yes                abort it, then settle, which records the loss
names something else   something is left  any                settle, which aborts what is undecided
any                    nothing is left    any                nothing
there is none          no such id         any                unknown
there is none          not Ongoing        any                nothing
there is none, but     Ongoing            no                 refuse: the row of another database may name it
the name is ours
there is none, but     Ongoing            yes                abort it; there is no row to record a loss in
the name is ours
there is none          Ongoing            any                abort it: only its own application could tell
=====================  =================  =================  ==============================================

The transaction of another program may have been decided elsewhere, and no row here could say so. So this table leaves it to
the operator, as KIP-939 does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from dualwrite.protocol.values import TransactionStatus, writer_of


class TerminateStep(Enum):
    """The step for one transactional id."""

    UNKNOWN = "nobody knows the id"
    NOTHING = "nothing is open"
    REFUSE = "leave a decided transaction to recovery"
    SETTLE = "claim and settle: what is undecided is aborted"
    LOSE = "claim, abort what the database has decided, and settle, which records the loss"
    ABORT = "abort a transaction that has no row"


def step_with_row(*, needs_settling: bool, decided_is_open: bool, lose_decided: bool) -> TerminateStep:
    """The step for an id that has a row.

    ``decided_is_open`` says that the open transaction is the one that the row names; ``lose_decided``, that the caller gives
    up what the database has decided.
    """
    if decided_is_open:
        return TerminateStep.LOSE if lose_decided else TerminateStep.REFUSE
    return TerminateStep.SETTLE if needs_settling else TerminateStep.NOTHING


def step_without_row(status: TransactionStatus, *, is_ours: bool, lose_decided: bool) -> TerminateStep:
    """The step for a Kafka id that has no row. ``status`` is out of transition.

    ``is_ours`` says that the id has the form that this library gives its own; ``lose_decided``, that the caller gives up what
    a database may have decided.
    """
    if status is TransactionStatus.NO_SUCH_ID:
        return TerminateStep.UNKNOWN
    if status is not TransactionStatus.ONGOING:
        return TerminateStep.NOTHING
    return TerminateStep.REFUSE if is_ours and not lose_decided else TerminateStep.ABORT


# Decides which transactional ids may be forgotten: unused ones with nothing unsettled and no unacknowledged loss.


@dataclass(frozen=True)
class Facts:
    """The facts about one id.

    ``unsettled``: recovery would change something, or a transaction of the id is open in Kafka or the database. ``leased``: a
    worker holds its slot, or may continue with it. ``has_open_incident``: nobody has acknowledged a recorded loss of it.
    """

    untouched_for_s: float
    unsettled: bool = False
    leased: bool = False
    has_open_incident: bool = False


def reason_to_keep(facts: Facts, untouched_for_s: float) -> str | None:
    """The most urgent reason why the id must stay; None if it may go."""
    if facts.unsettled:
        return "unsettled: run dualwrite recover"
    if facts.has_open_incident:
        return "a loss that nobody has acknowledged: see dualwrite status"
    if facts.leased:
        return "a worker holds it"
    if facts.untouched_for_s < untouched_for_s:
        return f"used {facts.untouched_for_s / 86400:.1f} days ago"
    return None


def reasons_to_keep(facts: Mapping[str, Facts], untouched_for_s: float) -> Mapping[str, str]:
    """Why ids must stay, by id. All ids of a writer stay together: a lane without the first lane has no guard."""
    own = {name: reason_to_keep(found, untouched_for_s) for name, found in facts.items()}
    kept = {writer_of(name) for name, why in own.items() if why is not None}
    return {name: why or "another id of its writer stays" for name, why in own.items() if writer_of(name) in kept}


def by_writer(transactional_ids: Iterable[str]) -> Mapping[str, list[str]]:
    """The ids of each writer, in order."""
    found: dict[str, list[str]] = {}
    for name in sorted(transactional_ids):
        found.setdefault(writer_of(name), []).append(name)
    return found


# What is kept of an action: its intent is stored before the deed, its outcome after it. If the process is killed in between,
# the record says so: it was begun, and how it ended is not known.


class Deed(Enum):
    """What people, and the service that settles, do with the ids of a database."""

    SETTLE = "settle"
    TERMINATE = "terminate"
    ACKNOWLEDGE = "acknowledge"
    REPLAY = "replay"
    DROP = "drop"


def counted(count: int, one: str, several: str | None = None) -> str:
    """A number with its noun."""
    return f"1 {one}" if count == 1 else f"{count:,} {several or f'{one}s'}"


def number_ranges(numbers: Sequence[int]) -> str:
    """Rising numbers, with runs of them as ranges: ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


class Ended(Enum):
    """How an action ended. What was refused has committed, aborted, sent and deleted nothing."""

    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True)
class Intent:
    """What is about to be done.

    Attributes:
        action_id: Names this action alone: at most 32 characters.
        subject: The id or the writer; or what several begin with, followed by ``*``.
        deed: What.
        detail: What exactly, in words: which messages, which loss, what is given up.
        reason: Why, as the person gave it.
        actor: Who.
        program: Where it ran: the program with its process.
    """

    action_id: str
    subject: str
    deed: Deed
    detail: str
    reason: str
    actor: str
    program: str


@dataclass(frozen=True)
class End:
    """How an action ended, in a word and in words."""

    action_id: str
    outcome: Ended
    result: str


@dataclass(frozen=True)
class ActionRecord:
    """One line of the history.

    Attributes:
        intent: What was to be done.
        begun_at: When the intent was stored.
        ended_at: When the outcome was; None if it was not.
        outcome: None if it is not known: the process still works on it, or was killed.
        result: What was done, or what hindered it.
    """

    intent: Intent
    begun_at: datetime
    ended_at: datetime | None = None
    outcome: Ended | None = None
    result: str | None = None
