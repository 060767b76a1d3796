"""A lane in memory: one transactional id with a producer that writes into the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, cast

from dualwrite.errors import CompletionPending
from dualwrite.protocol.contents import Headers, Unsendable, checked
from dualwrite.protocol.observations import NEVER_MS
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.producer_record import ProducerRecord
from dualwrite.protocol.rows import StateRow
from dualwrite.recovery.claim import OwnerContext
from dualwrite.testing.memory.places import Place
from dualwrite.testing.memory.store import JoinedMemoryStore, MemoryStore
from dualwrite.writing.blocks.early import refuse_callback, refuse_other_length

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.kafka.producer.engine import Column
    from dualwrite.kafka.producer.transactional import TransactionalProducer
    from dualwrite.runtime.deadline import Deadline
    from dualwrite.stores.sql.dialects.dialect import Dialect
    from dualwrite.testing.memory.log import Log, RecordedTransaction
    from dualwrite.testing.memory.planted import Planted

_INCARNATION: Final = 1
_OWNER: Final = "in memory"
Text = str | bytes | None


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
        return list(self._record.headers)

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
        self._undelivered: list[Callable[[], None]] = []

    def begin_transaction(self) -> None:
        """See the real one."""
        self._undelivered.clear()
        self._lane.begin()

    def require_topic(self, topic: str) -> None:
        """Any topic will do."""

    @staticmethod
    def corked() -> AbstractContextManager[None]:
        """See the real one."""
        return nullcontext()

    def produce(
        self,
        topic: str,
        value: Text = None,
        key: Text = None,
        *,
        partition: int | None = None,
        headers: Headers | None = None,
        timestamp_ms: int | None = None,
        on_delivery: Callable[[Any, Any], None] | None = None,
    ) -> None:
        """See the real one. ``on_delivery`` is called when the messages are flushed."""
        refuse_callback(cast("TransactionalProducer", self), on_delivery)
        try:
            contents = checked(
                topic,
                value,
                key,
                partition=partition,
                headers=headers,
                timestamp_ms=timestamp_ms,
                on_delivery=on_delivery,
                max_bytes=self.max_message_bytes,
            )
        except Unsendable as error:
            raise error.refusal(topic, self.transactional_id) from None
        self._planted.reach(Place.PRODUCE)
        shown = tuple(contents.headers)
        record = ProducerRecord(topic, contents.value, contents.key, shown, contents.partition, contents.timestamp_ms)
        self._lane.transaction.messages.append(record)
        if on_delivery is not None:
            self._undelivered.append(lambda: on_delivery(None, _Delivered(record)))

    def produce_many(self, topic: str, values: Sequence[Text], keys: Sequence[Text] | None = None) -> None:
        """See the real one."""
        refuse_other_length(keys, values)
        for value, key in zip(values, keys or repeat(None), strict=False):
            self.produce(topic, value, key)

    def produce_arrow(
        self,
        topic: str,
        values: Column,
        keys: Column | None = None,
        headers: Column | None = None,
        partitions: Column | None = None,
        *,
        timestamps: Column | None = None,
    ) -> None:
        """See the real one."""
        # Loads Kafka's clients: the product's own reading of columns.
        from dualwrite.kafka.producer.librdkafka.from_arrow import rows_of  # noqa: PLC0415 - as above

        for column in (keys, headers, partitions, timestamps):
            if column is not None and len(column) != len(values):
                raise ValueError(f"{len(values)} values, but {len(column)} rows of another column")
        try:
            for value, key, pairs, partition, timestamp_ms in rows_of(values, keys, headers, partitions, timestamps):
                self.produce(topic, value, key, partition=partition, headers=pairs, timestamp_ms=timestamp_ms)
        except Unsendable as error:
            raise error.refusal(topic, self.transactional_id) from None

    def send_offsets_to_transaction(self, offsets: Sequence[object], group_metadata: object) -> None:
        """See the real one."""
        self._planted.reach(Place.PRODUCE)
        self._lane.transaction.offsets.append((list(offsets), group_metadata))

    def prepare_transaction(self) -> PreparedTxnState:
        """See the real one."""
        self._planted.reach(Place.PREPARE)
        while self._undelivered:  # callbacks may produce more
            self._undelivered.pop(0)()
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
    """The part of a :class:`dualwrite.writing.lanes.lane.Lane` that a dual write and the lanes of a writer use.

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
