"""Checks that the database's tables have the version that this library needs."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Engine, column, exc, select, table

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.access.failures import (
    Meaning,
    map_database_error,
    meaning_of,
    migrate_advice,
    migrate_command,
)
from dualwrite.stores.sql.short_transactions import dialect_of
from dualwrite.stores.sql.tables.declared import VERSION_TABLE

SCHEMA_REVISION: Final = "0005"
"""The migration that makes the tables as declared. Migrations are numbered so that later ones compare greater."""


def check_schema(engine: Engine, schema: str | None = None) -> None:
    """Refuse to work on tables of another version. Call it before any claim; reads one row.

    Args:
        engine: The user's database.
        schema: The database schema of the library's tables; None for the default one.

    Raises:
        ConfigurationError: The tables are missing, older, newer, or unreadable to us; the message names the command.
        Unavailable: The database does not answer.
    """
    dialect_of(engine)
    command, advice = migrate_command(engine.url, schema), migrate_advice(engine.url, schema)
    found = _recorded_revision(engine, schema)
    if found == SCHEMA_REVISION:
        return
    where = "the database" if schema is None else f"schema {schema!r}"
    if found is None:
        raise ConfigurationError(f"dualwrite's tables are not in {where}", next_step=advice)
    if found < SCHEMA_REVISION:
        raise ConfigurationError(
            f"dualwrite's tables in {where} are of version {found}, this library needs {SCHEMA_REVISION}",
            next_step=advice,
        )
    raise ConfigurationError(
        f"dualwrite's tables in {where} are of version {found}, this library knows only {SCHEMA_REVISION}",
        next_step="install the library's newer version; or go back with the newer one: "
        f"{command} --downgrade --revision {SCHEMA_REVISION}",
    )


def _recorded_revision(engine: Engine, schema: str | None) -> str | None:
    version = table(VERSION_TABLE, column("version_num"), schema=schema)
    try:
        with engine.connect() as connection:
            return connection.scalar(select(version.c.version_num))
    except exc.SQLAlchemyError as error:
        if meaning_of(error) is Meaning.SCHEMA:
            return None
        raise map_database_error(error, engine, schema) from error
