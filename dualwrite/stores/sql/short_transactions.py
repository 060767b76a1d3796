"""Short transactions of the library's own, whether the tables fit, and whether two engines reach one database.

Each is retried after errors that pass by themselves, and limited by the caller's deadline.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

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

from dualwrite.clock import pause
from dualwrite.errors import ConfigurationError, DualWriteError, Unavailable
from dualwrite.interfaces import PAUSED_OWNER_TIMEOUT_S
from dualwrite.protocol.findings import Status, refuse, tables_fit
from dualwrite.stores.sql.access import (
    Meaning,
    begin_on,
    map_database_error,
    meaning_of,
    migrate_advice,
    migrate_command,
    shown_url,
    stand_alone,
)
from dualwrite.stores.sql.dialect import rollback
from dualwrite.stores.sql.tables import MYSQL, SINCE, VERSION_TABLE
from dualwrite.waiting import elsewhere

if TYPE_CHECKING:
    from dualwrite.protocol.findings import CheckResult
    from dualwrite.stores.sql.dialect import Dialect, Identity
    from dualwrite.stores.sql.tables import Tables

Result = TypeVar("Result")

_ATTEMPTS: Final = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
LOCK_TIMEOUT_S: Final = 75.0
"""Longer than the session of a paused owner can live, so that a process that waits for its lock gets it."""
_MARIADB: Final = frozenset(itertools.product(MYSQL, ("pymysql", "mysqldb")))


def dialect_of(
    engine: Engine,
    paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S,
) -> Dialect:
    """The adapter for the engine's database and driver."""
    found = (engine.dialect.name, engine.dialect.driver)
    # SQLAlchemy's part for a database is large: load that of the engine's alone.
    if found == ("postgresql", "psycopg"):
        from dualwrite.stores.sql.postgresql import PostgreSQL  # noqa: PLC0415 - as above

        return PostgreSQL(paused_owner_timeout_s)
    if found == ("sqlite", "pysqlite"):
        from dualwrite.stores.sql.sqlite import SQLite  # noqa: PLC0415 - as above

        return SQLite()
    if found in _MARIADB:
        from dualwrite.stores.sql.mariadb import MariaDB  # noqa: PLC0415 - as above

        return MariaDB(paused_owner_timeout_s)
    raise ConfigurationError(
        f"{'+'.join(found)} is not supported",
        next_step="use postgresql+psycopg://... (psycopg 3), mysql+pymysql://... (MariaDB, MySQL) or sqlite:///...; "
        "an AsyncDualWriter also takes postgresql+asyncpg and sqlite+aiosqlite",
    )


def _worth_another_attempt(error: BaseException) -> bool:
    """A conflict, or a pooled connection that died while idle (the pool then renews all of its connections)."""
    if not isinstance(error, exc.DBAPIError):
        return False
    return error.connection_invalidated or meaning_of(error) is Meaning.CONFLICT


class ShortTransactions:
    """Runs work in transactions, perhaps more than once: a run may have committed and lost its answer. So be idempotent."""

    def __init__(
        self, engine: Engine, dialect: Dialect, tables: Tables, lock_timeout_s: float = LOCK_TIMEOUT_S
    ) -> None:
        self._engine = engine
        self._dialect = dialect
        self._tables = tables
        self._lock_timeout_s = lock_timeout_s

    def run(
        self,
        work: Callable[[Connection], Result],
        *,
        lock_timeout_s: float | None = None,
        answer_s: float | None = None,
        light: bool = False,
    ) -> Result:
        """Run the work in a transaction that may write. Durable on return; any exception rolls it back.

        ``answer_s``, after which the database counts as lost, is only for work that does nothing but query it. ``light`` is
        for work that reads the dialect's :meth:`~Dialect.own_checks` itself, or need not, and for which the session's own limit
        is early enough, if the server has one for waits.
        """
        timeout_s = self._lock_timeout_s if lock_timeout_s is None else lock_timeout_s

        def begin(connection: Connection) -> None:
            self._dialect.begin_own(connection, self._tables, lock_timeout_s=timeout_s, light=light)

        return self._retried(begin, work, answer_s)

    @property
    def can_stand_alone(self) -> bool:
        """Whether a statement of :meth:`run_one` is a transaction by itself."""
        return self._dialect.standing_alone(self._lock_timeout_s) is not None

    def run_one(self, work: Callable[[Connection], Result]) -> Result:
        """As :meth:`run`, for work that executes one UPDATE, perhaps with others in it, and no second statement.

        Where the statement can stand alone, it is a transaction by itself, which takes one request instead of four. A second
        statement would be another transaction.
        """
        standing_alone = self._dialect.standing_alone(self._lock_timeout_s)
        if standing_alone is None:
            return self.run(work)

        def alone(connection: Connection) -> Result:
            with standing_alone(connection):
                return work(connection)

        return self._retried(stand_alone, alone)

    def read(self, work: Callable[[Connection], Result], *, light: bool = False) -> Result:
        """Run work that only reads. Each statement may see what was committed before it, and may be a transaction by itself.

        ``light`` is for work that reads the dialect's :meth:`~Dialect.own_checks` itself.
        """
        return self._retried(partial(self._dialect.begin_reading, light=light), work)

    def _retried(
        self, begin: Callable[[Connection], None], work: Callable[[Connection], Result], answer_s: float | None = None
    ) -> Result:
        try:
            return elsewhere(lambda: self._attempts(begin, work, answer_s))
        except exc.SQLAlchemyError as error:
            raise self._mapped(error) from error

    def _attempts(
        self, begin: Callable[[Connection], None], work: Callable[[Connection], Result], answer_s: float | None
    ) -> Result:
        failures = 0
        while True:
            try:
                return self._once(begin, work, answer_s)
            except Exception as error:
                failures += 1
                if failures == _ATTEMPTS or not _worth_another_attempt(error):
                    raise
            pause(random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**failures)))  # noqa: S311 - as for every backoff

    def _once(
        self, begin: Callable[[Connection], None], work: Callable[[Connection], Result], answer_s: float | None
    ) -> Result:
        with self._engine.connect() as connection, self._dialect.bounded(connection, answer_s):
            try:
                begin_on(connection, lambda at: self._begin(at, begin), own=True)
                result = work(connection)
                connection.commit()
            except BaseException:
                rollback(connection)
                raise
            finally:
                self._dialect.restore(connection)
            return result

    def _begin(self, connection: Connection, begin: Callable[[Connection], None]) -> None:
        self._dialect.refuse_left_open(connection)  # its snapshot may be older than what we ask for
        begin(connection)

    def _mapped(self, error: exc.SQLAlchemyError) -> DualWriteError:
        mapped = map_database_error(error, self._engine, self._tables.schema)
        if meaning_of(error) is Meaning.BUSY:
            return Unavailable(mapped.what, next_step="another session holds the lock: try again when it has ended")
        # No transaction of the caller's was aborted.
        return Unavailable(mapped.what) if meaning_of(error) is Meaning.CONFLICT else mapped


# Finds the library's tables in the database, and checks that they have the version that this library needs.

logger = logging.getLogger(__name__)

SCHEMA_REVISION: Final = "0008"
"""The migration that makes the tables as declared. Migrations are numbered so that later ones compare greater."""


# search_path may list several schemas: the table itself knows its own. Its name in the FROM clause may be qualified.
_OF_POSTGRESQL: Final[ColumnElement[Any]] = literal_column(
    "(SELECT nspname FROM pg_namespace WHERE oid = (SELECT relnamespace FROM pg_class WHERE oid = own.tableoid))"
)


@dataclass(frozen=True)
class FoundTables:
    """The library's tables in a database.

    Statements that name their ``schema`` reach the same tables whatever ``search_path`` a block sets, or ``USE``. It is None
    on SQLite, where no statement changes what a table's name means. ``revision`` is their version.
    """

    schema: str | None
    revision: str

    def has(self, table: Table) -> bool:
        """Whether the table is there: the newest migration may not have been run yet."""
        since: str = table.info.get(SINCE, "")
        return since <= self.revision


def check_schema(database: Engine | Connection, schema: str | None = None) -> FoundTables:
    """Refuse to work on tables of a version that does not go with ours. Call it before any claim; reads one row.

    The tables may be missing, older, newer, or unreadable to us; the message names the command. Returns where they are. Given a
    connection, it reads in the caller's transaction.
    """
    found, finding = judge_tables(database, schema)
    refuse(finding)
    assert found is not None, "missing tables are refused"
    if finding.status is Status.WARNING:
        logger.warning("%s; %s", finding.found, finding.remedy)
    return found


def judge_tables(database: Engine | Connection, schema: str | None = None) -> tuple[FoundTables | None, CheckResult]:
    """The tables, None if they are not there, and whether this library may work with them. Raises as :func:`check_schema`."""
    engine = database.engine
    found = _find_tables(database, schema)
    finding = tables_fit(
        None if found is None else found.revision,
        SCHEMA_REVISION,
        where="the database" if schema is None else f"schema {schema!r}",
        migrate=migrate_advice(engine.url, schema),
        go_back=f"{migrate_command(engine.url, schema)} --downgrade --revision {SCHEMA_REVISION}",
    )
    return found, finding


def _find_tables(database: Engine | Connection, schema: str | None) -> FoundTables | None:
    dialect = dialect_of(database.engine)

    def begin(connection: Connection) -> None:
        if dialect.name == "postgresql":
            dialect.refuse_left_open(connection)
            stand_alone(connection)

    try:
        if isinstance(database, Connection):
            return find_tables(database, schema)
        with database.connect() as connection:
            begin_on(connection, begin, own=True)
            return find_tables(connection, schema)
    except exc.SQLAlchemyError as error:
        if meaning_of(error) is Meaning.SCHEMA:
            return None
        raise map_database_error(error, database.engine, schema) from error


def find_tables(connection: Connection, schema: str | None) -> FoundTables | None:
    """The tables that the connection finds, in one statement; None if no revision is recorded."""
    own = table(VERSION_TABLE, column("version_num"), schema=schema).alias("own")
    found: ColumnElement[Any] = literal(schema)
    if connection.dialect.name == "postgresql":
        found = _OF_POSTGRESQL
    elif connection.dialect.name in MYSQL:
        found = func.coalesce(found, func.database())
    row = connection.execute(select(own.c.version_num, found)).one_or_none()
    return None if row is None else FoundTables(row[1], row[0])


# Checks that the user's connection leads to the same database as the writer's engine.

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
        """Refuse a connection to another database, or to other tables there. A transaction that it is in continues."""
        if connection.engine.pool is self._engine.pool:
            return
        try:
            # The mark lives as long as the driver's connection, which leads to one server all its life.
            if connection.info.get(_COMPARED) is self._engine.pool:
                return
            given = self._identity_of(connection)
            found = self._own.read(lambda own: self._dialect.identity(own, self._tables))
            if given != found:
                # The server may have been restarted meanwhile, and is another process now. Then this connection has ended, or
                # leads to that process through a pooler.
                given = self._identity_of(connection)
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, connection.engine) from error
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
