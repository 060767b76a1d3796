"""One attempt of a task at its partition: who it is, what is already written, and a lane of its own to write in."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualwrite.claiming import Ground, default_owner
from dualwrite.deadline import Deadline
from dualwrite.errors import DecidedTransactionLost, DualWriteError, OutcomeUnverifiable
from dualwrite.lane import Lane
from dualwrite.sinks.spark.owners import owner_prefix, settle_leases
from dualwrite.sinks.spark.slot import Slot, leased_slot
from dualwrite.stores.ledger import Ledger
from dualwrite.stores.slots import SlotPool

if TYPE_CHECKING:
    from dualwrite.sinks.spark.kept import Servers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workplace:
    """What an attempt writes with.

    Attributes:
        lane: Ready for one dual write.
        ground: The two servers.
        slot: The slot that the lane stands on.
    """

    lane: Lane
    ground: Ground
    slot: Slot


class Attempt:
    """One attempt at one partition.

    Args:
        servers: What it writes to.
        batch_id: Name of the batch.
        partition: Number of the partition.
        number: Number of the attempt, for people.
    """

    def __init__(self, servers: Servers, batch_id: str, partition: int, number: int) -> None:
        self.options = options = servers.options
        self.batch_id = batch_id
        self.partition = partition
        self.engine = servers.engine
        self.ledger = Ledger(options.schema)
        self._servers = servers
        self.name = f"sink {options.sink!r} batch {batch_id!r} partition {partition} attempt {number}"
        who = f"attempt {number} {secrets.token_hex(4)} {default_owner()}"
        self._owner = owner_prefix(batch_id, partition) + who

    def seen(self, partition_id: int) -> bool:
        """Whether the ledger has that partition of the batch.

        Raises:
            ConfigurationError, Unavailable: As :meth:`Ledger.seen`.
        """
        with self.engine.connect() as connection:
            return self.ledger.seen(connection, self.options.sink, self.batch_id, partition_id)

    def seen_after(self, error: Exception, partition_id: int) -> bool:
        """Whether the ledger has that partition in spite of the error: another attempt shows as this one's failure."""
        try:
            seen = self.seen(partition_id)
        except DualWriteError as more:
            logger.warning("%s: the ledger could not be read after a failure: %s", self.name, more)
            return False
        if seen:
            logger.info("%s: written all the same; this attempt failed: %s", self.name, error)
        return seen

    def settle_former(self) -> None:
        """Settle what other attempts at this partition have left: they are fenced, and what they have prepared is undone.

        Raises:
            ConfigurationError, Unavailable: It could not be settled.
        """
        pool = self._pool()
        former = pool.held_by(owner_prefix(self.batch_id, self.partition))
        settle_leases(self._servers.ground, pool, former, Deadline(self.options.timeout_s), self.name)

    def _pool(self) -> SlotPool:
        options = self.options
        return SlotPool(self.engine, options.pool, schema=options.schema, max_slots=options.max_slots)

    @contextmanager
    def workplace(self) -> Generator[Workplace, None, None]:
        """Lease a slot, and go on with the lane that rests here for it; else claim it, and make a producer.

        When the block has ended well, the lane rests again. After an error it is thrown away.

        Raises:
            Unavailable, ConfigurationError, Fenced: It could not be had.
        """
        servers, lease_s = self._servers, self.options.lease_s
        with leased_slot(self._pool(), self._owner, lease_s, preferred=servers.resting()) as slot:
            lane = servers.take(slot.lease.transactional_id)
            slot.rests = servers.has_room
            try:
                self._make_ready(lane)
                yield Workplace(lane, servers.ground, slot)
            except BaseException:
                lane.discard()
                raise
            servers.keep(lane)

    def _make_ready(self, lane: Lane) -> None:
        deadline = Deadline(self.options.timeout_s)
        try:
            lane.ready(deadline)
        except (DecidedTransactionLost, OutcomeUnverifiable):
            # Of the slot's former user. It is recorded, and the driver reports it.
            logger.exception("%s: the slot's former user has lost a transaction", self.name)
            lane.ready(deadline)
