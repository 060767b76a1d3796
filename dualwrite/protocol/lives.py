"""The state machines of the protocol as transition tables, and their interpreter.

Each life is an enumeration of states, one of events, and a table: here of a producer, a dual write and a lane; that of a lease
is in :mod:`dualwrite.protocol.members`, of a batch in :mod:`dualwrite.protocol.batches`, of units in
:mod:`dualwrite.units.records`. No other place assigns a state. An event that the table does not know raises an error and
changes nothing. ``make pictures`` draws the tables for docs/state-diagrams.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, Fenced, IllegalStateError, OutcomeUnverifiable

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


class Machine(Generic[State, Event]):
    """Holds one state and moves it by a table; the only place where a state is assigned.

    An event that the table does not list for the present state raises and changes nothing. ``name`` stands in error messages.
    ``moved`` is called with the new state after each event that leads to another one, and must not raise.
    """

    __slots__ = ("_moved", "_name", "state", "table")

    def __init__(
        self,
        name: str,
        table: Mapping[State, Mapping[Event, State]],
        initial: State,
        *,
        moved: Callable[[State], object] | None = None,
    ) -> None:
        self._name = name
        self.table = table
        self.state = initial
        self._moved = moved

    def allows(self, event: Event) -> bool:
        """Whether the table lists the event for the present state."""
        return event in self.table[self.state]

    def check(self, event: Event) -> None:
        """Raise unless the event is allowed now. Call it before the I/O that the event stands for."""
        if event not in self.table[self.state]:
            raise self._refusal(event)

    def apply(self, event: Event) -> State:
        """Move by the table: the event has happened. One that is not allowed raises, and leaves the state unchanged."""
        following = self.table[self.state].get(event)
        if following is None:
            raise self._refusal(event)
        if following is not self.state:
            self.state = following
            if self._moved is not None:
                self._moved(following)
        return following

    def _refusal(self, event: Event) -> IllegalStateError:
        allowed = ", ".join(sorted(other.value for other in self.table[self.state])) or "nothing"
        return IllegalStateError(
            f"{event.value} is not allowed while the {self._name} is {self.state.value}",
            next_step=f"allowed now: {allowed}",
        )

    def __repr__(self) -> str:
        return f"<{self._name} {self.state.value}>"


# The life of one transactional producer, with KIP-939's gating.
#
# `prepare_transaction` waits until every message is acknowledged, including those that delivery callbacks produce meanwhile.
# Then the producer is *flushed*, and nothing more may be produced, because the name of the transaction lists what it wrote.
# Once the transaction has its name it is prepared, and only commit, abort and complete are allowed.
#
# `init_transactions(keep_prepared_txn=True)` keeps an open transaction until one of the three is called. A request that
# may have been sent twice, or whose answer is missing, leaves the producer *doubtful*: a delayed copy of the request
# may still be on its way and would end the next transaction of the same producer (KAFKA-17754), so there must be no
# next transaction.


class ProducerState(Enum):
    """The states of a producer."""

    __hash__ = object.__hash__  # for speed, as for the events

    CREATED = "created"
    KEPT = "kept"
    READY = "ready"
    BEGUN = "begun"
    FLUSHED = "flushed"
    PREPARED = "prepared"
    FAILED = "failed"
    DOUBTFUL = "doubtful"
    CLOSED = "closed"


class ProducerEvent(Enum):
    """The events in a producer's life."""

    __hash__ = object.__hash__  # Enum's own is slow Python code, and every message looks up its event

    INIT = "init_transactions"
    INIT_KEEPING = "init_transactions(keep_prepared_txn=True)"
    BEGIN = "begin_transaction"
    PRODUCE = "produce"
    SEND_OFFSETS = "send_offsets_to_transaction"
    PREPARE = "prepare_transaction"
    NAME = "the transaction has its name"
    COMMIT = "commit_transaction"
    ABORT = "abort_transaction"
    COMPLETE = "complete_transaction"
    FAIL = "failure"
    DOUBT = "doubt"
    CLOSE = "close"


_PRODUCER, _OF_PRODUCER = ProducerState, ProducerEvent

_ALWAYS: Final = {_OF_PRODUCER.DOUBT: _PRODUCER.DOUBTFUL, _OF_PRODUCER.CLOSE: _PRODUCER.CLOSED}

PRODUCER_LIFE: Mapping[ProducerState, Mapping[ProducerEvent, ProducerState]] = MappingProxyType(
    {
        _PRODUCER.CREATED: {
            _OF_PRODUCER.INIT: _PRODUCER.READY,
            _OF_PRODUCER.INIT_KEEPING: _PRODUCER.KEPT,
            **_ALWAYS,
        },
        _PRODUCER.KEPT: {
            _OF_PRODUCER.COMMIT: _PRODUCER.READY,
            _OF_PRODUCER.ABORT: _PRODUCER.READY,
            _OF_PRODUCER.COMPLETE: _PRODUCER.READY,
            **_ALWAYS,
        },
        _PRODUCER.READY: {
            _OF_PRODUCER.BEGIN: _PRODUCER.BEGUN,
            **_ALWAYS,
        },
        _PRODUCER.BEGUN: {
            _OF_PRODUCER.PRODUCE: _PRODUCER.BEGUN,
            _OF_PRODUCER.SEND_OFFSETS: _PRODUCER.BEGUN,
            _OF_PRODUCER.PREPARE: _PRODUCER.FLUSHED,
            _OF_PRODUCER.COMMIT: _PRODUCER.READY,
            _OF_PRODUCER.ABORT: _PRODUCER.READY,
            _OF_PRODUCER.FAIL: _PRODUCER.FAILED,
            **_ALWAYS,
        },
        _PRODUCER.FLUSHED: {
            _OF_PRODUCER.NAME: _PRODUCER.PREPARED,
            _OF_PRODUCER.ABORT: _PRODUCER.READY,
            _OF_PRODUCER.FAIL: _PRODUCER.FAILED,
            **_ALWAYS,
        },
        _PRODUCER.PREPARED: {
            _OF_PRODUCER.COMMIT: _PRODUCER.READY,
            _OF_PRODUCER.ABORT: _PRODUCER.READY,
            _OF_PRODUCER.COMPLETE: _PRODUCER.READY,
            **_ALWAYS,
        },
        _PRODUCER.FAILED: {
            _OF_PRODUCER.ABORT: _PRODUCER.READY,
            _OF_PRODUCER.FAIL: _PRODUCER.FAILED,
            **_ALWAYS,
        },
        _PRODUCER.DOUBTFUL: _ALWAYS,
        _PRODUCER.CLOSED: {
            _OF_PRODUCER.CLOSE: _PRODUCER.CLOSED,
        },
    }
)

WAY_ON: Mapping[ProducerState, str] = MappingProxyType(
    {
        _PRODUCER.CREATED: "call init_transactions first",
        _PRODUCER.KEPT: "commit, abort or complete the transaction that was kept",
        _PRODUCER.READY: "begin a transaction first",
        _PRODUCER.BEGUN: "commit or abort the transaction first",
        _PRODUCER.FLUSHED: "the transaction is being prepared: wait until it is, or abort it",
        _PRODUCER.PREPARED: "the transaction is prepared: commit, abort or complete it",
        _PRODUCER.FAILED: "abort the transaction",
        _PRODUCER.DOUBTFUL: "close this producer and make a new one: a request of this one may still be on its way",
        _PRODUCER.CLOSED: "make a new producer",
    }
)
"""By state, the advice to a caller whose event the table does not allow."""


# The life of one dual write, in KIP-939's order.
#
# The database commit is the decision. Before it, any failure aborts both sides; after it, Kafka must follow. Between
# the two lies only a COMMIT whose answer is missing: it is *in doubt* until the row resolves it.
#
# Where the messages may wait in the database, Kafka's silence is no failure: they become rows of the transaction, and
# wait once it is decided. What was sent before is left, undecided, and settling aborts it.


class WriteState(Enum):
    """The states of one dual write."""

    __hash__ = object.__hash__  # Enum's own is slow Python code, and every step looks up its event

    BEGUN = "begun"
    CHECKED = "checked"
    PREPARED = "prepared"
    RECORDED = "recorded"
    IN_DOUBT = "in doubt"
    DECIDED = "decided"
    COMPLETED = "completed"
    WAITING = "waiting"
    HANDED_OVER = "handed over"
    LOST = "lost"
    ABORTED = "aborted"


class WriteEvent(Enum):
    """The events of one dual write.

    ``CHECK``: the row named our incarnation, before the first produce. ``PRODUCE``: a message or offsets. ``EXECUTE``: a
    user's statement. ``PREPARE``: every message is acknowledged. ``RECORD``: the row was updated to the prepared state or, if
    nothing was produced, still names our incarnation. ``COMMIT``: the database has committed. ``LOSE_ANSWER``: the answer to
    COMMIT is missing. ``COMPLETE``: Kafka has answered. ``FIND_LOST``: there is proof that the broker aborted it. ``ABORT``:
    both sides have rolled back. ``HAND_OVER``: both sides are prepared, and another process decides. ``FALL_BACK``: Kafka is
    silent, and the messages become rows. ``WAIT``: those rows are committed, and are sent later.
    """

    __hash__ = object.__hash__  # for speed, as for the states

    CHECK = "check"
    PRODUCE = "produce"
    EXECUTE = "execute"
    PREPARE = "prepare"
    RECORD = "record"
    COMMIT = "commit"
    LOSE_ANSWER = "lose the answer"
    COMPLETE = "complete"
    FIND_LOST = "find lost"
    ABORT = "abort"
    HAND_OVER = "hand over"
    FALL_BACK = "fall back"
    WAIT = "wait"


_WRITE, _OF_WRITE = WriteState, WriteEvent

WRITE_LIFE: Mapping[WriteState, Mapping[WriteEvent, WriteState]] = MappingProxyType(
    {
        _WRITE.BEGUN: {_OF_WRITE.CHECK: _WRITE.CHECKED, _OF_WRITE.ABORT: _WRITE.ABORTED},
        _WRITE.CHECKED: {
            _OF_WRITE.PRODUCE: _WRITE.CHECKED,
            _OF_WRITE.EXECUTE: _WRITE.CHECKED,
            _OF_WRITE.FALL_BACK: _WRITE.CHECKED,
            _OF_WRITE.PREPARE: _WRITE.PREPARED,
            _OF_WRITE.ABORT: _WRITE.ABORTED,
        },
        _WRITE.PREPARED: {
            _OF_WRITE.RECORD: _WRITE.RECORDED,
            _OF_WRITE.HAND_OVER: _WRITE.HANDED_OVER,
            _OF_WRITE.ABORT: _WRITE.ABORTED,
        },
        _WRITE.RECORDED: {
            _OF_WRITE.COMMIT: _WRITE.DECIDED,
            _OF_WRITE.LOSE_ANSWER: _WRITE.IN_DOUBT,
            _OF_WRITE.ABORT: _WRITE.ABORTED,
        },
        _WRITE.IN_DOUBT: {
            _OF_WRITE.COMMIT: _WRITE.DECIDED,
            _OF_WRITE.ABORT: _WRITE.ABORTED,
            _OF_WRITE.FIND_LOST: _WRITE.LOST,
        },
        _WRITE.DECIDED: {
            _OF_WRITE.COMPLETE: _WRITE.COMPLETED,
            _OF_WRITE.WAIT: _WRITE.WAITING,
            _OF_WRITE.FIND_LOST: _WRITE.LOST,
        },
        _WRITE.COMPLETED: {},
        _WRITE.WAITING: {},
        _WRITE.HANDED_OVER: {},
        _WRITE.LOST: {},
        _WRITE.ABORTED: {},
    }
)


# The phases of one dual write and its outcome, as observers see them: derived from the states of `write_life`.


class Phase(Enum):
    """The phases that a dual write spends its time in.

    ``LANE``: waiting for a lane, and making it ready. ``BEGIN``: a connection is taken, the database's transaction begins, the
    row is read. ``BODY``: the user's code. ``PREPARE``: the messages are acknowledged. ``RECORD``: the row is updated.
    ``DECIDE``: COMMIT, until its outcome is known. ``COMPLETE``: Kafka commits. ``ABORT``: both sides roll back.
    """

    LANE = "lane"
    BEGIN = "begin"
    BODY = "body"
    PREPARE = "prepare"
    RECORD = "record"
    DECIDE = "decide"
    COMPLETE = "complete"
    ABORT = "abort"


class WriteOutcome(Enum):
    """How a dual write has ended for its caller.

    ``NOT_BEGUN``: it got no lane, or no database transaction. ``FENCED``: aborted, because another owner took over.
    ``COMPLETION_PENDING``: decided, not completed yet. ``UNVERIFIABLE``: decided, and the fate of its messages, or of its
    rows, cannot be known. ``HANDED_OVER``: another process decides. ``WAITING``: committed, and its messages wait in the
    database, or for Kafka's commit.
    """

    COMMITTED = "committed"
    WAITING = "waiting"
    ABORTED = "aborted"
    FENCED = "fenced"
    IN_DOUBT = "in doubt"
    COMPLETION_PENDING = "completion pending"
    LOST = "lost"
    UNVERIFIABLE = "unverifiable"
    HANDED_OVER = "handed over"
    NOT_BEGUN = "not begun"


_WRITTEN, _PHASE = WriteState, Phase

PHASE_FROM: Mapping[WriteState, Phase] = MappingProxyType(
    {
        _WRITTEN.CHECKED: _PHASE.BODY,
        _WRITTEN.PREPARED: _PHASE.RECORD,
        _WRITTEN.RECORDED: _PHASE.DECIDE,
        _WRITTEN.IN_DOUBT: _PHASE.DECIDE,
    }
)
"""The phase that begins with a state. The other phases begin before the first state or inside one: there may be nothing in
Kafka to complete, for instance, and a dual write may abort in any state before the decision."""


def outcome_of(state: WriteState | None, error: BaseException | None) -> WriteOutcome:
    """The outcome for the caller. ``state`` is None if the dual write had no lane."""
    if state is _WRITTEN.COMPLETED:
        return WriteOutcome.COMMITTED
    if state is _WRITTEN.WAITING:
        return WriteOutcome.WAITING
    if state is _WRITTEN.HANDED_OVER:
        return WriteOutcome.HANDED_OVER
    if state in {_WRITTEN.DECIDED, _WRITTEN.LOST}:
        if isinstance(error, OutcomeUnverifiable | DatabaseWentBack):
            return WriteOutcome.UNVERIFIABLE
        lost = state is _WRITTEN.LOST or isinstance(error, DecidedTransactionLost)
        return WriteOutcome.LOST if lost else WriteOutcome.COMPLETION_PENDING
    if state in {
        _WRITTEN.IN_DOUBT,
        _WRITTEN.RECORDED,
    }:  # only an interruption leaves it recorded: COMMIT may have been sent
        return WriteOutcome.IN_DOUBT
    if isinstance(error, Fenced):
        return WriteOutcome.FENCED
    return WriteOutcome.NOT_BEGUN if state in {None, _WRITTEN.BEGUN} else WriteOutcome.ABORTED


# The life of one lane: an owner's transactional id, claimed again whenever its producer must not be reused.
#
# Every incarnation has a Kafka id of its own, which exactly one producer initialises: initialising it a second time
# would abort what may be decided by then. So a lane starts a producer only right after it was settled.
#
# While Kafka is away an id is claimed in the database alone, which fences former owners there. Such a lane is
# *unverified*: it carries blocks whose messages wait as rows, and nothing else. Only a claim with Kafka leads on from
# there, so Kafka is asked whether the database has gone back in time before anything is asked of it under the new id.


class LaneState(Enum):
    """The states of one lane."""

    UNCLAIMED = "unclaimed"
    UNVERIFIED = "unverified"
    UNSETTLED = "unsettled"
    SETTLED = "settled"
    STARTED = "started"


class LaneEvent(Enum):
    """The events of one lane.

    ``CLAIM``: the row names a new incarnation of ours. ``CLAIM_WITHOUT_KAFKA``: so it does, but nothing was compared with
    Kafka, which is away. ``SETTLE``: nothing of earlier incarnations is open in Kafka any more.
    ``START``: a producer is about to use the incarnation's Kafka id. ``DISCARD``: that producer is closed; what it has left
    open stays open. ``DOUBT``: a block without a producer, whose messages wait, may be decided yet.
    """

    CLAIM = "claim"
    CLAIM_WITHOUT_KAFKA = "claim without Kafka"
    SETTLE = "settle"
    START = "start"
    DISCARD = "discard"
    DOUBT = "doubt"


_LANE, _OF_LANE = LaneState, LaneEvent

LANE_LIFE: Mapping[LaneState, Mapping[LaneEvent, LaneState]] = MappingProxyType(
    {
        _LANE.UNCLAIMED: {_OF_LANE.CLAIM: _LANE.UNSETTLED, _OF_LANE.CLAIM_WITHOUT_KAFKA: _LANE.UNVERIFIED},
        _LANE.UNVERIFIED: {
            _OF_LANE.CLAIM: _LANE.UNSETTLED,
            _OF_LANE.CLAIM_WITHOUT_KAFKA: _LANE.UNVERIFIED,
            _OF_LANE.DOUBT: _LANE.UNSETTLED,
        },
        _LANE.UNSETTLED: {
            _OF_LANE.CLAIM: _LANE.UNSETTLED,
            _OF_LANE.CLAIM_WITHOUT_KAFKA: _LANE.UNVERIFIED,
            _OF_LANE.SETTLE: _LANE.SETTLED,
        },
        _LANE.SETTLED: {
            _OF_LANE.CLAIM: _LANE.UNSETTLED,
            _OF_LANE.START: _LANE.STARTED,
            _OF_LANE.DOUBT: _LANE.UNSETTLED,
        },
        _LANE.STARTED: {_OF_LANE.DISCARD: _LANE.UNSETTLED},
    }
)
MAY_WAIT: Final = frozenset({_LANE.UNVERIFIED, _LANE.SETTLED, _LANE.STARTED})
"""In these states a lane can carry a block whose messages wait as rows. After a discarded producer, and after a block in doubt,
it is claimed again, which costs no request to Kafka either: the claim waits for the session of the block in doubt."""
