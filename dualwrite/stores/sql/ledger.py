"""The ledger of batches: which runs exist, what each part has written, and what people see of it.

Each part of a batch records in its own commit that it is done; so a run that is repeated skips it.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    Engine,
    Select,
    Table,
    and_,
    bindparam,
    exc,
    exists,
    func,
    literal,
    not_,
    or_,
    select,
    true,
    tuple_,
    update,
)

from dualwrite import failpoints
from dualwrite.errors import ConfigurationError, Fenced
from dualwrite.protocol.batches import Destination, Entry, Recorded, Way, mismatch_of, next_entry, nobody_since
from dualwrite.protocol.values import may_own, pool_of_sink
from dualwrite.stores.sql.access import map_database_error, reading, stand_alone
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.stores.sql.leases import Beginning
from dualwrite.stores.sql.short_transactions import SCHEMA_REVISION, ShortTransactions, dialect_of, find_tables
from dualwrite.stores.sql.tables import (
    check_name,
    columns_at,
    database_now,
    database_now_plus,
    declare_tables,
    in_chunks,
)

if TYPE_CHECKING:
    from dualwrite.interfaces import Database

WHOLE_BATCH: Final = -1
BEGUN: Final = -2
"""The partition id of the row that records a batch's destination, and the number of partitions it was begun with."""


@dataclass(frozen=True)
class WrittenPartition:
    """One partition that is written and committed; ``rows_digest`` is None if the sink recorded none."""

    rows: int
    rows_digest: int | None
    messages: int


@dataclass(frozen=True)
class Written:
    """How much of a batch is written and committed."""

    partitions: int
    rows: int
    messages: int


class Ledger:
    """The ledger in one database schema. Given a connection, its methods run in the caller's transaction.

    A row counts once its transaction commits. All methods raise ``ConfigurationError`` if a table or a right is missing,
    ``Unavailable`` if the database does not answer, and ``TransactionAborted`` if the caller's transaction has failed.
    """

    def __init__(self, schema: str | None = None, revision: str = SCHEMA_REVISION) -> None:
        """`revision` is that of the tables, which may lack the newest columns: these are for display, and left out then."""
        self._schema = schema
        self._ledger = ledger = declare_tables(schema).ledger
        self._columns = {column.name for column in columns_at(ledger, revision)}
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

    def seen(self, database: Connection | Engine, sink: str, batch_id: str, partition_id: int) -> bool:
        """Whether the partition is written and committed; ``WHOLE_BATCH`` stands for a batch written as a whole."""
        bound = {"sink_": sink, "batch_": batch_id, "partition_": partition_id}
        with self._on(database, alone=True) as connection:
            seen = bool(connection.scalar(self._seen, bound))
        if not seen:
            failpoints.hit("ledger.checked")
        return seen

    def partition(
        self, database: Connection | Engine, sink: str, batch_id: str, partition_id: int
    ) -> WrittenPartition | None:
        """The record of a partition; None unless it is written and committed."""
        ledger = self._ledger
        statement = select(ledger.c.row_count, ledger.c.rows_digest, ledger.c.message_count).where(
            *self._of_batch, ledger.c.partition_id == partition_id
        )
        with self._on(database, alone=True) as connection:
            row = connection.execute(statement, {"sink_": sink, "batch_": batch_id}).one_or_none()
        if row is None:
            failpoints.hit("ledger.checked")
            return None
        return WrittenPartition(*row)

    def partitions(self, database: Connection | Engine, sink: str, batch_id: str) -> Mapping[int, WrittenPartition]:
        """The records of the partitions that are written and committed, by number and in order."""
        ledger = self._ledger
        statement = (
            select(ledger.c.partition_id, ledger.c.row_count, ledger.c.rows_digest, ledger.c.message_count)
            .where(*self._of_batch, ledger.c.partition_id >= 0)
            .order_by(ledger.c.partition_id)
        )
        with self._on(database, alone=True) as connection:
            rows = connection.execute(statement, {"sink_": sink, "batch_": batch_id}).all()
        return {number: WrittenPartition(*found) for number, *found in rows}

    def insert_empty(
        self, connection: Connection, sink: str, batch_id: str, partition_ids: Collection[int], *, partition_count: int
    ) -> None:
        """Record partitions without rows as written, unless they are recorded already."""
        if not partition_ids:
            return
        statement = dialect_of(connection.engine).insert_if_missing(self._ledger).values(written_at=database_now())
        same = {"sink": sink, "batch_id": batch_id, "row_count": 0, "message_count": 0, "rows_digest": 0}
        rows = [{**same, "partition_id": one, "partition_count": partition_count} for one in sorted(partition_ids)]
        with self._on(connection):
            connection.execute(statement, rows)

    def require(self, connection: Connection, sink: str, batch_id: str, destination: Destination) -> int | None:
        """Refuse, inside the transaction that writes a partition, a batch that goes to another destination.

        Returns the number of partitions that the batch was begun with; None if it was not begun.
        """
        ledger = self._ledger
        statement = select(ledger.c.partition_count, ledger.c.destination).where(_is_begun(ledger, sink, batch_id))
        with self._on(connection):
            found = connection.execute(statement).one_or_none()
        count, recorded = (None, None) if found is None else found
        return self.require_begun(sink, batch_id, destination, count, recorded)

    def begun(self, sink: str, batch_id: str) -> Sequence[Select[Any]]:
        """What finds the arguments of :meth:`require_begun`, for another statement."""
        return _begun(self._ledger, sink, batch_id)

    def require_begun(
        self, sink: str, batch_id: str, destination: Destination, partition_count: object, recorded: object
    ) -> int | None:
        """As :meth:`require`, by what :meth:`begun` has found in the transaction that writes the partition."""
        if partition_count is None:
            return None
        former = None if recorded is None else Destination.parse(str(recorded))
        if former not in {None, destination}:
            raise other_destination(
                sink, batch_id, Recorded(begun=True, destination=former, whole_written=False), destination
            )
        return cast("int", partition_count)

    def started(self, database: Connection | Engine, sink: str, batch_id: str) -> int | None:
        """The number of partitions that the batch was begun with; None if no part of it is committed."""
        with self._on(database, alone=True) as connection:
            return connection.scalar(self._started, {"sink_": sink, "batch_": batch_id})

    def begin(
        self,
        database: Connection | Engine,
        sink: str,
        batch_id: str,
        destination: Destination,
        *,
        partition_count: int = 1,
        sources: str | None = None,
        run: Callable[[Connection], None] | None = None,
    ) -> bool:
        """Record a batch's destination before any part is written, or compare it with the recorded one.

        Until the transaction ends, no other run of the batch begins or decides. The batch no longer counts as failed. A
        connection is inside a transaction, at READ COMMITTED on PostgreSQL; an engine gives it a transaction of its own.
        `sources`, for display, says what the batch is made of; its first run records it. `run` is :meth:`Runs.require` of the
        run that begins: while no partition is written, it may have another number of them. Without it, a task of another run
        could be writing one by the former number.

        Returns:
            Whether the batch is written as a whole, and committed.

        Raises:
            ConfigurationError: The batch has another destination, was written in another way, or has another number of
                partitions than those of which some are written; a name cannot be a key; or as all methods.
            Fenced: Raised by `run`.
        """
        check_name(sink, "the name of a sink")
        check_name(batch_id, "the name of a batch")
        with self._on(database) as connection:
            is_written = self._begin(
                connection, sink, batch_id, destination, partition_count=partition_count, sources=sources, run=run
            )
        if not is_written:
            failpoints.hit("ledger.checked")
        return is_written

    def _begin(
        self,
        connection: Connection,
        sink: str,
        batch_id: str,
        destination: Destination,
        *,
        partition_count: int,
        sources: str | None,
        run: Callable[[Connection], None] | None,
    ) -> bool:
        bound = {"sink_": sink, "batch_": batch_id}
        insert = dialect_of(connection.engine).insert_if_missing(self._ledger)
        first = insert.values(
            sink=sink, batch_id=batch_id, partition_id=BEGUN, row_count=0, message_count=0, written_at=database_now(),
            destination=destination.text(), partition_count=partition_count, **self._present(sources=sources),
        )  # fmt: skip
        recorded, failed = self._recorded(connection, bound)
        entry = next_entry(recorded, destination)
        if entry is Entry.FIRST:
            if connection.execute(first).rowcount == 1:
                failpoints.hit("ledger.begun")
                return recorded.whole_written
            recorded, failed = self._recorded(connection, bound)  # another run was faster
            entry = next_entry(recorded, destination)
        if entry is Entry.REFUSED:
            raise other_destination(sink, batch_id, recorded, destination)
        if entry is Entry.INSTEAD:
            self._change_begun(
                connection, bound, destination=destination.text(), partition_count=partition_count, failed_at=None
            )
            return recorded.whole_written
        changes: dict[str, object] = {"failed_at": None} if failed else {}
        if destination.way is Way.PARTITIONS:
            started = connection.scalar(self._started, bound)
            if started != partition_count and run is not None:
                run(connection)  # first: from here on nobody else writes a partition
                if not self.partitions(connection, sink, batch_id):
                    started, changes["partition_count"] = partition_count, partition_count
            check_partition_count(sink, batch_id, started, partition_count)
        if changes:
            self._change_begun(connection, bound, **changes)
        return recorded.whole_written

    def beginning(
        self, engine: Engine, sink: str, batch_id: str, destination: Destination, held: CTE | None
    ) -> Beginning:
        """:meth:`begin` of a batch that is written as a whole, as parts of other statements.

        It is recorded as begun, if it is not, and if `held` finds the run. It can go on if it has no other destination, is not
        written, and does not count as failed. Otherwise call :meth:`begin`.
        """
        ledger = self._ledger
        row: dict[str, ColumnElement[Any]] = {
            "sink": literal(sink), "batch_id": literal(batch_id), "partition_id": literal(BEGUN), "row_count": literal(0),
            "message_count": literal(0), "written_at": database_now(), "destination": literal(destination.text()),
            "partition_count": literal(1),
        }  # fmt: skip
        values = select(*row.values())
        if held is not None:
            values = values.select_from(held)
        insert = dialect_of(engine).insert_if_missing(ledger)
        begun = insert.from_select(list(row), values, include_defaults=False)
        is_other = or_(ledger.c.destination.is_distinct_from(destination.text()), ledger.c.failed_at.is_not(None))
        unfit = or_(ledger.c.partition_id == WHOLE_BATCH, and_(ledger.c.partition_id == BEGUN, is_other))
        of_batch = (ledger.c.sink == sink, ledger.c.batch_id == batch_id)
        is_begun = exists().where(*of_batch, ledger.c.partition_id == BEGUN)
        return Beginning(not_(exists().where(*of_batch, unfit)), begun, is_begun)

    def unless_written(self, sink: str, batch_id: str, held: CTE | None) -> Beginning:
        """The opposite of :meth:`seen`, as :meth:`beginning` is for a batch that is written as a whole.

        The parameter ``partition_`` of the statement is the partition.
        """
        del held
        ledger = self._ledger
        of_batch = (ledger.c.sink == sink, ledger.c.batch_id == batch_id)
        return Beginning(not_(exists().where(*of_batch, ledger.c.partition_id == bindparam("partition_"))))

    def _recorded(self, connection: Connection, bound: dict[str, str]) -> tuple[Recorded, bool]:
        """What is recorded, and whether the batch counts as failed. Locks the rows."""
        ledger = self._ledger
        rows = connection.execute(
            select(ledger.c.partition_id, ledger.c.destination, ledger.c.failed_at)
            .where(*self._of_batch, ledger.c.partition_id.in_([BEGUN, WHOLE_BATCH]))
            .order_by(ledger.c.partition_id)
            .with_for_update(),
            bound,
        )
        found = {row.partition_id: row for row in rows}
        begun = found.get(BEGUN)
        text = None if begun is None else begun.destination
        recorded = Recorded(begun is not None, None if text is None else Destination.parse(text), WHOLE_BATCH in found)
        return recorded, begun is not None and begun.failed_at is not None

    def _change_begun(self, connection: Connection, bound: dict[str, str], **values: object) -> None:
        ledger = self._ledger
        connection.execute(
            update(ledger).where(*self._of_batch, ledger.c.partition_id == BEGUN).values(**values), bound
        )

    def fail(self, engine: Engine, sink: str, batch_id: str) -> None:
        """Record, for display only, that a run of the batch failed. The protocol never reads it."""
        bound = {"sink_": sink, "batch_": batch_id}
        with self._on(engine, alone=True) as connection:
            self._change_begun(connection, bound, failed_at=database_now())

    def written(self, database: Connection | Engine, sink: str, batch_id: str) -> Written:
        """The partitions, rows and messages of the batch that are committed."""
        with self._on(database, alone=True) as connection:
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
        byte_count: int | None = None,
        sources: str | None = None,
    ) -> bool:
        """Record that the partition is written. Waits if another attempt's open transaction has recorded it.

        ``started_at``, by the database's clock, ``byte_count`` and ``sources`` are for display. ``rows_digest``, signed and of
        64 bits, recognises the rows in a later attempt.

        Returns:
            True if the row is ours: commit. False if another attempt was first: roll back, its work counts. At REPEATABLE
            READ and SERIALIZABLE that raises ``TransactionAborted`` instead; the next attempt then finds it *seen*.

        Raises:
            ConfigurationError: A name cannot be a key, or a count cannot be; or as all methods.
        """
        check_name(sink, "the name of a sink")
        check_name(batch_id, "the name of a batch")
        if min(row_count, message_count) < 0 or partition_count < 1:
            # MariaDB's IGNORE would take the table's own check for a row that is there.
            raise ConfigurationError(
                f"{row_count} rows and {message_count} messages in one of {partition_count} partitions cannot be",
                next_step="pass what the partition has written",
            )
        row = {
            "sink": sink,
            "batch_id": batch_id,
            "partition_id": partition_id,
            "row_count": row_count,
            "message_count": message_count,
            "partition_count": partition_count,
            "started_at": started_at,
            "rows_digest": rows_digest,
            **self._present(byte_count=byte_count, sources=sources),
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
        self,
        database: Connection | Engine,
        sink: str,
        batch_id: str,
        partition_id: int,
        *,
        decided_ago_s: float | None = None,
    ) -> None:
        """Record, for display only, that Kafka has all of the batch. The protocol never reads it.

        Does nothing if the row of ``partition_id``, which stands for the whole batch, is missing or already complete.
        ``decided_ago_s`` is given if it is known more exactly than from the time at which the deciding transaction wrote the
        row.
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
        with self._on(database, alone=True) as connection:
            connection.execute(statement)

    def _present(self, **values: object) -> dict[str, object]:
        """Those of the values whose columns the tables have."""
        return {name: value for name, value in values.items() if name in self._columns}

    @contextmanager
    def _on(self, database: Connection | Engine, *, alone: bool = False) -> Generator[Connection, None, None]:
        """The caller's connection, or a new one in its own transaction. Maps database errors to ours.

        If it executes one statement `alone`, that is a transaction by itself where this saves requests.
        """
        try:
            if isinstance(database, Connection):
                yield database
            elif alone and database.dialect.name == "postgresql":
                with database.connect() as connection:
                    stand_alone(connection)
                    yield connection
            else:
                with database.begin() as connection:
                    yield connection
        except exc.SQLAlchemyError as error:
            engine = database if isinstance(database, Engine) else database.engine
            raise map_database_error(error, engine, self._schema) from error


# Runs: which run of a batch may still write. Beginning the next run, or giving one up, replaces the run's token.
#
# A task checks its run's token in the transactions that matter: when it leases a slot, and in the last statement before
# its rows are decided, or stay in the database undecided. It keeps a lock on the run until that transaction ends, or
# until it is resolved if it ends prepared. So the token is replaced only once every task that passed the check has
# ended its transaction, and the replacing process sees what those left; all later tasks are refused. Otherwise a task
# slower than its job's failure would commit behind its back, or leave locks, tables and open transactions behind.


@dataclass(frozen=True)
class Run:
    """One run of a batch, as its tasks know it; ``name`` may be a stream, whose batches follow each other. Pickles."""

    sink: str
    name: str
    token: str


class Runs:
    """The runs in one database."""

    def __init__(self, engine: Engine, schema: str | None = None) -> None:
        self._engine = engine
        self._schema = schema
        self._dialect = dialect_of(engine)
        tables = declare_tables(schema)
        self._run = tables.run
        self._own = ShortTransactions(engine, self._dialect, tables)

    def present(self, sink: str, name: str, connection: Connection | None = None) -> Run:
        """The run that may write; begins one if there is none. Ends no other run.

        With a connection, looks first in the caller's transaction, which may only read.
        """
        run = self._run
        statement = select(run.c.token).where(run.c.sink == sink, run.c.name == name)
        if connection is not None:
            found = connection.execute(statement).scalar_one_or_none()
            if found is not None:
                return Run(sink, name, found)

        def work(connection: Connection) -> str:
            token: str | None = connection.execute(statement).scalar_one_or_none()
            if token is None:
                self._add(connection, sink, name, secrets.token_hex(16))
                token = connection.execute(statement).scalar_one()
            return token

        return Run(sink, name, self._own.run(work))

    def replace(self, sink: str, name: str, connection: Connection | None = None) -> Run | None:
        """Begin the next run, after which :meth:`require` refuses tasks of earlier runs. Does not wait.

        Returns None, and changes nothing, if a task that :meth:`require` let through still has a transaction open or prepared:
        settle what is prepared, and call again. With a connection, in the caller's transaction, which may be ``light``: a task
        that asks meanwhile waits for its end, so that what is read in it afterwards is all that earlier runs have left.
        """
        run = self._run
        of_batch = (run.c.sink == sink, run.c.name == name)
        free = select(run.c.token).where(*of_batch).with_for_update(skip_locked=True)
        token = secrets.token_hex(16)

        changed = update(run).where(*of_batch).values(token=token, begun_at=database_now())

        def change(connection: Connection) -> bool:
            if self._dialect.name == "postgresql":
                statement = changed.where(run.c.token.in_(select(free.cte("free"))))
                return connection.execute(statement).rowcount == 1
            # With what a light transaction has left to check: this statement has always a row.
            found, *checks = connection.execute(select(free.scalar_subquery(), *self._dialect.own_checks())).one()
            self._dialect.check_own(checks)
            return found is not None and bool(connection.execute(changed).rowcount)

        def work(connection: Connection) -> bool:
            # What is added last does nothing if it is there, and a task holds it.
            return change(connection) or self._add(connection, sink, name, token)

        replaced = self._own.run(work) if connection is None else work(connection)
        return Run(sink, name, token) if replaced else None

    def require(self, connection: Connection, run: Run) -> None:
        """Let a task continue if it belongs to this run; raise ``Fenced`` if another has begun, or this one was given up.

        Call it inside the task's transaction. Until that ends, and beyond if it is prepared, the run cannot be replaced.
        """
        try:
            found = connection.execute(self.holding(run)).one_or_none()
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self._engine, self._schema) from error
        if found is None:
            raise Fenced(
                f"this run of {run.name!r} of sink {run.sink!r} was given up, or another one has begun",
                next_step="nothing of this task counts; look for the job's own error, or for another job that writes the same",
            )

    def holding(self, run: Run, *, waits: bool = True) -> Select[Any]:
        """Finds the run while it may write, and locks it as :meth:`require` does; `waits` for one who is replacing it."""
        return _holding(self._run, run, waits=waits)

    def _add(self, connection: Connection, sink: str, name: str, token: str) -> bool:
        check_name(sink, "the name of a sink")
        check_name(name, "the name of a batch")
        row = {"sink": sink, "name": name, "token": token}
        statement = self._dialect.insert_if_missing(self._run).values(begun_at=database_now())
        return connection.execute(statement, row).rowcount == 1


# What each task of a batch asks again: made once, as making it takes longer than the database's answer.


@lru_cache(maxsize=32)
def _holding(table: Table, run: Run, *, waits: bool) -> Select[Any]:
    is_run = and_(table.c.sink == run.sink, table.c.name == run.name, table.c.token == run.token)
    return select(table.c.token).where(is_run).with_for_update(read=True, skip_locked=not waits)


@lru_cache(maxsize=32)
def _begun(ledger: Table, sink: str, batch_id: str) -> Sequence[Select[Any]]:
    columns = (ledger.c.partition_count, ledger.c.destination)
    return tuple(select(column).where(_is_begun(ledger, sink, batch_id)) for column in columns)


def _is_begun(ledger: Table, sink: str, batch_id: str) -> ColumnElement[bool]:
    return and_(ledger.c.sink == sink, ledger.c.batch_id == batch_id, ledger.c.partition_id == BEGUN)


# The ledger batch by batch, from the view `dualwrite_batch`: for people and charts. The protocol never reads it.


@dataclass(frozen=True)
class Batch:
    """One batch of one sink. All times are by the database's clock.

    Attributes:
        sink: Name of the sink.
        batch_id: Name of the batch.
        phase: ``writing``; ``decided``: all of it is committed in the database; ``completed``: Kafka has all of it, and
            the driver has recorded that; ``failed``: a part is missing, and the last run that ended failed. A batch
            that another process completed (``dualwrite recover``) stays ``decided``; one whose driver was killed stays
            ``writing``; see :func:`read_nobody_at_work`.
        partition_count: Number of partitions. A batch decided as a whole does not count those without rows, and shows 1
            until it is decided.
        written_partitions: Number of committed partitions.
        row_count: Committed rows.
        message_count: Messages in decided transactions.
        started_at: When its first task, or its driver, began; None if no table shows it.
        decided_at: When its last part was committed; None while a part is missing.
        completed_at: When the driver saw that Kafka has all of it; None if that was not recorded.
        decided_after_s: Seconds from its start until it was decided.
        completed_after_s: Seconds from its start until it was completed.
        failed_at: When its last run failed; None while a run is active, and once all of it is written.
        byte_count: Committed bytes, in Arrow: the table's columns and the messages' parts. None if no part has recorded them.
        sources: What it is made of, as JSON: for a micro-batch, the offsets of each of the stream's sources (`start`, `end`);
            for a batch, its files. None if Spark has not told it. See :func:`read_batches`.
    """

    sink: str
    batch_id: str
    phase: str
    partition_count: int
    written_partitions: int
    row_count: int
    message_count: int
    started_at: datetime | None
    decided_at: datetime | None
    completed_at: datetime | None
    decided_after_s: float | None
    completed_after_s: float | None
    failed_at: datetime | None
    byte_count: int | None = None
    sources: str | None = None


def read_batches(
    engine: Engine, *, sink: str | None = None, limit: int | None = None, schema: str | None = None
) -> Sequence[Batch]:
    """The newest batches, in the order in which they began.

    Args:
        engine: The database.
        sink: Only batches of this sink.
        limit: Only this many, the newest.
        schema: The database schema of the library's tables.

    Raises:
        ConfigurationError: The view, or the right to read it, is missing.
        Unavailable: The database does not answer.
    """
    view = declare_tables(schema).batch
    newest_first = [by for at in (view.c.started_at, view.c.decided_at) for by in (at.is_(None), at.desc())]
    order = (*newest_first, view.c.sink, view.c.batch_id)
    condition = true() if sink is None else view.c.sink == sink
    return _read(engine, schema, lambda columns: select(*columns).where(condition).order_by(*order).limit(limit))[::-1]


def read_batch(engine: Engine, batch_id: str, *, schema: str | None = None) -> Sequence[Batch]:
    """The batch of that name in each sink that has one, by the sinks' names. Raises as :func:`read_batches`."""
    view = declare_tables(schema).batch
    return _read(
        engine, schema, lambda columns: select(*columns).where(view.c.batch_id == batch_id).order_by(view.c.sink)
    )


def _read(
    engine: Engine, schema: str | None, statement: Callable[[Sequence[ColumnElement[Any]]], Select[Any]]
) -> Sequence[Batch]:
    """The batches that a statement finds, with the columns that the view has in these tables."""
    view = declare_tables(schema).batch
    with reading(engine, schema) as connection:
        tables = find_tables(connection, schema)
        columns = columns_at(view, SCHEMA_REVISION if tables is None else tables.revision)
        return [Batch(**row) for row in connection.execute(statement(columns)).mappings()]


NEWEST_RUNS: Final = 100
_COMPLETED: Final = "completed"


@dataclass(frozen=True)
class UnfinishedBatch:
    """A batch of which a part is missing, or whose driver has not seen the end of it.

    Attributes:
        batch: The batch.
        nobody_since: Since when no process is known to work on it; None while one may. See :func:`read_nobody_at_work`.
    """

    batch: Batch
    nobody_since: datetime | None = None


def unfinished_batches(engine: Engine, *, schema: str | None = None) -> Sequence[UnfinishedBatch]:
    """Those of the newest hundred runs whose batches are not completed, in the order in which they began.

    Costs little however long the ledger is: only these batches are added up. Raises as :func:`read_batches`.
    """
    tables = declare_tables(schema)
    run, view = tables.run, tables.batch
    columns = columns_at(view, "")  # all that is needed here
    newest = select(run.c.sink, run.c.name).order_by(run.c.begun_at.desc(), run.c.sink, run.c.name).limit(NEWEST_RUNS)
    with reading(engine, schema) as connection:
        names = [tuple(row) for row in connection.execute(newest)]
        if not names:
            return []
        found = [
            Batch(**row)
            for some in in_chunks(names)
            for row in connection.execute(
                select(*columns).where(tuple_(view.c.sink, view.c.batch_id).in_(some), view.c.phase != _COMPLETED)
            ).mappings()
        ]
    deserted = read_nobody_at_work(engine, found, schema=schema)
    order = {name: -number for number, name in enumerate(names)}
    found.sort(key=lambda batch: order[batch.sink, batch.batch_id])
    return [UnfinishedBatch(batch, deserted.get((batch.sink, batch.batch_id))) for batch in found]


def batches_of(database: Database, prefix: str = "") -> tuple[Sequence[UnfinishedBatch], Sequence[str]]:
    """The unfinished batches of sinks with this prefix, and why they are not known, if the view may not be read."""
    if not isinstance(database, SqlDatabase):
        return (), ()
    try:
        found = unfinished_batches(database.engine, schema=database.tables_schema)
    except ConfigurationError as error:
        return (), (f"batches of Spark sinks: {error}",)
    return [one for one in found if one.batch.sink.startswith(prefix)], ()


def batch_in_part(engine: Engine, sink: str, but: str, *, schema: str | None = None) -> str | None:
    """A batch of the sink, other than ``but``, with some partitions written and others not; None if there is none."""
    view = declare_tables(schema).batch
    statement = select(view.c.batch_id).where(
        view.c.sink == sink,
        view.c.batch_id != but,
        view.c.written_partitions > 0,
        view.c.written_partitions < view.c.partition_count,
    )
    with reading(engine, schema) as connection:
        return connection.execute(statement.limit(1)).scalar()


def newest_batch(engine: Engine, sink: str, topic: str, *, schema: str | None = None) -> str | None:
    """The batch whose messages are the newest that the sink has written to the topic; None if it has written none."""
    part = declare_tables(schema).ledger
    begun = part.alias()
    of_batch = and_(begun.c.sink == part.c.sink, begun.c.batch_id == part.c.batch_id, begun.c.partition_id == BEGUN)
    # Older versions recorded no destination.
    to_topic = or_(
        begun.c.destination.is_(None), begun.c.destination.contains(Destination.text_of(topic), autoescape=True)
    )
    statement = (
        select(part.c.batch_id)
        .join_from(part, begun, of_batch, isouter=True)
        .where(part.c.sink == sink, part.c.message_count > 0, to_topic)
        .order_by(part.c.written_at.desc())
    )
    with reading(engine, schema) as connection:
        return connection.execute(statement.limit(1)).scalar()


def read_nobody_at_work(
    engine: Engine, batches: Collection[Batch], *, schema: str | None = None
) -> Mapping[tuple[str, str], datetime]:
    """For batches being written that show no active worker: the time since when, by sink and batch id.

    Either their drivers were killed, or their tasks compute for long before they write, which the database cannot see.
    """
    tables = declare_tables(schema)
    ledger, run, slot = tables.ledger, tables.run, tables.slot
    names = [(batch.sink, batch.batch_id) for batch in batches if batch.phase == "writing"]
    changes: dict[tuple[str, str], list[datetime]] = defaultdict(list)
    leases: dict[str, list[tuple[str, datetime]]] = defaultdict(list)
    if not names:
        return {}
    with reading(engine, schema) as connection:
        for some in in_chunks(names):
            for table, name, moment in (
                (ledger, ledger.c.batch_id, ledger.c.written_at),
                (run, run.c.name, run.c.begun_at),
            ):
                statement = select(table.c.sink, name, moment).where(tuple_(table.c.sink, name).in_(some))
                for sink, batch_id, changed_at in connection.execute(statement):
                    changes[sink, batch_id].append(changed_at)
        for pools in in_chunks({pool_of_sink(sink) for sink, _ in names}):
            held = select(slot.c.pool, slot.c.lease_owner, slot.c.lease_until).where(
                slot.c.pool.in_(pools), slot.c.lease_owner.is_not(None)
            )
            for pool, owner, until in connection.execute(held):
                leases[pool].append((owner, until))
        now: datetime = connection.execute(select(database_now())).scalar_one()
    found = {}
    for sink, batch_id in names:
        ends = [until for owner, until in leases[pool_of_sink(sink)] if may_own(owner, batch_id)]
        since = nobody_since(changes[sink, batch_id], ends, now)
        if since is not None:
            found[sink, batch_id] = since
    return found


# Errors for batches that do not continue as they were begun.


def check_partition_count(sink: str, batch_id: str, recorded: int | None, present: int) -> None:
    """Refuse a batch whose number of partitions changed since it began: rows may have moved between partitions."""
    if recorded is not None and recorded != present:
        raise ConfigurationError(
            f"batch {batch_id!r} of sink {sink!r} was begun with {recorded} partitions and now has {present}: a partition "
            "that is already written may hold other rows now",
            next_step=f"run it with {recorded} partitions again, made the same way (repartition({recorded}, ...) by a key, "
            "or a checkpointed input); or, to discard what it wrote, undo its rows and use a new batch id",
        )


def other_destination(sink: str, batch_id: str, recorded: Recorded, present: Destination) -> ConfigurationError:
    """The error for a batch whose destination differs from its previous run's."""
    return ConfigurationError(
        f"batch {batch_id!r} of sink {sink!r} {mismatch_of(recorded, present)}: nothing was written now",
        next_step="give each table, topic and way its own sink name, even if one foreachBatch writes to several; or "
        "run the batch again where it was begun",
    )
