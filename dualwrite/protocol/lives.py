"""The state machines of the protocol as transition tables, and their interpreter.

Each life (of a producer, a dual write, a lane, a lease, a batch, a unit) is an enumeration of states, one of events,
and a table. No other place assigns a state. An event that the table does not know raises an error and changes nothing.
``make pictures`` draws the tables for docs/state-diagrams.md.
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

PRODUCER_LIFE: Mapping[ProducerState, Mapping[ProducerEvent, ProducerState]] = MappingProxyType(
    {
        _PRODUCER.CREATED: {
            _OF_PRODUCER.INIT: _PRODUCER.READY,
            _OF_PRODUCER.INIT_KEEPING: _PRODUCER.KEPT,
            _OF_PRODUCER.DOUBT: _PRODUCER.DOUBTFUL,
            _OF_PRODUCER.CLOSE: _PRODUCER.CLOSED,
        },
        _PRODUCER.KEPT: {
            _OF_PRODUCER.COMMIT: _PRODUCER.READY,
            _OF_PRODUCER.ABORT: _PRODUCER.READY,
            _OF_PRODUCER.COMPLETE: _PRODUCER.READY,
            _OF_PRODUCER.DOUBT: _PRODUCER.DOUBTFUL,
            _OF_PRODUCER.CLOSE: _PRODUCER.CLOSED,
        },
        _PRODUCER.READY: {
            _OF_PRODUCER.BEGIN: _PRODUCER.BEGUN,
            _OF_PRODUCER.DOUBT: _PRODUCER.DOUBTFUL,
            _OF_PRODUCER.CLOSE: _PRODUCER.CLOSED,
        },
        _PRODUCER.BEGUN: {
            _OF_PRODUCER.PRODUCE: _PRODUCER.BEGUN,
            _OF_PRODUCER.SEND_OFFSETS: _PRODUCER.BEGUN,
            _OF_PRODUCER.PREPARE: _PRODUCER.FLUSHED,
            _OF_PRODUCER.COMMIT: _PRODUCER.READY,
            _OF_PRODUCER.ABORT: _PRODUCER.READY,
            _OF_PRODUCER.FAIL: _PRODUCER.FAILED,
            _OF_PRODUCER.DOUBT: _PRODUCER.DOUBTFUL,
            _OF_PRODUCER.CLOSE: _PRODUCER.CLOSED,
        },
        _PRODUCER.FLUSHED: {
            _OF_PRODUCER.NAME: _PRODUCER.PREPARED,
            _OF_PRODUCER.ABORT: _PRODUCER.READY,
            _OF_PRODUCER.FAIL: _PRODUCER.FAILED,
            _OF_PRODUCER.DOUBT: _PRODUCER.DOUBTFUL,
            _OF_PRODUCER.CLOSE: _PRODUCER.CLOSED,
        },
        _PRODUCER.PREPARED: {
            _OF_PRODUCER.COMMIT: _PRODUCER.READY,
            _OF_PRODUCER.ABORT: _PRODUCER.READY,
            _OF_PRODUCER.COMPLETE: _PRODUCER.READY,
            _OF_PRODUCER.DOUBT: _PRODUCER.DOUBTFUL,
            _OF_PRODUCER.CLOSE: _PRODUCER.CLOSED,
        },
        _PRODUCER.FAILED: {
            _OF_PRODUCER.ABORT: _PRODUCER.READY,
            _OF_PRODUCER.FAIL: _PRODUCER.FAILED,
            _OF_PRODUCER.DOUBT: _PRODUCER.DOUBTFUL,
            _OF_PRODUCER.CLOSE: _PRODUCER.CLOSED,
        },
        _PRODUCER.DOUBTFUL: {
            _OF_PRODUCER.DOUBT: _PRODUCER.DOUBTFUL,
            _OF_PRODUCER.CLOSE: _PRODUCER.CLOSED,
        },
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
it is claimed anew, which costs no request to Kafka either: the claim waits for the session of the block in doubt."""


# The life of one lease, as its holder knows it: the right to try to own a numbered id.
#
# A lease permits a member to try, and nothing else. The claim of an id fences its former owner, whatever the lease
# says.


class LeaseState(Enum):
    """The states of one lease."""

    FREE = "free"
    HELD = "held"
    EXPIRED = "expired"
    TAKEN = "taken"


class LeaseEvent(Enum):
    """The events of one lease.

    ``TAKE``: the row names us. ``RENEW``: a heartbeat found our name there. ``EXPIRE``: no heartbeat has come through for the
    lease's time, so any other member may take it. ``LOSE``: a heartbeat found another name there, or none. ``GIVE_BACK``: we
    have given it up.
    """

    TAKE = "take"
    RENEW = "renew"
    EXPIRE = "expire"
    LOSE = "lose"
    GIVE_BACK = "give back"


_LEASE, _OF_LEASE = LeaseState, LeaseEvent

LEASE_LIFE: Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]] = MappingProxyType(
    {
        _LEASE.FREE: {_OF_LEASE.TAKE: _LEASE.HELD},
        _LEASE.HELD: {
            _OF_LEASE.RENEW: _LEASE.HELD,
            _OF_LEASE.EXPIRE: _LEASE.EXPIRED,
            _OF_LEASE.LOSE: _LEASE.TAKEN,
            _OF_LEASE.GIVE_BACK: _LEASE.FREE,
        },
        # Renewed late, but in time: nobody has taken it. After an outage of the database, all members come here at once.
        _LEASE.EXPIRED: {
            _OF_LEASE.RENEW: _LEASE.HELD,
            _OF_LEASE.EXPIRE: _LEASE.EXPIRED,
            _OF_LEASE.LOSE: _LEASE.TAKEN,
            _OF_LEASE.GIVE_BACK: _LEASE.FREE,
        },
        _LEASE.TAKEN: {_OF_LEASE.GIVE_BACK: _LEASE.FREE},
    }
)


# The life of one batch that is decided at once: many participants have prepared, and one database commit decides on
# all.
#
# A failure before the commit leaves the batch undecided, and nothing of it is visible on either side. After it, Kafka
# must follow for every participant. If the answer to the commit is missing, the batch is *in doubt* until a claim of
# the participants' ids has ended the old session and the batch's own row has been read.


class BatchState(Enum):
    """The states of one batch."""

    PREPARED = "prepared"
    IN_DOUBT = "in doubt"
    DECIDED = "decided"
    FOLLOWING = "following"
    WRITTEN = "written"
    UNDECIDED = "undecided"


class BatchEvent(Enum):
    """The events of one batch.

    ``COMMIT``: the database has committed the decision on every participant. ``FIND``: the batch's own row is there, so a
    decision was committed. ``LOSE_ANSWER``: the answer to COMMIT is missing. ``ABORT``: the database has certainly rolled back.
    ``COMPLETE``: the participants' transactions that need no claim are committed in Kafka and recorded. ``SETTLE``: all others
    were claimed and settled.
    """

    COMMIT = "commit"
    FIND = "find it written"
    LOSE_ANSWER = "lose the answer"
    ABORT = "abort"
    COMPLETE = "complete"
    SETTLE = "settle"


_BATCH, _OF_BATCH = BatchState, BatchEvent

BATCH_LIFE: Mapping[BatchState, Mapping[BatchEvent, BatchState]] = MappingProxyType(
    {
        _BATCH.PREPARED: {
            _OF_BATCH.COMMIT: _BATCH.DECIDED,
            _OF_BATCH.FIND: _BATCH.FOLLOWING,
            _OF_BATCH.LOSE_ANSWER: _BATCH.IN_DOUBT,
            _OF_BATCH.ABORT: _BATCH.UNDECIDED,
        },
        _BATCH.IN_DOUBT: {_OF_BATCH.FIND: _BATCH.WRITTEN, _OF_BATCH.ABORT: _BATCH.UNDECIDED},
        _BATCH.DECIDED: {_OF_BATCH.COMPLETE: _BATCH.FOLLOWING},
        _BATCH.FOLLOWING: {_OF_BATCH.SETTLE: _BATCH.WRITTEN},
        _BATCH.WRITTEN: {},
        _BATCH.UNDECIDED: {},
    }
)


# The life of the units in one partition, as its readers and its one writer see them (KIP-868).
#
# A unit is a begin marker, any number of records in any number of Kafka transactions, and an end or abort marker. Three
# rules keep it whole: one unit at a time, nothing between its records, no marker inside it. Every record of a unit says
# that it is one, so that a reader that begins in the middle of a unit, because retention has deleted its begin, knows
# that it does.


class UnitState(Enum):
    """Where a reader stands.

    ``START``: at the beginning of the log, or of what retention has left; nothing is read. ``CUT``: in a unit whose begin is
    deleted. ``OUTSIDE``: in no unit. ``INSIDE``: in a unit that may yet end or abort.
    """

    START = "start"
    CUT = "cut"
    OUTSIDE = "outside"
    INSIDE = "inside"


class UnitEvent(Enum):
    """The records that a reader may find.

    ``RECORD``: a record that belongs to no unit. ``BEGIN``, ``END``, ``ABORT``: the markers. ``PART``: a record of a unit.
    """

    RECORD = "record"
    BEGIN = "begin"
    PART = "part"
    END = "end"
    ABORT = "abort"


class Effect(Enum):
    """The effect of a record on what a reader shows.

    ``HOLD``: apply it where nobody sees it yet. ``SHOW``: apply it and publish. ``PUBLISH``: publish what was held. ``REVERT``:
    forget what was held. ``SKIP``: nothing.
    """

    HOLD = "hold"
    SHOW = "show"
    PUBLISH = "publish"
    REVERT = "revert"
    SKIP = "skip"


_UNIT, _OF_UNIT, _EFFECT = UnitState, UnitEvent, Effect

UNIT_LIFE: Mapping[UnitState, Mapping[UnitEvent, UnitState]] = MappingProxyType(
    {
        _UNIT.START: {
            _OF_UNIT.RECORD: _UNIT.OUTSIDE,
            _OF_UNIT.BEGIN: _UNIT.INSIDE,
            _OF_UNIT.PART: _UNIT.CUT,
            _OF_UNIT.END: _UNIT.OUTSIDE,
            _OF_UNIT.ABORT: _UNIT.OUTSIDE,
        },
        _UNIT.CUT: {_OF_UNIT.PART: _UNIT.CUT, _OF_UNIT.END: _UNIT.OUTSIDE, _OF_UNIT.ABORT: _UNIT.OUTSIDE},
        _UNIT.OUTSIDE: {_OF_UNIT.RECORD: _UNIT.OUTSIDE, _OF_UNIT.BEGIN: _UNIT.INSIDE},
        _UNIT.INSIDE: {_OF_UNIT.PART: _UNIT.INSIDE, _OF_UNIT.END: _UNIT.OUTSIDE, _OF_UNIT.ABORT: _UNIT.OUTSIDE},
    }
)

EFFECTS: Mapping[UnitState, Mapping[UnitEvent, Effect]] = MappingProxyType(
    {
        _UNIT.START: {
            _OF_UNIT.RECORD: _EFFECT.SHOW,
            _OF_UNIT.BEGIN: _EFFECT.SKIP,
            _OF_UNIT.PART: _EFFECT.SKIP,
            _OF_UNIT.END: _EFFECT.SKIP,
            _OF_UNIT.ABORT: _EFFECT.SKIP,
        },
        _UNIT.CUT: {_OF_UNIT.PART: _EFFECT.SKIP, _OF_UNIT.END: _EFFECT.SKIP, _OF_UNIT.ABORT: _EFFECT.SKIP},
        _UNIT.OUTSIDE: {_OF_UNIT.RECORD: _EFFECT.SHOW, _OF_UNIT.BEGIN: _EFFECT.SKIP},
        _UNIT.INSIDE: {_OF_UNIT.PART: _EFFECT.HOLD, _OF_UNIT.END: _EFFECT.PUBLISH, _OF_UNIT.ABORT: _EFFECT.REVERT},
    }
)
"""The visibility rule, for every event that `UNIT_LIFE` allows."""


class UnitWriterState(Enum):
    """Where the writer of a partition stands.

    ``CLAIMED``: it owns the partition, and has not looked at the end of the log. ``BETWEEN``: no unit is unfinished.
    ``WITHIN``: a unit is begun in the log. ``BROKEN``: it does not know what the log holds.
    """

    CLAIMED = "claimed"
    BETWEEN = "between"
    WITHIN = "within"
    BROKEN = "broken"


class UnitWriterEvent(Enum):
    """The steps of a writer: its own records count once their Kafka transaction is complete.

    ``FIND_ENDED``, ``FIND_UNFINISHED``: what the last record of the log says. ``WHOLE``: a whole unit in one transaction.
    ``FAIL``: a transaction may or may not be in the log.
    """

    FIND_ENDED = "find ended"
    FIND_UNFINISHED = "find unfinished"
    BEGIN = "begin"
    PART = "part"
    END = "end"
    WHOLE = "whole unit"
    ABORT = "abort"
    FAIL = "fail"


_UNIT_WRITER, _OF_UNIT_WRITER = UnitWriterState, UnitWriterEvent

UNIT_WRITER_LIFE: Mapping[UnitWriterState, Mapping[UnitWriterEvent, UnitWriterState]] = MappingProxyType(
    {
        _UNIT_WRITER.CLAIMED: {
            _OF_UNIT_WRITER.FIND_ENDED: _UNIT_WRITER.BETWEEN,
            _OF_UNIT_WRITER.FIND_UNFINISHED: _UNIT_WRITER.WITHIN,
            _OF_UNIT_WRITER.FAIL: _UNIT_WRITER.BROKEN,
        },
        _UNIT_WRITER.BETWEEN: {
            _OF_UNIT_WRITER.BEGIN: _UNIT_WRITER.WITHIN,
            _OF_UNIT_WRITER.WHOLE: _UNIT_WRITER.BETWEEN,
            _OF_UNIT_WRITER.FAIL: _UNIT_WRITER.BROKEN,
        },
        _UNIT_WRITER.WITHIN: {
            _OF_UNIT_WRITER.PART: _UNIT_WRITER.WITHIN,
            _OF_UNIT_WRITER.END: _UNIT_WRITER.BETWEEN,
            _OF_UNIT_WRITER.ABORT: _UNIT_WRITER.BETWEEN,
            _OF_UNIT_WRITER.FAIL: _UNIT_WRITER.BROKEN,
        },
        _UNIT_WRITER.BROKEN: {_OF_UNIT_WRITER.FAIL: _UNIT_WRITER.BROKEN},
    }
)


def found_at_the_end(last: UnitEvent | None) -> UnitWriterEvent:
    """The failover rule: what the last record of the log, or None, tells its next writer. An unfinished unit must be aborted.

    Only the end of the log can hold an unfinished unit, since a writer begins none before the last one has ended.
    """
    unfinished = last in {UnitEvent.BEGIN, UnitEvent.PART}
    return UnitWriterEvent.FIND_UNFINISHED if unfinished else UnitWriterEvent.FIND_ENDED
