"""A transaction that its producer left open, ended from outside.

KIP-939 asks the broker to keep such a transaction with ``InitProducerId(keepPreparedTxn=true)``, which no released
broker serves. This library leaves the transaction alone, and ends it by ``EndTxn`` with the producer id and epoch that
the coordinator shows.

``EndTxn`` comes in two kinds. The one for native transactions (version 5) raises the epoch. A native transaction of epoch E
must be ended by that: settling takes an abort that the coordinator shows under E + 1 for its own, and without the rise the
next transaction would be shown so. A prepared state says which engine made its transaction. Nothing says it of a transaction
without a state, so the new producer's engine decides: the one for native transactions ends librdkafka's too.

Keeping fences nobody here, so two recoverers of one id may both have kept the same transaction. One of them completes it and
begins its next one; the other, coming late, must neither end that nor initialise, which would abort it. So what was seen when
the transaction was kept is compared with what the coordinator shows before anything is ended, and after that, before the new
producer is initialised. ``EndTxn`` of a native transaction names it exactly, whatever happens between the comparison and the
request.
"""

from __future__ import annotations

from enum import Enum

from dualwrite.clock import Deadline, GrowingPause
from dualwrite.errors import (
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    IllegalStateError,
    OutcomeUnverifiable,
    Unavailable,
)
from dualwrite.interfaces import TransactionCoordinator, native_of
from dualwrite.kafka.transaction_ends import steady_view
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import (
    EndAnswer,
    Outcome,
    TransactionStatus,
    TransactionView,
    another_owner_since,
    is_open,
    others_than,
    shows_next_epoch,
    shows_same_transaction,
)


class Completion(Enum):
    """The outcome of ``complete_transaction``."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    NOTHING_ONGOING = "nothing was ongoing"


class AbandonedTransaction:
    """A transaction left open by another producer, observed from outside.

    No row of ours names it: nothing is claimed, fenced or recorded, and no partition is repaired. So a loop of its own ends
    it, not settling's table, most of whose steps are these. ``natively``: the new producer's engine is the native one, so
    that the cluster has transaction version 2.
    """

    def __init__(self, coordinator: TransactionCoordinator, kafka_id: str, *, natively: bool = False) -> None:
        self._coordinator = coordinator
        self._kafka_id = kafka_id
        self._natively = natively
        self._seen: TransactionView | None = None

    def keep(self, deadline: Deadline) -> TransactionView:
        """Note the coordinator's view: from now on nothing but the transaction that it shows may be ended here."""
        self._seen = steady_view(self._coordinator, self._kafka_id, deadline)
        return self._seen

    def complete(self, state: PreparedTxnState, deadline: Deadline) -> Completion:
        """Commit the ongoing transaction if it is the state's, else abort it."""
        view = self._kept(deadline)
        if view.status is not TransactionStatus.ONGOING:
            return Completion.NOTHING_ONGOING
        if self.is_same(view, state, deadline):
            self.commit(view, state, deadline)
            return Completion.COMMITTED
        self.abort(view, deadline, natively=state.is_native)
        return Completion.ABORTED

    def commit_ongoing(self, deadline: Deadline) -> None:
        """Commit the ongoing transaction, whichever it is; `IllegalStateError` if there is none."""
        view = self._kept(deadline)
        if view.status is not TransactionStatus.ONGOING:
            raise IllegalStateError(
                f"there is nothing to commit: the coordinator shows {view.status.value}",
                transactional_id=self._kafka_id,
                next_step="call complete_transaction to make the producer usable; the outcome cannot be known from here",
            )
        self.commit(view, None, deadline)

    def is_same(self, view: TransactionView, state: PreparedTxnState, deadline: Deadline) -> bool:
        """Whether the ongoing transaction is the state's.

        Compares producer id, epoch and, where both are known, start time; then every first offset, as the partitions
        show it now. Fetch the view before calling: otherwise the transaction that a partition shows may end before the
        coordinator shows a later one of the same epoch. A state without evidence is compared by id and epoch alone,
        which cannot tell two transactions of one librdkafka producer apart. For a native state they are enough.
        """
        if not state.has_transaction or not shows_same_transaction(view, state):
            return False
        if state.is_native or not state.first_offsets:
            return True
        [offsets] = self._coordinator.open_offsets([state], deadline)
        [beside] = self._coordinator.still_open([(state.producer_id, others_than(state, view))], deadline)
        return is_open(state, offsets, exactly=True) and not beside

    def commit(self, view: TransactionView, state: PreparedTxnState | None, deadline: Deadline) -> None:
        """Commit the transaction that the view shows, and wait until the coordinator has completed it.

        The state names it, to prove the outcome once the coordinator no longer shows it: `DecidedTransactionLost` if the
        log proves that it was aborted, `OutcomeUnverifiable` if the log no longer shows the outcome.

        `Fenced` if the broker refuses, and there is no evidence that could prove the outcome; or if another producer of the
        id has been at work since the transaction was kept: what that one does stays as it is. After `Unavailable` you may
        repeat the call.
        """
        natively = self._natively if state is None else state.is_native
        between = GrowingPause()
        while True:
            answer = self._end(view, deadline, committed=True, natively=natively)
            now = self._kept(deadline, committed=answer is EndAnswer.ENDED)
            ended = _shown_end(now, view, natively=natively)
            if answer is EndAnswer.ENDED or ended is TransactionStatus.COMPLETE_COMMIT:
                return
            if natively and ended is TransactionStatus.COMPLETE_ABORT:
                raise DecidedTransactionLost(
                    "the coordinator shows that it was aborted, not committed",
                    transactional_id=self._kafka_id,
                    state=str(state or PreparedTxnState(*_ids(view))),
                )
            if not (now.status is TransactionStatus.ONGOING and _ids(now) == _ids(view)):
                break
            if deadline.expired:
                raise Unavailable("the transaction is still ongoing", transactional_id=self._kafka_id)
            between.wait(deadline)
        self._prove(state, deadline)

    def abort(self, view: TransactionView, deadline: Deadline, *, natively: bool = False) -> None:
        """Abort the transaction that the view shows, and wait until the coordinator is at rest.

        The abort's answer does not matter: ``InitProducerId`` comes next, and aborts anything still open. It alone would
        suffice, but librdkafka would then sleep half a second. ``natively``: the transaction is one of the native engine,
        whatever the new producer's is.
        """
        if view.status is TransactionStatus.ONGOING:
            self._end(view, deadline, committed=False, natively=natively or self._natively)
            self._kept(deadline)

    def abort_kept(self, deadline: Deadline) -> None:
        """Abort the transaction that was kept, if it is still open.

        `Fenced` if another producer of the id has been at work since.
        """
        self.abort(self._kept(deadline), deadline)

    def _kept(self, deadline: Deadline, *, committed: bool = False) -> TransactionView:
        """The coordinator's view, in which no other producer of the id has been at work since the transaction was kept."""
        now = steady_view(self._coordinator, self._kafka_id, deadline)
        if self._seen is None or not another_owner_since(self._seen, now):
            return now
        error = Fenced(
            "another producer of this id has been at work since the transaction was kept, "
            f"which is {'committed' if committed else 'left as that one has ended it'}: "
            f"the coordinator shows {now.status.value} of producer {now.producer_id}:{now.epoch}, "
            f"it was {self._seen.status.value} of {self._seen.producer_id}:{self._seen.epoch}",
            transactional_id=self._kafka_id,
            next_step="close this producer: the id has another owner, and nothing of it was ended here",
        )
        error.outcome = "decided" if committed else "unknown"
        raise error

    def _end(self, view: TransactionView, deadline: Deadline, *, committed: bool, natively: bool) -> EndAnswer:
        if natively:
            exactly = {self._kafka_id: _ids(view)}
            answers = native_of(self._coordinator).end_exactly(exactly, committed=committed, deadline=deadline)
        else:
            shared = {self._kafka_id: PreparedTxnState(*_ids(view))}
            answers = self._coordinator.end(shared, committed=committed, deadline=deadline)
        return answers[self._kafka_id]

    def _prove(self, state: PreparedTxnState | None, deadline: Deadline) -> None:
        if state is None or not state.first_offsets:
            error = Fenced(
                "the commit was refused: the broker timed the transaction out, or another owner ended it",
                transactional_id=self._kafka_id,
                next_step="it may have been committed: only the log shows that",
            )
            error.outcome = "unknown"
            raise error
        [proof] = self._coordinator.prove([state], deadline)
        if proof.outcome is not Outcome.COMMITTED:
            raise self._not_committed(proof.outcome, str(state))

    def _not_committed(self, outcome: Outcome | None, state: str) -> DualWriteError:
        if outcome is Outcome.LOST:
            return DecidedTransactionLost(
                "the log shows that it was aborted, not committed", transactional_id=self._kafka_id, state=state
            )
        if outcome is Outcome.UNVERIFIABLE:
            return OutcomeUnverifiable(
                "its records are no longer in the log", transactional_id=self._kafka_id, state=state
            )
        return Unavailable(
            "the coordinator refuses the commit while the log shows it as open", transactional_id=self._kafka_id
        )


def _ids(view: TransactionView) -> tuple[int, int]:
    return view.producer_id, view.epoch


def _shown_end(now: TransactionView, view: TransactionView, *, natively: bool) -> TransactionStatus | None:
    """The coordinator's word on how the transaction of an earlier view has ended; None if it shows something else."""
    is_its_own = shows_next_epoch(now, view) if natively else _ids(now) == _ids(view)
    ends = {TransactionStatus.COMPLETE_COMMIT, TransactionStatus.COMPLETE_ABORT}
    return now.status if is_its_own and now.status in ends else None
