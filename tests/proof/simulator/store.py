"""The state store's port over the simulated database, for one process: each statement is a separate step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar, cast

from dualwrite.errors import (
    ConfigurationError,
    DualWriteError,
    Fenced,
    IllegalStateError,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.protocol.values import Decision, Incident, Outcome, Participant, StateRow, gone_back
from dualwrite.stores.sql.drivers import name_of, parse
from dualwrite.stores.sql.tables import check_not_gone_back
from simulator.connection import SimulatedConnection
from simulator.database import (
    ALWAYS,
    Conflict,
    ConnectionLost,
    Database,
    Kind,
    LockTimeout,
    Session,
    StatementFailed,
    TransactionFailed,
    new_row,
)
from simulator.savepoints import SimulatedSavepoints

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dualwrite.clock import Deadline
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.process import DatabaseVerdict
    from simulator.process import Process
    from simulator.scheduler import Simulation

_ATTEMPTS: Final = 5
Result = TypeVar("Result")


def _of(connection: Connection) -> SimulatedConnection:
    """The simulated connection: the recipes pass connections on without looking inside."""
    return cast("SimulatedConnection", connection)


class SimulatedStore:
    """:class:`~dualwrite.interfaces.StateStore` over the simulated database.

    Args:
        simulation: The simulation with the database.
        owner: The process that uses the store.
    """

    outbox: Final = None
    with_commit: Final = None

    def __init__(self, simulation: Simulation, owner: Process) -> None:
        self._simulation = simulation
        self._database = simulation.database
        self._owner = owner

    @property
    def database(self) -> Database:
        """The simulated database."""
        return self._database

    # Inside the caller's transaction

    def begin(self, connection: Connection) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.begin`."""
        used = _of(connection)
        if used.in_transaction:
            raise IllegalStateError("the connection is already in a transaction")
        session = used.session
        if self._database.kind is Kind.SQLITE:
            try:
                self._mapped(used, "BEGIN IMMEDIATE", self._database.begin_immediate)
            except DualWriteError:
                used.close()
                raise
        else:
            session.open = True  # nothing is sent

    def read_incarnation(
        self,
        connection: Connection,
        transactional_id: str,
        *,
        namespace: str | None = None,
        known: StateRow | None = None,
    ) -> int | None:
        """See :meth:`dualwrite.interfaces.StateStore.read_incarnation`."""
        row = self._mapped(_of(connection), "SELECT", lambda session: self._database.read(session, transactional_id))
        if row is None or namespace not in {None, row.namespace}:
            return None
        if known is not None:
            check_not_gone_back(known, row.incarnation, str(row.prepared))
        return row.incarnation

    def decide(self, connection: Connection, decision: Decision) -> tuple[bool, str | None]:
        """See :meth:`dualwrite.interfaces.StateStore.decide`. The scheduler chooses when a session ends."""
        state = decision.state
        assert state is not None

        def update(session: Session) -> tuple[bool, str | None]:
            row = self._database.lock(session, decision.transactional_id)
            if row is None or not _is_ours(row, decision.incarnation, decision.namespace):
                return False, None
            self._database.write(session, replace(row, prepared=state, completed=None, settle_fence=None))
            return True, self._database.name(session)

        return self._mapped(_of(connection), "UPDATE", update)

    def hold(self, connection: Connection, decision: Decision) -> tuple[bool, str | None]:
        """See :meth:`dualwrite.interfaces.StateStore.hold`."""

        def share(session: Session) -> tuple[bool, str | None]:
            row = self._database.lock(session, decision.transactional_id, exclusive=False)
            ours = _is_ours(row, decision.incarnation, decision.namespace)
            return (True, self._database.name(session)) if ours else (False, None)

        return self._mapped(_of(connection), "SELECT FOR SHARE", share)

    def run_deferred(self, connection: Connection, transactional_id: str | None = None) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.run_deferred`. The simulated database defers nothing."""

    def prepare(
        self, connection: Connection, row: StateRow, state: PreparedTxnState, *, answer_s: float | None = None
    ) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.prepare`."""
        del answer_s
        name = name_of(row.namespace, state)
        self._end(
            _of(connection),
            "PREPARE TRANSACTION",
            lambda session: self._database.prepare(session, row.transactional_id, name),
        )

    def commit(self, connection: Connection, *, answer_s: float | None = None) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.commit`."""
        del answer_s
        self._end(_of(connection), "COMMIT", self._database.commit)

    def _end(self, used: SimulatedConnection, label: str, statement: Callable[[Session], None]) -> None:
        if used.is_broken:
            raise TransactionAborted(f"the database connection was lost before {label} was sent")
        if used.has_failed:
            self._roll_back(used)
            raise TransactionAborted(
                f"a statement failed before, so {label} would have been a ROLLBACK", retryable=False
            )
        try:
            used.run(label, statement)
        except ConnectionLost as error:
            used.lose()
            raise TransactionInDoubt(f"the answer to {label} is missing") from error

    def check_same_database(self, connection: Connection) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.check_same_database`. There is one simulated database."""

    def watch_savepoints(self, connection: Connection, transactional_id: str) -> SimulatedSavepoints:
        """See :meth:`dualwrite.interfaces.StateStore.watch_savepoints`."""
        return SimulatedSavepoints(_of(connection), transactional_id, self._mapped)

    def rollback(self, connection: Connection) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.rollback`."""
        self._roll_back(_of(connection))

    def _roll_back(self, used: SimulatedConnection) -> None:
        if used.in_transaction:
            try:
                used.run("ROLLBACK", self._database.rollback)
            except ConnectionLost:
                used.lose()

    def discard(self, connection: Connection) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.discard`."""
        _of(connection).lose()

    @staticmethod
    def _mapped(used: SimulatedConnection, label: str, statement: Callable[[Session], Result]) -> Result:
        try:
            return used.run(label, statement)
        except (ConnectionLost, LockTimeout) as error:
            raise Unavailable(_WHY[type(error)]) from error
        except (Conflict, TransactionFailed, StatementFailed) as error:
            raise TransactionAborted(_WHY[type(error)], retryable=isinstance(error, Conflict)) from error

    # In transactions of our own

    def run(self, work: Callable[[SimulatedConnection], Result]) -> Result:
        """Run work in a transaction of its own, again after a conflict or a lost connection.

        As ``dualwrite.stores.sql.short_transactions`` does.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            used = SimulatedConnection(self._simulation)
            used.session.repeatable = False
            try:
                if self._database.kind is Kind.SQLITE:
                    used.run("BEGIN IMMEDIATE", self._database.begin_immediate)
                result = work(used)
                used.run("COMMIT", self._database.commit)
            except (ConnectionLost, Conflict, LockTimeout) as error:
                used.close()
                if attempt == _ATTEMPTS or isinstance(error, LockTimeout):
                    raise Unavailable(_WHY[type(error)]) from error
            except DualWriteError:
                used.close()
                raise
            else:
                used.close()
                return result
        raise AssertionError("the last attempt returns or raises")

    def _read(self, select: Callable[[], Result]) -> Result:
        for attempt in range(1, _ATTEMPTS + 1):
            used = SimulatedConnection(self._simulation)
            session = used.session
            try:
                return cast("Result", self._simulation.execute(session, "SELECT", select))
            except ConnectionLost as error:
                if attempt == _ATTEMPTS:
                    raise Unavailable(_WHY[ConnectionLost]) from error
            finally:
                used.close()
        raise AssertionError("the last attempt returns or raises")

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
        """See :meth:`dualwrite.interfaces.StateStore.claim`."""
        ids = sorted(set(transactional_ids))
        database = self._database

        def work(used: SimulatedConnection) -> Sequence[StateRow]:
            if guard is not None:
                row = used.run(
                    "SELECT FOR UPDATE", lambda session: database.lock(session, guard[0], exclusive=guard[0] in ids)
                )
                if row is None or row.owner != owner:
                    raise Fenced("another owner has claimed the row", transactional_id=guard[0])
                if row.incarnation < guard[1]:
                    raise gone_back("the row names an older incarnation than was claimed", guard[0])
            rows = [self._raise(used, name, owner, cluster_id, (raise_to or {}).get(name, 0)) for name in ids]
            if verify is not None:
                try:
                    verify(rows)
                except ConfigurationError:
                    used.run("SELECT", database.begin)  # the error counts only while the rows are ours
                    raise
                if cluster_id is not None:
                    return [self._verified(used, row, cluster_id) for row in rows]
            return rows

        return self.run(work) if ids else []

    def _verified(self, used: SimulatedConnection, row: StateRow, cluster_id: str) -> StateRow:
        if row.unverified_from is None:
            return row
        verified = replace(row, cluster_id=cluster_id, unverified_from=None)
        used.run("UPDATE", lambda session: self._database.write(session, verified))
        return verified

    def _raise(
        self, used: SimulatedConnection, name: str, owner: str, cluster_id: str | None, at_least: int
    ) -> StateRow:
        database = self._database

        def update(session: Session) -> StateRow:
            row = database.lock(session, name) or new_row(name, "n", cluster_id or "", owner)
            another = cluster_id is not None and row.cluster_id not in {cluster_id, ""}
            if another or row.prepared.incarnation == row.incarnation + 1:
                raise ConfigurationError("bad row", transactional_id=name)
            raised = replace(row, incarnation=max(row.incarnation + 1, at_least), owner=owner)
            if cluster_id is None and raised.unverified_from is None:
                raised = replace(raised, unverified_from=raised.incarnation)
            database.write(session, raised)
            return raised

        return used.run("UPDATE", update)

    def read(self, transactional_ids: Sequence[str]) -> Sequence[StateRow]:
        """See :meth:`dualwrite.interfaces.StateStore.read`."""
        return self._read(lambda: self._database.find_all(transactional_ids))

    def read_locked(self, transactional_id: str, deadline: Deadline) -> StateRow:
        """See :meth:`dualwrite.interfaces.StateStore.read_locked`."""
        del deadline  # the scheduler chooses how long a lock wait lasts
        row = self.run(lambda used: self._lock(used, transactional_id))
        if row is None:
            raise ConfigurationError("the row is gone", transactional_id=transactional_id)
        return row

    def while_locked(self, transactional_ids: Sequence[str], work: Callable[[], None], deadline: Deadline) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.while_locked`."""
        del deadline

        def locked(used: SimulatedConnection) -> None:
            for name in sorted(set(transactional_ids)):
                self._lock(used, name)
            work()

        self.run(locked)

    def _lock(self, used: SimulatedConnection, name: str) -> StateRow | None:
        return used.run("SELECT FOR UPDATE", lambda session: self._database.lock(session, name))

    def find(self, prefix: str) -> Sequence[StateRow]:
        """See :meth:`dualwrite.interfaces.StateStore.find`."""
        return self._read(lambda: self._database.find(prefix))

    def record_outcomes(self, outcomes: Sequence[tuple[StateRow, Outcome, str]]) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.record_outcomes`."""
        ordered = sorted(outcomes, key=lambda item: item[0].transactional_id)

        def work(used: SimulatedConnection) -> None:
            for row, outcome, detail in ordered:
                self._record(used, row, outcome, detail)

        if ordered:
            self.run(work)

    def _record(self, used: SimulatedConnection, row: StateRow, outcome: Outcome, detail: str) -> None:
        database = self._database

        def update(session: Session) -> None:
            now = database.lock(session, row.transactional_id)
            if now is not None and now.prepared == row.prepared and now.completed is None:
                now = replace(now, completed=outcome)
                database.write(session, now)
            better = now is not None and now.prepared == row.prepared and now.completed is not outcome
            if outcome is Outcome.LOST or (outcome is Outcome.UNVERIFIABLE and not better):
                incident = Incident(row.transactional_id, str(row.prepared), outcome, detail, ALWAYS, None)
                database.note(session, incident)

        used.run("UPDATE", update)

    def mark_settled(self, incarnations: Mapping[str, int]) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.mark_settled`."""
        database = self._database

        def raise_mark(used: SimulatedConnection, name: str) -> None:
            def update(session: Session) -> None:
                row = database.lock(session, name)
                if row is not None and row.settled_incarnation < incarnations[name]:
                    database.write(session, replace(row, settled_incarnation=incarnations[name]))

            used.run("UPDATE", update)

        def work(used: SimulatedConnection) -> None:
            for name in sorted(incarnations):
                raise_mark(used, name)

        if incarnations:
            self.run(work)

    def raise_fence(self, row: StateRow, fence: int) -> bool:
        """See :meth:`dualwrite.interfaces.StateStore.raise_fence`."""
        database = self._database

        def update(session: Session) -> bool:
            now = database.lock(session, row.transactional_id)
            known = (row.namespace, str(row.prepared), row.settle_fence)
            if now is None or (now.namespace, str(now.prepared), now.settle_fence) != known:
                return False
            database.write(session, replace(now, settle_fence=fence))
            return True

        return self.run(lambda used: used.run("UPDATE", update))

    def participants(self, rows: Collection[StateRow]) -> Sequence[Participant]:
        """See :meth:`dualwrite.interfaces.StateStore.participants`. If nothing is prepared, this takes no step."""
        by_id = {row.transactional_id: row for row in rows}

        def select() -> list[Participant]:
            return [
                Participant(row, incarnation, name, name == name_of(row.namespace, row.prepared), ALWAYS)
                for name, transactional_id in self._database.list_prepared()
                for _, incarnation in filter(None, [parse(name)])
                if (row := by_id.get(transactional_id)) is not None
            ]

        return self._read(select) if self._database.prepared and by_id else []

    def end_participant(self, participant: Participant, *, committed: bool) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.end_participant`."""
        key = participant.name, participant.row.transactional_id
        used = SimulatedConnection(self._simulation)
        session = used.session
        label = "COMMIT PREPARED" if committed else "ROLLBACK PREPARED"
        try:
            self._simulation.execute(session, label, lambda: self._database.end_prepared(key, committed=committed))
        except ConnectionLost as error:
            raise Unavailable(_WHY[ConnectionLost]) from error
        finally:
            used.close()

    def incident(self, transactional_id: str, state: PreparedTxnState) -> Outcome | None:
        """See :meth:`dualwrite.interfaces.StateStore.incident`."""
        found = self._read(lambda: self._database.incidents.get((transactional_id, str(state))))
        return found.outcome if found is not None else None

    def incidents(self, prefix: str = "", *, acknowledged: bool = False) -> Sequence[Incident]:
        """See :meth:`dualwrite.interfaces.StateStore.incidents`. In the simulation no incident is ever acknowledged."""
        del acknowledged
        return self._read(
            lambda: [found for key, found in self._database.incidents.items() if key[0].startswith(prefix)]
        )

    def incidents_of(self, transactional_ids: Collection[str]) -> Sequence[Incident]:
        """See :meth:`dualwrite.interfaces.StateStore.incidents_of`."""
        return self._read(
            lambda: [found for key, found in self._database.incidents.items() if key[0] in transactional_ids]
        )

    def note_reported(self, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.note_reported`. The model itself records the losses reported to processes."""
        del losses

    def acknowledge(self, transactional_id: str, state: PreparedTxnState) -> bool:
        """See :meth:`dualwrite.interfaces.StateStore.acknowledge`. Not simulated: only people acknowledge incidents."""
        raise NotImplementedError

    def transaction_verdict(self, transaction: str | None) -> DatabaseVerdict:
        """See :meth:`dualwrite.interfaces.StateStore.transaction_verdict`."""
        return self._read(lambda: self._database.verdict(transaction))


_WHY: Final[Mapping[type[Exception], str]] = {
    ConnectionLost: "the connection is lost",
    Conflict: "another transaction was in the way",
    LockTimeout: "a lock was not free in time",
    TransactionFailed: "an earlier statement of the transaction had failed",
    StatementFailed: "the statement violates a constraint",
}


def _is_ours(row: StateRow | None, incarnation: int, namespace: str | None) -> bool:
    return row is not None and row.incarnation == incarnation and namespace in {None, row.namespace}
