"""Finds the library's tables in the database, and checks that they have the version that this library needs."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Engine, column, exc, func, literal, literal_column, select, table

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.access.failures import (
    Meaning,
    map_database_error,
    meaning_of,
    migrate_advice,
    migrate_command,
)
from dualwrite.stores.sql.short_transactions import dialect_of
from dualwrite.stores.sql.tables.column_types import MYSQL
from dualwrite.stores.sql.tables.declared import VERSION_TABLE

SCHEMA_REVISION: Final = "0005"
"""The migration that makes the tables as declared. Migrations are numbered so that later ones compare greater."""


# search_path may list several schemas: the table itself knows its own. Its name in the FROM clause may be qualified.
_OF_POSTGRESQL: Final[ColumnElement[Any]] = literal_column(
    "(SELECT nspname FROM pg_namespace WHERE oid = (SELECT relnamespace FROM pg_class WHERE oid = own.tableoid))"
)


def check_schema(engine: Engine, schema: str | None = None) -> str | None:
    """Refuse to work on tables of another version. Call it before any claim; reads one row.

    Args:
        engine: The user's database.
        schema: The database schema of the library's tables; None for the default one.

    Returns:
        The schema in which the tables are, for :func:`declare_tables`. Statements that name it reach the same tables whatever
        ``search_path`` a block sets, or ``USE``. None on SQLite, where no statement changes what a table's name means.

    Raises:
        ConfigurationError: The tables are missing, older, newer, or unreadable to us; the message names the command.
        Unavailable: The database does not answer.
    """
    dialect_of(engine)
    command, advice = migrate_command(engine.url, schema), migrate_advice(engine.url, schema)
    revision, found = _read_version(engine, schema)
    if revision == SCHEMA_REVISION:
        return found
    where = "the database" if schema is None else f"schema {schema!r}"
    if revision is None:
        raise ConfigurationError(f"dualwrite's tables are not in {where}", next_step=advice)
    if revision < SCHEMA_REVISION:
        raise ConfigurationError(
            f"dualwrite's tables in {where} are of version {revision}, this library needs {SCHEMA_REVISION}",
            next_step=advice,
        )
    raise ConfigurationError(
        f"dualwrite's tables in {where} are of version {revision}, this library knows only {SCHEMA_REVISION}",
        next_step="install the library's newer version; or go back with the newer one: "
        f"{command} --downgrade --revision {SCHEMA_REVISION}",
    )


def _read_version(engine: Engine, schema: str | None) -> tuple[str | None, str | None]:
    try:
        with engine.connect() as connection:
            return read_version(connection, schema)
    except exc.SQLAlchemyError as error:
        if meaning_of(error) is Meaning.SCHEMA:
            return None, None
        raise map_database_error(error, engine, schema) from error


def read_version(connection: Connection, schema: str | None) -> tuple[str | None, str | None]:
    """The revision of the tables, and the schema that they are in, in one statement; None twice if none is recorded.

    Raises:
        SQLAlchemyError: There is no version table, or the database failed.
    """
    own = table(VERSION_TABLE, column("version_num"), schema=schema).alias("own")
    found: ColumnElement[Any] = literal(schema)
    if connection.dialect.name == "postgresql":
        found = _OF_POSTGRESQL
    elif connection.dialect.name in MYSQL:
        found = func.coalesce(found, func.database())
    row = connection.execute(select(own.c.version_num, found)).one_or_none()
    return (None, None) if row is None else (row[0], row[1])
