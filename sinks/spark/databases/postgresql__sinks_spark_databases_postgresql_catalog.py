"""The target table in PostgreSQL's catalog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, exc, text

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.column_types__sinks_spark_columns_table import Table, TableColumn
from dualwrite.sinks.spark.databases.database import require_planned
from dualwrite.stores.sql.access__stores_sql_access_failures import driver_words, map_database_error, sqlstate_of

_BAD_NAME: Final = frozenset({"42601", "42602", "22023", "0A000", "42939"})

_FIND: Final = text(
    "SELECT c.oid, n.nspname, c.relname, c.relkind::text, has_any_column_privilege(c.oid, 'INSERT') "
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
           CASE WHEN base.typcategory = 'A' THEN e.typname END,
           a.attnotnull AND NOT (a.atthasdef OR a.attidentity <> ''), a.attgenerated <> ''
    FROM base JOIN pg_attribute a ON a.attrelid = :table AND a.attnum = base.attnum
         LEFT JOIN pg_type e ON e.oid = base.typelem
    WHERE base.typtype <> 'd' ORDER BY a.attnum
    """
)

_BOUNDED: Final = frozenset({"varchar", "bpchar"})
_HEADER: Final = 4
"""Added to the length in these types' modifier (``VARHDRSZ``)."""

_TYPES: Final = text(
    "SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid "
    "JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = :schema AND c.relname = :table AND a.attnum > 0 AND NOT a.attisdropped"
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
    """Look the table up as PostgreSQL itself would: search path, quotes, upper and lower case.

    Args:
        connection: Any connection to the database.
        name: The table's name, written as in SQL.

    Raises:
        ConfigurationError: There is no such table, it is not a table, or may not be written to.
        Unavailable: The database does not answer.
    """
    try:
        found = connection.execute(_FIND, {"name": name}).one_or_none()
        if found is None:
            raise ConfigurationError(
                f"there is no table {name!r}",
                next_step="create it, or check its schema and search path; a name with upper case needs double quotes",
            )
        oid, schema, table, kind, may_insert = found
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
            longest=typmod - _HEADER if type_name in _BOUNDED and typmod >= _HEADER else None,
            element_type=element,
            must_be_given=must_be_given,
            generated=generated,
        )
        for column, type_name, is_enum, shown, typmod, element, must_be_given, generated in rows
    ]
    return Table(schema, table, {column.name: column for column in columns})


def require_types(
    connection: Connection, table: tuple[str, str], planned: Mapping[str, str], *, shown_name: str
) -> None:
    """See :meth:`SinkDatabase.require_types`.

    Binary COPY takes a number for another one of the same width, and INSERT rounds.
    """
    try:
        rows = connection.execute(_TYPES, {"schema": table[0], "table": table[1]}).all()
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, connection.engine) from error
    require_planned({str(name): str(shown) for name, shown in rows}, planned, shown_name)


def _scale(type_name: str, typmod: int) -> int | None:
    """The scale in a numeric's modifier: eleven bits with a sign (``numeric_typmod_scale`` in PostgreSQL's numeric.c)."""
    if type_name != "numeric" or typmod < 0:
        return None
    return (((typmod - 4) & 0x7FF) ^ 0x400) - 0x400
