"""Staging tables: hold the rows that tasks have brought into the database until the driver moves them into the target.

Each attempt at a partition fills a table of its own. The table is unlogged: written once, read once, and useless after a
crash of the database, which empties it. The driver compares the number of rows with the task's count before it moves them,
so an emptied table fails the batch and does no harm.

A staging table's comment names the slot and incarnation that created it, and the holder of the slot's lease. Once the slot
has been claimed again, or another process holds the lease, no process can decide on the table's rows any more, and the
table is dropped.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import psycopg
import psycopg.errors
from psycopg import sql
from sqlalchemy import Connection, CursorResult, exc, text

from dualwrite.errors import ConfigurationError, TransactionAborted
from dualwrite.sinks.spark.columns.row_names import row_name
from dualwrite.sinks.spark.writing.copying import refused, require_all_taken
from dualwrite.stores.failures import driver_words, map_database_error

if TYPE_CHECKING:
    from sqlalchemy import Engine

logger = logging.getLogger(__name__)

_PREFIX: Final = "dualwrite_staging_"
_COMMENT: Final = "made by dualwrite, dropped by it: "
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


@dataclass(frozen=True)
class StagingTable:
    """One staging table.

    Attributes:
        schema: The database schema that it is in.
        name: Its name.
        transactional_id: The slot of the task that created it.
        incarnation: The incarnation of that slot.
        owner: The holder of the slot's lease.
    """

    schema: str
    name: str
    transactional_id: str
    incarnation: int
    owner: str

    @property
    def table(self) -> tuple[str, str]:
        """Schema and name."""
        return self.schema, self.name


def create_staging(
    connection: Connection,
    target: tuple[str, str],
    columns: Sequence[str],
    *,
    transactional_id: str,
    incarnation: int,
    owner: str,
) -> StagingTable:
    """Create an empty staging table for some columns of the target, in the target's schema and the caller's transaction.

    Raises:
        ConfigurationError: Tables may not be created in that schema.
        TransactionAborted, Unavailable: The transaction cannot continue.
    """
    made = StagingTable(target[0], f"{_PREFIX}{secrets.token_hex(12)}", transactional_id, incarnation, owner)
    comment = _COMMENT + json.dumps({"slot": transactional_id, "incarnation": incarnation, "owner": owner})
    try:
        # Types only: the target checks constraints and sets defaults when the rows are moved.
        _execute(
            connection,
            sql.SQL(
                "CREATE UNLOGGED TABLE {} WITH (autovacuum_enabled = false) AS SELECT {} FROM {} WITH NO DATA"
            ).format(sql.Identifier(*made.table), listed(columns), sql.Identifier(*target)),
        )
        _execute(
            connection, sql.SQL("COMMENT ON TABLE {} IS {}").format(sql.Identifier(*made.table), sql.Literal(comment))
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
    return made


def take_over(
    connection: Connection,
    staged: StagingTable,
    target: tuple[str, str],
    columns: Sequence[str],
    *,
    rows: int,
    partition: int,
    key: Sequence[str] = (),
    upsert: Sequence[str] = (),
) -> None:
    """Move the rows of a staging table into the target, in the caller's transaction.

    Args:
        connection: Inside the deciding transaction.
        staged: The staging table.
        target: Schema and name of the target table.
        columns: The columns.
        rows: Number of rows that the staging table must hold.
        partition: Number of the partition, for people.
        key: Columns that name a row, for people.
        upsert: Key columns: a row whose key is in the target replaces the other columns there.

    Raises:
        TransactionAborted: Rows are missing, a key comes twice, or the target refuses them; nothing is moved.
        ConfigurationError, Unavailable: The database does not answer, or answers nonsense.
    """
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
            row = _refused_row(connection.engine, staged, target, error.__cause__, partition=partition, key=key)
            raise refused(f"table {target[1]!r} does not take the batch", error.__cause__, row) from error
        raise map_database_error(error, connection.engine) from error
    if held != rows:
        raise TransactionAborted(
            f"a staging table holds {held} rows of {rows}: the database has crashed in between",
            transactional_id=staged.transactional_id,
        )
    if moved != rows and upsert:
        raise TransactionAborted(
            f"table {target[1]!r} took {moved} of {rows} rows of a partition: a key comes twice in the batch, or a trigger "
            "leaves rows out",
            transactional_id=staged.transactional_id,
            next_step="nothing of the batch was written on either side: let each key come once in the batch, also in two "
            "partitions, and filter out the rows that a trigger skips",
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
    """Drop staging tables whose rows were moved. Tables that are still being read are left for :func:`drop_dead_staging`."""
    with engine.connect() as connection:
        for staged in tables:
            _drop(connection, staged)


def drop_dead_staging(
    engine: Engine, schema: str, incarnations: Mapping[str, int], holders: Callable[[], Mapping[str, str]]
) -> int:
    """Drop the staging tables that no process can decide on any more. Tables that are still being read stay until next time.

    A settled incarnation cannot decide. A live incarnation may have left tables as well, if its driver died after it moved
    their rows and before it dropped them: their creators no longer hold the slot.

    Args:
        engine: The database.
        schema: Where staging tables are created.
        incarnations: The current incarnation by slot.
        holders: Reads the current holder by slot. Called after the tables have been found: a table's creator held its slot
            before that, and never gets it back under the same name.

    Returns:
        Number of tables dropped.
    """
    dropped = 0
    with engine.connect() as connection:
        found = [_parsed(*row) for row in connection.execute(_FIND, {"prefix": _PREFIX, "schema": schema})]
        connection.rollback()
        held = holders() if found else {}
        for staged in found:
            if staged is None or staged.transactional_id not in incarnations:
                continue
            is_over = staged.incarnation < incarnations[staged.transactional_id]
            if is_over or held.get(staged.transactional_id) != staged.owner:
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


def _parsed(schema: str, name: str, comment: str | None) -> StagingTable | None:
    if comment is None or not comment.startswith(_COMMENT):
        return None
    maker = json.loads(comment[len(_COMMENT) :])
    return StagingTable(schema, name, str(maker["slot"]), int(maker["incarnation"]), str(maker.get("owner")))


def listed(names: Sequence[str]) -> sql.Composed:
    """Names of columns, quoted, with commas between."""
    return sql.SQL(", ").join(map(sql.Identifier, names))


def empty(connection: Connection, table: tuple[str, str]) -> None:
    """Empty a table in the caller's transaction.

    Raises:
        ConfigurationError: The right to empty it is missing.
        TransactionAborted, Unavailable: The transaction cannot continue.
    """
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
