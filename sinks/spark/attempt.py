"""One attempt of a task at its partition: who it is, what is already written, and a lane of its own to write in."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualwrite.claiming import Ground, default_owner, unique_owner
from dualwrite.deadline import Deadline
from dualwrite.errors import DecidedTransactionLost, DualWriteError, OutcomeUnverifiable
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.lane import Lane
from dualwrite.sinks.spark.owners import owner_prefix, settle_leases
from dualwrite.sinks.spark.slot import Slot, leased_slot
from dualwrite.stores.ledger import Ledger
from dualwrite.stores.slots import SlotPool
from dualwrite.stores.state import SqlStateStore

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.kafka.config import KafkaConfig
    from dualwrite.ports import StateRow
    from dualwrite.sinks.spark.settings import SinkOptions

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
        options: The sink's settings.
        batch_id: Name of the batch.
        partition: Number of the partition.
        number: Number of the attempt, for people.
        engine: The database.
    """

    def __init__(self, options: SinkOptions, batch_id: str, partition: int, number: int, engine: Engine) -> None:
        self.options = options
        self.batch_id = batch_id
        self.partition = partition
        self.engine = engine
        self.ledger = Ledger(options.schema)
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
        options = self.options
        pool = self._pool()
        with closing(KafkaCoordinator(options.kafka_config())) as coordinator:
            ground = Ground(coordinator, SqlStateStore(self.engine, schema=options.schema), unique_owner())
            former = pool.held_by(owner_prefix(self.batch_id, self.partition))
            settle_leases(ground, pool, former, Deadline(options.timeout_s), self.name)

    def _pool(self) -> SlotPool:
        options = self.options
        return SlotPool(self.engine, options.pool, schema=options.schema, max_slots=options.max_slots)

    @contextmanager
    def workplace(self) -> Generator[Workplace, None, None]:
        """Lease a slot, claim it, and make a producer; all are let go of when the block ends.

        Raises:
            Unavailable, ConfigurationError, Fenced: It could not be had.
        """
        options, config = self.options, self.options.kafka_config()
        with (
            closing(KafkaCoordinator(config)) as coordinator,
            leased_slot(self._pool(), self._owner, options.lease_s) as slot,
        ):
            ground = Ground(coordinator, SqlStateStore(self.engine, schema=options.schema), unique_owner())
            lane = Lane(slot.lease.transactional_id, ground, _producer_maker(config, ground, options.timeout_s))
            try:
                self._make_ready(lane)
                yield Workplace(lane, ground, slot)
            finally:
                lane.discard()

    def _make_ready(self, lane: Lane) -> None:
        deadline = Deadline(self.options.timeout_s)
        try:
            lane.ready(deadline)
        except (DecidedTransactionLost, OutcomeUnverifiable):
            # Of the slot's former user. It is recorded, and the driver reports it.
            logger.exception("%s: the slot's former user has lost a transaction", self.name)
            lane.ready(deadline)


def _producer_maker(
    config: KafkaConfig, ground: Ground, timeout_s: float
) -> Callable[[StateRow], TransactionalProducer]:
    def make_producer(row: StateRow) -> TransactionalProducer:
        return TransactionalProducer(
            config,
            row.kafka_id(row.incarnation),
            coordinator=ground.coordinator,
            incarnation=row.incarnation,
            call_timeout_s=timeout_s,
            bulk=True,
        )

    return make_producer
