"""A lane in memory: one transactional id with a producer that writes into the log."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, cast

from dualwrite.errors import CompletionPending, IllegalStateError
from dualwrite.protocol.message import ConsumedOffsets, Message, MessageBatch, MessageColumns, Unsendable
from dualwrite.protocol.message__protocol_producer_record import ProducerRecord
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import NEVER_MS
from dualwrite.protocol.values__protocol_rows import StateRow
from dualwrite.recovery.claim import OwnerContext
from dualwrite.testing.memory.failures import Place
from dualwrite.testing.memory.lane__testing_memory_store import JoinedMemoryStore, MemoryStore

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.clock import Deadline
    from dualwrite.protocol.message import DeliveryCallback, Sendable
    from dualwrite.stores.sql.dialect import Dialect
    from dualwrite.testing.memory.failures__testing_memory_planted import Planted
    from dualwrite.testing.memory.lane__testing_memory_log import Log, RecordedTransaction

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
    """The calls of a `TransactionalProducer` that a dual write makes. Its transaction begins and ends with that of its lane.

    Args:
        lane: The lane.
        planted: The planted failures.
        bulk: As the real one's.
        max_message_bytes: The greatest size of key and value together.
    """

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

    def begin_transaction(self) -> None:
        """See the real one."""
        self._undelivered.clear()
        self._lane.begin()

    def require_topic(self, topic: str) -> None:
        """Any topic will do."""

    def refuse_callback(self) -> None:
        """See the real one."""
        if self.bulk:
            raise IllegalStateError(
                "a producer in bulk mode calls no on_delivery", transactional_id=self.transactional_id
            )

    def send(self, message: Message) -> None:
        """See the real one. ``on_delivery`` is called when the messages are flushed."""
        self._planted.reach(Place.PRODUCE)
        topic, value, key, partition, headers, timestamp_ms, on_delivery, _ = message
        record = ProducerRecord(topic, value, key, tuple(headers), partition, timestamp_ms)
        self._lane.transaction.messages.append(record)
        if on_delivery is not None:
            self._undelivered.append((on_delivery, _Delivered(record)))

    def take(self, held: Sendable) -> None:
        """See the real one."""
        if isinstance(held, ConsumedOffsets):
            self._planted.reach(Place.PRODUCE)
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
            from dualwrite.kafka.librdkafka.producer__kafka_producer_librdkafka_from_arrow import messages_of  # noqa: PLC0415 - as above

            yield from messages_of(held, self.max_message_bytes)
        else:
            for value, key, size in held.rows(self.max_message_bytes):
                yield Message(held.topic, value, key, None, (), None, None, size)

    def prepare_transaction(self) -> PreparedTxnState:
        """See the real one."""
        self._planted.reach(Place.PREPARE)
        while self._undelivered:  # callbacks may produce more
            on_delivery, delivered = self._undelivered.pop(0)
            on_delivery(None, delivered)
        return PreparedTxnState(self._lane.number, 0, _INCARNATION)

    def require_still_open(self) -> None:
        """See the real one."""

    @staticmethod
    def take_callback_error() -> BaseException | None:
        """None: a callback's exception comes out of the flush."""

    def abort_transaction(self) -> None:
        """See the real one."""
        self._lane.end(committed=False)


class MemoryLane:
    """The part of a :class:`dualwrite.writing.lane.Lane` that a dual write and the lanes of a writer use.

    Args:
        transactional_id: The lane's id.
        engine: The user's engine.
        dialect: The adapter for its database.
        planted: The planted failures.
        log: Takes the transactions.
        bulk: See `MemoryProducer`.
        max_message_bytes: See `MemoryProducer`.
    """

    unrecorded = None
    pending_end = None
    asking_since = None
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
        bulk: bool,
        max_message_bytes: int,
    ) -> None:
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
        self.engine = self.producer
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
        if transaction is None:
            # Rows alone are recorded, too.
            transaction = self._log.begin(self.transactional_id)
            self._log.end(transaction, committed=True)
        transaction.rows_committed = True

    def end(self, *, committed: bool) -> None:
        """End the current Kafka transaction."""
        self._log.end(self.transaction, committed=committed)
        self._transaction = None

    @property
    def needs_settling(self) -> bool:
        """Whether a transaction is ongoing that no dual write will end any more; for a lane that is not in use."""
        return self._transaction is not None

    def settle(self, deadline: Deadline) -> None:
        """Commit what the database has committed, and abort what it has not."""
        del deadline
        if self._transaction is not None:
            self.end(committed=self._transaction.rows_committed)

    ready = settle

    def complete(self, state: PreparedTxnState, deadline: Deadline) -> None:
        """See the real one."""
        del state, deadline
        failure = self._planted.take(Place.COMPLETE)
        if failure is None:
            self.end(committed=True)
            return
        if not isinstance(failure.error, CompletionPending):
            self.end(committed=False)
        raise failure.error

    def record_forgotten(self, error: object) -> None:
        """Nothing: there is no table of incidents."""
        del error

    def discard(self) -> None:
        """Nothing: what is ongoing is settled later."""

    def watch_end(self) -> None:
        """Nothing: how a transaction has ended is known at once."""

    def prove_end(self, deadline: Deadline) -> None:
        """Nothing: how a transaction has ended is known at once."""
        del deadline

    def record_completed(self) -> None:
        """Nothing: there is no row."""

    def compare_with_row(self) -> None:
        """Nothing: there is no row."""
