"""Checks that the user's connection leads to the same database as the writer's engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import exc

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.access__stores_sql_access_failures import map_database_error, shown_url

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from dualwrite.stores.sql.dialect import Dialect, Identity
    from dualwrite.stores.sql.short_transactions import ShortTransactions
    from dualwrite.stores.sql.tables import Tables

_COMPARED: Final = "dualwrite.compared"


class SameDatabase:
    """Compares connections with an engine: no settler would find a decision made in another database.

    A connection of the engine's own pool costs nothing; any other costs two statements the first time.
    """

    def __init__(self, engine: Engine, dialect: Dialect, tables: Tables, own: ShortTransactions) -> None:
        self._engine = engine
        self._dialect = dialect
        self._tables = tables
        self._own = own

    def check(self, connection: Connection) -> None:
        """Refuse a connection to another database. A transaction that it is in continues.

        Raises:
            ConfigurationError: It leads to another database, or to other tables there.
            Unavailable: A database does not answer.
        """
        if connection.engine.pool is self._engine.pool:
            return
        try:
            # The mark lives as long as the driver's connection, which leads to one server all its life.
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
        joined = connection.in_transaction()
        try:
            return self._dialect.identity(connection, self._tables)
        finally:
            if not joined:
                connection.rollback()
