"""The target table in the catalog of MariaDB and MySQL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final

from sqlalchemy import Connection, exc, text

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.column_types__sinks_spark_columns_table import Table, TableColumn
from dualwrite.sinks.spark.databases.database import require_planned
from dualwrite.sinks.spark.databases.mariadb__sinks_spark_databases_mariadb_literals import NULL_REPLACED
from dualwrite.sinks.spark.databases.mariadb__sinks_spark_databases_mariadb_quoting import parsed_name
from dualwrite.stores.sql.access__stores_sql_access_failures import map_database_error
from dualwrite.stores.sql.mariadb_server import is_mariadb

_TABLES: Final = frozenset({"BASE TABLE", "SYSTEM VERSIONED"})
_FIND: Final = text(
    "SELECT table_schema, table_name, table_type, engine, @@lower_case_table_names FROM information_schema.tables "
    "WHERE table_schema = coalesce(:schema, database()) AND table_name = :name"
)
_COLUMNS: Final = text(
    "SELECT column_name, data_type, column_type, numeric_scale, is_nullable, column_default, extra, generation_expression, "
    "privileges FROM information_schema.columns WHERE table_schema = :schema AND table_name = :table ORDER BY ordinal_position"
)
# MariaDB's JSON is an alias of longtext, with such a check.
_JSON: Final = text(
    "SELECT check_clause FROM information_schema.check_constraints "
    "WHERE constraint_schema = :schema AND table_name = :table AND check_clause LIKE 'json_valid(%'"
)
_JSON_COLUMN: Final = re.compile(r"json_valid\(`((?:[^`]|``)+)`\)")
_UNSIGNED: Final = "unsigned"
_WHOLE: Final = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint"})


def read_table(connection: Connection, name: str) -> Table:
    """See :meth:`SinkDatabase.read_table`."""
    parsed = parsed_name(name)
    if parsed is None:
        raise ConfigurationError(
            f"{name!r} is not the name of a table", next_step="write it as in SQL: orders, sales.orders, or `my orders`"
        )
    try:
        row = _found(connection.execute(_FIND, {"schema": parsed[0], "name": parsed[1]}).all(), parsed[1])
        if row is None:
            raise ConfigurationError(
                f"there is no table {name!r}",
                next_step="create it, or check its database, its upper and lower case, and the user's rights",
            )
        schema, table, kind, engine = row
        where = {"schema": schema, "table": table}
        columns = connection.execute(_COLUMNS, where).all()
        clauses = connection.execute(_JSON, where).scalars().all() if is_mariadb(connection) else []
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, connection.engine) from error
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
    json_columns = {match[1].replace("``", "`") for clause in clauses if (match := _JSON_COLUMN.search(str(clause)))}
    found = [_column(row, is_json=row[0] in json_columns) for row in columns]
    return Table(schema, table, {column.name: column for column in found}, takes=attrgetter("mariadb"))


def _found(rows: Sequence[Sequence[object]], name: str) -> tuple[str, str, object, object] | None:
    """The catalog compares names case-insensitively, even where table names are case-sensitive."""
    for schema, table, kind, engine, any_case in rows:
        if any_case or table == name:
            return str(schema), str(table), kind, engine
    return None


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


def require_types(
    connection: Connection, table: tuple[str, str], planned: Mapping[str, str], *, shown_name: str
) -> None:
    """See :meth:`SinkDatabase.require_types`. A statement locks the table's definition until the transaction ends."""
    try:
        rows = connection.execute(_COLUMNS, {"schema": table[0], "table": table[1]}).all()
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, connection.engine) from error
    present = {str(row[0]): str(row[2]) for row in rows}
    # A staging table has the types alone.
    require_planned(present, {name: shown.removesuffix(NULL_REPLACED) for name, shown in planned.items()}, shown_name)
