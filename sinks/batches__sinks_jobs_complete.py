"""Completes handed-over transactions without a claim, so that their owners can keep their producers.

:mod:`dualwrite.protocol.batches` decides the steps. A claim and
:func:`dualwrite.recovery.settle.settle` end everything that they leave.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from dualwrite import failpoints
from dualwrite.clock import Deadline, GrowingPause
from dualwrite.interfaces import StateStore
from dualwrite.interfaces__ports_coordinator import TransactionCoordinator, native_of
from dualwrite.kafka.transaction_ends import PendingEnd, ask_for_ends
from dualwrite.protocol.batches import (
    CompletionStep,
    HandedOver,
    NativeHandedOver,
    next_completion_step,
    next_native_completion_step,
    waited,
)
from dualwrite.protocol.known_end import Ended
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Outcome
from dualwrite.protocol.values__protocol_rows import StateRow
from dualwrite.recovery.settle import end_participants

logger = logging.getLogger(__name__)


def complete_handed_over(
    rows: Sequence[StateRow], *, coordinator: TransactionCoordinator, store: StateStore, deadline: Deadline
) -> Sequence[StateRow]:
    """Commit in Kafka what this caller has decided for waiting owners, and tell them through the row.

    The decider calls this once for each decision, before it has sent anything of it. The rows may be of both engines. The
    returned rows are durably completed on both sides. Nothing is known of the others: claim and settle them.

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
    native = {kafka_id: state for kafka_id, state in named.items() if state.is_native}
    shared = {kafka_id: state for kafka_id, state in named.items() if not state.is_native}
    done = _complete_native(native, coordinator, deadline)
    done |= _complete_shared(shared, coordinator, deadline)
    completed = [row for row in rows if row.kafka_id(row.incarnation) in done]
    store.record_outcomes([(row, Outcome.COMMITTED, "committed by its decider") for row in completed])
    failpoints.hit("complete.recorded")
    if len(completed) < len(rows):
        logger.info("%d of %d transactions are left for a claim to complete", len(rows) - len(completed), len(rows))
    return completed


def _complete_shared(
    named: Mapping[str, PreparedTxnState], coordinator: TransactionCoordinator, deadline: Deadline
) -> set[str]:
    """Commit librdkafka's transactions; the Kafka ids of those that may be recorded."""
    if not named:
        return set()
    answers = coordinator.end(named, committed=True, deadline=deadline, once=True)
    failpoints.hit("complete.ended")
    known = {kafka_id: HandedOver(state, answers.get(kafka_id)) for kafka_id, state in named.items()}
    between = GrowingPause()
    while asked := _at(known, next_completion_step, CompletionStep.LOOK):
        for kafka_id, view in coordinator.describe(asked, deadline).items():
            known[kafka_id] = replace(known[kafka_id], view=view)
        if early := _at(known, next_completion_step, CompletionStep.WAIT):
            between.wait(deadline)
            if not deadline.expired:
                known.update((kafka_id, replace(known[kafka_id], view=None)) for kafka_id in early)
    ended = _at(known, next_completion_step, CompletionStep.PROVE)
    for kafka_id, proof in zip(ended, coordinator.prove([named[one] for one in ended], deadline), strict=True):
        known[kafka_id] = replace(known[kafka_id], proof=proof)
    return set(_at(known, next_completion_step, CompletionStep.RECORD))


def _complete_native(
    named: Mapping[str, PreparedTxnState], coordinator: TransactionCoordinator, deadline: Deadline
) -> set[str]:
    """Commit native transactions by their own names; the Kafka ids of those that may be recorded."""
    if not named:
        return set()
    exact = native_of(coordinator)
    known = {kafka_id: NativeHandedOver() for kafka_id in named}
    pending = {kafka_id: PendingEnd(Ended(state, committed=True)) for kafka_id, state in named.items()}
    between = GrowingPause()
    while True:
        if to_end := _at(known, next_native_completion_step, CompletionStep.END):
            ids = {kafka_id: (named[kafka_id].producer_id, named[kafka_id].epoch) for kafka_id in to_end}
            answers = exact.end_exactly(ids, committed=True, deadline=deadline)
            failpoints.hit("complete.ended")
            known.update((kafka_id, replace(known[kafka_id], answer=answers[kafka_id])) for kafka_id in to_end)
        if asked := _at(known, next_native_completion_step, CompletionStep.LOOK):
            steps = ask_for_ends(coordinator, [pending[kafka_id] for kafka_id in asked], deadline)
            known.update((key, replace(known[key], end=step)) for key, step in zip(asked, steps, strict=True))
        early = _at(known, next_native_completion_step, CompletionStep.WAIT)
        if not early or deadline.expired:
            break
        between.wait(deadline)
        known.update((kafka_id, waited(known[kafka_id])) for kafka_id in early)
    ended = _at(known, next_native_completion_step, CompletionStep.PROVE)
    for kafka_id, proof in zip(ended, coordinator.prove([named[one] for one in ended], deadline), strict=True):
        known[kafka_id] = replace(known[kafka_id], proof=proof)
    return set(_at(known, next_native_completion_step, CompletionStep.RECORD))


Known = TypeVar("Known")


def _at(known: Mapping[str, Known], next_step: Callable[[Known], CompletionStep], step: CompletionStep) -> list[str]:
    return [kafka_id for kafka_id, one in known.items() if next_step(one) is step]
