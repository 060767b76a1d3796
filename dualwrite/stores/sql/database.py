"""``SqlDatabase``: a database that SQLAlchemy reaches, as the one that decides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Final

from sqlalchemy import exc

from dualwrite.errors import ConfigurationError
from dualwrite.interfaces__ports_database import PAUSED_OWNER_TIMEOUT_S, Database, Traits
from dualwrite.stores.sql.access import borrowed, usable
from dualwrite.stores.sql.access__stores_sql_access_failures import map_database_error, migrate_advice
from dualwrite.stores.sql.database__stores_sql_forgetting import Forgetting
from dualwrite.stores.sql.database__stores_sql_joined import JoinedStore
from dualwrite.stores.sql.leases import Leases, living_members, read_leases
from dualwrite.stores.sql.short_transactions__stores_sql_schema import FoundTables, check_schema
from dualwrite.stores.sql.store import SqlStateStore, listen_to
from dualwrite.stores.sql.tables import LEASE_TABLE, declare_tables

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from dualwrite.interfaces import StateStore
    from dualwrite.protocol.leases import Lease

_NAMES: Final = {"postgresql": "PostgreSQL", "sqlite": "SQLite"}


class SqlDatabase(Database):
    """The database of an engine.

    Args:
        engine: Serves the library's own transactions.
        schema: The schema of the library's tables, if it is not the default one.
        blocks: Serves the blocks of dual writes, if not the same engine. It leads to the same database.
    """

    def __init__(self, engine: Engine, schema: str | None = None, *, blocks: Engine | None = None) -> None:
        self.engine = engine
        self._schema = schema
        self._blocks = blocks or engine
        self._found: FoundTables | None = None

    @property
    def traits(self) -> Traits:
        """See :attr:`Database.traits`. SQLite has one write lock, so that one block at a time can write."""
        name = self.engine.dialect.name
        return Traits(_NAMES.get(name, name), "connection", blocks=1 if self._is_sqlite else None, savepoints=True)

    @property
    def schema(self) -> str | None:
        """See :attr:`Database.schema`."""
        return self._schema

    @property
    def tables_schema(self) -> str | None:
        """The schema in which the library's tables are, for statements of the library: see :class:`FoundTables`.

        The first call asks the database, unless :meth:`check` has.

        Raises:
            ConfigurationError, Unavailable: As :meth:`check`.
        """
        return self._tables().schema

    def _tables(self) -> FoundTables:
        if self._found is None:
            self._found = check_schema(self.engine, self._schema)
        return self._found

    def _has_leases(self) -> bool:
        return self._tables().has(declare_tables().lease)

    def _require_leases(self, what: str) -> None:
        if not self._has_leases():
            raise ConfigurationError(
                f"{what} needs the table {LEASE_TABLE}, which the tables of version {self._tables().revision} do not have",
                next_step=migrate_advice(self.engine.url, self._schema),
            )

    @property
    def joins_first(self) -> Engine | None:
        """See :class:`dualwrite.writing.sessions.Joining`."""
        return self._blocks if self._is_sqlite else None

    @property
    def _is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def check(self) -> None:
        """See :meth:`Database.check`. The durability of commits is checked where one begins."""
        self._found = check_schema(self.engine, self._schema)

    def store(self, *, paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S) -> SqlStateStore:
        """See :meth:`Database.store`."""
        return SqlStateStore(self.engine, schema=self.tables_schema, paused_owner_timeout_s=paused_owner_timeout_s)

    def joined_store(
        self, *, paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S
    ) -> Callable[[], JoinedStore]:
        """Gives the same rows, for dual writes in transactions that other code begins and ends, from the first one on.

        Not earlier: sessions may be bound while the database is away, or has no tables yet.
        """
        listen_to(self.engine)

        @cache
        def made() -> JoinedStore:
            return JoinedStore(self.engine, schema=self.tables_schema, paused_owner_timeout_s=paused_owner_timeout_s)

        return made

    @contextmanager
    def connect(self) -> Generator[Connection, None, None]:
        """See :meth:`Database.connect`."""
        with borrowed(self._blocks) as connection:
            yield connection

    @contextmanager
    def adopt(self, given: object, store: StateStore) -> Generator[Connection, None, None]:
        """See :meth:`Database.adopt`. Takes a connection of SQLAlchemy's or of psycopg's."""
        with usable(given, self.engine) as connection:
            if connection.engine.pool is not self._blocks.pool:
                store.check_same_database(connection)
            yield connection

    def close(self) -> None:
        """See :meth:`Database.close`."""
        self.engine.dispose()

    def forked(self) -> None:
        """See :meth:`Database.forked`."""
        self.engine.dispose(close=False)

    def leases(self, fleet: str) -> Leases:
        """See :meth:`Database.leases`."""
        self._require_leases("a fleet")
        return Leases(self.engine, fleet, schema=self.tables_schema)

    def living(self, names: Collection[str]) -> set[str]:
        """See :meth:`Database.living`. Includes slots, which the tasks of a job hold."""
        from dualwrite.stores.sql.slots import living_leases  # noqa: PLC0415 - a writer needs no slots

        slots = living_leases(self.engine, names, schema=self.tables_schema)
        return slots | living_members(self.engine, names, schema=self.tables_schema) if self._has_leases() else slots

    def lease_list(self, transactional_id: str | None, prefix: str) -> Sequence[Lease]:
        """See :meth:`Database.lease_list`."""
        if not self._has_leases():
            return ()
        return read_leases(self.engine, transactional_id, prefix=prefix, schema=self.tables_schema)

    def warnings(self) -> Sequence[str]:
        """See :meth:`Database.warnings`. Only PostgreSQL keeps old versions where look-ups meet them."""
        if self.engine.dialect.name != "postgresql":
            return ()
        from dualwrite.stores.sql.postgresql import kept_versions  # noqa: PLC0415 - large, as in dialect_of

        try:
            with self.engine.connect() as connection:
                found = kept_versions(connection, declare_tables(self.tables_schema))
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self.engine, self._schema) from error
        return () if found is None else (found,)

    def forgetting(self) -> Forgetting:
        """See :meth:`Database.forgetting`."""
        self._require_leases("forgetting")
        return Forgetting(self.engine, self.tables_schema)


def sql_of(database: Database, what: str) -> SqlDatabase:
    """The database, for what only SQL can do.

    Raises:
        ConfigurationError: It is another kind of database; ``what`` is the subject of the message.
    """
    if not isinstance(database, SqlDatabase):
        raise ConfigurationError(
            f"{what} need a SQL database, and this writer's database is {database.traits.name}",
            next_step=f"use tx.{database.traits.gives} of transaction(), run() or submit()",
        )
    return database
