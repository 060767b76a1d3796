"""The next version of the tables, as a migration that only adds would make it: a program must keep working with them."""

from __future__ import annotations

from typing import Any

from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, text

from dualwrite.stores.sql.short_transactions import SCHEMA_REVISION
from dualwrite.stores.sql.tables import OWN_TABLES, VERSION_TABLE

LATER = f"{int(SCHEMA_REVISION[:4]) + 1:04}"


def expand_further(connection: Connection) -> None:
    """Add a table, and to each one a column that may be null and one with a default, and commit."""
    for name in sorted(OWN_TABLES - {VERSION_TABLE}):
        connection.execute(text(f"ALTER TABLE {name} ADD COLUMN later_note VARCHAR(10)"))
        connection.execute(text(f"ALTER TABLE {name} ADD COLUMN later_count INTEGER NOT NULL DEFAULT 7"))
    connection.execute(text("CREATE TABLE dualwrite_later (id INTEGER PRIMARY KEY)"))
    connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '{LATER}'"))
    connection.commit()


def without_counting(context: MigrationContext, differences: list[Any]) -> list[Any]:
    """The differences, without those that Alembic sees where a database has another word than IDENTITY."""
    if context.dialect.name == "postgresql":
        return differences
    counted = ("modify_default", "dualwrite_outbox", "seq")
    return [one for one in differences if not (isinstance(one, list) and (one[0][0], *one[0][2:4]) == counted)]
