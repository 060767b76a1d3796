"""One lane: a claimed transactional id with its producer, which carries one dual write at a time.

A lane is claimed, settled and started before it carries anything, and claimed again whenever its producer must not be reused.
Losses that settling finds belong to earlier transactions: they are recorded and reported, and never raised in another block.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dualwrite import failpoints, waiting
from dualwrite.clock import Deadline, now_s
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DatabaseWentBack,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    OutcomeUnverifiable,
    Unavailable,
)
from dualwrite.interfaces import NO_OBSERVER, Observer
from dualwrite.kafka.transaction_ends import end_at_rest, know_end
from dualwrite.protocol.lives import LANE_LIFE, MAY_WAIT, LaneEvent, LaneState, Machine, ProducerState
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process import VERDICT_S
from dualwrite.protocol.settle import EndStep, contradiction
from dualwrite.protocol.values import NEVER_MS, Outcome, Partition, StateRow, gone_back, is_older
from dualwrite.recovery import in_doubt
from dualwrite.recovery.claim import OwnerContext, claim_rows, note_reported, pending
from dualwrite.recovery.settle import settle
from dualwrite.writing.fair_queue import FairQueue, NoTurn

if TYPE_CHECKING:
    from dualwrite.interfaces import TransactionCoordinator
    from dualwrite.kafka.producer import LaneProducer
    from dualwrite.kafka.transaction_ends import EndQuestions, PendingEnd
    from dualwrite.recovery.settle import SettleReport

logger = logging.getLogger(__name__)

_PROVE_S: Final = 5.0
"""Kafka is asked for at least this long how a decided transaction ended, even if the time for ending it is over."""
_CLAIM_HOLDS_S: Final = 10.0
"""A claim that is older is renewed before the lane gets its first producer."""
_UNSETTLED: Final = frozenset({LaneState.UNVERIFIED, LaneState.UNSETTLED})
_KNOW_END_S: Final = 5.0
"""Limits the wait for the end of a transaction before it is recorded as complete."""


class Lane:
    """One transactional id that we own, claimed again whenever its producer must not be reused.

    ``make_producer`` returns a producer that is not initialised yet. Only the lane that holds ``claiming`` may claim. ``guard``
    is called at this lane's first claim, and returns its guard. ``ends`` asks for the ends of all lanes' transactions at once;
    without it each lane asks for its own when it needs it. ``losses`` reports losses that settling finds and that do not belong
    to the current dual write.
    """

    def __init__(
        self,
        transactional_id: str,
        context: OwnerContext,
        make_producer: Callable[[StateRow], LaneProducer],
        *,
        claiming: FairQueue[None] | None = None,
        guard: Callable[[], tuple[str, int]] | None = None,
        ends: EndQuestions | None = None,
        losses: Losses | None = None,
    ) -> None:
        self.transactional_id = transactional_id
        self._context = context
        self._make_producer = make_producer
        self._claiming = claiming or FairQueue([None])
        self._guard = guard
        self._ends = ends
        self._losses = RecordedLosses(transactional_id, context, losses or Losses())
        self._row: StateRow | None = None
        self._producer: LaneProducer | None = None
        self._unrecorded: StateRow | None = None
        self._machine = Machine("lane", LANE_LIFE, LaneState.UNCLAIMED, moved=self._note_since)
        self._unsettled_since: float | None = None
        self._undecided_in: dict[int, frozenset[Partition]] = {}
        self._asking_since: float | None = None
        self._looked_back = False
        self._claimed_s = 0.0
        self._refused: DualWriteError | None = None
        self._fenced = False
        self._asking_for = ""
        self._unanswered: tuple[float, str] | None = None
        self.lost_decision: str | None = None  # how the row has shown that the database has lost one
        self.heard_s = 0.0  # when Kafka last answered a question of the lane, outside of a block's dual write

    @property
    def row(self) -> StateRow:
        """The row as we know it: as claimed, with our newest decision since."""
        assert self._row is not None
        return self._row

    @property
    def incarnation(self) -> int | None:
        """The incarnation of our newest claim; None before the first one."""
        return None if self._row is None else self._row.incarnation

    @property
    def producer(self) -> LaneProducer:
        """The producer of our incarnation, usable since :meth:`ready`."""
        assert self._producer is not None
        return self._producer

    @property
    def unrecorded(self) -> StateRow | None:
        """A row whose ``prepared`` is complete in Kafka, but not yet recorded as complete."""
        return self._unrecorded

    @property
    def needs_settling(self) -> bool:
        """Whether Kafka may hold an open transaction of ours that none of our producers will end."""
        state = self._machine.state
        return state in _UNSETTLED or (state is LaneState.STARTED and not self.usable)

    @property
    def may_wait(self) -> bool:
        """Whether the lane can carry a block whose messages wait as rows, without asking Kafka; see :meth:`ready_to_wait`."""
        return self._machine.state in MAY_WAIT and not self._fenced

    @property
    def refused(self) -> DualWriteError | None:
        """Why the last claim found that the database and Kafka do not fit together; None if they do. For other threads."""
        error = self._refused
        return error if isinstance(error, ConfigurationError) else None

    def _note_since(self, state: LaneState) -> None:
        self._unsettled_since = (self._unsettled_since or now_s()) if state in _UNSETTLED else None

    @property
    def unsettled_s(self) -> float:
        """For how long the lane has been unsettled, in seconds; 0 if it is settled, or its producer is not yet discarded."""
        since = self._unsettled_since
        return 0.0 if since is None else now_s() - since

    @property
    def time_left_s(self) -> float | None:
        """The time until the broker aborts the open transaction, in seconds; None if none with a time limit is open."""
        producer = self._producer
        if producer is None or producer.state not in {ProducerState.BEGUN, ProducerState.PREPARED}:
            return None
        timeout_ms, begun_for_s = producer.transaction_timeout_ms, producer.begun_for_s
        return None if timeout_ms == NEVER_MS or not begun_for_s else timeout_ms / 1000 - begun_for_s

    @property
    def asking_since(self) -> float | None:
        """When the step that waits for Kafka now began, by the process's clock; None if there is none. For other threads."""
        producer = self._producer
        return self._asking_since or (None if producer is None else producer.asking_since)

    @property
    def question(self) -> tuple[float, str] | None:
        """The question that waits for Kafka's answer, or the last one without an answer: since when, and for what.

        For other threads.
        """
        since, producer = self._asking_since, self._producer
        if since is not None:
            return since, self._asking_for
        return (None if producer is None else producer.question) or self._unanswered

    @property
    def sends_to(self) -> frozenset[Partition]:
        """The partitions that the lane's transaction has written to. For other threads."""
        producer = self._producer
        return frozenset() if producer is None else producer.sends_to

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        before = self._asking_since
        self._asking_since, self._asking_for = before or now_s(), what
        try:
            yield
        except Unavailable:
            self._unanswered = self._asking_since, what
            raise
        finally:
            self._asking_since = before

    @property
    def usable(self) -> bool:
        """Whether the lane has a producer that can begin its next transaction."""
        # Settling relies on this: only a settler begins a transaction under an epoch later than an owner's first.
        return self._producer is not None and self._producer.reusable and not self._fenced

    @property
    def pending_end(self) -> PendingEnd | None:
        """The last transaction, if its end is not known yet but can still be found out."""
        return None if self._producer is None else self._producer.unknown_end

    def come_to_rest(self) -> PendingEnd | None:
        """Add the last transaction to those whose ends are asked for. Called when a dual write is over.

        Returns that transaction; None if its end is known, or if nothing will show it any more.
        """
        pending = None if self._producer is None else self._producer.unknown_end
        if pending is not None and self._ends is not None:
            self._ends.note(pending)
        return pending

    def know_end(self, deadline: Deadline) -> None:
        """Find out how the last transaction has ended. If that cannot be known, the producer is not used again."""
        pending = self.pending_end
        if pending is None:
            return
        if not pending.known:
            with self._asking("the end of a transaction"):
                if self._ends is None or not self._ends.know(pending, deadline):
                    self.note_end(know_end(self._shows_ends, pending, deadline))
                    return
        self.note_end(EndStep.KNOWN)

    @property
    def _shows_ends(self) -> TransactionCoordinator:
        late = None if self._ends is None else self._ends.late
        return self._context.coordinator if late is None else late

    def prove_end(self, deadline: Deadline) -> bool:
        """As :meth:`know_end`, then check the log before a commit is recorded as complete. For owners that close or idle.

        Returns whether it may be recorded now. If not, :attr:`needs_settling` says whether settling will find out.
        """
        self.know_end(deadline)
        if self._unrecorded is None or not self.usable:
            return False
        state = self._unrecorded.prepared
        step = end_at_rest(self._shows_ends, state, deadline)
        if step is EndStep.SETTLE:
            logger.warning("%s: the log shows an abort of %s, which was committed", self.transactional_id, state)
            self.discard()
        return step is EndStep.KNOWN

    def note_end(self, step: EndStep) -> None:
        """Take the step that was found for :attr:`pending_end`.

        Raises if an aborted transaction came back and that could not be recorded: call it again.
        """
        producer, pending = self.producer, self.producer.pending_end
        assert pending is not None
        if self._ends is not None:
            self._ends.forget(pending)
        if step is EndStep.RECORD:
            self._losses.record_came_back(replace(self.row, prepared=pending.ended.state))
        producer.note_end(step)

    def adopt(self, row: StateRow, *, settled: bool = True) -> None:
        """Take over a row that was just claimed, and whose Kafka id is unused. ``settled`` says whether it was settled, too."""
        self._note_claim(row)
        if settled:
            self._note_settled()

    def _note_claim(self, row: StateRow) -> None:
        verified = row.unverified_from is None
        self._machine.apply(LaneEvent.CLAIM if verified else LaneEvent.CLAIM_WITHOUT_KAFKA)
        self._row, self._refused, self._fenced = row, None, False
        self._claimed_s = now_s()

    def _note_settled(self) -> None:
        self._machine.apply(LaneEvent.SETTLE)
        self._unrecorded = None
        self._looked_back = True

    def may_go_on(self, found: StateRow | None) -> bool:
        """Whether the lane may be used again after idling, without a new claim. Call it before :meth:`ready`.

        ``found`` is its row as it was read a moment ago. A later claim fences the next dual write.

        If the last transaction was handed over, the row must say that its decider has completed it: then no request is on its
        way that could end the next one. The producer then repeats the commit, which Kafka answers with success, to update its
        own state.
        """
        from dualwrite.protocol.batches import may_go_on  # noqa: PLC0415 - only batches go on after they have idled

        producer = self._producer
        if producer is None or producer.state not in {ProducerState.READY, ProducerState.PREPARED}:
            return False
        if found is None or not may_go_on(self.row, found, producer.prepared_state):
            return False
        if producer.state is ProducerState.PREPARED:
            self._row = found
            try:
                producer.commit_transaction()
            except DualWriteError as error:
                logger.info("%s: its producer cannot continue: %s", self.transactional_id, error)
                return False
            if producer.pending_end is not None:
                producer.note_end(EndStep.KNOWN)  # the decider proved it before it recorded "completed"
        return self.usable

    def ready(self, deadline: Deadline, refuse_in_silence: Callable[[], object] | None = None) -> None:
        """Make the lane usable: claims, settles and makes a producer, unless it has a usable one.

        ``refuse_in_silence`` is called once the lane has waited long enough to know whether Kafka is silent, and raises if it
        is. Without it the lane asks until the deadline.

        If it raises, nothing was begun. `Fenced`, and `DatabaseWentBack` if the database has lost a claim, are permanent; after
        other errors try again.
        """
        if self._producer is not None and not self._fenced and self._producer.begins_again():
            return
        if refuse_in_silence is None:
            self._make_ready(deadline)
            return
        soon = Deadline(min(VERDICT_S, deadline.remaining_s()))
        try:
            self._make_ready(soon)
        except Unavailable:
            if not soon.expired:
                raise
            refuse_in_silence()
            if deadline.expired:
                raise
            self._make_ready(deadline)

    def _make_ready(self, deadline: Deadline) -> None:
        self.know_end(deadline)
        if not self.usable:
            waiting.elsewhere(lambda: self._make_usable(deadline))

    def ready_to_wait(self, deadline: Deadline) -> None:
        """Make the lane usable for a block whose messages wait as rows, and for nothing else. Asks the database alone.

        It claims the id unless a claim of ours is valid; the decision that the row names stays there, completed or not. Before
        the lane is used directly, :meth:`ready` claims with Kafka, and settles. Raises as :meth:`ready`, and raises again what
        a claim with Kafka has found that waiting cannot fix.
        """
        if self._refused is not None:
            raise copy(self._refused) from self._refused  # a copy for each block: an error that is raised grows
        if not self.may_wait:
            waiting.elsewhere(lambda: self._claim_without_kafka(deadline))

    def _make_usable(self, deadline: Deadline) -> None:
        # Without a producer, nothing ties a lane to the cluster that it was claimed in: the address may lead elsewhere by now.
        if self._machine.state is not LaneState.SETTLED or now_s() > self._claimed_s + _CLAIM_HOLDS_S:
            self._settle_former(deadline)
        self._start(deadline)

    def _settle_former(self, deadline: Deadline) -> None:
        """Claim and settle. Losses found here belong to transactions whose callers have their answer already."""
        try:
            try:
                report = self._renew(deadline)
            except DatabaseWentBack as error:
                if error.state is None:
                    raise  # the claim is refused until a person has looked
                self._losses.report(error)
                report = self._renew(deadline)
        except (DecidedTransactionLost, OutcomeUnverifiable) as loss:
            self._losses.report(loss)
            raise Unavailable(
                "an earlier transaction of this lane is lost, and not all it left behind is settled yet; nothing was begun",
                transactional_id=self.transactional_id,
                next_step="run the work again",
            ) from loss
        for found in report.losses:
            self._losses.report(found.as_error())

    def settle(self, deadline: Deadline) -> None:
        """Claim and settle a lane that is not in use. Reports the losses that it finds.

        On return nothing of ours is open in Kafka, unless :attr:`needs_settling` says so. After `Fenced` the other owner
        settles.
        """
        known = str(self._refused)
        try:
            self._settle_former(deadline)
        except DatabaseWentBack as error:
            if str(error) != known:  # it is found again at each attempt
                self._losses.report(error)

    def complete(
        self, state: PreparedTxnState, deadline: Deadline, leaves: Callable[[], bool] = lambda: False
    ) -> CompletionPending | None:
        """Commit in Kafka what the database has decided. Returns None once Kafka has answered.

        ``leaves`` is asked after a commit without an answer. If it returns True, the next settler, which is due as soon as the
        lane is free, must finish the commit, and the error that says so is returned: the block has nothing to wait for, as the
        row names its transaction. Otherwise the lane is settled here.

        After `CompletionPending` the next settler completes it, or finds it lost. `DatabaseWentBack` means that the database
        has lost it meanwhile, and what Kafka did is not known; it is recorded.
        """
        row, producer = self._row, self._producer
        assert row is not None
        assert producer is not None
        if state.has_transaction:
            self._row = row = replace(row, prepared=state, completed=None)
        if self._ends is not None and self._ends.wanted:
            self._ends.ask()  # its answer comes while Kafka answers this commit
        try:
            producer.commit_transaction()
        except DualWriteError as error:
            logger.warning("%s: Kafka did not answer the commit of %s: %s", self.transactional_id, state, error)
            if isinstance(error, CompletionPending) and leaves():
                return pending(row, error.what, known=False)
            cause = error
            waiting.elsewhere(lambda: self._complete_by_settling(state, deadline, cause))
            return None
        if state.has_transaction:
            self._unrecorded = row
        return None

    def _complete_by_settling(self, state: PreparedTxnState, deadline: Deadline, cause: DualWriteError) -> None:
        try:
            report = self._renew(deadline)
        except (DecidedTransactionLost, OutcomeUnverifiable) as error:
            raise error from cause
        except DualWriteError as error:
            if isinstance(error, DatabaseWentBack) and error.state == str(state):
                error.outcome = "unknown"
                raise error from cause
            logger.warning("%s: not settled: %s", self.transactional_id, error)
            self.discard()
            try:
                in_doubt.prove_committed(
                    self._context, self.row, state, Deadline(max(deadline.remaining_s(), _PROVE_S)), error
                )
            except DualWriteError as found:
                raise found from cause
            return
        for loss in report.losses:
            if loss.row.prepared == state:
                raise loss.as_error() from cause

    def _renew(self, deadline: Deadline) -> SettleReport:
        """Discard the producer and claim again, unless another owner has taken over."""
        self.discard()
        row = self._claim(deadline)
        with self._asking("how earlier transactions ended"):
            report = settle(
                [row],
                coordinator=self._context.coordinator,
                store=self._context.store,
                deadline=deadline,
                look_back=not self._looked_back,
                undecided_in={self.transactional_id: self._undecided_in},
                observer=self._context.observer,
            )
        self.heard_s = now_s()
        failpoints.hit("claim.settled")
        self._undecided_in = {}
        self._note_settled()
        return report

    def _claim(self, deadline: Deadline) -> StateRow:
        turn = self._claiming.ticket()
        try:
            try:
                turn.wait(deadline)
                known, row = self._row, self._claim_row(deadline)
            finally:
                turn.end()
        except NoTurn:
            raise Unavailable(
                "timed out waiting for another lane of this writer to finish claiming",
                transactional_id=self.transactional_id,
            ) from None
        finally:
            turn.end()
        self._compare_claimed(row, known)
        return row

    def _claim_without_kafka(self, deadline: Deadline) -> None:
        # Without a turn: whoever has it may be waiting for Kafka.
        known = self._row
        self._compare_claimed(self._claim_row(deadline, without_kafka=True), known)

    def _claim_row(self, deadline: Deadline, *, without_kafka: bool = False) -> StateRow:
        """Claim the row, unless another owner has taken over. On return it is ours, even if later steps fail."""
        if self._row is not None:
            guard: tuple[str, int] | None = (self.transactional_id, self._row.incarnation)
        else:
            guard = self._guard() if self._guard else None
        try:
            with nullcontext() if without_kafka else self._asking("for its cluster and the new id"):
                (row,) = claim_rows(
                    self._context, [self.transactional_id], deadline, guard=guard, without_kafka=without_kafka
                )
        except (ConfigurationError, Fenced) as error:  # DatabaseWentBack included
            if isinstance(error, Fenced) or not error.may_pass:
                self._refused = error
            raise
        self._note_claim(row)
        return row

    def _compare_claimed(self, row: StateRow, known: StateRow | None) -> None:
        """Raise if the claimed row names an older decision than we know of."""
        if known is None or not is_older(row.prepared, known.prepared):
            return
        error = gone_back(
            f"the row shows {str(row.prepared) or 'none'!r} as the newest decision, which was {str(known.prepared)!r}",
            self.transactional_id,
            str(known.prepared),
            recorded=True,
        )
        self.record_forgotten(error)
        raise error

    def _start(self, deadline: Deadline) -> None:
        """Make and initialise the producer.

        Does not use one whose initialisation may arrive late, or twice: the next one has another Kafka id, under which a late
        copy finds nothing.
        """
        while True:
            self._machine.apply(LaneEvent.START)
            producer = self._make_producer(self.row)
            self._producer = producer
            try:
                with self._asking("a producer id"):
                    producer.init_within(deadline)
            except Unavailable:
                if not producer.doubtful or deadline.expired:
                    raise
                self._settle_former(deadline)
                continue
            self.heard_s = now_s()
            failpoints.hit("claim.initialized")
            if not producer.doubtful:
                return
            if deadline.expired:
                raise Unavailable(
                    "every initialisation of a producer took so long that it may have been sent twice",
                    transactional_id=self.transactional_id,
                    next_step="raise retry.backoff.ms above the time that the brokers need to answer",
                )
            self._settle_former(deadline)

    def record_completed(self) -> None:
        """Record in the row that its transaction is complete, once its end is known. For owners that close or idle.

        Does nothing if the end is not known, the producer is doubtful, or settling has failed: a later settling proves the end,
        and ends what a broker has forgotten.
        """
        if self._unrecorded is None:
            return
        if self.prove_end(Deadline(_KNOW_END_S)):
            self._context.store.record_outcomes([(self._unrecorded, Outcome.COMMITTED, "committed by its owner")])
            self._unrecorded = None

    def take_completed(self) -> StateRow | None:
        """As :meth:`record_completed`, for an owner that records the row's outcome itself.

        If the owner fails to record it, the next claim proves the end again. Returns None if there is nothing to record.
        """
        if self._unrecorded is None or not self.prove_end(Deadline(_KNOW_END_S)):
            return None
        row, self._unrecorded = self._unrecorded, None
        return row

    def compare_with_row(self) -> None:
        """Check whether the database has lost our newest decision, and report it if so. For owners that close or idle."""
        if self._row is not None:
            self._losses.compare(self._row)

    def record_forgotten(self, error: DatabaseWentBack) -> None:
        """Record the decision that the database has lost. Kafka has its messages."""
        if error.state is not None:
            self.lost_decision = error.what
        self._losses.record_forgotten(self.row, error)

    def discard(self) -> None:
        """Discard the producer. An open transaction stays open until it is settled."""
        if self._producer is not None:
            if undecided_in := self._producer.undecided_in:
                self._undecided_in[self.row.incarnation] = undecided_in
            if self._ends is not None and (pending := self._producer.pending_end) is not None:
                self._ends.forget(pending)
            self._unanswered = self._producer.question or self._unanswered
            self._producer.close()
            self._producer = None
        if self._machine.allows(LaneEvent.DISCARD):
            self._machine.apply(LaneEvent.DISCARD)

    def fence(self, deadline: Deadline) -> None:
        """Claim in the database alone, so that a decision of ours that is still on its way to it finds another incarnation.

        The producer stays, to end its transaction. The next block claims once more. Raises as :meth:`ready`.
        """
        self._fenced = True  # also if the claim is not answered
        with suppress(Fenced):  # then the other owner's claim has done it
            claim_rows(
                self._context,
                [self.transactional_id],
                deadline,
                guard=(self.transactional_id, self.row.incarnation),
                without_kafka=True,
            )

    def leave_in_doubt(self) -> None:
        """As :meth:`discard`, when the last block may still be decided: no other block may use its claim.

        The next claim waits for the session of that block. Under the old one, a block whose messages wait would decide under
        the same number, and the row's count could not tell which of the two was committed.
        """
        self.discard()
        if self._machine.allows(LaneEvent.DOUBT):
            self._machine.apply(LaneEvent.DOUBT)

    def __repr__(self) -> str:
        return f"<Lane {self.transactional_id} {self._producer!r}>"


# The losses found on one lane: recorded in the database, then reported.


class RecordedLosses:
    """Records what a lane finds lost, and reports it."""

    def __init__(self, transactional_id: str, context: OwnerContext, losses: Losses) -> None:
        self._id = transactional_id
        self._context = context
        self._losses = losses
        self._forgotten: str | None = None

    def report(self, loss: FoundLoss) -> None:
        """Report a loss that is recorded already, and note in the database whether a caller has got it."""
        if self._losses.report(loss) and loss.state is not None:
            note_reported(self._context.store, [(self._id, PreparedTxnState.from_string(loss.state))])

    def record_came_back(self, row: StateRow) -> None:
        """Record, then report, that the row's transaction, aborted on both sides, is committed in Kafka."""
        detail = (
            "aborted on both sides, but the log shows a commit: its messages are visible, and its rows are not there"
        )
        error = OutcomeUnverifiable(detail, transactional_id=self._id, state=str(row.prepared))
        self._context.store.record_outcomes([(row, Outcome.UNVERIFIABLE, detail)])
        self.report(error)

    def record_forgotten(self, row: StateRow, error: DatabaseWentBack) -> None:
        """Record the decision on this row that the database has lost. Kafka has its messages."""
        logger.error("%s", error)
        if error.state is None:
            return
        self._forgotten = error.state
        row = replace(row, prepared=PreparedTxnState.from_string(error.state))
        detail = f"{error.what}; the messages of the forgotten decision may be visible in Kafka"
        try:
            self._context.store.record_outcomes([(row, Outcome.UNVERIFIABLE, detail)])
        except DualWriteError:
            logger.exception("%s: could not record a decision that the database has lost", self._id)

    def compare(self, row: StateRow) -> None:
        """Check whether the database has lost the decision in ``row``; record and report it once if so.

        ``row`` is the row as its owner knows it.
        """
        if not row.prepared.has_transaction or str(row.prepared) == self._forgotten:
            return
        found = next(iter(self._context.store.read([self._id])), None)
        if found is None or found.namespace != row.namespace or found.prepared == row.prepared:
            return  # deleted by hand, or only a claim was lost: the next owner notices it
        seen = contradiction(row.incarnation, row.prepared, found.incarnation, found.prepared)
        if seen is not None:
            recorded = found.incarnation == row.incarnation  # if the claim is lost too, no opening can succeed
            error = gone_back(seen, self._id, str(row.prepared), recorded=recorded)
            self.record_forgotten(row, error)
            self.report(error)


# Reports losses of transactions whose callers have their answer; never raises them into another caller's block.

FoundLoss = DecidedTransactionLost | OutcomeUnverifiable | DatabaseWentBack
"""The errors that report a loss. ``transactional_id`` and ``state`` name the transaction, ``outcome`` what is known of it."""

OnLoss = Callable[[FoundLoss], object]


class Losses:
    """Reports losses that settling finds. They are already in the table of incidents.

    Every loss becomes one log record at level ``ERROR``, with the fields ``dualwrite_event`` (``loss``),
    ``dualwrite_transactional_id``, ``dualwrite_state`` and ``dualwrite_outcome`` for log collectors.

    ``on_loss`` is called in the thread that found the loss. If it raises, the error is logged, and only the log has reported
    the loss.
    """

    def __init__(self, on_loss: OnLoss | None = None, observer: Observer = NO_OBSERVER) -> None:
        self._on_loss = on_loss
        self._observer = observer
        self._unreported: queue.SimpleQueue[FoundLoss] = queue.SimpleQueue()

    def report(self, loss: FoundLoss) -> bool:
        """Report one loss. Returns whether ``on_loss`` took it, besides the log."""
        logger.error(
            "a transaction was lost after its block had ended: %s",
            loss,
            extra={
                "dualwrite_event": "loss",
                "dualwrite_transactional_id": loss.transactional_id,
                "dualwrite_state": loss.state,
                "dualwrite_outcome": loss.outcome,
            },
        )
        self._observer.lost(loss)
        if self._on_loss is not None:
            try:
                self._on_loss(loss)
            except Exception:
                logger.exception("on_loss raised for the loss of %s", loss.transactional_id)
            else:
                return True
        self._unreported.put(loss)
        return False

    @property
    def unreported(self) -> int:
        """The number of losses that only the log has reported."""
        return self._unreported.qsize()

    def raise_unreported(self) -> None:
        """Raise the first loss that only the log has reported, if any. Each is raised at most once."""
        unreported = [self._unreported.get_nowait() for _ in range(self._unreported.qsize())]
        if unreported:
            raise unreported[0]
