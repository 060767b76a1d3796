"""The decision on a whole batch: all rows and messages of its tasks at once, or none of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from dualwrite import failpoints
from dualwrite.errors import DualWriteError, TransactionAborted
from dualwrite.protocol.batches__protocol_batches_entry import Way
from dualwrite.recovery.claim import OwnerContext, unique_owner
from dualwrite.sinks.batches import Decision
from dualwrite.sinks.spark.databases.database import Staged
from dualwrite.sinks.spark.digests__sinks_spark_columns_row_names import table_key
from dualwrite.sinks.spark.plan import DriverSide, uses_staging
from dualwrite.sinks.spark.worker import PREPARED_TOO_LONG_AGO
from dualwrite.sinks.spark.worker__sinks_spark_worker_destinations import destination_of
from dualwrite.sinks.spark.writing__sinks_spark_writing_progress import shown
from dualwrite.stores.sql.drivers__stores_sql_participants import name_of
from dualwrite.stores.sql.ledger import WHOLE_BATCH

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dualwrite.protocol.values__protocol_rows import StateRow
    from dualwrite.sinks.spark.databases.database import Emptying
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.whole_batch__sinks_spark_whole_batch_prepared_partition import PreparedPartition

logger = logging.getLogger(__name__)


class WholeBatch(DriverSide):
    """One run of one batch that is decided as a whole."""

    def uses_staging(self, layout: Layout, *, empty: Emptying | None, upsert: Sequence[str]) -> bool:
        """As :func:`uses_staging`."""
        return uses_staging(self.database, self._options, layout, empty=empty, upsert=upsert)

    def begin(self, layout: Layout) -> None:
        """Record the batch's destination, before anything of it is written.

        Raises:
            ConfigurationError: The batch was written to another destination, or partition by partition.
            Unavailable: The database does not answer.
        """
        destination = destination_of(self.database, self._options, layout, Way.WHOLE)
        self._ledger.begin(self._engine, self._options.sink, self._batch_id, destination)

    def decide(
        self, layout: Layout, prepared: Collection[PreparedPartition], *, empty: Emptying | None, upsert: Sequence[str]
    ) -> bool:
        """Decide on everything that the tasks have prepared, in one database transaction; then complete it in Kafka.

        On return the rows are in the table, the messages are visible, and the ledger names the batch.

        Args:
            layout: Which column goes where.
            prepared: The parts that the tasks have handed over.
            empty: How to empty the table first, in the same transaction; None to keep its rows.
            upsert: Key columns: rows replace those in the table that have the same key.

        Returns:
            Whether this call has written the batch. False if it was already written.

        Raises:
            ConfigurationError: The batch was written to another destination meanwhile; nothing of it is written to this one.
            TransactionAborted: Nothing of the batch is written. Run it again.
            Fenced: Another driver of the same batch has taken over; it decides.
            TransactionInDoubt: The answer to COMMIT is missing, and the database does not answer. Run the batch again: what
                is already written is skipped.
            CompletionPending: Decided. Run the batch again: nothing is written twice, and Kafka's part is completed.
            DecidedTransactionLost, OutcomeUnverifiable: Rows are in the database; their messages are lost, or their outcome
                cannot be verified. The loss is recorded.
        """
        deciding = _Deciding(self, layout, prepared, empty=empty, upsert=upsert)
        decision = Decision(
            deciding,
            prepared,
            OwnerContext(self._coordinator, self._store, unique_owner()),
            connect=self._engine.connect,
            timeout_s=self._options.timeout_s,
            idle_s=self._options.margin_s / 2,  # leaves the other half for COMMIT and for Kafka
        )
        written = decision.run()
        self._note_completed(WHOLE_BATCH, deciding.decided_ago_s())
        logger.info("%s: completed", self.name)
        self._drop_staging(layout, deciding.slots, deciding.released)
        failpoints.hit("batch.completed")
        self._raise_new_incidents()
        self.announce()
        return written

    def record(self, connection: Connection, layout: Layout, prepared: Sequence[PreparedPartition]) -> bool:
        """Insert the batch's row into the ledger. False if it is already there."""
        options, destination = self._options, destination_of(self.database, self._options, layout, Way.WHOLE)
        self._ledger.begin(connection, options.sink, self._batch_id, destination)
        if self._ledger.seen(connection, options.sink, self._batch_id, WHOLE_BATCH):
            return False
        rows = sum(one.rows for one in prepared)
        return self._ledger.insert(
            connection,
            options.sink,
            self._batch_id,
            WHOLE_BATCH,
            row_count=rows,
            message_count=rows,
            partition_count=max(1, len(prepared)),
            started_at=min((one.started_at for one in prepared), default=None),
        )

    def require_leases(self, connection: Connection, prepared: Sequence[PreparedPartition]) -> None:
        """Lock every part's lease until the transaction ends. Raise TransactionAborted if one has ended."""
        held = self._pool.held_in(connection, {one.transactional_id for one in prepared})
        late = [one for one in prepared if held.get(one.transactional_id) != one.owner]
        if late:
            raise TransactionAborted(
                f"{self.name}: {len(late)} of {len(prepared)} partitions were prepared too long ago, or taken over by "
                "another driver",
                transactional_id=late[0].transactional_id,
                next_step=PREPARED_TOO_LONG_AGO,
            )

    def is_written(self) -> bool:
        """Whether the ledger names the batch."""
        with self._engine.connect() as connection:
            return self._ledger.seen(connection, self._options.sink, self._batch_id, WHOLE_BATCH)

    def release(self, completed: Sequence[PreparedPartition]) -> bool:
        """Return the slots of completed parts to the pool. False on failure: they must then be claimed like the others."""
        try:
            for rests in (True, False):
                self._pool.release(
                    {one.transactional_id: one.owner for one in completed if one.rests is rests}, kept=rests
                )
        except DualWriteError as error:
            logger.warning("%s: its slots are claimed to free them: %s", self.name, error)
            return False
        return True

    def settle_all(self) -> Sequence[StateRow]:
        """Settle whatever is left of the batch. Returns the rows of all the sink's slots, as they are then."""
        return self._settle()

    def give_up(self, layout: Layout) -> None:
        """Abort parts that are prepared and undecided; complete those that are decided.

        On return, tasks that still run cannot prepare anything any more.

        Raises:
            DecidedTransactionLost, OutcomeUnverifiable, Unavailable: As :meth:`decide`.
        """
        self._note_failed()
        slots = self._settle()
        self._drop_staging(layout, slots)
        self._raise_new_incidents()

    def _drop_staging(
        self, layout: Layout, slots: Iterable[StateRow], completed: Sequence[PreparedPartition] = ()
    ) -> None:
        self.database.drop_staging([one.staged for one in completed if one.staged is not None])
        self.database.drop_dead_staging(
            layout.table[0],
            {row.transactional_id: row.incarnation for row in slots},
            lambda: {lease.transactional_id: lease.owner for lease in self._pool.held_by("")},
        )


class _Deciding:
    """The decision on one batch; implements :class:`~dualwrite.sinks.batches.Batch`.

    Attributes:
        slots: The rows of the sink's slots, after :meth:`settle`.
        released: The parts whose slots went back to the pool without a claim.
    """

    def __init__(
        self,
        driver: WholeBatch,
        layout: Layout,
        prepared: Collection[PreparedPartition],
        *,
        empty: Emptying | None,
        upsert: Sequence[str],
    ) -> None:
        self._driver = driver
        self._layout = layout
        self._prepared = sorted(prepared, key=lambda one: one.transactional_id)
        self._empty = empty
        self._upsert = upsert
        self._decided_at: float | None = None
        self.name = driver.name
        self.slots: Sequence[StateRow] = ()
        self.released: Sequence[PreparedPartition] = ()

    def record(self, connection: Connection) -> bool:
        return self._driver.record(connection, self._layout, self._prepared)

    def require_held(self, connection: Connection) -> None:
        self._driver.require_leases(connection, self._prepared)

    def bring(self, connection: Connection) -> None:
        layout = self._layout
        database = self._driver.database
        if self._empty is not None:
            database.empty(connection, layout.table, self._empty)
        staged = [Staged(one.staged, one.rows, one.partition) for one in self._prepared if one.staged is not None]
        names = [name_of(one.namespace, one.prepared) for one in self._prepared if one.staged is None]
        if names:
            database.require_prepared(connection, names, self.name)
        if staged:
            database.take_over(
                connection,
                staged,
                layout.table,
                layout.table_column_names,
                key=table_key(layout),
                upsert=self._upsert,
            )
            # Tasks with prepared rows have checked the types, and their locks keep them.
            database.require_types(connection, layout.table, layout.table_types, shown_name=layout.table[1])

    def decided(self) -> None:
        self._decided_at = time.monotonic()
        logger.info(
            "%s: decided, %d rows, %s in %d partitions",
            self.name,
            sum(one.rows for one in self._prepared),
            shown(sum(one.bytes for one in self._prepared)),
            len(self._prepared),
        )

    def decided_ago_s(self) -> float | None:
        """Seconds since the decision; None if an earlier call decided."""
        return None if self._decided_at is None else time.monotonic() - self._decided_at

    def is_written(self) -> bool:
        return self._driver.is_written()

    def settle(self, completed: Collection[str]) -> None:
        done = [one for one in self._prepared if one.transactional_id in completed]
        if done and self._driver.release(done):
            self.released = done
        self.slots = self._driver.settle_all()
