"""Staging tables of MariaDB and MySQL: hold the rows that tasks have brought in until the driver moves them into the target.

DDL commits the transaction in which it runs, so each table is created and dropped on a connection of its own. A table whose
task has failed stays until the batch ends: its comment names the slot, the incarnation and the lease's holder that created
it, and tells when no process can decide on its rows any more. A first column numbers the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

from sqlalchemy import Connection, exc, text

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
from dualwrite.sinks.spark.databases.mariadb__sinks_spark_databases_mariadb_quoting import (
    execute,
    listed,
    quoted,
    table_name,
    text_literal,
)
from dualwrite.sinks.spark.databases.mariadb__sinks_spark_databases_mariadb_refusals import is_about_rows, refused
from dualwrite.sinks.spark.digests__sinks_spark_columns_row_names import row_name
from dualwrite.stores.sql.access__stores_sql_access_failures import (
    Meaning,
    driver_words,
    map_database_error,
    meaning_of,
    number_of,
)
from dualwrite.stores.sql.mariadb_server import is_mariadb

if TYPE_CHECKING:
    from sqlalchemy import Engine

logger = logging.getLogger(__name__)

_DROP_LOCK_TIMEOUT_S: Final = 2
_NUMBER: Final = "dualwrite_row"
_FIND: Final = text(
    "SELECT table_schema, table_name, table_comment FROM information_schema.tables "
    "WHERE table_schema = :schema AND left(table_name, :length) = :prefix ORDER BY table_name"
)
_NULL_REFUSED: Final = 1048
_CHECK_FAILED: Final = 4025
_CHECKS: Final = text(
    "SELECT constraint_name, check_clause FROM information_schema.check_constraints "
    "WHERE constraint_schema = :schema AND table_name = :table"
)
_UNIQUE: Final = text(
    "SELECT group_concat(column_name) FROM information_schema.statistics "
    "WHERE table_schema = :schema AND table_name = :table AND non_unique = 0 GROUP BY index_name"
)


_NAMES: Final = text(
    "SELECT column_name FROM information_schema.columns WHERE table_schema = :schema AND table_name = :table "
    "ORDER BY ordinal_position"
)
_REFERRING: Final = text(
    "SELECT k.constraint_name, k.table_schema, k.table_name, group_concat(k.column_name) "
    "FROM information_schema.referential_constraints r JOIN information_schema.key_column_usage k "
    "ON k.constraint_schema = r.constraint_schema AND k.constraint_name = r.constraint_name AND k.table_name = r.table_name "
    "WHERE r.unique_constraint_schema = :schema AND r.referenced_table_name = :table "
    "AND r.delete_rule IN ('RESTRICT', 'NO ACTION') GROUP BY 1, 2, 3 ORDER BY 1"
)


def require_replaceable(
    connection: Connection, target: tuple[str, str], *, empty: Emptying | None, upsert: Sequence[str]
) -> None:
    """See :meth:`SinkDatabase.require_replaceable`."""
    if empty is Emptying.TRUNCATE:
        raise ConfigurationError(
            "the option truncate is not for MariaDB and MySQL, where TRUNCATE would commit the deciding transaction",
            next_step="leave it out: the rows are then deleted",
        )
    try:
        if upsert:
            _require_unique(connection, target, upsert)
        if empty is not None:
            where = {"schema": target[0], "table": target[1]}
            for key, schema, by, columns in connection.execute(_REFERRING, where).all():
                given = " AND ".join(f"{quoted(name)} IS NOT NULL" for name in str(columns).split(","))
                if execute(connection, f"SELECT 1 FROM {table_name((schema, by))} WHERE {given} LIMIT 1").first():
                    raise still_referred_to(target[1], key, by)
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, connection.engine) from error


def create_staging(engine: Engine, made: StagingTable, target: tuple[str, str], columns: Sequence[str]) -> None:
    """See :meth:`SinkDatabase.create_staging`. On a connection of its own."""
    number = _number_beside(columns)
    try:
        with engine.connect() as connection:
            # Types, and NOT NULL: the target checks its other constraints and sets defaults when the rows are moved.
            execute(
                connection,
                f"CREATE TABLE {table_name(made.table)} ({quoted(number)} BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY) "
                f"ENGINE=InnoDB COMMENT={text_literal(made.comment)} "
                f"AS SELECT {listed(columns)} FROM {table_name(target)} WHERE 1 = 0",
            )
            connection.rollback()
    except exc.SQLAlchemyError as error:
        if isinstance(error, exc.DBAPIError) and meaning_of(error) is Meaning.PRIVILEGE:
            raise ConfigurationError(
                f"no staging table can be made in database {made.schema!r}: {driver_words(error)}",
                next_step=f"grant it: GRANT CREATE, DROP, SELECT, INSERT ON {quoted(made.schema)}.* TO the user "
                f"{engine.url.username!r}",
            ) from error
        raise map_database_error(error, engine) from error


def _number_beside(columns: Sequence[str]) -> str:
    """The name of the column that numbers the rows: none of the others has it."""
    name, taken = _NUMBER, {column.lower() for column in columns}
    while name in taken:
        name += "_"
    return name


def take_over(
    connection: Connection,
    parts: Sequence[Staged],
    target: tuple[str, str],
    columns: Sequence[str],
    *,
    key: Sequence[str] = (),
    upsert: Sequence[str] = (),
) -> None:
    """See :meth:`SinkDatabase.take_over`."""
    try:
        if upsert:
            _require_unique(connection, target, upsert)
            _refuse_keys_twice(connection, parts, target, upsert)
        for part in parts:
            held = _count(connection, part.table)
            if held != part.rows:
                raise rows_lost(part, held)
            _take_over(connection, part, target, columns, key=key, upsert=upsert)
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, connection.engine) from error


def _take_over(
    connection: Connection,
    part: Staged,
    target: tuple[str, str],
    columns: Sequence[str],
    *,
    key: Sequence[str],
    upsert: Sequence[str],
) -> None:
    into, staging = table_name(target), table_name(part.table.table)
    same = " AND ".join(f"present.{quoted(name)} = staged.{quoted(name)}" for name in upsert)
    replaced = 0
    missing = ""
    try:
        if upsert:
            missing = f" WHERE NOT EXISTS (SELECT 1 FROM {into} AS present WHERE {same})"
            replaced = _replaced(connection, f"{into} AS present JOIN {staging} AS staged ON {same}", columns)
        inserted = execute(
            connection,
            f"INSERT INTO {into} ({listed(columns)}) SELECT {listed(columns, 'staged')} FROM {staging} AS staged{missing} "
            f"ORDER BY staged.{quoted(_number_beside(columns))}",
        ).rowcount
    except exc.DBAPIError as error:
        row = _refused_row(connection, part, target, columns, error, key=key) if is_about_rows(error) else None
        raise refused(f"table {target[1]!r} does not take the batch", error, row) from error
    require_all_taken(target[1], sent=part.rows, taken=replaced + inserted)


def _replaced(connection: Connection, joined: str, columns: Sequence[str]) -> int:
    """Give the rows of the target that have a key of the staging table the values there. Returns their number."""
    found = execute(connection, f"SELECT count(*) FROM {joined} FOR UPDATE").scalar_one()
    if found:
        values = ", ".join(f"present.{quoted(name)} = staged.{quoted(name)}" for name in columns)
        execute(connection, f"UPDATE {joined} SET {values}")
    return cast("int", found)


def _require_unique(connection: Connection, target: tuple[str, str], upsert: Sequence[str]) -> None:
    where = {"schema": target[0], "table": target[1]}
    columns = [str(name).lower() for name in connection.execute(_NAMES, where).scalars()]
    keys = [frozenset(str(names).lower().split(",")) for names in connection.execute(_UNIQUE, where).scalars()]
    require_key(target[1], columns, keys, [name.lower() for name in upsert])


def _refuse_keys_twice(
    connection: Connection, parts: Sequence[Staged], target: tuple[str, str], upsert: Sequence[str]
) -> None:
    keys, complete = listed(upsert), " AND ".join(f"{quoted(name)} IS NOT NULL" for name in upsert)
    every = " UNION ALL ".join(f"SELECT {keys} FROM {table_name(part.table.table)} WHERE {complete}" for part in parts)
    twice = execute(connection, f"SELECT 1 FROM ({every}) AS every_key GROUP BY {keys} HAVING count(*) > 1 LIMIT 1")
    if twice.first() is not None:
        raise TransactionAborted(
            f"table {target[1]!r} cannot take the batch: a key occurs twice in it",
            next_step=KEY_TWICE_STEP,
            retryable=False,
        )


def _refused_row(
    connection: Connection,
    part: Staged,
    target: tuple[str, str],
    columns: Sequence[str],
    error: exc.DBAPIError,
    *,
    key: Sequence[str],
) -> str:
    """The name of a row that the target refused; the transaction continues after the error, and is aborted later."""
    number = quoted(_number_beside(columns))
    staging = table_name(part.table.table)
    try:
        condition = _broken(connection, target, columns, error)
        found = None
        if condition is not None:
            shown = "".join(f", {quoted(name)}" for name in key)
            found = execute(
                connection,
                f"SELECT {number}{shown} FROM {staging} WHERE {condition} ORDER BY {number} LIMIT 1",
            ).one_or_none()
        if found is None:
            return f"partition {part.partition}"
        # The numbers may have gaps.
        before = execute(connection, f"SELECT count(*) FROM {staging} WHERE {number} <= {found[0]}").scalar_one()
    except exc.SQLAlchemyError as more:
        logger.debug("the refused row is not found: %s", driver_words(more))
        return f"partition {part.partition}"
    return row_name(part.partition, cast("int", before), found[1:])


def _broken(
    connection: Connection, target: tuple[str, str], columns: Sequence[str], error: exc.DBAPIError
) -> str | None:
    """The condition for rows that violate the constraint; None if the constraint is not one on single rows."""
    words, number = driver_words(error), number_of(error.orig)
    if number == _NULL_REFUSED:
        named = [name for name in columns if f"'{name}'" in words]
        return f"{quoted(named[0])} IS NULL" if named else None
    if number == _CHECK_FAILED and is_mariadb(connection):
        for name, clause in connection.execute(_CHECKS, {"schema": target[0], "table": target[1]}):
            if f"`{name}`" in words or f".{name}`" in words:
                return f"NOT ({clause})"
    return None


def drop_staging(engine: Engine, tables: Collection[StagingTable]) -> None:
    """See :meth:`SinkDatabase.drop_staging`."""
    for staged in tables:
        _drop(engine, staged)


def drop_dead_staging(
    engine: Engine, schema: str, incarnations: Mapping[str, int], holders: Callable[[], Mapping[str, str]]
) -> int:
    """See :meth:`SinkDatabase.drop_dead_staging`."""
    with engine.connect() as connection:
        where = {"schema": schema, "prefix": STAGING_PREFIX, "length": len(STAGING_PREFIX)}
        found = [StagingTable.found(*row) for row in connection.execute(_FIND, where)]
    held = holders() if found else {}
    dead = [one for one in found if one is not None and can_be_dropped(one, incarnations, held)]
    return sum(_drop(engine, one) for one in dead)


def _drop(engine: Engine, staged: StagingTable) -> bool:
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql(
                f"SET @dualwrite_waits = @@session.lock_wait_timeout, SESSION lock_wait_timeout = {_DROP_LOCK_TIMEOUT_S}"
            )
            try:
                execute(connection, f"DROP TABLE IF EXISTS {table_name(staged.table)}")
            finally:
                connection.exec_driver_sql("SET SESSION lock_wait_timeout = @dualwrite_waits")
    except exc.SQLAlchemyError as error:
        logger.warning("staging table %s stays for now: %s", staged.name, driver_words(error))
        return False
    return True


def empty(connection: Connection, table: tuple[str, str]) -> None:
    """See :meth:`SinkDatabase.empty`. Not by TRUNCATE, which would commit."""
    try:
        execute(connection, f"DELETE FROM {table_name(table)}")
    except exc.SQLAlchemyError as error:
        mapped = map_database_error(error, connection.engine)
        if isinstance(mapped, ConfigurationError):
            raise ConfigurationError(
                f"table {table[1]!r} cannot be emptied: {driver_words(error)}",
                next_step='grant DELETE on it, or use mode("append")',
            ) from error
        raise mapped from error


def _count(connection: Connection, staged: StagingTable) -> int:
    return cast("int", execute(connection, f"SELECT count(*) FROM {table_name(staged.table)}").scalar_one())
