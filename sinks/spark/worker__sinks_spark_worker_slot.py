"""A slot in use: leased at the start, renewed while the task runs, returned after success."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from dualwrite.clock import now_s
from dualwrite.errors import DualWriteError, Fenced, Unavailable
from dualwrite.stores.sql.slots import Lease, SlotPool

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
        rests: Whether the worker will keep the lane that uses it.
    """

    def __init__(self, lease: Lease, leased_at: datetime) -> None:
        self.lease = lease
        self.leased_at = leased_at
        self.kept_until: datetime | None = None
        self.rests = False
        self._leased_s = now_s()

    def keep_for(self, seconds: float) -> None:
        """Leave the slot leased after the block: the driver will decide on the part prepared in it.

        The time counts from now, not from the block's end or from the database's update: the broker does not wait for a
        paused worker.
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
    ended: Callable[[str], None] = lambda _: None,
) -> Generator[Slot, None, None]:
    """Lease a slot and keep the lease alive until the block ends.

    Leaving the block normally returns the slot, unless :meth:`Slot.keep_for` was called. An exception leaves the lease as it
    is: the driver settles what the task left behind, or the next holder of the slot does once the lease has ended. Losing
    the lease meanwhile does no harm: the next holder claims the slot's id, and that fences us.

    Args:
        pool: The pool.
        owner: Our name; see :meth:`SlotPool.lease`.
        lease_s: How long a lease lasts, in seconds.
        preferred: Slots that the worker could continue with.
        require: See :meth:`SlotPool.lease`.
        ended: See there.

    Raises:
        Unavailable, ConfigurationError: As :meth:`SlotPool.lease`.
        Fenced: On leaving the block, if the slot should be kept: another process has leased it.
        Unavailable: On leaving the block, if the slot should be kept: the database does not answer.
    """
    lease = pool.lease(owner, lease_s, preferred=preferred, require=require, ended=ended)
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
        renewer.join(lease_s)  # a hanging database holds the task no longer than its lease
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
            logger.warning("%s: the lease was not renewed; retrying: %s", lease.transactional_id, error)
