"""The deciding SQL database as a whole, and the database behind what a caller gives: an engine, a URL, or a database itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Final, cast

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    exc,
)

from dualwrite.errors import ConfigurationError
from dualwrite.interfaces import PAUSED_OWNER_TIMEOUT_S, Database, Traits
from dualwrite.protocol.findings import Status
from dualwrite.stores.sql import dialect
from dualwrite.stores.sql.access import (
    Borrowed,
    engine_of,
    keep,
    let_go,
    reading,
)
from dualwrite.stores.sql.short_transactions import FoundTables, check_schema
from dualwrite.stores.sql.store import SqlStateStore, listen_to
from dualwrite.stores.sql.tables import declare_tables

if TYPE_CHECKING:
    from dualwrite.interfaces import StateStore
    from dualwrite.protocol.members import Lease
    from dualwrite.stores.sql.leases import Leases
    from dualwrite.stores.sql.operators import Forgetting, History


_NAMES: Final = {"postgresql": "PostgreSQL", "sqlite": "SQLite"}


class SqlDatabase(Database):
    """Serves the library's own transactions from one engine, and blocks from another one to the same database, if given."""

    def __init__(self, engine: Engine, schema: str | None = None, *, blocks: Engine | None = None) -> None:
        self.engine = engine
        self._schema = schema
        self._blocks = blocks or engine
        self._found: FoundTables | None = None
        name = engine.dialect.name
        self._is_sqlite = name == "sqlite"
        self._traits = Traits(
            _NAMES.get(name, name), "connection", blocks=1 if self._is_sqlite else None, savepoints=True
        )

    @property
    def traits(self) -> Traits:
        """SQLite has one write lock, so that one block at a time can write."""
        return self._traits

    @property
    def schema(self) -> str | None:
        return self._schema

    @property
    def tables_schema(self) -> str | None:
        """The schema in which the library's tables are; the first call asks the database, unless :meth:`check` has."""
        return self._tables().schema

    def _tables(self) -> FoundTables:
        if self._found is None:
            self._found = check_schema(self.engine, self._schema)
        return self._found

    def require_outbox(self) -> None:
        if self.engine.dialect.name == "postgresql":
            from dualwrite.stores.sql.postgresql import refuse_unlogged  # noqa: PLC0415 - large, as in dialect_of

            with reading(self.engine, self._schema) as connection:
                refuse_unlogged(connection, declare_tables(self.tables_schema))

    @property
    def joins_first(self) -> Engine | None:
        return self._blocks if self._is_sqlite else None

    def check(self) -> None:
        """The durability of commits is checked where one begins."""
        self._found = check_schema(self.engine, self._schema)

    def store(self, *, paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S) -> SqlStateStore:
        return SqlStateStore(self.engine, schema=self.tables_schema, paused_owner_timeout_s=paused_owner_timeout_s)

    def joined_store(
        self, *, paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S
    ) -> Callable[[], JoinedStore]:
        """Gives the same rows, for dual writes in transactions that other code begins and ends.

        It looks at the database with the first one: sessions may be bound while the database is away, or has no tables yet.
        """
        listen_to(self.engine)

        @cache
        def made() -> JoinedStore:
            return JoinedStore(self.engine, schema=self.tables_schema, paused_owner_timeout_s=paused_owner_timeout_s)

        return made

    def connect(self) -> Borrowed:
        return Borrowed(self._blocks)

    @contextmanager
    def connect_to_send(self) -> Generator[Connection, None, None]:
        """On the library's own engine, whatever serves the blocks. SQLite's write lock alone is enough."""
        with Borrowed(self.engine) as connection:
            if not self._is_sqlite:
                connection.execution_options(isolation_level="READ COMMITTED")
            yield connection

    @contextmanager
    def adopt(self, given: object, store: StateStore) -> Generator[Connection, None, None]:
        """Takes a connection of SQLAlchemy's, psycopg's or Django's."""
        from dualwrite.stores.sql.adopted import usable  # noqa: PLC0415 - most blocks have a connection of the pool

        with usable(given, self.engine) as connection:
            if connection.engine.pool is not self._blocks.pool:
                store.check_same_database(connection)
            yield connection

    def close(self) -> None:
        self.engine.dispose()

    def forked(self) -> None:
        self.engine.dispose(close=False)

    def leases(self, fleet: str) -> Leases:
        from dualwrite.stores.sql.leases import Leases  # noqa: PLC0415 - most writers have no lease

        return Leases(self.engine, fleet, schema=self.tables_schema)

    def living(self, names: Collection[str]) -> set[str]:
        """Includes slots, which the tasks of a job hold."""
        from dualwrite.stores.sql.leases import living_leases, living_members  # noqa: PLC0415 - as above

        slots = living_leases(self.engine, names, schema=self.tables_schema)
        return slots | living_members(self.engine, names, schema=self.tables_schema)

    def lease_list(self, transactional_id: str | None, prefix: str) -> Sequence[Lease]:
        from dualwrite.stores.sql.leases import read_leases  # noqa: PLC0415 - as above

        return read_leases(self.engine, transactional_id, prefix=prefix, schema=self.tables_schema)

    def warnings(self) -> Sequence[str]:
        """Only PostgreSQL keeps old versions where look-ups meet them."""
        if self.engine.dialect.name != "postgresql":
            return ()
        from dualwrite.stores.sql.operators import kept_versions  # noqa: PLC0415 - writers do not need it

        with reading(self.engine, self._schema) as connection:
            finding = kept_versions(connection, declare_tables(self.tables_schema))
        return () if finding.status is Status.OK else (f"{finding}: {finding.remedy}",)

    def forgetting(self) -> Forgetting:
        from dualwrite.stores.sql.operators import Forgetting  # noqa: PLC0415 - writers do not need it

        return Forgetting(self.engine, self.tables_schema)

    def history(self) -> History:
        from dualwrite.stores.sql.operators import History  # noqa: PLC0415 - as above

        return History(self.engine, schema=self.tables_schema)


def sql_of(database: Database, what: str) -> SqlDatabase:
    """The database, for what only SQL can do; ``what`` is the subject of the message that refuses another kind."""
    if not isinstance(database, SqlDatabase):
        raise ConfigurationError(
            f"{what} need a SQL database, and this writer's database is {database.traits.name}",
            next_step=f"use tx.{database.traits.gives} of transaction(), run() or submit()",
        )
    return database


# The state store for dual writes in transactions that other code begins and ends, such as an ORM session.


class JoinedStore(SqlStateStore):
    """As :class:`SqlStateStore`, but the connection is inside a transaction of SQLAlchemy's when a dual write begins on it.

    :meth:`begin` joins that transaction. :meth:`commit` may be called only by the code that SQLAlchemy calls to send its
    COMMIT; it and :meth:`rollback` end the database's transaction, and leave SQLAlchemy's own state to its owner. Nothing
    refuses the owner's COMMIT here: the owner of the connection must turn it into that of the dual write.
    """

    @property
    def with_commit(self) -> None:
        """The owner of the transaction commits."""

    def check_same_database(self, connection: Connection) -> None:
        """The transaction continues."""
        self._same_database.check(connection)

    def begin(self, connection: Connection) -> None:
        """Join the transaction, unless it has gone too far for that. On SQLite this takes the write lock."""
        try:
            joined_late = self._dialect.join(connection, self._tables)
        except exc.SQLAlchemyError as error:
            raise self._as_ours(error) from error
        keep(connection, joined_late=joined_late)

    def commit(self, connection: Connection, *, answer_s: float | None = None) -> None:
        try:
            dialect.commit(connection, self._dialect, self._decided(connection), answer_s=answer_s, joined=True)
        finally:
            let_go(connection)
            self._dialect.restore(connection)

    def rollback(self, connection: Connection) -> None:
        dialect.rollback_joined(connection)
        let_go(connection)
        self._dialect.restore(connection)

    def discard(self, connection: Connection) -> None:
        dialect.discard_joined(connection)
        let_go(connection)


_OTHERS: Final[dict[str, str]] = {
    "rocksdb": "dualwrite.stores.keyed.rocksdb.RocksDatabase",
    "zookeeper": "dualwrite.stores.keyed.zookeeper.ZooKeeperDatabase",
}
"""By the beginning of its URLs, the class of a database that SQLAlchemy does not know; each has ``from_url``."""


def database_of(given: Engine | Database | URL | str, schema: str | None = None) -> Database:
    """The database itself, or a new one over an engine or a URL. It connects on first use."""
    made = _made(given)
    if made is None:
        return SqlDatabase(engine_of(cast("Engine | URL | str", given)), schema)
    if schema not in {None, made.schema}:
        raise ConfigurationError(
            f"schema is {schema!r}, and the database is {made.traits.name}", next_step="leave schema out"
        )
    return made


def _made(given: object) -> Database | None:
    if isinstance(given, Database):
        return given
    if not isinstance(given, str):
        return None
    place = _OTHERS.get(given.partition(":")[0])
    if place is None:
        return None
    module, _, name = place.rpartition(".")
    from_url = cast("Callable[[str], Database]", getattr(import_module(module), name).from_url)
    return from_url(given)


def has_tables(url: str) -> bool:
    """Whether a URL names a database whose tables must be made by a migration."""
    return url.partition(":")[0] not in _OTHERS


def is_made_here(given: object) -> bool:
    """Whether :func:`database_of` makes the connections, so that the caller closes the database."""
    return isinstance(given, (str, URL))


@contextmanager
def opened(given: Engine | Database | URL | str, schema: str | None = None) -> Generator[Database, None, None]:
    """The database for a block, which closes it if it was made from a URL. Checked."""
    database = database_of(given, schema)
    try:
        database.check()
        yield database
    finally:
        if is_made_here(given):
            database.close()
