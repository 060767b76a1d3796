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
from dualwrite.sinks.spark.databases.database import (
    KEY_TWICE_STEP,
    STAGING_PREFIX,
    Emptying,
    Staged,
    StagingTable,
    can_be_dropped,
    require_all_taken,
    require_key,
    rows_lost,
    still_referred_to,
)
from dualwrite.sinks.spark.databases.postgresql__sinks_spark_databases_postgresql_copying import refused
from dualwrite.sinks.spark.digests__sinks_spark_columns_row_names import row_name
from dualwrite.stores.sql.access__stores_sql_access_failures import driver_words, map_database_error

if TYPE_CHECKING:
    from sqlalchemy import Engine, RowMapping

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


_RIGHTS: Final = text(
    "SELECT c.oid, has_any_column_privilege(c.oid, 'SELECT') AS \"SELECT\", "
    "has_any_column_privilege(c.oid, 'UPDATE') AS \"UPDATE\", has_table_privilege(c.oid, 'DELETE') AS \"DELETE\", "
    "has_table_privilege(c.oid, 'TRUNCATE') AS \"TRUNCATE\" "
    "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = :schema AND c.relname = :table"
)
# Those that ON CONFLICT may use.
_UNIQUE: Final = text(
    "SELECT array_agg(a.attname::text) FROM pg_index i JOIN pg_attribute a "
    "ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) "
    "WHERE i.indrelid = :table AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL "
    "AND i.indexprs IS NULL GROUP BY i.indexrelid"
)
_NAMES: Final = text(
    "SELECT attname::text FROM pg_attribute WHERE attrelid = :table AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
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


def require_replaceable(
    connection: Connection, target: tuple[str, str], *, empty: Emptying | None, upsert: Sequence[str]
) -> None:
    """See :meth:`SinkDatabase.require_replaceable`."""
    try:
        found = connection.execute(_RIGHTS, {"schema": target[0], "table": target[1]}).mappings().one()
        table = {"table": found["oid"]}
        user, where = connection.engine.url.username, sql.Identifier(*target).as_string()
        for right in ("SELECT", *(["UPDATE"] if upsert else []), *([] if empty is None else [empty.value])):
            if not found[right]:
                raise ConfigurationError(
                    f"the right to {right} is missing on table {target[1]!r}",
                    next_step=f'as its owner: GRANT {right} ON {where} TO "{user}"',
                )
        if upsert:
            columns = connection.execute(_NAMES, table).scalars().all()
            require_key(target[1], columns, [*map(frozenset, connection.execute(_UNIQUE, table).scalars())], upsert)
        if empty is not None:
            for referring in connection.execute(_REFERRING, table).mappings().all():
                _require_unreferred(connection, target[1], empty, referring)
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, connection.engine) from error


def _require_unreferred(connection: Connection, table: str, empty: Emptying, referring: RowMapping) -> None:
    """Refuse to empty a table that a foreign key refers to: by TRUNCATE always, by DELETE if a row of the other table does."""
    key, by = referring["conname"], referring["relname"]
    if empty is Emptying.TRUNCATE:
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


def empty(connection: Connection, table: tuple[str, str], how: Emptying) -> None:
    """See :meth:`SinkDatabase.empty`.

    To a snapshot that is older than the decision and has not read the table yet, a truncated table looks empty (PostgreSQL's
    documentation, "MVCC caveats"); deleted rows are there for it. The lock keeps other writers out, as TRUNCATE's own does, but
    no readers: otherwise two batches that overwrite the table at once would both leave their rows there.
    """
    name = sql.Identifier(*table)
    try:
        if how is Emptying.TRUNCATE:
            _execute(connection, sql.SQL("TRUNCATE TABLE {}").format(name))
        else:
            _execute(connection, sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(name))
            _execute(connection, sql.SQL("DELETE FROM {}").format(name))
    except exc.SQLAlchemyError as error:
        if isinstance(error, exc.IntegrityError) and isinstance(error.__cause__, psycopg.Error):
            raise refused(f"table {table[1]!r} cannot be emptied", error.__cause__) from error
        mapped = map_database_error(error, connection.engine)
        if isinstance(mapped, ConfigurationError):
            raise ConfigurationError(
                f"table {table[1]!r} cannot be emptied: {driver_words(error)}",
                next_step=f'grant {how.value} on it, or use mode("append")',
            ) from error
        raise mapped from error


def _count(connection: Connection, staged: StagingTable) -> int:
    counted = _execute(connection, sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(*staged.table)))
    return cast("int", counted.scalar_one())


def _execute(connection: Connection, statement: sql.Composed) -> CursorResult[tuple[object, ...]]:
    return connection.exec_driver_sql(statement.as_string().replace("%", "%%"))
