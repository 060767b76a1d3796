"""A transaction that another process left open: kept, compared with a prepared state, and ended from outside.

KIP-939 asks the broker for this with ``InitProducerId(keepPreparedTxn=true)``, which no released broker serves. Here the
transaction is left alone, and ended by ``EndTxn`` with the producer id and epoch that the coordinator shows.
"""

from __future__ import annotations

from enum import Enum

from dualwrite.deadline import Deadline, GrowingPause
from dualwrite.errors import (
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    IllegalStateError,
    OutcomeUnverifiable,
    Unavailable,
)
from dualwrite.observations import EndAnswer, LogProof, TransactionStatus, TransactionView
from dualwrite.ports import TransactionCoordinator
from dualwrite.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import is_open, others_than, shows_same_transaction

_AT_REST = frozenset(
    {
        TransactionStatus.NO_SUCH_ID,
        TransactionStatus.EMPTY,
        TransactionStatus.ONGOING,
        TransactionStatus.COMPLETE_COMMIT,
        TransactionStatus.COMPLETE_ABORT,
    }
)


class Completion(Enum):
    """What ``complete_transaction`` did."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    NOTHING_ONGOING = "nothing was ongoing"


class KeptTransaction:
    """What is ongoing under a transactional id, as somebody sees it who is not its producer.

    Args:
        coordinator: The coordinator.
        kafka_id: The transactional id.
    """

    def __init__(self, coordinator: TransactionCoordinator, kafka_id: str) -> None:
        self._coordinator = coordinator
        self._kafka_id = kafka_id

    def look(self, deadline: Deadline) -> TransactionView:
        """The coordinator's view, once it is not in transition.

        Raises:
            Unavailable: It stayed in transition, or did not answer, until the deadline.
        """
        between = GrowingPause()
        while True:
            view = self._coordinator.describe([self._kafka_id], deadline)[self._kafka_id]
            if view.status in _AT_REST:
                return view
            self._wait(between, deadline, f"the coordinator still shows {view.status.value}")

    def complete(self, state: PreparedTxnState, deadline: Deadline) -> Completion:
        """Commit what is ongoing if it is the state's transaction, else abort it.

        Raises:
            DecidedTransactionLost, OutcomeUnverifiable, Fenced, Unavailable: As :meth:`commit`.
        """
        view = self.look(deadline)
        if view.status is not TransactionStatus.ONGOING:
            return Completion.NOTHING_ONGOING
        if self.is_same(view, state, deadline):
            self.commit(view, state, deadline)
            return Completion.COMMITTED
        self.abort(view, deadline)
        return Completion.ABORTED

    def commit_ongoing(self, deadline: Deadline) -> None:
        """Commit whatever is ongoing.

        Raises:
            IllegalStateError: Nothing is.
            Fenced, Unavailable: As :meth:`commit`.
        """
        view = self.look(deadline)
        if view.status is not TransactionStatus.ONGOING:
            raise IllegalStateError(
                f"there is nothing to commit: the coordinator shows {view.status.value}",
                transactional_id=self._kafka_id,
                next_step="complete_transaction does nothing then; commit_transaction cannot tell whether it was committed",
            )
        self.commit(view, None, deadline)

    def is_same(self, view: TransactionView, state: PreparedTxnState, deadline: Deadline) -> bool:
        """Whether what is ongoing is the state's transaction.

        By producer id, epoch and, where both are known, start time; then by every first offset, as the partitions show it
        now. The view must have been asked before: the other way round the transaction that a partition showed may have ended
        before the coordinator showed a later one of the same epoch. A state without evidence is compared by id and epoch
        alone, which does not tell two transactions of one librdkafka producer apart.
        """
        if not state.has_transaction or not shows_same_transaction(view, state):
            return False
        if not state.first_offsets:
            return True
        [offsets] = self._coordinator.open_offsets([state], deadline)
        [beside] = self._coordinator.still_open([(state.producer_id, others_than(state, view))], deadline)
        return is_open(state, offsets, exactly=True) and not beside

    def commit(self, view: TransactionView, state: PreparedTxnState | None, deadline: Deadline) -> None:
        """Commit what the view shows as ongoing, and wait until the coordinator has completed it.

        Args:
            view: The coordinator's view of it.
            state: The state that named it, for the proof where the coordinator no longer shows the outcome.
            deadline: Until when to try.

        Raises:
            DecidedTransactionLost: The log proves that it was aborted.
            OutcomeUnverifiable: The log no longer shows what became of it.
            Fenced: The broker refuses, and there is no evidence to prove an outcome by.
            Unavailable: Not complete by the deadline. It may be repeated.
        """
        named = PreparedTxnState(view.producer_id, view.epoch)
        between = GrowingPause()
        while True:
            answer = self._coordinator.end({self._kafka_id: named}, committed=True, deadline=deadline)[self._kafka_id]
            now = self.look(deadline)
            if answer is EndAnswer.ENDED or (
                now.status is TransactionStatus.COMPLETE_COMMIT and _ids(now) == _ids(view)
            ):
                return
            if not (now.status is TransactionStatus.ONGOING and _ids(now) == _ids(view)):
                break
            self._wait(between, deadline, "the transaction is still ongoing")
        self._prove(state, deadline)

    def abort(self, view: TransactionView, deadline: Deadline) -> None:
        """Ask for the abort of what the view shows, and wait until the coordinator is at rest.

        Whether it was this call that ended it does not matter: ``InitProducerId`` comes next, and aborts whatever is still
        there. It alone would do; but librdkafka then sleeps half a second.

        Raises:
            Unavailable: No answer by the deadline.
        """
        if view.status is TransactionStatus.ONGOING:
            named = PreparedTxnState(view.producer_id, view.epoch)
            self._coordinator.end({self._kafka_id: named}, committed=False, deadline=deadline)
            self.look(deadline)

    def _prove(self, state: PreparedTxnState | None, deadline: Deadline) -> None:
        if state is None or not state.first_offsets:
            error = Fenced(
                "the commit was refused: the broker timed the transaction out, or another owner ended it",
                transactional_id=self._kafka_id,
                next_step="whether it was committed does not follow from this; only the log shows it",
            )
            error.outcome = "unknown"
            raise error
        [proof] = self._coordinator.prove([state], deadline)
        if proof not in {LogProof.COMMITTED, LogProof.PARTLY}:
            raise self._not_committed(proof, str(state))

    def _not_committed(self, proof: LogProof, state: str) -> DualWriteError:
        if proof is LogProof.ABORTED:
            return DecidedTransactionLost(
                "it was to be committed, the log shows it aborted", transactional_id=self._kafka_id, state=state
            )
        if proof is LogProof.UNKNOWABLE:
            return OutcomeUnverifiable(
                "its records are no longer in the log", transactional_id=self._kafka_id, state=state
            )
        return Unavailable(
            "the coordinator refuses the commit while the log shows it open", transactional_id=self._kafka_id
        )

    def _wait(self, between: GrowingPause, deadline: Deadline, what: str) -> None:
        if deadline.expired:
            raise Unavailable(what, transactional_id=self._kafka_id)
        between.wait(deadline)


def _ids(view: TransactionView) -> tuple[int, int]:
    return view.producer_id, view.epoch
