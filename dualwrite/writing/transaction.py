"""``with writer.transaction() as tx``: the object that users hold, the block around it, and which blocks are open.

Blocks are never nested, and none blocks an event loop: the guard below notices both. Arguments that cannot work are
refused before anything is claimed.
"""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypedDict, cast

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.interfaces import NO_WRITE_OBSERVER, SQL, Traits, WriteObserver
from dualwrite.protocol.lives import WriteState
from dualwrite.protocol.message import ConsumedOffsets, Message, MessageBatch, MessageColumns, Unsendable
from dualwrite.recovery.in_doubt import noting_told
from dualwrite.stores.sql.access import conflict_behind
from dualwrite.waiting import blocks_a_loop, here
from dualwrite.writing.dual_write import NO_SERIALIZERS, DualWrite, Serializing
from dualwrite.writing.fair_queue import Ticket

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, TopicPartition
    from confluent_kafka import Message as KafkaMessage
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session
    from typing_extensions import Required

    from dualwrite.errors import DualWriteError
    from dualwrite.interfaces import Database, Handle, Observer
    from dualwrite.kafka.engine import Column
    from dualwrite.kafka.producer import EngineName
    from dualwrite.protocol.message import Content, Sendable
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values import WriterLimits
    from dualwrite.recovery.claim import OwnerContext
    from dualwrite.stores.keyed.rocksdb import RocksBatch
    from dualwrite.stores.keyed.zookeeper import Multi
    from dualwrite.writing.dual_write import Serializers
    from dualwrite.writing.lane import Lane, OnLoss


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


# A block around one dual write: its end commits both sides, an exception in it aborts both.

_ENDED = frozenset({WriteState.COMPLETED, WriteState.ABORTED, WriteState.HANDED_OVER})


class Ending(Enum):
    """The ways in which the end of a block ends its dual write."""

    COMMIT = "commit both sides"
    HAND_OVER = "hand it over undecided; the database's part is committed, where nobody reads it"
    PREPARE = "hand it over undecided; the database's part is prepared"


def session_of_block(bind: Connection) -> Session:
    """The ORM session of a block. Its objects stay readable after the block has ended."""
    from sqlalchemy.orm import Session  # noqa: PLC0415 - large, and loaded only where it is used

    return Session(bind=bind, expire_on_commit=False)


def no_session(**_: object) -> Session:
    """Stands in for ``tx.session`` in a block that joins another session's transaction.

    Raises:
        IllegalStateError: Always.
    """
    raise IllegalStateError("the dual write of a session has no other session", next_step="use your own session")


@contextmanager
def dual_write(
    lane: Lane,
    context: OwnerContext,
    handle: Handle,
    *,
    traits: Traits = SQL,
    session_factory: Callable[..., Session] = session_of_block,
    margin_s: float,
    timeout_s: float,
    ending: Ending = Ending.COMMIT,
    permit: Callable[[Handle], None] = lambda _: None,
    savepoints: bool = True,
    observer: WriteObserver = NO_WRITE_OBSERVER,
    serializing: Serializing = NO_SERIALIZERS,
) -> Generator[Transaction, None, None]:
    """Run one dual write on a ready lane: the block's end commits both sides or hands them over; an exception aborts both.

    Args:
        lane: Only this dual write uses it until the block has ended.
        context: The servers.
        handle: The database's: a connection that is not inside a transaction, or what it has instead.
        traits: What the kind of database is like.
        session_factory: Makes the ORM session, called with ``bind=connection``.
        margin_s: Seconds that must be left of the broker's transaction timeout at the decision.
        timeout_s: Limits the ending, in seconds.
        ending: How the block's end ends the dual write.
        permit: May still refuse the ending; see :meth:`DualWrite.commit` and :meth:`DualWrite.hand_over`.
        savepoints: Whether messages wait for savepoints. False if the block's code opens none: then it may also produce in the
            middle of a COPY.
        observer: Observes this dual write.
        serializing: Makes the bytes of messages.

    Raises:
        DualWriteError: As :meth:`DualWrite.begin`, :meth:`DualWrite.commit` and :meth:`DualWrite.hand_over` say.
    """
    write = DualWrite(
        lane,
        context,
        handle,
        traits=traits,
        session_factory=session_factory,
        margin_s=margin_s,
        timeout_s=timeout_s,
        savepoints=savepoints,
        observer=observer,
    )
    with noting_told(context.store):
        write.begin()
    try:
        try:
            write.lent = True
            yield Transaction(write, serializing)
        except BaseException:
            write.lent = False
            if not write.is_parents:
                write.abort()
            raise
        write.lent = False
        write.require_not_parents()
        if ending is Ending.COMMIT:
            with noting_told(context.store):
                write.commit(permit=permit)
        else:
            write.hand_over(prepared=ending is Ending.PREPARE, permit=permit)
    except BaseException as error:
        _raise_from_callback(error, write.sending.take_callback_error())
        raise
    finally:
        write.lent = False
        if write.is_parents:
            # A forked process, which leaves the block too. The servers must hear nothing of it: not even of a rollback.
            context.store.discard(handle)
        else:
            write.release()
            if write.state not in _ENDED:
                # Neither the connection nor the producer may be used again before the id is reclaimed: claiming waits for
                # the old backend and settles.
                lane.discard()
                context.store.discard(handle)


def _raise_from_callback(error: BaseException, raised: BaseException | None) -> None:
    """Show what a delivery callback raised as the context of the block's own error, which outweighs it.

    Callers and `run` decide by the block's error whether they run the work again. Only an interruption (``KeyboardInterrupt``,
    a cancellation) is raised in its place: it must not get lost.
    """
    if raised is None or raised is error:
        return
    if isinstance(error, Exception) and not isinstance(raised, Exception):
        raise raised from error
    chain = list(_explained(error))
    for one in _explained(raised):
        if one.__context__ in chain or one.__cause__ in chain:
            one.__context__ = one.__cause__ = None  # an abort has called it because of this error: no circle
    if raised not in chain:
        # ``raise ... from`` hides contexts, except at the end of the chain of causes.
        chain[-1].__context__, chain[-1].__suppress_context__ = raised, False


def _explained(error: BaseException | None) -> Iterator[BaseException]:
    """The error and, one by one, what a traceback shows above it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


# Tracks the blocks that this thread or task is inside of, to refuse a block inside another of the same writer.
#
# Each entry is noted in the context (`contextvars`) together with its thread or task: a web framework enters a block in
# one thread and leaves it in another, each in a copy of the request's context. Entries need not be removed: a block
# that has ended no longer counts, wherever and however it ended.

_Entered = tuple[int, object, "weakref.ref[Ticket[Any]]"]
Blocks = Sequence[_Entered]
"""The blocks that a thread or task is inside of."""

_entered: Final[ContextVar[tuple[_Entered, ...]]] = ContextVar("dualwrite_entered", default=())
"""For each block: the identity of its writer and of its thread or task, and the ticket that holds its lane."""


def would_block_a_loop() -> bool:
    """Whether the caller would block an event loop of the application if it waited; see :func:`refuse_blocking_a_loop`."""
    return blocks_a_loop() and not hasattr(builtins, "__IPYTHON__")


def refuse_blocking_a_loop(transactional_id: str) -> None:
    """Raise if the caller would block an event loop: all of its tasks would stand still, perhaps forever.

    Two tasks that wait for one another's rows are an example: the one that could continue never gets its turn. A notebook runs
    its cells in an event loop, where nothing else of the application runs.

    Raises:
        IllegalStateError: It would.
    """
    if would_block_a_loop():
        raise IllegalStateError(
            "a DualWriter blocks its thread, and this one runs an event loop",
            transactional_id=transactional_id,
            next_step="use AsyncDualWriter and `async with`, or run the block in a thread: await asyncio.to_thread(...)",
        )


def refuse_nested(writer: object, transactional_id: str) -> None:
    """Raise if this thread or task is inside a block of that writer: the two could wait for each other, and would commit apart.

    Raises:
        IllegalStateError: It is.
    """
    entering = (id(writer), here().caller)
    if any((of, caller) == entering for of, caller, _ in _open()):
        raise IllegalStateError(
            f"this {'thread' if isinstance(entering[1], int) else 'task'} is already inside a transaction of this writer",
            transactional_id=transactional_id,
            next_step="a dual write cannot be nested: use connection.begin_nested() for a savepoint",
        )


def enter(writer: object, ticket: Ticket[Any]) -> None:
    """Note that this thread or task enters a block of that writer. The block lasts until the ticket has ended."""
    _entered.set((*_open(), (id(writer), here().caller, weakref.ref(ticket))))


def entered_here() -> Blocks:
    """The open blocks that this thread or task is inside of, for :func:`go_on_inside`."""
    return _open()


def go_on_inside(blocks: Blocks, task: object = None) -> None:
    """Note that work in another context is done inside these blocks, by this thread or by the given task."""
    caller = here().caller if task is None else task
    _entered.set((*_open(), *((of, caller, ticket) for of, _, ticket in blocks)))


def _open() -> tuple[_Entered, ...]:
    return tuple(one for one in _entered.get() if (ticket := one[2]()) is not None and not ticket.ended)


# The types of a writer's settings; and names the conflicts of the statements of its blocks.


class CommonOptions(TypedDict, total=False):
    """The keyword arguments that all writers share, and that do not say which servers they use."""

    limits: WriterLimits
    serializers: Serializers | None
    bulk: bool
    producer_engine: EngineName
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
    """Refuse what is not an argument of a writer, or what the caller gives to it.

    Raises:
        ConfigurationError: There is such an argument.
    """
    known = WriterOptions.__annotations__.keys()
    if unknown := sorted(given.keys() - known):
        raise ConfigurationError(
            f"writer has {', '.join(map(repr, unknown))}", next_step=f"it may have {', '.join(sorted(known))}"
        )


@contextmanager
def conflicts_named(transactional_id: str) -> Generator[None, None, None]:
    """Name the deadlock or serialization failure of a statement that leaves the block.

    Raises:
        TransactionAborted: One does; it is the cause.
    """
    try:
        yield
    except Exception as error:
        if (conflict := conflict_behind(error, transactional_id)) is not None:
            raise conflict from error
        raise
