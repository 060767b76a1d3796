"""The lane, the store and the log behind a writer in memory, and the failures that a test plants in them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import exc, literal_column, select
from sqlalchemy.pool import StaticPool

from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DatabaseWentBack,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    IllegalStateError,
    OutcomeUnverifiable,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.protocol.message import (
    ConsumedOffsets,
    Message,
    MessageBatch,
    MessageColumns,
    ProducerRecord,
    Unsendable,
)
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import NEVER_MS, Decision, FirstLook, OutboxMode, StateRow, outbox_id
from dualwrite.recovery.claim import OwnerContext
from dualwrite.stores.sql import dialect as committing
from dualwrite.stores.sql.access import keep, let_go, map_database_error
from dualwrite.stores.sql.dialect import Identity
from dualwrite.stores.sql.savepoints import SavepointWatch
from dualwrite.stores.sql.short_transactions import SameDatabase, ShortTransactions, dialect_of
from dualwrite.stores.sql.sqlite import SQLite
from dualwrite.stores.sql.store import refuse_transaction
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.writing.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine

    from dualwrite.clock import Deadline
    from dualwrite.interfaces import Observer
    from dualwrite.protocol.message import DeliveryCallback, Sendable
    from dualwrite.stores.sql.dialect import Dialect
    from dualwrite.stores.sql.tables import Tables


class Place(Enum):
    """The steps of a dual write, in order.

    ``BEGIN``: the database transaction begins, and the row is read. ``PRODUCE``: a message, or offsets, are handed to the
    producer. ``PREPARE``: all messages are flushed. ``DECIDE``: the decision is written, not committed. ``COMMIT``: the
    database commits. ``COMPLETE``: Kafka commits. A block without messages reaches neither ``PREPARE`` nor ``COMPLETE``.
    """

    BEGIN = "begin"
    PRODUCE = "produce"
    PREPARE = "prepare"
    DECIDE = "decide"
    COMMIT = "commit"
    COMPLETE = "complete"


class Rows(Enum):
    """Whether the rows of a dual write are in the database."""

    ABSENT = "not there"
    COMMITTED = "there"
    EITHER = "there or not"


@dataclass(frozen=True)
class Effect:
    """The effect of one failure: the error that leaves the block, and whether the rows are there.

    `settled` says whether settling makes the messages visible if the rows are there. Until then they are not.
    """

    raised: type[DualWriteError]
    outcome: str
    rows: Rows = Rows.ABSENT
    settled: bool = False


_ABORTED: Final = Effect(TransactionAborted, "aborted")
_FENCED: Final = Effect(Fenced, "aborted")
_REFUSED: Final = Effect(ConfigurationError, "none")
_SILENT: Final = Effect(Unavailable, "none")

# By place and planted error: the ways in which the real writer's servers can fail. A test compares the two writers.
EFFECTS: Final[Mapping[tuple[Place, type[DualWriteError]], Effect]] = MappingProxyType(
    {
        (Place.BEGIN, Fenced): _FENCED,
        (Place.BEGIN, Unavailable): _SILENT,
        (Place.BEGIN, ConfigurationError): _REFUSED,
        (Place.BEGIN, DatabaseWentBack): Effect(DatabaseWentBack, "none"),
        (Place.PRODUCE, TransactionAborted): _ABORTED,
        (Place.PRODUCE, Fenced): _FENCED,
        (Place.PRODUCE, Unavailable): _SILENT,
        (Place.PRODUCE, ConfigurationError): _REFUSED,
        (Place.PREPARE, TransactionAborted): _ABORTED,
        (Place.PREPARE, Fenced): _FENCED,
        (Place.PREPARE, Unavailable): _ABORTED,
        (Place.PREPARE, ConfigurationError): _REFUSED,
        (Place.DECIDE, TransactionAborted): _ABORTED,
        (Place.DECIDE, Fenced): _FENCED,
        (Place.DECIDE, Unavailable): _ABORTED,
        (Place.COMMIT, TransactionAborted): _ABORTED,
        (Place.COMMIT, TransactionInDoubt): Effect(TransactionInDoubt, "unknown", Rows.EITHER, settled=True),
        (Place.COMPLETE, CompletionPending): Effect(CompletionPending, "decided", Rows.COMMITTED, settled=True),
        (Place.COMPLETE, DecidedTransactionLost): Effect(DecidedTransactionLost, "lost", Rows.COMMITTED),
        (Place.COMPLETE, OutcomeUnverifiable): Effect(OutcomeUnverifiable, "unknown", Rows.COMMITTED),
    }
)


# The failures that a test has planted, until a dual write reaches their places.


@dataclass(frozen=True)
class Failure:
    """One planted failure: the place, and the error that the server's part raises there.

    `rows_committed` says whether the database commits nevertheless.
    """

    place: Place
    error: DualWriteError
    rows_committed: bool

    def __str__(self) -> str:
        return f"{type(self.error).__name__} at {self.place.value!r}"


class Planted:
    """The planted failures that have not happened yet, in the order of planting. Used by many threads at once.

    `fenced` says that another owner has taken over: no dual write of this writer can begin any more.
    """

    def __init__(self, transactional_id: str) -> None:
        self._transactional_id = transactional_id
        self._waiting: list[Failure] = []
        self._lock = threading.Lock()
        self.fenced = False

    def take_all(self) -> Sequence[Failure]:
        """The failures that no dual write has reached. None of them happens any more."""
        with self._lock:
            unreached, self._waiting = self._waiting, []
            return unreached

    def add(self, place: Place, error: type[DualWriteError] | DualWriteError, *, rows_committed: bool | None) -> None:
        """Add a failure; `ValueError` if the real writer cannot fail in this way."""
        if isinstance(error, type):
            error = error(f"a test has planted this at {place.value!r}", transactional_id=self._transactional_id)
        effect = EFFECTS.get((place, type(error)))
        if effect is None:
            possible = ", ".join(kind.__name__ for at, kind in EFFECTS if at is place)
            raise ValueError(f"{place.value!r} cannot fail with {type(error).__name__}; it can with {possible}")
        if rows_committed is not None and effect.rows is not Rows.EITHER:
            raise ValueError(f"with {type(error).__name__} at {place.value!r} the rows are always {effect.rows.value}")
        with self._lock:
            self._waiting.append(Failure(place, error, rows_committed is not False))

    def take(self, place: Place) -> Failure | None:
        """The failure of a dual write that has reached this place, if any. It happens once."""
        with self._lock:
            found = next((one for one in self._waiting if one.place is place), None)
            if found is not None:
                self._waiting.remove(found)
                self.fenced = self.fenced or isinstance(found.error, Fenced)
            return found

    def reach(self, place: Place) -> None:
        """Reach a place, and raise what was planted there."""
        if (found := self.take(place)) is not None:
            raise found.error


_INCARNATION: Final = 1
_OWNER: Final = "in memory"


class _Delivered:
    """A message as a delivery callback gets it."""

    def __init__(self, record: ProducerRecord) -> None:
        self._record = record

    def topic(self) -> str:
        return self._record.topic

    def partition(self) -> int | None:
        return self._record.partition

    def key(self) -> bytes | None:
        return cast("bytes | None", self._record.key)

    def value(self) -> bytes | None:
        return cast("bytes | None", self._record.value)

    def headers(self) -> list[tuple[str, bytes | None]]:
        return cast("list[tuple[str, bytes | None]]", list(self._record.headers))

    def error(self) -> None:
        return None


class MemoryProducer:
    """The calls of a `TransactionalProducer` that a dual write makes. Its transaction begins and ends with that of its lane."""

    begun_for_s = 0.0
    transaction_timeout_ms = NEVER_MS

    def __init__(self, lane: MemoryLane, planted: Planted, *, bulk: bool, max_message_bytes: int) -> None:
        self._lane = lane
        self._planted = planted
        self.bulk = bulk
        self.max_message_bytes = max_message_bytes
        self.transactional_id = lane.row.kafka_id(_INCARNATION)
        self.corked = False
        self._undelivered: list[tuple[DeliveryCallback, _Delivered]] = []

    @property
    def engine(self) -> MemoryProducer:
        """What takes messages: itself."""
        return self

    def begin_transaction(self) -> None:
        self._lane.outbox.require_kafka()
        self._undelivered.clear()
        self._lane.begin()

    def limit_waits(self, seconds: float | None, in_vain: Callable[[], bool] | None = None) -> None:
        """It waits for nothing."""

    def require_topic(self, topic: str) -> None:
        """Any topic will do."""

    def refuse_callback(self) -> None:
        if self.bulk:
            raise IllegalStateError(
                "a producer in bulk mode calls no on_delivery", transactional_id=self.transactional_id
            )

    def send(self, message: Message) -> None:
        """``on_delivery`` is called when the messages are flushed."""
        self._planted.reach(Place.PRODUCE)
        self._lane.outbox.require_kafka()
        record = _record_of(message)
        self._lane.transaction.messages.append(record)
        if message.on_delivery is not None:
            self._undelivered.append((message.on_delivery, _Delivered(record)))

    def take(self, held: Sendable) -> None:
        if isinstance(held, ConsumedOffsets):
            self._planted.reach(Place.PRODUCE)
            self._lane.outbox.require_kafka()
            self._lane.transaction.offsets.append((list(held.offsets), held.group_metadata))
        elif isinstance(held, Message):
            self.send(held)
        else:
            try:
                for message in self._messages(held):
                    self.send(message)
            except Unsendable as error:
                raise error.refusal(held.topic, self.transactional_id) from None

    def _messages(self, held: MessageBatch | MessageColumns) -> Iterator[Message]:
        if isinstance(held, MessageColumns):
            # Loads Kafka's clients: the product's own reading of columns.
            from dualwrite.kafka.librdkafka.producer import messages_of  # noqa: PLC0415 - as above

            yield from messages_of(held, self.max_message_bytes)
        else:
            for value, key, size in held.rows(self.max_message_bytes):
                yield Message(held.topic, value, key, None, (), None, None, size)

    def prepare_transaction(self) -> PreparedTxnState:
        self._planted.reach(Place.PREPARE)
        self._lane.outbox.require_kafka()
        while self._undelivered:  # callbacks may produce more
            on_delivery, delivered = self._undelivered.pop(0)
            on_delivery(None, delivered)
        return PreparedTxnState(self._lane.number, 0, _INCARNATION)

    def require_still_open(self) -> None:
        """See the real one."""

    @staticmethod
    def take_callback_error() -> BaseException | None:
        """None: the flush raises a callback's exception."""

    def abort_transaction(self) -> None:
        self._lane.outbox.require_kafka()
        self._lane.end(committed=False)


def _record_of(message: Message) -> ProducerRecord:
    topic, value, key, partition, headers, timestamp_ms, _, _ = message
    return ProducerRecord(topic, value, key, tuple(headers), partition, timestamp_ms)


class MemoryLane:
    """The part of a :class:`dualwrite.writing.lane.Lane` that a dual write and the lanes of a writer use."""

    unrecorded = None
    pending_end = None
    asking_since = None
    question = None
    time_left_s = None
    unsettled_s = 0.0

    def __init__(
        self,
        transactional_id: str,
        engine: Engine,
        dialect: Dialect,
        planted: Planted,
        log: Log,
        *,
        outbox: MemoryOutbox,
        bulk: bool,
        max_message_bytes: int,
    ) -> None:
        self.outbox = outbox
        self.waiting: list[ProducerRecord] = []  # of a block that is about to commit
        self.shares = False
        self.transactional_id = transactional_id
        self.row = StateRow(
            transactional_id,
            PreparedTxnState(),
            "memory",
            _INCARNATION,
            0,
            None,
            _OWNER,
            _OWNER,
            datetime.now(timezone.utc),
        )
        store, joined = (kind(engine, dialect, planted, self) for kind in (MemoryStore, JoinedMemoryStore))
        self.context = OwnerContext(cast("Any", None), cast("Any", store), _OWNER)
        self.joined = OwnerContext(cast("Any", None), cast("Any", joined), _OWNER)
        self.producer = MemoryProducer(self, planted, bulk=bulk, max_message_bytes=max_message_bytes)
        self._planted = planted
        self._log = log
        self._transaction: RecordedTransaction | None = None
        self.number = 0

    @property
    def transaction(self) -> RecordedTransaction:
        """The current Kafka transaction."""
        assert self._transaction is not None
        return self._transaction

    def begin(self) -> None:
        """Begin a Kafka transaction."""
        self._transaction = self._log.begin(self.transactional_id)
        self.number += 1

    def note_rows_committed(self) -> None:
        """Note that the database has committed the current dual write."""
        transaction = self._transaction
        if self.waiting:
            transaction = None  # what was sent is left, and settling aborts it
            self.outbox.put(self.waiting)
        if transaction is None:
            # Rows alone are recorded, too.
            transaction = self._log.begin(self.transactional_id)
            self._log.end(transaction, committed=True)
        transaction.rows_committed = True

    def end(self, *, committed: bool) -> None:
        """End the current Kafka transaction."""
        self._log.end(self.transaction, committed=committed)
        self._transaction = None

    def end_of_rows(self) -> None:
        """The database's transaction has ended, one way or the other."""
        self.waiting = []
        if self.shares:
            self.shares = False
            self.outbox.give_up_share()

    @property
    def needs_settling(self) -> bool:
        """Whether a transaction is ongoing that no dual write will end any more; for a lane that is not in use."""
        return self._transaction is not None

    @property
    def refused(self) -> None:
        """In memory both sides go together."""

    def settle(self, deadline: Deadline) -> None:
        """Commit what the database has committed, and abort what it has not."""
        del deadline
        self.outbox.require_kafka()
        if self._transaction is not None:
            self.end(committed=self._transaction.rows_committed)

    def ready(self, deadline: Deadline, refuse_in_silence: Callable[[], object] | None = None) -> None:
        del refuse_in_silence
        self.settle(deadline)

    def ready_to_wait(self, deadline: Deadline) -> None:
        """Nothing: a block whose messages wait needs no more of it."""

    def complete(
        self, state: PreparedTxnState, deadline: Deadline, leaves: Callable[[], bool] = lambda: False
    ) -> CompletionPending | None:
        del state, deadline
        failure = self._planted.take(Place.COMPLETE)
        if failure is None and not self.outbox.away:
            self.end(committed=True)
            return None
        error = CompletionPending(_AWAY, transactional_id=self.transactional_id) if failure is None else failure.error
        if not isinstance(error, CompletionPending):
            self.end(committed=False)
        elif leaves():
            return error
        raise error

    def record_forgotten(self, error: object) -> None:
        """Nothing: there is no table of incidents."""
        del error

    def discard(self) -> None:
        """Nothing: an ongoing transaction is settled later."""

    def leave_in_doubt(self) -> None:
        """Nothing: in memory nothing is in doubt for longer than its caller's error."""

    def come_to_rest(self) -> None:
        """Nothing: how a transaction has ended is known at once."""

    def know_end(self, deadline: Deadline) -> None:
        """Nothing: how a transaction has ended is known at once."""
        del deadline

    def prove_end(self, deadline: Deadline) -> None:
        """Nothing: how a transaction has ended is known at once."""
        del deadline

    def record_completed(self) -> None:
        """Nothing: there is no row."""

    def compare_with_row(self) -> None:
        """Nothing: there is no row."""


# A Kafka that is a list: the transactions of one writer, with their messages and offsets.


class TransactionState(Enum):
    """The states of a Kafka transaction."""

    ONGOING = "ongoing"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(eq=False)
class RecordedTransaction:
    """One dual write.

    Attributes:
        transactional_id: The id that it ran under.
        messages: Its messages that were handed to the producer.
        offsets: The consumed offsets in it: for each call the offsets and the group's metadata, as they were given.
        rows_committed: Whether the database has committed its rows.
        state: The state of its Kafka transaction: while it is ongoing, nobody sees the messages.
    """

    transactional_id: str
    messages: list[ProducerRecord] = field(default_factory=list)
    offsets: list[tuple[Sequence[object], object]] = field(default_factory=list)
    rows_committed: bool = False
    state: TransactionState = TransactionState.ONGOING


class Log:
    """The transactions in the order in which they began, and those committed in the order of their commits. Thread-safe."""

    def __init__(self) -> None:
        self._began: list[RecordedTransaction] = []
        self._committed: list[RecordedTransaction] = []
        self._lock = threading.Lock()

    def begin(self, transactional_id: str) -> RecordedTransaction:
        """A new transaction."""
        transaction = RecordedTransaction(transactional_id)
        with self._lock:
            self._began.append(transaction)
        return transaction

    def end(self, transaction: RecordedTransaction, *, committed: bool) -> None:
        """Commit or abort it. Does nothing if it has ended."""
        with self._lock:
            if transaction.state is not TransactionState.ONGOING:
                return
            transaction.state = TransactionState.COMMITTED if committed else TransactionState.ABORTED
            if committed:
                self._committed.append(transaction)

    @property
    def transactions(self) -> list[RecordedTransaction]:
        """All transactions, in the order in which they began."""
        with self._lock:
            return list(self._began)

    @property
    def committed(self) -> list[RecordedTransaction]:
        """The committed ones, in the order of their commits."""
        with self._lock:
            return list(self._committed)


# An outbox that is a list, and a Kafka that can be away.

_AWAY: Final = "Kafka does not answer: a test has planted an outage"


class MemoryOutbox(Outbox):
    """The messages of one writer that wait, and its mode. They are sent at once, or when the outage ends. Thread-safe."""

    def __init__(self, writer: str, log: Log, observer: Observer, *, always: bool) -> None:
        super().__init__(writer, observer)
        self._name = writer
        self._log = log
        self._always = always
        self._rows: list[ProducerRecord] = []
        self._shares = 0
        self._changing = threading.RLock()
        self.mode = OutboxMode.LATER if always else OutboxMode.DIRECT
        self.away = False

    def require_kafka(self) -> None:
        """Raise while Kafka is away."""
        if self.away:
            raise Unavailable(_AWAY, transactional_id=self._name)

    @property
    def rows(self) -> list[ProducerRecord]:
        """The messages that wait."""
        with self._changing:
            return list(self._rows)

    def share(self) -> OutboxMode:
        """Take a share of the lock on the mode."""
        with self._changing:
            self._shares += 1
            return self.mode

    def give_up_share(self) -> None:
        """Give it up. The last one lets the mode turn back."""
        with self._changing:
            self._shares -= 1
        self.send()

    def put(self, messages: Sequence[ProducerRecord]) -> None:
        """Let the messages of a block wait, whose rows are committed."""
        with self._changing:
            self.mode = OutboxMode.LATER
            self._rows += messages
            self._note()

    def wake(self) -> None:
        super().wake()
        self.send()

    def send(self) -> None:
        """Send what waits, if Kafka is there."""
        with self._changing:
            if self.away or self.mode is OutboxMode.DIRECT:
                return
            if self._rows:
                transaction = self._log.begin(outbox_id(self._name))
                transaction.messages += self._rows
                transaction.rows_committed = True
                self._log.end(transaction, committed=True)
                self.note_sent(len(self._rows))
                self._rows = []
            if not self._always and not self._shares:
                self.mode = OutboxMode.DIRECT
                self.note_mode(later=False, why="all that waited is sent")
            self._note()

    def _note(self) -> None:
        size = sum(len(cast("bytes", part or b"")) for row in self._rows for part in (row.value, row.key))
        self.note_waiting(len(self._rows), size, 0.0 if self._rows else None)


class MemoryRows:
    """The blocks' calls of :class:`dualwrite.interfaces.OutboxRows`, for one lane."""

    def __init__(self, store: MemoryStore, lane: MemoryLane) -> None:
        self._store = store
        self._lane = lane

    def read_first(
        self,
        connection: Connection,
        transactional_id: str,
        writer: str,
        *,
        namespace: str | None = None,
        known: StateRow | None = None,
    ) -> FirstLook:
        incarnation = self._store.read_incarnation(connection, transactional_id, namespace=namespace, known=known)
        return FirstLook(incarnation, self.mode(connection, writer))

    def mode(self, connection: Connection, writer: str) -> OutboxMode:
        del connection, writer
        return self._lane.outbox.mode

    def share(self, connection: Connection, writer: str, *, within_s: float) -> OutboxMode:
        del connection, writer, within_s
        self._lane.shares = True
        return self._lane.outbox.share()

    def lock(self, connection: Connection, writer: str, *, within_s: float, beside_shares: bool = False) -> OutboxMode:
        """Nobody is kept from anything: the mode turns with the rows, after the commit."""
        del within_s, beside_shares
        return self.mode(connection, writer)

    def turn(self, connection: Connection, writer: str, mode: OutboxMode) -> None:
        """It turns after the commit."""

    def decide(
        self, connection: Connection, decision: Decision, writer: str, messages: Sequence[Sendable]
    ) -> tuple[bool, str | None]:
        del writer
        self._lane.waiting = [record for message in messages for record in _records_of(message)]
        return self._store.hold(connection, decision)

    def decisions_locked(self, transactional_id: str, namespace: str | None, deadline: Deadline) -> int:
        """Asked for only after a COMMIT in doubt, which stays so: it always raises."""
        del namespace
        return self._store.read_locked(transactional_id, deadline).incarnation


def _records_of(message: Sendable) -> Iterator[ProducerRecord]:
    if isinstance(message, Message):
        yield _record_of(message)
    elif isinstance(message, MessageBatch):
        for value, key in zip(message.values, message.keys or repeat(None), strict=False):
            yield ProducerRecord(message.topic, value, key)


# The database's part of a dual write on the user's own engine, without the library's tables.


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
    """The adapter for the engine's database."""
    return SQLiteInMemory() if engine.dialect.name == "sqlite" else dialect_of(engine)


class MemoryStore:
    """The dual writes' calls of :class:`dualwrite.interfaces.StateStore`, for one lane: the decision is kept in memory."""

    with_commit: Final = None

    def __init__(self, engine: Engine, dialect: Dialect, planted: Planted, lane: MemoryLane) -> None:
        self.outbox = MemoryRows(self, lane)
        self._engine = engine
        self._dialect = dialect
        self._planted = planted
        self._lane = lane
        self._tables = declare_tables(None)
        own = ShortTransactions(engine, dialect, self._tables)
        self._same_database = SameDatabase(engine, dialect, self._tables, own)

    def check_same_database(self, connection: Connection) -> None:
        refuse_transaction(connection)
        self._same_database.check(connection)

    def begin(self, connection: Connection) -> None:
        refuse_transaction(connection)
        self._planted.reach(Place.BEGIN)
        with self._mapped():
            try:
                self._dialect.begin(connection, self._tables)
            except BaseException:
                if connection.in_transaction():
                    committing.rollback(connection)
                raise
            committing.LISTENERS.require(connection)
            keep(connection).refuses = True

    def watch_savepoints(self, connection: Connection, transactional_id: str) -> SavepointWatch:
        return SavepointWatch(connection, self._dialect, transactional_id)

    def read_incarnation(
        self,
        connection: Connection,
        transactional_id: str,
        *,
        namespace: str | None = None,
        known: StateRow | None = None,
    ) -> int:
        """Another owner has raised it if a planted failure has fenced the writer."""
        del namespace, known
        with self._mapped(transactional_id):
            _, *values = connection.execute(select(literal_column("1"), *self._dialect.start_columns())).one()
        self._dialect.check_start(connection, values)
        return self._lane.row.incarnation + self._planted.fenced

    def decide(self, connection: Connection, decision: Decision) -> tuple[bool, str | None]:
        return self.hold(connection, decision)

    def hold(self, connection: Connection, decision: Decision) -> tuple[bool, str | None]:
        self._planted.reach(Place.DECIDE)
        with self._mapped(decision.transactional_id):
            statement = select(*self._dialect.end_columns()).where(*self._dialect.is_begun())
            found = connection.execute(statement, self._dialect.begun(connection)).one_or_none()
            if found is None:
                self._dialect.require_begun(connection)
                return False, None
            return True, self._dialect.check_end(connection, tuple(found))

    def run_deferred(self, connection: Connection, transactional_id: str | None = None) -> None:
        committing.run_deferred(connection, self._dialect, transactional_id)

    def commit(self, connection: Connection, *, answer_s: float | None = None) -> None:
        failure = self._planted.take(Place.COMMIT)
        if failure is not None and (isinstance(failure.error, TransactionAborted) or not failure.rows_committed):
            self.rollback(connection)
            raise failure.error
        try:
            self._commit(connection, answer_s)
            self._lane.note_rows_committed()
        finally:
            let_go(connection)
            self._lane.end_of_rows()
        if failure is not None:
            raise failure.error

    def _commit(self, connection: Connection, answer_s: float | None) -> None:
        committing.commit(connection, self._dialect, self._lane.transactional_id, answer_s=answer_s)

    def rollback(self, connection: Connection) -> None:
        committing.rollback(connection)
        let_go(connection)
        self._lane.end_of_rows()

    def discard(self, connection: Connection) -> None:
        """Roll back. The driver's connection stays open: a database in memory ends with it."""
        self.rollback(connection)

    def read_locked(self, transactional_id: str, deadline: Deadline) -> StateRow:
        """Asked for only after a COMMIT in doubt, which stays so: it always raises."""
        del deadline
        raise DualWriteError("the database does not say how the COMMIT ended", transactional_id=transactional_id)

    def note_reported(self, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
        """There is no table of incidents."""
        del losses

    @contextmanager
    def _mapped(self, transactional_id: str | None = None) -> Generator[None, None, None]:
        try:
            yield
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self._engine, transactional_id=transactional_id) from error


class JoinedMemoryStore(MemoryStore):
    """As :class:`dualwrite.stores.sql.database.JoinedStore`: other code begins and ends the transactions."""

    def check_same_database(self, connection: Connection) -> None:
        """The transaction continues."""
        self._same_database.check(connection)

    def begin(self, connection: Connection) -> None:
        """Join the transaction."""
        self._planted.reach(Place.BEGIN)
        with self._mapped():
            joined_late = self._dialect.join(connection, self._tables)
        keep(connection, joined_late=joined_late)

    def _commit(self, connection: Connection, answer_s: float | None) -> None:
        name = self._lane.transactional_id
        committing.commit(connection, self._dialect, name, answer_s=answer_s, joined=True)

    def rollback(self, connection: Connection) -> None:
        committing.rollback_joined(connection)
        let_go(connection)
        self._lane.end_of_rows()
