"""The object that ``with writer.transaction() as tx`` gives to the user's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from dualwrite.protocol.message import ConsumedOffsets, Message, MessageBatch, MessageColumns, Unsendable
from dualwrite.writing.dual_write__writing_blocks_serializing import NO_SERIALIZERS, Serializing

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, TopicPartition
    from confluent_kafka import Message as KafkaMessage
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from dualwrite.errors import DualWriteError
    from dualwrite.interfaces__ports_observer import WriteObserver
    from dualwrite.kafka.engine import Column
    from dualwrite.protocol.lives__protocol_tables_write_life import WriteState
    from dualwrite.protocol.message import Content, Sendable
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.stores.keyed.rocksdb__stores_rocksdb_batch import RocksBatch
    from dualwrite.stores.keyed.zookeeper__stores_zookeeper_multi import Multi


class Write(Protocol):
    """A dual write, or one unit of it, as its user's object needs it."""

    @property
    def transactional_id(self) -> str:
        """The id that it runs under."""
        ...

    @property
    def state(self) -> WriteState:
        """Its present state."""
        ...

    @property
    def prepared(self) -> PreparedTxnState | None:
        """The identity of its Kafka transaction; None if it is not prepared."""
        ...

    @property
    def observer(self) -> WriteObserver:
        """Observes it."""
        ...

    def given(self, name: str) -> Any:
        """See :meth:`dualwrite.writing.dual_write.DualWrite.given`."""
        ...

    @property
    def connection(self) -> Connection:
        """See :attr:`Transaction.connection`."""
        ...

    @property
    def session(self) -> Session:
        """See :attr:`Transaction.session`."""
        ...

    @property
    def in_savepoint(self) -> bool:
        """Whether a savepoint is open, so that what is done now may be undone although the transaction commits."""
        ...

    def require_open(self) -> None:
        """See :meth:`dualwrite.writing.dual_write.DualWrite.require_open`."""
        ...

    @property
    def max_message_bytes(self) -> int:
        """The greatest size of a message."""
        ...

    def refuse_callback(self) -> None:
        """Refuse a delivery callback in bulk mode.

        Raises:
            IllegalStateError: The writer is in bulk mode.
        """
        ...

    def refuse(self, error: DualWriteError) -> None:
        """Note an error that must abort it even if its code continues; the first one counts."""
        ...

    def send(self, message: Sendable) -> None:
        """See :meth:`dualwrite.writing.dual_write.DualWrite.send`."""
        ...


class Transaction:
    """One dual write: rows through :attr:`connection` or :attr:`session`, messages through :meth:`produce`.

    Made by ``DualWriter.transaction()``; used by one thread; usable until its block ends. The block commits or aborts it:
    leave the block normally, or raise.
    """

    def __init__(self, dual_write: Write, serializing: Serializing = NO_SERIALIZERS) -> None:
        self._dual_write = dual_write
        self._serializing = serializing

    @property
    def transactional_id(self) -> str:
        """The id that this dual write runs under: the writer's own or that of one of its lanes."""
        return self._dual_write.transactional_id

    @property
    def state(self) -> WriteState:
        """The present state of this dual write."""
        return self._dual_write.state

    @property
    def prepared(self) -> PreparedTxnState | None:
        """The identity of its Kafka transaction, once the block has ended; None if it was not prepared."""
        return self._dual_write.prepared

    @property
    def connection(self) -> Connection:
        """The SQLAlchemy connection, inside the database transaction. Never commit or roll it back yourself.

        Savepoints (``connection.begin_nested()``) are yours to use: messages go with them as rows do, see :meth:`produce`.

        Raises:
            IllegalStateError: The block has ended.
        """
        return self._dual_write.connection

    @property
    def session(self) -> Session:
        """An ORM session on :attr:`connection`, made at first use and flushed before the transaction is prepared.

        Its ``commit()`` only flushes: the dual write commits when the block ends.

        Raises:
            IllegalStateError: The block has ended.
        """
        return self._dual_write.session

    @property
    def batch(self) -> RocksBatch:
        """The writes of this dual write to RocksDB: a `RocksBatch`.

        Raises:
            IllegalStateError: The block has ended, or the writer's database is another one.
        """
        batch: RocksBatch = self._dual_write.given("batch")
        return batch

    @property
    def multi(self) -> Multi:
        """The operations that commit with the messages, if the writer's database is ZooKeeper.

        Raises:
            IllegalStateError: The block has ended, or the writer has another database.
        """
        multi: Multi = self._dual_write.given("multi")
        return multi

    @property
    def without_serializers(self) -> Transaction:
        """This transaction without the writer's serializers: for messages that are passed on as they were read."""
        return Transaction(self._dual_write)

    def produce(
        self,
        topic: str,
        value: object = None,
        key: object = None,
        *,
        partition: int | None = None,
        headers: Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]] | None = None,
        timestamp_ms: int | None = None,
        on_delivery: Callable[[KafkaError | None, KafkaMessage], None] | None = None,
    ) -> None:
        """Hand one message to the producer. It is sent in the background and becomes visible after the database commit.

        Nothing is durable on return. A message that fails later makes the whole dual write abort when the block ends.

        Inside a savepoint (``begin_nested()`` of :attr:`connection` or :attr:`session`, or ``SAVEPOINT`` as text) it waits in
        memory: it is sent when the outermost savepoint is released, and forgotten, its ``on_delivery`` not called, when the
        savepoint is rolled back. What waits is a copy, checked at the call.

        Args:
            topic: Topic name.
            value: Payload: what the topic's value serializer takes; without one, bytes, or a string, encoded as UTF-8, or None.
            key: Key, likewise; decides the partition if none is given.
            partition: Partition number.
            headers: Record headers.
            timestamp_ms: Record timestamp in ms since 1970, from 1 on; the current time if not given.
            on_delivery: Called with ``(error or None, message)`` from a later ``produce`` or at the end of the block. What it
                produces there commits with the block. What it raises aborts both sides and leaves the block, or becomes the
                context of the block's own error. Not offered by a writer in bulk mode.

        Raises:
            IllegalStateError: The block has ended.
            TransactionAborted: The producer refuses the message, or a savepoint was rolled back unseen; leave the block, both
                sides abort.
            Fenced: Another owner took over.
            TypeError, UnicodeEncodeError: A part is of another type, or a text has a surrogate. Nothing was produced, and the
                block may continue without this message.
            KeySerializationError, ValueSerializationError: A serializer has failed, which is the cause. Nothing was produced,
                and the block may continue without this message. (Both are confluent-kafka's, from ``confluent_kafka.error``.)
        """
        write = self._dual_write
        write.require_open()  # a serializer may register a schema
        own_key, own_value, own_headers = self._serializing.message(topic, key, value, headers)
        if on_delivery is not None:
            write.refuse_callback()
        try:
            message = Message.checked(
                topic,
                own_value,
                own_key,
                partition=partition,
                headers=write.observer.producing(topic, own_headers),
                timestamp_ms=timestamp_ms,
                on_delivery=on_delivery,
                max_bytes=write.max_message_bytes,
            )
        except Unsendable as error:
            refusal = error.refusal(topic, write.transactional_id)
            write.refuse(refusal)
            raise refusal from None
        write.send(message)

    def produce_many(self, topic: str, values: Sequence[object], keys: Sequence[object] | None = None) -> None:
        """Hand many messages to the producer: as `produce` for each, several times as fast.

        Args:
            topic: Topic name, the same for all.
            values: Payloads, as for `produce`. A serializer must not add headers.
            keys: One key for each value; if not given, the messages have no keys.

        Raises:
            IllegalStateError, TransactionAborted, Fenced: As `produce`.
            KeySerializationError, ValueSerializationError: As `produce`; none of them was produced.
            ValueError: The numbers of keys and values differ.
        """
        self._dual_write.require_open()
        if not self._serializing.none:
            keys, values = self._serializing.many(topic, keys, values)
        self._dual_write.send(
            MessageBatch.of(topic, cast("Sequence[Content]", values), cast("Sequence[Content] | None", keys))
        )

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
        """Hand the rows of Arrow's columns to the producer: as `produce` for each, without serializers.

        Columns are ``pyarrow.Array`` or ``ChunkedArray``. The native engine makes no Python object for a row.

        Args:
            topic: Topic name, the same for all.
            values: Payloads: binary or text of any Arrow type; a null is a tombstone.
            keys: As many keys, likewise; if not given, the messages have no keys.
            headers: As many lists of headers, each a struct of ``key`` and ``value``, or maps from key to value.
            partitions: As many partition numbers; where it is null, the key decides.
            timestamps: As many timestamps: integers, ms since 1970, from 1 on; null is the current time.

        Raises:
            IllegalStateError, TransactionAborted, Fenced: As `produce`.
            ValueError: The columns differ in length.
            TypeError: A column is of another type.
        """
        self._dual_write.send(MessageColumns(topic, values, keys, headers, partitions, timestamps).of_one_length())

    def send_offsets_to_transaction(self, offsets: Sequence[TopicPartition], group_metadata: object) -> None:
        """Commit consumed offsets together with this dual write (consume, transform, write to both).

        Inside a savepoint they wait for it, as messages do.

        Args:
            offsets: The next offset to consume, by partition.
            group_metadata: ``Consumer.consumer_group_metadata()`` of the consumer.

        Raises:
            IllegalStateError: The block has ended.
            TransactionAborted, Fenced, Unavailable: The broker did not accept them; leave the block, both sides abort.
        """
        # The caller may change its list while they wait.
        self._dual_write.send(ConsumedOffsets(list(offsets), group_metadata))

    def __repr__(self) -> str:
        return f"<Transaction {self.transactional_id} {self.state.value}>"


def write_of(transaction: Transaction) -> Write:
    """The dual write behind a transaction: for the library's own code, not for its users."""
    return transaction._dual_write  # noqa: SLF001 - of this module


def unit_of(transaction: Transaction, unit: Write) -> Transaction:
    """The transaction of one unit, with the serializers of its group's."""
    return Transaction(unit, transaction._serializing)  # noqa: SLF001 - of this module
