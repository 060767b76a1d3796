"""``ExactlyOnceConsumer``: a member of a consumer group, and its units of work, each in a transaction of its own.

A message that cannot be read or handled is set aside, with the reason in its headers.

A member reads in one thread, hands units of work to workers, and leaves nothing open when it ends. Here the workers are
threads; in `dualwrite.asyncio.consumer` they are tasks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypedDict, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from dualwrite import failpoints
from dualwrite.clock import Deadline, now_s
from dualwrite.consumer.partitions import (
    KafkaOffsets,
    Offsets,
    PartitionLost,
    Partitions,
    Peers,
    Reading,
    RowOffsets,
    consumer_settings,
)
from dualwrite.errors import ConfigurationError, DualWriteError, Fenced, IllegalStateError, encoded, text_of
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.members import (
    Step,
    Trouble,
    around,
    consumer_member_id,
    failures_left_over,
    halves,
    next_offsets,
    pause_s,
    step_after,
    trouble_of,
)
from dualwrite.protocol.values import DEFAULT_LIMITS, check_seconds
from dualwrite.stores.sql.access import Meaning, meaning_of
from dualwrite.stores.sql.consumed import ConsumedOffsets
from dualwrite.stores.sql.database import database_of, is_made_here, sql_of
from dualwrite.waiting import elsewhere
from dualwrite.writing.fair_queue import FairQueue
from dualwrite.writing.transaction import CommonOptions, check_callable, check_options, for_topic, key_and_value
from dualwrite.writing.work import is_not_run, refuse_not_run
from dualwrite.writing.writer import DualWriter

if TYPE_CHECKING:
    from confluent_kafka import Message
    from confluent_kafka.serialization import SerializationContext
    from sqlalchemy import Engine
    from typing_extensions import Self

    from dualwrite.consumer.partitions import Unit
    from dualwrite.interfaces import Database
    from dualwrite.state import PartitionStores
    from dualwrite.writing.transaction import Transaction, WriterOptions

# Deserializers: callables that make objects from the keys and values read, like those of `DeserializingConsumer`.

Deserializer: TypeAlias = Callable[[Any, "SerializationContext"], Any]
"""Makes an object from the bytes of a key or a value: ``(bytes, SerializationContext) -> object``."""

ByTopic: TypeAlias = Deserializer | Mapping[str, Deserializer] | None
"""One for all topics, or one for each topic that has one."""


class Deserializers(TypedDict, total=False):
    """The deserializers of a consumer: ``{"key": ..., "value": ...}``, or one of the two.

    Each is a callable ``(bytes, SerializationContext) -> object``, as those of confluent-kafka, or a dictionary with one for
    each topic that has one. All workers use them at once, and again after an abort.

    Attributes:
        key: Makes the keys that the handler gets.
        value: Makes the values.
    """

    key: ByTopic
    value: ByTopic


_ABOUT_THE_MESSAGE: Final = frozenset({404, 422})
"""A registry's answers that are the message's fault: the schema does not exist, or is invalid."""


class Unreadable(Exception):
    """A message could not be deserialized. ``index`` is its place among the messages.

    ``error`` is the deserializer's error as confluent-kafka wraps it, and ``cause`` the deserializer's own.
    """

    def __init__(self, index: int, error: Exception, cause: Exception) -> None:
        super().__init__(text_of(error))
        self.index = index
        self.error = error
        self.cause = cause


class Deserializing:
    """Deserializes messages. Many threads use it, and its deserializers, at once."""

    def __init__(self, key: ByTopic = None, value: ByTopic = None) -> None:
        for name, given in (("the key deserializer", key), ("the value deserializer", value)):
            check_callable(name, given, "(bytes, SerializationContext) -> object")
        self._key = key
        self._value = value

    @classmethod
    def of(cls, given: Deserializers | None) -> Self:
        """Make it from a consumer's argument."""
        return cls(**key_and_value("deserializers", given))

    @contextmanager
    def applied(self, messages: Sequence[Message]) -> Generator[None, None, None]:
        """Deserialize the messages in place. If the block fails, they get their bytes back: a dead letter needs them.

        Raises `Unreadable` if a deserializer has failed.
        """
        if self._key is None and self._value is None:
            yield
            return
        raw = [(message.key(), message.value()) for message in messages]
        try:
            elsewhere(lambda: self._apply(messages))  # it may ask a schema registry
            yield
        except BaseException:
            for message, (key, value) in zip(messages, raw, strict=True):
                message.set_key(key)
                message.set_value(value)
            raise

    def _apply(self, messages: Sequence[Message]) -> None:
        from confluent_kafka.error import (  # noqa: PLC0415 - loads a driver
            KeyDeserializationError,
            ValueDeserializationError,
        )
        from confluent_kafka.serialization import MessageField, SerializationContext  # noqa: PLC0415 - as above

        for index, message in enumerate(messages):
            topic = message.topic() or ""
            # As DeserializingConsumer does it: the key first, and one context for both.
            context = SerializationContext(topic, MessageField.KEY, message.headers())
            wrap: Callable[..., Exception] = KeyDeserializationError
            try:
                if (by := for_topic(self._key, topic)) is not None:
                    message.set_key(_made(by, message.key(), context))
                context.field, wrap = MessageField.VALUE, ValueDeserializationError
                if (by := for_topic(self._value, topic)) is not None:
                    message.set_value(_made(by, message.value(), context))
            except IllegalStateError:
                raise
            except Exception as error:
                raise Unreadable(index, wrap(exception=error, kafka_message=message), error) from error


def _made(by: Deserializer, given: object, context: SerializationContext) -> object:
    made = by(given, context)
    if is_not_run(made):
        raise IllegalStateError(
            f"the {context.field} deserializer of {context.topic} is asynchronous, and was not run",
            next_step="give the deserializer that is a plain function",
        )
    return made


def registry_is_away(error: Exception) -> bool:
    """Whether a deserializer failed because its schema registry was unavailable, which is not the message's fault.

    Compares names, so that no client of a registry is loaded here.
    """
    status = getattr(error, "http_status_code", None)
    if isinstance(status, int):
        return status not in _ABOUT_THE_MESSAGE
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or not kinds.isdisjoint(
        {"TransportError", "OAuthTokenError"}
    )


logger = logging.getLogger(__name__)

Handler = Callable[["Transaction", Sequence["Message"]], object]


Join = Callable[["Transaction"], Callable[[], None]]
"""Called with a transaction that has begun; returns the function to call when the handler is done."""


class State(Protocol):
    """The state of a member, by partition: `dualwrite.state.PartitionStores`."""

    def _block(self, assignments: Mapping[int, object], check: Callable[[], None]) -> AbstractContextManager[Join]:
        """Surround a transaction. Private, because handlers have the object, too.

        ``assignments`` has each partition's assignment by its number. ``check`` raises if the transaction may no longer begin.
        """
        ...


_PASSING: Final = frozenset(
    {Meaning.GONE, Meaning.BUSY, Meaning.POOL, Meaning.FULL, Meaning.READ_ONLY, Meaning.LOGIN, Meaning.CONFLICT}
)
_OFTEN: Final = 3
_SOON_S: Final = 60.0
_PATIENCE_S: Final = 86_400.0


@dataclass
class Counts:
    """Totals since the start. Changed under the lock of :class:`Working`."""

    messages: int = 0
    transactions: int = 0
    failed_attempts: int = 0
    dead_letters: int = 0


class CurrentWriter:
    """The member's open writer; a new one after the old one was fenced or is in doubt. For threads and tasks.

    A new writer of the same name settles what the old one left. Being fenced now and then is harmless: peers fence a member
    while it is not in the group. Another process of the same name would fence it again and again: then one of the two stops.
    """

    def __init__(self, make: Callable[[], DualWriter]) -> None:
        self._make = make
        self._turns: FairQueue[None] = FairQueue([None])
        self._writer: DualWriter | None = None
        self._fenced_at: deque[float] = deque(maxlen=_OFTEN)

    def get(self) -> DualWriter:
        """The open writer; opens one if there is none."""
        if (writer := self._writer) is not None:
            return writer
        with self._one_at_a_time():
            if self._writer is None:
                made = self._make()
                made.open()
                self._writer = made
            return self._writer

    def discard(self, writer: DualWriter, error: DualWriteError) -> None:
        """Close a writer that can no longer be used. Does nothing if another worker has done so.

        Raises `Fenced` if the member was fenced several times within a minute, and a loss that closing reports.
        """
        with self._one_at_a_time():
            if self._writer is not writer:
                return
            self._writer = None
            writer.close()
            if not isinstance(error, Fenced):
                return
            self._fenced_at.append(now_s())
            if len(self._fenced_at) == _OFTEN and now_s() - self._fenced_at[0] < _SOON_S:
                raise Fenced(
                    f"fenced {_OFTEN} times within {_SOON_S:g} s",
                    transactional_id=error.transactional_id,
                    next_step="give each member of the group a name of its own",
                ) from error

    def close(self) -> None:
        """Close the writer. Raises as :meth:`DualWriter.close`."""
        with self._one_at_a_time():
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    @contextmanager
    def _one_at_a_time(self) -> Generator[None, None, None]:
        # Not a lock: a task that waits while it holds one blocks all other tasks of its thread.
        ticket = self._turns.ticket()
        try:
            ticket.wait(Deadline(_PATIENCE_S))
            yield
        finally:
            ticket.end()


@dataclass
class _Part:
    """Messages of a unit that are tried together."""

    messages: Sequence[Message]
    failures: int = 0
    attempts: int = 0
    pauses: int = 0
    is_dead: bool = False
    error: Exception | None = None
    unreadable: int = 0


@dataclass
class _Stage:
    """How far an attempt has come, which decides what an error means."""

    writer: DualWriter | None = None
    handling: bool = False
    moving: bool = False


@dataclass
class Working:
    """Performs units. Used by any number of threads or tasks."""

    group: str
    handler: Handler
    writer: CurrentWriter
    offsets: Offsets
    partitions: Partitions
    # How often the work may fail before its messages are split or set aside.
    attempts: int
    # Where messages are set aside; None stops the consumer instead.
    dead_letter_topic: str | None
    # Errors that do not count: something that the handler or a deserializer needs is unavailable.
    transient: tuple[type[Exception], ...]
    deserializing: Deserializing = field(default_factory=Deserializing)
    state: State | None = None
    counts: Counts = field(default_factory=Counts)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def perform(self, unit: Unit) -> bool:
        """Perform a unit. Returns whether its partitions must be read again from the committed offsets.

        If it raises, whether the handler's own error or a `DualWriteError`, the consumer must stop.
        """
        parts = deque([_Part(unit.messages)])
        while parts:
            if unit.must_end or self.partitions.closed:
                return True
            part = parts[0]
            step = self._attempt(unit, part)
            if step is Step.DONE:
                parts.popleft()
            elif step is Step.REDO:
                part.pauses += 1
                self.partitions.wait(unit, pause_s(part.pauses))
            elif step is Step.SPLIT:
                parts.popleft()
                parts.extendleft(reversed([self._half(part, half) for half in halves(part.messages)]))
            elif step is Step.ISOLATE:
                parts.popleft()
                apart = around(part.messages, part.unreadable)
                parts.extendleft(reversed([_Part(messages, attempts=part.attempts) for messages in apart]))
            elif step is Step.SET_ASIDE:
                part.is_dead = True
            else:
                if step is Step.REOPEN:
                    self._reopen()
                return True
        return False

    def _reopen(self) -> None:
        """Settle what our old writer left: until then the committed offsets are pending, and nobody can read them.

        Also needed if partitions of the unit go to another member meanwhile: peers do not settle what a living member left.
        """
        failures = 0
        while not self.partitions.closed:
            try:
                self.writer.get()
            except DualWriteError as error:
                if trouble_of(error) not in {Trouble.PASSING, Trouble.OWNER}:
                    raise
                failures += 1
                logger.warning("%s: cannot open a new writer yet; retrying: %s", self.group, error)
                self.partitions.wait(None, pause_s(failures))
            else:
                return

    def _half(self, part: _Part, messages: Sequence[Message]) -> _Part:
        return _Part(messages, failures_left_over(len(messages), self.attempts), part.attempts)

    def _attempt(self, unit: Unit, part: _Part) -> Step:
        part.attempts += not part.is_dead
        to = next_offsets((one.topic() or "", one.partition() or 0, one.offset() or 0) for one in part.messages)
        at = _Stage()
        try:
            # Before the transaction begins, because a schema registry may be slow.
            with nullcontext() if part.is_dead else self.deserializing.applied(part.messages):
                self._write(unit, part, to, at)
        except Exception as error:
            shown = error.error if isinstance(error, Unreadable) else error
            step = self._failed(part, self._trouble(error, at), shown)
            if step is Step.STOP:
                if isinstance(error, Unreadable):
                    raise error.error from error.cause
                raise
            if step is Step.ISOLATE and isinstance(error, Unreadable):
                part.unreadable = error.index
            if step is Step.REOPEN and isinstance(error, DualWriteError) and at.writer is not None:
                self.writer.discard(at.writer, error)
        else:
            step = Step.DONE
        if step is Step.DONE:
            self._done(unit, part, to)
        return step

    def _write(self, unit: Unit, part: _Part, to: dict[tuple[str, int], int], at: _Stage) -> None:
        at.writer = self.writer.get()
        with self._state_of(unit) as join, at.writer.transaction() as tx:
            failpoints.hit("consume.begun")
            log = join(tx)
            at.handling = True
            if part.is_dead:
                self._set_aside(tx, part)
            else:
                refuse_not_run(self.handler(tx, part.messages), at.writer.transactional_id)
            at.handling = False
            log()
            failpoints.hit("consume.handled")
            at.moving = True
            self.offsets.move(tx, unit, to)
            failpoints.hit("consume.moved")
            at.moving = False

    def _state_of(self, unit: Unit) -> AbstractContextManager[Join]:
        if self.state is None:
            return nullcontext(lambda _: lambda: None)

        def check() -> None:
            if unit.must_end or self.partitions.closed:
                raise PartitionLost

        return self.state._block({one.name[1]: one for one in unit.partitions}, check)  # noqa: SLF001 - of State

    def _trouble(self, error: Exception, at: _Stage) -> Trouble:
        if isinstance(error, PartitionLost):
            return Trouble.MOVED
        if isinstance(error, DualWriteError):
            return trouble_of(error, handling=at.handling, moving=at.moving)
        if isinstance(error, Unreadable):
            passing = registry_is_away(error.cause) or self._is_passing(error.cause)
            return Trouble.PASSING if passing else Trouble.UNREADABLE
        return Trouble.PASSING if self._is_passing(error) else Trouble.WORK

    def _is_passing(self, error: Exception) -> bool:
        if isinstance(error, self.transient):
            return True
        return isinstance(error, SQLAlchemyError) and meaning_of(error) in _PASSING

    def _failed(self, part: _Part, trouble: Trouble, error: Exception) -> Step:
        if not part.is_dead:  # the dead letter says why the work failed
            part.error = error
        part.failures += trouble is Trouble.WORK
        step = step_after(
            trouble,
            messages=len(part.messages),
            failures=part.failures,
            attempts=self.attempts,
            # A dead letter that cannot be written is no message's fault.
            sets_aside=self.dead_letter_topic is not None and not part.is_dead,
        )
        with self._lock:
            self.counts.failed_attempts += step is not Step.DONE
        first = part.messages[0]
        logger.warning(
            "%s: attempt %d with %d messages from %s[%s]@%s failed (%s), next: %s: %s",
            self.group,
            part.attempts,
            len(part.messages),
            first.topic(),
            first.partition(),
            first.offset(),
            trouble.value,
            step.value,
            text_of(error) or type(error).__name__,
        )
        return step

    def _set_aside(self, tx: Transaction, part: _Part) -> None:
        assert self.dead_letter_topic is not None
        for message in part.messages:
            headers = dead_letter_headers(message, part.error or Exception(), attempts=part.attempts, group=self.group)
            tx.without_serializers.produce(self.dead_letter_topic, message.value(), message.key(), headers=headers)

    def _done(self, unit: Unit, part: _Part, to: dict[tuple[str, int], int]) -> None:
        failpoints.hit("consume.committed")
        self.offsets.moved(unit, to)
        for one in unit.partitions:
            one.next_offset = to.get(one.name, one.next_offset)
        with self._lock:
            self.counts.messages += len(part.messages)
            self.counts.transactions += 1
            self.counts.dead_letters += len(part.messages) if part.is_dead else 0


# Messages that are set aside: unchanged, with the reason in headers.

_LONGEST_REASON: Final = 1000


def dead_letter_headers(
    message: Message, error: Exception, *, attempts: int, group: str
) -> list[tuple[str, str | bytes | None]]:
    """The headers of a dead letter: the message's own, then where it came from and why it was set aside.

    ``error`` is the last attempt's; ``attempts`` says how often the work was tried with this message.
    """
    kind = type(error)
    found = message.headers() or []
    own = list(found.items() if isinstance(found, dict) else found)
    ours = {
        "dualwrite.dead_letter.topic": message.topic(),
        "dualwrite.dead_letter.partition": message.partition(),
        "dualwrite.dead_letter.offset": message.offset(),
        "dualwrite.dead_letter.group": group,
        "dualwrite.dead_letter.attempts": attempts,
        "dualwrite.dead_letter.exception": f"{kind.__module__}.{kind.__qualname__}",
        "dualwrite.dead_letter.reason": text_of(error)[:_LONGEST_REASON],
    }
    return [*own, *((key, encoded(str(value))) for key, value in ours.items())]


T = TypeVar("T")


class ExactlyOnceConsumer:
    """A member of a consumer group: its consumed offsets, rows and messages commit together or not at all.

    :meth:`run` reads messages, calls the handler inside a dual write, and moves the group's offsets in that same dual write.
    Each message is handled in exactly one transaction that commits, whatever happens to this member, to others, to Kafka or
    to the database in between. A handler runs again after an abort, so it must have no effects except through ``tx``.

    Before partitions go to other members, it finishes or aborts its transactions on them. When it gets partitions of a dead
    member, it settles the transactions that the dead member left open.

    Args:
        group: The ``group.id``.
        member: This member's name: unique in the group, stable across restarts; not empty, without ``/`` and ``#``. The
            writer's transactional id is ``group/member``.
        topics: The topics to read.
        handler: Called with the transaction and a list of confluent-kafka's messages, in the order of each partition. It must
            not commit, and must not send offsets.
        kafka: librdkafka configuration for all clients; ``bootstrap.servers`` at least.
        database: A SQLAlchemy engine or a database URL. The tables must exist: ``dualwrite migrate``.
        schema: The database schema of the library's tables, if it is not the default one.
        offsets: Where consumed offsets are kept. ``kafka``: in the Kafka transaction. ``database``: as rows of
            ``dualwrite_consumed``; then messages are not handled twice if Kafka loses a decided transaction.
        consumer: librdkafka configuration for the consumer alone, such as ``group.protocol`` or ``session.timeout.ms``.
            ``auto.offset.reset`` is ``earliest`` unless given.
        writer: Further arguments of `DualWriter`, such as ``{"limits": WriterLimits(margin_s=5)}``. ``workers`` determines the
            number of its lanes.
        max_messages: The maximum number of messages in one transaction.
        linger_s: How long a transaction waits to become full, in seconds.
        workers: How many transactions run at a time. Each works on partitions of its own, so that each partition keeps its
            order.
        attempts: How often the handler may fail with the same messages. After that it gets halves of them, down to the message
            that fails. Deadlocks and unavailable servers do not count: the member waits, but stays in the group.
        dead_letter_topic: Topic for messages that keep failing: each is written there in a transaction with its offset, the
            reason in headers. Without it, :meth:`run` raises the handler's error.
        transient: Errors of the handler and the deserializers which mean that a service they need is unavailable: the member
            waits and retries, and does not count them.
        deserializers: Make the keys and values that the handler gets: ``{"key": ..., "value": ...}``, each ``(bytes,
            SerializationContext) -> object`` like those of confluent-kafka, or a dictionary with one for each topic that has
            one. All workers use them at once, and again after an abort. A message that cannot be read goes to the dead-letter
            topic as it was read, or stops :meth:`run`; while a schema registry is unavailable, the member waits.
        state: Stores whose changes commit with the messages, one for each partition. The consumer must then read a single
            topic, and its writer have no ``outbox``. Close them after :meth:`run`.

    Raises:
        ConfigurationError: A setting cannot work, or would break the promise.

    Source: KIP-447, KIP-848, KIP-939.
    """

    def __init__(
        self,
        group: str,
        member: str,
        *,
        topics: Sequence[str],
        handler: Handler,
        kafka: Mapping[str, object],
        database: Engine | Database | str,
        schema: str | None = None,
        offsets: Literal["kafka", "database"] = "kafka",
        consumer: Mapping[str, object] | None = None,
        writer: WriterOptions | None = None,
        max_messages: int = 500,
        linger_s: float = 0.0,
        workers: int = 1,
        attempts: int = 5,
        dead_letter_topic: str | None = None,
        transient: tuple[type[Exception], ...] = (),
        deserializers: Deserializers | None = None,
        state: PartitionStores | None = None,
    ) -> None:
        made = database_of(database, schema)
        self._member = Member(
            group,
            member,
            topics=topics,
            handler=handler,
            kafka=kafka,
            database=made,
            dispose=made.close if is_made_here(database) else lambda: None,
            make_writer=DualWriter,
            offsets=offsets,
            consumer=consumer,
            writer=writer,
            max_messages=max_messages,
            linger_s=linger_s,
            workers=workers,
            attempts=attempts,
            dead_letter_topic=dead_letter_topic,
            transient=transient,
            deserializers=deserializers,
            state=state,
        )
        self.transactional_id = self._member.transactional_id

    @property
    def progress(self) -> ConsumerProgress:
        """The messages written, and those that wait. May be read in any thread."""
        return self._member.progress

    def stop(self) -> None:
        """Make :meth:`run` end after the transactions under way. May be called in any thread, and in a signal handler."""
        self._member.stop()

    def run(self, *, max_messages: int | None = None, idle_s: float | None = None) -> None:
        """Join the group, and work until :meth:`stop`. Call it once.

        The handler runs in threads of its own; this one reads. On return the member has left the group, and nothing that it
        began is open.

        Args:
            max_messages: End once at least this many messages are written; for tests.
            idle_s: End once nothing has come for this many seconds; for tests.

        Raises:
            ConfigurationError: A setting or a right is missing, or a topic cannot be read.
            Unavailable: At the start, Kafka did not answer within ``timeout_s``, or the database did not answer. The consumer
                has joined no group and begun nothing: make another one, and run that.
            Fenced: Another process runs under this member's name.
            DecidedTransactionLost, OutcomeUnverifiable, DatabaseWentBack: A person must look. The offsets are where the last
                committed transaction left them.
            Exception: The handler's own error, if it fails for good and there is no dead-letter topic.
            KeyDeserializationError, ValueDeserializationError: Likewise, from a deserializer.
            IllegalStateError: It ran before.
        """
        self._member.begin()
        self._member.run(_Threads(), max_messages, idle_s)


class _Threads:
    """The workers are threads. Implements :class:`dualwrite.consumer.consumer.Workers`."""

    def call(self, work: Callable[[], T]) -> T:
        return work()

    def start(self, work: Callable[[], None], name: str) -> Callable[[], None]:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread.join


_REPORT_S: Final = 60.0
_LOOK_S: Final = 1.0


@dataclass(frozen=True)
class ConsumerProgress:
    """The messages that a consumer has written, and those that wait.

    Attributes:
        messages: Messages written since the start, dead letters included.
        transactions: Transactions committed.
        failed_attempts: Attempts that did not commit.
        dead_letters: Messages written to the dead-letter topic.
        lag: The number of messages not yet processed, by topic and assigned partition, as of the last fetch. Counts transaction
            markers, so it may stay slightly above zero.
    """

    messages: int
    transactions: int
    failed_attempts: int
    dead_letters: int
    lag: Mapping[tuple[str, int], int]


class Workers(Protocol):
    """Runs work that waits for the writer, in threads or in tasks of an event loop. Called in the thread that reads."""

    def call(self, work: Callable[[], T]) -> T:
        """Do the work, and wait for its result."""
        ...

    def start(self, work: Callable[[], None], name: str) -> Callable[[], object]:
        """Begin the work. Returns a function that waits until it has ended."""
        ...


class Member:
    """The part of a consumer that threads and tasks share. Arguments and errors are those of `ExactlyOnceConsumer`.

    ``database`` is for threads; ``dispose`` is called when :meth:`run` has ended. ``make_writer`` is called with the
    transactional id and arguments of `DualWriter`.
    """

    def __init__(
        self,
        group: str,
        member: str,
        *,
        topics: Sequence[str],
        handler: Handler,
        kafka: Mapping[str, object],
        database: Database,
        dispose: Callable[[], None],
        make_writer: Callable[..., DualWriter],
        offsets: str,
        consumer: Mapping[str, object] | None,
        writer: CommonOptions | None,
        max_messages: int,
        linger_s: float,
        workers: int,
        attempts: int,
        dead_letter_topic: str | None,
        transient: tuple[type[Exception], ...],
        deserializers: Deserializers | None,
        state: State | None,
    ) -> None:
        check_seconds("linger_s", linger_s, zero=True)
        if min(max_messages, workers, attempts) < 1 or isinstance(topics, str) or not topics:
            raise ConfigurationError("max_messages, workers and attempts must be at least 1, topics must be a list")
        if offsets not in {"kafka", "database"}:
            raise ConfigurationError(f"offsets must be 'kafka' or 'database', not {offsets!r}")
        if state is not None and (len(topics) != 1 or topics[0].startswith("^")):
            raise ConfigurationError("a consumer with state must read one topic: each of its partitions has a store")
        try:
            self.transactional_id = consumer_member_id(group, member)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self._group = group
        self._topics = list(topics)
        self._kafka = dict(kafka)
        self._settings = consumer_settings(kafka, consumer or {}, group=group, client_id=self.transactional_id)
        self._database = database
        self._dispose = dispose
        self._keeps_rows = offsets == "database"
        self._partitions = Partitions(max_messages, linger_s, workers)
        self._count = workers
        self._stop = threading.Event()
        self._ran = False
        self._failure: BaseException | None = None
        # While one of a worker's lanes is settled, the worker takes another. With only two, each transaction would have to ask
        # for the end of the one before the last.
        given: CommonOptions = writer or {}
        check_options(given)
        outbox = given.get("outbox", "never")
        if state is not None and outbox != "never":
            raise ConfigurationError(
                "a consumer with state follows its changelog in Kafka, but its writer's messages may wait in the database",
                next_step="leave outbox out of writer=",
            )
        if outbox == "always" and offsets == "kafka":
            raise ConfigurationError(
                "consumed offsets are a part of Kafka's transaction, but the writer's messages always wait in the database",
                next_step='give offsets="database", or leave outbox out of writer=',
            )
        self.limits = replace(given.get("limits", DEFAULT_LIMITS), max_lanes=2 * workers + 1)
        self._arguments: CommonOptions = {**given, "limits": self.limits}
        self._make_writer = make_writer
        self._working = Working(
            group,
            handler,
            CurrentWriter(self._new_writer),
            KafkaOffsets(),
            self._partitions,
            attempts,
            dead_letter_topic,
            transient,
            Deserializing.of(deserializers),
            state,
        )
        self._counts: Counts = self._working.counts
        self._lag: Mapping[tuple[str, int], int] = {}

    def _new_writer(self) -> DualWriter:
        return self._make_writer(self.transactional_id, kafka=self._kafka, database=self._database, **self._arguments)

    @property
    def progress(self) -> ConsumerProgress:
        """The messages written, and those that wait. May be read in any thread."""
        counts = self._counts
        return ConsumerProgress(
            counts.messages, counts.transactions, counts.failed_attempts, counts.dead_letters, dict(self._lag)
        )

    def stop(self) -> None:
        """Make :meth:`run` end after the transactions under way. May be called in any thread, and in a signal handler."""
        self._stop.set()

    def begin(self) -> None:
        """Note that :meth:`run` is called, which may happen once."""
        if self._ran:
            raise IllegalStateError("the consumer has already run", transactional_id=self.transactional_id)
        self._ran = True

    def run(self, workers: Workers, max_messages: int | None, idle_s: float | None) -> None:
        """Join the group, and read until :meth:`stop`. Called once, after :meth:`begin`; it blocks its thread."""
        with ExitStack() as later:
            later.callback(self._dispose)
            self._database.check()
            offsets = self._make_offsets(later)
            self._working.offsets = offsets
            # Opened before the member joins: peers must not find something unsettled under the name of a member of the group.
            later.callback(workers.call, self._working.writer.close)
            workers.call(self._working.writer.get)
            peers = Peers(self._group, self.transactional_id, kafka=self._kafka, database=self._database)
            reading = Reading(self._settings, self._partitions, offsets, peers, self._stop)
            later.callback(reading.close)
            later.enter_context(self._started(workers))
            reading.subscribe(self._topics)
            self._loop(reading, max_messages, idle_s)
        if self._failure is not None:
            raise self._failure

    def _make_offsets(self, later: ExitStack) -> Offsets:
        if not self._keeps_rows:
            return KafkaOffsets()
        coordinator = KafkaCoordinator(KafkaConfig.parse(self._kafka))
        later.callback(coordinator.close)
        sql = sql_of(self._database, 'consumed offsets in the database (offsets="database")')
        rows = ConsumedOffsets(sql.engine, sql.tables_schema, self._group, self.transactional_id)
        return RowOffsets(rows, coordinator)

    @contextmanager
    def _started(self, workers: Workers) -> Generator[None, None, None]:
        names = [f"{self.transactional_id} worker {number}" for number in range(self._count)]
        wait_for = [workers.start(self._work, name) for name in names]
        try:
            yield
        finally:
            self._partitions.close()
            for wait in wait_for:
                wait()

    def _work(self) -> None:
        try:
            while (unit := self._partitions.take()) is not None:
                rewind = True
                try:
                    rewind = self._working.perform(unit)
                finally:
                    self._partitions.give_back(unit, rewind=rewind)
        except BaseException as error:  # noqa: BLE001 - run() raises it
            self._failure = self._failure or error
            self._stop.set()

    def _loop(self, reading: Reading, max_messages: int | None, idle_s: float | None) -> None:
        report_at, busy_at, look_at = now_s() + _REPORT_S, now_s(), 0.0
        while not self._stop.is_set():
            if reading.poll() or not self._partitions.is_idle:
                busy_at = now_s()
            if max_messages is not None and self._counts.messages >= max_messages:
                return
            if idle_s is not None and now_s() - busy_at >= idle_s:
                return
            if now_s() >= look_at:
                look_at = now_s() + _LOOK_S
                self._lag = reading.lag()
            if now_s() >= report_at:
                report_at = now_s() + _REPORT_S
                logger.info("%s: %s", self.transactional_id, self.progress)
