"""Django's migrations of the library's tables: each takes the tables to a revision of ``dualwrite.migrations``.

What belongs here: one file for each release that has changed the tables, and nothing that says what a table looks like.
May use: ``dualwrite.django``, ``dualwrite.migrations``.

:class:`Revision` runs on Django's connection, in Django's transaction. It makes the tables only on databases that
``settings.DUALWRITE`` names. Tables that ``dualwrite migrate`` has made are taken over as they are.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.db import router
from django.db.migrations.operations.base import Operation
from sqlalchemy.pool import NullPool

from dualwrite.django.writers import aliases, database_url, settings_of
from dualwrite.migrations import BASE, downgrade, upgrade
from dualwrite.stores.sql.access import new_engine
from dualwrite.stores.sql.adopted import inside

if TYPE_CHECKING:
    from sqlalchemy import Connection


class Revision(Operation):  # type: ignore[misc] # Django ships no types
    """Take the tables to a revision.

    Args:
        revision: Of ``dualwrite.migrations``.
        before: The one that the Django migration before has reached, to go back to.
    """

    reduces_to_sql = False
    reversible = True

    def __init__(self, revision: str, before: str = BASE) -> None:
        self.revision = revision
        self.before = before

    def state_forwards(self, app_label: str, state: object) -> None:
        """The tables have no models."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: object, to_state: object) -> None:
        """Upgrade them. In Django's transaction: Django commits."""
        del from_state, to_state
        with _library_on(schema_editor.connection, app_label) as found:
            if found is not None:
                upgrade(found[0], self.revision, schema=found[1])

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: object, to_state: object) -> None:
        """Go back; from the first one this drops the tables, and with them all that recovery needs."""
        del from_state, to_state
        with _library_on(schema_editor.connection, app_label) as found:
            if found is not None:
                downgrade(found[0], self.before, schema=found[1])

    def describe(self) -> str:
        """For ``migrate --plan``."""
        return f"Take dualwrite's tables to revision {self.revision}"


@contextmanager
def _library_on(connection: Any, app_label: str) -> Generator[tuple[Connection, str | None] | None, None, None]:
    """Django's connection as SQLAlchemy's, and the schema of the tables; None for a database that has no writer."""
    using = connection.alias
    if using not in aliases() or not router.allow_migrate(using, app_label):
        yield None
        return
    schema = settings_of(using).get("SCHEMA")
    engine = new_engine(database_url(using), poolclass=NullPool)
    with engine.connect():
        pass  # SQLAlchemy asks the server for its version on a connection of its own, and ends its transaction
    with inside(connection, engine) as found:
        yield found, schema
