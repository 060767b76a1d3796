"""The store's own transactions: short, on separate connections to the primary, retried after a conflict."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from sqlalchemy import exc
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from dualwrite.errors import ConfigurationError, DualWriteError, Unavailable
from dualwrite.interfaces__ports_database import PAUSED_OWNER_TIMEOUT_S
from dualwrite.stores.sql.access import begin_on
from dualwrite.stores.sql.access__stores_sql_access_failures import Meaning, map_database_error, meaning_of
from dualwrite.stores.sql.dialect__stores_sql_dialects_committing import rollback
from dualwrite.stores.sql.tables__stores_sql_tables_column_types import MYSQL
from dualwrite.waiting import elsewhere

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from dualwrite.stores.sql.dialect import Dialect
    from dualwrite.stores.sql.tables import Tables

Result = TypeVar("Result")

_ATTEMPTS: Final = 5
LOCK_TIMEOUT_S: Final = 75.0
"""Longer than a paused owner's session can live, so that a process waiting for its lock gets it."""
_MARIADB: Final = frozenset(itertools.product(MYSQL, ("pymysql", "mysqldb")))


def dialect_of(
    engine: Engine,
    paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S,
) -> Dialect:
    """The adapter for the engine's database and driver.

    Raises:
        ConfigurationError: The database or driver is not supported.
    """
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
        next_step="use postgresql+psycopg://... (psycopg 3), mysql+pymysql://... (MariaDB, MySQL) or sqlite:///...",
    )


def _worth_another_attempt(error: BaseException) -> bool:
    """A conflict, or a pooled connection that died while idle (the pool then renews all of its connections)."""
    if not isinstance(error, exc.DBAPIError):
        return False
    return error.connection_invalidated or meaning_of(error) is Meaning.CONFLICT


class ShortTransactions:
    """Runs work in separate transactions.

    The work may run more than once, so it must be idempotent: an earlier run may have committed and lost its answer.
    """

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
    ) -> Result:
        """Run the work in a transaction that may write. Durable on return; any exception rolls it back.

        Args:
            work: Called with the connection.
            lock_timeout_s: Seconds to wait for each lock.
            answer_s: Seconds after which the database counts as lost; only for work that does nothing but query it.

        Raises:
            ConfigurationError: A table or a right is missing, or the database is read-only or a standby.
            Unavailable: The database does not answer, a lock was not free in time, or conflicts did not end.
        """
        timeout_s = self._lock_timeout_s if lock_timeout_s is None else lock_timeout_s

        def begin(connection: Connection) -> None:
            self._dialect.begin_own(connection, self._tables, lock_timeout_s=timeout_s)

        return self._retried(begin, work, answer_s)

    def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads. Raises as :meth:`run`."""
        return self._retried(self._dialect.begin_reading, work)

    def _retried(
        self, begin: Callable[[Connection], None], work: Callable[[Connection], Result], answer_s: float | None = None
    ) -> Result:
        retrying = Retrying(
            retry=retry_if_exception(_worth_another_attempt),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.01, max=0.5),
            reraise=True,
        )
        try:
            result: Result = elsewhere(lambda: retrying(self._once, begin, work, answer_s))
        except exc.SQLAlchemyError as error:
            raise self._mapped(error) from error
        return result

    def _once(
        self, begin: Callable[[Connection], None], work: Callable[[Connection], Result], answer_s: float | None
    ) -> Result:
        with self._engine.connect() as connection, self._dialect.bounded(connection, answer_s):
            try:
                begin_on(connection, lambda: self._begin(connection, begin), own=True)
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
