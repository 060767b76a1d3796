"""A simulated database: the rows of the state store, row locks that block, sessions that outlive their clients.

It is a server: each call executes at once, in the given session, or raises :class:`MustWait` if a lock is taken. The
rules are PostgreSQL's at READ COMMITTED or REPEATABLE READ, or, for locks, SQLite's (``BEGIN IMMEDIATE``: one writer).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from enum import Enum
from typing import Final, TypeVar, cast

from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process import DatabaseVerdict
from dualwrite.protocol.values import Incident, StateRow
from dualwrite.stores.sql.consumed import ClaimedOffset

_WHOLE: Final = "*"
ALWAYS: Final = datetime(2026, 1, 1, tzinfo=timezone.utc)
"""The only time that the simulated database returns: nothing depends on it."""

Error = TypeVar("Error", bound=Exception)


class MustWait(Exception):
    """A lock is taken: run the statement again when it is free."""


class ConnectionLost(Exception):
    """The connection to the database broke."""


class Conflict(Exception):
    """Serialisation failure or deadlock: the transaction has failed, but another attempt may succeed."""


class TransactionFailed(Exception):
    """An earlier statement of the transaction has failed."""


class StatementFailed(Exception):
    """The statement is wrong, or violates a constraint: the transaction has failed."""


class LockTimeout(Exception):
    """The lock was not free in time: the transaction has failed."""


class Kind(Enum):
    """The database whose rules apply."""

    READ_COMMITTED = "PostgreSQL, READ COMMITTED"
    REPEATABLE_READ = "PostgreSQL, REPEATABLE READ"
    SQLITE = "SQLite"


class Session:
    """One session with its transaction.

    Attributes:
        owner: Its client; None once the client is gone and the server has not noticed.
        open: Whether it is inside a transaction.
        failed: Whether a statement of the transaction failed, so that COMMIT means ROLLBACK.
        broken: Whether the connection is lost.
        committing: Whether the server still processes a COMMIT whose client is gone.
        tag: Identifies the transaction for the check of the run.
        name: The transaction's name, once it has written.
        savepoint: How many rows, and parts of the tag, there were when the open savepoint was made; None if there is none.
    """

    __slots__ = (
        "broken", "committing", "consumed", "failed", "incidents", "locked", "name", "open", "owner", "repeatable", "rows",
        "savepoint", "snapshot", "tag", "user_rows", "waits_for",
    )  # fmt: skip

    def __init__(self, owner: object, *, repeatable: bool) -> None:
        self.owner: object | None = owner
        self.repeatable = repeatable
        self.open = False
        self.failed = False
        self.broken = False
        self.committing = False
        self.waits_for: tuple[str, bool] | None = None
        self._reset()

    def _reset(self) -> None:
        self.rows: dict[str, StateRow] = {}
        self.incidents: dict[tuple[str, str], Incident] = {}
        self.user_rows: list[object] = []
        self.consumed: dict[str, ClaimedOffset] = {}
        self.locked: list[str] = []
        self.snapshot: dict[str, object] | None = None
        self.tag: object | None = None
        self.name: str | None = None
        self.savepoint: tuple[int, int] | None = None


class Database:
    """The server.

    Args:
        kind: The database whose rules apply to the transactions of dual writes.

    Attributes:
        rows: The committed state rows, by transactional id.
        incidents: The committed incidents, by transactional id and text of the state.
        user_rows: The committed rows of the user, in the order in which they were committed.
        committed: The tags of the committed transactions, in order, each with the state rows that it wrote.
        prepared: The user's rows of each prepared transaction (``PREPARE TRANSACTION``), by its name and transactional
            id. In a real database the name suffices, since every row has its own namespace.
        consumed: The rows of consumed offsets, by group and partition.
        leases: By id, the holder of its lease and when it expires; no holder if it is free.
        sessions: The sessions that are connected, or whose end the server has not noticed.
    """

    def __init__(self, kind: Kind = Kind.READ_COMMITTED) -> None:
        self.kind = kind
        self.rows: dict[str, StateRow] = {}
        self.incidents: dict[tuple[str, str], Incident] = {}
        self.user_rows: list[object] = []
        self.committed: list[tuple[object, tuple[StateRow, ...]]] = []
        self.prepared: dict[tuple[str, str], list[object]] = {}
        self.consumed: dict[str, ClaimedOffset] = {}
        self.leases: dict[str, tuple[str | None, float]] = {}
        self.sessions: list[Session] = []
        self._locks: dict[str, dict[Session, bool]] = {}
        self._statuses: dict[str, DatabaseVerdict] = {}
        self._transactions = 0
        self._starts = 1

    # Sessions

    def connect(self, owner: object, *, repeatable: bool = False) -> Session:
        """Open a new session."""
        session = Session(owner, repeatable=repeatable)
        self.sessions.append(session)
        return session

    def disconnect(self, session: Session) -> None:
        """End the session: the client closes it, or the server notices that the client is gone."""
        self.rollback(session)
        session.broken = True
        if session in self.sessions:
            self.sessions.remove(session)

    def abandon(self, session: Session, *, committing: bool = False) -> None:
        """Lose the client without the server noticing: locks stay until :meth:`end_orphan`."""
        if session.broken:
            return
        session.broken = True
        session.owner = None
        session.waits_for = None
        if session.open:
            session.committing = committing
        else:
            self.sessions.remove(session)

    def abandon_all(self, owner: object) -> None:
        """Abandon all sessions of a dead client."""
        for session in [session for session in self.sessions if session.owner is owner]:
            self.abandon(session)

    def disconnect_all(self, owner: object) -> None:
        """Let the server end all sessions of a client."""
        for session in [session for session in self.sessions if session.owner is owner]:
            self.disconnect(session)

    @property
    def orphans(self) -> list[Session]:
        """Sessions that the server still has although their client is gone."""
        return [session for session in self.sessions if session.owner is None]

    def end_orphan(self, session: Session, *, committed: bool = False) -> None:
        """Let the server end a session whose client is gone.

        Args:
            session: The session.
            committed: Whether the pending COMMIT succeeds; otherwise the transaction is rolled back.
        """
        if committed and session.committing and not session.failed:
            self._publish(session)
        self.disconnect(session)

    def stop(self) -> None:
        """Stop at once and start again: all sessions are gone, with everything uncommitted."""
        for session in list(self.sessions):
            self.disconnect(session)
        self._starts += 1

    # Transactions

    def begin(self, session: Session) -> None:
        """Begin a transaction unless one is open, as the first statement does."""
        if session.broken:
            raise ConnectionLost
        session.open = True

    def begin_immediate(self, session: Session) -> None:
        """Begin; on SQLite, with the lock on the whole database."""
        self.begin(session)
        if self.kind is Kind.SQLITE:
            self._lock(session, _WHOLE, exclusive=True)

    def commit(self, session: Session) -> None:
        """COMMIT, which silently rolls back a failed transaction."""
        if session.broken:
            raise ConnectionLost
        if session.open and not session.failed:
            self._publish(session)
        self.rollback(session)

    def _publish(self, session: Session) -> None:
        self.rows.update(session.rows)
        self.consumed.update(session.consumed)
        self.incidents.update({key: found for key, found in session.incidents.items() if key not in self.incidents})
        self.user_rows.extend(session.user_rows)
        if session.tag is not None:
            self.committed.append((session.tag, tuple(session.rows.values())))
        if session.name is not None:
            self._statuses[session.name] = DatabaseVerdict.COMMITTED

    def rollback(self, session: Session) -> None:
        """ROLLBACK, or the clean-up after a COMMIT: releases the locks."""
        if session.name is not None:
            self._statuses.setdefault(session.name, DatabaseVerdict.ABORTED)
        for key in session.locked:
            holders = self._locks[key]
            del holders[session]
            if not holders:
                del self._locks[key]
        session.open = session.failed = session.committing = False
        session.waits_for = None
        session._reset()

    def prepare(self, session: Session, transactional_id: str, name: str) -> None:
        """PREPARE TRANSACTION, for a transaction that has written only user rows."""
        self._statement(session)
        assert not session.rows, "a state row is prepared"
        self.prepared[name, transactional_id] = session.user_rows
        self.rollback(session)

    def end_prepared(self, key: tuple[str, str], *, committed: bool) -> None:
        """COMMIT PREPARED or ROLLBACK PREPARED; does nothing if none has that name."""
        rows = self.prepared.pop(key, [])
        if committed:
            self.user_rows.extend(rows)

    def has_prepared(self, session: Session, keys: Iterable[tuple[str, str]]) -> bool:
        """SELECT inside a transaction whether all of these are prepared."""
        self._statement(session)
        return self.prepared.keys() >= set(keys)

    def list_prepared(self) -> list[tuple[str, str]]:
        """SELECT of the prepared transactions."""
        return list(self.prepared)

    def verdict(self, name: str | None) -> DatabaseVerdict:
        """The outcome of a transaction: known until the server restarts; never on SQLite."""
        if name is None or not name.endswith(f"@{self._starts}"):
            return DatabaseVerdict.UNKNOWN
        return self._statuses.get(name, DatabaseVerdict.UNKNOWN)

    # Locks

    def _lock(self, session: Session, key: str, *, exclusive: bool) -> None:
        wanted = (_WHOLE if self.kind is Kind.SQLITE else key, exclusive)
        session.waits_for = wanted
        holders = self._locks.get(wanted[0])
        if holders is not None:
            if self._hinders(session, holders, exclusive=exclusive):
                if self._is_deadlock(session):
                    raise self._fail(session, Conflict())
                raise MustWait
        else:
            holders = self._locks[wanted[0]] = {}
        session.waits_for = None
        if session not in holders:
            session.locked.append(wanted[0])
        holders[session] = exclusive or holders.get(session, False)

    @staticmethod
    def _hinders(session: Session, holders: Mapping[Session, bool], *, exclusive: bool) -> list[Session]:
        return [other for other, theirs in holders.items() if other is not session and (exclusive or theirs)]

    def waits_on(self, session: Session) -> list[Session]:
        """The sessions whose locks this one waits for."""
        if session.waits_for is None:
            return []
        key, exclusive = session.waits_for
        return self._hinders(session, self._locks.get(key, {}), exclusive=exclusive)

    def is_blocked(self, session: Session) -> bool:
        """Whether the session waits for a lock that is not free."""
        return session.waits_for is not None and bool(self.waits_on(session))

    def _is_deadlock(self, session: Session) -> bool:
        seen: set[Session] = set()
        ahead = self.waits_on(session)
        while ahead:
            other = ahead.pop()
            if other is session:
                return True
            if other not in seen:
                seen.add(other)
                ahead.extend(self.waits_on(other))
        return False

    def time_out_lock(self, session: Session) -> LockTimeout:
        """End the wait for a lock without it; returns the error to raise in the client."""
        return self._fail(session, LockTimeout())

    def _fail(self, session: Session, error: Error) -> Error:
        session.failed = True
        session.waits_for = None
        return error

    # Statements

    def _statement(self, session: Session) -> None:
        self.begin(session)
        if session.failed:
            raise TransactionFailed
        if session.repeatable and session.snapshot is None:
            session.snapshot = {**self.rows, **self.consumed}

    def read(self, session: Session, transactional_id: str) -> StateRow | None:
        """SELECT of one row."""
        self._statement(session)
        seen = self.rows if session.snapshot is None else session.snapshot
        return session.rows.get(transactional_id) or cast("StateRow | None", seen.get(transactional_id))

    def lock(self, session: Session, transactional_id: str, *, exclusive: bool = True) -> StateRow | None:
        """SELECT ... FOR UPDATE, or FOR SHARE: the row as it is once the lock is taken."""
        self._statement(session)
        self._lock(session, transactional_id, exclusive=exclusive)
        row = session.rows.get(transactional_id)
        if row is not None:
            return row
        row = self.rows.get(transactional_id)
        if session.snapshot is not None and session.snapshot.get(transactional_id) is not row:
            raise self._fail(session, Conflict())
        return row

    def lock_consumed(self, session: Session, key: str) -> ClaimedOffset | None:
        """UPDATE of a row of consumed offsets, up to its lock: the row as it is then."""
        self._statement(session)
        self._lock(session, key, exclusive=True)
        row = session.consumed.get(key)
        if row is not None:
            return row
        row = self.consumed.get(key)
        if session.snapshot is not None and session.snapshot.get(key) is not row:
            raise self._fail(session, Conflict())
        return row

    def write_consumed(self, session: Session, key: str, row: ClaimedOffset) -> None:
        """The rest of that UPDATE."""
        session.consumed[key] = row
        self.name(session)

    def write(self, session: Session, row: StateRow) -> None:
        """INSERT or UPDATE of a row that the session has locked."""
        session.rows[row.transactional_id] = row
        self.name(session)

    def write_user_row(self, session: Session, row: object) -> None:
        """INSERT of a user row."""
        self._statement(session)
        session.user_rows.append(row)
        self.name(session)

    def fail_statement(self, session: Session) -> None:
        """A user statement that violates a constraint."""
        self._statement(session)
        raise self._fail(session, StatementFailed())

    # The savepoint of a unit; there is one at a time

    def open_savepoint(self, session: Session) -> None:
        """SAVEPOINT, after the release of the one before."""
        self._statement(session)
        session.savepoint = (len(session.user_rows), len(parts_of(session.tag)))

    def roll_back_to_savepoint(self, session: Session) -> None:
        """ROLLBACK TO SAVEPOINT and its release: a failed transaction goes on."""
        if session.broken:
            raise ConnectionLost
        if session.savepoint is None:
            raise self._fail(session, StatementFailed())
        rows, parts = session.savepoint
        del session.user_rows[rows:], parts_of(session.tag)[parts:]
        session.failed, session.savepoint = False, None

    def release_savepoint(self, session: Session) -> None:
        """RELEASE SAVEPOINT."""
        self._statement(session)
        if session.savepoint is None:
            raise self._fail(session, StatementFailed())
        session.savepoint = None

    def note(self, session: Session, incident: Incident) -> None:
        """INSERT ... ON CONFLICT DO NOTHING of an incident."""
        session.incidents.setdefault((incident.transactional_id, incident.prepared_transaction_state), incident)

    def name(self, session: Session) -> str | None:
        """The transaction's name; SQLite has none."""
        if session.name is None and self.kind is not Kind.SQLITE:
            self._transactions += 1
            session.name = f"{self._transactions}@{self._starts}"
        return session.name

    def find(self, prefix: str) -> list[StateRow]:
        """SELECT of the committed rows whose id begins with the prefix, in order."""
        return [self.rows[key] for key in sorted(self.rows) if key.startswith(prefix)]

    def find_all(self, transactional_ids: Iterable[str]) -> list[StateRow]:
        """SELECT of the committed rows with these ids, in order."""
        return [self.rows[key] for key in sorted(set(transactional_ids)) if key in self.rows]


def parts_of(tag: object) -> list[object]:
    """The parts of a transaction that is divided into units, in their order; none of another one."""
    parts: list[object] = getattr(tag, "writes", [])
    return parts


def new_row(transactional_id: str, namespace: str, cluster_id: str, owner: str) -> StateRow:
    """A row that is not claimed yet."""
    return StateRow(transactional_id, PreparedTxnState(), namespace, 0, 0, None, cluster_id, owner, ALWAYS)
