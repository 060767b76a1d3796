"""Finds the library's tables in the database, and checks that they have the version that this library needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Table,
    column,
    exc,
    func,
    literal,
    literal_column,
    select,
    table,
)

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.values__protocol_mismatch import TableFit, table_fit
from dualwrite.stores.sql.access__stores_sql_access_failures import (
    Meaning,
    map_database_error,
    meaning_of,
    migrate_advice,
    migrate_command,
)
from dualwrite.stores.sql.short_transactions import dialect_of
from dualwrite.stores.sql.tables import SINCE, VERSION_TABLE
from dualwrite.stores.sql.tables__stores_sql_tables_column_types import MYSQL

logger = logging.getLogger(__name__)

SCHEMA_REVISION: Final = "0005"
"""The migration that makes the tables as declared. Migrations are numbered so that later ones compare greater."""


# search_path may list several schemas: the table itself knows its own. Its name in the FROM clause may be qualified.
_OF_POSTGRESQL: Final[ColumnElement[Any]] = literal_column(
    "(SELECT nspname FROM pg_namespace WHERE oid = (SELECT relnamespace FROM pg_class WHERE oid = own.tableoid))"
)


@dataclass(frozen=True)
class FoundTables:
    """The library's tables in a database.

    Attributes:
        schema: The schema that they are in, for :func:`declare_tables`. Statements that name it reach the same tables whatever
            ``search_path`` a block sets, or ``USE``. None on SQLite, where no statement changes what a table's name means.
        revision: Their version.
    """

    schema: str | None
    revision: str

    def has(self, table: Table) -> bool:
        """Whether the table is there: the newest migration may not have been run yet."""
        since: str = table.info.get(SINCE, "")
        return since <= self.revision


def check_schema(engine: Engine, schema: str | None = None) -> FoundTables:
    """Refuse to work on tables of a version that does not go with ours. Call it before any claim; reads one row.

    Args:
        engine: The user's database.
        schema: The database schema of the library's tables; None for the default one.

    Returns:
        Where they are, and their version.

    Raises:
        ConfigurationError: The tables are missing, older, newer, or unreadable to us; the message names the command.
        Unavailable: The database does not answer.
    """
    dialect_of(engine)
    command, advice = migrate_command(engine.url, schema), migrate_advice(engine.url, schema)
    found = _find_tables(engine, schema)
    where = "the database" if schema is None else f"schema {schema!r}"
    if found is None:
        raise ConfigurationError(f"dualwrite's tables are not in {where}", next_step=advice)
    fit = table_fit(found.revision, SCHEMA_REVISION)
    shown = f"dualwrite's tables in {where} are of version {found.revision}"
    if fit is TableFit.OLDER:
        logger.warning(
            "%s: this library, of version %s, works without what that adds; %s", shown, SCHEMA_REVISION, advice
        )
    if fit in {TableFit.SAME, TableFit.OLDER, TableFit.NEWER}:
        return found
    if fit is TableFit.TOO_OLD:
        raise ConfigurationError(
            f"{shown}; they are older than this library, which needs {SCHEMA_REVISION}, or the version before",
            next_step=advice,
        )
    why = "they lack what it uses" if fit is TableFit.CONTRACTED else "it takes those of the next version at most"
    raise ConfigurationError(
        f"{shown}; this library is older, it knows only {SCHEMA_REVISION}: {why}",
        next_step="install the library's newer version; or go back with the newer one: "
        f"{command} --downgrade --revision {SCHEMA_REVISION}",
    )


def _find_tables(engine: Engine, schema: str | None) -> FoundTables | None:
    try:
        with engine.connect() as connection:
            return find_tables(connection, schema)
    except exc.SQLAlchemyError as error:
        if meaning_of(error) is Meaning.SCHEMA:
            return None
        raise map_database_error(error, engine, schema) from error


def find_tables(connection: Connection, schema: str | None) -> FoundTables | None:
    """The tables that the connection finds, in one statement; None if no revision is recorded.

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
    return None if row is None else FoundTables(row[1], row[0])
