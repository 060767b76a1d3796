"""``with writer.transaction() as tx``: the object that users hold, its serializers, and which blocks are open.

Blocks must not be nested, and must not block an event loop: the guard below refuses both. Arguments that cannot work are
refused before anything is claimed.
"""

from __future__ import annotations

import builtins
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypedDict, TypeVar, cast

from dualwrite.errors import (
    ConfigurationError,
    DualWriteError,
    Fenced,
    IllegalStateError,
    TransactionAborted,
    Unavailable,
)
from dualwrite.protocol.message import ConsumedOffsets, Message, MessageBatch, MessageColumns, Unsendable
from dualwrite.waiting import BLOCKING, blocks_a_loop, here, runs_in_a_loop
from dualwrite.writing.fair_queue import Ticket

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, TopicPartition
    from confluent_kafka import Message as KafkaMessage
    from confluent_kafka.serialization import SerializationContext
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session
    from typing_extensions import Required, Self

    from dualwrite.interfaces import Database, Observer, WriteObserver
    from dualwrite.interfaces import Headers as ObservedHeaders
    from dualwrite.kafka.engine import Column, ProducerEngine
    from dualwrite.protocol.lives import WriteState
    from dualwrite.protocol.message import Content, Sendable
    from dualwrite.protocol.outbox import Outbox
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values import WriterLimits
    from dualwrite.stores.keyed.rocksdb import RocksBatch
    from dualwrite.stores.keyed.zookeeper import Multi
    from dualwrite.writing.lane import OnLoss


# Serializers: callables that make the bytes of keys and values, like those of confluent-kafka's `SerializingProducer`.

Serializer: TypeAlias = Callable[[Any, "SerializationContext"], bytes | str | None]
"""Makes a key or a value from an object: ``(object, SerializationContext) -> bytes``. It may add to the context's headers."""

ByTopic: TypeAlias = Serializer | Mapping[str, Serializer] | None
"""One for all topics, or one for each topic that has one."""


class Serializers(TypedDict, total=False):
    """The serializers of a writer: ``{"key": ..., "value": ...}``, or one of the two.

    Each is a callable ``(object, SerializationContext) -> bytes`` like those of confluent-kafka, or a dictionary with one for
    each topic that has one. Many threads use them at once.

    Attributes:
        key: Makes the keys.
        value: Makes the values.
    """

    key: ByTopic
    value: ByTopic


Bytes: TypeAlias = bytes | str | None

Called = TypeVar("Called")


class Serializing:
    """Makes the bytes of messages. Many threads use it, and its serializers, at once."""

    def __init__(self, key: ByTopic = None, value: ByTopic = None) -> None:
        for name, given in (("the key serializer", key), ("the value serializer", value)):
            check_callable(name, given, "(object, SerializationContext) -> bytes")
        self._key = key
        self._value = value
        self.none = key is None and value is None

    @classmethod
    def of(cls, given: Serializers | None) -> Self:
        """Make it from a writer's argument."""
        return cls(**key_and_value("serializers", given))

    def message(
        self, topic: str, key: object, value: object, headers: ObservedHeaders
    ) -> tuple[Bytes, Bytes, ObservedHeaders]:
        """The key, value and headers to produce: as given if there is no serializer. Never changes the caller's headers."""
        key_by, value_by = for_topic(self._key, topic), for_topic(self._value, topic)
        if key_by is None and value_by is None:
            return cast("Bytes", key), cast("Bytes", value), headers
        pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers or ())
        made = _made(key_by, key, "key", topic, pairs), _made(value_by, value, "value", topic, pairs)
        return *made, pairs or None

    def many(
        self, topic: str, keys: Sequence[object] | None, values: Sequence[object]
    ) -> tuple[Sequence[Bytes] | None, Sequence[Bytes]]:
        """The keys and values of many messages of one topic, whose serializers get no headers."""
        key_by, value_by = for_topic(self._key, topic), for_topic(self._value, topic)
        return (
            None if keys is None else [_made(key_by, one, "key", topic, None) for one in keys],
            [_made(value_by, one, "value", topic, None) for one in values],
        )


def key_and_value(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries ``key`` and ``value`` of an argument, which may have no others."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or (given.keys() - {"key", "value"}):
        raise ConfigurationError(f"{name} is {given!r}", next_step='give a dictionary: {"key": ..., "value": ...}')
    return dict(given)


def check_callable(name: str, given: object, signature: str) -> None:
    """Refuse what is neither a callable, nor one for each topic, nor None."""
    for one in given.values() if isinstance(given, Mapping) else [given]:
        if one is not None and not callable(one):
            raise ConfigurationError(
                f"{name} cannot be called: {one!r}",
                next_step=f"give a callable {signature}, or one for each topic in a dict",
            )


def for_topic(given: Called | Mapping[str, Called] | None, topic: str) -> Called | None:
    """The callable of a topic: the one for all topics, or its own, if it has one."""
    return given.get(topic) if isinstance(given, Mapping) else given


def _made(
    serializer: Serializer | None, given: object, field: str, topic: str, headers: list[tuple[str, Bytes]] | None
) -> Bytes:
    if serializer is None:
        return cast("Bytes", given)
    from confluent_kafka.error import KeySerializationError, ValueSerializationError  # noqa: PLC0415 - loads a driver
    from confluent_kafka.serialization import MessageField, SerializationContext  # noqa: PLC0415 - as above

    try:
        made = serializer(given, SerializationContext(topic, MessageField(field), headers))
        if made is None or isinstance(made, bytes | str):
            return made
        raise TypeError(
            f"the {field} serializer of {topic} made {type(made).__name__}, neither bytes nor text nor None"
        )
    except Exception as error:
        raise (KeySerializationError if field == "key" else ValueSerializationError)(error) from error


NO_SERIALIZERS: Final = Serializing()


def as_value(error: BaseException) -> DualWriteError:
    """An error to keep until the end of a dual write: what it says, without its traceback and its causes.

    A traceback's frames refer to what the caller has open. They would keep a session that was dropped after the error alive as
    long as its dual write, which ends only when the session is collected: neither would ever end.
    """
    if isinstance(error, DualWriteError):
        return copy(error)
    return TransactionAborted(type(error).__name__, retryable=getattr(error, "retryable", False))


def raise_aborted(refusal: DualWriteError, transactional_id: str | None, subject: str) -> NoReturn:
    """Abort a dual write whose code (the ``subject``) continued after an error that it must not survive."""
    if isinstance(refusal, Fenced):
        raise copy(refusal)  # raised itself, the kept one would get this traceback
    raise TransactionAborted(
        f"{subject} continued after an error: {refusal.what}",
        transactional_id=transactional_id,
        next_step=refusal.next_step,
        retryable=isinstance(refusal, Unavailable) or getattr(refusal, "retryable", False),
    ) from refusal


class Refusals:
    """The first error that must abort a piece of work even if its code continues; kept as a value."""

    first: DualWriteError | None = None

    def note(self, error: BaseException) -> None:
        """Note an error; the first one counts."""
        self.first = self.first or as_value(error)


class Work(ABC):
    """The work of a block's code, as its :class:`Transaction` needs it: a dual write, or one unit of it.

    ``refusals`` has the first error that must abort it even if its code continues.
    """

    transactional_id: str
    observer: WriteObserver | None
    engine: ProducerEngine
    refusals: Refusals

    @property
    @abstractmethod
    def state(self) -> WriteState:
        """Its present state."""

    @property
    @abstractmethod
    def prepared(self) -> PreparedTxnState | None:
        """The identity of its Kafka transaction; None if it is not prepared."""

    @property
    @abstractmethod
    def outbox(self) -> bool | None:
        """See :attr:`Transaction.outbox`."""

    @abstractmethod
    def resource(self, name: str) -> Any:
        """The database's object of that name for the user's code, until the block has ended."""

    @property
    @abstractmethod
    def connection(self) -> Connection:
        """See :attr:`Transaction.connection`."""

    @property
    @abstractmethod
    def session(self) -> Session:
        """See :attr:`Transaction.session`."""

    @property
    @abstractmethod
    def in_savepoint(self) -> bool:
        """Whether a savepoint is open, so that what is done now may be undone although the transaction commits.

        Sends nothing, and does not see savepoints that bypass SQLAlchemy.
        """

    @abstractmethod
    def require_open(self) -> None:
        """Raise `IllegalStateError` if messages can no longer be sent, because the block has ended."""

    @abstractmethod
    def send(self, message: Sendable) -> None:
        """Hand one or many messages, or offsets, to the engine: at once, or when the open savepoint is released.

        If they are refused, the work must abort even if its code continues.
        """

    def refuse(self, error: BaseException) -> None:
        """Note an error that must abort it even if its code continues; the first one counts."""
        self.refusals.note(error)


class Transaction:
    """One dual write: rows through :attr:`connection` or :attr:`session`, messages through :meth:`produce`.

    Made by ``DualWriter.transaction()``; used by one thread; usable until its block ends. To commit it, leave the block
    normally; to abort it, raise.
    """

    def __init__(self, dual_write: Work, serializing: Serializing = NO_SERIALIZERS) -> None:
        self._dual_write = dual_write
        self._serializing = serializing

    @property
    def transactional_id(self) -> str:
        """The id that this dual write runs under: the writer's own, or one of its lanes'."""
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
    def outbox(self) -> bool | None:
        """Whether the messages wait, so that readers see them only after the block has ended: see ``outbox=`` of `DualWriter`.

        While the block runs, None means that it sends directly, but may still fall back. Once it has ended: True if its rows
        are committed and its messages wait in the database, or for Kafka's answer to their commit; False if they are visible,
        or if it was aborted or had none.
        """
        return self._dual_write.outbox

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
        batch: RocksBatch = self._dual_write.resource("batch")
        return batch

    @property
    def multi(self) -> Multi:
        """The operations that commit with the messages, if the writer's database is ZooKeeper.

        Raises:
            IllegalStateError: The block has ended, or the writer has another database.
        """
        multi: Multi = self._dual_write.resource("multi")
        return multi

    @property
    def without_serializers(self) -> Transaction:
        """This transaction without the writer's serializers, for messages that are passed on as they were read."""
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

        Inside a savepoint (``begin_nested()`` of :attr:`connection` or :attr:`session`, or ``SAVEPOINT`` as text) a checked
        copy of it waits in memory. It is sent when the outermost savepoint is released, and dropped, without a call of
        ``on_delivery``, when the savepoint is rolled back.

        Args:
            topic: Topic name.
            value: Payload: what the topic's value serializer takes; without a serializer bytes, a string, which is encoded as
                UTF-8, or None.
            key: Key, likewise; decides the partition if none is given.
            partition: Partition number.
            headers: Record headers.
            timestamp_ms: Record timestamp in ms since 1970, from 1 on; the current time if not given.
            on_delivery: Called with ``(error or None, message)`` from a later ``produce`` or at the end of the block. What it
                produces there commits with the block. If it raises, both sides abort; its error leaves the block, or becomes
                the context of the block's own error. No longer called once the messages of the block wait in the database
                (``outbox=`` of the writer): nothing is delivered yet, and another process may deliver them. Not offered by a
                writer in bulk mode.

        Raises:
            IllegalStateError: The block has ended.
            TransactionAborted: The producer refuses the message, or a savepoint was rolled back unseen. Leave the block: both
                sides abort.
            Fenced: Another owner took over.
            TypeError, UnicodeEncodeError: A part is of another type, or a text has a surrogate. Nothing was produced, and the
                block may continue without this message.
            KeySerializationError, ValueSerializationError: A serializer failed; its error is the cause. Nothing was produced,
                and the block may continue without this message. (Both are from ``confluent_kafka.error``.)
        """
        write = self._dual_write
        if self._serializing.none:
            own_key, own_value, own_headers = cast("Content", key), cast("Content", value), headers
        else:
            write.require_open()  # a serializer may register a schema
            own_key, own_value, own_headers = self._serializing.message(topic, key, value, headers)
        engine, observer = write.engine, write.observer
        if on_delivery is not None:
            engine.refuse_callback()
        try:
            message = Message.checked(
                topic,
                own_value,
                own_key,
                partition=partition,
                headers=own_headers if observer is None else observer.producing(topic, own_headers),
                timestamp_ms=timestamp_ms,
                on_delivery=on_delivery,
                max_bytes=engine.max_message_bytes,
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
            TypeError, UnicodeEncodeError: A part is of another type, or a text has a surrogate. Earlier messages may have been
                produced, so both sides abort even if the block continues.
            KeySerializationError, ValueSerializationError: As `produce`; none of them was produced.
            ValueError: The numbers of keys and values differ; none of them was produced.
        """
        self._dual_write.require_open()
        if not self._serializing.none:
            keys, values = self._serializing.many(topic, keys, values)
        batch = MessageBatch.of(topic, cast("Sequence[Content]", values), cast("Sequence[Content] | None", keys))
        try:
            self._dual_write.send(batch)
        except (TypeError, ValueError) as error:
            self._dual_write.refuse(error)  # the messages before the mistake may have been taken
            raise

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

        Inside a savepoint they wait for it, as messages do. They are a part of Kafka's transaction, so a block with offsets
        cannot wait in the database while Kafka is away (``outbox=`` of the writer): it aborts, as without an outbox. Offsets
        that are kept as rows can wait.

        Args:
            offsets: The next offset to consume, by partition.
            group_metadata: ``Consumer.consumer_group_metadata()`` of the consumer.

        Raises:
            IllegalStateError: The block has ended.
            TransactionAborted, Fenced, Unavailable: The broker did not accept them. Leave the block: both sides abort.
        """
        # The caller may change its list while they wait.
        self._dual_write.send(ConsumedOffsets(list(offsets), group_metadata))

    def __repr__(self) -> str:
        return f"<Transaction {self.transactional_id} {self.state.value}>"


def write_of(transaction: Transaction) -> Work:
    """The dual write behind a transaction: for the library's own code, not for its users."""
    return transaction._dual_write  # noqa: SLF001 - of this module


def unit_of(transaction: Transaction, unit: Work) -> Transaction:
    """The transaction of one unit, with the serializers of its group's transaction."""
    return Transaction(unit, transaction._serializing)  # noqa: SLF001 - of this module


# Tracks the blocks that this thread or task is inside of, to refuse a block inside another of the same writer.
# Each entry is kept in the context (`contextvars`) together with its thread or task, because a web framework enters a block in
# one thread and leaves it in another, each in a copy of the request's context. Entries need not be removed: a block that has
# ended no longer counts, wherever and however it ended.

_Entered = tuple[int, object, "weakref.ref[Ticket[Any]]"]
Blocks = Sequence[_Entered]

_entered: Final[ContextVar[tuple[_Entered, ...]]] = ContextVar("dualwrite_entered", default=())
"""For each block: the identity of its writer and of its thread or task, and the ticket that holds its lane."""


def would_block_a_loop() -> bool:
    """Whether the caller would block an event loop of the application if it waited; see :func:`refuse_blocking_a_loop`."""
    return blocks_a_loop() and not hasattr(builtins, "__IPYTHON__")


def refuse_blocking_a_loop(transactional_id: str) -> None:
    """Raise if the caller would block an event loop: all of its tasks would stop, perhaps forever.

    For example, if two tasks wait for each other's rows, the one that could continue never gets its turn. A notebook's event
    loop is no problem: nothing else of the application runs in it.
    """
    if would_block_a_loop():
        raise IllegalStateError(
            "a DualWriter blocks its thread, and this one runs an event loop",
            transactional_id=transactional_id,
            next_step="use AsyncDualWriter and `async with`, or run the block in a thread: await asyncio.to_thread(...)",
        )


def refuse_nested(writer: object, transactional_id: str) -> None:
    """Raise if this thread or task is inside a block of that writer: the two could wait for each other, or commit apart.

    ``writer`` identifies the writer: the same object for all of its blocks.
    """
    _refuse_nested(_open(), id(writer), here().caller(), transactional_id)


def _refuse_nested(inside: tuple[_Entered, ...], writer: int, caller: object, transactional_id: str) -> None:
    for of, by, _ in inside:
        if of == writer and by == caller:
            raise IllegalStateError(
                f"this {'thread' if isinstance(caller, int) else 'task'} is already inside a transaction of this writer",
                transactional_id=transactional_id,
                next_step="a dual write cannot be nested: use connection.begin_nested() for a savepoint",
            )


def enter(writer: object, ticket: Ticket[Any], transactional_id: str) -> None:
    """Note that this thread or task enters a block of that writer. The block lasts until the ticket has ended.

    Refuses to block an event loop, and a block inside a block of that writer.
    """
    form = here()
    if form is BLOCKING and runs_in_a_loop():
        refuse_blocking_a_loop(transactional_id)
    entered, caller = _entered.get(), form.caller()
    if entered and (len(entered) > 1 or not _has_ended(entered[0])):
        entered = _open()
        _refuse_nested(entered, id(writer), caller, transactional_id)
    else:
        entered = ()  # as nearly always: the block before has ended
    _entered.set((*entered, (id(writer), caller, weakref.ref(ticket))))


def entered_here() -> Blocks:
    """The open blocks that this thread or task is inside of, for :func:`continue_inside`."""
    return _open()


def continue_inside(blocks: Blocks, task: object = None) -> None:
    """Note that this thread or the given task works inside these blocks, in another context."""
    caller = here().caller() if task is None else task
    _entered.set((*_open(), *((of, caller, ticket) for of, _, ticket in blocks)))


def _open() -> tuple[_Entered, ...]:
    return tuple(one for one in _entered.get() if not _has_ended(one))


def _has_ended(block: _Entered) -> bool:
    return (ticket := block[2]()) is None or ticket.ended


# The types of a writer's settings.


class CommonOptions(TypedDict, total=False):
    """The keyword arguments that all writers share, and that do not say which servers they use."""

    outbox: Outbox
    limits: WriterLimits
    serializers: Serializers | None
    on_loss: OnLoss | None
    telemetry: Observer | None


class WriterOptions(CommonOptions, total=False):
    """The keyword arguments of `DualWriter` that do not say which servers it uses."""

    session_factory: Callable[..., Session]


class AsyncWriterOptions(CommonOptions, total=False):
    """The keyword arguments of `AsyncDualWriter` that do not say which servers it uses."""

    session_factory: Callable[..., AsyncSession]


class CommonSettings(CommonOptions, total=False):
    """The keyword arguments that `DualWriter` and `AsyncDualWriter` share."""

    kafka: Required[Mapping[str, object]]
    schema: str | None


class WriterSettings(CommonSettings, WriterOptions, total=False):
    """The keyword arguments of `DualWriter`."""

    database: Required[Engine | Database | str]


class AsyncWriterSettings(CommonSettings, AsyncWriterOptions, total=False):
    """The keyword arguments of `AsyncDualWriter`."""

    database: Required[AsyncEngine | str]
    own_engine: Engine | str | None


def check_options(given: Mapping[str, object]) -> None:
    """Refuse what is not an argument of a writer, or what the caller sets itself."""
    known = WriterOptions.__annotations__.keys()
    if unknown := sorted(given.keys() - known):
        raise ConfigurationError(
            f"writer has {', '.join(map(repr, unknown))}", next_step=f"it may have {', '.join(sorted(known))}"
        )
