"""What an operator sees and does: what open transactions block, and when one may be ended, or an id deleted, by hand.

What open transactions block: the records behind their first offsets, and the consumer groups that stand still there.

A partition gives ``read_committed`` consumers nothing from its last stable offset on. That is the first offset of the oldest
transaction open there, whoever's it is. So a transaction blocks the records from its own first offset to the high watermark;
but a group that has read everything before the last stable offset waits for the one that begins exactly there. When that one
ends, the group gets as far as the next.

Transactions of other programs count in the same way, and only their own programs know what was decided about them. So each is
shown with its likely maker, and with what an operator can do about it.

Decisions behind what people do by hand: end an open transaction by force, and delete ids for good.

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

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Final

from dualwrite.protocol.values import NEVER_MS, TransactionStatus, TransactionView, is_drawn, parsed, writer_of

Partition = tuple[str, int]

# As Kafka's PartitionsWithLateTransactionsCount, but without what that adds: the brokers' transaction.max.timeout.ms. Where
# it is raised, as it should be for this library, Kafka's metric never rises.
LATE_S: Final = 300.0
_STOPS_FOR_S: Final = 120.0
"""A group may wait that long before a person is called: most owners come back or are settled sooner."""

_STREAMS: Final = re.compile(r".+-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}-\d+")
"""``application.id``, a process's UUID and the number of its thread: Kafka Streams' ``StreamsProducer``."""
_FLINK: Final = re.compile(r".+-\d+-\d+")
"""A prefix, a subtask and a checkpoint or a counter: Flink's ``TransactionalIdFactory``."""


@dataclass(frozen=True)
class PartitionEnds:
    """Where a partition ends for its readers, as its leader says.

    Attributes:
        stable: Its last stable offset.
        high: Its high watermark.
        first_offsets: By producer id, where its open transaction begins; None if the leader does not tell us.
        standing: Consumer groups that have read everything before the last stable offset, and the offsets that they have
            committed.
    """

    stable: int
    high: int
    first_offsets: Mapping[int, int] | None = None
    standing: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldPartition:
    """A partition of an open transaction.

    Attributes:
        topic: The topic.
        partition: The number.
        first_offset: The transaction's first offset there; None if it has written nothing yet, or if that is not known.
        records: The offsets from there to the high watermark: the transaction's own records, and all behind them. None if
            that is not known.
    """

    topic: str
    partition: int
    first_offset: int | None = None
    records: int | None = None


@dataclass(frozen=True)
class StandingGroup:
    """A consumer group that stands still in one partition until the transaction ends.

    Attributes:
        group: Its ``group.id``.
        topic: The topic.
        partition: The number.
        offset: The offset that it has committed.
        records: How many offsets are behind the last stable one, which it cannot read.
    """

    group: str
    topic: str
    partition: int
    offset: int
    records: int


@dataclass(frozen=True)
class Blocker:
    """An open transaction, as its coordinator shows it, and what it blocks.

    Attributes:
        kafka_id: Kafka's ``transactional.id``.
        status: The coordinator's status.
        producer_id: Its producer's id.
        epoch: Its producer's epoch.
        open_for_s: Seconds since it began.
        aborted_in_s: Seconds until the broker aborts it; None if it never does.
        partitions: Its partitions.
        groups: The consumer groups that stand still at its first offset.
    """

    kafka_id: str
    status: TransactionStatus
    producer_id: int
    epoch: int
    open_for_s: float
    aborted_in_s: float | None
    partitions: tuple[HeldPartition, ...] = ()
    groups: tuple[StandingGroup, ...] = ()

    @property
    def records(self) -> int | None:
        """The offsets that it withholds, in all partitions that are known; None if none is."""
        known = [held.records for held in self.partitions if held.records is not None]
        return sum(known) if known or not self.partitions else None

    @property
    def standing(self) -> Mapping[str, int]:
        """By consumer group that stands still, how many offsets it cannot read."""
        found: dict[str, int] = {}
        for one in self.groups:
            found[one.group] = found.get(one.group, 0) + one.records
        return found

    @property
    def late_in(self) -> Sequence[HeldPartition]:
        """The partitions that it has held back for more than five minutes; among them those of which it is not known."""
        return [held for held in self.partitions if held.records != 0] if self.open_for_s > LATE_S else []

    @property
    def calls_for_a_person(self) -> bool:
        """Whether it has held back readers for so long that the alerts call somebody."""
        return bool(self.late_in or (self.groups and self.open_for_s > _STOPS_FOR_S))

    @property
    def writer(self) -> str | None:
        """The name of the dualwrite writer that began it; None if this library did not."""
        named = parsed(self.kafka_id)
        return writer_of(named[0]) if named is not None and is_drawn(named[1]) else None

    @property
    def maker(self) -> str:
        """The program that the form of its id speaks for."""
        if self.writer is not None:
            return "dualwrite"
        if _STREAMS.fullmatch(self.kafka_id):
            return "Kafka Streams, by its id"
        return "Flink, by its id" if _FLINK.fullmatch(self.kafka_id) else "another program"

    @property
    def way_on(self) -> str:
        """What an operator can do about it, if no row here names it."""
        if self.status is not TransactionStatus.ONGOING:
            return "nothing: its coordinator is ending it"
        if self.writer is not None:
            return (
                f"ask the database of the writer {self.writer!r}: run `dualwrite recover {self.writer}` with that one"
            )
        ends = "its program" if self.aborted_in_s is None else "its program, or Kafka when its time is over,"
        return (
            f"{ends} ends it. If its program is dead, and its state shows what it decided: "
            f"`dualwrite recover {self.kafka_id} --state {self.producer_id}:{self.epoch}` commits it; "
            f"`dualwrite terminate {self.kafka_id}` aborts it"
        )


def blockers(
    opened: Mapping[str, TransactionView], ends: Mapping[Partition, PartitionEnds], now_ms: float
) -> Sequence[Blocker]:
    """What each open transaction blocks; what blocks most first.

    Args:
        opened: By Kafka's ``transactional.id``, what the present coordinators show as open.
        ends: By partition; one that is missing is not known.
        now_ms: The time in ms since 1970, by the clock that is compared with the coordinators'.
    """
    return sorted((_blocker(kafka_id, view, ends, now_ms) for kafka_id, view in opened.items()), key=weight)


def weight(one: Blocker) -> tuple[float, ...]:
    """The key to sort by: standing groups, then withheld records, then partitions, then age; the most comes first."""
    return -len(one.standing), -(one.records or 0), -len(one.partitions), -one.open_for_s


def withheld(some: Iterable[Blocker]) -> int:
    """The offsets that these transactions together withhold: in each partition those behind the first one's start."""
    most: dict[Partition, int] = {}
    for held in (held for one in some for held in one.partitions):
        key = (held.topic, held.partition)
        most[key] = max(most.get(key, 0), held.records or 0)
    return sum(most.values())


def late_partitions(some: Iterable[Blocker]) -> frozenset[Partition]:
    """The partitions that these transactions have held back for more than five minutes."""
    return frozenset((held.topic, held.partition) for one in some for held in one.late_in)


def standing_groups(some: Iterable[Blocker]) -> frozenset[str]:
    """The consumer groups that stand still at one of these transactions."""
    return frozenset(group.group for one in some for group in one.groups)


def _blocker(kafka_id: str, view: TransactionView, ends: Mapping[Partition, PartitionEnds], now_ms: float) -> Blocker:
    open_for_s = 0.0 if view.started_ms is None else max(0.0, (now_ms - view.started_ms) / 1000)
    partitions, groups = [], []
    for key in sorted(view.partitions):
        there = ends.get(key)
        if there is None:
            partitions.append(HeldPartition(*key))
            continue
        first = _first_offset(there, view.producer_id)
        partitions.append(HeldPartition(*key, first, 0 if first is None else max(0, there.high - first)))
        if first is not None and first <= there.stable < there.high:
            behind = there.high - there.stable
            groups += [StandingGroup(group, *key, offset, behind) for group, offset in sorted(there.standing.items())]
    timeout_s = None if view.timeout_ms in {None, NEVER_MS} else view.timeout_ms / 1000
    return Blocker(
        kafka_id,
        view.status,
        view.producer_id,
        view.epoch,
        open_for_s,
        None if timeout_s is None else max(0.0, timeout_s - open_for_s),
        tuple(partitions),
        tuple(groups),
    )


def _first_offset(there: PartitionEnds, producer_id: int) -> int | None:
    """Where the producer's transaction begins there.

    If the leader does not tell, it counts as the one at the last stable offset: of all that are open there, it may be.
    """
    if there.first_offsets is not None:
        return there.first_offsets.get(producer_id)
    return there.stable if there.stable < there.high else None


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
