"""Finds the outcome of an owner's decided transaction whose commit was not answered, and that could not be settled."""

from __future__ import annotations

import logging
from dataclasses import replace

from dualwrite.clock import Deadline, GrowingPause
from dualwrite.errors import CompletionPending, DecidedTransactionLost, DualWriteError, OutcomeUnverifiable
from dualwrite.protocol.known_end import PendingStep, next_pending_step
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Outcome
from dualwrite.protocol.values__protocol_rows import StateRow
from dualwrite.recovery.claim import OwnerContext

logger = logging.getLogger(__name__)


def prove_committed(
    context: OwnerContext, row: StateRow, state: PreparedTxnState, deadline: Deadline, unsettled: DualWriteError
) -> None:
    """Find out by reading alone how a transaction ended that could not be settled. Returns if it is committed.

    Another owner may have claimed the id, but being fenced says nothing about the outcome. Or a server does not answer.

    Args:
        context: The servers.
        row: The row as its owner knows it.
        state: The transaction.
        deadline: Limits the requests.
        unsettled: Why it could not be settled, for people.

    Raises:
        CompletionPending: The next settler will commit it, or that is not known.
        DecidedTransactionLost, OutcomeUnverifiable: The broker aborted it, or its outcome can no longer be known. It is
            recorded.
    """
    kafka_id = row.kafka_id(state.incarnation or 0)
    view = None
    between = GrowingPause()
    try:
        while (
            step := next_pending_step(context.coordinator.prove([state], deadline)[0], view, state)
        ) is PendingStep.LOOK:
            if view is not None:
                between.wait(deadline)
            view = context.coordinator.describe([kafka_id], deadline)[kafka_id]
            if deadline.expired:
                raise _pending(row, str(unsettled), known=False)
    except CompletionPending:
        raise
    except DualWriteError as error:
        raise _pending(row, f"{unsettled}; {error}", known=False) from error
    if step is PendingStep.PENDING:
        raise _pending(row, str(unsettled), known=True)
    if step is not PendingStep.COMMITTED:
        outcome = Outcome.LOST if step is PendingStep.LOST else Outcome.UNVERIFIABLE
        raise _recorded(context, replace(row, prepared=state), outcome)


def _recorded(context: OwnerContext, row: StateRow, outcome: Outcome) -> DualWriteError:
    lost = outcome is Outcome.LOST
    known = "aborted by the broker" if lost else "its records are no longer in the log"
    detail = f"decided by the database; {known}"
    try:
        context.store.record_outcomes([(row, outcome, detail)])
    except DualWriteError:
        logger.exception(
            "%s: could not record a loss; the next settling will: %s of %s", row.transactional_id, detail, row.prepared
        )
    kind = DecidedTransactionLost if lost else OutcomeUnverifiable
    return kind(detail, transactional_id=row.transactional_id, state=str(row.prepared))


def _pending(row: StateRow, why: str, *, known: bool) -> CompletionPending:
    if known:
        what = f"the database has committed, and Kafka has not yet: {why}"
        return CompletionPending(what, transactional_id=row.transactional_id)
    error = CompletionPending(
        f"the database has committed, and what Kafka did is not known: {why}",
        transactional_id=row.transactional_id,
        next_step="do not run the work again: settling completes it, or finds and records that it is lost",
    )
    error.outcome = "unknown"
    return error
