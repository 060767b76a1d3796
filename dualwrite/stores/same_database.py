"""Does a connection of the user's lead to the database that the writer's engine leads to?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import exc

from dualwrite.errors import ConfigurationError
from dualwrite.stores.failures import map_database_error, shown_url

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from dualwrite.stores.dialect import Dialect, Identity
    from dualwrite.stores.short_transactions import ShortTransactions
    from dualwrite.stores.tables import Tables

_COMPARED: Final = "dualwrite.compared"


class SameDatabase:
    """Compares connections with an engine. What is decided in another database would be settled by nobody.

    A connection of the engine's own pool costs nothing; another one costs two statements when it is seen first.
    """

    def __init__(self, engine: Engine, dialect: Dialect, tables: Tables, own: ShortTransactions) -> None:
        self._engine = engine
        self._dialect = dialect
        self._tables = tables
        self._own = own

    def check(self, connection: Connection) -> None:
        """Refuse a connection of another database. It must be outside a transaction, and is left so.

        Raises:
            ConfigurationError: It is of another database, or finds other tables there by its ``search_path``.
            Unavailable: A database does not answer.
        """
        if connection.engine.pool is self._engine.pool:
            return
        try:
            # It stands with the driver's connection, which leads to one server for as long as it lives.
            if connection.info.get(_COMPARED) is self._engine.pool:
                return
            given = self._identity_of(connection)
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, connection.engine) from error
        found = self._own.read(lambda own: self._dialect.identity(own, self._tables))
        if given == found:
            connection.info[_COMPARED] = self._engine.pool
            return
        which = "another database than" if given is None or given.database != found.database else "other tables than"
        raise ConfigurationError(
            f"the connection ({shown_url(connection.engine.url)}) leads to {which} the writer's engine "
            f"({shown_url(self._engine.url)})",
            next_step="give a connection of the writer's engine: a dual write is decided in one database",
        )

    def _identity_of(self, connection: Connection) -> Identity | None:
        if connection.dialect.name != self._dialect.name:
            return None
        try:
            return self._dialect.identity(connection, self._tables)
        finally:
            connection.rollback()
