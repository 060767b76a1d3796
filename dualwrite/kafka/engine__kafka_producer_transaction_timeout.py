"""The transaction timeout: the one limit that a stock broker sets to the guarantee.

A prepared transaction whose owner is dead waits for a settler. The broker aborts it after its timeout, even if the
database has decided it. Only 2147483647 ms never expires (KIP-939). The native engine asks for that; librdkafka cannot, since
its check against ``socket.timeout.ms`` overflows: the greatest value that works there is 100 ms less, 24.8 days.
"""

from __future__ import annotations

import logging
import threading

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.interfaces__ports_coordinator import TransactionCoordinator
from dualwrite.protocol.values import NEVER_MS

logger = logging.getLogger("dualwrite.kafka.producer")

LEAST_TIMEOUT_MS = 1000
GREATEST_TIMEOUT_MS = 2_147_483_547
"""The greatest ``transaction.timeout.ms`` that librdkafka takes."""
BROKER_DEFAULT_MS = 900_000
"""The broker's default, assumed if we may not read its setting."""

_warned: set[str] = set()
_told: set[tuple[str, str]] = set()
_warned_lock = threading.Lock()


def choose_transaction_timeout_ms(
    requested_ms: int | None, broker_maximum_ms: int | None, *, greatest_ms: int = GREATEST_TIMEOUT_MS
) -> int:
    """Choose the ``transaction.timeout.ms`` to ask for: the user's own, else the greatest that works.

    Args:
        requested_ms: The user's value; None for the greatest possible.
        broker_maximum_ms: The broker's ``transaction.max.timeout.ms``; None if it cannot be read.
        greatest_ms: The greatest value that the engine takes.

    Raises:
        ConfigurationError: The user's value is above what the engine or the broker allows, or not positive.
    """
    if requested_ms is None:
        known_ms = BROKER_DEFAULT_MS if broker_maximum_ms is None else broker_maximum_ms
        return min(greatest_ms, known_ms)
    if not LEAST_TIMEOUT_MS <= requested_ms <= greatest_ms:
        raise ConfigurationError(
            f"transaction.timeout.ms is {requested_ms}; the producer takes {LEAST_TIMEOUT_MS} to {greatest_ms}"
        )
    if broker_maximum_ms is not None and requested_ms > broker_maximum_ms:
        raise ConfigurationError(
            f"transaction.timeout.ms is {requested_ms}, above the broker's transaction.max.timeout.ms of {broker_maximum_ms}",
            next_step=f"lower it, or set transaction.max.timeout.ms={NEVER_MS} on the brokers",
        )
    return requested_ms


def warn_if_bounded(
    requested_ms: int | None, broker_maximum_ms: int | None, chosen_ms: int, *, cluster_id: str, transactional_id: str
) -> None:
    """Warn, once per process and cluster, if the broker and not the user limits the guarantee."""
    if requested_ms is not None or chosen_ms >= GREATEST_TIMEOUT_MS:
        return
    with _warned_lock:
        if cluster_id in _warned:
            return
        _warned.add(cluster_id)
    why = (
        f"The brokers' transaction.max.timeout.ms is {broker_maximum_ms}"
        if broker_maximum_ms is not None
        else f"The brokers' transaction.max.timeout.ms cannot be read, so their default of {chosen_ms} is assumed"
    )
    logger.warning(
        "%s: %s: if a decided transaction is not completed within %.0f s (owner dead, no recovery run), the broker "
        "aborts it and it is LOST. Set transaction.max.timeout.ms=%d on the brokers",
        transactional_id,
        why,
        chosen_ms / 1000,
        NEVER_MS,
    )


def tell_that_unlimited(how: str, *, cluster_id: str, transactional_id: str) -> None:
    """Log, once per process, cluster and way, that the broker never ends a transaction by itself.

    Args:
        how: The way in which that was agreed on.
        cluster_id: The cluster.
        transactional_id: The producer's id.
    """
    with _warned_lock:
        if (cluster_id, how) in _told:
            return
        _told.add((cluster_id, how))
    logger.info("%s: the brokers set no time limit to transactions (%s)", transactional_id, how)


def agree_on_transaction_timeout_ms(
    coordinator: TransactionCoordinator, requested_ms: int | None, transactional_id: str, deadline: Deadline
) -> int:
    """Ask the brokers for their maximum, choose the timeout, and warn if it is short.

    Raises:
        ConfigurationError: The user's value exceeds the maximum.
        Unavailable: The brokers did not answer in time.
    """
    maximum_ms = coordinator.max_transaction_timeout_ms(deadline)
    chosen_ms = choose_transaction_timeout_ms(requested_ms, maximum_ms)
    cluster_id = coordinator.cluster_id(deadline)
    warn_if_bounded(requested_ms, maximum_ms, chosen_ms, cluster_id=cluster_id, transactional_id=transactional_id)
    return chosen_ms
