"""The parts of a state of the search: a database row, processes, and budgets for what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dualwrite.protocol.lives import ProducerState, WriteState
from dualwrite.protocol.prepared_state import Engine, FirstOffset, PreparedTxnState
from dualwrite.protocol.process import Doubt
from dualwrite.protocol.settle import Ended, Knowledge
from dualwrite.protocol.settle_native import NativeKnowledge
from dualwrite.protocol.values import Outcome, Partition, ShownProducer

Label = tuple[int, int]
"""A transaction: its incarnation, and its number there."""

NOTHING = PreparedTxnState()
TOPIC = "t"
PLACES = ((TOPIC, 0), (TOPIC, 1))


@dataclass(frozen=True, eq=False)
class ExactState(PreparedTxnState):
    """A native state that is told apart by everything that it names.

    Producer id and epoch name one transaction of one history. The search goes through many, in which the same id and epoch have
    written at other offsets.
    """

    @property
    def _identity(self) -> tuple[object, ...]:
        return self.engine, self.producer_id, self.epoch, self.incarnation, self.first_offsets, self.further


class Lock(NamedTuple):
    """The row's lock, with what is going to be committed. An orphan is a session whose process has turned away.

    A settler that holds it while it retires an id commits nothing: it has no ``prepared``.
    """

    holder: int
    label: Label
    prepared: PreparedTxnState | None
    orphan: bool = False


class Decision(NamedTuple):
    """A committed transaction of the database, and the state that it wrote into the row."""

    label: Label
    prepared: PreparedTxnState


class Database(NamedTuple):
    """The row, the incidents, and in ``decided`` the users' rows: the transactions that are committed, in order.

    ``fence`` is the row's ``settle_fence``, for native transactions. ``flying`` is a decision with its COMMIT, in one text, that
    the server does not have yet: it holds no lock.
    """

    incarnation: int = 0
    owner: int = 0
    settled: int = 0
    prepared: PreparedTxnState = NOTHING
    completed: Outcome | None = None
    incidents: tuple[tuple[Label, Outcome], ...] = ()
    decided: tuple[Decision, ...] = ()
    lock: Lock | None = None
    fence: int | None = None
    flying: Lock | None = None

    def has(self, label: Label) -> bool:
        """Whether the transaction is committed here."""
        return any(decision.label == label for decision in self.decided)

    def label_of(self, prepared: PreparedTxnState) -> Label | None:
        """The committed transaction that a state names, the newest if there are several."""
        return next((decision.label for decision in reversed(self.decided) if decision.prepared == prepared), None)


class Process(NamedTuple):
    """One process: ``doing`` names its next step.

    ``owner`` is who it is for the row: the first incarnation that it has claimed. ``known`` is the newest decision that it
    knows of. ``item`` is the incarnation that it settles, ``row`` what its claim has read. ``ours`` is its transaction. Only
    where markers may be skipped: ``sent`` is where that has written or tried to, ``ended`` what Kafka has answered the end of,
    while that is not known, and ``undecided`` where it has left something open, by incarnation, when it threw its producer away.
    A native owner always has these. ``unanswered`` is where a copy of its messages may still come, and ``apart`` the incarnation
    that a settler has settled before the others, by the rules for native transactions. ``rolled_back``: the database has ended its
    transaction, and it has not noticed. ``shown`` is what the leaders have answered about its last transaction, not read yet.
    ``fenced``: its doubt has claimed the row, so it must claim before its next transaction.
    """

    doing: str = "claim"
    todo: int = 0
    owner: int = 0
    incarnation: int = 0
    number: int = 0
    producer_id: int = -1
    epoch: int = -1
    sequences: tuple[int, int] = (0, 0)
    firsts: tuple[int, int] = (-1, -1)
    producer: ProducerState | None = None
    write: WriteState | None = None
    ours: PreparedTxnState | None = None
    known: PreparedTxnState | None = None
    row: tuple[PreparedTxnState, Outcome | None, int] | None = None
    item: int = 0
    knowledge: Knowledge | NativeKnowledge | None = None
    seen: tuple[int | None, ...] | None = None
    doubt: Doubt | None = None
    sent: frozenset[Partition] = frozenset()
    ended: Ended | None = None
    undecided: tuple[tuple[int, frozenset[Partition]], ...] = ()
    engine: Engine = Engine.LIBRDKAFKA
    unanswered: frozenset[Partition] = frozenset()
    apart: int = 0
    rolled_back: bool = False
    shown: tuple[tuple[Partition, ShownProducer], ...] | None = None
    fenced: bool = False

    @property
    def label(self) -> Label:
        """The transaction that it is at."""
        return self.incarnation, self.number


DONE = Process("done")
STOPPED = Process("stopped")
"""A settler that leaves the rest to a person."""


class Budgets(NamedTuple):
    """How often each misfortune may still happen.

    Attributes:
        delay: A request stays in the network, is sent twice, or its answer is lost.
        answer: A COMMIT of the database is not answered.
        claim: A claim's COMMIT is not answered.
        abort: The user's code fails, or a COMMIT does.
        failure: A message fails for good, and the client raises its epoch.
        timeout: The broker times an open transaction out.
        expire: The coordinator forgets an id that is at rest.
        terminate: An operator force-terminates an open transaction.
        marker: A tool writes an abort marker past the coordinator, for an owner that is none any more.
        retention: A partition loses what lies before its last stable offset.
        forgotten: A marker is skipped, as its partition has no leader at that moment (KAFKA-20734).
        unseen: The database rolls back an owner's transaction, which does not notice: another process sent ROLLBACK on its
            connection, say.
    """

    delay: int = 0
    answer: int = 0
    claim: int = 0
    abort: int = 0
    failure: int = 0
    timeout: int = 0
    expire: int = 0
    terminate: int = 0
    marker: int = 0
    retention: int = 0
    forgotten: int = 0
    unseen: int = 0


def prepared_state(process: Process, *, witnesses: int = len(PLACES)) -> PreparedTxnState:
    """The state of what the process has produced: its first offset in each partition, as far as it is known.

    A native state names at most ``witnesses`` of them.
    """
    if process.engine is Engine.NATIVE:
        shown = dict(zip(PLACES, process.firsts, strict=True))
        sent = {
            place: shown[place] if shown[place] >= 0 and PLACES.index(place) < witnesses else None
            for place in process.sent
        }
        return ExactState.native(process.producer_id, process.epoch, process.incarnation, sent, {TOPIC: "id"})
    firsts = tuple(
        FirstOffset(topic, number, process.firsts[number], "id")
        for topic, number in PLACES
        if process.firsts[number] >= 0
    )
    return PreparedTxnState(process.producer_id, process.epoch, process.incarnation, firsts)


def name(label: Label) -> str:
    """A transaction for people."""
    return f"{label[0]}.{label[1]}"
