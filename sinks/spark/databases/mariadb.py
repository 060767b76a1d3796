"""MariaDB and MySQL as a sink's database: target table, staging tables, INSERTs of many rows, literals, names.

Values go as literals, because a driver's parameters would cost a conversion for each; each literal is checked to come
back unchanged.

DDL commits the transaction in which it runs, so each table is created and dropped on a connection of its own. A table whose
task has failed stays until the batch ends: its comment names the slot, the incarnation and the lease's holder that created
it, and tells when no process can decide on its rows any more. A first column numbers the rows.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pymysql.err import MySQLError
from sqlalchemy import Connection, and_, exc, literal, literal_column, null, select, text, union_all

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
    require_kept,
    require_key,
    require_planned,
    rows_lost,
    still_referred_to,
)
from dualwrite.sinks.spark.databases.mariadb_sessions import execute_ddl, own_engine
from dualwrite.sinks.spark.digests import row_name, table_key
from dualwrite.sinks.spark.merging import DELETED, MergeStatements, staged_arrays
from dualwrite.stores.sql.access import (
    Meaning,
    driver_words,
    map_database_error,
    meaning_of,
    number_of,
)
from dualwrite.stores.sql.mariadb import is_mariadb

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sqlalchemy import URL, ColumnElement, CursorResult, Engine, Select

    from dualwrite.sinks.spark.digests import RowNames
    from dualwrite.sinks.spark.layout import Copied, Layout

logger = logging.getLogger(__name__)

_NUMBER: Final = "dualwrite_row"
_TEMPORARY: Final = "dualwrite_merging"
_FIND_STAGING: Final = text(
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


_REFERRING: Final = text(
    "SELECT k.constraint_name, k.table_schema, k.table_name, group_concat(k.column_name) "
    "FROM information_schema.referential_constraints r JOIN information_schema.key_column_usage k "
    "ON k.constraint_schema = r.constraint_schema AND k.constraint_name = r.constraint_name AND k.table_name = r.table_name "
    "WHERE r.unique_constraint_schema = :schema AND r.referenced_table_name = :table "
    "AND r.delete_rule IN ('RESTRICT', 'NO ACTION') GROUP BY 1, 2, 3 ORDER BY 1"
)


# What a user may do, the catalog does not say simply: there are roles, and grants to all. The server itself is asked by
# statements that it checks, and does not run.

_STAGING_RIGHTS: Final = "CREATE, DROP, SELECT, INSERT"
_may_stage: set[tuple[str, tuple[str, str]]] = set()
"""Who was found to have the rights for staging tables of which table: asked once, and not with each micro-batch of a stream."""


def _require_staging(connection: Connection, layout: Layout) -> None:
    """Refuse a user who may not create the staging tables of the layout's target.

    A server that cannot answer, as all its prepared statements are in use, refuses nothing: the table is made later anyway.
    """
    engine = connection.engine
    who = str(engine.url), layout.table  # the text of a URL hides its password
    if who in _may_stage:
        return
    creation = _creation((layout.table[0], f"{STAGING_PREFIX}asked"), layout, comment="")
    try:
        execute(connection, f"PREPARE dualwrite_asked FROM {text_literal(creation)}")
        execute(connection, "DEALLOCATE PREPARE dualwrite_asked")
    except exc.DBAPIError as error:
        if meaning_of(error) is Meaning.PRIVILEGE:
            raise _not_made(error, engine, "staging", schema=layout.table[0], rights=_STAGING_RIGHTS) from error
        if error.connection_invalidated:
            raise map_database_error(error, engine) from error
        return
    _may_stage.add(who)


def _require_changes(connection: Connection, layout: Layout, *, empties: bool) -> None:
    """Refuse a user who may not change the rows of the layout's target that the batch's rows meet."""
    plan, target = layout.merge, table_name(layout.table)
    changes = {}
    if plan is not None and plan.updated:
        changes["UPDATE"] = f"UPDATE {target} SET " + ", ".join(f"{one} = {one}" for one in map(quoted, plan.updated))
    if empties or (plan is not None and plan.op is not None):
        changes["DELETE"] = f"DELETE FROM {target}"
    for right, change in changes.items():
        try:
            execute(connection, f"EXPLAIN {change} WHERE 1 = 0")
        except exc.DBAPIError as error:
            if meaning_of(error) is not Meaning.PRIVILEGE:
                raise
            raise ConfigurationError(
                f"the right to {right} is missing on table {layout.table[1]!r}: {driver_words(error)}",
                next_step=f"as its owner: GRANT SELECT, {right} ON {target} TO the user {connection.engine.url.username!r}",
            ) from error


def create_staging(engine: Engine, made: StagingTable, layout: Layout) -> None:
    """See :meth:`SinkDatabase.create_staging`. On a connection of its own."""
    try:
        with engine.connect() as connection:
            execute_ddl(connection, _creation(made.table, layout, comment=made.comment))
    except exc.SQLAlchemyError as error:
        raise _not_made(error, engine, "staging", schema=made.schema, rights=_STAGING_RIGHTS) from error


def _not_made(
    error: exc.SQLAlchemyError, engine: Engine, kind: str, *, schema: str, rights: str, more: str = ""
) -> DualWriteError:
    """The error for a table of ours that could not be made; it names the rights if they are missing."""
    if isinstance(error, exc.DBAPIError) and meaning_of(error) is Meaning.PRIVILEGE:
        return ConfigurationError(
            f"no {kind} table can be made in database {schema!r}: {driver_words(error)}",
            next_step=f"grant it: GRANT {rights} ON {quoted(schema)}.* TO the user {engine.url.username!r}{more}",
        )
    return map_database_error(error, engine)


def _creation(made: tuple[str, str], layout: Layout, *, comment: str | None) -> str:
    """The statement for an empty staging table; without a comment, it is a temporary one."""
    number = quoted(_number_beside(layout.table_column_names))
    own = "".join(f", {quoted(column.name)} {column.shown_type}" for column in layout.own_columns)
    rows = f"SELECT {listed(layout.table_column_names, 'target')} FROM {table_name(layout.table)} AS target WHERE 1 = 0"
    if layout.merge is not None and layout.merge.op is not None:
        # An outer join's columns take nulls, which stand in a deleted row where the target takes none.
        rows = (
            f"SELECT {listed(layout.table_column_names, 'target')} FROM (SELECT 1 AS one) AS nothing "
            f"LEFT JOIN {table_name(layout.table)} AS target ON 1 = 0 WHERE 1 = 0"
        )
    # Types, and NOT NULL: the target checks its other constraints and sets defaults when the rows are moved.
    return (
        f"CREATE {'TEMPORARY ' if comment is None else ''}TABLE {table_name(made)} "
        f"({number} BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY{own}) ENGINE=InnoDB"
        f"{'' if comment is None else f' COMMENT={text_literal(comment)}'} AS {rows}"
    )


def _create_temporary(connection: Connection, layout: Layout) -> tuple[str, str]:
    """Make the table in which rows wait for the end of their own transaction, which this does not commit."""
    made = (layout.table[0], _TEMPORARY)
    _make_temporary(connection, made, _creation(made, layout, comment=None))
    return made


def _make_temporary(connection: Connection, made: tuple[str, str], creation: str) -> None:
    try:
        _drop_temporary(connection, made)  # that of a former transaction of this session, if it failed
        execute(connection, creation)
    except exc.SQLAlchemyError as error:
        raise _not_made(
            error,
            connection.engine,
            "temporary",
            schema=made[0],
            rights="CREATE TEMPORARY TABLES",
            more="; and SELECT on the table that is written",
        ) from error


def _drop_temporary(connection: Connection, made: tuple[str, str]) -> None:
    execute(connection, f"DROP TEMPORARY TABLE IF EXISTS {table_name(made)}")


def _number_beside(columns: Sequence[str]) -> str:
    """The name of the column that numbers the rows: none of the others has it."""
    name, taken = _NUMBER, {column.lower() for column in columns}
    while name in taken:
        name += "_"
    return name


def take_over(connection: Connection, parts: Sequence[Staged], layout: Layout) -> None:
    """See :meth:`SinkDatabase.take_over`."""
    try:
        if layout.merge is not None:
            _require_whole(connection, parts, layout)
            merge(connection, parts, layout)
            return
        for part in parts:
            _insert_all(connection, part, layout)
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, connection.engine) from error


def _require_whole(connection: Connection, parts: Sequence[Staged], layout: Layout) -> None:
    """Refuse staging tables that do not hold all rows."""
    for row in execute(connection, _statements(parts, layout).counts()):
        number, held = cast("tuple[int, int]", row)
        if held != parts[number].rows:
            raise rows_lost(parts[number], held)


def _insert_all(connection: Connection, part: Staged, layout: Layout) -> None:
    columns = layout.table_column_names
    with _explained(connection, [part], layout):
        taken = execute(
            connection,
            f"INSERT INTO {table_name(layout.table)} ({listed(columns)}) SELECT {listed(columns)} "
            f"FROM {table_name(part.table.table)} ORDER BY {quoted(_number_beside(columns))}",
        ).rowcount
    if taken != part.rows:
        _require_whole(connection, [part], layout)
    require_all_taken(layout.table[1], sent=part.rows, taken=taken)


def merge(connection: Connection, parts: Sequence[Staged], layout: Layout) -> None:
    """Bring the rows of staging tables into the target by the layout's `merge`."""
    plan, table = layout.merge, layout.table[1]
    assert plan is not None
    statements = _statements(parts, layout)
    with _explained(connection, parts, layout):
        if plan.order is None and (twice := execute(connection, statements.key_twice()).first()) is not None:
            raise key_twice(table, twice)
        if plan.op is not None:
            execute(connection, statements.delete_joined())
        present = 0
        if plan.updated:
            present = cast("int", execute(connection, statements.lock_present()).scalar_one())
        if present:
            execute(connection, statements.update_joined())
        inserted = execute(connection, statements.insert_missing()).rowcount
        if plan.counts_rows:
            counted = sum(part.rows for part in parts)
            if plan.order is not None:
                counted = cast("int", execute(connection, statements.newest_count()).scalar_one())
            require_all_merged(table, counted=counted, taken=present + inserted)


def _statements(parts: Sequence[Staged], layout: Layout) -> MergeStatements:
    return MergeStatements(
        layout.merge,
        layout.table_column_names,
        table_name(layout.table),
        [table_name(part.table.table) for part in parts],
        quote=quoted,
        place=quoted(_number_beside(layout.table_column_names)),
    )


@contextmanager
def _explained(connection: Connection, parts: Sequence[Staged], layout: Layout) -> Generator[None, None, None]:
    """Raise what the target refuses as an error that names the row, if it can be found."""
    try:
        yield
    except exc.DBAPIError as error:
        row = _refused_row(connection, parts, layout, error) if is_about_rows(error) else None
        raise refused(f"table {layout.table[1]!r} does not take the batch", error, row) from error


@contextmanager
def merging(connection: Connection, layout: Layout, names: RowNames | None) -> Generator[Inserts, None, None]:
    """See :meth:`SinkDatabase.merging`."""
    made = _create_temporary(connection, layout)
    with closing(Inserts(connection, layout, made, names)) as inserts:
        yield inserts
    require_all_taken(layout.table[1], sent=inserts.sent_rows, taken=inserts.taken_rows)
    part = Staged(StagingTable(*made, "", 0, ""), inserts.sent_rows, -1 if names is None else names.partition)
    merge(connection, [part], layout)
    require_types(connection, [layout.table], layout.table_types, shown_name=layout.table[1])
    _drop_temporary(connection, made)


def _require_unique(connection: Connection, target: tuple[str, str], upsert: Sequence[str]) -> None:
    where = {"schema": target[0], "table": target[1]}
    keys = [frozenset(str(names).lower().split(",")) for names in connection.execute(_UNIQUE, where).scalars()]
    require_key(target[1], keys, [name.lower() for name in upsert])


def _refused_row(connection: Connection, parts: Sequence[Staged], layout: Layout, error: exc.DBAPIError) -> str | None:
    """The name of a row that the target refused; the transaction continues after the error, and is aborted later.

    None if any of several partitions may have the row.
    """
    unknown = f"partition {parts[0].partition}" if len(parts) == 1 else None
    try:
        condition = _broken(connection, layout.table, layout.table_column_names, error)
        if condition is None:
            return unknown
        if layout.merge is not None and layout.merge.op is not None:
            condition = f"({condition}) AND NOT {quoted(DELETED)}"
        return _first_row(connection, parts, layout, condition) or unknown
    except exc.SQLAlchemyError as more:
        logger.debug("the refused row is not found: %s", driver_words(more))
    return unknown


def _first_row(connection: Connection, parts: Sequence[Staged], layout: Layout, condition: str) -> str | None:
    """The name of the first row in the staging tables for which the condition is true."""
    number = quoted(_number_beside(layout.table_column_names))
    shown = "".join(f", {quoted(name)}" for name in table_key(layout))
    for part in parts:
        staging = table_name(part.table.table)
        bad = f"SELECT {number}{shown} FROM {staging} WHERE {condition} ORDER BY {number} LIMIT 1"
        found = execute(connection, bad).one_or_none()
        if found is not None:
            # The numbers may have gaps.
            before = execute(connection, f"SELECT count(*) FROM {staging} WHERE {number} <= {found[0]}").scalar_one()
            return row_name(part.partition, cast("int", before), found[1:])
    return None


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


def _drop(engine: Engine, tables: Collection[StagingTable]) -> int:
    """Drop staging tables, and return how many are gone. One that is being read stays."""
    names = ", ".join(table_name(staged.table) for staged in tables)
    limit = int(DROP_LOCK_TIMEOUT_S)
    try:
        with engine.connect() as connection:
            if is_mariadb(connection):
                execute_ddl(connection, f"DROP TABLE IF EXISTS {names} WAIT {limit}")
                return len(tables)
            execute(
                connection, f"SET @dualwrite_waits = @@session.lock_wait_timeout, SESSION lock_wait_timeout = {limit}"
            )
            try:
                execute_ddl(connection, f"DROP TABLE IF EXISTS {names}")
            finally:
                execute(connection, "SET SESSION lock_wait_timeout = @dualwrite_waits")
    except exc.SQLAlchemyError as error:
        if len(tables) > 1:
            return sum(_drop(engine, [one]) for one in tables)
        logger.warning("staging table %s stays for now: %s", names, driver_words(error))
        return 0
    return len(tables)


def _require_condition(connection: Connection, layout: Layout, how: Emptying) -> None:
    """Refuse a condition that the database does not take for the columns that are written."""
    rows = f"SELECT {listed(layout.table_column_names)} FROM {table_name(layout.table)}"
    try:
        execute(connection, f"SELECT 1 FROM ({rows}) AS replaced WHERE {how.condition} LIMIT 0")
    except (exc.ProgrammingError, exc.OperationalError) as error:
        if meaning_of(error) in _PASSING:
            raise
        raise not_a_condition(driver_words(error)) from error


def empty(connection: Connection, table: tuple[str, str], how: Emptying) -> None:
    """See :meth:`SinkDatabase.empty`. Not by TRUNCATE, which would commit."""
    try:
        execute(connection, f"DELETE FROM {table_name(table)} WHERE {how.condition}")
    except exc.SQLAlchemyError as error:
        raise _not_replaced(error, connection, f"table {table[1]!r} cannot be emptied") from error


def _not_replaced(error: exc.SQLAlchemyError, connection: Connection, what: str) -> DualWriteError:
    """The error for rows that could not be replaced: a right, or what the database says of a row of the table or the batch."""
    meaning = meaning_of(error)
    if meaning is Meaning.PRIVILEGE:
        return ConfigurationError(
            f"{what}: {driver_words(error)}", next_step='grant DELETE on it, or use mode("append")'
        )
    if meaning is Meaning.REJECTED and isinstance(error, exc.DBAPIError):
        return refused(what, error)
    return map_database_error(error, connection.engine)


# MariaDB and MySQL, as the sinks use them.


class MariaDB:
    """See :class:`~dualwrite.sinks.spark.databases.database.SinkDatabase`."""

    def __init__(self, url: URL) -> None:
        self.engine = own_engine(url)

    def quoted(self, table: tuple[str, str]) -> str:
        return table_name(table)

    def read_table(self, connection: Connection, name: str) -> Table:
        parsed = parsed_name(name)
        if parsed is None:
            raise ConfigurationError(
                f"{name!r} is not the name of a table",
                next_step="write it as in SQL: orders, sales.orders, or `my orders`",
            )
        statement = _OF_MARIADB if is_mariadb(connection) else _OF_MYSQL
        try:
            rows = connection.execute(statement, {"schema": parsed[0], "name": parsed[1]}).all()
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, connection.engine) from error
        found = _found(rows, parsed[1])
        if not found:
            raise ConfigurationError(
                f"there is no table {name!r}",
                next_step="create it, or check its database, its upper and lower case, and the user's rights",
            )
        schema, table, kind, engine, _, clauses, _ = found[0][:_OF_TABLE]
        columns = [row[_OF_TABLE:] for row in found]
        if kind not in _TABLES:
            raise ConfigurationError(f"{name!r} is not a table but a {str(kind).lower()}")
        if engine != "InnoDB":
            raise ConfigurationError(
                f"{name!r} is in the engine {engine}, whose rows do not belong to the transaction",
                next_step=f"ALTER TABLE {name} ENGINE=InnoDB",
            )
        # By its place: MySQL names its catalog's columns in capitals.
        if not any("insert" in str(column[-1]) for column in columns):
            raise ConfigurationError(
                f"rows may not be inserted into {name!r}",
                next_step=f"as its owner: GRANT INSERT ON {name} TO the user {connection.engine.url.username!r}",
            )
        json_columns = {
            match[1].replace("``", "`")
            for clause in json.loads(clauses or "[]")
            if (match := _JSON_COLUMN.search(str(clause)))
        }
        made = [_column(row, is_json=row[0] in json_columns) for row in columns]
        return Table(schema, table, {column.name: column for column in made}, takes=attrgetter("mariadb"))

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
    ) -> AbstractContextManager[Inserts]:
        return inserting(connection, layout, table, names)

    def merging(
        self, connection: Connection, layout: Layout, names: RowNames | None = None, *, prepared: bool
    ) -> AbstractContextManager[Inserts]:
        del prepared  # never
        return merging(connection, layout, names)

    def choose_staging(self, connection: Connection, wanted: str, layout: Layout, *, empties: bool) -> bool:
        """See the protocol. Always: there is no other way."""
        del empties
        if wanted == "prepared":
            raise _not_prepared()
        _require_staging(connection, layout)
        return True

    def create_staging(self, connection: Connection, made: StagingTable, layout: Layout) -> None:
        del connection  # DDL would commit its transaction
        create_staging(self.engine, made, layout)

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
            row = _first_row(connection, parts, layout, f"{how.condition} IS NOT TRUE")
        except exc.SQLAlchemyError as error:
            raise _not_replaced(error, connection, "replaceWhere cannot be computed for the rows") from error
        if row is not None:
            raise outside(layout.table[1], row)

    def drop_staging(self, tables: Collection[StagingTable]) -> None:
        if tables:
            _drop(self.engine, tables)

    def drop_staging_in(self, connection: Connection, tables: Collection[StagingTable]) -> bool:
        del connection  # DDL would commit its transaction
        return not tables

    def drop_dead_staging(
        self, schema: str, incarnations: Mapping[str, int], holders: Callable[[], Mapping[str, str]]
    ) -> int:
        with self.engine.connect() as connection:
            found = self.find_staging(connection, schema)
        held = holders() if found else {}
        dead = [one for one in found if can_be_dropped(one, incarnations, held)]
        return sum(_drop(self.engine, [one]) for one in dead)

    def find_staging(self, connection: Connection, schema: str) -> Sequence[StagingTable]:
        where = {"schema": schema, "prefix": STAGING_PREFIX, "length": len(STAGING_PREFIX)}
        rows = connection.execute(_FIND_STAGING, where)
        return [found for row in rows if (found := StagingTable.found(*row)) is not None]

    def require_replaceable(
        self, connection: Connection, layout: Layout, *, empty: Emptying | None, direct: bool
    ) -> None:
        target = layout.table
        if empty is not None and empty.truncates:
            raise ConfigurationError(
                "the option truncate is not for MariaDB and MySQL, where TRUNCATE would commit the deciding transaction",
                next_step="leave it out: the rows are then deleted",
            )
        try:
            _require_changes(connection, layout, empties=empty is not None)
            if layout.merge is not None:
                _require_unique(connection, target, layout.merge.keys)
                if direct:
                    _drop_temporary(connection, _create_temporary(connection, layout))
            if empty is not None and empty.where is not None:
                _require_condition(connection, layout, empty)
            elif empty is not None:
                where = {"schema": target[0], "table": target[1]}
                for key, schema, by, columns in connection.execute(_REFERRING, where).all():
                    given = " AND ".join(f"{quoted(name)} IS NOT NULL" for name in str(columns).split(","))
                    if execute(connection, f"SELECT 1 FROM {table_name((schema, by))} WHERE {given} LIMIT 1").first():
                        raise still_referred_to(target[1], key, by)
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, connection.engine) from error

    def empty(self, connection: Connection, table: tuple[str, str], how: Emptying) -> None:
        """See the protocol. Not by TRUNCATE, which would commit: `require_replaceable` has refused it."""
        empty(connection, table, how)

    def before_prepared(self, connection: Connection) -> None:
        """See the protocol. Refused."""
        del connection
        raise _not_prepared()

    def require_prepared(self, connection: Connection, names: Collection[str], name: str) -> None:
        """See the protocol. Refused."""
        del connection, names, name
        raise _not_prepared()

    def had_no_room(self, error: BaseException) -> TransactionAborted | None:
        """None: this database prepares nothing."""
        del error
        return None

    def waited_in_vain(self, error: BaseException) -> bool:
        """False: nothing prepared holds locks here."""
        del error
        return False


def _not_prepared() -> ConfigurationError:
    return ConfigurationError(
        "MariaDB and MySQL have no PREPARE TRANSACTION, and their XA is not used: a batch is decided as one by staging tables",
        next_step='leave databaseLeg out, or set it to "staging"',
    )


# The target table in the catalog of MariaDB and MySQL.

_TABLES: Final = frozenset({"BASE TABLE", "SYSTEM VERSIONED"})
# The name is given twice, and not by the join alone: the catalog then opens that table, and not all of the schema.
_TARGET: Final = (
    "SELECT t.table_schema, t.table_name, t.table_type, t.engine, @@lower_case_table_names, {clauses}, c.table_name, "
    "c.column_name, c.data_type, c.column_type, c.numeric_scale, c.is_nullable, c.column_default, c.extra, "
    "c.generation_expression, c.privileges FROM information_schema.tables t JOIN information_schema.columns c "
    "ON c.table_schema = t.table_schema AND c.table_name = t.table_name "
    "WHERE t.table_schema = coalesce(:schema, database()) AND t.table_name = :name "
    "AND c.table_schema = coalesce(:schema, database()) AND c.table_name = :name ORDER BY t.table_name, c.ordinal_position"
)
_OF_TABLE: Final = 7
"""How many of these are the table's, and stand before those of the column."""
_OF_MYSQL: Final = text(_TARGET.format(clauses="NULL"))
# MariaDB's JSON is an alias of longtext, with such a check. The limit is the default: under a lower one, the array breaks off.
_OF_MARIADB: Final = text(
    "SET STATEMENT group_concat_max_len = 1048576 FOR "
    + _TARGET.format(
        clauses="(SELECT json_arrayagg(check_clause) FROM information_schema.check_constraints k "
        "WHERE k.constraint_schema = coalesce(:schema, database()) AND k.table_name = t.table_name "
        "AND k.check_clause LIKE 'json_valid(%')"
    )
)
_JSON_COLUMN: Final = re.compile(r"json_valid\(`((?:[^`]|``)+)`\)")
_UNSIGNED: Final = "unsigned"
_WHOLE: Final = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint"})


def _found(rows: Sequence[Sequence[Any]], name: str) -> Sequence[Sequence[Any]]:
    """The rows of one table: the catalog compares names case-insensitively, even where table names are case-sensitive."""
    for _, table, _, _, any_case, *_ in rows:
        if any_case or table == name:
            return [row for row in rows if row[1] == table and row[_OF_TABLE - 1] == table]
    return ()


def _column(row: Sequence[object], *, is_json: bool) -> TableColumn:
    name, data_type, column_type, scale, nullable, default, extra, generated, _ = row
    kind, shown = str(data_type).lower(), str(column_type)
    counts, may_be_null = "auto_increment" in str(extra), nullable == "YES"
    if is_json:
        kind = "json"
    elif kind in _WHOLE and _UNSIGNED in shown:
        kind = f"{kind} {_UNSIGNED}"
    return TableColumn(
        name=str(name),
        type_name=kind,
        shown_type=shown + (NULL_REPLACED if counts or (kind == "timestamp" and not may_be_null) else ""),
        scale=int(str(scale)) if kind == "decimal" else None,
        must_be_given=not may_be_null and default is None and not counts,
        generated=bool(generated),
    )


_MOST_TABLES: Final = 100
"""So many are asked about in one statement."""


def require_types(
    connection: Connection,
    tables: Collection[tuple[str, str]],
    planned: Mapping[str, str],
    *,
    shown_name: str,
    beside: Sequence[Select[Any]] = (),
) -> Sequence[object]:
    """See :meth:`SinkDatabase.require_types`. A statement locks the table's definition until the transaction ends."""
    planned = {name: shown.removesuffix(NULL_REPLACED) for name, shown in planned.items()}
    names, values = list(tables), cast("Sequence[object]", ())
    for start in range(0, len(names), _MOST_TABLES):
        # One SELECT for each table: the catalog looks for a table by its name, and not for one of several.
        asked = [
            _types_of(number, names[number], beside if number == 0 else [select(null())] * len(beside))
            for number in range(start, min(start + _MOST_TABLES, len(names)))
        ]
        try:
            rows = connection.execute(union_all(*asked) if len(asked) > 1 else asked[0]).all()
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, connection.engine) from error
        for number in range(start, start + len(asked)):
            # A staging table has the types alone.
            require_planned({str(row[1]): str(row[2]) for row in rows if row[0] == number}, planned, shown_name)
        values = values or next(tuple(row[3:]) for row in rows if row[0] == start)
    return values


def _types_of(number: int, table: tuple[str, str], beside: Sequence[Select[Any]]) -> Select[Any]:
    of_table = and_(literal_column("table_schema") == table[0], literal_column("table_name") == table[1])
    wanted: list[ColumnElement[Any]] = [literal(number), literal_column("column_name"), literal_column("column_type")]
    wanted += [one.scalar_subquery() for one in beside]
    columns = select(*wanted)
    return columns.select_from(text("information_schema.columns")).where(of_table)


# Arrow batches into MariaDB or MySQL by INSERTs of many rows, inside the dual write's own database transaction.
#
# `LOAD DATA LOCAL INFILE` takes about three quarters of the time (`make bench ONLY=mariadb`), but needs `local_infile`,
# which MySQL switches off, and turns errors into warnings.

# The size of one INSERT: larger ones are no faster, and every server takes this one by default.
MOST_BYTES: Final = 2**20
_LONGEST_CHARACTER: Final = 4
# Warnings that a value was changed. In strict mode these are errors, but not for all types.
_CHANGED: Final = frozenset({1264, 1265, 1292, 1366, 1406})


class Inserts:
    """Writes rows into one table; counts those sent, and those that the server has counted."""

    def __init__(self, connection: Connection, layout: Layout, table: tuple[str, str], names: RowNames | None) -> None:
        self.sent_rows = 0
        self.taken_rows = 0
        self._layout = layout
        self._columns = layout.staged_columns
        self._names = names
        self._cursor: Any = cast("Any", connection.connection.dbapi_connection).cursor()
        self._into = f"INSERT INTO {table_name(table)} ({listed([one.name for one in self._columns])}) VALUES "

    def write(self, batch: pa.RecordBatch, deleted: pa.Array | None = None) -> None:
        arrays = staged_arrays(self._layout, batch, deleted)
        merge = self._layout.merge
        # Of a row that deletes, only the key must fit, and how new it is.
        kept = set() if merge is None else {*merge.keys, merge.newer_by}
        excused = [None if column.name in kept else deleted for column in self._columns]
        rows = literal_rows(self._columns, arrays, self._name, excused)
        for start, end in statements(rows, MOST_BYTES):
            if end - start == 1 and len(rows[start]) > MOST_BYTES // _LONGEST_CHARACTER:
                self._require_packet(rows[start], start)
            try:
                self._insert(rows[start:end])
            except MySQLError as error:
                failed = wrapped(error)
                bad = self._first_refused(rows[start:end]) if is_about_rows(failed) else None
                name = None if bad is None else self._name(start + bad)
                raise refused(f"table {self._layout.table[1]!r} does not take the rows", failed, name) from error
        self.sent_rows += batch.num_rows

    def _require_packet(self, row: str, index: int) -> None:
        """Refuse a row that is larger than the server accepts: it would close the connection without an explanation."""
        self._cursor.execute("SELECT @@max_allowed_packet")
        [most] = self._cursor.fetchone()
        size = len(self._into) + len(row.encode()) + 3
        if size >= most:
            raise ConfigurationError(
                f"a row takes {size} bytes as an INSERT, and the server's max_allowed_packet is {most} ({self._name(index)})",
                next_step="raise max_allowed_packet on the server; a byte of a binary value takes two",
            )

    def _insert(self, rows: Sequence[str]) -> None:
        # Not through SQLAlchemy, which would look for parameters in the values.
        self.taken_rows += self._cursor.execute(f"{self._into}({'),('.join(rows)})")
        if self._cursor.warning_count:
            self._refuse_changes(len(rows))

    def _refuse_changes(self, rows: int) -> None:
        self._cursor.execute("SHOW WARNINGS")
        for _, number, words in self._cursor.fetchall():
            if number in _CHANGED:
                raise TransactionAborted(
                    f"table {self._layout.table[1]!r} would change a value of these {rows} rows: {words}",
                    next_step="nothing of the partition was written on either side: change the value, or the column's type",
                    retryable=False,
                )

    def _first_refused(self, rows: Sequence[str]) -> int | None:
        """The first row that the table refuses, if it can be found.

        Not every server says which it was. A failed statement is undone, and the transaction continues; it is aborted later.
        """
        first, last = 0, len(rows)
        while last - first > 1:
            middle = (first + last) // 2
            try:
                self._insert(rows[first:middle])
                first = middle
            except MySQLError as error:
                if not is_about_rows(wrapped(error)):
                    return None
                last = middle
        return first

    def _name(self, index: int) -> str:
        return f"row {index + 1}" if self._names is None else self._names.in_batch(index)

    def close(self) -> None:
        """Give up the cursor."""
        self._cursor.close()


@contextmanager
def inserting(
    connection: Connection, layout: Layout, table: tuple[str, str], names: RowNames | None = None
) -> Generator[Inserts, None, None]:
    """See :meth:`SinkDatabase.writing`."""
    with closing(Inserts(connection, layout, table, names)) as inserts:
        yield inserts
    require_all_taken(layout.table[1], sent=inserts.sent_rows, taken=inserts.taken_rows)


# Which rows a table would not take, by a temporary copy of it.

_CHECKING: Final = "dualwrite_checking"


def wrong_rows(connection: Connection, layout: Layout, batch: pa.RecordBatch, most: int) -> dict[int, str]:
    """See :meth:`SinkDatabase.wrong_rows`."""
    found: dict[int, str] = {}
    columns = layout.table_columns
    arrays = [batch.column(column.source) for column in columns]
    for column, array in zip(columns, arrays, strict=True):
        for place, words in not_kept(column, _changes(column, array)):
            found.setdefault(place, words)
    places = [place for place in range(batch.num_rows) if place not in found]
    kept = [array.take(pa.array(places, pa.int64())) for array in arrays]
    made = (layout.table[0], _CHECKING)
    _make_temporary(connection, made, f"CREATE TEMPORARY TABLE {table_name(made)} LIKE {table_name(layout.table)}")
    # REPLACE, because the copy has the table's unique keys, too, and other rows are no matter here.
    into = f"REPLACE INTO {table_name(made)} ({listed([one.name for one in columns])}) VALUES "
    with closing(cast("Any", connection.connection.dbapi_connection).cursor()) as cursor:
        rows = literal_rows(columns, kept, lambda place: f"row {place + 1}")
        waiting = statements(rows, MOST_BYTES)[::-1]
        while waiting and len(found) <= most:
            start, end = waiting.pop()
            refusal = _why_not(cursor, f"{into}({'),('.join(rows[start:end])})")
            if refusal is None:
                continue
            if end - start == 1:
                found[places[start]] = refusal.replace(_CHECKING, layout.table[1])
            else:
                middle = (start + end) // 2
                waiting += [(middle, end), (start, middle)]
    _drop_temporary(connection, made)
    return found


def _why_not(cursor: Any, statement: str) -> str | None:
    """Why the server does not take all of these rows as they are; None if it does."""
    try:
        cursor.execute(statement)
    except MySQLError as error:
        failed = wrapped(error)
        if not is_about_rows(failed):
            raise failed from error
        return driver_words(failed)
    if not cursor.warning_count:
        return None
    cursor.execute("SHOW WARNINGS")
    return next((str(words) for _, number, words in cursor.fetchall() if number in _CHANGED), None)


# Arrow columns as the literals of an INSERT, computed column by column; and values that a column would change, refused.
#
# The literals suit a session whose character set is utf8mb4, whose time zone is UTC, and whose SQL mode is that of
# `dualwrite.sinks.spark.databases.mariadb_sessions.SESSION`: backslashes escape.

# Ends the shown type of a column in which the server replaces NULL by a value of its own.
NULL_REPLACED: Final = " NOT NULL"

_TYPE: Final = re.compile(r"(\w+)(?:\((.*)\))?")
_MEMBER: Final = re.compile(r"'((?:[^']|'')*)'")
_MOST_DIGITS: Final = 6
# The years 1 to 9999, in days and in microseconds since 1970.
_FIRST: Final = {pa.date32(): -719162, pa.timestamp("us"): -62135596800000000}
_AFTER: Final = {pa.date32(): 2932897, pa.timestamp("us"): 253402300800000000}


def literal_rows(
    columns: Sequence[Copied],
    arrays: Sequence[pa.Array],
    name_row: Callable[[int], str],
    excused: Sequence[pa.Array | None] | None = None,
) -> list[str]:
    """Each row's literals, with commas between. Refuses a value that would change.

    `name_row` names a row, counted from 0, for errors; `excused` says for each column which rows need not fit it.
    """
    texts = [
        _literals(column, array, name_row, ignored)
        for column, array, ignored in zip(columns, arrays, excused or [None] * len(columns), strict=True)
    ]
    rows: list[str] = pc.binary_join_element_wise(*texts, ",").to_pylist()
    return rows


def _literals(column: Copied, array: pa.Array, name_row: Callable[[int], str], ignored: pa.Array | None) -> pa.Array:
    changes = _changes(column, array)
    if ignored is not None:
        changes = [(words, pc.and_not(bad, ignored)) for words, bad in changes]
    require_kept(column, changes, name_row)
    return pc.fill_null(_as_text(array), "NULL")


def _as_text(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_boolean(kind):
        return array.cast(pa.int8()).cast(pa.string())
    if pa.types.is_integer(kind):
        return array.cast(pa.string())
    if pa.types.is_binary(kind):
        found = [None if value is None else f"X'{value.hex()}'" for value in array.to_pylist()]
        return pa.array(found, pa.string())
    if pa.types.is_timestamp(kind):
        array = array.cast(pa.timestamp("us"))  # without its zone, in UTC
    texts = array.cast(pa.string())
    if pa.types.is_string(kind):
        texts = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), "'", "\\'")
    return pc.binary_join_element_wise("'", texts, "'", "")


def _changes(column: Copied, array: pa.Array) -> list[tuple[str, pa.Array]]:
    """Values that the server would change without an error, even in strict mode: words for each kind, and the rows."""
    found = []
    kind, given = _parsed(column.shown_type)
    if column.shown_type.endswith(NULL_REPLACED):
        found.append(("NULL, which the server would replace", array.is_null()))
    if pa.types.is_floating(array.type):
        found.append(("it is not a finite number", pc.invert(pc.is_finite(array))))
    if kind in {"date", "datetime", "timestamp"}:
        plain = pa.date32() if kind == "date" else pa.timestamp("us")
        since = array.cast(plain).cast(pa.int32() if kind == "date" else pa.int64())
        outside = pc.or_(pc.less(since, _FIRST[plain]), pc.greater_equal(since, _AFTER[plain]))
        found.append(("its year is not one of 1 to 9999", outside))
    if kind in {"datetime", "timestamp", "time"} and (digits := int(given or 0)) < _MOST_DIGITS:
        micros = array.cast(pa.int64()).fill_null(0).to_numpy()
        found.append(
            (f"it has more than {digits} digits of a second", pa.array(micros % 10 ** (_MOST_DIGITS - digits) != 0))
        )
    if kind == "binary":
        found.append((f"it is not {given} bytes long", pc.not_equal(pc.binary_length(array), int(given or 1))))
    if kind == "char":
        found.append(("it ends with a space", pc.ends_with(array, pattern=" ")))
    if kind == "enum":
        members = pa.array([one.replace("''", "'") for one in _MEMBER.findall(given)], pa.string())
        found.append(
            ("the column does not list it", pc.and_(array.is_valid(), pc.invert(pc.is_in(array, value_set=members))))
        )
    return [(words, pc.fill_null(bad, False)) for words, bad in found]


def _parsed(shown_type: str) -> tuple[str, str]:
    """The name of a type, and what stands in its parentheses."""
    match = _TYPE.match(shown_type)
    return (match[1], match[2] or "") if match else ("", "")


def statements(rows: Sequence[str], most_bytes: int) -> list[tuple[int, int]]:
    """Divide rows into INSERTs: the first row of each, and the one after its last.

    The literals of one INSERT take at most `most_bytes`, unless it has one row only.
    """
    ends = np.cumsum([len(row.encode()) + 3 for row in rows])  # with parentheses and a comma
    found, start, sent = [], 0, 0
    while start < len(rows):
        end = max(start + 1, int(np.searchsorted(ends, sent + most_bytes, side="right")))
        found.append((start, end))
        start, sent = end, int(ends[end - 1])
    return found


# Names and texts in the SQL of MariaDB and MySQL.

_ONE: Final = r"(?:`((?:[^`]|``)+)`|([\w$]+))"
_NAME: Final = re.compile(rf"(?:{_ONE}\.)?{_ONE}")


def quoted(name: str) -> str:
    """A name in backticks."""
    return "`" + name.replace("`", "``") + "`"


def table_name(table: tuple[str, str]) -> str:
    """A table's schema and name."""
    return ".".join(map(quoted, table))


def listed(names: Sequence[str], of: str = "") -> str:
    """Names of columns, with commas between; `of` is the alias of their table."""
    return ", ".join(f"{of}.{quoted(name)}" if of else quoted(name) for name in names)


def text_literal(text: str) -> str:
    """A text as a literal, where backslashes escape."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def parsed_name(name: str) -> tuple[str | None, str] | None:
    """Schema and name from a table's name, written as in SQL; None if it is none."""
    match = _NAME.fullmatch(name.strip())
    if match is None:
        return None
    schema, table = (
        plain if in_ticks is None else in_ticks.replace("``", "`")
        for in_ticks, plain in ((match[1], match[2]), (match[3], match[4]))
    )
    return schema, cast("str", table)


def execute(connection: Connection, statement: str) -> CursorResult[tuple[object, ...]]:
    """Execute a statement that has no parameters."""
    return connection.exec_driver_sql(statement.replace("%", "%%"))


# Errors of statements that write users' rows, on MariaDB and MySQL.

# The same rows may be taken later.
_PASSING: Final = frozenset({Meaning.CONFLICT, Meaning.BUSY, Meaning.GONE, Meaning.FULL})
_OTHER_CAUSE: Final = _PASSING | {Meaning.READ_ONLY, Meaning.LOGIN, Meaning.PRIVILEGE, Meaning.SCHEMA}
_VALUE: Final = re.compile(r"(value: ?)'.*'(?= for column)", re.DOTALL)


def wrapped(error: MySQLError) -> exc.DBAPIError:
    """The driver's error as SQLAlchemy's, without the statement: it holds rows."""
    found = exc.DBAPIError.instance(None, None, error, MySQLError)
    return found if isinstance(found, exc.DBAPIError) else exc.DBAPIError(None, None, error)


def is_about_rows(error: exc.DBAPIError) -> bool:
    """Whether the database refuses just these rows."""
    return meaning_of(error) not in _OTHER_CAUSE


def refused(what: str, error: exc.DBAPIError, row: str | None = None) -> TransactionAborted:
    """The error for rows that a table refuses; it says whether a retry with the same rows may succeed."""
    place = f" ({row})" if row is not None else ""
    words = _VALUE.sub(r"\1...", driver_words(error))  # no log may show values that are not a key
    return TransactionAborted(f"{what}: {words}{place}", retryable=meaning_of(error) in _PASSING)
