"""The ledger: the partitions that a job has already written. Its primary key decides which attempt counts."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import ColumnElement, Connection, Engine, bindparam, exc, exists, func, select, update

from dualwrite import failpoints
from dualwrite.protocol.batches__protocol_batches_entry import Destination, Entry, Recorded, Way, next_entry
from dualwrite.stores.sql.access__stores_sql_access_failures import map_database_error
from dualwrite.stores.sql.ledger__stores_sql_jobs_batch_refusals import check_partition_count, other_destination
from dualwrite.stores.sql.short_transactions import dialect_of
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.stores.sql.tables__stores_sql_tables_clock import database_now, database_now_plus
from dualwrite.stores.sql.tables__stores_sql_tables_rows import check_name

WHOLE_BATCH: Final = -1
"""The partition id of a batch that is written as a whole."""
BEGUN: Final = -2
"""The partition id of the row that records a batch's destination, and the number of partitions it was begun with."""


@dataclass(frozen=True)
class WrittenPartition:
    """One partition that is written and committed.

    Attributes:
        rows: Number of rows in it.
        rows_digest: The sink's digest of them, to recognise them in a later attempt; None if it recorded none.
    """

    rows: int
    rows_digest: int | None


@dataclass(frozen=True)
class Written:
    """How much of a batch is written and committed.

    Attributes:
        partitions: Number of partitions.
        rows: Number of rows in them.
        messages: Number of messages in them.
    """

    partitions: int
    rows: int
    messages: int


class Ledger:
    """The ledger in one database schema. Given a connection, its methods run in the caller's transaction.

    A row counts once its transaction commits.

    Args:
        schema: The database schema of the library's tables; None for the default one.
    """

    def __init__(self, schema: str | None = None) -> None:
        self._schema = schema
        self._ledger = ledger = declare_tables(schema).ledger
        of_batch = (ledger.c.sink == bindparam("sink_"), ledger.c.batch_id == bindparam("batch_"))
        self._seen = select(exists().where(*of_batch, ledger.c.partition_id == bindparam("partition_")))
        self._of_batch = of_batch
        # Ignore the row of a whole batch: it counts one run's partitions, and the next run may have another number.
        self._started = select(ledger.c.partition_count).where(*of_batch, ledger.c.partition_id != WHOLE_BATCH).limit(1)
        self._written = select(
            func.count(),
            func.coalesce(func.sum(ledger.c.row_count), 0),
            func.coalesce(func.sum(ledger.c.message_count), 0),
        ).where(*of_batch, ledger.c.partition_id >= 0)

    def seen(self, connection: Connection, sink: str, batch_id: str, partition_id: int) -> bool:
        """Whether the partition of that batch is written and committed.

        Args:
            connection: Inside a transaction.
            sink: Name of the sink.
            batch_id: Name of the batch.
            partition_id: Number of the partition, ``WHOLE_BATCH`` for a batch that is written as a whole.

        Raises:
            ConfigurationError: The table or a right is missing.
            Unavailable: The database does not answer.
            TransactionAborted: The transaction has failed.
        """
        bound = {"sink_": sink, "batch_": batch_id, "partition_": partition_id}
        with self._on(connection):
            seen = bool(connection.scalar(self._seen, bound))
        if not seen:
            failpoints.hit("ledger.checked")
        return seen

    def partition(self, connection: Connection, sink: str, batch_id: str, partition_id: int) -> WrittenPartition | None:
        """The record of a partition; None unless it is written and committed.

        Raises:
            ConfigurationError, Unavailable, TransactionAborted: As :meth:`seen`.
        """
        ledger = self._ledger
        statement = select(ledger.c.row_count, ledger.c.rows_digest).where(
            *self._of_batch, ledger.c.partition_id == partition_id
        )
        with self._on(connection):
            row = connection.execute(statement, {"sink_": sink, "batch_": batch_id}).one_or_none()
        if row is None:
            failpoints.hit("ledger.checked")
            return None
        return WrittenPartition(*row)

    def partitions(self, database: Connection | Engine, sink: str, batch_id: str) -> Mapping[int, WrittenPartition]:
        """The records of the partitions that are written and committed, by number and in order.

        Raises:
            ConfigurationError, Unavailable, TransactionAborted: As :meth:`seen`.
        """
        ledger = self._ledger
        statement = (
            select(ledger.c.partition_id, ledger.c.row_count, ledger.c.rows_digest)
            .where(*self._of_batch, ledger.c.partition_id >= 0)
            .order_by(ledger.c.partition_id)
        )
        with self._on(database) as connection:
            rows = connection.execute(statement, {"sink_": sink, "batch_": batch_id}).all()
        return {number: WrittenPartition(row_count, rows_digest) for number, row_count, rows_digest in rows}

    def insert_empty(
        self, connection: Connection, sink: str, batch_id: str, partition_ids: Collection[int], *, partition_count: int
    ) -> None:
        """Record partitions without rows as written, unless they are recorded already.

        Args:
            connection: Inside a transaction.
            sink: Name of the sink.
            batch_id: Name of the batch.
            partition_ids: Numbers of the partitions.
            partition_count: Number of partitions of the batch.

        Raises:
            ConfigurationError, Unavailable, TransactionAborted: As :meth:`seen`.
        """
        if not partition_ids:
            return
        statement = dialect_of(connection.engine).insert_if_missing(self._ledger).values(written_at=database_now())
        same = {"sink": sink, "batch_id": batch_id, "row_count": 0, "message_count": 0, "rows_digest": 0}
        rows = [{**same, "partition_id": one, "partition_count": partition_count} for one in sorted(partition_ids)]
        with self._on(connection):
            connection.execute(statement, rows)

    def require(self, connection: Connection, sink: str, batch_id: str, destination: Destination) -> int | None:
        """Check, inside the transaction that writes a partition, that the batch goes to that destination.

        Returns:
            The number of partitions that the batch was begun with; None if it was not begun.

        Raises:
            ConfigurationError: The batch goes to another destination; or as :meth:`seen`.
            Unavailable, TransactionAborted: As :meth:`seen`.
        """
        ledger = self._ledger
        statement = select(ledger.c.partition_count, ledger.c.destination).where(
            *self._of_batch, ledger.c.partition_id == BEGUN
        )
        with self._on(connection):
            begun = connection.execute(statement, {"sink_": sink, "batch_": batch_id}).one_or_none()
        if begun is None:
            return None
        former = None if begun.destination is None else Destination.parse(begun.destination)
        if former not in {None, destination}:
            raise other_destination(
                sink, batch_id, Recorded(begun=True, destination=former, whole_written=False), destination
            )
        return int(begun.partition_count)

    def started(self, database: Connection | Engine, sink: str, batch_id: str) -> int | None:
        """The number of partitions that the batch was begun with; None if no part of it is committed.

        Raises:
            ConfigurationError, Unavailable, TransactionAborted: As :meth:`seen`.
        """
        with self._on(database) as connection:
            return connection.scalar(self._started, {"sink_": sink, "batch_": batch_id})

    def begin(
        self,
        database: Connection | Engine,
        sink: str,
        batch_id: str,
        destination: Destination,
        *,
        partition_count: int = 1,
    ) -> None:
        """Record a batch's destination before any part is written, or compare it with the recorded one.

        Until the transaction ends, no other run of the batch begins or decides. The batch no longer counts as failed.

        Args:
            database: A connection inside a transaction, at READ COMMITTED on PostgreSQL; or the engine, for a
                transaction of its own.
            sink: Name of the sink.
            batch_id: Name of the batch.
            destination: The destination of the batch.
            partition_count: Number of partitions, if each is decided on its own.

        Raises:
            ConfigurationError: The batch has another destination, was written in another way, or was begun with another
                number of partitions; a name cannot be a key; the table or a right is missing.
            Unavailable: The database does not answer.
            TransactionAborted: The transaction has failed.
        """
        check_name(sink, "the name of a sink")
        check_name(batch_id, "the name of a batch")
        with self._on(database) as connection:
            self._begin(connection, sink, batch_id, destination, partition_count)

    def _begin(
        self, connection: Connection, sink: str, batch_id: str, destination: Destination, partition_count: int
    ) -> None:
        bound = {"sink_": sink, "batch_": batch_id}
        insert = dialect_of(connection.engine).insert_if_missing(self._ledger)
        first = insert.values(
            sink=sink, batch_id=batch_id, partition_id=BEGUN, row_count=0, message_count=0, written_at=database_now(),
            destination=destination.text(), partition_count=partition_count,
        )  # fmt: skip
        recorded = self._recorded(connection, bound)
        entry = next_entry(recorded, destination)
        if entry is Entry.FIRST:
            if connection.execute(first).rowcount == 1:
                failpoints.hit("ledger.begun")
                return
            recorded = self._recorded(connection, bound)  # another run was faster
            entry = next_entry(recorded, destination)
        if entry is Entry.REFUSED:
            raise other_destination(sink, batch_id, recorded, destination)
        if entry is Entry.INSTEAD:
            self._change_begun(
                connection, bound, destination=destination.text(), partition_count=partition_count, failed_at=None
            )
            return
        if destination.way is Way.PARTITIONS:
            check_partition_count(sink, batch_id, connection.scalar(self._started, bound), partition_count)
        self._change_begun(connection, bound, self._ledger.c.failed_at.is_not(None), failed_at=None)

    def _recorded(self, connection: Connection, bound: dict[str, str]) -> Recorded:
        ledger = self._ledger
        rows = connection.execute(
            select(ledger.c.partition_id, ledger.c.destination)
            .where(*self._of_batch, ledger.c.partition_id.in_([BEGUN, WHOLE_BATCH]))
            .order_by(ledger.c.partition_id)
            .with_for_update(),
            bound,
        )
        texts: dict[int, str | None] = {row.partition_id: row.destination for row in rows}
        text = texts.get(BEGUN)
        return Recorded(BEGUN in texts, None if text is None else Destination.parse(text), WHOLE_BATCH in texts)

    def _change_begun(
        self, connection: Connection, bound: dict[str, str], *only: ColumnElement[bool], **values: object
    ) -> None:
        ledger = self._ledger
        connection.execute(
            update(ledger).where(*self._of_batch, ledger.c.partition_id == BEGUN, *only).values(**values), bound
        )

    def fail(self, engine: Engine, sink: str, batch_id: str) -> None:
        """Record, for display only, that a run of the batch failed. The protocol never reads it.

        Raises:
            ConfigurationError, Unavailable: As :meth:`seen`.
        """
        bound = {"sink_": sink, "batch_": batch_id}
        with self._on(engine) as connection:
            self._change_begun(connection, bound, failed_at=database_now())

    def written(self, database: Connection | Engine, sink: str, batch_id: str) -> Written:
        """The partitions, rows and messages of the batch that are committed.

        Raises:
            ConfigurationError, Unavailable, TransactionAborted: As :meth:`seen`.
        """
        with self._on(database) as connection:
            row = connection.execute(self._written, {"sink_": sink, "batch_": batch_id}).one()
        return Written(*map(int, row))

    def insert(
        self,
        connection: Connection,
        sink: str,
        batch_id: str,
        partition_id: int,
        *,
        row_count: int,
        message_count: int,
        partition_count: int,
        started_at: datetime | None = None,
        rows_digest: int | None = None,
    ) -> bool:
        """Record that the partition is written. Waits if another attempt's open transaction has recorded it.

        Args:
            connection: Inside a transaction.
            sink: Name of the sink.
            batch_id: Name of the batch.
            partition_id: Number of the partition, ``WHOLE_BATCH`` for a batch that is written as a whole.
            row_count: Rows in it.
            message_count: Messages in it.
            partition_count: Number of partitions of the batch.
            started_at: When its writing began, by the database's clock, for display; None if unknown.
            rows_digest: Recognises the rows in a later attempt; a signed 64-bit number.

        Returns:
            True if the row is ours: commit. False if another attempt was first: roll back, its work counts. At REPEATABLE
            READ and SERIALIZABLE that raises ``TransactionAborted`` instead; the next attempt then finds it *seen*.

        Raises:
            ConfigurationError: The batch was begun with another number of partitions; a name cannot be a key; the table
                or a right is missing.
            Unavailable: The database does not answer.
            TransactionAborted: The transaction has failed.
        """
        check_name(sink, "the name of a sink")
        check_name(batch_id, "the name of a batch")
        if partition_id != WHOLE_BATCH:
            check_partition_count(sink, batch_id, self.started(connection, sink, batch_id), partition_count)
        row = {
            "sink": sink,
            "batch_id": batch_id,
            "partition_id": partition_id,
            "row_count": row_count,
            "message_count": message_count,
            "partition_count": partition_count,
            "started_at": started_at,
            "rows_digest": rows_digest,
        }
        statement = (
            dialect_of(connection.engine)
            .insert_if_missing(self._ledger)
            .values(written_at=database_now())  # the column's default is the time when the transaction began
        )
        with self._on(connection):
            inserted = connection.execute(statement, row).rowcount == 1
        if inserted:
            failpoints.hit("ledger.inserted")
        return inserted

    def complete(
        self, engine: Engine, sink: str, batch_id: str, partition_id: int, *, decided_ago_s: float | None = None
    ) -> None:
        """Record, for display only, that Kafka has all of the batch. The protocol never reads it.

        Args:
            engine: The database.
            sink: Name of the sink.
            batch_id: Name of the batch.
            partition_id: The row that stands for the whole batch. Does nothing if it is missing or already complete.
            decided_ago_s: Seconds since the batch was decided, if known more exactly than from the time at which the
                deciding transaction wrote the row.

        Raises:
            ConfigurationError, Unavailable: As :meth:`seen`.
        """
        ledger = self._ledger
        statement = (
            update(ledger)
            .where(
                ledger.c.sink == sink,
                ledger.c.batch_id == batch_id,
                ledger.c.partition_id == partition_id,
                ledger.c.completed_at.is_(None),
            )
            .values(completed_at=database_now())
        )
        if decided_ago_s is not None:
            statement = statement.values(written_at=database_now_plus(-decided_ago_s))
        with self._on(engine) as connection:
            connection.execute(statement)

    @contextmanager
    def _on(self, database: Connection | Engine) -> Generator[Connection, None, None]:
        """The caller's connection, or a new one in its own transaction. Maps database errors to ours."""
        try:
            if isinstance(database, Connection):
                yield database
            else:
                with database.begin() as connection:
                    yield connection
        except exc.SQLAlchemyError as error:
            engine = database if isinstance(database, Engine) else database.engine
            raise map_database_error(error, engine, self._schema) from error
