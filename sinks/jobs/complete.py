"""Completes handed-over transactions without a claim, so that their owners can go on with their producers.

:mod:`dualwrite.protocol.batches.handed_over` decides the steps. A claim and
:func:`dualwrite.recovery.settling.settle.settle` end everything that they leave.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from dualwrite.runtime import failpoints
from dualwrite.runtime.deadline import Deadline, GrowingPause
from dualwrite.ports.coordinator import TransactionCoordinator
from dualwrite.ports.store import StateStore
from dualwrite.protocol.batches.handed_over import CompletionStep, HandedOver, next_completion_step
from dualwrite.protocol.observations import Outcome
from dualwrite.protocol.rows import StateRow
from dualwrite.recovery.settling.settle import end_participants

logger = logging.getLogger(__name__)


def complete_handed_over(
    rows: Sequence[StateRow], *, coordinator: TransactionCoordinator, store: StateStore, deadline: Deadline
) -> Sequence[StateRow]:
    """Commit in Kafka what this caller has decided for waiting owners, and tell them through the row.

    The decider calls this once for each decision, before it has sent anything of it. The returned rows are durably completed
    on both sides. Nothing is known of the others: claim and settle them.

    Args:
        rows: The rows as they are now; ``prepared`` is what was decided.
        coordinator: Kafka.
        store: The database.
        deadline: Limits the whole call.

    Raises:
        ConfigurationError, Unavailable: A server did not answer, or refuses. Claim and settle all rows.
    """
    end_participants(store, [found for found in store.participants(rows) if found.decided])
    failpoints.hit("complete.before")
    named = {row.kafka_id(row.incarnation): row.prepared for row in rows}
    answers = coordinator.end(named, committed=True, deadline=deadline, once=True)
    failpoints.hit("complete.ended")
    known = {kafka_id: HandedOver(state, answers.get(kafka_id)) for kafka_id, state in named.items()}
    between = GrowingPause()
    while asked := _at(known, CompletionStep.LOOK):
        for kafka_id, view in coordinator.describe(asked, deadline).items():
            known[kafka_id] = replace(known[kafka_id], view=view)
        if early := _at(known, CompletionStep.WAIT):
            between.wait(deadline)
            if not deadline.expired:
                known.update((kafka_id, replace(known[kafka_id], view=None)) for kafka_id in early)
    ended = _at(known, CompletionStep.PROVE)
    for kafka_id, proof in zip(ended, coordinator.prove([named[one] for one in ended], deadline), strict=True):
        known[kafka_id] = replace(known[kafka_id], proof=proof)
    done = set(_at(known, CompletionStep.RECORD))
    completed = [row for row in rows if row.kafka_id(row.incarnation) in done]
    store.record_outcomes([(row, Outcome.COMMITTED, "committed by its decider") for row in completed])
    failpoints.hit("complete.recorded")
    if len(completed) < len(rows):
        logger.info("%d of %d transactions are left to a claim", len(rows) - len(completed), len(rows))
    return completed


def _at(known: dict[str, HandedOver], step: CompletionStep) -> list[str]:
    return [kafka_id for kafka_id, one in known.items() if next_completion_step(one) is step]
