"""Resolves a COMMIT in doubt: asks the row, the database, the records and the log, in this order.

The cause of a broken connection often lasts: a restarting server, a failover, a replaced pooler. So the questions are asked
again until the deadline; only then does the COMMIT stay in doubt.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_exponential

from dualwrite.clock import Deadline, pause
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process__protocol_settling_commit_in_doubt import Doubt, DoubtStep, next_doubt_step
from dualwrite.recovery.claim import OwnerContext

logger = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_QUESTIONS: Final = frozenset({DoubtStep.ASK_DATABASE, DoubtStep.ASK_RECORDS, DoubtStep.ASK_LOG})


def resolve_commit(
    context: OwnerContext,
    transactional_id: str,
    ours: PreparedTxnState,
    database_transaction: str | None,
    deadline: Deadline,
) -> DoubtStep:
    """Find out whether the COMMIT that would have recorded ``ours``, empty for rows alone, has happened.

    The row is read under its lock on a fresh connection, so the old backend has ended before the answer.

    Returns:
        A verdict, never a question.

    Raises:
        Unavailable: The database, or Kafka if the log had to be read, did not answer before the deadline.
        ConfigurationError: The database refused us until the deadline, as a standby does that is not yet promoted.
    """
    named = str(ours) or "rows alone"

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
    step: DoubtStep = retrying(_verdict, context, transactional_id, ours, database_transaction, deadline)
    logger.warning("%s: COMMIT of %s was in doubt: %s", transactional_id, named, step.value)
    return step


def _verdict(
    context: OwnerContext,
    transactional_id: str,
    ours: PreparedTxnState,
    database_transaction: str | None,
    deadline: Deadline,
) -> DoubtStep:
    row = context.store.read_locked(transactional_id, deadline)
    doubt = Doubt(ours=ours, row=row.prepared)
    while (step := next_doubt_step(doubt)) in _QUESTIONS:
        if step is DoubtStep.ASK_DATABASE:
            doubt = replace(doubt, verdict=context.store.transaction_verdict(database_transaction))
        elif step is DoubtStep.ASK_RECORDS:
            doubt = replace(doubt, records_asked=True, incident=context.store.incident(transactional_id, ours))
        else:
            [proof] = context.coordinator.prove([ours], deadline)
            doubt = replace(doubt, proof=proof)
    return step
