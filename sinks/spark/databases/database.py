"""What the sinks ask of a kind of database, and the one behind a URL."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow.compute as pc
from sqlalchemy import exc

from dualwrite.errors import ConfigurationError, TransactionAborted
from dualwrite.stores.sql.access import map_database_error

if TYPE_CHECKING:
    import pyarrow as pa
    from sqlalchemy import URL, Connection, Engine, Select

    from dualwrite.sinks.spark.column_types import Table
    from dualwrite.sinks.spark.digests import RowNames
    from dualwrite.sinks.spark.layout import Copied, Layout
    from dualwrite.sinks.spark.options import SinkOptions

_COMMENT: Final = "made by dualwrite, dropped by it: "
STAGING_PREFIX: Final = "dualwrite_staging_"
DROP_LOCK_TIMEOUT_S: Final = 2.0
"""For how long a staging table that is read may keep us waiting."""


@dataclass(frozen=True)
class Emptying:
    """How rows make room for a batch's rows: all of the table, or those for which the condition `where` is true, as SQL."""

    truncates: bool = False
    where: str | None = None

    @property
    def right(self) -> str:
        """The right that it needs."""
        return "TRUNCATE" if self.truncates else "DELETE"

    @property
    def condition(self) -> str:
        """The condition, or one that is true."""
        return "1 = 1" if self.where is None else f"({self.where}\n)"  # it may end in a comment


@dataclass(frozen=True)
class StagingTable:
    """One staging table: where it is, and the slot, incarnation and lease holder of the task that created it."""

    schema: str
    name: str
    transactional_id: str
    incarnation: int
    owner: str

    @property
    def table(self) -> tuple[str, str]:
        """Schema and name."""
        return self.schema, self.name

    @property
    def comment(self) -> str:
        """The comment on the table, which says who made it."""
        maker = {"slot": self.transactional_id, "incarnation": self.incarnation, "owner": self.owner}
        return _COMMENT + json.dumps(maker)

    @classmethod
    def found(cls, schema: str, name: str, comment: str | None) -> StagingTable | None:
        """The table that a database lists with this comment. None if no sink has made it."""
        if comment is None or not comment.startswith(_COMMENT):
            return None
        maker = json.loads(comment[len(_COMMENT) :])
        return cls(schema, name, str(maker["slot"]), int(maker["incarnation"]), str(maker.get("owner")))


@dataclass(frozen=True)
class Staged:
    """The rows of one partition in their staging table, and how many it must hold. The partition's number is for people."""

    table: StagingTable
    rows: int
    partition: int


class RowWriter(Protocol):
    """Writes rows into one table, inside the dual write's own database transaction."""

    def write(self, batch: pa.RecordBatch, deleted: pa.Array | None = None) -> None:
        """Send the rows of one projected batch. They are in the table once the transaction commits.

        `deleted` says which rows delete, as :func:`~dualwrite.sinks.spark.merging.deleted_rows` finds it.

        The database may refuse a row only in a later call, or at the end (`TransactionAborted`); a value that does not fit its
        column is a `ConfigurationError` at once.
        """
        ...


class SinkDatabase(Protocol):
    """One kind of database.

    A transaction that cannot continue raises `TransactionAborted`; a database that does not answer, `Unavailable`; one that
    lacks a right or a table, `ConfigurationError`. Its engine runs at READ COMMITTED: each statement sees what was committed
    before it.
    """

    engine: Engine

    def quoted(self, table: tuple[str, str]) -> str:
        """A table's schema and name as SQL."""
        ...

    def read_table(self, connection: Connection, name: str) -> Table:
        """Look the table up as the database itself would, by its name as in SQL. Refuse what may not be written to."""
        ...

    def require_types(
        self,
        connection: Connection,
        tables: Collection[tuple[str, str]],
        planned: Mapping[str, str],
        *,
        shown_name: str,
        beside: Sequence[Select[Any]] = (),
    ) -> Sequence[object]:
        """Abort unless the tables' columns have the types that the rows were made for, by column as `TableColumn.shown_type`.

        Call it in the transaction that has written the rows, which protects a table from ALTER until it ends. Before it
        began, the table could change. People do not know a staging table's name: `shown_name` is for them. Returns what the
        queries `beside` find, each one value or None; they go in the same statement where the database can.
        """
        ...

    def writing(
        self, connection: Connection, layout: Layout, table: tuple[str, str], names: RowNames | None = None
    ) -> AbstractContextManager[RowWriter]:
        """Write rows into the layout's staged columns of a table until the block ends; then all are there, or it raises.

        It raises `TransactionAborted` also if the database left a row out: leave the dual write, both sides abort. Check the
        types by :meth:`require_types` afterwards; those of a staging table are for the deciding transaction to check.
        `names` names the row that the database refuses.
        """
        ...

    def merging(
        self, connection: Connection, layout: Layout, names: RowNames | None = None, *, prepared: bool
    ) -> AbstractContextManager[RowWriter]:
        """As :meth:`writing`, into the target, by the layout's `merge`: at the end of the block. It checks the types itself.

        Until then the rows wait in a table of this transaction alone. `prepared` says that the transaction will be prepared.
        """
        ...

    def choose_staging(self, connection: Connection, wanted: str, layout: Layout, *, empties: bool) -> bool:
        """Whether the tasks of a batch decided as a whole bring rows in through staging tables, in the target's schema.

        `wanted` is the setting ``database_leg``; `empties` says that the table is emptied first. A right that staging tables
        need is a `ConfigurationError` with its GRANT, where the database's catalog says what the user may do.
        """
        ...

    def require_replaceable(
        self, connection: Connection, layout: Layout, *, empty: Emptying | None, direct: bool
    ) -> None:
        """Refuse before a task runs what the tasks, or the decision, would refuse after rows were sent.

        That is: a right is missing, no unique key has just the key columns of the layout's `merge`, or rows of other tables
        forbid that the table is emptied. `direct` says that each task writes into the target itself.
        """
        ...

    def create_staging(self, connection: Connection, made: StagingTable, layout: Layout) -> None:
        """Create an empty staging table for the layout's staged columns, inside the dual write.

        If the caller's transaction is rolled back, the table may stay, for :meth:`drop_dead_staging`.
        """
        ...

    def wrong_rows(self, layout: Layout, batch: pa.RecordBatch, *, most: int) -> Mapping[int, str]:
        """Why the table does not take rows of a projected batch, by their places; of at least `most` + 1, if there are so many.

        The database itself is asked, on a connection of its own, by an empty temporary copy of the table with its types, NOT
        NULL and CHECK: about each row by itself, not about unique and foreign keys. Nothing stays.
        """
        ...

    def take_over(self, connection: Connection, parts: Sequence[Staged], layout: Layout) -> None:
        """Move the rows of staging tables into the target, in the deciding transaction, by the layout's `merge` if it has one.

        If rows are missing, a key comes twice without an order, or the target refuses rows, it raises `TransactionAborted`, and
        nothing is moved.
        """
        ...

    def require_within(self, connection: Connection, parts: Sequence[Staged], layout: Layout, how: Emptying) -> None:
        """Abort, with a row's name, unless the condition of `how` is true for all rows of the staging tables."""
        ...

    def drop_staging(self, tables: Collection[StagingTable]) -> None:
        """Drop staging tables whose rows were moved. Those still being read are left for :meth:`drop_dead_staging`."""
        ...

    def drop_staging_in(self, connection: Connection, tables: Collection[StagingTable]) -> bool:
        """As :meth:`drop_staging`, in the caller's transaction, which waits for no lock longer than `DROP_LOCK_TIMEOUT_S`.

        False if DDL would commit that: nothing is sent then.
        """
        ...

    def drop_dead_staging(
        self, schema: str, incarnations: Mapping[str, int], holders: Callable[[], Mapping[str, str]]
    ) -> int:
        """Drop the staging tables that no process can decide on any more; return how many.

        Those still being read stay until next time. `incarnations` has the current incarnation by slot. `holders` reads the
        current holder by slot, and is called after the tables have been found.
        """
        ...

    def find_staging(self, connection: Connection, schema: str) -> Sequence[StagingTable]:
        """The staging tables in a schema that tasks of any sink have made."""
        ...

    def empty(self, connection: Connection, table: tuple[str, str], how: Emptying) -> None:
        """Empty a table in the caller's transaction. Rows of other tables may forbid it: `TransactionAborted`."""
        ...

    def before_prepared(self, connection: Connection) -> None:
        """Make ready a transaction whose rows will be prepared in the target. Call it before they are written.

        A database that takes no more prepared transactions, or none at all, is a `ConfigurationError`.
        """
        ...

    def require_prepared(self, connection: Connection, names: Collection[str], name: str) -> None:
        """Abort the deciding transaction unless the transactions that tasks have prepared are still there.

        A settler claims the slot before it ends one, and then the decision on that slot fails.
        """
        ...

    def had_no_room(self, error: BaseException) -> TransactionAborted | None:
        """The error for a transaction that the database had no room to prepare; None if `error` has another cause."""
        ...

    def waited_in_vain(self, error: BaseException) -> bool:
        """Whether a lock was not free in time."""
        ...


def can_be_dropped(staged: StagingTable, incarnations: Mapping[str, int], holders: Mapping[str, str]) -> bool:
    """Whether no process can decide on a staging table's rows any more.

    A settled incarnation cannot decide. A live incarnation may have left tables as well, if its driver died after it moved
    their rows and before it dropped them: their creators no longer hold the slot. So `holders` must be read after the table
    was found: its creator held its slot before that, and never gets it back under the same name.
    """
    present = incarnations.get(staged.transactional_id)
    if present is None:
        return False
    return staged.incarnation < present or holders.get(staged.transactional_id) != staged.owner


def require_all_taken(table: str, *, sent: int, taken: int) -> None:
    """Abort if the database stored another number of rows than were sent: each row sent has its message."""
    if taken != sent:
        raise TransactionAborted(
            f"table {table!r} stored {taken} of {sent} rows: a trigger or rule skipped the rest",
            next_step="nothing of the partition was written on either side: filter those rows out before they are written, or "
            "change the trigger (a BEFORE trigger that returns NULL skips the row)",
            retryable=False,
        )


def require_kept(column: Copied, changes: Iterable[tuple[str, pa.Array]], name_row: Callable[[int], str]) -> None:
    """Refuse values that the column would change without an error, or that have no form on the way to it.

    `changes` has words for each kind of such values, and which rows have one; `name_row` names a row, counted from 0.
    """
    for words, is_bad in changes:
        number = pc.index(is_bad, True).as_py()
        if number >= 0:
            raise ConfigurationError(
                f"column {column.name!r} of type {column.shown_type} would not keep a value as it is: {words} "
                f"({name_row(number)})",
                next_step="nothing of the partition was written on either side: change the value, or the column's type",
            )


def not_kept(column: Copied, changes: Iterable[tuple[str, pa.Array]]) -> Iterator[tuple[int, str]]:
    """The rows with values that :func:`require_kept` refuses, and what is wrong with them."""
    for words, is_bad in changes:
        for place in pc.indices_nonzero(is_bad).to_pylist():
            yield place, f"column {column.name!r} of type {column.shown_type}: {words}"


def rows_lost(staged: Staged, held: int) -> TransactionAborted:
    """The error for a staging table that does not hold what its task has written."""
    return TransactionAborted(
        f"a staging table holds {held} rows of {staged.rows}: the database has crashed in between",
        transactional_id=staged.table.transactional_id,
    )


def require_key(table: str, keys: Collection[frozenset[str]], upsert: Collection[str]) -> None:
    """Refuse key columns that are not the columns of one of the table's unique `keys`."""
    if frozenset(upsert) not in keys:
        raise ConfigurationError(
            f"table {table!r} has no unique key of just the columns {', '.join(upsert)}",
            next_step="nothing of the batch was written on either side: add one, or name the columns of one in upsert_keys "
            "(upsertKeys)",
        )


def not_a_condition(words: str) -> ConfigurationError:
    """The error for a condition that the database does not take."""
    return ConfigurationError(
        f"replaceWhere is not a condition on the columns that are written: {words}",
        next_step="write it in the database's own SQL, as after WHERE",
    )


def outside(table: str, row: str) -> TransactionAborted:
    """The error for a row that would be added beside those that the batch replaces."""
    return TransactionAborted(
        f"replaceWhere is not true for a row that goes into table {table!r}: {row}",
        next_step="nothing of the batch was written on either side: filter such rows out, or change the condition",
        retryable=False,
    )


def still_referred_to(table: str, key: str, by: str) -> ConfigurationError:
    """The error for a table that cannot be emptied, since rows of another one refer to its rows."""
    return ConfigurationError(
        f"table {table!r} cannot be emptied: rows of table {by!r} refer to its rows (foreign key {key!r})",
        next_step='delete those first, declare the foreign key ON DELETE CASCADE or ON DELETE SET NULL, or use mode("append") '
        "with upsertKeys, which replaces rows one by one",
    )


_KEY_TWICE_STEP: Final = (
    "nothing of these rows was written on either side: name the column that says which row of a key is the last in "
    "order_column (orderColumn), or let each key occur once in the batch, also in two partitions"
)


def key_twice(table: str, key: Sequence[object] | None) -> TransactionAborted:
    """The error for rows of the same key without an order; the key is None if it is not known."""
    shown = "" if key is None else f", {', '.join(repr(str(value)) for value in key)}"
    return TransactionAborted(
        f"table {table!r} cannot take the rows: a key occurs twice in them{shown}",
        next_step=_KEY_TWICE_STEP,
        retryable=False,
    )


def require_all_merged(table: str, *, counted: int, taken: int) -> None:
    """Abort if an upsert wrote another number of rows than it had to."""
    if taken != counted:
        raise TransactionAborted(
            f"table {table!r} took {taken} of {counted} rows: a trigger or rule skipped the rest, or the key is not unique",
            next_step="nothing of these rows was written on either side: filter those rows out before they are written, or "
            "change the trigger (a BEFORE trigger that returns NULL skips the row)",
            retryable=False,
        )


def require_planned(present: Mapping[str, str], planned: Mapping[str, str], shown_name: str) -> None:
    """Compare the types of columns with those of the plan; see :meth:`SinkDatabase.require_types`."""
    for name, shown in planned.items():
        if present.get(name) != shown:
            raise TransactionAborted(
                f"column {name!r} of table {shown_name!r} was {shown} when the batch was planned, and is "
                f"{present.get(name, 'gone')} now",
                next_step="run the batch again: it makes a new plan",
            )


# The sink's database: connected the same way on the driver and in the tasks.


def values_of(connection: Connection, queries: Iterable[Select[Any]]) -> list[object]:
    """The value that each query finds, or None, in the caller's transaction."""
    try:
        return [connection.scalar(one) for one in queries]
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, connection.engine) from error


def open_database(options: SinkOptions) -> SinkDatabase:
    """The sink's database. It connects at first use; the caller disposes of its engine."""
    url = options.database_url()
    try:
        return _KINDS[url.get_backend_name()](url)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the database's driver is not installed: no module named {error.name!r}",
            next_step="on the driver and on the executors: pip install 'dualwrite[spark]'; for MariaDB and MySQL, "
            "'dualwrite[spark,mariadb]'",
        ) from error


def _postgresql(url: URL) -> SinkDatabase:
    from dualwrite.sinks.spark.databases.postgresql import PostgreSQL  # noqa: PLC0415 - each needs its own driver

    return PostgreSQL(url)


def _mariadb(url: URL) -> SinkDatabase:
    from dualwrite.sinks.spark.databases.mariadb import MariaDB  # noqa: PLC0415 - as above

    return MariaDB(url)


_KINDS: Final[dict[str, Callable[[URL], SinkDatabase]]] = {
    "postgresql": _postgresql,
    "mysql": _mariadb,
    "mariadb": _mariadb,
}
