"""Values that every part of the protocol shares: what Kafka and the rows show, names, ids and what callers may give.

What can be seen of a transaction comes first, then the rows as values, the names of writers, lanes and incarnations,
the comparison of what is seen with a prepared state, the arguments that are refused, and the errors for a database and
a cluster that do not belong together. They stand in one place because each decision of the protocol takes some and
gives others.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Final, Literal, NamedTuple, TypeAlias, get_args, overload

from dualwrite.errors import ConfigurationError, DatabaseWentBack
from dualwrite.protocol.prepared_state import PreparedTxnState


class TransactionStatus(Enum):
    """The coordinator's status of a transactional id (``DescribeTransactions``); ``NO_SUCH_ID`` if it does not know the id."""

    NO_SUCH_ID = "no such id"
    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    DEAD = "Dead"
    PREPARE_EPOCH_FENCE = "PrepareEpochFence"


OPEN: Final = frozenset(
    {
        TransactionStatus.ONGOING,
        TransactionStatus.PREPARE_COMMIT,
        TransactionStatus.PREPARE_ABORT,
    }
)
"""While these are shown, the transaction has not ended in every partition."""
IN_TRANSITION: Final = frozenset(
    {
        TransactionStatus.PREPARE_COMMIT,
        TransactionStatus.PREPARE_ABORT,
        TransactionStatus.PREPARE_EPOCH_FENCE,
        TransactionStatus.DEAD,
    }
)
"""While these are shown, the coordinator is at work on the id: its next status is not up to a client."""
NEVER_MS: Final = 2_147_483_647
"""The transaction timeout that never expires (KIP-939)."""


@dataclass(frozen=True)
class TransactionView:
    """The coordinator's view of one transactional id at one moment. Starts are in ms since 1970; None if there is none.

    Producer id and epoch are -1 if there is none. ``timeout_ms`` is what the producer asked for; None if the id is unknown.
    ``partitions`` were added to the current transaction. ``newest_started_ms`` is of the newest transaction since the id was
    initialised, even if it has ended.
    """

    status: TransactionStatus
    producer_id: int = -1
    epoch: int = -1
    started_ms: int | None = None
    timeout_ms: int | None = None
    partitions: tuple[tuple[str, int], ...] = ()
    newest_started_ms: int | None = None


@dataclass(frozen=True, order=True)
class OpenTransaction:
    """A transaction of one producer that is open in a partition, as its leader shows it.

    ``epoch`` is the one under which the producer last wrote there, and ``start`` the transaction's first offset there.
    """

    partition: tuple[str, int]
    epoch: int
    start: int


@dataclass(frozen=True)
class ShownProducer:
    """One producer in one partition, as its leader shows it.

    ``epoch`` is -1 if the leader does not know it. ``open_from`` is the first offset of its open transaction, if it has one.
    """

    epoch: int = -1
    open_from: int | None = None


class EndAnswer(Enum):
    """The coordinator's answer to ``EndTxn``."""

    ENDED = "ended"
    IN_PROGRESS = "in progress"
    FENCED = "fenced"
    NO_SUCH_ID = "no such id"
    INVALID_STATE = "invalid state"


class LogProof(Enum):
    """The proof that the logs of a transaction's partitions give of its outcome.

    ``COMMITTED`` and ``ABORTED``: its own records are there, and the first control record of its producer after them is
    that marker. ``PARTLY``: that is a commit marker in some partitions, and others show none. ``OPEN``: its records are there
    and no marker yet. ``UNKNOWABLE``: its records are gone (retention, compaction, truncation, another topic of that name), so
    no marker can be identified as its own.
    """

    COMMITTED = "committed"
    PARTLY = "committed in a part"
    ABORTED = "aborted"
    OPEN = "open"
    UNKNOWABLE = "unknowable"

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of a decided transaction with this proof; None while its log shows none.

        ``PARTLY`` is a commit: settling writes the markers that are missing.
        """
        return _OUTCOMES.get(self)


class Outcome(Enum):
    """The outcome of a decided transaction in Kafka, as recorded in its row."""

    COMMITTED = "committed"
    LOST = "lost"
    UNVERIFIABLE = "unverifiable"


_OUTCOMES = {
    LogProof.COMMITTED: Outcome.COMMITTED,
    LogProof.PARTLY: Outcome.COMMITTED,
    LogProof.ABORTED: Outcome.LOST,
    LogProof.UNKNOWABLE: Outcome.UNVERIFIABLE,
}


# The database's rows as values: the state of one id, a prepared database transaction, and a loss.


@dataclass(frozen=True)
class StateRow:
    """One row of ``kafka_transaction_state``.

    ``prepared`` is the newest decided transaction; the empty state if there was none. ``completed`` is its outcome in Kafka,
    once recorded. ``namespace`` is random text made with the row, and part of every Kafka id. Every claim raises
    ``incarnation``, and the last claimant is the owner. ``settled_incarnation`` and all below it are complete.
    ``settle_fence`` is set while the newest decision is a native transaction that is being settled: from this producer epoch
    on, only settlers act under its Kafka id.

    ``unverified_from`` is the first incarnation that was claimed while Kafka was away, if nobody has compared it with Kafka
    since: none from there on may have asked Kafka for anything. ``cluster_id`` is empty if Kafka was never seen.
    """

    transactional_id: str
    prepared: PreparedTxnState
    namespace: str
    incarnation: int
    settled_incarnation: int
    completed: Outcome | None
    cluster_id: str
    owner: str
    updated_at: datetime
    settle_fence: int | None = None
    unverified_from: int | None = None

    def kafka_id(self, incarnation: int) -> str:
        """The Kafka ``transactional.id`` of an incarnation: it has exactly one writer, ever."""
        return kafka_id(self.transactional_id, self.namespace, incarnation)


class Decision(NamedTuple):
    """The last statement of a dual write, as its owner asks the database for it.

    ``state`` is None to keep the row as it is, because nothing was produced. A row that was deleted and recreated has another
    ``namespace``. The server, if it can, ends the session when COMMIT does not come within ``idle_s``, and the transaction,
    COMMIT included, after ``within_s``. If no answer comes in ``answer_s``, the connection is lost. With ``deferred``, what
    the user's statements have deferred to COMMIT is run first, in the same exchange with the server if the driver can.
    ``waits`` is for :meth:`dualwrite.interfaces.OutboxRows.decide` alone: the number of this decision, by
    :attr:`FirstLook.next_decision`.
    """

    transactional_id: str
    incarnation: int
    state: PreparedTxnState | None = None
    namespace: str | None = None
    idle_s: float | None = None
    within_s: float | None = None
    answer_s: float | None = None
    deferred: bool = False
    waits: int | None = None


class Decided(Enum):
    """What became of a decision that was sent with its COMMIT."""

    COMMITTED = "committed"
    FENCED = "rolled back: the row does not name the incarnation any more"
    LATE = "rolled back: the transaction was too old"


# Messages that wait in the database, and what is known of all of a writer's.

_DECISIONS_OF_ONE: Final = 32  # bits: a lane decides less than four thousand million times before it is claimed again


class OutboxMode(Enum):
    """Which way the messages of a writer go. The database keeps it, in a row for each writer."""

    DIRECT = "direct"
    LATER = "later"


class FirstLook(NamedTuple):
    """What the first statement of a block has read, where messages may wait.

    ``incarnation`` is that of the lane's row, None if there is no row. ``decisions`` is the row's count of decisions of blocks
    whose messages wait.
    """

    incarnation: int | None
    mode: OutboxMode
    decisions: int = 0

    @property
    def next_decision(self) -> int:
        """The number of this block's decision, if its messages wait: for :attr:`Decision.waits`.

        It is greater than all before it, of this incarnation and of older ones, and less than those of every later
        incarnation. So whoever finds it in the row knows that the decision was made, and whoever finds a smaller one that it
        was not.
        """
        return max(self.decisions, (self.incarnation or 0) << _DECISIONS_OF_ONE) + 1


@dataclass(frozen=True)
class PackedColumn(Sequence["bytes | None"]):
    """Many byte strings in one: no object is made for any until somebody asks for it. ``lengths`` has -1 for a null."""

    data: bytes
    lengths: Sequence[int]

    @cached_property
    def _ends(self) -> Sequence[int]:
        return list(accumulate(max(length, 0) for length in self.lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, at: int) -> bytes | None: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes | None]: ...
    def __getitem__(self, at: int | slice) -> bytes | Sequence[bytes | None] | None:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        length, end = self.lengths[at], self._ends[at]
        return None if length < 0 else self.data[end - length : end]


class WaitingMessages(NamedTuple):
    """Messages that wait, in the order of their numbers: a sequence for each column, as ``produce_many`` takes them.

    ``partitions``, ``headers`` and ``timestamps_ms`` are None if no message has any. ``produced_ms`` says since when each
    waits, in ms since 1970, by the database's clock: it travels in a header. ``size`` are the bytes of all keys, values and
    headers. ``more`` says that others wait behind them.
    """

    numbers: Sequence[int]
    topics: Sequence[str]
    values: Sequence[bytes | None]
    keys: Sequence[bytes | None]
    partitions: Sequence[int | None] | None
    headers: Sequence[Sequence[tuple[str, bytes | None]]] | None
    timestamps_ms: Sequence[int | None] | None
    produced_ms: Sequence[int]
    size: int
    more: bool


class Waiting(NamedTuple):
    """How much waits of one writer. ``oldest_s`` is for how long its first message has waited; None if none waits.

    ``exact`` says that all were counted. Of many it is an estimate: see
    :meth:`dualwrite.interfaces.OutboxRows.waiting`.
    """

    rows: int
    size: int
    oldest_s: float | None
    exact: bool


@dataclass(frozen=True)
class AsideMessage:
    """One message that was moved aside, because it could not be sent. Times are by the database's clock."""

    number: int
    writer: str
    transactional_id: str
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    timestamp_ms: int | None
    put_at: datetime
    reason: str
    moved_at: datetime


@dataclass(frozen=True)
class Participant:
    """A database transaction that was prepared (``PREPARE TRANSACTION``), and waits for the decision on its row.

    ``incarnation`` is that of the row when it was prepared, and ``name`` the database's name for the transaction. ``decided``
    says that the row names the Kafka transaction that it was prepared with.
    """

    row: StateRow
    incarnation: int
    name: str
    decided: bool
    prepared_at: datetime


@dataclass(frozen=True)
class Incident:
    """One decided transaction that Kafka does not have, or whose outcome is unknown. It stays until a person has looked.

    ``outcome`` is ``LOST`` or ``UNVERIFIABLE``, and ``detail`` the evidence, for people to read. ``reported_at`` is when it was
    reported to a caller, by an error or a report. Times are by the database's clock.
    """

    transactional_id: str
    prepared_transaction_state: str
    outcome: Outcome
    detail: str
    detected_at: datetime
    acknowledged_at: datetime | None
    reported_at: datetime | None = None

    @property
    def state(self) -> PreparedTxnState:
        """The transaction."""
        return PreparedTxnState.from_string(self.prepared_transaction_state)


# Names of a writer, its lanes and their incarnations, and of a batch's tasks, in the database and in Kafka.

_KAFKA_ID: Final = re.compile(r"(.+)\.([^.]+)\.(0|[1-9][0-9]*)", re.DOTALL)
_NUMBERED: Final = re.compile(r"[1-9][0-9]*")
_OUTBOX: Final = "outbox"
_STREAM: Final = "stream "
_NAMESPACE: Final = re.compile(r"[0-9a-f]{12}")


def lane_id(name: str, number: int) -> str:
    """The transactional id of a lane: the name itself for the first, ``name#number`` for the others."""
    return name if number == 0 else f"{name}#{number}"


def outbox_id(name: str) -> str:
    """The transactional id under which a writer's waiting messages are sent; a lane like the others, without a number."""
    return f"{name}#{_OUTBOX}"


def lane_number(name: str, transactional_id: str) -> int | None:
    """The number of a writer's lane; None for its outbox, and for ids that are no lane of it."""
    if transactional_id == name:
        return 0
    number = _NUMBERED.fullmatch(transactional_id.removeprefix(f"{name}#"))
    return None if number is None or not transactional_id.startswith(f"{name}#") else int(number[0])


def writer_of(transactional_id: str) -> str:
    """The name of the writer, or of the pool, that an id belongs to: lanes and slots are ``name#number``."""
    return transactional_id.partition("#")[0]


def is_of_writer(writer: str, name: str) -> bool:
    """Whether a transactional id, or the Kafka id of one of its incarnations, belongs to that writer."""
    incarnation = parsed(name)
    return writer in {writer_of(name), writer_of(incarnation[0]) if incarnation is not None else None}


def member_id(fleet: str, number: int) -> str:
    """The transactional id of one member of a fleet."""
    return f"{fleet}-{number}"


def kafka_id(transactional_id: str, namespace: str, incarnation: int) -> str:
    """The Kafka ``transactional.id`` of an incarnation: it has exactly one writer, ever."""
    return f"{transactional_id}.{namespace}.{incarnation}"


def parsed(name: str) -> tuple[str, str, int] | None:
    """The transactional id, namespace and incarnation of a Kafka ``transactional.id``; None if it has another form."""
    match = _KAFKA_ID.fullmatch(name)
    return None if match is None else (match[1], match[2], int(match[3]))


def is_drawn(namespace: str) -> bool:
    """Whether a namespace looks like one that this library has drawn. Other programs' transactional ids have none."""
    return _NAMESPACE.fullmatch(namespace) is not None


def pool_of_sink(sink: str) -> str:
    """The name of a sink's pool of slots, which no `DualWriter` uses for its lanes by accident."""
    return f"{sink}.spark"


def owner_prefix(name: str, partition: int | None = None) -> str:
    """The prefix of the names of a batch's or a stream's lease owners, or of those of one partition, and of no others."""
    prefix = f"{json.dumps(name)} "
    return prefix if partition is None else f"{prefix}partition {partition} "


def stream_name(checkpoint_digest: str) -> str:
    """The run name of a stream whose micro-batches are decided as one, made of the digest of its checkpoint location."""
    return f"{_STREAM}{checkpoint_digest}"


def may_own(lease_owner: str, batch_id: str) -> bool:
    """Whether the lease owner may be a task of that batch. The names of a stream's lease owners do not show the batch."""
    return lease_owner.startswith((owner_prefix(batch_id), f'"{_STREAM}'))


# Which transaction it is: comparing what the servers show with what a prepared state names.
#
# librdkafka's transactions share producer id and epoch, so the partitions' first offsets tell them apart. A native
# transaction has an epoch of its own, which names it.

Partition = tuple[str, int]
OpenPlaces = tuple[tuple[Partition, int], ...]
"""Partitions, each with the offset at which its open transaction begins."""
OFFSETS_TOPIC: Final = "__consumer_offsets"
_LAST_EPOCH: Final = 32_766
"""The coordinator gives a new producer id in place of an epoch above it."""


def belongs(state: PreparedTxnState, incarnation: int) -> bool:
    """Whether that incarnation prepared the state."""
    return state.has_transaction and state.incarnation == incarnation


def shows_same_transaction(view: TransactionView, state: PreparedTxnState) -> bool:
    """Whether the coordinator's view may show the state's own transaction.

    Compares producer id and epoch, which are enough for a native state, and, where both are known, start and partitions. The
    view may show more partitions: see :func:`others_than`.
    """
    if (view.producer_id, view.epoch) != (state.producer_id, state.epoch):
        return False
    if state.is_native:
        return True
    if view.partitions and not state.partitions <= set(view.partitions):
        return False
    return view.started_ms is None or state.started_ms is None or view.started_ms == state.started_ms


def another_owner_since(seen: TransactionView, now: TransactionView) -> bool:
    """Whether another producer of the id has been at work between two views of the coordinator's that are at rest.

    The transaction that was seen open may have ended meanwhile, by its own producer or the broker: nothing is left to end
    then. A producer that was initialised since shows an empty state first, and then transactions of another name; or, where
    those of librdkafka share a name, of another start.
    """
    if now.status is TransactionStatus.NO_SUCH_ID:
        return False
    same_ids = (seen.producer_id, seen.epoch) == (now.producer_id, now.epoch)
    if seen.status is not TransactionStatus.ONGOING:
        return not same_ids or seen.status is not now.status
    if now.status is TransactionStatus.ONGOING:
        return not same_ids or seen.started_ms != now.started_ms
    # Its own end shows its epoch, or the next one: that of a native transaction, or of one that timed out.
    return now.status is TransactionStatus.EMPTY or not (same_ids or shows_next_epoch(now, seen))


def shows_next_epoch(now: TransactionView, seen: TransactionView) -> bool:
    """Whether one view shows the epoch after that of another; after the last epoch that is the first of another producer id."""
    if seen.epoch == _LAST_EPOCH and now.producer_id != seen.producer_id:
        return now.epoch == 0
    return (now.producer_id, now.epoch) == (seen.producer_id, seen.epoch + 1)


def others_than(state: PreparedTxnState, view: TransactionView) -> frozenset[Partition]:
    """The partitions that the coordinator shows besides those that the state's transaction has written.

    Either they belong to another transaction, which then has something open there; or a late request of an earlier transaction
    has added them, and nothing is open there. Consumer offsets may be part of any transaction, so they are left out.
    """
    return frozenset(key for key in view.partitions if key[0] != OFFSETS_TOPIC) - state.partitions


def is_older(state: PreparedTxnState, than: PreparedTxnState) -> bool:
    """Whether the state was certainly decided before ``than``, of the same transactional id; False if that is unknown.

    Epochs of native transactions rise, and so do offsets in one partition of one topic.
    """
    if not than.has_transaction:
        return False
    if not state.has_transaction:
        return True
    if state.incarnation is not None and than.incarnation is not None and state.incarnation != than.incarnation:
        return state.incarnation < than.incarnation
    if state.is_native and than.is_native and state.producer_id == than.producer_id:
        return state.epoch < than.epoch
    firsts = {(first.topic_id, first.partition): first.offset for first in state.first_offsets}
    return any(
        first.topic_id is not None and firsts.get((first.topic_id, first.partition), first.offset) < first.offset
        for first in than.first_offsets
    )


def is_open(
    state: PreparedTxnState, open_offsets: Mapping[tuple[str, int], int | None], *, exactly: bool = False
) -> bool:
    """Whether the state's transaction is open in every partition that still exists, of which there must be at least one.

    ``open_offsets`` has, for each partition that still exists, where the open transaction of the state's producer begins, or
    None. One first offset identifies the transaction, as every later one begins at another offset; if the others match too, no
    operator has ended it by hand in one of them. In a partition that is open from an earlier offset on, the broker has
    forgotten to end an earlier transaction, and will end both; with ``exactly`` it does not count.
    """
    shown = [
        (start := open_offsets[key]) == first.offset or (start is not None and start < first.offset and not exactly)
        for first in state.first_offsets
        if (key := (first.topic, first.partition)) in open_offsets
    ]
    return bool(shown) and all(shown)


def own_among(state: PreparedTxnState, still_open: OpenPlaces) -> frozenset[Partition]:
    """The partitions whose open transaction includes the records of the state's transaction."""
    firsts = {(first.topic, first.partition): first.offset for first in state.first_offsets}
    return frozenset(key for key, start in still_open if key in firsts and start <= firsts[key])


# The rules for durations, counts, ids and prefixes that callers give: the same for the Python calls and for the
# commands.
#
# A script passes an empty id or prefix when a variable is unset, and NaN when a computation has failed. Every id begins
# with the empty prefix, and no comparison with NaN is true: both would select what nobody has asked for.

LONGEST_S: Final = 100 * 365 * 86400.0
"""A hundred years: more than threads can wait, and databases subtract from a time."""
_LONGEST_NAME: Final = 240  # leaves room for a lane's number


def check_seconds(name: str, seconds: float, *, zero: bool = False) -> None:
    """Refuse a duration that is no time: NaN, infinite, negative, or 0 unless ``zero``."""
    if not math.isfinite(seconds) or not 0 <= seconds <= LONGEST_S or (seconds == 0 and not zero):
        raise ConfigurationError(
            f"{name} is {seconds:g} s",
            next_step=f"give {'0 or more' if zero else 'more than 0'} seconds, and at most {LONGEST_S:g}, a hundred years",
        )


def check_not_empty(name: str, given: str, instead: str = "") -> None:
    """Refuse an empty text. ``instead`` says how to ask for what it may have meant."""
    if not given:
        raise ConfigurationError(f"{name} is empty", next_step=f"give one{instead}: an unset variable selects nothing")


def check_selection(transactional_id: str | None, prefix: str | None) -> None:
    """Refuse a selection of ids that is not an id, a prefix, or neither of the two, which selects every id."""
    if transactional_id is not None and prefix is not None:
        raise TypeError("transactional_id and prefix cannot be combined")
    if transactional_id is not None:
        check_not_empty("the transactional id", transactional_id)
    if prefix is not None:
        check_not_empty("the prefix", prefix, ", or none at all (--all) for every id")


def check_count(name: str, count: int, *, least: int = 1) -> None:
    """Refuse a number that is too small."""
    if count < least:
        raise ConfigurationError(f"{name} is {count}", next_step=f"give at least {least}")


def check_writer_name(transactional_id: str) -> None:
    """Refuse a name that no writer can have."""
    if not 1 <= len(transactional_id) <= _LONGEST_NAME or "#" in transactional_id:
        raise ConfigurationError(
            f"{transactional_id!r} cannot be a transactional id",
            next_step=f"use 1 to {_LONGEST_NAME} characters without '#', which separates the numbers of lanes",
        )


WhenRefused: TypeAlias = Literal["aside", "stop"]
"""What becomes of a message that waits and that Kafka refuses for good."""


@dataclass(frozen=True, kw_only=True)
class WriterLimits:
    """The times and counts of a writer. Each has a default: pass only those that you change.

    A *unit* is the work of one caller of :meth:`DualWriter.submit`; a *group* is the units that commit in one dual write.

    Args:
        max_lanes: The maximum number of concurrent transactions. A consumer derives it from its ``workers``. The writer owns up
            to twice as many transactional ids, less one: see "Lanes" in the architecture.
        timeout_s: Limits opening, and each ending of a transaction, in seconds.
        lane_timeout_s: How long a transaction waits for a free lane, and then for the lane to be ready, in seconds. Also how
            long ``submit`` waits for a place.
        flush_timeout_s: How long a transaction waits for an answer from Kafka while it holds locks in the database, in seconds:
            for the leaders of a topic, and at its end for acknowledgements. Each answer starts the time again.
        margin_s: The time that must be left of the broker's transaction timeout once the database has committed, in seconds; on
            PostgreSQL also the longest pause between the decision and its COMMIT.
        idle_after_s: After this many seconds without a transaction, the row records that the last one is complete.
        paused_owner_timeout_s: An owner that is paused inside a transaction loses its session of PostgreSQL or MariaDB after
            this many seconds, so that it does not hold its row forever; None leaves the server's own setting.
        group_units: The maximum number of units in a group. PostgreSQL keeps up to 64 savepoints of a transaction in shared
            memory; more of them slow down every query that meets their rows before the commit.
        group_open_s: No unit begins more than this many seconds after the group's first one; the others wait for the next
            group. So the first unit waits at most this long, and for the last unit to run. A group never waits for units.
        group_bytes: No unit begins once the keys and values of the group's messages are larger than this, in bytes.
        waiting_units: The maximum number of units that wait for a group. At that number ``submit`` makes its caller wait, first
            come, first served.
        outbox_refused: What happens to a message that has waited in the database if Kafka refuses it for good, because it is
            too large, say, or its topic is gone. ``aside`` moves it to another table, from which `dualwrite outbox` can put it
            back, and sends the others, including later ones of its key; ``stop`` keeps all waiting until a person acts.
        fallback_after_s: With ``outbox="fallback"``, how long a block waits for an answer from Kafka before its messages wait
            in the database, in seconds. Each answer starts the time again, so a large transaction does not fall back just
            because it takes longer.
        outbox_rows: The maximum number of messages that wait in the database. At that number, blocks are refused, as without
            an outbox. This limit and the next two are compared with what this process last counted.
        outbox_bytes: The same for the bytes of their keys, values and headers. A block whose own messages are larger does not
            fall back.
        outbox_age_s: The same for how long the first of them has waited, in seconds.

    Raises:
        ConfigurationError: A limit cannot work.
    """

    max_lanes: int = 8
    timeout_s: float = 30.0
    lane_timeout_s: float = 10.0
    flush_timeout_s: float = 5.0
    margin_s: float = 10.0
    idle_after_s: float = 60.0
    paused_owner_timeout_s: float | None = 60.0
    group_units: int = 64
    group_open_s: float = 0.25
    group_bytes: int = 16 * 1024 * 1024
    waiting_units: int = 10_000
    outbox_refused: WhenRefused = "aside"
    fallback_after_s: float = 1.0
    outbox_rows: int = 1_000_000
    outbox_bytes: int = 1024 * 1024 * 1024
    outbox_age_s: float = 86_400.0

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        check_seconds("flush_timeout_s", self.flush_timeout_s)
        check_seconds("fallback_after_s", self.fallback_after_s)
        check_seconds("outbox_age_s", self.outbox_age_s)
        if self.paused_owner_timeout_s is not None:
            check_seconds("paused_owner_timeout_s", self.paused_owner_timeout_s)
        # At 0 s the others still mean something: do not wait, need no margin, record at once, no second unit.
        for name in ("lane_timeout_s", "margin_s", "idle_after_s", "group_open_s"):
            check_seconds(name, getattr(self, name), zero=True)
        for name in ("max_lanes", "group_units", "waiting_units", "outbox_rows", "outbox_bytes"):
            check_count(name, getattr(self, name))
        check_count("group_bytes", self.group_bytes, least=0)
        if self.outbox_refused not in get_args(WhenRefused):
            raise ConfigurationError(f"outbox_refused is {self.outbox_refused!r}", next_step="use 'aside' or 'stop'")


DEFAULT_LIMITS: Final = WriterLimits()


def check_limits(limits: object) -> None:
    """Refuse what is no `WriterLimits`, such as the dictionary that ``kafka`` may be."""
    if not isinstance(limits, WriterLimits):
        raise ConfigurationError(
            f"limits is of type {type(limits).__name__}",
            next_step="give a WriterLimits, such as WriterLimits(max_lanes=16)",
        )


# Things that do not belong together: a database and a Kafka cluster that disagree, tables and a program of other
# versions.
#
# The tables change in two kinds of steps, so that programs of neighbouring versions work side by side. A step that
# *expands* only adds: tables, and columns that may be left out. The program before it does not see the difference. A
# step that *contracts* takes away what only older programs use; its revision is named so (`0007_contract`), since they
# cannot know it otherwise.

_REVISION: Final = re.compile(r"([0-9]{4})(_contract)?")


class TableFit(Enum):
    """How the tables' version goes with the program's own."""

    SAME = "the program was made for these tables"
    OLDER = "the tables lack what the program's own step adds, and the program works without it"
    NEWER = "the tables have more than the program knows, and it works as before"
    TOO_OLD = "the tables are more than one step older"
    TOO_NEW = "the tables are more than one step newer"
    CONTRACTED = "the tables are one step newer, and that step has taken away what the program uses"


def table_fit(found: str, own: str) -> TableFit:
    """Whether a program may work with tables of another version: the one before its own, or the one after if that expands.

    A program works with the tables before its own whichever kind its own step is: before a step that contracts is taken, all
    programs must already be of the version that can do without.
    """
    if found == own:
        return TableFit.SAME
    theirs, ours = _REVISION.fullmatch(found), _REVISION.fullmatch(own)
    if theirs is None or ours is None:
        return TableFit.TOO_NEW  # named in a way that came later
    steps = int(theirs[1]) - int(ours[1])
    if steps == -1:
        return TableFit.OLDER
    if steps == 1:
        return TableFit.NEWER if theirs[2] is None else TableFit.CONTRACTED
    return TableFit.TOO_OLD if steps < 0 else TableFit.TOO_NEW


# A row names its Kafka cluster. While Kafka is away a claim cannot compare it, and a new row does not know it: then the
# text says from which incarnation on nothing was compared. A program that does not know this form takes it for another
# cluster, and refuses the row: it would otherwise use an incarnation without comparing those before it.

_UNVERIFIED: Final = re.compile(r"(?:(.+) )?unverified from ([1-9][0-9]*)", re.DOTALL)


def cluster_text(cluster_id: str, unverified_from: int | None) -> str:
    """What the row says of its cluster: the id; with ``unverified_from``, also that Kafka was not asked since."""
    if unverified_from is None:
        return cluster_id
    return f"{cluster_id} unverified from {unverified_from}".lstrip()


def parse_cluster(text: str) -> tuple[str, int | None]:
    """The cluster's id, empty if it is not known yet, and the first incarnation that was not compared with Kafka."""
    match = _UNVERIFIED.fullmatch(text)
    return (text, None) if match is None else (match[1] or "", int(match[2]))


def other_cluster(row_cluster_id: str, cluster_id: str, transactional_id: str) -> ConfigurationError:
    """The row does not belong to the bootstrap servers' cluster: what is not found there must not be taken for gone."""
    return ConfigurationError(
        f"the row belongs to the Kafka cluster {row_cluster_id!r}, but bootstrap.servers leads to {cluster_id!r}",
        transactional_id=transactional_id,
        next_step="use the address of the right cluster; if the cluster was rebuilt, its messages are gone, and a "
        "person must decide what to do with this row",
    )


def gone_back(
    seen: str, transactional_id: str, forgotten: str | None = None, *, recorded: bool = False
) -> DatabaseWentBack:
    """The database has lost commits, or Kafka has followed a copy of it.

    ``seen`` is the evidence, in words, and ``forgotten`` the text form of a decision that the database has lost. If that is
    ``recorded`` as an incident already, the next opening of the writer succeeds.
    """
    next_step = (
        "messages newer than the database's state are visible in Kafka: stop what uses a copy, compare both; it is recorded "
        "as an incident, and the next opening of the writer succeeds"
        if recorded
        else "messages newer than the database's state may be visible in Kafka: stop what uses a copy, compare both, "
        "then run `dualwrite recover --after-restore`"
    )
    return DatabaseWentBack(
        f"{seen}: the database has gone back in time (restored from a backup, or failed over to a copy that was behind), "
        "or a copy of it is in use at the same time",
        transactional_id=transactional_id,
        next_step=next_step,
        state=forgotten,
    )
