"""PostgreSQL's staging tables: hold the rows that tasks have brought into it until the driver moves them into the target.

Each attempt at a partition fills a table of its own. The table is unlogged: written once, read once, and useless after a
crash of the database, which empties it. The driver compares the number of rows with the task's count before it moves them,
so an emptied table fails the batch and does no harm.

A staging table's comment names the slot and incarnation that created it, and the holder of the slot's lease. Once the slot
has been claimed again, or another process holds the lease, no process can decide on the table's rows any more, and the
table is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

import psycopg
import psycopg.errors
from psycopg import sql
from sqlalchemy import Connection, CursorResult, exc, text

from dualwrite.errors import ConfigurationError, TransactionAborted
from dualwrite.sinks.spark.columns.row_names import row_name
from dualwrite.sinks.spark.databases.database import (
    KEY_TWICE_STEP,
    STAGING_PREFIX,
    Staged,
    StagingTable,
    can_be_dropped,
    require_all_taken,
    rows_lost,
)
from dualwrite.sinks.spark.databases.postgresql.copying import refused
from dualwrite.stores.sql.access.failures import driver_words, map_database_error

if TYPE_CHECKING:
    from sqlalchemy import Engine

logger = logging.getLogger(__name__)

_DROP_LOCK_TIMEOUT: Final = "2s"
_FIND: Final = text(
    "SELECT n.nspname, c.relname, obj_description(c.oid, 'pg_class') FROM pg_class c "
    "JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relkind = 'r' AND starts_with(c.relname, :prefix) AND n.nspname = :schema ORDER BY c.relname"
)

_CHECK: Final = text(
    "SELECT pg_get_expr(k.conbin, k.conrelid) FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid "
    "JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = :schema AND c.relname = :table AND k.conname = :name AND k.contype = 'c'"
)


def create_staging(connection: Connection, made: StagingTable, target: tuple[str, str], columns: Sequence[str]) -> None:
    """See :meth:`SinkDatabase.create_staging`. In the target's schema and the caller's transaction."""
    try:
        # Types only: the target checks constraints and sets defaults when the rows are moved.
        _execute(
            connection,
            sql.SQL(
                "CREATE UNLOGGED TABLE {} WITH (autovacuum_enabled = false) AS SELECT {} FROM {} WITH NO DATA"
            ).format(sql.Identifier(*made.table), listed(columns), sql.Identifier(*target)),
        )
        _execute(
            connection,
            sql.SQL("COMMENT ON TABLE {} IS {}").format(sql.Identifier(*made.table), sql.Literal(made.comment)),
        )
    except exc.SQLAlchemyError as error:
        mapped = map_database_error(error, connection.engine)
        if isinstance(mapped, ConfigurationError):
            raise ConfigurationError(
                f"no staging table can be made in schema {made.schema!r}: {driver_words(error)}",
                next_step=f'grant it: GRANT CREATE ON SCHEMA {made.schema} TO "{connection.engine.url.username}"; and SELECT '
                "on the table that is written",
            ) from error
        raise mapped from error


def take_over(
    connection: Connection,
    part: Staged,
    target: tuple[str, str],
    columns: Sequence[str],
    *,
    key: Sequence[str] = (),
    upsert: Sequence[str] = (),
) -> None:
    """See :meth:`SinkDatabase.take_over`: the rows of one staging table."""
    staged, rows = part.table, part.rows
    statement = sql.SQL("INSERT INTO {} AS present ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {}").format(
        sql.Identifier(*target), listed(columns), listed(columns), sql.Identifier(*staged.table)
    )
    if upsert:
        # Assigns the keys, too, so that every row counts as written even if there is no other column.
        # Does not replace a row from another staging table of this batch: there is no order between the two.
        statement += sql.SQL(
            " ON CONFLICT ({}) DO UPDATE SET {} WHERE present.xmin <> pg_current_xact_id()::xid"
        ).format(
            listed(upsert),
            sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in columns),
        )
    try:
        moved = _execute(connection, statement).rowcount
        held = moved if moved == rows else _count(connection, staged)
    except exc.SQLAlchemyError as error:
        if isinstance(error.__cause__, psycopg.Error) and error.__cause__.sqlstate:
            row = _refused_row(connection.engine, staged, target, error.__cause__, partition=part.partition, key=key)
            raise refused(f"table {target[1]!r} does not take the batch", error.__cause__, row) from error
        raise map_database_error(error, connection.engine) from error
    if held != rows:
        raise rows_lost(part, held)
    if moved != rows and upsert:
        raise TransactionAborted(
            f"table {target[1]!r} took {moved} of {rows} rows of a partition: a key occurs twice in the batch, or a trigger "
            "leaves rows out",
            transactional_id=staged.transactional_id,
            next_step=KEY_TWICE_STEP,
            retryable=False,
        )
    require_all_taken(target[1], sent=rows, taken=moved)


def _refused_row(
    engine: Engine,
    staged: StagingTable,
    target: tuple[str, str],
    error: psycopg.Error,
    *,
    partition: int,
    key: Sequence[str],
) -> str:
    """The name of a row that the target refused: the database identifies it only by its values, which no log may show.

    Searches on another connection, because the transaction has failed; and briefly, because it still holds its locks.
    """
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("SET LOCAL lock_timeout = '1s'; SET LOCAL statement_timeout = '5s'")
            condition = _broken(connection, target, error)
            if condition is None:
                return f"partition {partition}"
            found = _execute(
                connection,
                sql.SQL(
                    "SELECT (SELECT count(*) FROM {0} WHERE ctid <= bad.ctid){1} FROM {0} AS bad WHERE {2} "
                    "ORDER BY bad.ctid LIMIT 1"
                ).format(
                    sql.Identifier(*staged.table),
                    sql.SQL("").join(sql.SQL(", bad.{}::text").format(sql.Identifier(name)) for name in key),
                    condition,
                ),
            ).one_or_none()
    except exc.SQLAlchemyError as more:
        logger.debug("the refused row is not found: %s", driver_words(more))
        return f"partition {partition}"
    return f"partition {partition}" if found is None else row_name(partition, cast("int", found[0]), found[1:])


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


def drop_staging(engine: Engine, tables: Collection[StagingTable]) -> None:
    """See :meth:`SinkDatabase.drop_staging`."""
    with engine.connect() as connection:
        for staged in tables:
            _drop(connection, staged)


def drop_dead_staging(
    engine: Engine, schema: str, incarnations: Mapping[str, int], holders: Callable[[], Mapping[str, str]]
) -> int:
    """See :meth:`SinkDatabase.drop_dead_staging`."""
    dropped = 0
    with engine.connect() as connection:
        found = [
            StagingTable.found(*row) for row in connection.execute(_FIND, {"prefix": STAGING_PREFIX, "schema": schema})
        ]
        connection.rollback()
        held = holders() if found else {}
        for staged in found:
            if staged is not None and can_be_dropped(staged, incarnations, held):
                dropped += _drop(connection, staged)
    return dropped


def _drop(connection: Connection, staged: StagingTable) -> bool:
    try:
        with connection.begin():
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_DROP_LOCK_TIMEOUT}'")
            _execute(connection, sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(*staged.table)))
    except exc.SQLAlchemyError as error:
        logger.warning("staging table %s stays for now: %s", staged.name, driver_words(error))
        return False
    return True


def listed(names: Sequence[str]) -> sql.Composed:
    """Names of columns, quoted, with commas between."""
    return sql.SQL(", ").join(map(sql.Identifier, names))


def empty(connection: Connection, table: tuple[str, str]) -> None:
    """See :meth:`SinkDatabase.empty`."""
    try:
        _execute(connection, sql.SQL("TRUNCATE TABLE {}").format(sql.Identifier(*table)))
    except exc.SQLAlchemyError as error:
        mapped = map_database_error(error, connection.engine)
        if isinstance(mapped, ConfigurationError):
            raise ConfigurationError(
                f"table {table[1]!r} cannot be emptied: {driver_words(error)}",
                next_step='grant TRUNCATE on it, or use mode("append")',
            ) from error
        raise mapped from error


def _count(connection: Connection, staged: StagingTable) -> int:
    counted = _execute(connection, sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(*staged.table)))
    return cast("int", counted.scalar_one())


def _execute(connection: Connection, statement: sql.Composed) -> CursorResult[tuple[object, ...]]:
    return connection.exec_driver_sql(statement.as_string().replace("%", "%%"))
