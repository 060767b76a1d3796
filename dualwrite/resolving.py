"""A COMMIT whose answer is missing, resolved: ask the row, the database, the records and the log, in this order."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from dualwrite.claiming import Ground
from dualwrite.deadline import Deadline
from dualwrite.prepared_state import PreparedTxnState
from dualwrite.protocol.doubt import Doubt, DoubtStep, next_doubt_step

logger = logging.getLogger(__name__)

_QUESTIONS: Final = frozenset({DoubtStep.ASK_DATABASE, DoubtStep.ASK_RECORDS, DoubtStep.ASK_LOG})


def resolve_commit(
    ground: Ground, transactional_id: str, ours: PreparedTxnState, database_transaction: str | None, deadline: Deadline
) -> DoubtStep:
    """Find out whether the COMMIT that would have recorded ``ours`` has happened.

    The row is read under its lock on a fresh connection, so the old backend has come to an end before the answer.

    Returns:
        A verdict, never a question.

    Raises:
        Unavailable: The database, or Kafka where the log had to be read, did not answer in time.
    """
    row = ground.store.read_locked(transactional_id, deadline)
    doubt = Doubt(ours=ours, row=row.prepared)
    while (step := next_doubt_step(doubt)) in _QUESTIONS:
        if step is DoubtStep.ASK_DATABASE:
            doubt = replace(doubt, verdict=ground.store.transaction_verdict(database_transaction))
        elif step is DoubtStep.ASK_RECORDS:
            doubt = replace(doubt, records_asked=True, incident=ground.store.incident(transactional_id, ours))
        else:
            [proof] = ground.coordinator.prove([ours], deadline)
            doubt = replace(doubt, proof=proof)
    logger.warning("%s: COMMIT in doubt of %s: %s", transactional_id, ours, step.value)
    return step
