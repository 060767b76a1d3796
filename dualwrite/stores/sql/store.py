"""``SqlStateStore``: the rows of writers in the user's SQL database: claims, decisions, records of what was settled.

A decision is one UPDATE in the user's own transaction. Everything else happens in short transactions of the library's
own, with a bound on how long each waits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import Integer, String, bindparam, exc, func, literal, null, or_, select, tuple_, update

from dualwrite.errors import ConfigurationError, DualWriteError, IllegalStateError
from dualwrite.interfaces import PAUSED_OWNER_TIMEOUT_S
from dualwrite.protocol.process import DatabaseVerdict
from dualwrite.protocol.values import Decision, Incident, OutboxMode, Outcome, Participant, cluster_text, parse_cluster
from dualwrite.stores.sql import dialect, drivers, savepoints
from dualwrite.stores.sql.access import begin_on, begun_on, engine_of, keep, let_go, map_database_error
from dualwrite.stores.sql.drivers import CompiledOnce, roll_back_before_closing
from dualwrite.stores.sql.short_transactions import LOCK_TIMEOUT_S, SameDatabase, ShortTransactions, dialect_of
from dualwrite.stores.sql.tables import (
    check_claimed,
    check_decidable,
    check_guard,
    check_name,
    check_not_gone_back,
    database_now,
    declare_tables,
    digest,
    in_chunks,
    parse_rows,
    read_rows,
    row_columns,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, Row, Select, Update

    from dualwrite.clock import Deadline
    from dualwrite.interfaces import DecisionWithCommit
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values import StateRow
    from dualwrite.stores.sql.dialect import Dialect
    from dualwrite.stores.sql.outbox import SqlOutbox
    from dualwrite.stores.sql.tables import Tables
    from dualwrite.stores.sql.waiting_rows import Put

Result = TypeVar("Result")
_ANSWER_S: Final = 2.0


class SqlStateStore:
    """The rows in the user's database: PostgreSQL, MariaDB, MySQL or SQLite.

    Implements :class:`dualwrite.interfaces.StateStore`. Methods that take a connection run inside the caller's transaction.
    The others run in short transactions of their own, on other connections of the engine, at READ COMMITTED, and are retried
    after a conflict. Thread-safe.

    PgBouncer works with ``pool_mode=transaction``; give psycopg ``prepare_threshold=None`` then, unless PgBouncer itself
    handles prepared statements. ``pool_mode=statement`` cannot hold a transaction and is refused, by PgBouncer at the latest.

    On PostgreSQL and MariaDB, a dual write may go ``paused_owner_timeout_s`` without a statement before the server ends its
    session: a paused owner (SIGSTOP, a frozen virtual machine) must not hold its locks forever. A lower limit of the session
    stays; None sets no limit. A claim waits ``lock_timeout_s`` for the lock of a row that a dying session still holds; on
    SQLite the driver's ``timeout`` applies instead.
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
        self._with_commit = self._dialect.with_commit(self._decisions.update, self._decisions.bound, self._as_ours)
        self._outbox: SqlOutbox | None = None

    @property
    def outbox(self) -> SqlOutbox:
        """The messages that wait. Tables of the version before have none: then the first use of it fails."""
        if self._outbox is None:
            from dualwrite.stores.sql.outbox import SqlOutbox  # noqa: PLC0415 - loaded where messages wait

            self._outbox = SqlOutbox(self._engine, self._tables, self._dialect, self._decisions, self._own)
        return self._outbox

    def outbox_mode(self, writer: str) -> OutboxMode:
        return self._own.read(partial(self._decisions.mode_of, writer=writer))

    @property
    def with_commit(self) -> DecisionWithCommit | None:
        """Only through psycopg."""
        return self._with_commit

    @property
    def engine(self) -> Engine:
        """The engine that the store's own transactions use."""
        return self._engine

    @property
    def schema(self) -> str | None:
        return self._schema

    def close(self) -> None:
        """Dispose of the engine if the store made it. Idempotent."""
        if self._owns_engine:
            self._engine.dispose()

    # Inside the caller's transaction

    def check_same_database(self, connection: Connection) -> None:
        refuse_transaction(connection)
        self._same_database.check(connection)

    def begin(self, connection: Connection) -> None:
        refuse_transaction(connection)
        try:
            begin_on(connection, partial(self._dialect.begin, tables=self._tables))
        except BaseException as error:
            if connection.in_transaction():  # otherwise the transaction was begun below SQLAlchemy, and is not ours
                dialect.rollback(connection)
                self._dialect.restore(connection)
            if isinstance(error, exc.SQLAlchemyError):
                raise self._as_ours(error) from error
            raise
        keep(connection).refuses = True
        if connection.engine is not self._engine:
            dialect.LISTENERS.require(connection)

    @staticmethod
    def _decided(connection: Connection) -> str | None:
        """The id whose decision the transaction holds, if it is that of one."""
        begun = begun_on(connection)
        return begun.decided[0] if begun is not None and len(begun.decided) == 1 else None

    def watch_savepoints(self, connection: Connection, transactional_id: str) -> savepoints.SavepointWatch:
        return savepoints.SavepointWatch(connection, self._dialect, transactional_id)

    def read_incarnation(
        self,
        connection: Connection,
        transactional_id: str,
        *,
        namespace: str | None = None,
        known: StateRow | None = None,
    ) -> int | None:
        try:
            bound = {"id_": transactional_id, "namespace_": namespace}
            incarnation, prepared, *values = self._dialect.read_first(connection, self._decisions.start, bound)
        except exc.SQLAlchemyError as error:
            raise self._as_ours(error, transactional_id) from error
        self._dialect.check_start(connection, values)
        if incarnation is not None and known is not None:
            check_not_gone_back(known, int(incarnation), prepared)
        return None if incarnation is None else int(incarnation)

    def decide(self, connection: Connection, decision: Decision) -> tuple[bool, str | None]:
        text = check_decidable(decision)
        try:
            with self._dialect.bounded(connection, decision.answer_s):
                row = self._decisions.decide(connection, decision, text)
                return self._decisions.ended(connection, decision.transactional_id, row)
        except exc.SQLAlchemyError as error:
            raise self._as_ours(error, decision.transactional_id) from error

    def hold(self, connection: Connection, decision: Decision) -> tuple[bool, str | None]:
        try:
            with self._dialect.bounded(connection, decision.answer_s):
                row = self._decisions.hold(connection, decision)
                return self._decisions.ended(connection, decision.transactional_id, row)
        except exc.SQLAlchemyError as error:
            raise self._as_ours(error, decision.transactional_id) from error

    def run_deferred(self, connection: Connection, transactional_id: str | None = None) -> None:
        dialect.run_deferred(connection, self._dialect, transactional_id)

    def commit(self, connection: Connection, *, answer_s: float | None = None) -> None:
        try:
            dialect.commit(connection, self._dialect, self._decided(connection), answer_s=answer_s)
        finally:
            let_go(connection)
            self._dialect.restore(connection)

    def prepare(
        self, connection: Connection, row: StateRow, state: PreparedTxnState, *, answer_s: float | None = None
    ) -> None:
        name = drivers.name_of(row.namespace, state)
        try:
            dialect.commit(connection, self._dialect, row.transactional_id, prepare_as=name, answer_s=answer_s)
        finally:
            let_go(connection)

    def rollback(self, connection: Connection) -> None:
        dialect.rollback(connection)
        let_go(connection)
        self._dialect.restore(connection)

    def discard(self, connection: Connection) -> None:
        dialect.discard(connection)
        let_go(connection)

    def _as_ours(self, error: exc.SQLAlchemyError, transactional_id: str | None = None) -> DualWriteError:
        return map_database_error(error, self._engine, self._schema, transactional_id=transactional_id)

    # In transactions of our own

    def own_transaction(
        self, work: Callable[[Connection], Result], *, lock_timeout_s: float | None = None, light: bool = False
    ) -> Result:
        """Run work in a short transaction, perhaps more than once. Durable on return; any exception rolls it back.

        ``light`` as for :meth:`ShortTransactions.run`.
        """
        return self._own.run(work, lock_timeout_s=lock_timeout_s, light=light)

    def claim(
        self,
        transactional_ids: Sequence[str],
        *,
        owner: str,
        cluster_id: str | None,
        guard: tuple[str, int] | None = None,
        verify: Callable[[Sequence[StateRow]], None] | None = None,
        raise_to: Mapping[str, int] | None = None,
    ) -> Sequence[StateRow]:
        """A retry after a conflict calls ``verify`` again."""
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
                return claim.verified(connection, rows)
            return rows

        return self._own.run(work) if ids else []

    def read(self, transactional_ids: Sequence[str]) -> Sequence[StateRow]:
        ids = sorted(set(transactional_ids))
        checks = self._dialect.own_checks()
        rows: Sequence[StateRow] = ()
        if checks and len(list(in_chunks(ids))) == 1:
            state = self._tables.state
            statement = select(*row_columns(self._tables), *checks).where(state.c.transactional_id.in_(ids))

            def work(connection: Connection) -> Sequence[StateRow]:
                found = connection.execute(statement).mappings().all()
                for row in found[:1]:
                    self._dialect.check_own(list(row.values())[len(row) - len(checks) :])
                return parse_rows(state.fullname, found)

            rows = self._own.read(work, light=True)
        # Without a row nothing was checked either.
        return rows or self._own.read(partial(read_rows, self._tables, ids))

    def read_in(self, connection: Connection, transactional_ids: Collection[str]) -> Sequence[StateRow]:
        """:meth:`read` inside the caller's transaction."""
        return read_rows(self._tables, sorted(transactional_ids), connection)

    def read_locked(self, transactional_id: str, deadline: Deadline) -> StateRow:
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
        state = self._tables.state
        statement = self._of_prefix(prefix)
        return self._own.read(
            lambda connection: parse_rows(state.fullname, connection.execute(statement).mappings().all())
        )

    def _of_prefix(self, prefix: str) -> Select[Any]:
        return select(*row_columns(self._tables)).where(
            self._dialect.begins_with(self._tables.state.c.transactional_id, prefix)
        )

    def record_outcomes(
        self, outcomes: Sequence[tuple[StateRow, Outcome, str]], connection: Connection | None = None
    ) -> None:
        """Perhaps in the caller's transaction."""
        if outcomes and connection is not None:
            self._records.record(connection, outcomes)
        elif len(outcomes) == 1 and outcomes[0][1] is Outcome.COMMITTED:
            self._own.run_one(lambda own: own.execute(self._records.completing(outcomes)))
        elif outcomes:
            self._own.run(lambda own: self._records.record(own, outcomes))

    def completing(self, row: StateRow, detail: str) -> Update:
        """:meth:`record_outcomes` for one transaction that Kafka has committed, as a statement to go with another one."""
        return self._records.completing([(row, Outcome.COMMITTED, detail)])

    def mark_settled(self, incarnations: Mapping[str, int]) -> None:
        if incarnations:
            self._own.run(lambda connection: self._records.mark_settled(connection, incarnations))

    def raise_fence(self, row: StateRow, fence: int) -> bool:
        return self._own.run(lambda connection: self._records.raise_fence(connection, row, fence))

    def participants(self, rows: Collection[StateRow]) -> Sequence[Participant]:
        """There are none except on PostgreSQL."""
        return _participants(rows, self._own.read(self._dialect.prepared_transactions) if rows else [])

    def find_with_participants(
        self, prefix: str, connection: Connection | None = None
    ) -> tuple[Sequence[StateRow], Sequence[Participant]]:
        """:meth:`find`, and then :meth:`participants` of the rows found; perhaps in the caller's transaction."""
        state = self._tables.state
        statement = self._of_prefix(prefix)

        def work(connection: Connection) -> tuple[Sequence[StateRow], Sequence[Participant]]:
            rows = parse_rows(state.fullname, connection.execute(statement).mappings().all())
            return rows, _participants(rows, self._dialect.prepared_transactions(connection) if rows else [])

        return self._own.read(work) if connection is None else work(connection)

    def end_participant(self, participant: Participant, *, committed: bool) -> None:
        try:
            drivers.end(self._engine, participant.name, committed=committed)
        except exc.SQLAlchemyError as error:
            raise self._as_ours(error, participant.row.transactional_id) from error

    def incident(self, transactional_id: str, state: PreparedTxnState) -> Outcome | None:
        return self._own.read(lambda connection: self._records.incident(connection, transactional_id, state))

    def incidents(
        self, prefix: str = "", *, acknowledged: bool = False, connection: Connection | None = None
    ) -> Sequence[Incident]:
        """Perhaps in the caller's transaction."""

        def work(own: Connection) -> Sequence[Incident]:
            return self._records.incidents(own, prefix, acknowledged=acknowledged)

        return self._own.read(work) if connection is None else work(connection)

    def incidents_of(self, transactional_ids: Collection[str]) -> Sequence[Incident]:
        return self._own.read(lambda connection: self._records.incidents_of(connection, transactional_ids))

    def note_reported(self, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
        if losses:
            self._own.run(lambda connection: self._records.note_reported(connection, losses))

    def acknowledge(self, transactional_id: str, state: PreparedTxnState) -> bool:
        done: list[bool] = []  # also by a run before the last one, whose COMMIT was not answered
        self._own.run(lambda own: done.append(self._records.acknowledge(own, transactional_id, state)))
        return any(done)

    def transaction_verdict(self, transaction: str | None) -> DatabaseVerdict:
        """``UNKNOWN`` except on PostgreSQL; there, too, while it runs, if it is too old, and after a failover or restart."""
        if transaction is None:
            return DatabaseVerdict.UNKNOWN
        return self._own.read(lambda connection: self._dialect.verdict(connection, transaction))


def _outcome_of(item: tuple[StateRow, Outcome, str]) -> str:
    return item[1].value


def _participants(rows: Collection[StateRow], prepared: Iterable[tuple[str, datetime]]) -> Sequence[Participant]:
    """Those of the transactions prepared in the database that belong to one of the rows."""
    by_namespace = {row.namespace: row for row in rows}
    return [
        Participant(
            row,
            incarnation,
            name=name,
            decided=name == drivers.name_of(namespace, row.prepared),
            prepared_at=prepared_at,
        )
        for name, prepared_at in prepared
        if (parsed := drivers.parse(name)) is not None
        for namespace, incarnation in [parsed]
        if (row := by_namespace.get(namespace)) is not None
    ]


def listen_to(engine: Engine) -> None:
    """Let the library notice what happens on the engine's connections. Call it before others use them; may be repeated."""
    roll_back_before_closing(engine)
    dialect.LISTENERS.expect(engine)
    if engine.dialect.name == "sqlite":  # its driver shows no statements
        savepoints.LISTENERS.expect(engine)


def refuse_transaction(connection: Connection) -> None:
    """Refuse a connection that is in a transaction already."""
    if connection.in_transaction():
        raise IllegalStateError(
            "the connection is already in a transaction",
            next_step="end it first (SQLAlchemy begins one with the first statement, also with a SELECT)",
        )


# The SQL of the records made after a decision: outcomes, incidents, settled incarnations.


class Records:
    """Outcomes and incidents, written inside the caller's transaction.

    Writes rows in order of id, so that two settlers cannot deadlock.
    """

    def __init__(self, tables: Tables, dialect: Dialect) -> None:
        self._dialect = dialect
        self._state = state = tables.state
        self._incident = tables.incident
        self._settle = (
            update(state)
            .where(state.c.transactional_id == bindparam("id_"), state.c.settled_incarnation < bindparam("mark_"))
            .values(settled_incarnation=bindparam("mark_"), updated_at=database_now())
        )
        self._fence = (
            update(state)
            .where(
                state.c.transactional_id == bindparam("id_"),
                state.c.namespace == bindparam("namespace_"),
                state.c.prepared_transaction_state == bindparam("state_"),
                state.c.settle_fence.is_not_distinct_from(bindparam("known_", type_=Integer())),
            )
            .values(settle_fence=bindparam("fence_"), updated_at=database_now())
        )

    def record(self, connection: Connection, outcomes: Sequence[tuple[StateRow, Outcome, str]]) -> None:
        """Write each outcome into its row, if the row still holds that state without an outcome; record the losses."""
        ordered = sorted(outcomes, key=lambda item: item[0].transactional_id)
        for _, alike in groupby(sorted(ordered, key=_outcome_of), key=_outcome_of):
            for some in in_chunks(list(alike)):
                connection.execute(self.completing(some))
        for row, outcome, detail in ordered:
            if outcome is not Outcome.COMMITTED and self._is_news(connection, row, outcome):
                self._note(connection, row, outcome, detail)

    def completing(self, outcomes: Sequence[tuple[StateRow, Outcome, str]]) -> Update:
        """The statement that writes outcomes, which are all the same, into those of the rows that have none yet."""
        state = self._state
        known = [(row.transactional_id, str(row.prepared)) for row, _, _ in outcomes]
        chosen = tuple_(state.c.transactional_id, state.c.prepared_transaction_state).in_(known)
        statement = update(state).where(chosen, state.c.completed.is_(None))
        if len(known) > 1 and self._dialect.name == "postgresql":  # InnoDB locks in the order of the key
            locked = select(state.c.transactional_id).where(chosen).order_by(state.c.transactional_id)
            statement = statement.where(state.c.transactional_id.in_(select(locked.with_for_update().cte("locked"))))
        return statement.values(completed=outcomes[0][1].value, updated_at=database_now())

    def _is_news(self, connection: Connection, row: StateRow, outcome: Outcome) -> bool:
        """Whether to record an incident: not for UNVERIFIABLE if a settler that saw more of the log knew better."""
        if outcome is Outcome.LOST:
            return True
        state = self._state
        better = connection.scalar(
            select(func.count()).where(
                state.c.transactional_id == row.transactional_id,
                state.c.prepared_transaction_state == str(row.prepared),
                state.c.completed != outcome.value,
            )
        )
        return not better

    def _note(self, connection: Connection, row: StateRow, outcome: Outcome, detail: str) -> None:
        connection.execute(
            self._dialect.insert_if_missing(self._incident),
            {
                "transactional_id": row.transactional_id,
                "state_sha256": digest(row.prepared),
                "prepared_transaction_state": str(row.prepared),
                "outcome": outcome.value,
                "detail": detail.replace("\x00", "?"),
            },
        )

    def mark_settled(self, connection: Connection, incarnations: Mapping[str, int]) -> None:
        """Raise the settled incarnation of each id; never lower it."""
        marks = [
            {"id_": transactional_id, "mark_": incarnations[transactional_id]}
            for transactional_id in sorted(incarnations)
        ]
        connection.execute(self._settle, marks)

    def raise_fence(self, connection: Connection, row: StateRow, fence: int) -> bool:
        """Set the fence of the row's transaction, if the row is as it was read."""
        values = {
            "id_": row.transactional_id,
            "namespace_": row.namespace,
            "state_": str(row.prepared),
            "known_": row.settle_fence,
            "fence_": fence,
        }
        return connection.execute(self._fence, values).rowcount == 1

    def incident(self, connection: Connection, transactional_id: str, state: PreparedTxnState) -> Outcome | None:
        """The outcome recorded in that state's incident; None if there is none."""
        incident = self._incident
        found = connection.scalar(
            select(incident.c.outcome).where(
                incident.c.transactional_id == transactional_id, incident.c.state_sha256 == digest(state)
            )
        )
        return None if found is None else Outcome(found)

    def incidents(self, connection: Connection, prefix: str, *, acknowledged: bool) -> Sequence[Incident]:
        """The incidents of ids with that prefix, oldest first."""
        statement = self._incidents().where(self._dialect.begins_with(self._incident.c.transactional_id, prefix))
        if not acknowledged:
            statement = statement.where(self._incident.c.acknowledged_at.is_(None))
        return _by_age(connection.execute(statement).all())

    def incidents_of(self, connection: Connection, ids: Collection[str]) -> Sequence[Incident]:
        """All incidents of these ids, oldest first."""
        name = self._incident.c.transactional_id
        return _by_age(
            row
            for chunk in in_chunks(sorted(ids))
            for row in connection.execute(self._incidents().where(name.in_(chunk)))
        )

    def _incidents(self) -> Select[Any]:
        incident = self._incident
        return select(
            incident.c.transactional_id,
            incident.c.prepared_transaction_state,
            incident.c.outcome,
            incident.c.detail,
            incident.c.detected_at,
            incident.c.acknowledged_at,
            incident.c.reported_at,
        )

    def note_reported(self, connection: Connection, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
        """Record that these losses are now reported to a caller, unless they already were."""
        incident = self._incident
        keys = sorted((transactional_id, digest(state)) for transactional_id, state in losses)
        for transactional_id, key in keys:
            connection.execute(
                update(incident)
                .where(
                    incident.c.transactional_id == transactional_id,
                    incident.c.state_sha256 == key,
                    incident.c.reported_at.is_(None),
                )
                .values(reported_at=database_now())
            )

    def acknowledge(self, connection: Connection, transactional_id: str, state: PreparedTxnState) -> bool:
        """Record that a person has looked at the incident. Returns whether there was one to acknowledge."""
        incident = self._incident
        result = connection.execute(
            update(incident)
            .where(
                incident.c.transactional_id == transactional_id,
                incident.c.state_sha256 == digest(state),
                incident.c.acknowledged_at.is_(None),
            )
            .values(acknowledged_at=database_now())
        )
        return result.rowcount > 0


def _by_age(rows: Iterable[Row[Any]]) -> Sequence[Incident]:
    found = [
        Incident(
            row.transactional_id,
            row.prepared_transaction_state,
            Outcome(row.outcome),
            row.detail,
            row.detected_at,
            row.acknowledged_at,
            row.reported_at,
        )
        for row in rows
    ]
    return sorted(found, key=lambda item: (item.detected_at, item.transactional_id))


# The SQL of a claim: one short transaction, all rows or none.


class Claim:
    """One claim, which raises some ids to a least incarnation. Run it inside a transaction at READ COMMITTED."""

    def __init__(
        self, tables: Tables, dialect: Dialect, *, owner: str, cluster_id: str | None, raise_to: Mapping[str, int]
    ) -> None:
        self._tables = tables
        self._state = tables.state
        self._dialect = dialect
        self._owner = owner
        self._cluster_id = cluster_id
        self._raise_to = raise_to

    def check_guard(self, connection: Connection, transactional_id: str, incarnation: int, *, claimed: bool) -> None:
        """Lock the guard's row until the claim has committed, provided that our owner still holds it.

        A claim that includes the guard takes the stronger lock at once: two that hold the weaker one and want the stronger
        would deadlock. ``incarnation`` is that of our newest known claim.
        """
        state = self._state
        shown = select(state.c.incarnation, state.c.owner, state.c.cluster_id)
        statement = shown.where(state.c.transactional_id == transactional_id).with_for_update(read=not claimed)
        row = connection.execute(statement).one_or_none()
        found = None if row is None else (row.incarnation, row.owner, parse_cluster(row.cluster_id)[0])
        check_guard(found, transactional_id, self._owner, incarnation, self._cluster_id)

    def run(self, connection: Connection, ids: Sequence[str]) -> Sequence[StateRow]:
        """Insert missing rows, raise all incarnations, and return the rows in order of id. If it raises, roll back."""
        for chunk in in_chunks(ids):
            self._lock_or_insert(connection, chunk)
            self._raise(connection, chunk)
        # Read only after taking the locks: a newer decision may have replaced a state that was read earlier.
        rows = read_rows(self._tables, ids, connection)
        for row in rows:
            check_claimed(row, self._cluster_id, self._state.fullname)
        if self._cluster_id is not None:
            return rows
        return [
            row
            if row.unverified_from is not None
            else self._name_cluster(connection, replace(row, unverified_from=row.incarnation))
            for row in rows
        ]

    def verified(self, connection: Connection, rows: Sequence[StateRow]) -> Sequence[StateRow]:
        """Note in rows that were claimed while Kafka was away that all has been compared with it now."""
        cluster_id = self._cluster_id
        if cluster_id is None:
            return rows
        return [
            row
            if row.unverified_from is None
            else self._name_cluster(connection, replace(row, cluster_id=cluster_id, unverified_from=None))
            for row in rows
        ]

    def _name_cluster(self, connection: Connection, row: StateRow) -> StateRow:
        state = self._state
        connection.execute(
            update(state)
            .where(state.c.transactional_id == row.transactional_id)
            .values(cluster_id=cluster_text(row.cluster_id, row.unverified_from))
        )
        return row

    def _lock_or_insert(self, connection: Connection, ids: Sequence[str]) -> None:
        state = self._state
        # Lock in a fixed order, so that two claims of the same ids cannot deadlock.
        present = select(state.c.transactional_id).where(state.c.transactional_id.in_(ids))
        locked = set(connection.scalars(present.order_by(state.c.transactional_id).with_for_update()))
        new = [
            {
                "transactional_id": transactional_id,
                "namespace": secrets.token_hex(6),
                "incarnation": 0,
                "settled_incarnation": 0,
                "cluster_id": self._cluster_id or cluster_text("", 1),
                "owner": self._owner,
            }
            for transactional_id in ids
            if transactional_id not in locked
        ]
        if new:
            connection.execute(self._dialect.insert_if_missing(state), new)

    def _raise(self, connection: Connection, ids: Sequence[str]) -> None:
        state = self._state
        connection.execute(
            update(state)
            .where(state.c.transactional_id.in_(ids))
            .values(incarnation=state.c.incarnation + 1, owner=self._owner, updated_at=database_now())
        )
        for transactional_id in sorted(self._raise_to.keys() & set(ids)):
            at_least = self._raise_to[transactional_id]
            connection.execute(
                update(state)
                .where(state.c.transactional_id == transactional_id, state.c.incarnation < at_least)
                .values(incarnation=at_least)
            )


# The SQL of a dual write's own statements: the row read at its beginning, and the decision at its end.


def mode_in(row: Sequence[Any] | None) -> OutboxMode:
    """The mode of an outbox in the first column of its row: direct, where there is none."""
    return OutboxMode.DIRECT if row is None or row[0] is None else OutboxMode(row[0])


class Decisions:
    """Decides a row inside the caller's transaction. The statements are made once: each dual write runs two."""

    def __init__(self, tables: Tables, dialect: Dialect) -> None:
        self._dialect = dialect
        state = tables.state
        namespace = bindparam("namespace_", type_=String())
        is_row = (
            state.c.transactional_id == bindparam("id_"),
            or_(namespace.is_(None), state.c.namespace == namespace),
        )
        # In the statement itself: if the transaction was ended unseen, the statement stands alone and must match nothing.
        is_ours = (*is_row, state.c.incarnation == bindparam("incarnation_"), *dialect.is_begun())
        incarnation = select(state.c.incarnation).where(*is_row).scalar_subquery()
        prepared = select(state.c.prepared_transaction_state).where(*is_row).scalar_subquery()
        start = (incarnation, prepared, *dialect.start_columns())
        self.start: Final = CompiledOnce(select(*start))
        mode = select(tables.mode.c.mode).where(tables.mode.c.writer == bindparam("writer_"))
        self._mode = CompiledOnce(mode)
        decisions = select(state.c.outbox_decisions).where(*is_row).scalar_subquery()
        self.start_waiting: Final = CompiledOnce(select(mode.scalar_subquery(), decisions, *start))
        named = {"prepared_transaction_state": bindparam("state_"), "completed": null(), "settle_fence": null()}
        limits: dict[str, Any] = {name: bindparam(f"{name}_", type_=Integer()) for name in ("idle_ms", "within_ms")}
        self.update: Final = update(state).where(*is_ours).values(**named, updated_at=database_now())
        self._decide = CompiledOnce(dialect.deciding(self.update, **limits))
        # The state stays: a transaction that was decided before may still be pending in Kafka.
        counted = update(state).where(*is_ours).values(outbox_decisions=bindparam("waits_"), updated_at=database_now())
        # No transaction of Kafka's must end with it in time: the limits of the first statement are enough.
        self._wait = CompiledOnce(dialect.deciding(counted))
        hold = select(*dialect.end_columns()).select_from(state).where(*is_ours).with_for_update(read=True)
        self._hold = CompiledOnce(hold)

    def mode_of(self, connection: Connection, writer: str) -> OutboxMode:
        """The mode of the writer's outbox as it is now, not locked."""
        row, _ = self._mode.execute(connection, {"writer_": writer})
        return mode_in(row)

    def bound(self, connection: Connection, decision: Decision) -> dict[str, Any]:
        """The values by which the last statement finds the row, and only in the transaction that was begun."""
        return {
            "id_": decision.transactional_id,
            "incarnation_": decision.incarnation,
            "namespace_": decision.namespace,
            **self._dialect.begun(connection),
        }

    def decide(
        self, connection: Connection, decision: Decision, text: str | None, put: Put | None = None
    ) -> Sequence[Any] | None:
        """Write the prepared state, as text, into the row; or raise its count, and put messages after that.

        Returns the dialect's end columns; None if the row is no longer ours, or the transaction is not the one that was begun.
        """
        bound = self.bound(connection, decision)
        if put is None:
            idle_s, within_s = decision.idle_s, decision.within_s
            bound["idle_ms_"] = None if idle_s is None else max(1, int(idle_s * 1000))  # 0 would be no limit
            bound["within_ms_"] = None if within_s is None else max(1, int(within_s * 1000))
            bound["state_"], statement = text, self._decide
        else:
            bound["waits_"], statement = decision.waits, self._wait
        first = decision.transactional_id if decision.deferred else None
        return self._dialect.ask_last(connection, statement, bound, decides=True, deferred_of=first, put=put)

    def hold(self, connection: Connection, decision: Decision) -> Sequence[Any] | None:
        """Lock the row as it is. Returns as :meth:`decide`."""
        bound = self.bound(connection, decision)
        first = decision.transactional_id if decision.deferred else None
        return self._dialect.ask_last(connection, self._hold, bound, decides=False, deferred_of=first)

    def ended(
        self, connection: Connection, transactional_id: str, row: Sequence[Any] | None
    ) -> tuple[bool, str | None]:
        """Whether the last statement has found the row as it must be, and the database's name for the transaction."""
        if row is None:
            self._dialect.require_begun(connection)
            return False, None
        begun = begun_on(connection)
        if begun is not None:
            begun.decided.append(transactional_id)
        return True, self._dialect.check_end(connection, row)
