"""The ledger: what a job has already written. Its primary key decides which of several attempts counts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, Engine, bindparam, exc, exists, func, select, update

from dualwrite import failpoints
from dualwrite.errors import ConfigurationError
from dualwrite.stores.clock import database_now, database_now_plus
from dualwrite.stores.failures import map_database_error
from dualwrite.stores.rows import check_name
from dualwrite.stores.short_transactions import dialect_of
from dualwrite.stores.tables import declare_tables

WHOLE_BATCH: Final = -1
"""The partition id of a batch that is written as one whole."""


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
        self._started = select(ledger.c.partition_count).where(*of_batch).limit(1)
        self._written = select(
            func.count(),
            func.coalesce(func.sum(ledger.c.row_count), 0),
            func.coalesce(func.sum(ledger.c.message_count), 0),
        ).where(*of_batch, ledger.c.partition_id >= 0)

    def seen(
        self,
        connection: Connection,
        sink: str,
        batch_id: str,
        partition_id: int,
        *,
        partition_count: int | None = None,
    ) -> bool:
        """Whether the partition of that batch is written and committed.

        Args:
            connection: Inside a transaction.
            sink: Name of the sink.
            batch_id: Name of the batch.
            partition_id: Number of the partition, ``WHOLE_BATCH`` for a batch that is written as one.
            partition_count: How many partitions the batch has now, to be compared with what is recorded.

        Raises:
            ConfigurationError: The batch was begun with another number of partitions; the table or a right is missing.
            Unavailable: The database does not answer.
            TransactionAborted: The transaction cannot go on.
        """
        bound = {"sink_": sink, "batch_": batch_id, "partition_": partition_id}
        try:
            seen = bool(connection.scalar(self._seen, bound))
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, connection.engine, self._schema) from error
        if partition_count is not None:
            check_partition_count(sink, batch_id, self.started(connection, sink, batch_id), partition_count)
        if not seen:
            failpoints.hit("ledger.checked")
        return seen

    def started(self, database: Connection | Engine, sink: str, batch_id: str) -> int | None:
        """The number of partitions with which the batch was begun, None if nothing of it is committed.

        Raises:
            ConfigurationError, Unavailable, TransactionAborted: As :meth:`seen`.
        """
        bound = {"sink_": sink, "batch_": batch_id}
        engine = database if isinstance(database, Engine) else database.engine
        try:
            if isinstance(database, Connection):
                return database.scalar(self._started, bound)
            with database.connect() as connection:
                return connection.scalar(self._started, bound)
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, engine, self._schema) from error

    def written(self, database: Connection | Engine, sink: str, batch_id: str) -> Written:
        """How much of the batch's partitions is committed.

        Raises:
            ConfigurationError, Unavailable, TransactionAborted: As :meth:`seen`.
        """
        bound = {"sink_": sink, "batch_": batch_id}
        engine = database if isinstance(database, Engine) else database.engine
        try:
            if isinstance(database, Connection):
                row = database.execute(self._written, bound).one()
            else:
                with database.connect() as connection:
                    row = connection.execute(self._written, bound).one()
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, engine, self._schema) from error
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
        check_partition_count(sink, batch_id, self.started(connection, sink, batch_id), partition_count)
        row = {
            "sink": sink,
            "batch_id": batch_id,
            "partition_id": partition_id,
            "row_count": row_count,
            "message_count": message_count,
            "partition_count": partition_count,
            "started_at": started_at,
        }
        statement = (
            dialect_of(connection.engine)
            .insert_if_missing(self._ledger)
            .values(written_at=database_now())  # the default is the moment when the transaction began
            .returning(self._ledger.c.partition_id)
        )
        try:
            inserted = connection.execute(statement, row).one_or_none() is not None
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, connection.engine, self._schema) from error
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
        try:
            with engine.begin() as connection:
                connection.execute(statement)
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, engine, self._schema) from error


def check_partition_count(sink: str, batch_id: str, recorded: int | None, present: int) -> None:
    """Refuse a batch that has another number of partitions than when it was begun: its rows may lie elsewhere now.

    Raises:
        ConfigurationError: The numbers differ.
    """
    if recorded is not None and recorded != present:
        raise ConfigurationError(
            f"batch {batch_id!r} of sink {sink!r} was begun with {recorded} partitions and now has {present}: a partition "
            "that is already written may hold other rows now",
            next_step=f"run it with {recorded} partitions again, made the same way (repartition({recorded}, ...) by a key, "
            "or a checkpointed input); or, if nothing of it is to be kept, undo its rows and use a new batch id",
        )
