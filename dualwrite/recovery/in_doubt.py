"""What is in doubt: a COMMIT without an answer, and a decided transaction that could not be settled.

Each question ends with proof (a row, a record of the log) or with an honest error; silence is never an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline, GrowingPause, pause
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    OutcomeUnverifiable,
    Unavailable,
)
from dualwrite.protocol.process import Doubt, DoubtStep, next_doubt_step
from dualwrite.protocol.settle import PendingStep, next_pending_step
from dualwrite.protocol.values import Outcome
from dualwrite.recovery.claim import OwnerContext, pending

if TYPE_CHECKING:
    from tenacity import RetryCallState

    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values import Decision, StateRow

logger = logging.getLogger(__name__)


def prove_committed(
    context: OwnerContext, row: StateRow, state: PreparedTxnState, deadline: Deadline, unsettled: DualWriteError
) -> None:
    """Find out by reading alone how a transaction ended that could not be settled. Returns if it is committed.

    Another owner may have claimed the id, but being fenced says nothing about the outcome. Or a server does not answer. So it
    raises ``CompletionPending`` if the next settler will commit it, or that is not known; a loss is recorded, and raised.
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
                raise pending(row, str(unsettled), known=False)
    except CompletionPending:
        raise
    except DualWriteError as error:
        raise pending(row, f"{unsettled}; {error}", known=False) from error
    if step is PendingStep.PENDING:
        raise pending(row, str(unsettled), known=True)
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


# Resolves a COMMIT in doubt: asks the row, the database, the records and the log, in this order.
#
# The cause of a broken connection often lasts: a restarting server, a failover, a replaced pooler. So the questions are
# asked again until the deadline; only then does the COMMIT stay in doubt.

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_QUESTIONS: Final = frozenset({DoubtStep.ASK_DATABASE, DoubtStep.ASK_RECORDS, DoubtStep.ASK_LOG})


def resolve_commit(  # noqa: PLR0917 - as the writer hands it on
    context: OwnerContext,
    transactional_id: str,
    ours: PreparedTxnState,
    database_transaction: str | None,
    deadline: Deadline,
    waiting: Decision | None = None,
    fence: Callable[[], None] | None = None,
) -> DoubtStep:
    """Find out whether the COMMIT that would have recorded ``ours``, empty for rows alone, has happened.

    ``waiting`` is the decision if the block's messages wait: then its number in the row tells. The row is read under its lock
    on a fresh connection, so the old backend has ended before the answer, which is a verdict and never a question.
    ``fence`` claims the row, for a decision that went with its COMMIT: until the server has it, the old backend holds no lock,
    and could still commit what was taken for rolled back.
    ``ConfigurationError``: the database refused us until the deadline, as a standby does that is not yet promoted.
    """
    from tenacity import Retrying, retry_if_exception_type, wait_exponential  # noqa: PLC0415 - few writers are ever in doubt

    named = str(ours) or ("rows alone" if waiting is None else "rows and messages that wait")

    def note(attempt: RetryCallState) -> None:
        error = attempt.outcome and attempt.outcome.exception()
        logger.info("%s: COMMIT of %s is in doubt; asking the database again: %s", transactional_id, named, error)

    retrying = Retrying(
        retry=retry_if_exception_type((Unavailable, ConfigurationError)),
        stop=lambda _: deadline.expired,
        wait=wait_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
        sleep=lambda seconds: pause(min(seconds, deadline.remaining_s())),
        before_sleep=note,
        reraise=True,
    )
    asked = partial(_asked, context, transactional_id, ours, database_transaction, deadline, waiting)
    step: DoubtStep = retrying(_verdict, asked, fence)
    logger.warning("%s: COMMIT of %s was in doubt: %s", transactional_id, named, step.value)
    return step


def _verdict(asked: Callable[[], DoubtStep], fence: Callable[[], None] | None) -> DoubtStep:
    step = asked()
    if step is DoubtStep.ABORTED and fence is not None:
        fence()
        step = asked()  # it may have come between the answer and the claim
    return step


def _asked(  # noqa: PLR0917 - as above
    context: OwnerContext,
    transactional_id: str,
    ours: PreparedTxnState,
    database_transaction: str | None,
    deadline: Deadline,
    waiting: Decision | None,
) -> DoubtStep:
    if waiting is None:
        doubt = Doubt(ours=ours, row=context.store.read_locked(transactional_id, deadline).prepared)
    else:
        rows = context.store.outbox
        assert rows is not None  # it has put the messages
        counted = rows.decisions_locked(transactional_id, waiting.namespace, deadline)
        doubt = Doubt(ours=ours, row=ours, waits=waiting.waits, counted=counted)
    while (step := next_doubt_step(doubt)) in _QUESTIONS:
        if step is DoubtStep.ASK_DATABASE:
            doubt = replace(doubt, verdict=context.store.transaction_verdict(database_transaction))
        elif step is DoubtStep.ASK_RECORDS:
            doubt = replace(doubt, records_asked=True, incident=context.store.incident(transactional_id, ours))
        else:
            [proof] = context.coordinator.prove([ours], deadline)
            doubt = replace(doubt, proof=proof)
    return step
