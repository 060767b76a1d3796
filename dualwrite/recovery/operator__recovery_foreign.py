"""Ends open transactions of ids that have no row: those of other programs, for which the operator stands in (KIP-939)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.interfaces__ports_coordinator import TransactionCoordinator
from dualwrite.kafka.abandoned_transaction import AbandonedTransaction, Completion
from dualwrite.protocol.by_hand import TerminateStep, step_without_row
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import TransactionStatus
from dualwrite.protocol.values__protocol_allowed import check_seconds, check_selection
from dualwrite.protocol.values__protocol_naming import is_drawn, parsed
from dualwrite.recovery.recover__recovery_servers import connected_coordinator

logger = logging.getLogger(__name__)


def terminate_without_row(
    kafka_id: str, coordinator: TransactionCoordinator, deadline: Deadline, *, lose_decided: bool
) -> TerminateStep:
    """Abort what is open under a Kafka id that no row names, by ``InitProducerId`` as KIP-939's admin client does.

    Args:
        kafka_id: Kafka's ``transactional.id``.
        coordinator: Kafka.
        deadline: Limits the requests.
        lose_decided: Whether to abort also under an id of this library, whose row may be in another database.

    Returns:
        The step that was taken.

    Raises:
        IllegalStateError: The id is one of this library's, so that the row of another database may name the transaction.
        Unavailable: No answer in time.
    """
    view = AbandonedTransaction(coordinator, kafka_id).look(deadline)
    step = step_without_row(view.status, is_ours=_is_ours(kafka_id), lose_decided=lose_decided)
    if step is TerminateStep.REFUSE:
        raise IllegalStateError(
            "dualwrite made this id, and no row was given that shows whether the database has decided its transaction",
            transactional_id=kafka_id,
            next_step="name its writer's database; if that is gone, pass lose_decided to lose what it decided",
        )
    if step is TerminateStep.ABORT:
        logger.warning("%s: aborting producer %d:%d by force: no row names it", kafka_id, view.producer_id, view.epoch)
        coordinator.retire([kafka_id], deadline)
    return step


def complete_prepared(
    kafka_id: str, state: PreparedTxnState, *, kafka: Mapping[str, object], timeout_s: float = 60.0
) -> Completion | None:
    """KIP-939's recovery recipe for an id that this library did not make: commit what the state names, abort anything else.

    Fences every producer of the id afterwards.

    Args:
        kafka_id: Kafka's ``transactional.id``.
        state: The state that the other program's database holds; the empty state if it holds none.
        kafka: librdkafka configuration.
        timeout_s: Limits the whole call, in seconds.

    Returns:
        The outcome; None if Kafka does not know the id.

    Raises:
        ConfigurationError: The id is one of this library's: its row holds the state.
        DecidedTransactionLost, OutcomeUnverifiable, Fenced, Unavailable: As `TransactionalProducer.complete_transaction`.

    Source: KIP-939, "recovery recipe".
    """
    check_selection(kafka_id, None)
    check_seconds("timeout_s", timeout_s)
    if _is_ours(kafka_id):
        raise ConfigurationError(
            "dualwrite has made this id, and its row holds the state",
            transactional_id=kafka_id,
            next_step="name no state",
        )
    deadline = Deadline(timeout_s)
    with connected_coordinator(kafka) as coordinator:
        if coordinator.describe([kafka_id], deadline)[kafka_id].status is TransactionStatus.NO_SUCH_ID:
            return None
        natively = coordinator.transaction_version(deadline) >= 2  # noqa: PLR2004 - the version's own number
        done = AbandonedTransaction(coordinator, kafka_id, natively=natively).complete(state, deadline)
        coordinator.retire([kafka_id], deadline)
        return done


def _is_ours(kafka_id: str) -> bool:
    named = parsed(kafka_id)
    return named is not None and is_drawn(named[1])
