"""A slot in use: leased at the start, renewed while the task runs, given back when all is well."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager

from dualwrite.errors import DualWriteError, Fenced
from dualwrite.stores.slots import Lease, SlotPool

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3


@contextmanager
def leased_slot(pool: SlotPool, owner: str, lease_s: float) -> Generator[Lease, None, None]:
    """Lease a slot and keep the lease alive until the block ends.

    Leaving the block normally gives the slot back. Leaving it by an exception keeps the lease: what the task left behind is
    for the driver to settle, or for whoever leases the slot when the lease is over. A lease that is lost meanwhile harms
    nothing: whoever gets the slot claims its id, and that fences us.

    Raises:
        Unavailable, ConfigurationError: As :meth:`SlotPool.lease`.
    """
    lease = pool.lease(owner, lease_s)
    stop = threading.Event()
    renewer = threading.Thread(
        target=_renew, args=(pool, lease, lease_s, stop), name=f"lease of {lease.transactional_id}", daemon=True
    )
    renewer.start()
    try:
        yield lease
    finally:
        stop.set()
        renewer.join(lease_s)  # a database that hangs does not hold the task longer than its lease
    try:
        pool.release(lease)
    except DualWriteError as error:
        logger.warning(
            "%s: the slot was not given back; its lease will end by itself: %s", lease.transactional_id, error
        )


def _renew(pool: SlotPool, lease: Lease, lease_s: float, stop: threading.Event) -> None:
    while not stop.wait(lease_s / _RENEWALS_PER_LEASE):
        try:
            pool.renew(lease, lease_s)
        except Fenced as error:
            logger.warning("the lease is lost, the write will be refused: %s", error)
            return
        except DualWriteError as error:
            logger.warning("%s: the lease was not renewed, tried again: %s", lease.transactional_id, error)
