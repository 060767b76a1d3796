"""The ledger: what a job has already written. Its primary key decides which of several attempts counts."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import ColumnElement, Connection, Engine, bindparam, exc, exists, func, select, update

from dualwrite import failpoints
from dualwrite.protocol.batch_entry import Destination, Entry, Recorded, Way, next_entry
from dualwrite.stores.batch_refusals import check_partition_count, other_destination
from dualwrite.stores.clock import database_now, database_now_plus
from dualwrite.stores.failures import map_database_error
from dualwrite.stores.rows import check_name
from dualwrite.stores.short_transactions import dialect_of
from dualwrite.stores.tables import declare_tables

WHOLE_BATCH: Final = -1
"""The partition id of a batch that is written as one whole."""
BEGUN: Final = -2
"""The partition id of the row that says where a batch is written to, and with how many partitions it was begun."""


@dataclass(frozen=True)
class WrittenPartition:
    """One partition that is written and committed.

    Attributes:
        rows: Number of rows in it.
        rows_digest: What the sink has recorded of them, to know them again; None where it has not.
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
    """The ledger in one database schema. Its methods run inside the caller's transaction; a row counts once that commits.

    Args:
        schema: The database schema of the library's tables, None for the default one.
    """

    def __init__(self, schema: str | None = None) -> None:
        self._schema = schema
        self._ledger = ledger = declare_tables(schema).ledger
        of_batch = (ledger.c.sink == bindparam("sink_"), ledger.c.batch_id == bindparam("batch_"))
        self._seen = select(exists().where(*of_batch, ledger.c.partition_id == bindparam("partition_")))
        self._of_batch = of_batch
        # Not of the row of a whole batch: it counts the partitions of one run, and the next one may have others.
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
            partition_id: Number of the partition, ``WHOLE_BATCH`` for a batch that is written as one.

        Raises:
            ConfigurationError: The table or a right is missing.
            Unavailable: The database does not answer.
            TransactionAborted: The transaction cannot go on.
        """
        bound = {"sink_": sink, "batch_": batch_id, "partition_": partition_id}
        with self._on(connection):
            seen = bool(connection.scalar(self._seen, bound))
        if not seen:
            failpoints.hit("ledger.checked")
        return seen

    def partition(self, connection: Connection, sink: str, batch_id: str, partition_id: int) -> WrittenPartition | None:
        """What is recorded of a partition; None where it is not written and committed.

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
        """What is recorded of the partitions that are written and committed, by number and in order.

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
        """Record partitions without rows as written, those that are not recorded yet.

        Args:
            connection: Inside a transaction.
            sink: Name of the sink.
            batch_id: Name of the batch.
            partition_ids: Numbers of the partitions.
            partition_count: How many partitions the batch has.

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
        """Make sure, inside the transaction that writes a partition, that the batch is written to that destination.

        Returns:
            With how many partitions it was begun; None if it was not.

        Raises:
            ConfigurationError: It is not; or as :meth:`seen`.
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
        """The number of partitions with which the batch was begun, None if nothing of it is committed.

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
        """Record where a batch is written to, before anything of it is written, or compare it with what is recorded.

        Until the transaction ends, no other run of the batch begins or decides. The batch no longer counts as failed.

        Args:
            database: A connection inside a transaction, at READ COMMITTED on PostgreSQL; or the engine, for a transaction of
                its own.
            sink: Name of the sink.
            batch_id: Name of the batch.
            destination: Where it is written to.
            partition_count: How many partitions it has, where each of them is decided on its own.

        Raises:
            ConfigurationError: The batch is for another destination, was written in another way, or was begun with another
                number of partitions; a name cannot be a key; the table or a right is missing.
            Unavailable: The database does not answer.
            TransactionAborted: The transaction cannot go on.
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
        ).returning(self._ledger.c.partition_id)  # fmt: skip
        recorded = self._recorded(connection, bound)
        entry = next_entry(recorded, destination)
        if entry is Entry.FIRST:
            if connection.execute(first).one_or_none() is not None:
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
        """Note, for people who look at batches, that a run of the batch has failed. Nothing rests on it.

        Raises:
            ConfigurationError, Unavailable: As :meth:`seen`.
        """
        bound = {"sink_": sink, "batch_": batch_id}
        with self._on(engine) as connection:
            self._change_begun(connection, bound, failed_at=database_now())

    def written(self, database: Connection | Engine, sink: str, batch_id: str) -> Written:
        """How much of the batch's partitions is committed.

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
        """Record that the partition is written. Waits for another attempt's transaction that has recorded it already.

        Args:
            connection: Inside a transaction.
            sink: Name of the sink.
            batch_id: Name of the batch.
            partition_id: Number of the partition, ``WHOLE_BATCH`` for a batch that is written as one.
            row_count: Rows in it.
            message_count: Messages in it.
            partition_count: How many partitions the batch has.
            started_at: When its writing began, by the database's clock, for people; None where nobody knows.
            rows_digest: To know the rows again; 64 bits with a sign.

        Returns:
            True if the row is ours: commit. False if another attempt was first: roll back, its work counts. At REPEATABLE
            READ and SERIALIZABLE that shows as a ``TransactionAborted`` instead; the next attempt then finds it *seen*.

        Raises:
            ConfigurationError: The batch was begun with another number of partitions; a name cannot be a key; the table or a
                right is missing.
            Unavailable: The database does not answer.
            TransactionAborted: The transaction cannot go on.
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
            .values(written_at=database_now())  # the default is the moment when the transaction began
            .returning(self._ledger.c.partition_id)
        )
        with self._on(connection):
            inserted = connection.execute(statement, row).one_or_none() is not None
        if inserted:
            failpoints.hit("ledger.inserted")
        return inserted

    def complete(
        self, engine: Engine, sink: str, batch_id: str, partition_id: int, *, decided_ago_s: float | None = None
    ) -> None:
        """Note, for people who look at batches, that Kafka has all of the batch. Nothing rests on it.

        Args:
            engine: The database.
            sink: Name of the sink.
            batch_id: Name of the batch.
            partition_id: The row that stands for the whole batch. A row that is complete, or missing, is left as it is.
            decided_ago_s: How long ago the batch was decided, in seconds, where that is known better than from the moment
                at which the deciding transaction wrote the row.

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
        """The caller's connection, or one in a transaction of its own; the database's errors as ours."""
        try:
            if isinstance(database, Connection):
                yield database
            else:
                with database.begin() as connection:
                    yield connection
        except exc.SQLAlchemyError as error:
            engine = database if isinstance(database, Engine) else database.engine
            raise map_database_error(error, engine, self._schema) from error
