"""A slot in use: leased at the start, renewed while the task runs, given back when all is well."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from dualwrite.deadline import now_s
from dualwrite.errors import DualWriteError, Fenced, Unavailable
from dualwrite.stores.jobs.slots import Lease, SlotPool

if TYPE_CHECKING:
    from sqlalchemy import Connection

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3


class Slot:
    """A slot in use.

    Attributes:
        lease: The lease. Its id is the slot's transactional id.
        leased_at: When it was leased, by the database's clock.
        kept_until: See :meth:`keep_for`.
        rests: Whether the worker is going to keep the lane that stands on it.
    """

    def __init__(self, lease: Lease, leased_at: datetime) -> None:
        self.lease = lease
        self.leased_at = leased_at
        self.kept_until: datetime | None = None
        self.rests = False
        self._leased_s = now_s()

    def keep_for(self, seconds: float) -> None:
        """Leave the slot leased when the block ends: somebody else will decide on what is prepared in it.

        For so long from now on, however long it takes until the block has ended and the database is told: the broker does not
        wait for a worker that is paused.
        """
        self.kept_until = self.leased_at + timedelta(seconds=now_s() - self._leased_s + seconds)


@contextmanager
def leased_slot(
    pool: SlotPool,
    owner: str,
    lease_s: float,
    *,
    preferred: Sequence[str] = (),
    require: Callable[[Connection], None] = lambda _: None,
) -> Generator[Slot, None, None]:
    """Lease a slot and keep the lease alive until the block ends.

    Leaving the block normally gives the slot back, unless it is to be kept. Leaving it by an exception keeps the lease as it
    is: what the task left behind is for the driver to settle, or for whoever leases the slot when the lease is over. A lease
    that is lost meanwhile harms nothing: whoever gets the slot claims its id, and that fences us.

    Args:
        pool: The pool.
        owner: Who we are; see :meth:`SlotPool.lease`.
        lease_s: How long a lease lasts, in seconds.
        preferred: Slots that the worker could go on with.
        require: See :meth:`SlotPool.lease`.

    Raises:
        Unavailable, ConfigurationError: As :meth:`SlotPool.lease`.
        Fenced: From leaving the block: the slot was to be kept, and somebody else has leased it.
        Unavailable: From leaving the block, where the slot was to be kept: the database does not answer.
    """
    lease = pool.lease(owner, lease_s, preferred=preferred, require=require)
    slot = Slot(lease, lease.until - timedelta(seconds=lease_s))
    stop = threading.Event()
    renewer = threading.Thread(
        target=_renew, args=(pool, lease, lease_s, stop), name=f"lease of {lease.transactional_id}", daemon=True
    )
    renewer.start()
    try:
        yield slot
    finally:
        stop.set()
        renewer.join(lease_s)  # a database that hangs does not hold the task longer than its lease
    if slot.kept_until is not None:
        if renewer.is_alive():
            raise Unavailable(
                "the lease could not be kept: a renewal of it may come later", transactional_id=lease.transactional_id
            )
        pool.keep(lease, slot.kept_until)
        return
    try:
        pool.release({lease.transactional_id: lease.owner}, kept=slot.rests)
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
