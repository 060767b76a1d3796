"""PostgreSQL as a sink's database: target table, staging tables, COPY, prepared transactions.

Each attempt at a partition fills a table of its own. The table is unlogged: written once, read once, and useless after a
crash of the database, which empties it. The driver compares the number of rows with the task's count before it moves them,
so an emptied table fails the batch and does no harm.

A staging table's comment names the slot and incarnation that created it, and the holder of the slot's lease. Once the slot
has been claimed again, or another process holds the lease, no process can decide on the table's rows any more, and the
table is dropped.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import psycopg
import psycopg.errors
import pyarrow as pa
from psycopg import sql
from sqlalchemy import Connection, CursorResult, String, exc, select, text

from dualwrite.errors import ConfigurationError, DualWriteError, TransactionAborted
from dualwrite.sinks.spark.column_types import Table, TableColumn
from dualwrite.sinks.spark.databases.database import (
    DROP_LOCK_TIMEOUT_S,
    STAGING_PREFIX,
    Emptying,
    Staged,
    StagingTable,
    can_be_dropped,
    key_twice,
    not_a_condition,
    not_kept,
    outside,
    require_all_merged,
    require_all_taken,
    require_key,
    require_planned,
    rows_lost,
    still_referred_to,
)
from dualwrite.sinks.spark.databases.postgresql_copy import TableCopy, changes, copy_into, is_uuid, listed
from dualwrite.sinks.spark.digests import row_name, table_key
from dualwrite.sinks.spark.merging import DELETED, MergeStatements
from dualwrite.stores.sql.access import (
    Meaning,
    driver_words,
    map_database_error,
    meaning_of,
    new_engine,
    ping_idle_connections,
    sqlstate_of,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from psycopg import Cursor
    from sqlalchemy import URL, Engine, RowMapping, Select

    from dualwrite.sinks.spark.digests import RowNames
    from dualwrite.sinks.spark.layout import Layout

logger = logging.getLogger(__name__)

_FIND_STAGING: Final = text(
    "SELECT n.nspname, c.relname, obj_description(c.oid, 'pg_class') FROM pg_class c "
    "JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relkind = 'r' AND starts_with(c.relname, :prefix) AND n.nspname = :schema ORDER BY c.relname"
)

_CHECK: Final = text(
    "SELECT pg_get_expr(k.conbin, k.conrelid) FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid "
    "JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = :schema AND c.relname = :table AND k.conname = :name AND k.contype = 'c'"
)


_RIGHTS: Final = text(
    "SELECT c.oid, has_any_column_privilege(c.oid, 'SELECT') AS \"SELECT\", "
    "has_any_column_privilege(c.oid, 'UPDATE') AS \"UPDATE\", has_table_privilege(c.oid, 'DELETE') AS \"DELETE\", "
    "has_table_privilege(c.oid, 'TRUNCATE') AS \"TRUNCATE\", "
    "has_database_privilege(current_database(), 'TEMPORARY') AS \"TEMPORARY\", current_database() AS place "
    "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = :schema AND c.relname = :table"
)
# Those that ON CONFLICT may use.
_UNIQUE: Final = text(
    "SELECT array_agg(a.attname::text) FROM pg_index i JOIN pg_attribute a "
    "ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) "
    "WHERE i.indrelid = :table AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL "
    "AND i.indexprs IS NULL GROUP BY i.indexrelid"
)
# A key that refers to its own table is checked when all rows are deleted.
_REFERRING: Final = text(
    "SELECT k.conname, n.nspname, c.relname, k.confdeltype IN ('a', 'r') AND NOT k.condeferred AS forbids, "
    "has_table_privilege(c.oid, 'SELECT') AS readable, "
    "(SELECT array_agg(a.attname::text) FROM pg_attribute a "
    "WHERE a.attrelid = k.conrelid AND a.attnum = ANY (k.conkey)) AS columns "
    "FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE k.contype = 'f' AND k.confrelid = :table AND k.conrelid <> :table AND k.conparentid = 0 ORDER BY k.conname"
)


def _require_right(connection: Connection, right: str, given: object, shown: str, on: str) -> None:
    """Refuse a right that is not `given` to the connection's user; `on` is what it is granted on, as SQL."""
    if not given:
        raise ConfigurationError(
            f"the right to {right} is missing on {shown}",
            next_step=f'as its owner: GRANT {right} ON {on} TO "{connection.engine.url.username}"',
        )


def _require_unreferred(connection: Connection, table: str, empty: Emptying, referring: RowMapping) -> None:
    """Refuse to empty a table that a foreign key refers to: by TRUNCATE always, by DELETE if a row of the other table does."""
    key, by = referring["conname"], referring["relname"]
    if empty.truncates:
        raise ConfigurationError(
            f"table {table!r} cannot be truncated: the foreign key {key!r} of table {by!r} refers to it",
            next_step="leave the option truncate out: the rows are then deleted",
        )
    if referring["forbids"] and referring["readable"]:
        given = sql.SQL(" AND ").join(
            sql.SQL("{} IS NOT NULL").format(sql.Identifier(name)) for name in referring["columns"]
        )
        other = sql.Identifier(referring["nspname"], by)
        if _execute(connection, sql.SQL("SELECT 1 FROM {} WHERE {} LIMIT 1").format(other, given)).first() is not None:
            raise still_referred_to(table, key, by)


# The place of a table that waits for the end of its own transaction.
_TEMPORARY: Final = ("pg_temp", "dualwrite_merging")
_CARDINALITY: Final = "21000"


def take_over(connection: Connection, parts: Sequence[Staged], layout: Layout) -> None:
    """See :meth:`SinkDatabase.take_over`."""
    if layout.merge is not None:
        _require_whole(connection, parts, layout)
        merge(connection, parts, layout, connection.engine.connect)
        return
    for part in parts:
        _insert_all(connection, part, layout)


def _insert_all(connection: Connection, part: Staged, layout: Layout) -> None:
    target, columns = layout.table, layout.table_column_names
    statement = sql.SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {}").format(
        sql.Identifier(*target), listed(columns), listed(columns), sql.Identifier(*part.table.table)
    )
    with _explained(connection, [part], layout, connection.engine.connect):
        moved = _execute(connection, statement).rowcount
        held = moved if moved == part.rows else _count(connection, part.table)
    if held != part.rows:
        raise rows_lost(part, held)
    require_all_taken(target[1], sent=part.rows, taken=moved)


def merge(
    connection: Connection,
    parts: Sequence[Staged],
    layout: Layout,
    looking: Callable[[], AbstractContextManager[Connection]],
) -> None:
    """Bring the rows of staging tables into the target by the layout's `merge`.

    `looking` opens a connection that sees the staging tables, to name a row that was refused: the transaction has failed then.
    """
    plan, table = layout.merge, layout.table[1]
    assert plan is not None
    statements = _statements(parts, layout)
    with _explained(connection, parts, layout, looking):
        if plan.order is None and not plan.updated:  # an update refuses the second row of a key by itself
            twice = _run(connection, statements.key_twice()).first()
            if twice is not None:
                raise key_twice(table, twice)
        if plan.op is not None:
            _run(connection, statements.delete_using())
        taken = _run(connection, statements.insert_or_update("OVERRIDING SYSTEM VALUE ")).rowcount
        if plan.counts_rows:
            rows = sum(part.rows for part in parts)
            counted = rows if plan.order is None else _run(connection, statements.newest_count()).scalar_one()
            require_all_merged(table, counted=cast("int", counted), taken=taken)


def _statements(parts: Sequence[Staged], layout: Layout) -> MergeStatements:
    assert layout.merge is not None
    return MergeStatements(
        layout.merge,
        layout.table_column_names,
        sql.Identifier(*layout.table).as_string(),
        [sql.Identifier(*part.table.table).as_string() for part in parts],
        quote=lambda name: sql.Identifier(name).as_string(),
        place="ctid",
    )


def _require_whole(connection: Connection, parts: Sequence[Staged], layout: Layout) -> None:
    """Refuse staging tables that do not hold all rows: a crash of the database empties them."""
    try:
        for row in _run(connection, _statements(parts, layout).counts()):
            number, held = cast("tuple[int, int]", row)
            if held != parts[number].rows:
                raise rows_lost(parts[number], held)
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, connection.engine) from error


@contextmanager
def _explained(
    connection: Connection,
    parts: Sequence[Staged],
    layout: Layout,
    looking: Callable[[], AbstractContextManager[Connection]],
) -> Generator[None, None, None]:
    """Raise what the target refuses as an error that names the row, if it can be found."""
    try:
        yield
    except exc.SQLAlchemyError as error:
        if not isinstance(error.__cause__, psycopg.Error) or not error.__cause__.sqlstate:
            raise map_database_error(error, connection.engine) from error
        if error.__cause__.sqlstate == _CARDINALITY:
            raise key_twice(layout.table[1], _key_twice(looking, parts, layout)) from error
        row = _refused_row(looking, parts, layout, error.__cause__)
        raise refused(f"table {layout.table[1]!r} does not take the batch", error.__cause__, row) from error


def _key_twice(
    looking: Callable[[], AbstractContextManager[Connection]], parts: Sequence[Staged], layout: Layout
) -> Sequence[object] | None:
    """The key that occurs twice; None if it is not found soon, or if a trigger changed a row that the batch replaces."""
    try:
        with looking() as connection:
            _bound_looking(connection)
            return _run(connection, _statements(parts, layout).key_twice()).first()
    except exc.SQLAlchemyError as more:
        logger.debug("the key is not found: %s", driver_words(more))
        return None


def _bound_looking(connection: Connection) -> None:
    connection.exec_driver_sql("SET LOCAL lock_timeout = '1s'; SET LOCAL statement_timeout = '5s'")


def _refused_row(
    looking: Callable[[], AbstractContextManager[Connection]],
    parts: Sequence[Staged],
    layout: Layout,
    error: psycopg.Error,
) -> str | None:
    """The name of a row that the target refused: the database identifies it only by its values, which no log may show.

    Searches briefly, because the failed transaction still holds its locks. None if any of several partitions may have the row.
    """
    unknown = f"partition {parts[0].partition}" if len(parts) == 1 else None
    deletes = layout.merge is not None and layout.merge.op is not None
    try:
        with looking() as connection:
            _bound_looking(connection)
            condition = _broken(connection, layout.table, error)
            if condition is None:
                return unknown
            if deletes:
                condition = sql.SQL("({}) AND NOT {}").format(condition, sql.Identifier(DELETED))
            return _first_row(connection, parts, layout, condition) or unknown
    except exc.SQLAlchemyError as more:
        logger.debug("the refused row is not found: %s", driver_words(more))
    return unknown


def _first_row(
    connection: Connection, parts: Sequence[Staged], layout: Layout, condition: sql.Composable
) -> str | None:
    """The name of the first row in the staging tables for which the condition is true."""
    for part in parts:
        found = _execute(
            connection,
            sql.SQL(
                "SELECT (SELECT count(*) FROM {0} WHERE ctid <= bad.ctid){1} FROM {0} AS bad WHERE {2} "
                "ORDER BY bad.ctid LIMIT 1"
            ).format(
                sql.Identifier(*part.table.table),
                sql.SQL("").join(sql.SQL(", bad.{}::text").format(sql.Identifier(name)) for name in table_key(layout)),
                condition,
            ),
        ).one_or_none()
        if found is not None:
            return row_name(part.partition, cast("int", found[0]), found[1:])
    return None


def _broken(connection: Connection, target: tuple[str, str], error: psycopg.Error) -> sql.Composable | None:
    """The condition for rows that violate the constraint; None if the constraint is not one on single rows."""
    if isinstance(error, psycopg.errors.NotNullViolation) and error.diag.column_name:
        return sql.SQL("{} IS NULL").format(sql.Identifier(error.diag.column_name))
    if isinstance(error, psycopg.errors.CheckViolation):
        schema, table = error.diag.schema_name or target[0], error.diag.table_name or target[1]
        names = {"schema": schema, "table": table, "name": error.diag.constraint_name}
        expression = connection.execute(_CHECK, names).scalar_one_or_none()
        return None if expression is None else sql.SQL("NOT ({})").format(sql.SQL(expression))
    return None


def _create(
    connection: Connection, made: tuple[str, str], layout: Layout, kind: str, comment: str | None = None
) -> None:
    """Create an empty table for the layout's staged columns. The error for a missing right names it."""
    own = [
        sql.SQL("NULL::{} AS {}").format(sql.SQL(one.shown_type), sql.Identifier(one.name))
        for one in layout.own_columns
    ]
    try:
        # Types only: the target checks constraints and sets defaults when the rows are moved.
        _execute(
            connection,
            sql.SQL("CREATE {} TABLE {} WITH (autovacuum_enabled = false){} AS SELECT {} FROM {} WITH NO DATA").format(
                sql.SQL(kind),
                sql.Identifier(*made),
                sql.SQL(" ON COMMIT DROP" if made == _TEMPORARY else ""),
                sql.SQL(", ").join([*map(sql.Identifier, layout.table_column_names), *own]),
                sql.Identifier(*layout.table),
            ),
        )
        if comment is not None:
            says = sql.SQL("COMMENT ON TABLE {} IS {}").format(sql.Identifier(*made), sql.Literal(comment))
            _execute(connection, says)
    except exc.SQLAlchemyError as error:
        mapped = map_database_error(error, connection.engine)
        if isinstance(mapped, ConfigurationError):
            raise ConfigurationError(
                f"no staging table can be made in schema {made[0]!r}: {driver_words(error)}",
                next_step=f"grant it: GRANT CREATE ON SCHEMA {made[0]} TO "
                f'"{connection.engine.url.username}"; and SELECT on the table that is written',
            ) from error
        raise mapped from error


@contextmanager
def merging(
    connection: Connection, layout: Layout, names: RowNames | None, *, prepared: bool
) -> Generator[TableCopy, None, None]:
    """See :meth:`SinkDatabase.merging`.

    A transaction that has used a temporary table cannot be prepared; one that has created and dropped another table can.
    """
    made = (layout.table[0], f"{STAGING_PREFIX}{secrets.token_hex(12)}") if prepared else _TEMPORARY
    _create(connection, made, layout, "UNLOGGED" if prepared else "TEMPORARY")
    with copying(connection, layout, made, names) as copy:
        yield copy
    # The table has just been made of the target, whose types it keeps from changing.
    require_types(connection, [layout.table], layout.table_types, shown_name=layout.table[1])
    part = Staged(StagingTable(*made, "", 0, ""), copy.sent_rows, -1 if names is None else names.partition)
    connection.exec_driver_sql("SAVEPOINT dualwrite_merging")

    @contextmanager
    def looking() -> Generator[Connection, None, None]:
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT dualwrite_merging")
        yield connection

    merge(connection, [part], layout, looking)
    if prepared:
        _execute(connection, sql.SQL("DROP TABLE {}").format(sql.Identifier(*made)))


def _drop_in(connection: Connection, tables: Collection[StagingTable]) -> None:
    names = sql.SQL(", ").join(sql.Identifier(*staged.table) for staged in tables)
    _execute(connection, sql.SQL("DROP TABLE IF EXISTS {}").format(names))


def _drop(connection: Connection, *tables: StagingTable) -> bool:
    try:
        with connection.begin():
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{DROP_LOCK_TIMEOUT_S:g}s'")
            _drop_in(connection, tables)
    except exc.SQLAlchemyError as error:
        shown = ", ".join(staged.name for staged in tables)
        logger.warning("staging tables stay for now: %s: %s", shown, driver_words(error))
        return False
    return True


def _require_condition(connection: Connection, layout: Layout, how: Emptying) -> None:
    """Refuse a condition that the database does not take for the columns that are written."""
    rows = sql.SQL("SELECT {} FROM {}").format(listed(layout.table_column_names), sql.Identifier(*layout.table))
    try:
        condition = sql.SQL(how.condition)
        _execute(connection, sql.SQL("SELECT 1 FROM ({}) AS replaced WHERE {} LIMIT 0").format(rows, condition))
    except (exc.ProgrammingError, exc.DataError) as error:  # the latter for a literal that is no value of the type
        raise not_a_condition(driver_words(error)) from error


def empty(connection: Connection, table: tuple[str, str], how: Emptying) -> None:
    """See :meth:`SinkDatabase.empty`.

    To a snapshot that is older than the decision and has not read the table yet, a truncated table looks empty (PostgreSQL's
    documentation, "MVCC caveats"); deleted rows are there for it. The lock keeps other writers out, as TRUNCATE's own does, but
    no readers: otherwise two batches that overwrite the table at once would both leave their rows there.
    """
    name = sql.Identifier(*table)
    try:
        if how.truncates:
            _execute(connection, sql.SQL("TRUNCATE TABLE {}").format(name))
        else:
            _execute(connection, sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(name))
            _execute(connection, sql.SQL("DELETE FROM {} WHERE {}").format(name, sql.SQL(how.condition)))
    except exc.SQLAlchemyError as error:
        raise _not_replaced(error, connection, f"table {table[1]!r} cannot be emptied", how) from error


def _not_replaced(error: exc.SQLAlchemyError, connection: Connection, what: str, how: Emptying) -> DualWriteError:
    """The error for rows that could not be replaced: a right, or what the database says of a row of the table or the batch."""
    meaning = meaning_of(error)
    if meaning is Meaning.PRIVILEGE:
        return ConfigurationError(
            f"{what}: {driver_words(error)}", next_step=f'grant {how.right} on it, or use mode("append")'
        )
    if meaning is Meaning.REJECTED and isinstance(error.__cause__, psycopg.Error):
        return refused(what, error.__cause__)
    return map_database_error(error, connection.engine)


def _count(connection: Connection, staged: StagingTable) -> int:
    counted = _execute(connection, sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(*staged.table)))
    return cast("int", counted.scalar_one())


def _execute(connection: Connection, statement: sql.Composed) -> CursorResult[tuple[object, ...]]:
    return _run(connection, statement.as_string())


def _run(connection: Connection, statement: str) -> CursorResult[tuple[object, ...]]:
    return connection.exec_driver_sql(statement.replace("%", "%%"))


# PostgreSQL, as the sinks use it.


class PostgreSQL:
    """See :class:`~dualwrite.sinks.spark.databases.database.SinkDatabase`."""

    def __init__(self, url: URL) -> None:
        self.engine = new_engine(
            url,
            # Binary COPY sends text as UTF-8, whatever the database's own encoding is.
            connect_args={"client_encoding": "utf8"},
            # Reads the ledger and the catalog as they are now, not as of the transaction's start.
            isolation_level="READ COMMITTED",
            hide_parameters=True,
            # SQLAlchemy looks the type up in every new engine, and each of the driver's processes makes one.
            use_native_hstore=False,
        )
        _take_reported_facts(self.engine)
        ping_idle_connections(self.engine)

    def quoted(self, table: tuple[str, str]) -> str:
        return sql.Identifier(*table).as_string()

    def read_table(self, connection: Connection, name: str) -> Table:
        return read_table(connection, name)

    def require_types(
        self,
        connection: Connection,
        tables: Collection[tuple[str, str]],
        planned: Mapping[str, str],
        *,
        shown_name: str,
        beside: Sequence[Select[Any]] = (),
    ) -> Sequence[object]:
        return require_types(connection, tables, planned, shown_name=shown_name, beside=beside)

    def writing(
        self, connection: Connection, layout: Layout, table: tuple[str, str], names: RowNames | None = None
    ) -> AbstractContextManager[TableCopy]:
        return copying(connection, layout, table, names)

    def merging(
        self, connection: Connection, layout: Layout, names: RowNames | None = None, *, prepared: bool
    ) -> AbstractContextManager[TableCopy]:
        return merging(connection, layout, names, prepared=prepared)

    def choose_staging(self, connection: Connection, wanted: str, layout: Layout, *, empties: bool) -> bool:
        schema, table = layout.table
        named = {"schema": schema, "table": table, "columns": list(layout.table_column_names)}
        try:
            may_create, may_select, most_prepared = connection.execute(_ALLOWED, named).one()
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self.engine) from error
        if wanted == "staging" or (wanted == "auto" and may_create):
            place = f"SCHEMA {sql.Identifier(schema).as_string()}"
            _require_right(connection, "CREATE", may_create, f"the schema {schema!r}, for staging tables", place)
            _require_right(connection, "SELECT", may_select, f"table {table!r}", self.quoted(layout.table))
            return True
        if empties or (layout.merge is not None and not may_create):
            raise ConfigurationError(
                "rows that replace others, and a table that is emptied first, need staging tables",
                next_step=f'set databaseLeg to "staging"; the user needs CREATE on the schema {schema!r}',
            )
        if most_prepared == 0:
            raise ConfigurationError(
                "the database takes no prepared transactions",
                next_step=f"{_MORE_PREPARED} (which needs CREATE on the schema {schema!r})",
            )
        return False

    def create_staging(self, connection: Connection, made: StagingTable, layout: Layout) -> None:
        """See :meth:`SinkDatabase.create_staging`. In the target's schema and the caller's transaction."""
        _create(connection, made.table, layout, "UNLOGGED", made.comment)

    def wrong_rows(self, layout: Layout, batch: pa.RecordBatch, *, most: int) -> Mapping[int, str]:
        try:
            with self.engine.connect() as connection:
                return wrong_rows(connection, layout, batch, most)
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self.engine) from error

    def take_over(self, connection: Connection, parts: Sequence[Staged], layout: Layout) -> None:
        take_over(connection, parts, layout)

    def require_within(self, connection: Connection, parts: Sequence[Staged], layout: Layout, how: Emptying) -> None:
        try:
            row = _first_row(connection, parts, layout, sql.SQL("{} IS NOT TRUE").format(sql.SQL(how.condition)))
        except exc.SQLAlchemyError as error:
            raise _not_replaced(error, connection, "replaceWhere cannot be computed for the rows", how) from error
        if row is not None:
            raise outside(layout.table[1], row)

    def drop_staging(self, tables: Collection[StagingTable]) -> None:
        if not tables:
            return
        with self.engine.connect() as connection:
            if not _drop(connection, *tables):  # one that is read keeps the others
                for staged in tables if len(tables) > 1 else ():
                    _drop(connection, staged)

    def drop_staging_in(self, connection: Connection, tables: Collection[StagingTable]) -> bool:
        if tables:
            _drop_in(connection, tables)
        return True

    def drop_dead_staging(
        self, schema: str, incarnations: Mapping[str, int], holders: Callable[[], Mapping[str, str]]
    ) -> int:
        dropped = 0
        with self.engine.connect() as connection:
            found = self.find_staging(connection, schema)
            connection.rollback()
            held = holders() if found else {}
            for staged in found:
                if can_be_dropped(staged, incarnations, held):
                    dropped += _drop(connection, staged)
        return dropped

    def find_staging(self, connection: Connection, schema: str) -> Sequence[StagingTable]:
        rows = connection.execute(_FIND_STAGING, {"prefix": STAGING_PREFIX, "schema": schema})
        return [found for row in rows if (found := StagingTable.found(*row)) is not None]

    def require_replaceable(
        self, connection: Connection, layout: Layout, *, empty: Emptying | None, direct: bool
    ) -> None:
        target, plan = layout.table, layout.merge
        needed = ["SELECT"]
        if plan is not None:
            needed += ["UPDATE"] * bool(plan.updated) + ["DELETE"] * (plan.op is not None) + ["TEMPORARY"] * direct
        if empty is not None:
            needed.append(empty.right)
        try:
            found = connection.execute(_RIGHTS, {"schema": target[0], "table": target[1]}).mappings().one()
            table = {"table": found["oid"]}
            places = {"TEMPORARY": ("the database", f"DATABASE {sql.Identifier(found['place']).as_string()}")}
            where = (f"table {target[1]!r}", self.quoted(target))
            for right in needed:
                _require_right(connection, right, found[right], *places.get(right, where))
            if plan is not None:
                require_key(target[1], [*map(frozenset, connection.execute(_UNIQUE, table).scalars())], plan.keys)
            if empty is not None and empty.where is not None:
                _require_condition(connection, layout, empty)
            elif empty is not None:
                for referring in connection.execute(_REFERRING, table).mappings().all():
                    _require_unreferred(connection, target[1], empty, referring)
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, connection.engine) from error

    def empty(self, connection: Connection, table: tuple[str, str], how: Emptying) -> None:
        empty(connection, table, how)

    def before_prepared(self, connection: Connection) -> None:
        before_prepared(connection)

    def require_prepared(self, connection: Connection, names: Collection[str], name: str) -> None:
        require_prepared(connection, names, name)

    def had_no_room(self, error: BaseException) -> TransactionAborted | None:
        """The error for a PREPARE TRANSACTION that exceeded ``max_prepared_transactions``; None for another cause."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, psycopg.errors.OutOfMemory) and _NO_ROOM in str(cause):
                return TransactionAborted(
                    "the database takes no more prepared transactions", next_step=_MORE_PREPARED, retryable=False
                )
            cause = cause.__cause__
        return None

    def waited_in_vain(self, error: BaseException) -> bool:
        """Whether a lock was not free in time."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, psycopg.errors.LockNotAvailable):
                return True
            cause = cause.__cause__
        return False


def _take_reported_facts(engine: Engine) -> None:
    """Let SQLAlchemy take the server's facts from what the server reports as it lets a connection in.

    It would ask for them in a transaction of six statements; and each of a stream's processes next to the driver has an engine
    of its own, for a few transactions.
    """
    dialect = engine.dialect

    def version(connection: Connection) -> tuple[int, int]:
        number = cast("int", cast("Any", connection.connection.driver_connection).info.server_version)
        return divmod(number, 10_000)

    def set_backslash_escapes(connection: Connection) -> None:
        info = cast("Any", connection.connection.driver_connection).info
        vars(dialect)["_backslash_escapes"] = info.parameter_status("standard_conforming_strings") == "off"

    vars(dialect).update(
        _get_server_version_info=version,
        _set_backslash_escapes=set_backslash_escapes,
        _get_default_schema_name=lambda _: None,  # of use to those who look at tables through SQLAlchemy
        get_default_isolation_level=lambda _: "READ COMMITTED",  # the engine's own
    )


# The target table in PostgreSQL's catalog.

_BAD_NAME: Final = frozenset({"42601", "42602", "22023", "0A000", "42939"})

_FIND_TARGET: Final = text(
    # Also a trigger of a user's may defer something, anywhere, and so may those of partitions.
    "SELECT c.oid, n.nspname, c.relname, c.relkind::text, has_any_column_privilege(c.oid, 'INSERT'), c.relkind = 'p' OR EXISTS "
    "(SELECT 1 FROM pg_trigger t WHERE t.tgrelid = c.oid AND (t.tgdeferrable OR NOT t.tgisinternal)) "
    "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(:name)"
)
# A domain has the binary form of its base type, which may be a domain itself.
_COLUMNS: Final = text(
    """
    WITH RECURSIVE base AS (
        SELECT a.attnum, t.oid, t.typbasetype, t.typtype::text AS typtype, t.typname, t.typelem,
               t.typcategory::text AS typcategory,
               CASE WHEN t.typtype = 'd' AND t.typtypmod >= 0 THEN t.typtypmod ELSE a.atttypmod END AS typmod
        FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
        WHERE a.attrelid = :table AND a.attnum > 0 AND NOT a.attisdropped
      UNION ALL
        SELECT base.attnum, t.oid, t.typbasetype, t.typtype::text, t.typname, t.typelem, t.typcategory::text,
               CASE WHEN t.typtype = 'd' AND t.typtypmod >= 0 THEN t.typtypmod ELSE base.typmod END
        FROM base JOIN pg_type t ON t.oid = base.typbasetype WHERE base.typtype = 'd'
    )
    SELECT a.attname, base.typname, base.typtype = 'e', format_type(a.atttypid, a.atttypmod), base.typmod,
           CASE WHEN base.typcategory = 'A' THEN CASE e.typtype WHEN 'e' THEN 'enum' ELSE e.typname END END,
           a.attnotnull AND NOT (a.atthasdef OR a.attidentity <> ''), a.attgenerated <> '', a.attidentity = 'a'
    FROM base JOIN pg_attribute a ON a.attrelid = :table AND a.attnum = base.attnum
         LEFT JOIN pg_type e ON e.oid = base.typelem
    WHERE base.typtype <> 'd' ORDER BY a.attnum
    """
)

_BOUNDED: Final = frozenset({"varchar", "bpchar"})
# These types' modifier adds it to the length (VARHDRSZ).
_HEADER: Final = 4

_TYPES: Final = text(
    "SELECT n.nspname, c.relname, a.attname, format_type(a.atttypid, a.atttypmod) AS shown "
    "FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = ANY(:schemas) AND c.relname = ANY(:tables) AND a.attnum > 0 AND NOT a.attisdropped"
)

_KINDS: Final = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table: what another server keeps does not belong to the transaction",
    "i": "an index",
    "S": "a sequence",
    "c": "a composite type",
}


def read_table(connection: Connection, name: str) -> Table:
    """Look the table up as PostgreSQL itself would: search path, quotes, upper and lower case."""
    try:
        found = connection.execute(_FIND_TARGET, {"name": name}).one_or_none()
        if found is None:
            raise ConfigurationError(
                f"there is no table {name!r}",
                next_step="create it, or check its schema and search path; a name with upper case needs double quotes",
            )
        oid, schema, table, kind, may_insert, defers = found
        rows = connection.execute(_COLUMNS, {"table": oid}).all()
    except exc.SQLAlchemyError as error:
        if sqlstate_of(getattr(error, "orig", None)) in _BAD_NAME:
            raise ConfigurationError(
                f"{name!r} is not the name of a table: {driver_words(error)}",
                next_step='write it as in SQL: orders, sales.orders, or "Order" in double quotes',
            ) from error
        raise map_database_error(error, connection.engine) from error
    if kind not in {"r", "p"}:
        raise ConfigurationError(f"{name!r} is not a table but {_KINDS.get(kind, 'something else')}")
    if not may_insert:
        raise ConfigurationError(
            f"rows may not be inserted into {name!r}",
            next_step=f'as its owner: GRANT INSERT ON {name} TO "{connection.engine.url.username}"',
        )
    columns = [
        TableColumn(
            name=column,
            type_name=type_name,
            shown_type=shown,
            is_enum=is_enum,
            scale=_scale(element or type_name, typmod),
            longest=typmod - _HEADER if (element or type_name) in _BOUNDED and typmod >= _HEADER else None,
            element_type=element,
            must_be_given=must_be_given,
            generated=generated,
            set_once=set_once,
        )
        for column, type_name, is_enum, shown, typmod, element, must_be_given, generated, set_once in rows
    ]
    return Table(schema, table, {column.name: column for column in columns}, defers=defers)


def require_types(
    connection: Connection,
    tables: Collection[tuple[str, str]],
    planned: Mapping[str, str],
    *,
    shown_name: str,
    beside: Sequence[Select[Any]] = (),
) -> Sequence[object]:
    """See :meth:`SinkDatabase.require_types`.

    Binary COPY takes a number for another one of the same width, and INSERT rounds.
    """
    schemas, names = zip(*tables, strict=True)
    found: dict[tuple[str, str], dict[str, str]] = {table: {} for table in tables}
    values: Sequence[object] = [None] * len(beside)
    try:
        bound = {"schemas": list(schemas), "tables": list(names)}
        for schema, table, name, shown, *beside_it in connection.execute(_types_beside(*beside), bound):
            values = beside_it
            if (schema, table) in found:
                found[schema, table][name] = shown
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, connection.engine) from error
    for columns in found.values():
        require_planned(columns, planned, shown_name)
    return values


@lru_cache(maxsize=32)
def _types_beside(*queries: Select[Any]) -> Select[Any]:
    types = _TYPES.columns(nspname=String, relname=String, attname=String, shown=String).subquery()
    return select(types, *(one.scalar_subquery() for one in queries))


def _scale(type_name: str, typmod: int) -> int | None:
    """The scale in a numeric's modifier: eleven bits with a sign (``numeric_typmod_scale`` in PostgreSQL's numeric.c)."""
    if type_name != "numeric" or typmod < 0:
        return None
    return (((typmod - 4) & 0x7FF) ^ 0x400) - 0x400


# Arrow batches into PostgreSQL by COPY, inside the dual write's own database transaction, with bounded memory.

# SQLSTATEs whose detail names a key: missing in another table, duplicate, or in conflict with an exclusion constraint.
_NAMES_KEY: Final = frozenset({"23503", "23505", "23P01"})
_KEY: Final = re.compile(r"Key \(.*?\)=\(.*?\)")
# In the first line of the context, which may name a staging table.
_LINE: Final = re.compile(r", line ([0-9]+)")
# SQLSTATE classes that the same rows cause again: duplicate keys, bad values, violated constraints, missing rights.
_DATA_CLASSES: Final = frozenset({"21", "22", "23", "42"})


class _Driver(Protocol):
    """The part of a ``psycopg.Connection`` that is used here."""

    def cursor(self) -> Cursor[tuple[object, ...]]: ...


@contextmanager
def copying(
    connection: Connection, layout: Layout, table: tuple[str, str], names: RowNames | None = None
) -> Generator[TableCopy, None, None]:
    """COPY the layout's table columns into a table; an exception in the block cancels it. See :meth:`SinkDatabase.writing`."""
    driver = cast("_Driver", connection.connection.dbapi_connection)
    try:
        with driver.cursor() as cursor:
            with cursor.copy(copy_into(table, layout.staged_columns)) as copy:
                table_copy = TableCopy(copy, layout, names)
                yield table_copy
                table_copy.finish()
            taken = cursor.rowcount  # known once the COPY has ended, and until the cursor is closed
    except psycopg.Error as error:
        line, column = _place(error, layout)
        row = names.of(line) if line is not None and names is not None else None
        raise refused(f"table {layout.table[1]!r} does not take the rows", error, row, column) from error
    require_all_taken(layout.table[1], sent=table_copy.sent_rows, taken=taken)


def _place(error: psycopg.Error, layout: Layout) -> tuple[int | None, str | None]:
    """The number of the row in a COPY that the server refused, from 1, and the column with its type, as far as it says so."""
    where = (error.diag.context or "").partition("\n")[0]
    line, names = _LINE.search(where), where.partition(", column ")[2]
    column = next((one for one in layout.table_columns if f"{names}:".startswith(f"{one.name}:")), None)
    shown = None if column is None else f"column {column.name!r} of type {column.shown_type}"
    return None if line is None else int(line[1]), shown


# Which rows a table would not take, by a temporary copy of it that is never committed.

# SQLSTATEs of what a row is by itself: a value, a null, a CHECK.
_OF_A_ROW: Final = frozenset({"23502", "23514"})
_OF_A_VALUE: Final = "22"
_AFTER_A_WRONG_ROW: Final = 64
_NOT_NULL_BESIDE: Final = text(
    "SELECT attname FROM pg_attribute "
    "WHERE attrelid = to_regclass(:name) AND attnum > 0 AND attnotnull AND attname <> ALL (:given)"
)


def wrong_rows(connection: Connection, layout: Layout, batch: pa.RecordBatch, most: int) -> dict[int, str]:
    """See :meth:`SinkDatabase.wrong_rows`. The connection is outside a transaction, and must be rolled back."""
    found = _wrong_here(layout, batch)
    table = _create_checking(connection, layout)
    rows = [place for place in range(batch.num_rows) if place not in found]
    start, chunk = 0, max(1, len(rows))
    while start < len(rows) and len(found) <= most:
        part = rows[start : start + chunk]
        refusal = _refusal(connection, layout, table, batch.take(pa.array(part, pa.int64())))
        if refusal is None:
            start, chunk = start + len(part), 2 * chunk
        elif refusal.line is None and len(part) > 1:
            chunk = len(part) // 2
        else:
            good = 0 if refusal.line is None else refusal.line - 1
            found[part[good]] = refusal.words
            start, chunk = start + good + 1, _AFTER_A_WRONG_ROW
    return found


def _wrong_here(layout: Layout, batch: pa.RecordBatch) -> dict[int, str]:
    """The rows that would not reach the server, or would be changed there."""
    found: dict[int, str] = {}
    for column in layout.table_columns:
        array = batch.column(column.source)
        for place, words in not_kept(column, changes(column, array)):
            found.setdefault(place, words)
        if column.encoding == "uuid":
            for place, value in enumerate(array.to_pylist()):
                if value is not None and not is_uuid(value):
                    found.setdefault(place, f"column {column.name!r} of type uuid: it is not a UUID")
    return found


@dataclass(frozen=True)
class _Refusal:
    """Why a COPY was refused; `line` is the number of the first row that is wrong, from 1, if the server says it."""

    words: str
    line: int | None


def _refusal(connection: Connection, layout: Layout, table: tuple[str, str], rows: pa.RecordBatch) -> _Refusal | None:
    connection.exec_driver_sql("SAVEPOINT dualwrite_checking")
    try:
        _copy_rows(connection, layout, table, rows)
    except psycopg.Error as error:
        if error.sqlstate not in _OF_A_ROW and (error.sqlstate or "")[:2] != _OF_A_VALUE:
            raise refused(f"table {layout.table[1]!r} does not take the rows", error) from error
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT dualwrite_checking")
        line, column = _place(error, layout)
        words = driver_words(error)
        return _Refusal(words if column is None else f"{column}: {words}", line)
    return None


def _create_checking(connection: Connection, layout: Layout) -> tuple[str, str]:
    """Create the copy, under the table's own name, which errors show. Columns that are not written may be null."""
    made = ("pg_temp", layout.table[1])
    where = sql.Identifier(*made)
    try:
        _execute(
            connection,
            sql.SQL("CREATE TEMPORARY TABLE {} (LIKE {} INCLUDING CONSTRAINTS) ON COMMIT DROP").format(
                where, sql.Identifier(*layout.table)
            ),
        )
        given = {"name": where.as_string(), "given": list(layout.table_column_names)}
        beside = connection.execute(_NOT_NULL_BESIDE, given).scalars().all()
        if beside:
            dropped = sql.SQL(", ").join(
                sql.SQL("ALTER COLUMN {} DROP NOT NULL").format(sql.Identifier(name)) for name in beside
            )
            _execute(connection, sql.SQL("ALTER TABLE {} {}").format(where, dropped))
    except exc.SQLAlchemyError as error:
        mapped = map_database_error(error, connection.engine)
        if isinstance(mapped, ConfigurationError):
            raise ConfigurationError(
                f"the rows for table {layout.table[1]!r} cannot be checked: {driver_words(error)}",
                next_step="a quarantine needs SELECT on the table, and TEMPORARY on the database",
            ) from error
        raise mapped from error
    return made


def _copy_rows(connection: Connection, layout: Layout, table: tuple[str, str], rows: pa.RecordBatch) -> None:
    driver = cast("_Driver", connection.connection.dbapi_connection)
    with driver.cursor() as cursor, cursor.copy(copy_into(table, layout.table_columns)) as copy:
        table_copy = TableCopy(copy, layout, columns=layout.table_columns)
        table_copy.write(rows)
        table_copy.finish()


def refused(what: str, error: psycopg.Error, row: str | None = None, column: str | None = None) -> TransactionAborted:
    """The error for rows that a table refuses; it says whether a retry with the same rows may succeed.

    `row` and `column` are for people: which value it was, if that is known.
    """
    shown = []
    # Only this detail: others show the values of whole rows.
    if error.sqlstate in _NAMES_KEY and (key := _KEY.match(error.diag.message_detail or "")):
        shown.append(key[0])
    if column is None and error.diag.column_name:
        column = f"column {error.diag.column_name!r}"
    if column is not None:
        shown.append(column)
    if row is not None:
        shown.append(row)
    place = f" ({', '.join(shown)})" if shown else ""
    return TransactionAborted(
        f"{what}: {driver_words(error)}{place}", retryable=(error.sqlstate or "")[:2] not in _DATA_CLASSES
    )


# The database leg by prepared transactions: tasks load the target and prepare; one decision commits or aborts all of
# them.
#
# Prepared rows keep their locks, and stay invisible, until the settler of their slot ends the transaction
# (`dualwrite.recovery.settle.end_participants`): the driver right after its decision, or the next driver.

_LONGEST_WAIT: Final = "30s"
_PRESENT: Final = text(
    "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database() AND gid = ANY(:names)"
)
_ROOM: Final = text(
    "SELECT current_setting('max_prepared_transactions')::int, (SELECT count(*) FROM pg_prepared_xacts), "
    "set_config('lock_timeout', :longest, true)"
)
_NO_ROOM: Final = "prepared transactions"
_MORE_PREPARED: Final = (
    "set max_prepared_transactions to at least the number of partitions of all batches that are written at once, and restart "
    "the database; or end those that nobody decides on (dualwrite recover), write fewer partitions, or set databaseLeg to "
    '"staging"'
)
_ALLOWED: Final = text(
    # A staging table is made by a SELECT of the columns that are written, which an INSERT into them does not need.
    "SELECT has_schema_privilege(:schema, 'CREATE'), (SELECT bool_and(has_column_privilege(c.oid, a.attnum, 'SELECT')) "
    "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid "
    "WHERE n.nspname = :schema AND c.relname = :table AND a.attname = ANY (:columns)), "
    "current_setting('max_prepared_transactions')::int"
)


def before_prepared(connection: Connection) -> None:
    """See :meth:`SinkDatabase.before_prepared`.

    Another task may still take the last place before us; see :meth:`PostgreSQL.had_no_room`. The transaction's lock waits are
    limited: another attempt's prepared rows may hold the same keys forever.
    """
    most, present, _ = connection.execute(_ROOM, {"longest": _LONGEST_WAIT}).one()
    if present >= most:
        raise ConfigurationError(
            f"the database takes {most} prepared transactions, and has {present}", next_step=_MORE_PREPARED
        )


def require_prepared(connection: Connection, names: Collection[str], name: str) -> None:
    """See :meth:`SinkDatabase.require_prepared`."""
    present: int = connection.execute(_PRESENT, {"names": list(names)}).scalar_one() if names else 0
    if present != len(names):
        raise TransactionAborted(
            f"{name}: of {len(names)} prepared database transactions {present} are there: the others have been ended",
            next_step="run the batch again",
        )
