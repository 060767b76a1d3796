"""The ports: what the recipes need of Kafka and of the database, as small protocols.

Real adapters stand in ``dualwrite.kafka`` and ``dualwrite.stores``. Every call is bounded by the deadline it is given; a
server that does not answer until then is :class:`~dualwrite.errors.Unavailable`: no answer is never an answer.
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
        incarnation: Raised by every claim. The owner is whoever raised it last.
        settled_incarnation: That incarnation and all below are complete.
        completed: What became of ``prepared`` in Kafka, once recorded.
        cluster_id: The Kafka cluster that the row belongs to.
        owner: Who claimed it last.
        updated_at: When the row changed last, by the database's clock.
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
    """A database transaction that was prepared (``PREPARE TRANSACTION``), and waits for what is decided on its row.

    Attributes:
        row: The row.
        incarnation: Who has prepared it: the incarnation of the row at that time.
        name: The database's name of it.
        decided: Whether the row names the Kafka transaction that it was prepared with.
        prepared_at: Since when it waits, by the database's clock.
    """

    row: StateRow
    incarnation: int
    name: str
    decided: bool
    prepared_at: datetime


@dataclass(frozen=True)
class Incident:
    """One decided transaction that Kafka does not have, or that nobody can tell of. It stays until a person has looked.

    Attributes:
        transactional_id: Whose transaction it was.
        prepared_transaction_state: The transaction's text form: it names the partitions and the first offsets.
        outcome: ``LOST`` or ``UNVERIFIABLE``.
        detail: What was seen, for people to read.
        detected_at: When it was recorded, by the database's clock.
        acknowledged_at: When a person has acknowledged it; None until then.
        told_at: When a caller was told of it by an error or a report; None until then.
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
    """Kafka's coordinator and log, as seen by somebody who is not the producer. Every call may be repeated."""

    def cluster_id(self, deadline: Deadline) -> str:
        """The id of the cluster that the bootstrap servers belong to."""
        ...

    def max_transaction_timeout_ms(self, deadline: Deadline) -> int | None:
        """The broker's ``transaction.max.timeout.ms``; None where we may not read it."""
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

        Asked of the current leaders (``DescribeProducers``). None where that producer has nothing open. A partition that
        certainly does not exist any more is left out: its topic was deleted, perhaps made anew with another id.
        """
        ...

    def producer_open_offsets(
        self, producer_id: int, epoch: int, partitions: Collection[tuple[str, int]], deadline: Deadline
    ) -> Mapping[tuple[str, int], int | None]:
        """Where the open transaction of a producer began in each (topic, partition); None where it has nothing open.

        Asked of the current leaders (``DescribeProducers``).
        """
        ...

    def still_open(
        self, suspects: Sequence[tuple[int, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Sequence[Mapping[tuple[str, int], int]]:
        """For each producer id with (topic, partition) pairs: those in which it has a transaction open, and where that began.

        Under whatever epoch it began. Asked of the current leaders (``DescribeProducers``), once they can be.
        """
        ...

    def end(
        self, transactions: Mapping[str, PreparedTxnState], *, committed: bool, deadline: Deadline, once: bool = False
    ) -> Mapping[str, EndAnswer]:
        """``EndTxn`` for each Kafka id with its state's producer id and epoch. It may have been sent more than once.

        With ``once`` it is not: an id whose one request was not answered is missing from the answer.
        """
        ...

    def retire(
        self, kafka_ids: Collection[str], deadline: Deadline, *, timeouts_ms: Mapping[str, int] | None = None
    ) -> Mapping[str, tuple[int, int]]:
        """``InitProducerId`` for each id until it succeeds: aborts what is ongoing and fences every producer of the id.

        Args:
            kafka_ids: The ids.
            deadline: Bounds the whole.
            timeouts_ms: The transaction timeout for those under which something is still to be ended; others get a short one.

        Returns:
            By id, the producer id and epoch that it has now.
        """
        ...

    def add_partitions(
        self, transactions: Mapping[str, tuple[int, int, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Mapping[str, bool]:
        """``AddPartitionsToTxn`` for each Kafka id with producer id, epoch and partitions: begins a transaction there.

        Returns:
            By id, whether they were added; False where the id has another producer id or epoch, or a partition is gone.
        """
        ...

    def prove(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[LogProof]:
        """What the log proves of each state's transaction."""
        ...

    def prove_now(
        self, states: Sequence[PreparedTxnState], deadline: Deadline, *, read_on: bool
    ) -> Sequence[Mapping[tuple[str, int], LogProof | None]]:
        """For each state, what the log of each (topic, partition) proves of it now. Waits for nobody.

        None for a partition that certainly does not exist any more. Those whose leader does not answer are missing.

        Args:
            states: The transactions.
            deadline: Bounds the whole.
            read_on: Whether to read on where something is open before a transaction, also where that takes long. Otherwise
                that is ``OPEN``.
        """
        ...

    def later_commits(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[Later]:
        """For each state, what the logs of its partitions show of its producer after it."""
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
        """A message is produced: it is given back by :meth:`take` now, or when its savepoint is released, or never.

        Raises:
            TransactionAborted: Which savepoint it belongs to cannot be known: both sides must abort.
            IllegalStateError: That cannot be asked now: the driver's connection is in the middle of a COPY.
            Unavailable: The database does not answer.
        """
        ...

    def take(self) -> Sequence[Message]:
        """The messages to send now, in the order in which they were produced; each is taken once."""
        ...

    def finish(self) -> None:
        """The database is about to commit: what is still open counts as released. Stops watching.

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
            owner: Who claims: a name that nobody else has, ever.
            cluster_id: The Kafka cluster at hand.
            guard: A transactional id whose last claim must be this owner's, and the newest incarnation of it that the owner
                knows of. It may be one of those claimed: its owner renews it without taking it from whoever took over.
            verify: Called with the claimed rows before the COMMIT; what it raises rolls the claim back.
            raise_to: Ids whose incarnation becomes at least this value (after a restored database).

        Returns:
            The rows as they are after the claim, in order of id: the new incarnation is ours, and ``prepared`` is what the
            newest decision left. A state that was read before would be stale.

        Raises:
            ConfigurationError: A row belongs to another cluster, or cannot be parsed; nothing was claimed.
            Fenced: The guard was claimed by another owner; nothing was claimed.
        """
        ...

    def read(self, transactional_ids: Sequence[str]) -> Sequence[StateRow]:
        """The rows of these ids, in order of id; missing ones are left out."""
        ...

    def read_locked(self, transactional_id: str, deadline: Deadline) -> StateRow:
        """The row, read under its lock on a connection of its own: whoever was deciding on it has come to an end.

        Raises:
            Unavailable: The lock was not free in time, or the database does not answer.
        """
        ...

    def while_locked(self, transactional_ids: Sequence[str], work: Callable[[], None], deadline: Deadline) -> None:
        """Do the work under the rows' locks: nobody else who asks for them does his at the same time.

        The work must not touch the rows, and must bear being begun again: that happens when the lock was lost on the way.

        Raises:
            Unavailable: A lock was not free in time, or the database does not answer.
        """
        ...

    def find(self, prefix: str) -> Sequence[StateRow]:
        """All rows whose id begins with the prefix, in order of id."""
        ...

    def record_outcomes(self, outcomes: Sequence[tuple[StateRow, Outcome, str]]) -> None:
        """Record what became of each row's ``prepared``, with a detail for people, in one transaction.

        A loss also becomes an incident, which later decisions do not erase. Durable on return; may be repeated.
        """
        ...

    def mark_settled(self, incarnations: Mapping[str, int]) -> None:
        """Raise ``settled_incarnation`` of each id to at least that value."""
        ...

    def participants(self, rows: Collection[StateRow]) -> Sequence[Participant]:
        """The database transactions that were prepared for these rows, under whatever incarnation, and are not ended."""
        ...

    def end_participant(self, participant: Participant, *, committed: bool) -> None:
        """Commit or roll back what was prepared. Durable on return. Does nothing if that is done already.

        Raises:
            ConfigurationError: Somebody else has prepared it, and we may not end it.
            Unavailable: The database does not answer.
        """
        ...

    def incident(self, transactional_id: str, state: PreparedTxnState) -> Outcome | None:
        """The loss that was recorded for that state, if any."""
        ...

    def incidents(self, prefix: str = "", *, acknowledged: bool = False) -> Sequence[Incident]:
        """The incidents of ids that begin with the prefix, oldest first; also the acknowledged ones if asked for."""
        ...

    def incidents_of(self, transactional_ids: Collection[str]) -> Sequence[Incident]:
        """All incidents of these ids, oldest first, also the acknowledged ones."""
        ...

    def note_told(self, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
        """Note of incidents, by id and transaction, that a caller is told of them now. Does nothing where there is none."""
        ...

    def acknowledge(self, transactional_id: str, state: PreparedTxnState) -> bool:
        """Note that a person has looked at the incident. False if there is none that was not acknowledged yet."""
        ...

    def transaction_verdict(self, transaction: str | None) -> DatabaseVerdict:
        """The database's own word about a transaction that :meth:`decide` named."""
        ...

    def check_same_database(self, connection: Connection) -> None:
        """Refuse a connection that leads to another database than the rows are in. It is left as it is.

        Raises:
            ConfigurationError: It does.
            IllegalStateError: It is already in a transaction.
            Unavailable: The database does not answer.
        """
        ...

    def watch_savepoints(self, connection: Connection, transactional_id: str) -> SavepointWatch | None:
        """Watch the savepoints of the transaction that :meth:`begin` began, until the watch is finished or stopped.

        None where the connection has none.
        """
        ...

    def begin(self, connection: Connection) -> None:
        """Begin the database transaction of a dual write on the caller's connection.

        On SQLite it takes the write lock. On PostgreSQL nothing is sent yet: the snapshot begins with the next statement.
        Until :meth:`commit`, :meth:`rollback` or :meth:`discard` a COMMIT of anybody else's on this connection is refused,
        and rolls back.

        Raises:
            IllegalStateError: The connection is already in a transaction, or closed. It is left as it is.
            ConfigurationError: The connection is in autocommit or read-only, or what it commits would not survive a crash.
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
        """The first statement of a dual write: the row's incarnation now, None if there is no row.

        With a namespace, here as in :meth:`decide` and :meth:`hold`, a row of another namespace is none: a row that was
        deleted and made anew counts its incarnations from the start again.

        With ``known``, the row as its owner knows it with its newest decision, it is found out if the database has lost
        commits since, as after an asynchronous failover.

        Its answer is needed before the first produce. From here on the server ends the session of an owner that is paused
        for too long, where it can.

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
        """The last statement of a dual write: store the state on condition of the incarnation.

        Makes the coming COMMIT durable where the session had asked for less. May be called for several ids in one
        transaction, in order of id. Waits for a claim that is under way.

        Args:
            connection: Inside the transaction.
            transactional_id: The row's key.
            incarnation: What the row must name.
            state: What to store.
            namespace: What the row must hold, if given.
            idle_s: Where a server can, it ends the session if COMMIT does not come for so long.
            within_s: Where a server can, it ends the transaction after so long, its COMMIT included.
            answer_s: How long to wait for the answer; the connection is lost then.

        Returns:
            Whether the one row was updated, and the database's name of this transaction where it has one. False means
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
        """The last statement where nothing was produced: keep the row's incarnation as it is until COMMIT, if it is ours.

        Raises as :meth:`decide`.
        """
        ...

    def run_deferred(self, connection: Connection, transactional_id: str | None = None) -> None:
        """Make everything that the user's statements have deferred to COMMIT run now, so that COMMIT has nothing to run.

        Triggers may take any time, and in COMMIT nothing bounds them on older servers. To be called before anything is
        prepared.

        Raises:
            TransactionAborted: A constraint is violated, or the database failed.
        """
        ...

    def prepare(
        self, connection: Connection, row: StateRow, state: PreparedTxnState, *, answer_s: float | None = None
    ) -> None:
        """Instead of :meth:`commit`: keep the transaction for whoever decides on the Kafka transaction, and ends both then.

        On return it is durable, and no longer the connection's: a :class:`Participant` of the state's incarnation.

        Raises:
            TransactionAborted: It was rolled back. The database may not take prepared transactions, or no more of them.
            TransactionInDoubt: The answer is missing.
        """
        ...

    def commit(self, connection: Connection, *, answer_s: float | None = None) -> None:
        """Commit the database transaction. On return it is durable: the decision.

        Args:
            connection: Inside the transaction.
            answer_s: How long to wait for the answer, in seconds; None for ever.

        Raises:
            TransactionAborted: It was certainly rolled back, also where the server would have answered COMMIT with a silent
                ROLLBACK.
            TransactionInDoubt: The answer is missing, for whatever reason; an interruption (``KeyboardInterrupt``) is then
                the cause. The driver's connection was thrown away.
        """
        ...

    def rollback(self, connection: Connection) -> None:
        """Roll back what the connection has open, if anything. Never raises: a dead connection is thrown away."""
        ...

    def discard(self, connection: Connection) -> None:
        """Throw the connection away, whatever it has open: nobody may go on with it. Never raises."""
        ...
