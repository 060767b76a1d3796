"""``SqlStateStore``: the state store over SQLAlchemy Core, in the user's own database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import exc, literal, select

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.interfaces__ports_database import PAUSED_OWNER_TIMEOUT_S
from dualwrite.protocol.process__protocol_settling_commit_in_doubt import DatabaseVerdict
from dualwrite.protocol.values__protocol_rows import Participant
from dualwrite.stores.sql import dialect__stores_sql_dialects_committing, drivers__stores_sql_participants, savepoints
from dualwrite.stores.sql.access import begin_on, begun_on, keep, let_go
from dualwrite.stores.sql.access__stores_sql_access_connecting import engine_of
from dualwrite.stores.sql.access__stores_sql_access_failures import map_database_error
from dualwrite.stores.sql.drivers__stores_sql_drivers_closing import roll_back_before_closing
from dualwrite.stores.sql.short_transactions import LOCK_TIMEOUT_S, ShortTransactions, dialect_of
from dualwrite.stores.sql.short_transactions__stores_sql_same_database import SameDatabase
from dualwrite.stores.sql.store__stores_sql_claims import Claim
from dualwrite.stores.sql.store__stores_sql_decisions import Decisions
from dualwrite.stores.sql.store__stores_sql_records import Records
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.stores.sql.tables__stores_sql_tables_rows import (
    check_decidable,
    check_name,
    check_not_gone_back,
    parse_rows,
    read_rows,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from dualwrite.clock import Deadline
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values import Outcome
    from dualwrite.protocol.values__protocol_rows import Incident, StateRow

Result = TypeVar("Result")
_ANSWER_S: Final = 2.0


class SqlStateStore:
    """The rows in the user's database: PostgreSQL, MariaDB, MySQL or SQLite.

    Implements :class:`dualwrite.interfaces.StateStore`. Methods that take a connection run inside the caller's
    transaction. The others run in short transactions of their own, on other connections of the engine, at READ COMMITTED,
    and are retried after a conflict. Thread-safe.

    PgBouncer works with ``pool_mode=transaction``; give psycopg ``prepare_threshold=None`` then, unless PgBouncer
    itself handles prepared statements. ``pool_mode=statement`` cannot hold a transaction and is refused, by PgBouncer
    at the latest.

    Args:
        engine: A SQLAlchemy engine, or a URL to make one from, which :meth:`close` then disposes of.
        schema: The database schema of the library's tables, if not the default one.
        paused_owner_timeout_s: On PostgreSQL, seconds that a dual write may go without a statement before the server
            ends its session: a paused owner (SIGSTOP, a frozen virtual machine) must not hold its locks forever. A
            lower limit of the session stays. None sets no limit.
        lock_timeout_s: Seconds that a claim waits for the lock of a row that a dying session still holds; on SQLite the
            driver's ``timeout`` applies instead.

    Raises:
        ConfigurationError: The engine's database or driver is not supported.
    """

    def __init__(
        self,
        engine: Engine | str,
        *,
        schema: str | None = None,
        paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        self._owns_engine = isinstance(engine, str)
        self._engine = engine_of(engine)
        listen_to(self._engine)
        self._schema = schema
        self._dialect = dialect_of(self._engine, paused_owner_timeout_s)
        self._tables = declare_tables(schema)
        self._own = ShortTransactions(self._engine, self._dialect, self._tables, lock_timeout_s)
        self._same_database = SameDatabase(self._engine, self._dialect, self._tables, self._own)
        self._records = Records(self._tables, self._dialect)
        self._decisions = Decisions(self._tables, self._dialect)

    @property
    def engine(self) -> Engine:
        """The engine that the store's own transactions use."""
        return self._engine

    @property
    def schema(self) -> str | None:
        """The database schema of the library's tables."""
        return self._schema

    def close(self) -> None:
        """Dispose of the engine if the store made it. Idempotent."""
        if self._owns_engine:
            self._engine.dispose()

    # Inside the caller's transaction

    def check_same_database(self, connection: Connection) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.check_same_database`."""
        refuse_transaction(connection)
        self._same_database.check(connection)

    def begin(self, connection: Connection) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.begin`."""
        refuse_transaction(connection)
        with self._mapped():
            try:
                begin_on(connection, lambda: self._dialect.begin(connection, self._tables))
            except BaseException:
                if connection.in_transaction():  # otherwise the transaction was begun below SQLAlchemy, and is not ours
                    dialect__stores_sql_dialects_committing.rollback(connection)
                    self._dialect.restore(connection)
                raise
            dialect__stores_sql_dialects_committing.refuse_commits(connection, keep(connection))

    @staticmethod
    def _decided(connection: Connection) -> str | None:
        """The id whose decision the transaction holds, if it is that of one."""
        begun = begun_on(connection)
        return begun.decided[0] if begun is not None and len(begun.decided) == 1 else None

    def watch_savepoints(self, connection: Connection, transactional_id: str) -> savepoints.SavepointWatch:
        """See :meth:`dualwrite.interfaces.StateStore.watch_savepoints`."""
        return savepoints.SavepointWatch(connection, self._dialect, transactional_id)

    def read_incarnation(
        self,
        connection: Connection,
        transactional_id: str,
        *,
        namespace: str | None = None,
        known: StateRow | None = None,
    ) -> int | None:
        """See :meth:`dualwrite.interfaces.StateStore.read_incarnation`."""
        with self._mapped(transactional_id):
            incarnation, prepared, *values = self._decisions.start(connection, transactional_id, namespace)
        self._dialect.check_start(connection, values)
        if incarnation is not None and known is not None:
            check_not_gone_back(known, int(incarnation), prepared)
        return None if incarnation is None else int(incarnation)

    def decide(
        self,
        connection: Connection,
        transactional_id: str,
        incarnation: int,
        state: PreparedTxnState,
        *,
        namespace: str | None = None,
        idle_s: float | None = None,
        within_s: float | None = None,
        answer_s: float | None = None,
        deferred: bool = False,
    ) -> tuple[bool, str | None]:
        """See :meth:`dualwrite.interfaces.StateStore.decide`."""
        text = check_decidable(transactional_id, incarnation, state)
        with self._last_statement(connection, transactional_id, answer_s):
            row = self._decisions.decide(
                connection,
                transactional_id,
                incarnation,
                text,
                namespace=namespace,
                idle_s=idle_s,
                within_s=within_s,
                deferred=deferred,
            )
            return self._ended(connection, transactional_id, row)

    def hold(
        self,
        connection: Connection,
        transactional_id: str,
        incarnation: int,
        *,
        namespace: str | None = None,
        answer_s: float | None = None,
        deferred: bool = False,
    ) -> tuple[bool, str | None]:
        """See :meth:`dualwrite.interfaces.StateStore.hold`."""
        with self._last_statement(connection, transactional_id, answer_s):
            row = self._decisions.hold(
                connection, transactional_id, incarnation, namespace=namespace, deferred=deferred
            )
            return self._ended(connection, transactional_id, row)

    @contextmanager
    def _last_statement(
        self, connection: Connection, transactional_id: str, answer_s: float | None
    ) -> Generator[None, None, None]:
        with self._mapped(transactional_id), self._dialect.bounded(connection, answer_s):
            yield

    def _ended(
        self, connection: Connection, transactional_id: str, row: Sequence[Any] | None
    ) -> tuple[bool, str | None]:
        if row is None:
            self._dialect.require_begun(connection)
            return False, None
        begun = begun_on(connection)
        if begun is not None:
            begun.decided.append(transactional_id)
        return True, self._dialect.check_end(connection, row)

    def run_deferred(self, connection: Connection, transactional_id: str | None = None) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.run_deferred`."""
        dialect__stores_sql_dialects_committing.run_deferred(connection, self._dialect, transactional_id)

    def commit(self, connection: Connection, *, answer_s: float | None = None) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.commit`."""
        try:
            dialect__stores_sql_dialects_committing.commit(
                connection, self._dialect, self._decided(connection), answer_s=answer_s
            )
        finally:
            let_go(connection)
            self._dialect.restore(connection)

    def prepare(
        self, connection: Connection, row: StateRow, state: PreparedTxnState, *, answer_s: float | None = None
    ) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.prepare`."""
        name = drivers__stores_sql_participants.name_of(row.namespace, state)
        try:
            dialect__stores_sql_dialects_committing.commit(
                connection, self._dialect, row.transactional_id, prepare_as=name, answer_s=answer_s
            )
        finally:
            let_go(connection)

    def rollback(self, connection: Connection) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.rollback`."""
        dialect__stores_sql_dialects_committing.rollback(connection)
        let_go(connection)
        self._dialect.restore(connection)

    def discard(self, connection: Connection) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.discard`."""
        dialect__stores_sql_dialects_committing.discard(connection)
        let_go(connection)

    @contextmanager
    def _mapped(self, transactional_id: str | None = None) -> Generator[None, None, None]:
        try:
            yield
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self._engine, self._schema, transactional_id=transactional_id) from error

    # In transactions of our own

    def claim(
        self,
        transactional_ids: Sequence[str],
        *,
        owner: str,
        cluster_id: str,
        guard: tuple[str, int] | None = None,
        verify: Callable[[Sequence[StateRow]], None] | None = None,
        raise_to: Mapping[str, int] | None = None,
    ) -> Sequence[StateRow]:
        """See :meth:`dualwrite.interfaces.StateStore.claim`. A retry after a conflict calls ``verify`` again."""
        ids = sorted({check_name(transactional_id) for transactional_id in transactional_ids})
        claim = Claim(self._tables, self._dialect, owner=owner, cluster_id=cluster_id, raise_to=raise_to or {})

        def work(connection: Connection) -> Sequence[StateRow]:
            if guard is not None:
                claim.check_guard(connection, *guard, claimed=guard[0] in ids)
            rows = claim.run(connection, ids)
            if verify is not None:
                try:
                    verify(rows)
                except ConfigurationError:
                    # The error counts only while the rows are ours. If the server ended our session (we were paused too
                    # long), another owner may have claimed, and verify saw that owner's state: then this raises.
                    connection.execute(select(literal(1)))
                    raise
            return rows

        return self._own.run(work) if ids else []

    def read(self, transactional_ids: Sequence[str]) -> Sequence[StateRow]:
        """See :meth:`dualwrite.interfaces.StateStore.read`."""
        return self._own.read(partial(read_rows, self._tables, sorted(set(transactional_ids))))

    def read_locked(self, transactional_id: str, deadline: Deadline) -> StateRow:
        """See :meth:`dualwrite.interfaces.StateStore.read_locked`."""
        # The server answers when the wait for the lock ends; if it does not, it counts as lost soon after.
        answer_s = deadline.remaining_s() + _ANSWER_S
        rows = self._locked([transactional_id], lambda rows: rows, deadline, answer_s=answer_s)
        if not rows:
            raise ConfigurationError(
                f"the row in {self._tables.state.fullname} is gone",
                transactional_id=transactional_id,
                next_step="restore it",
            )
        return rows[0]

    def while_locked(self, transactional_ids: Sequence[str], work: Callable[[], None], deadline: Deadline) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.while_locked`."""
        self._locked(transactional_ids, lambda _: work(), deadline)

    def _locked(
        self,
        transactional_ids: Sequence[str],
        work: Callable[[Sequence[StateRow]], Result],
        deadline: Deadline,
        *,
        answer_s: float | None = None,
    ) -> Result:
        ids = sorted(set(transactional_ids))
        return self._own.run(
            lambda connection: work(read_rows(self._tables, ids, connection, locked=True)),
            lock_timeout_s=deadline.remaining_s(),
            answer_s=answer_s,
        )

    def find(self, prefix: str) -> Sequence[StateRow]:
        """See :meth:`dualwrite.interfaces.StateStore.find`."""
        state = self._tables.state
        statement = select(state).where(self._dialect.begins_with(state.c.transactional_id, prefix))
        return self._own.read(
            lambda connection: parse_rows(state.fullname, connection.execute(statement).mappings().all())
        )

    def record_outcomes(self, outcomes: Sequence[tuple[StateRow, Outcome, str]]) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.record_outcomes`."""
        if outcomes:
            self._own.run(lambda connection: self._records.record(connection, outcomes))

    def mark_settled(self, incarnations: Mapping[str, int]) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.mark_settled`."""
        if incarnations:
            self._own.run(lambda connection: self._records.mark_settled(connection, incarnations))

    def raise_fence(self, row: StateRow, fence: int) -> bool:
        """See :meth:`dualwrite.interfaces.StateStore.raise_fence`."""
        return self._own.run(lambda connection: self._records.raise_fence(connection, row, fence))

    def participants(self, rows: Collection[StateRow]) -> Sequence[Participant]:
        """See :meth:`dualwrite.interfaces.StateStore.participants`. There are none on SQLite."""
        by_namespace = {row.namespace: row for row in rows}
        found = self._own.read(self._dialect.prepared_transactions) if by_namespace else []
        return [
            Participant(
                row,
                incarnation,
                name=name,
                decided=name == drivers__stores_sql_participants.name_of(namespace, row.prepared),
                prepared_at=prepared_at,
            )
            for name, prepared_at in found
            if (parsed := drivers__stores_sql_participants.parse(name)) is not None
            for namespace, incarnation in [parsed]
            if (row := by_namespace.get(namespace)) is not None
        ]

    def end_participant(self, participant: Participant, *, committed: bool) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.end_participant`."""
        with self._mapped(participant.row.transactional_id):
            drivers__stores_sql_participants.end(self._engine, participant.name, committed=committed)

    def incident(self, transactional_id: str, state: PreparedTxnState) -> Outcome | None:
        """See :meth:`dualwrite.interfaces.StateStore.incident`."""
        return self._own.read(lambda connection: self._records.incident(connection, transactional_id, state))

    def incidents(self, prefix: str = "", *, acknowledged: bool = False) -> Sequence[Incident]:
        """See :meth:`dualwrite.interfaces.StateStore.incidents`."""
        return self._own.read(lambda connection: self._records.incidents(connection, prefix, acknowledged=acknowledged))

    def incidents_of(self, transactional_ids: Collection[str]) -> Sequence[Incident]:
        """See :meth:`dualwrite.interfaces.StateStore.incidents_of`."""
        return self._own.read(lambda connection: self._records.incidents_of(connection, transactional_ids))

    def note_told(self, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.note_told`."""
        if losses:
            self._own.run(lambda connection: self._records.note_told(connection, losses))

    def acknowledge(self, transactional_id: str, state: PreparedTxnState) -> bool:
        """See :meth:`dualwrite.interfaces.StateStore.acknowledge`."""
        return self._own.run(lambda connection: self._records.acknowledge(connection, transactional_id, state))

    def transaction_verdict(self, transaction: str | None) -> DatabaseVerdict:
        """See :meth:`dualwrite.interfaces.StateStore.transaction_verdict`.

        ``UNKNOWN`` on SQLite, where only the row shows the outcome; on PostgreSQL for a transaction that is too old or
        still runs, and after a restart or failover of the server.
        """
        if transaction is None:
            return DatabaseVerdict.UNKNOWN
        return self._own.read(lambda connection: self._dialect.verdict(connection, transaction))


def listen_to(engine: Engine) -> None:
    """Have the library notice what happens on the engine's connections. Call it before others use them; may be repeated."""
    roll_back_before_closing(engine)
    dialect__stores_sql_dialects_committing.LISTENERS.expect(engine)
    if engine.dialect.name == "sqlite":  # its driver shows no statements
        savepoints.LISTENERS.expect(engine)


def refuse_transaction(connection: Connection) -> None:
    """Refuse a connection that is in a transaction already.

    Raises:
        IllegalStateError: It is.
    """
    if connection.in_transaction():
        raise IllegalStateError(
            "the connection is already in a transaction",
            next_step="end it first (SQLAlchemy begins one with the first statement, also with a SELECT)",
        )
