"""One attempt of a task at its partition: its name, what is already written, and a lane to write in."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline
from dualwrite.errors import DualWriteError, TransactionAborted
from dualwrite.protocol.values__protocol_naming import owner_prefix
from dualwrite.recovery.claim import OwnerContext, default_owner
from dualwrite.sinks.spark.worker__sinks_spark_worker_owners import settle_leases
from dualwrite.sinks.spark.worker__sinks_spark_worker_slot import Slot, leased_slot
from dualwrite.stores.sql.ledger import Ledger
from dualwrite.stores.sql.ledger__stores_sql_jobs_runs import Runs
from dualwrite.stores.sql.slots import SlotPool
from dualwrite.writing.lane import Lane

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dualwrite.recovery.settle import SettleReport
    from dualwrite.sinks.spark.worker__sinks_spark_worker_worker_cache import WorkerCache
    from dualwrite.stores.sql.ledger import WrittenPartition
    from dualwrite.stores.sql.ledger__stores_sql_jobs_runs import Run

logger = logging.getLogger(__name__)

_SHOWN: Final = 8
PREPARED_TOO_LONG_AGO: Final = (
    "run the batch again; if this comes again, make it smaller, or raise decide_within_s and the broker's "
    "transaction.max.timeout.ms"
)
"""The advice on a batch of which a part has outlasted its time."""


@dataclass(frozen=True)
class Workplace:
    """The lane and slot of an attempt.

    Attributes:
        lane: Ready for one dual write.
        context: The two servers.
        slot: The slot whose id the lane uses.
    """

    lane: Lane
    context: OwnerContext
    slot: Slot


class Attempt:
    """One attempt at one partition.

    Args:
        servers: The servers that it writes to.
        batch_id: Name of the batch.
        partition: Number of the partition.
        number: Number of the attempt, for people.
        run: The run of the batch that the attempt belongs to; None if it is not known.
    """

    def __init__(self, servers: WorkerCache, batch_id: str, partition: int, number: int, run: Run | None) -> None:
        self.options = options = servers.options
        self.batch_id = batch_id
        self.partition = partition
        self.database = servers.database
        self.engine = servers.engine
        self.ledger = Ledger(options.schema)
        self._servers = servers
        self._run = run
        self.name = f"sink {options.sink!r} batch {batch_id!r} partition {partition} attempt {number}"
        self._run_name = run.name if run is not None else batch_id
        self._run_mark = f" run {run.token[:_SHOWN]} " if run is not None else " "
        self._prefix = owner_prefix(self._run_name, partition)
        self._owner = f"{self._prefix}attempt {number}{self._run_mark}{secrets.token_hex(4)} {default_owner()}"

    def seen(self, partition_id: int) -> bool:
        """Whether the ledger has that partition of the batch.

        Raises:
            ConfigurationError, Unavailable: As :meth:`Ledger.seen`.
        """
        with self.engine.connect() as connection:
            return self.ledger.seen(connection, self.options.sink, self.batch_id, partition_id)

    def written(self) -> WrittenPartition | None:
        """The ledger's record of this partition; None if it is not written.

        Raises:
            ConfigurationError, Unavailable: As :meth:`Ledger.partition`.
        """
        with self.engine.connect() as connection:
            return self.ledger.partition(connection, self.options.sink, self.batch_id, self.partition)

    def seen_after(self, error: Exception, partition_id: int) -> bool:
        """Whether the ledger has that partition despite the error: another attempt may be the cause of our failure."""
        try:
            seen = self.seen(partition_id)
        except DualWriteError as more:
            logger.warning("%s: the ledger could not be read after a failure: %s", self.name, more)
            return False
        if seen:
            logger.info("%s: already written; this attempt failed: %s", self.name, error)
        return seen

    def require_run(self, connection: Connection) -> None:
        """Continue only while the run has not been given up; see :meth:`Runs.require`.

        Raises:
            Fenced, ConfigurationError, Unavailable, TransactionAborted: As there.
        """
        if self._run is not None:
            Runs(self.engine, self.options.schema).require(connection, self._run)

    def _require_in_time(self, former: str) -> None:
        """Fail at once if the slot that we would take holds another partition that this run has prepared.

        Its time to be decided is over, and with it that of the whole batch: taking the slot would only hide why.

        Raises:
            TransactionAborted: It does.
        """
        of_this_run = former.startswith(owner_prefix(self._run_name)) and self._run_mark in former
        if of_this_run and self._run is not None and not former.startswith(self._prefix):
            raise TransactionAborted(
                f"{self.name}: another partition of this run was prepared too long ago, and can no longer be decided",
                next_step=PREPARED_TOO_LONG_AGO,
            )

    def settle_former(self) -> SettleReport:
        """Settle what other attempts at this partition have left: fences them, and undoes what they have prepared.

        As :func:`settle_leases`.

        Raises:
            ConfigurationError, Unavailable: They could not be settled.
        """
        pool = self._pool()
        former = pool.held_by(self._prefix)
        deadline = Deadline(self.options.timeout_s)
        return settle_leases(self._servers.context, pool, former, deadline, name=self.name, prefix=self._prefix)

    def _pool(self) -> SlotPool:
        options = self.options
        return SlotPool(self.engine, options.pool, schema=options.schema, max_slots=options.max_slots)

    @contextmanager
    def workplace(self) -> Generator[Workplace, None, None]:
        """Lease a slot, and continue with the lane that rests here for it; else claim it, and create a producer.

        After a successful block, the lane rests again. After an error it is discarded.

        Raises:
            Unavailable, ConfigurationError: No slot or lane could be had.
            Fenced: The run was given up, or the slot was settled meanwhile.
            TransactionAborted: The run has prepared a partition too long ago.
        """
        servers, lease_s, pool = self._servers, self.options.lease_s, self._pool()
        with leased_slot(
            pool,
            self._owner,
            lease_s,
            preferred=servers.resting(),
            require=self.require_run,
            ended=self._require_in_time,
        ) as slot:
            lane = servers.take(slot.lease.transactional_id)
            slot.rests = servers.has_room
            try:
                lane.ready(Deadline(self.options.timeout_s))
                # If the lease is lost, its settler may have claimed the slot before our claim, and would not return to settle.
                pool.renew(slot.lease, lease_s)
                yield Workplace(lane, servers.context, slot)
            except BaseException:
                lane.discard()
                raise
            servers.keep(lane)
