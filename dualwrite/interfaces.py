"""The interfaces (ports) between the recipes and the world: the deciding database, its savepoints, Kafka, and observers.

A recipe (claiming, settling, one dual write) sees Kafka and the database through these small classes only, so that it
runs on PostgreSQL, on ZooKeeper or on a simulated broker without a change. Nothing here does I/O; the adapters in
`dualwrite.kafka` and `dualwrite.stores` implement them, and `dualwrite.telemetry` implements the observer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.protocol.lives import Phase, WriteState
from dualwrite.protocol.process import Health

if TYPE_CHECKING:
    from typing_extensions import Self

    from dualwrite.clock import Deadline
    from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable
    from dualwrite.protocol.blocking import ActionRecord, End, Intent
    from dualwrite.protocol.members import Lease
    from dualwrite.protocol.message import Sendable
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.process import DatabaseVerdict
    from dualwrite.protocol.settle import Later
    from dualwrite.protocol.values import (
        AsideMessage,
        Decided,
        Decision,
        EndAnswer,
        FirstLook,
        Incident,
        LogProof,
        OpenTransaction,
        OutboxMode,
        Outcome,
        Participant,
        ShownProducer,
        StateRow,
        TransactionView,
        Waiting,
        WaitingMessages,
    )

# The port to the savepoints of a connection, and to the messages that wait for them.


class SavepointWatch(Protocol):
    """The savepoints that are open on the connection of a dual write, and the messages that wait for them."""

    @property
    def direct(self) -> bool:
        """Whether a message may go to the producer at once, without :meth:`add`.

        Raises:
            TransactionAborted: ORM sessions became possible only inside the block, so one may have begun a savepoint unseen.
        """

    @property
    def holds(self) -> bool:
        """Whether a message that is added now waits for a savepoint."""

    @property
    def may_roll_back(self) -> bool:
        """Whether rolling back a known savepoint could undo what is done now. Sends nothing."""

    def expect_session(self) -> None:
        """Watch ORM sessions too. Call it before the block's own session is made."""

    def add(self, message: Sendable) -> None:
        """Add a produced message. :meth:`take` returns it now, or when its savepoint is released, or never.

        Raises:
            TransactionAborted: Its savepoint cannot be known: both sides must abort.
            IllegalStateError: The database cannot be asked for its savepoint now: the driver's connection is in the middle of a
                COPY.
            Unavailable: The database does not answer.
        """

    def open_unit(self, uses: AbstractContextManager[object]) -> Any:
        """Open the savepoint of a unit of work. The previous unit must have been kept or dropped.

        Args:
            uses: Entered for each use of the unit's connection; raises once the unit has ended. No use may be under way when
                the unit is kept or dropped.

        Returns:
            The connection of the unit, unusable once the unit has ended.

        Raises:
            TransactionAborted: As :meth:`add`.
            DualWriteError: The database failed, or it no longer has the savepoint of the previous unit.
        """

    def require_unit(self) -> None:
        """Make sure that the savepoint of the unit was opened: the database may answer :meth:`open_unit` later.

        Raises:
            DualWriteError: As :meth:`open_unit`.
        """

    def keep_unit(self) -> str | None:
        """Release the savepoint of the unit: :meth:`take` returns its messages.

        Returns:
            None if it is kept, else why it must be dropped: it continued after a failed statement, or nobody knows which of its
            messages belong to a savepoint that was rolled back.

        Raises:
            TransactionAborted: The unit has rolled back the transaction: both sides must abort.
            Unavailable: The connection is lost.
        """

    def drop_unit(self) -> None:
        """Roll back to the savepoint of the unit. Its messages are never sent.

        Raises:
            TransactionAborted, Unavailable: As :meth:`keep_unit`; or the database failed.
            TransactionInDoubt: The savepoint is gone: code of the unit has ended the transaction, and may have committed it.
        """

    def take(self) -> Sequence[Sendable]:
        """The messages to send now, in the order in which they were produced; each is taken once."""

    def finish(self) -> None:
        """Release all open savepoints, as the database is about to commit, and stop watching.

        Raises:
            TransactionAborted: A savepoint was rolled back unseen after a message was produced in it.
            TransactionInDoubt: As :meth:`drop_unit`, after units.
            Unavailable: The database does not answer.
        """

    def stop(self) -> None:
        """Stop watching. May be called more than once."""


Handle: TypeAlias = Any
"""The object that a dual write works on: a SQLAlchemy connection, or the counterpart of another database.

:meth:`dualwrite.interfaces.Database.connect` makes it, and only the store of the same database looks inside.
"""


class Claims(Protocol):
    """The ownership of transactional ids."""

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
        """Create missing rows, raise every incarnation by one and return the rows, in one short transaction of its own.

        From its commit on, no older incarnation of these ids can decide anything.

        Args:
            transactional_ids: The ids to claim.
            owner: The claimant's name, which no other owner ever has.
            cluster_id: The Kafka cluster in use; None if Kafka is away. Then the row says from which incarnation on nothing
                was compared with Kafka, until a claim with ``cluster_id`` and ``verify`` succeeds. Only for SQL databases.
            guard: A transactional id, and its newest incarnation that this owner knows of. If another owner has claimed it
                since, the claim fails. It may be one of the claimed ids: then the owner renews that.
            verify: Called with the claimed rows before the COMMIT; an exception from it rolls the claim back. Rows that were
                claimed while Kafka was away still have ``unverified_from``.
            raise_to: Ids whose incarnation becomes at least this value (after the database was restored).

        Returns:
            The rows as they are after the claim, in order of id: the new incarnation is ours, and ``prepared`` is the newest
            decision. A state read before the claim would be stale.

        Raises:
            ConfigurationError: A row, or the guard, belongs to another cluster, or a row cannot be parsed; nothing was claimed.
            Fenced: The guard was claimed by another owner; nothing was claimed.
        """

    def read(self, transactional_ids: Sequence[str]) -> Sequence[StateRow]:
        """The rows of these ids, in order of id; missing ones are left out."""

    def read_locked(self, transactional_id: str, deadline: Deadline) -> StateRow:
        """The row, read under its lock on a separate connection, so that every decision under way on it has ended.

        Raises:
            Unavailable: The lock was not free in time, or the database does not answer.
        """

    def while_locked(self, transactional_ids: Sequence[str], work: Callable[[], None], deadline: Deadline) -> None:
        """Run ``work`` while holding the row locks.

        ``work`` must not touch the rows, and must tolerate being run again, which happens if the locks are lost meanwhile.

        Raises:
            Unavailable: A lock was not free in time, or the database does not answer.
        """

    def find(self, prefix: str) -> Sequence[StateRow]:
        """All rows whose id begins with the prefix, in order of id."""


class Records(Protocol):
    """The outcomes of decided transactions, and of the database transactions prepared with them."""

    def record_outcomes(self, outcomes: Sequence[tuple[StateRow, Outcome, str]]) -> None:
        """Record the outcome of each row's ``prepared``, with a detail for people, in one transaction.

        A loss also becomes an incident, which later decisions do not erase. Durable on return; may be repeated.
        """

    def mark_settled(self, incarnations: Mapping[str, int]) -> None:
        """Raise ``settled_incarnation`` of each id to at least that value."""

    def raise_fence(self, row: StateRow, fence: int) -> bool:
        """Write the fence of the row's native transaction, before its epoch is raised in Kafka. Durable on return.

        Args:
            row: The row as it was read: its ``prepared`` and its ``settle_fence`` are the condition.
            fence: The producer epoch from which on only settlers act.

        Returns:
            Whether it was written. False if the row now names another transaction or has another fence; also if the fence was
            written but the answer to the first attempt was lost: read the row again.
        """

    def participants(self, rows: Collection[StateRow]) -> Sequence[Participant]:
        """The database transactions that were prepared for these rows, under any incarnation, and have not ended."""

    def end_participant(self, participant: Participant, *, committed: bool) -> None:
        """Commit or roll back what was prepared. Durable on return. Does nothing if it has already ended.

        Raises:
            ConfigurationError: Another role prepared it, and we may not end it.
            Unavailable: The database does not answer.
        """

    def incident(self, transactional_id: str, state: PreparedTxnState) -> Outcome | None:
        """The loss that was recorded for that state, if any."""

    def incidents(self, prefix: str = "", *, acknowledged: bool = False) -> Sequence[Incident]:
        """The incidents of ids with the prefix, oldest first; with ``acknowledged`` also those already acknowledged."""

    def incidents_of(self, transactional_ids: Collection[str]) -> Sequence[Incident]:
        """All incidents of these ids, oldest first, including acknowledged ones."""

    def note_reported(self, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
        """Record that these incidents, by id and transaction, are reported to a caller now. Skips missing ones."""

    def acknowledge(self, transactional_id: str, state: PreparedTxnState) -> bool:
        """Note that a person has looked at the incident. False if there is none, or it was already acknowledged."""

    def transaction_verdict(self, transaction: str | None) -> DatabaseVerdict:
        """The database's own verdict on a transaction that :meth:`decide` or :meth:`hold` named."""


class Decisions(Protocol):
    """One dual write's database transaction, on the caller's connection."""

    def check_same_database(self, connection: Handle) -> None:
        """Refuse a connection to a database other than that of the rows. The connection is left as it is.

        Raises:
            ConfigurationError: It leads to another database.
            IllegalStateError: It is already in a transaction.
            Unavailable: The database does not answer.
        """

    def watch_savepoints(self, connection: Handle, transactional_id: str) -> SavepointWatch | None:
        """Watch the savepoints of the transaction that :meth:`begin` began, until the watch is finished or stopped.

        None if the connection has no savepoints.
        """

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
        deleted and recreated starts its incarnations again.

        With ``known``, the row with the newest decision as its owner knows it, the call detects whether the database has lost
        commits since, as after an asynchronous failover.

        Wait for its answer before the first produce. From here on the server, if it can, ends the session of an owner that is
        paused for too long.

        Raises:
            ConfigurationError: The table or a right is missing, the transaction is read-only, or the row is older than
                ``known``.
            Unavailable: The database does not answer.
        """

    def decide(self, connection: Handle, decision: Decision) -> tuple[bool, str | None]:
        """The last statement of a dual write: store the state if the row still names the incarnation.

        Makes the coming COMMIT durable even if the session asked for less. May be called for several ids in one transaction, in
        order of id. Waits for a claim that is under way.

        Args:
            connection: Inside the transaction.
            decision: The state to store, for which row, and the time that the server may take.

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

    def hold(self, connection: Handle, decision: Decision) -> tuple[bool, str | None]:
        """The last statement if nothing was produced: keep the row's incarnation as it is until COMMIT, if it is ours.

        Returns and raises as :meth:`decide`.
        """

    def run_deferred(self, connection: Handle, transactional_id: str | None = None) -> None:
        """Run now everything that the user's statements have deferred to COMMIT, so that COMMIT has nothing left to run.

        Triggers may take any time, and on older servers nothing limits them during COMMIT. Call it before anything is prepared.

        Raises:
            TransactionAborted: A constraint is violated, or the database failed.
        """

    def prepare(
        self, connection: Handle, row: StateRow, state: PreparedTxnState, *, answer_s: float | None = None
    ) -> None:
        """Instead of :meth:`commit`: prepare the transaction for the decider of the Kafka transaction, which then ends both.

        On return it is durable, and no longer the connection's: a :class:`Participant` of the state's incarnation.

        Raises:
            TransactionAborted: It was rolled back. The database may allow no prepared transactions, or no more of them.
            TransactionInDoubt: The answer is missing.
        """

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

    def rollback(self, connection: Handle) -> None:
        """Roll back what the connection has open, if anything. Never raises: a dead connection is discarded."""

    def discard(self, connection: Handle) -> None:
        """Discard the connection, whatever it has open: it must not be used again. Never raises."""


class DecisionWithCommit(Protocol):
    """:meth:`Decisions.decide` and :meth:`Decisions.commit` in one exchange with the database."""

    def is_possible(self, connection: Handle, age_s: float) -> bool:
        """Whether this connection can do it now. Otherwise call ``decide``, then ``commit``. Sends nothing."""

    def execute(self, connection: Handle, decision: Decision, age_s: float) -> Decided:
        """Decide and commit. Durable on return, if committed.

        The database rolls back if its transaction is older than ``age_s`` once the row is updated. What the user's statements
        deferred runs first.

        Raises:
            IllegalStateError, Unavailable: As :meth:`Decisions.decide`; nothing was committed.
            TransactionAborted: As both.
            TransactionInDoubt: As :meth:`Decisions.commit`, wherever in the exchange the connection was lost.
        """


class OutboxRows(Protocol):
    """Messages that wait in the database: rows that commit with the user's rows, and are sent later.

    A writer's *mode* has a row of its own: the rows of its lanes change all the time, which would conflict with shared locks on
    the mode. No row means *direct*. Thread-safe.

    The first methods work inside the caller's transaction, like those of `Decisions`, and raise the same errors. After an error
    of the database the transaction cannot continue.
    """

    def read_first(
        self,
        connection: Handle,
        transactional_id: str,
        writer: str,
        *,
        namespace: str | None = None,
        known: StateRow | None = None,
    ) -> FirstLook:
        """The first statement of a block whose messages may wait: in place of :meth:`Decisions.read_incarnation`.

        It also returns the mode and the lane's count, in the same request. The mode is not locked: a block that finds *later*
        takes a share of the lock, and so reads it again.
        """

    def mode(self, connection: Handle, writer: str) -> OutboxMode:
        """The writer's mode as it is now, not locked."""

    def share(self, connection: Handle, writer: str, *, within_s: float) -> OutboxMode:
        """Take a share of the lock on the mode until the transaction ends, and return the mode as of then.

        Others may share it. It waits for an exclusive lock. On PostgreSQL it does not wait for a :meth:`lock` with
        ``beside_shares``, and returns the mode before that. SQLite's write lock is enough.

        Raises:
            TransactionAborted: A deadlock, or, at REPEATABLE READ and SERIALIZABLE, the mode has changed since the snapshot.
            Unavailable: The lock was not free within ``within_s``, or the database does not answer.
        """

    def lock(self, connection: Handle, writer: str, *, within_s: float, beside_shares: bool = False) -> OutboxMode:
        """Lock the mode exclusively until the transaction ends, and return it as of then. Creates a missing row.

        With ``beside_shares``, for turning it to *later*, others may hold shares meanwhile on PostgreSQL: so several blocks
        that hold a share and want to turn the mode get their turns one after another. On MariaDB that is a deadlock.

        Raises:
            TransactionAborted, Unavailable: As :meth:`share`.
        """

    def turn(self, connection: Handle, writer: str, mode: OutboxMode) -> None:
        """Set the mode, which this transaction has locked; exclusively, if it sets it to *direct*."""

    def decide(
        self, connection: Handle, decision: Decision, writer: str, messages: Sequence[Sendable]
    ) -> tuple[bool, str | None]:
        """The last statements of a block whose messages wait: in place of :meth:`Decisions.decide`.

        Raises the count of the lane's row to ``decision.waits``, if the row still names the incarnation, and then puts the
        messages, in their order, behind all earlier ones. The row's prepared state stays as it is: a decided transaction may
        still be pending in Kafka. Where the driver can, a few messages take one request; many take a few statements.

        The order matters: a block takes the lock on its lane's row before its messages get their numbers. So whoever may still
        commit messages with lower numbers than others' holds that lock. See :class:`dualwrite.stores.sql.outbox.Floor`.

        Args:
            connection: Inside the transaction.
            decision: With ``waits``, and without a state. Its ``idle_s`` and ``within_s`` are not used.
            writer: The writer's id.
            messages: Messages, and lists of them, as the savepoints return them. No consumed offsets.

        Returns:
            As :meth:`Decisions.decide`. Also if there are no messages.

        Raises:
            IllegalStateError: A value cannot wait; or as :meth:`Decisions.decide`.
            TransactionAborted, Unavailable: As :meth:`Decisions.decide`.
        """

    def read(self, connection: Handle, writer: str, *, limit: int, max_bytes: int) -> WaitingMessages:
        """The writer's first messages that wait, in the order of their numbers; not locked.

        Numbers are not in the order of commits: the next call may return a lower one, whose block was concurrent.

        Args:
            connection: Inside the transaction.
            writer: The writer's id.
            limit: The maximum number of messages.
            max_bytes: Stop before this many bytes of keys, values and headers; but a first message is always returned.
        """

    def delete(self, connection: Handle, writer: str, numbers: Sequence[int]) -> int:
        """Delete the messages with these ascending numbers. Returns how many there were; if fewer, another sender took them."""

    def move_aside(self, connection: Handle, writer: str, numbers: Sequence[int], reason: str) -> int:
        """Move the messages with these ascending numbers aside. Returns how many there were."""

    def put_aside(self, connection: Handle, message: AsideMessage) -> None:
        """Put a relay's message aside, from another program's table. It gets a new number and new times."""

    # In transactions of their own

    def writers(self) -> Sequence[str]:
        """The writers with messages that may wait or were moved aside, in order."""

    def topics(self, writer: str) -> Mapping[str, int]:
        """How many of the writer's waiting messages each topic has, among the first ten thousand."""

    def begin_later(self, writer: str) -> None:
        """Set the mode to *later*, although others may share its lock: earlier blocks may still send directly until they end.

        For a writer whose messages always wait, after its claim: on return no block of a former owner can send directly.

        Raises:
            Unavailable: The lock was not free in time, or the database does not answer.
        """

    def decisions_locked(self, transactional_id: str, namespace: str | None, deadline: Deadline) -> int:
        """The count of the lane's row, read as by :meth:`Claims.read_locked`: every decision under way on it has ended.

        Raises:
            ConfigurationError: The row is gone, or is another one of that name.
            Unavailable: As :meth:`Claims.read_locked`.
        """

    def waiting(self, writer: str) -> Waiting:
        """How much waits. Reads at most about ten thousand rows; beyond that it is an estimate.

        The estimate extrapolates from the first and the last rows. Numbers of other writers and of rolled back transactions
        leave gaps; if the gaps at the ends differ from those in the middle, the estimate is wrong by as much.
        """

    def aside(self, writer: str, *, limit: int, after: int = 0) -> Sequence[AsideMessage]:
        """The writer's messages that were moved aside, in the order of their numbers, beginning after the number ``after``."""

    def count_aside(self, writer: str) -> int:
        """How many messages of the writer were moved aside."""

    def replay(self, writer: str, numbers: Sequence[int] | None = None) -> int:
        """Put messages that were moved aside behind all that wait, in their order, and turn the mode to *later*.

        Without ``numbers``, all of the writer's. They get new numbers. Durable on return. Returns how many there were.
        """

    def drop(self, writer: str, numbers: Sequence[int] | None = None) -> int:
        """Delete messages that were moved aside; without ``numbers``, all. Durable on return. Returns how many there were."""


class StateStore(Claims, Records, Decisions, Protocol):
    """The rows in the user's database."""

    @property
    def outbox(self) -> OutboxRows | None:
        """The messages that wait; None if they cannot wait in this kind of database."""

    def outbox_mode(self, writer: str) -> OutboxMode:
        """The mode of the writer's outbox, read in a transaction of its own; *direct* if messages cannot wait here."""

    @property
    def with_commit(self) -> DecisionWithCommit | None:
        """Sends a decision together with its COMMIT; None if this kind of database cannot."""


# The port to the deciding database as a whole: what writers and the calls for operators need besides its rows.
#
# A database is added in three steps: a subclass of `Database`, the store of its rows
# (`dualwrite.interfaces.StateStore`), and its place in `tests/conformance`. Databases without SQL need no store of
# their own: `dualwrite.stores.keyed` makes one of five primitives.

PAUSED_OWNER_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class Traits:
    """The traits of a kind of database.

    Attributes:
        name: Its name for people; telemetry uses it in lower case.
        gives: The attribute of the transaction through which the user writes: ``connection``, ``batch``, ``multi``.
        blocks: How many blocks can be inside transactions at once; None if there is no limit.
        savepoints: Whether part of a transaction can be rolled back. Without that, each unit of ``submit`` is a dual write of
            its own.
    """

    name: str
    gives: str
    blocks: int | None = None
    savepoints: bool = False

    def absent(self, asked: str) -> IllegalStateError:
        """The error for an attribute of the transaction that this kind of database does not have."""
        return IllegalStateError(
            f"there is no tx.{asked}: this writer's database is {self.name}", next_step=f"use tx.{self.gives}"
        )


SQL: Final = Traits("SQL", "connection", savepoints=True)


class Leases(Protocol):
    """The leases of one fleet. Thread-safe; every call is durable on return.

    See :class:`dualwrite.stores.sql.leases.Leases`.
    """

    @property
    def fleet(self) -> str:
        """The fleet's name."""

    def take(self, owner: str, timeout_s: float, *, has_died: Callable[[Lease], bool]) -> str:
        """Take the lowest number that nobody holds, or whose holder has died, and return its id."""

    def take_number(
        self, number: int, owner: str, timeout_s: float, *, has_died: Callable[[Lease], bool]
    ) -> str | None:
        """Take that number, and return its id; None if a live member holds it."""

    def renew(
        self, transactional_id: str, owner: str, timeout_s: float, *, wait_s: float
    ) -> tuple[bool, Sequence[Lease]]:
        """Renew the owner's lease of that id.

        Returns whether it was renewed, and the fleet's leases that have expired or that belong to processes in the owner's
        place.
        """

    def adopt(self, dead: Lease, owner: str, timeout_s: float) -> bool:
        """Take the lease of a dead holder, to settle what it left. False if another member was faster."""

    def give_back(self, transactional_id: str, owner: str, *, settled: bool) -> None:
        """Give a lease back. Does nothing if another member has taken it."""


class Forgetting(Protocol):
    """Deletes rows that are no longer needed. See :class:`dualwrite.stores.sql.operators.Forgetting`."""

    def now(self) -> datetime:
        """The database's time."""

    def leased(self) -> set[str]:
        """The ids that a process holds, or may still continue with."""

    def forget(self, rows: Sequence[StateRow]) -> bool:
        """Delete the rows, all or none. False if one was used since it was read, or is held. Durable on return."""

    def forget_incidents(self, prefix: str, before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
        """Delete the incidents that were acknowledged before that time. Returns how many."""

    def forget_runs(self, prefix: str, before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
        """Delete the runs of batches that began before that time and are over. Returns how many."""

    def forget_actions(self, prefix: str, before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
        """Delete from the history what began before that time. Returns how many actions."""


class History(Protocol):
    """What people and services have done, with their reasons. See :class:`dualwrite.stores.sql.operators.History`."""

    def begin(self, intents: Sequence[Intent]) -> None:
        """Store what is about to be done. Durable on return. An action with the same id begins again, without an outcome.

        Raises:
            ConfigurationError: The right to write the table is missing.
            Unavailable: The database does not answer.
        """

    def begin_once(self, intent: Intent) -> bool:
        """As :meth:`begin` for one intent; False, and nothing is stored, if its id is there already."""

    def end(self, ends: Sequence[End]) -> None:
        """Store how actions have ended. Skips those that are gone."""

    def read(self, action_id: str) -> ActionRecord | None:
        """One action; None if it is not there."""

    def last(self, prefix: str, *, limit: int) -> Sequence[ActionRecord]:
        """The last actions on ids and writers with that prefix, newest first."""


class Closing(ABC):
    """Something that a ``with`` block closes at its end."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds. May be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Database(Closing):
    """The database that decides. Used by many threads at once. A writer closes it only if it made it, from a URL.

    A method that a subclass does not override raises an error that names the missing feature.
    """

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """The traits of this kind of database."""

    @property
    def schema(self) -> str | None:
        """The schema of the library's tables, if it is not the default one."""
        return None

    @abstractmethod
    def check(self) -> None:
        """Refuse a database that cannot decide: the library's tables are missing, or its commits would not be durable.

        Raises:
            ConfigurationError: It cannot.
            Unavailable: It does not answer.
        """

    @abstractmethod
    def store(self, *, paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S) -> StateStore:
        """The library's rows in this database.

        Args:
            paused_owner_timeout_s: The server, if it can, ends the session of an owner that is paused inside a transaction
                after this many seconds; None leaves the server's own setting.
        """

    @abstractmethod
    def connect(self) -> AbstractContextManager[Handle]:
        """A handle for one dual write, as a context manager whose end gives it back.

        Raises:
            DualWriteError: The database cannot be reached.
        """

    def connect_to_send(self) -> AbstractContextManager[Handle]:
        """As :meth:`connect`, for a thread that sends what waits: each statement sees all that was committed before it.

        A snapshot from before the lock on the mode would hide what earlier holders of the lock put.
        """
        return self.connect()

    def adopt(self, given: object, store: StateStore) -> AbstractContextManager[Handle]:
        """A handle over a connection of the user's own, which stays open.

        Raises:
            ConfigurationError: It leads to another database, or cannot be used for this.
            IllegalStateError: It is no connection, or is inside a transaction.
        """
        del store
        raise IllegalStateError(
            f"transaction() takes no {type(given).__name__}: this writer's database is {self.traits.name}",
            next_step=f"call it without an argument, and use tx.{self.traits.gives}",
        )

    def forked(self) -> None:
        """In a forked process: forget the parent's connections, and leave them open for the parent."""

    def leases(self, fleet: str) -> Leases:
        """The leases of a fleet.

        Raises:
            ConfigurationError: The name cannot be used, or this database keeps no leases.
        """
        raise self._without(f"leases, which fleet {fleet!r} needs", "give each process a transactional id of its own")

    def living(self, names: Collection[str]) -> set[str]:
        """The ids among these whose lease has not expired: a process works under them."""
        del names
        return set()

    def lease_list(self, transactional_id: str | None, prefix: str) -> Sequence[Lease]:
        """The leases of an id, or of all ids with a prefix, in order, for people."""
        del transactional_id, prefix
        return ()

    def warnings(self) -> Sequence[str]:
        """Warnings for people about conditions in the database that slow dual writes down."""
        return ()

    def require_outbox(self) -> None:
        """Refuse a database in which messages cannot wait. Call it before the first claim of a writer with an outbox.

        Raises:
            ConfigurationError: Messages cannot wait in this kind of database, or its tables lack what that needs or are not
                durable.
            Unavailable: It does not answer.
        """
        raise self._without("outbox", 'use outbox="never", or a SQL database')

    def forgetting(self) -> Forgetting:
        """Deletes rows that are no longer needed.

        Raises:
            ConfigurationError: This database deletes none.
        """
        raise self._without("forgetting", "a row takes a few hundred bytes: leave it")

    def now(self) -> datetime:
        """The time by which the ages of rows are measured: the database's, or this machine's if it deletes no rows."""
        try:
            return self.forgetting().now()
        except ConfigurationError:
            return datetime.now(timezone.utc)

    def history(self) -> History | None:
        """What people and services have done; None if this database, or its version of the tables, keeps no such history."""
        return None

    def _without(self, what: str, next_step: str) -> ConfigurationError:
        return ConfigurationError(f"{self.traits.name} has no {what}", next_step=next_step)


# The port to Kafka.


class TransactionCoordinator(Protocol):
    """Kafka's coordinator and log, as seen by a client other than the producer. Every call may be repeated."""

    def cluster_id(self, deadline: Deadline) -> str:
        """The id of the cluster that the bootstrap servers belong to."""

    def max_transaction_timeout_ms(self, deadline: Deadline) -> int | None:
        """The broker's ``transaction.max.timeout.ms``; None if we may not read it."""

    def describe(self, kafka_ids: Collection[str], deadline: Deadline) -> Mapping[str, TransactionView]:
        """The coordinator's view of each id; an unknown id has the status ``NO_SUCH_ID``."""

    def list_ids(self, prefix: str, deadline: Deadline) -> Sequence[str]:
        """All transactional ids with that prefix that any coordinator knows."""

    def open_offsets(
        self, states: Sequence[PreparedTxnState], deadline: Deadline
    ) -> Sequence[Mapping[tuple[str, int], int | None]]:
        """For each state, where its producer's open transaction began, by (topic, partition) of its evidence.

        Asks the current leaders (``DescribeProducers``). None where that producer has nothing open. Leaves out a partition that
        certainly no longer exists: its topic was deleted, perhaps recreated with another id.
        """

    def producer_open_offsets(
        self, producer_id: int, epoch: int, partitions: Collection[tuple[str, int]], deadline: Deadline
    ) -> Mapping[tuple[str, int], int | None]:
        """Where the open transaction of a producer began in each (topic, partition); None where it has nothing open.

        Asks the current leaders (``DescribeProducers``).
        """

    def sequences(
        self, producer_id: int, epoch: int, firsts: Mapping[tuple[str, int], int], deadline: Deadline
    ) -> Mapping[tuple[str, int], tuple[int, int] | None]:
        """By (topic, partition), the sequence numbers of a producer's record at that offset and of its newest record there.

        None where the partition does not have that record, or no newest one of that epoch is known.
        """

    def still_open(
        self, suspects: Sequence[tuple[int, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Sequence[Mapping[tuple[str, int], int]]:
        """For each producer id: among its (topic, partition) pairs, those with an open transaction, and where that began.

        Transactions of every epoch count. Waits for leaders, then asks them (``DescribeProducers``).
        """

    def end(
        self, transactions: Mapping[str, PreparedTxnState], *, committed: bool, deadline: Deadline, once: bool = False
    ) -> Mapping[str, EndAnswer]:
        """Send ``EndTxn`` for each Kafka id with its state's producer id and epoch. A request may be sent more than once.

        With ``once``, each is sent only once: an id whose request was not answered is missing from the result.
        """

    def retire(
        self, kafka_ids: Collection[str], deadline: Deadline, *, timeouts_ms: Mapping[str, int] | None = None
    ) -> Mapping[str, tuple[int, int]]:
        """Send ``InitProducerId`` for each id until it succeeds: aborts what is ongoing and fences every producer of the id.

        Args:
            kafka_ids: The ids.
            deadline: Limits the whole call.
            timeouts_ms: The transaction timeout for ids under which something must still be ended. Other ids get a short one.

        Returns:
            By id, its new producer id and epoch.
        """

    def add_partitions(
        self, transactions: Mapping[str, tuple[int, int, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Mapping[str, bool]:
        """Send ``AddPartitionsToTxn`` for each Kafka id with producer id, epoch and partitions: begins a transaction there.

        Returns:
            By id, whether they were added; False if the id has another producer id or epoch, or a partition is gone.
        """

    def prove(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[LogProof]:
        """The log's proof of the outcome of each state's transaction."""

    def prove_now(
        self, states: Sequence[PreparedTxnState], deadline: Deadline, *, read_on: bool
    ) -> Sequence[Mapping[tuple[str, int], LogProof | None]]:
        """For each state, what the log of each (topic, partition) proves now. Does not wait for markers or leaders.

        None for a partition that certainly no longer exists. Partitions whose leader does not answer are missing.

        Args:
            states: The transactions.
            deadline: Limits the whole call.
            read_on: Whether to read on, which may take long, where something is open before a transaction. If not, the proof
                there is ``OPEN``.
        """

    def later_commits(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[Later]:
        """For each state, the later activity of its producer in the logs of its partitions."""

    def topic_ids(self, topics: Collection[str], deadline: Deadline) -> Mapping[str, str]:
        """The id of each topic as URL-safe base64. Topics that do not exist are missing from the result."""

    def close(self) -> None:
        """Close the connections. May be called more than once."""


@runtime_checkable
class NativeCoordinator(TransactionCoordinator, Protocol):
    """A coordinator that can end transactions of the native engine (transaction version 2), each with its own epoch."""

    def end_exactly(
        self, transactions: Mapping[str, tuple[int, int]], *, committed: bool, deadline: Deadline
    ) -> Mapping[str, EndAnswer]:
        """Send ``EndTxn`` for each Kafka id with the producer id and epoch that name one transaction. May be repeated."""

    def open_transactions(
        self, asked: Sequence[tuple[PreparedTxnState, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Sequence[Sequence[OpenTransaction]]:
        """For each state with further (topic, partition) pairs: the transactions that its producer has open.

        Looks in these, and in every partition of the topics that the state names. Transactions of every epoch count. Waits for
        leaders, then asks them (``DescribeProducers``).
        """

    def producer_epochs(
        self, states: Sequence[PreparedTxnState], deadline: Deadline
    ) -> Sequence[Mapping[tuple[str, int], ShownProducer | None]]:
        """For each state, by (topic, partition), its producer as the leader shows it now. Does not wait for leaders.

        None for a partition that certainly no longer exists. Partitions whose leader does not answer are missing.
        """

    def transaction_version(self, deadline: Deadline, *, fresh: bool = False) -> int:
        """The cluster's finalized ``transaction.version``; 0 if it has none. ``fresh`` asks even if it is known already."""


def native_of(coordinator: TransactionCoordinator) -> NativeCoordinator:
    """The coordinator, if it can end native transactions.

    Raises:
        IllegalStateError: It cannot.
    """
    # Not by isinstance(), which compares some twenty names each time: callers ask often.
    if not hasattr(coordinator, "producer_epochs"):
        raise IllegalStateError("this coordinator cannot end transactions of the native engine")
    return coordinator  # type: ignore[return-value] # as just looked up


# The port for observers of dual writes, settling and writers. The implementations here do nothing.
# An observer changes nothing except the headers of messages, and raises nothing. The recipes call it in a few places: when a
# dual write moves to its next phase, when messages are produced, when something was settled, and when a loss is reported.

Text = str | bytes | None
Headers = Mapping[str, Text] | Sequence[tuple[str, Text]] | None


class Settled(Protocol):
    """The result of a settling, as far as observers need it."""

    @property
    def rolled_forward(self) -> Sequence[str]:
        """The transactional ids whose decided transaction was committed."""

    @property
    def retired(self) -> int:
        """How many Kafka ids were made unusable, which aborts what is open under them."""

    @property
    def repaired(self) -> Sequence[str]:
        """The transactional ids for which markers were written that a broker had forgotten."""


class _Observer:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The block has ended, with this error if any."""


class WriteObserver(_Observer):
    """Observes one dual write, which runs inside its ``with`` block."""

    def lane(self, transactional_id: str) -> None:
        """The dual write has a lane, and runs under the lane's id. Next it begins the database transaction."""

    def enter(self, phase: Phase) -> None:
        """A phase begins, and the previous one has ended."""

    def moved(self, state: WriteState) -> None:
        """The dual write has moved to another state."""

    def producing(self, topic: str, headers: Headers) -> Headers:
        """Messages of this topic are about to be produced. Returns the headers to produce them with."""
        del topic
        return headers

    def sent(self, topic: str, count: int) -> None:
        """Messages were handed to the producer, those of released savepoints included."""


class SettleObserver(_Observer):
    """Observes one settling, which runs inside its ``with`` block."""

    def settled(self, report: Settled) -> None:
        """It has ended with this report."""


class OutboxNews(Enum):
    """What may happen to messages that wait in the database."""

    FELL_BACK = "a block turned the mode to later"
    SENT = "messages that waited were sent"
    ASIDE = "messages that Kafka refuses were moved aside"


class Observer:
    """Observes writers and recoveries. Used by many threads at once."""

    def writing(self, writer: str, database: str) -> WriteObserver:
        """A dual write begins.

        Args:
            writer: The writer's transactional id.
            database: SQLAlchemy's name of the kind of database.
        """
        del writer, database
        return NO_WRITE_OBSERVER

    def grouped(self, writer: str, units: int) -> None:
        """A group has ended; it had begun that number of units."""

    def outbox(self, writer: str, news: OutboxNews, count: int) -> None:
        """Something has happened to ``count`` messages that wait in the database, or to the mode."""

    def settling(self, transactional_ids: Sequence[str]) -> SettleObserver:
        """Ids were claimed, and are about to be settled."""
        del transactional_ids
        return NO_SETTLE_OBSERVER

    def recovering(self) -> SettleObserver:
        """A recovery begins."""
        return NO_SETTLE_OBSERVER

    def lost(self, loss: DecidedTransactionLost | OutcomeUnverifiable | DatabaseWentBack) -> None:
        """A loss is reported that no block has raised."""

    def opened(self, health: Callable[[], Health], longest_open_s: Callable[[], float | None]) -> Callable[[], None]:
        """A writer is opening.

        Args:
            health: The writer's health.
            longest_open_s: The age of the oldest transaction open in Kafka, in seconds, as the brokers last reported it; None
                if it is not known. Calls make the background ask Kafka again now and then.

        Both may be called at any time, by any thread, and return at once.

        Returns:
            A function to call when the writer is closed. It may be called more than once.
        """
        del health, longest_open_s
        return _nothing


def _nothing() -> None:
    pass


NO_WRITE_OBSERVER = WriteObserver()
NO_SETTLE_OBSERVER = SettleObserver()
NO_OBSERVER = Observer()
