"""The database's part of a dual write on the user's own engine, without the library's tables."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import exc, literal_column, select
from sqlalchemy.pool import StaticPool

from dualwrite.errors import DualWriteError, TransactionAborted
from dualwrite.stores.sql import dialect__stores_sql_dialects_committing
from dualwrite.stores.sql.access import keep, let_go
from dualwrite.stores.sql.access__stores_sql_access_failures import map_database_error
from dualwrite.stores.sql.dialect import Identity
from dualwrite.stores.sql.savepoints import SavepointWatch
from dualwrite.stores.sql.short_transactions import ShortTransactions, dialect_of
from dualwrite.stores.sql.short_transactions__stores_sql_same_database import SameDatabase
from dualwrite.stores.sql.sqlite import SQLite
from dualwrite.stores.sql.store import refuse_transaction
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.testing.memory.failures import Place

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from dualwrite.clock import Deadline
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values__protocol_rows import StateRow
    from dualwrite.stores.sql.dialect import Dialect
    from dualwrite.stores.sql.tables import Tables
    from dualwrite.testing.memory.failures__testing_memory_planted import Planted
    from dualwrite.testing.memory.lane import MemoryLane


class SQLiteInMemory(SQLite):
    """SQLite for tests: also in memory, and without the library's tables."""

    def _check_settings(self, connection: Connection, tables: Tables) -> None:
        del connection, tables

    def _lock_by_write(self, connection: Connection, tables: Tables) -> None:
        del connection, tables

    def identity(self, connection: Connection, tables: Tables) -> Identity:
        """Databases in memory have no file: those of one pool are the same."""
        found = super().identity(connection, tables)
        return found if any(found.database) else Identity((id(connection.engine.pool),), None)


def is_shared(engine: Engine) -> bool:
    """Whether all connections of the engine are one, so that only one dual write can use it at a time."""
    return isinstance(engine.pool, StaticPool)


def dialect_for_tests(engine: Engine) -> Dialect:
    """The adapter for the engine's database.

    Raises:
        ConfigurationError: The database or driver is not supported.
    """
    return SQLiteInMemory() if engine.dialect.name == "sqlite" else dialect_of(engine)


class MemoryStore:
    """The dual writes' calls of :class:`dualwrite.interfaces.StateStore`, for one lane: the decision is kept in memory.

    Args:
        engine: The user's engine.
        dialect: The adapter for its database.
        planted: The planted failures.
        lane: The lane, which knows the current transaction.
    """

    def __init__(self, engine: Engine, dialect: Dialect, planted: Planted, lane: MemoryLane) -> None:
        self._engine = engine
        self._dialect = dialect
        self._planted = planted
        self._lane = lane
        self._tables = declare_tables(None)
        own = ShortTransactions(engine, dialect, self._tables)
        self._same_database = SameDatabase(engine, dialect, self._tables, own)

    def check_same_database(self, connection: Connection) -> None:
        """See the port."""
        refuse_transaction(connection)
        self._same_database.check(connection)

    def begin(self, connection: Connection) -> None:
        """See the port."""
        refuse_transaction(connection)
        self._planted.reach(Place.BEGIN)
        with self._mapped():
            try:
                self._dialect.begin(connection, self._tables)
            except BaseException:
                if connection.in_transaction():
                    dialect__stores_sql_dialects_committing.rollback(connection)
                raise
            dialect__stores_sql_dialects_committing.refuse_commits(connection, keep(connection))

    def watch_savepoints(self, connection: Connection, transactional_id: str) -> SavepointWatch:
        """See the port."""
        return SavepointWatch(connection, self._dialect, transactional_id)

    def read_incarnation(
        self,
        connection: Connection,
        transactional_id: str,
        *,
        namespace: str | None = None,
        known: StateRow | None = None,
    ) -> int:
        """See the port. Another owner has raised it if a planted failure has fenced the writer."""
        del namespace, known
        with self._mapped(transactional_id):
            _, *values = connection.execute(select(literal_column("1"), *self._dialect.start_columns())).one()
        self._dialect.check_start(connection, values)
        return self._lane.row.incarnation + self._planted.fenced

    def decide(
        self, connection: Connection, transactional_id: str, incarnation: int, state: PreparedTxnState, **limits: Any
    ) -> tuple[bool, str | None]:
        """See the port."""
        del state
        return self.hold(connection, transactional_id, incarnation, **limits)

    def hold(
        self, connection: Connection, transactional_id: str, incarnation: int, **limits: Any
    ) -> tuple[bool, str | None]:
        """See the port."""
        del incarnation, limits
        self._planted.reach(Place.DECIDE)
        with self._mapped(transactional_id):
            statement = select(*self._dialect.end_columns()).where(*self._dialect.is_begun())
            found = connection.execute(statement, self._dialect.begun(connection)).one_or_none()
            if found is None:
                self._dialect.require_begun(connection)
                return False, None
            return True, self._dialect.check_end(connection, tuple(found))

    def run_deferred(self, connection: Connection, transactional_id: str | None = None) -> None:
        """See the port."""
        dialect__stores_sql_dialects_committing.run_deferred(connection, self._dialect, transactional_id)

    def commit(self, connection: Connection, *, answer_s: float | None = None) -> None:
        """See the port."""
        failure = self._planted.take(Place.COMMIT)
        if failure is not None and (isinstance(failure.error, TransactionAborted) or not failure.rows_committed):
            self.rollback(connection)
            raise failure.error
        try:
            self._commit(connection, answer_s)
        finally:
            let_go(connection)
        self._lane.note_rows_committed()
        if failure is not None:
            raise failure.error

    def _commit(self, connection: Connection, answer_s: float | None) -> None:
        dialect__stores_sql_dialects_committing.commit(
            connection, self._dialect, self._lane.transactional_id, answer_s=answer_s
        )

    def rollback(self, connection: Connection) -> None:
        """See the port."""
        dialect__stores_sql_dialects_committing.rollback(connection)
        let_go(connection)

    def discard(self, connection: Connection) -> None:
        """Roll back. The driver's connection stays: a database in memory would be gone with it."""
        self.rollback(connection)

    def read_locked(self, transactional_id: str, deadline: Deadline) -> StateRow:
        """See the port. Asked for only after a COMMIT in doubt, which stays so.

        Raises:
            DualWriteError: Always.
        """
        del deadline
        raise DualWriteError("the database does not say how the COMMIT ended", transactional_id=transactional_id)

    def note_told(self, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
        """See the port. There is no table of incidents."""
        del losses

    @contextmanager
    def _mapped(self, transactional_id: str | None = None) -> Generator[None, None, None]:
        try:
            yield
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self._engine, transactional_id=transactional_id) from error


class JoinedMemoryStore(MemoryStore):
    """As :class:`dualwrite.stores.sql.database__stores_sql_joined.JoinedStore`: other code begins and ends the transactions."""

    def check_same_database(self, connection: Connection) -> None:
        """See the port. The transaction continues."""
        self._same_database.check(connection)

    def begin(self, connection: Connection) -> None:
        """Join the transaction."""
        self._planted.reach(Place.BEGIN)
        with self._mapped():
            joined_late = self._dialect.join(connection, self._tables)
        keep(connection, joined_late=joined_late)

    def _commit(self, connection: Connection, answer_s: float | None) -> None:
        name = self._lane.transactional_id
        dialect__stores_sql_dialects_committing.commit(connection, self._dialect, name, answer_s=answer_s, joined=True)

    def rollback(self, connection: Connection) -> None:
        """See the port."""
        dialect__stores_sql_dialects_committing.rollback_joined(connection)
        let_go(connection)
