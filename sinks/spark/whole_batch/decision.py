"""The decision on a whole batch: all its tasks' rows and messages at once, or nothing of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from dualwrite import failpoints
from dualwrite.deadline import Deadline
from dualwrite.errors import (
    CompletionPending,
    DualWriteError,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.jobs.complete import complete_handed_over
from dualwrite.protocol.batches.entry import Way
from dualwrite.sinks.spark.columns.row_names import table_key
from dualwrite.sinks.spark.columns.table import require_types
from dualwrite.sinks.spark.driver.plan import DriverSide
from dualwrite.sinks.spark.driver.prepared_limit import choose_staging, require_prepared
from dualwrite.sinks.spark.worker.destinations import destination_of
from dualwrite.sinks.spark.writing.progress import shown
from dualwrite.sinks.spark.writing.staging import drop_dead_staging, drop_staging, empty, take_over
from dualwrite.stores.jobs.ledger import WHOLE_BATCH

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dualwrite.protocol.rows import StateRow
    from dualwrite.sinks.spark.columns.layout import Layout
    from dualwrite.sinks.spark.whole_batch.prepared_partition import Undecided

logger = logging.getLogger(__name__)


class WholeBatch(DriverSide):
    """One run of one batch that is decided as one."""

    def uses_staging(self, layout: Layout, *, moves: bool) -> bool:
        """As :func:`choose_staging`."""
        return choose_staging(self._engine, self._options.database_leg, layout.table[0], moves=moves)

    def begin(self, layout: Layout) -> None:
        """Record where the batch is written to, before anything of it is written.

        Raises:
            ConfigurationError: It was written to another destination, or partition by partition.
            Unavailable: The database does not answer.
        """
        destination = destination_of(self._options, layout, Way.WHOLE)
        self._ledger.begin(self._engine, self._options.sink, self._batch_id, destination)

    def decide(self, layout: Layout, prepared: Collection[Undecided], *, truncate: bool, upsert: Sequence[str]) -> bool:
        """Decide on all that the tasks have prepared, in one database transaction; then bring Kafka in line.

        On return the rows are in the table, the messages are visible, and the ledger names the batch.

        Args:
            layout: Which column goes where.
            prepared: What the tasks have handed over.
            truncate: Empty the table first, in the same transaction.
            upsert: Key columns: rows whose key is in the table replace those.

        Returns:
            Whether this call has written the batch. False if it was written already.

        Raises:
            ConfigurationError: The batch was written to another destination meanwhile; nothing of it is written to this one.
            TransactionAborted: Nothing of the batch is written. Run it again.
            Fenced: Another driver of the same batch has taken over; it decides.
            TransactionInDoubt: The database's answer is missing, and it does not answer. Run the batch again: what is written
                is skipped.
            CompletionPending: Decided. Run the batch again: nothing is written twice, and Kafka is brought in line.
            DecidedTransactionLost, OutcomeUnverifiable: Rows are in the database, and Kafka does not have their messages, or
                nobody can tell. It is recorded.
        """
        failpoints.hit("batch.prepared")
        ordered = sorted(prepared, key=lambda one: one.transactional_id)
        decided = None
        try:
            written = self._decide(layout, ordered, truncate=truncate, upsert=upsert)
            decided = time.monotonic() if written else None
        except TransactionInDoubt as doubt:
            written = self._resolve(doubt)
        failpoints.hit("batch.decided")
        try:
            completed = self._complete(ordered) if decided is not None else []
            slots = self._settle()
        except Unavailable as error:
            raise CompletionPending(f"{self.name}: decided, and Kafka has not all of it yet: {error.what}") from error
        self._note_completed(WHOLE_BATCH, None if decided is None else time.monotonic() - decided)
        logger.info("%s: completed", self.name)
        self._drop_staging(layout, slots, completed)
        failpoints.hit("batch.completed")
        self._raise_new_incidents()
        return written

    def _decide(self, layout: Layout, prepared: Sequence[Undecided], *, truncate: bool, upsert: Sequence[str]) -> bool:
        names, key = layout.table_column_names, table_key(layout)
        with self._engine.connect() as connection:
            self._store.begin(connection)
            try:
                if prepared:
                    # A driver that is paused from here on loses its session, and its locks with it.
                    self._store.read_incarnation(connection, prepared[0].transactional_id)
                if not self._record(connection, layout, prepared):
                    logger.info("%s: already written", self.name)
                    self._store.rollback(connection)
                    return False
                self._require_leases(connection, prepared)
                for one in prepared:
                    self._decide_on_slot(connection, one)
                if truncate:
                    empty(connection, layout.table)
                require_prepared(connection, [one for one in prepared if one.staged is None], self.name)
                for one in prepared:
                    if one.staged is not None:
                        take_over(
                            connection,
                            one.staged,
                            layout.table,
                            names,
                            rows=one.rows,
                            partition=one.partition,
                            key=key,
                            upsert=upsert,
                        )
                if any(
                    one.staged is not None for one in prepared
                ):  # the others' tasks have looked, and hold their locks
                    require_types(connection, layout.table, layout.table_types, shown_name=layout.table[1])
                self._store.run_deferred(connection)
                # Once more: moving many rows takes its time, and after the lease the broker aborts what is decided.
                self._require_leases(connection, prepared)
                failpoints.hit("batch.recorded")
            except BaseException:
                self._store.rollback(connection)
                raise
            self._store.commit(connection, answer_s=self._options.timeout_s)
        logger.info(
            "%s: decided, %d rows, %s in %d partitions",
            self.name,
            sum(one.rows for one in prepared),
            shown(sum(one.bytes for one in prepared)),
            len(prepared),
        )
        return True

    def _record(self, connection: Connection, layout: Layout, prepared: Sequence[Undecided]) -> bool:
        destination = destination_of(self._options, layout, Way.WHOLE)
        self._ledger.begin(connection, self._options.sink, self._batch_id, destination)
        if self._ledger.seen(connection, self._options.sink, self._batch_id, WHOLE_BATCH):
            return False
        rows = sum(one.rows for one in prepared)
        return self._ledger.insert(
            connection,
            self._options.sink,
            self._batch_id,
            WHOLE_BATCH,
            row_count=rows,
            message_count=rows,
            partition_count=max(1, len(prepared)),
            started_at=min((one.started_at for one in prepared), default=None),
        )

    def _require_leases(self, connection: Connection, prepared: Sequence[Undecided]) -> None:
        held = self._pool.held_in(connection, {one.transactional_id: one.owner for one in prepared})
        late = [one for one in prepared if one.transactional_id not in held]
        if late:
            raise TransactionAborted(
                f"{self.name}: {len(late)} of {len(prepared)} partitions were prepared too long ago, or taken over by "
                "another driver",
                transactional_id=late[0].transactional_id,
                next_step="run the batch again; if this comes again, make it smaller, or raise decide_within_s and the "
                "broker's transaction.max.timeout.ms",
            )

    def _decide_on_slot(self, connection: Connection, one: Undecided) -> None:
        transactional_id = one.transactional_id
        ours, _ = self._store.decide(
            connection,
            transactional_id,
            one.incarnation,
            one.prepared,
            namespace=one.namespace,
            idle_s=self._options.margin_s / 2,  # the other half is for COMMIT and for Kafka
        )
        if not ours:
            raise Fenced(
                f"{self.name}: the slot of partition {one.partition} was claimed by another driver",
                transactional_id=transactional_id,
            )

    def _complete(self, prepared: Sequence[Undecided]) -> Sequence[Undecided]:
        """Complete without a claim what can be, so that the tasks' workers can go on with their producers. Returns that."""
        found = {one.transactional_id: one for one in prepared}
        try:
            rows = [
                row
                for row in self._store.read(list(found))
                if row.prepared == found[row.transactional_id].prepared
                and row.incarnation == found[row.transactional_id].incarnation
            ]
            completed = complete_handed_over(
                rows, coordinator=self._coordinator, store=self._store, deadline=Deadline(self._options.timeout_s)
            )
            done = [found[row.transactional_id] for row in completed]
            for rests in (True, False):
                owners = {one.transactional_id: one.owner for one in done if one.rests is rests}
                self._pool.release(owners, kept=rests)
        except DualWriteError as error:
            logger.warning("%s: its slots are claimed to complete it: %s", self.name, error)
            return []
        return done

    def _resolve(self, doubt: TransactionInDoubt) -> bool:
        """Claiming all slots waits for the old backend's locks; whatever it was going to do is done then."""
        try:
            self._settle()
            with self._engine.connect() as connection:
                written = self._ledger.seen(connection, self._options.sink, self._batch_id, WHOLE_BATCH)
        except DualWriteError as error:
            raise doubt from error
        if not written:
            raise TransactionAborted(
                f"{self.name}: the connection broke during COMMIT; the database has rolled back",
                next_step="run the batch again",
            ) from doubt
        return True

    def give_up(self, layout: Layout) -> None:
        """Abort what tasks have prepared and nobody has decided. What was decided is completed.

        Tasks that still run can prepare nothing any more.

        Raises:
            DecidedTransactionLost, OutcomeUnverifiable, Unavailable: As :meth:`decide`.
        """
        self._note_failed()
        slots = self._settle()
        self._drop_staging(layout, slots)
        self._raise_new_incidents()

    def _drop_staging(self, layout: Layout, slots: Iterable[StateRow], completed: Sequence[Undecided] = ()) -> None:
        drop_staging(self._engine, [one.staged for one in completed if one.staged is not None])
        drop_dead_staging(
            self._engine,
            layout.table[0],
            {row.transactional_id: row.incarnation for row in slots},
            lambda: {lease.transactional_id: lease.owner for lease in self._pool.held_by("")},
        )
