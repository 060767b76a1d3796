"""The port to the database: one protocol for each of its users, and the store that is all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from dualwrite.clock import Deadline
    from dualwrite.interfaces__ports_savepoints import SavepointWatch
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.process__protocol_settling_commit_in_doubt import DatabaseVerdict
    from dualwrite.protocol.values import Outcome
    from dualwrite.protocol.values__protocol_rows import Incident, Participant, StateRow

Handle: TypeAlias = Any
"""A dual write works on it: a connection of SQLAlchemy's, or what another database has instead.

:meth:`dualwrite.interfaces__ports_database.Database.connect` makes it, and only the store of the same database looks inside.
"""


class Claims(Protocol):
    """The ownership of transactional ids."""

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
        """Make missing rows, raise every incarnation by one and return the rows, in one short transaction of its own.

        From its commit on, no older incarnation of these ids can decide anything.

        Args:
            transactional_ids: The ids to claim.
            owner: The claimant's name, which no other owner ever has.
            cluster_id: The Kafka cluster in use.
            guard: A transactional id whose last claim must be this owner's, and the newest incarnation of it that the owner
                knows of. It may be one of the claimed ids: then the owner renews it, but not if another owner has taken over.
            verify: Called with the claimed rows before the COMMIT; an exception from it rolls the claim back.
            raise_to: Ids whose incarnation becomes at least this value (after a restored database).

        Returns:
            The rows as they are after the claim, in order of id: the new incarnation is ours, and ``prepared`` is the newest
            decision. A state read before the claim would be stale.

        Raises:
            ConfigurationError: A row belongs to another cluster, or cannot be parsed; nothing was claimed.
            Fenced: The guard was claimed by another owner; nothing was claimed.
        """
        ...

    def read(self, transactional_ids: Sequence[str]) -> Sequence[StateRow]:
        """The rows of these ids, in order of id; missing ones are left out."""
        ...

    def read_locked(self, transactional_id: str, deadline: Deadline) -> StateRow:
        """The row, read under its lock on a separate connection: any decision that was under way on it has ended.

        Raises:
            Unavailable: The lock was not free in time, or the database does not answer.
        """
        ...

    def while_locked(self, transactional_ids: Sequence[str], work: Callable[[], None], deadline: Deadline) -> None:
        """Run ``work`` while holding the row locks.

        ``work`` must not touch the rows, and must tolerate a restart, which happens if the locks are lost on the way.

        Raises:
            Unavailable: A lock was not free in time, or the database does not answer.
        """
        ...

    def find(self, prefix: str) -> Sequence[StateRow]:
        """All rows whose id begins with the prefix, in order of id."""
        ...


class Records(Protocol):
    """The outcomes of decided transactions, and of the database transactions prepared with them."""

    def record_outcomes(self, outcomes: Sequence[tuple[StateRow, Outcome, str]]) -> None:
        """Record the outcome of each row's ``prepared``, with a detail for people, in one transaction.

        A loss also becomes an incident, which later decisions do not erase. Durable on return; may be repeated.
        """
        ...

    def mark_settled(self, incarnations: Mapping[str, int]) -> None:
        """Raise ``settled_incarnation`` of each id to at least that value."""
        ...

    def raise_fence(self, row: StateRow, fence: int) -> bool:
        """Write the fence of the row's native transaction, before its epoch is raised in Kafka. Durable on return.

        Args:
            row: The row as it was read: its ``prepared`` and its ``settle_fence`` are the condition.
            fence: The producer epoch from which on only settlers act.

        Returns:
            Whether it was written. False if the row now names another transaction, or has another fence. It may also be false
            although it was written, if the answer to a first attempt was lost: read the row again.
        """
        ...

    def participants(self, rows: Collection[StateRow]) -> Sequence[Participant]:
        """The database transactions that were prepared for these rows, under any incarnation, and have not ended."""
        ...

    def end_participant(self, participant: Participant, *, committed: bool) -> None:
        """Commit or roll back what was prepared. Durable on return. Does nothing if it has already ended.

        Raises:
            ConfigurationError: Another role has prepared it, and we may not end it.
            Unavailable: The database does not answer.
        """
        ...

    def incident(self, transactional_id: str, state: PreparedTxnState) -> Outcome | None:
        """The loss that was recorded for that state, if any."""
        ...

    def incidents(self, prefix: str = "", *, acknowledged: bool = False) -> Sequence[Incident]:
        """The incidents of ids with the prefix, oldest first; with ``acknowledged`` also those already acknowledged."""
        ...

    def incidents_of(self, transactional_ids: Collection[str]) -> Sequence[Incident]:
        """All incidents of these ids, oldest first, including acknowledged ones."""
        ...

    def note_told(self, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
        """Note that these incidents, by id and transaction, are reported to a caller now. Skips those that do not exist."""
        ...

    def acknowledge(self, transactional_id: str, state: PreparedTxnState) -> bool:
        """Note that a person has looked at the incident. False if there is none, or it was already acknowledged."""
        ...

    def transaction_verdict(self, transaction: str | None) -> DatabaseVerdict:
        """The database's own verdict on a transaction that :meth:`decide` or :meth:`hold` named."""
        ...


class Decisions(Protocol):
    """One dual write's database transaction, on the caller's connection."""

    def check_same_database(self, connection: Handle) -> None:
        """Refuse a connection to a database other than that of the rows. The connection is left as it is.

        Raises:
            ConfigurationError: It does.
            IllegalStateError: It is already in a transaction.
            Unavailable: The database does not answer.
        """
        ...

    def watch_savepoints(self, connection: Handle, transactional_id: str) -> SavepointWatch | None:
        """Watch the savepoints of the transaction that :meth:`begin` began, until the watch is finished or stopped.

        None if the connection has no savepoints.
        """
        ...

    def begin(self, connection: Handle) -> None:
        """Begin the database transaction of a dual write on the caller's connection.

        On SQLite it takes the write lock. On PostgreSQL nothing is sent yet: the snapshot begins with the next statement.
        Until :meth:`commit`, :meth:`rollback` or :meth:`discard`, any other COMMIT on this connection is refused and rolls
        back.

        Raises:
            IllegalStateError: The connection is already in a transaction, or closed. It is left as it is.
            ConfigurationError: The connection is in autocommit or read-only, or its commits would not survive a crash.
            Unavailable: The lock was not free in time, or the database does not answer.
        """
        ...

    def read_incarnation(
        self,
        connection: Handle,
        transactional_id: str,
        *,
        namespace: str | None = None,
        known: StateRow | None = None,
    ) -> int | None:
        """The first statement of a dual write: returns the row's present incarnation, None if there is no row.

        With a namespace, here as in :meth:`decide` and :meth:`hold`, a row of another namespace does not count: a row that was
        deleted and recreated counts its incarnations from the start again.

        With ``known``, the row with the newest decision as its owner knows it, the call detects whether the database has lost
        commits since, as after an asynchronous failover.

        The first produce needs its answer. From here on the server, if it can, ends the session of an owner that is paused
        for too long.

        Raises:
            ConfigurationError: The table or a right is missing, the transaction is read-only, or the row is older than
                ``known``.
            Unavailable: The database does not answer.
        """
        ...

    def decide(
        self,
        connection: Handle,
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
        """The last statement of a dual write: store the state if the row still names the incarnation.

        Makes the coming COMMIT durable even if the session had asked for less. May be called for several ids in one
        transaction, in order of id. Waits for a claim that is under way.

        Args:
            connection: Inside the transaction.
            transactional_id: The row's key.
            incarnation: The incarnation that the row must name.
            state: The state to store.
            namespace: The namespace that the row must have, if given.
            idle_s: The server, if it can, ends the session when COMMIT does not come within this many seconds.
            within_s: The server, if it can, ends the transaction, COMMIT included, after this many seconds.
            answer_s: How long to wait for the answer, in seconds; after that the connection is lost.
            deferred: Do first what :meth:`run_deferred` does, in the same exchange with the server if the driver can.

        Returns:
            Whether the one row was updated, and the database's name for this transaction if it has one. False means
            fenced: roll back.

        Raises:
            IllegalStateError: The state is not of this incarnation or holds no evidence; or the database transaction is no
                longer the one that :meth:`begin` began.
            TransactionAborted: The transaction cannot continue: an earlier statement had failed, or a conflict (at REPEATABLE
                READ and SERIALIZABLE a claim shows as one; the next attempt finds that it is fenced); or, with ``deferred``,
                a constraint is violated.
            Unavailable: The database does not answer.
        """
        ...

    def hold(
        self,
        connection: Handle,
        transactional_id: str,
        incarnation: int,
        *,
        namespace: str | None = None,
        answer_s: float | None = None,
        deferred: bool = False,
    ) -> tuple[bool, str | None]:
        """The last statement if nothing was produced: keep the row's incarnation as it is until COMMIT, if it is ours.

        Returns and raises as :meth:`decide`.
        """
        ...

    def run_deferred(self, connection: Handle, transactional_id: str | None = None) -> None:
        """Run now everything that the user's statements have deferred to COMMIT, so that COMMIT has nothing left to run.

        Triggers may take any time, and in COMMIT nothing bounds them on older servers. Call it before anything is prepared.

        Raises:
            TransactionAborted: A constraint is violated, or the database failed.
        """
        ...

    def prepare(
        self, connection: Handle, row: StateRow, state: PreparedTxnState, *, answer_s: float | None = None
    ) -> None:
        """Instead of :meth:`commit`: prepare the transaction for the decider of the Kafka transaction, which then ends both.

        On return it is durable, and no longer the connection's: a :class:`Participant` of the state's incarnation.

        Raises:
            TransactionAborted: It was rolled back. The database may not allow prepared transactions, or no more of them.
            TransactionInDoubt: The answer is missing.
        """
        ...

    def commit(self, connection: Handle, *, answer_s: float | None = None) -> None:
        """Commit the database transaction. On return it is durable: the decision.

        Args:
            connection: Inside the transaction.
            answer_s: How long to wait for the answer, in seconds; None waits forever.

        Raises:
            TransactionAborted: It was certainly rolled back, even if the server would have answered COMMIT with a silent
                ROLLBACK.
            TransactionInDoubt: The answer is missing, for any reason; if that is an interruption (``KeyboardInterrupt``), it is
                the cause. The driver's connection was discarded.
        """
        ...

    def rollback(self, connection: Handle) -> None:
        """Roll back what the connection has open, if anything. Never raises: a dead connection is discarded."""
        ...

    def discard(self, connection: Handle) -> None:
        """Discard the connection, whatever it has open: it must not be used again. Never raises."""
        ...


class StateStore(Claims, Records, Decisions, Protocol):
    """The rows in the user's database."""
