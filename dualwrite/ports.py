"""The ports: Kafka and the database as the recipes need them, as small protocols.

The real adapters are in ``dualwrite.kafka`` and ``dualwrite.stores``. Every call is bounded by the deadline it is given; if a
server does not answer until then, the call raises :class:`~dualwrite.errors.Unavailable`: silence is never an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, TypeAlias

from dualwrite.prepared_state import PreparedTxnState
from dualwrite.protocol.naming import kafka_id

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dualwrite.deadline import Deadline
    from dualwrite.kafka.producer import TransactionalProducer
    from dualwrite.observations import EndAnswer, LogProof, Outcome, TransactionView
    from dualwrite.protocol.doubt import DatabaseVerdict
    from dualwrite.protocol.lost_decisions import Later


@dataclass(frozen=True)
class StateRow:
    """One row of ``kafka_transaction_state``.

    Attributes:
        transactional_id: The user's name of the sequence of dual writes.
        prepared: The newest decided transaction; the empty state if there was none.
        namespace: Random text made with the row; part of every Kafka id.
        incarnation: Raised by every claim. The last claimant is the owner.
        settled_incarnation: This incarnation and all below it are complete.
        completed: The outcome of ``prepared`` in Kafka, once recorded.
        cluster_id: The Kafka cluster that the row belongs to.
        owner: The name of the last claimant.
        updated_at: When the row last changed, by the database's clock.
    """

    transactional_id: str
    prepared: PreparedTxnState
    namespace: str
    incarnation: int
    settled_incarnation: int
    completed: Outcome | None
    cluster_id: str
    owner: str
    updated_at: datetime

    def kafka_id(self, incarnation: int) -> str:
        """The Kafka ``transactional.id`` of an incarnation: it has exactly one writer, ever."""
        return kafka_id(self.transactional_id, self.namespace, incarnation)


@dataclass(frozen=True)
class Participant:
    """A database transaction that was prepared (``PREPARE TRANSACTION``), and waits for the decision on its row.

    Attributes:
        row: The row.
        incarnation: The incarnation of the row that prepared it.
        name: The database's name for it.
        decided: Whether the row names the Kafka transaction that it was prepared with.
        prepared_at: When it was prepared, by the database's clock.
    """

    row: StateRow
    incarnation: int
    name: str
    decided: bool
    prepared_at: datetime


@dataclass(frozen=True)
class Incident:
    """One decided transaction that Kafka does not have, or whose outcome is unknown. It stays until a person has looked.

    Attributes:
        transactional_id: The id that the transaction ran under.
        prepared_transaction_state: The transaction's text form: it names the partitions and the first offsets.
        outcome: ``LOST`` or ``UNVERIFIABLE``.
        detail: The evidence, for people to read.
        detected_at: When it was recorded, by the database's clock.
        acknowledged_at: When a person acknowledged it; None until then.
        told_at: When it was reported to a caller, by an error or a report; None until then.
    """

    transactional_id: str
    prepared_transaction_state: str
    outcome: Outcome
    detail: str
    detected_at: datetime
    acknowledged_at: datetime | None
    told_at: datetime | None = None

    @property
    def state(self) -> PreparedTxnState:
        """The transaction."""
        return PreparedTxnState.from_string(self.prepared_transaction_state)


class TransactionCoordinator(Protocol):
    """Kafka's coordinator and log, as seen by a client other than the producer. Every call may be repeated."""

    def cluster_id(self, deadline: Deadline) -> str:
        """The id of the cluster that the bootstrap servers belong to."""
        ...

    def max_transaction_timeout_ms(self, deadline: Deadline) -> int | None:
        """The broker's ``transaction.max.timeout.ms``; None if we may not read it."""
        ...

    def describe(self, kafka_ids: Collection[str], deadline: Deadline) -> Mapping[str, TransactionView]:
        """The coordinator's view of each id; an unknown id has the status ``NO_SUCH_ID``."""
        ...

    def list_ids(self, prefix: str, deadline: Deadline) -> Sequence[str]:
        """All transactional ids with that prefix that any coordinator knows."""
        ...

    def open_offsets(
        self, states: Sequence[PreparedTxnState], deadline: Deadline
    ) -> Sequence[Mapping[tuple[str, int], int | None]]:
        """For each state, by (topic, partition) of its evidence, where its producer's open transaction began there.

        Asks the current leaders (``DescribeProducers``). None where that producer has nothing open. A partition that certainly
        no longer exists is left out: its topic was deleted, perhaps recreated with another id.
        """
        ...

    def producer_open_offsets(
        self, producer_id: int, epoch: int, partitions: Collection[tuple[str, int]], deadline: Deadline
    ) -> Mapping[tuple[str, int], int | None]:
        """Where the open transaction of a producer began in each (topic, partition); None where it has nothing open.

        Asks the current leaders (``DescribeProducers``).
        """
        ...

    def still_open(
        self, suspects: Sequence[tuple[int, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Sequence[Mapping[tuple[str, int], int]]:
        """For each producer id with (topic, partition) pairs: those in which it has a transaction open, and where that began.

        Transactions of every epoch count. Waits for leaders, then asks them (``DescribeProducers``).
        """
        ...

    def end(
        self, transactions: Mapping[str, PreparedTxnState], *, committed: bool, deadline: Deadline, once: bool = False
    ) -> Mapping[str, EndAnswer]:
        """Send ``EndTxn`` for each Kafka id with its state's producer id and epoch. A request may be sent more than once.

        With ``once`` it is not: an id whose one request was not answered is missing from the answer.
        """
        ...

    def retire(
        self, kafka_ids: Collection[str], deadline: Deadline, *, timeouts_ms: Mapping[str, int] | None = None
    ) -> Mapping[str, tuple[int, int]]:
        """Send ``InitProducerId`` for each id until it succeeds: aborts what is ongoing and fences every producer of the id.

        Args:
            kafka_ids: The ids.
            deadline: Limits the whole call.
            timeouts_ms: The transaction timeout for ids under which something must still be ended; others get a short one.

        Returns:
            By id, its new producer id and epoch.
        """
        ...

    def add_partitions(
        self, transactions: Mapping[str, tuple[int, int, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Mapping[str, bool]:
        """Send ``AddPartitionsToTxn`` for each Kafka id with producer id, epoch and partitions: begins a transaction there.

        Returns:
            By id, whether they were added; False if the id has another producer id or epoch, or a partition is gone.
        """
        ...

    def prove(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[LogProof]:
        """The log's proof of the outcome of each state's transaction."""
        ...

    def prove_now(
        self, states: Sequence[PreparedTxnState], deadline: Deadline, *, read_on: bool
    ) -> Sequence[Mapping[tuple[str, int], LogProof | None]]:
        """For each state, the present proof of the log of each (topic, partition). Does not wait for markers or leaders.

        None for a partition that certainly no longer exists. Partitions whose leader does not answer are missing.

        Args:
            states: The transactions.
            deadline: Limits the whole call.
            read_on: Whether to read on, which may take long, where something is open before a transaction. Otherwise the proof
                is ``OPEN`` there.
        """
        ...

    def later_commits(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[Later]:
        """For each state, the later activity of its producer in the logs of its partitions."""
        ...

    def topic_ids(self, topics: Collection[str], deadline: Deadline) -> Mapping[str, str]:
        """The id of each topic as URL-safe base64. A topic that does not exist is missing from the answer."""
        ...

    def close(self) -> None:
        """Close the connections. May be called more than once."""
        ...


Message: TypeAlias = "Callable[[TransactionalProducer], None]"
"""Hands one message, many, or offsets to the producer that it is called with."""


class SavepointWatch(Protocol):
    """The savepoints that are open on the connection of a dual write, and the messages that wait for them."""

    @property
    def direct(self) -> bool:
        """Whether a message may go to the producer at once, without :meth:`add`."""
        ...

    @property
    def holds(self) -> bool:
        """Whether a message that is added now waits for a savepoint."""
        ...

    def add(self, message: Message) -> None:
        """Add a produced message. :meth:`take` returns it now, or when its savepoint is released, or never.

        Raises:
            TransactionAborted: Its savepoint cannot be known: both sides must abort.
            IllegalStateError: Its savepoint cannot be asked for now: the driver's connection is in the middle of a COPY.
            Unavailable: The database does not answer.
        """
        ...

    def take(self) -> Sequence[Message]:
        """The messages to send now, in the order in which they were produced; each is taken once."""
        ...

    def finish(self) -> None:
        """Release all open savepoints, as the database is about to commit, and stop watching.

        Raises:
            TransactionAborted: A savepoint was rolled back unseen after a message was produced in it.
            Unavailable: The database does not answer.
        """
        ...

    def stop(self) -> None:
        """Stop watching. May be called more than once."""
        ...


class StateStore(Protocol):
    """The rows in the user's database. Methods that take a connection run inside the caller's transaction there."""

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
            cluster_id: The Kafka cluster at hand.
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

    def record_outcomes(self, outcomes: Sequence[tuple[StateRow, Outcome, str]]) -> None:
        """Record the outcome of each row's ``prepared``, with a detail for people, in one transaction.

        A loss also becomes an incident, which later decisions do not erase. Durable on return; may be repeated.
        """
        ...

    def mark_settled(self, incarnations: Mapping[str, int]) -> None:
        """Raise ``settled_incarnation`` of each id to at least that value."""
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
        """The database's own verdict on a transaction that :meth:`decide` named."""
        ...

    def check_same_database(self, connection: Connection) -> None:
        """Refuse a connection to a database other than that of the rows. The connection is left as it is.

        Raises:
            ConfigurationError: It does.
            IllegalStateError: It is already in a transaction.
            Unavailable: The database does not answer.
        """
        ...

    def watch_savepoints(self, connection: Connection, transactional_id: str) -> SavepointWatch | None:
        """Watch the savepoints of the transaction that :meth:`begin` began, until the watch is finished or stopped.

        None if the connection has no savepoints.
        """
        ...

    def begin(self, connection: Connection) -> None:
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
        connection: Connection,
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
        connection: Connection,
        transactional_id: str,
        incarnation: int,
        state: PreparedTxnState,
        *,
        namespace: str | None = None,
        idle_s: float | None = None,
        within_s: float | None = None,
        answer_s: float | None = None,
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

        Returns:
            Whether the one row was updated, and the database's name for this transaction if it has one. False means
            fenced: roll back.

        Raises:
            IllegalStateError: The state is not of this incarnation or holds no evidence; or the database transaction is no
                longer the one that :meth:`begin` began.
            TransactionAborted: The transaction cannot go on: an earlier statement had failed, or a conflict (at REPEATABLE
                READ and SERIALIZABLE a claim shows as one; the next attempt finds that it is fenced).
            Unavailable: The database does not answer.
        """
        ...

    def hold(
        self,
        connection: Connection,
        transactional_id: str,
        incarnation: int,
        *,
        namespace: str | None = None,
        answer_s: float | None = None,
    ) -> bool:
        """The last statement if nothing was produced: keep the row's incarnation as it is until COMMIT, if it is ours.

        Raises as :meth:`decide`.
        """
        ...

    def run_deferred(self, connection: Connection, transactional_id: str | None = None) -> None:
        """Run now everything that the user's statements have deferred to COMMIT, so that COMMIT has nothing left to run.

        Triggers may take any time, and in COMMIT nothing bounds them on older servers. Call it before anything is prepared.

        Raises:
            TransactionAborted: A constraint is violated, or the database failed.
        """
        ...

    def prepare(
        self, connection: Connection, row: StateRow, state: PreparedTxnState, *, answer_s: float | None = None
    ) -> None:
        """Instead of :meth:`commit`: prepare the transaction for the decider of the Kafka transaction, which then ends both.

        On return it is durable, and no longer the connection's: a :class:`Participant` of the state's incarnation.

        Raises:
            TransactionAborted: It was rolled back. The database may not allow prepared transactions, or no more of them.
            TransactionInDoubt: The answer is missing.
        """
        ...

    def commit(self, connection: Connection, *, answer_s: float | None = None) -> None:
        """Commit the database transaction. On return it is durable: the decision.

        Args:
            connection: Inside the transaction.
            answer_s: How long to wait for the answer, in seconds; None waits for ever.

        Raises:
            TransactionAborted: It was certainly rolled back, even if the server would have answered COMMIT with a silent
                ROLLBACK.
            TransactionInDoubt: The answer is missing, for any reason; if that is an interruption (``KeyboardInterrupt``), it is
                the cause. The driver's connection was discarded.
        """
        ...

    def rollback(self, connection: Connection) -> None:
        """Roll back what the connection has open, if anything. Never raises: a dead connection is discarded."""
        ...

    def discard(self, connection: Connection) -> None:
        """Discard the connection, whatever it has open: it must not be used again. Never raises."""
        ...
