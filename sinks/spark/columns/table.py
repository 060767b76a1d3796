"""The target table, as the database's catalog describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, exc, text

from dualwrite.errors import ConfigurationError, TransactionAborted
from dualwrite.stores.failures import driver_words, map_database_error, sqlstate_of

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


@dataclass(frozen=True)
class TableColumn:
    """One column of the table.

    Attributes:
        name: Its name, as the catalog has it.
        type_name: The internal name of its type; for a domain, of the base type.
        shown_type: Its type as people write it.
        is_enum: Whether the type is an enumeration.
        scale: The digits after the point that a ``numeric`` column, or an array of them, keeps; None if it keeps all.
        element_type: The internal name of an array's element type.
        must_be_given: Whether a row without a value for it is refused.
        generated: Whether the database computes it.
    """

    name: str
    type_name: str
    shown_type: str
    is_enum: bool = False
    scale: int | None = None
    element_type: str | None = None
    must_be_given: bool = False
    generated: bool = False


@dataclass(frozen=True)
class Table:
    """A table: its exact names, and its columns by name."""

    schema: str
    name: str
    columns: Mapping[str, TableColumn]


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
    """Make sure that the table's columns have the types that the rows were made for.

    Call it in the transaction that has written the rows, at READ COMMITTED: the transaction's lock protects the table from
    ALTER until it ends. Before it began, the table could change: binary COPY then takes a number for another one of the same
    width, and INSERT rounds.

    Args:
        connection: Inside that transaction.
        table: Schema and name of the table.
        planned: The types by column, as `TableColumn.shown_type`.
        shown_name: The table's name for people: they do not know a staging table's.

    Raises:
        TransactionAborted: A column has another type now.
        ConfigurationError, Unavailable: The database does not answer, or answers nonsense.
    """
    try:
        rows = connection.execute(_TYPES, {"schema": table[0], "table": table[1]}).all()
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, connection.engine) from error
    present = {str(name): str(shown) for name, shown in rows}
    for name, shown in planned.items():
        if present.get(name) != shown:
            raise TransactionAborted(
                f"column {name!r} of table {shown_name!r} was {shown} when the batch was planned, and is "
                f"{present.get(name, 'gone')} now",
                next_step="run the batch again: it makes a new plan",
            )


def _scale(type_name: str, typmod: int) -> int | None:
    """The scale in a numeric's modifier: eleven bits with a sign (``numeric_typmod_scale`` in PostgreSQL's numeric.c)."""
    if type_name != "numeric" or typmod < 0:
        return None
    return (((typmod - 4) & 0x7FF) ^ 0x400) - 0x400
