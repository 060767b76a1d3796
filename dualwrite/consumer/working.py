"""Performs units of work, one transaction each: retried, split, set aside; and makes the objects that handlers get.

A message that cannot be read or handled is set aside, with the reason in its headers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypedDict

from sqlalchemy.exc import SQLAlchemyError

from dualwrite import failpoints
from dualwrite.clock import Deadline, now_s
from dualwrite.consumer.partitions import Offsets, PartitionLost
from dualwrite.errors import DualWriteError, Fenced, IllegalStateError, encoded, text_of
from dualwrite.protocol.consuming import (
    Step,
    Trouble,
    around,
    failures_left_over,
    halves,
    next_offsets,
    pause_s,
    step_after,
    trouble_of,
)
from dualwrite.stores.sql.access import Meaning, meaning_of
from dualwrite.waiting import elsewhere
from dualwrite.writing.fair_queue import FairQueue
from dualwrite.writing.retry import is_not_run, refuse_not_run
from dualwrite.writing.transaction import check_callable, for_topic, key_and_value

if TYPE_CHECKING:
    from confluent_kafka import Message
    from confluent_kafka.serialization import SerializationContext
    from typing_extensions import Self

    from dualwrite.consumer.partitions import Partitions, Unit
    from dualwrite.writing.transaction import Transaction
    from dualwrite.writing.writer import DualWriter

# Deserializers: callables that make objects of the keys and values that were read, as `DeserializingConsumer` has them.

Deserializer: TypeAlias = Callable[[Any, "SerializationContext"], Any]
"""Makes an object of the bytes of a key or a value: ``(bytes, SerializationContext) -> object``."""

ByTopic: TypeAlias = Deserializer | Mapping[str, Deserializer] | None
"""One for all topics, or one for each topic; the other topics then have none."""


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
"""The answers of a registry that are about the message: it has no such schema, or no valid one."""


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
        """Make it of what a consumer was given."""
        return cls(**key_and_value("deserializers", given))

    @contextmanager
    def applied(self, messages: Sequence[Message]) -> Generator[None, None, None]:
        """Deserialize the messages in place. If the block fails, they have their bytes again: a dead letter needs them.

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
    """Whether a deserializer has failed because its schema registry was unavailable, which is no fault of the message.

    By names, so that no client of a registry is loaded here.
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
        """Surround a transaction. Hidden from handlers, which have the object too.

        ``assignments`` has each partition's assignment by its number. ``check`` raises if the transaction must not begin any
        more.
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

    A new writer of the same name settles what the old one left. Being fenced now and then is harmless: peers do so while the
    member is not in the group. Another process of the same name does so forever: then one of the two must stop.
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
        """Close a writer that can no longer be used; does nothing if another worker has done so.

        Raises `Fenced` if that has happened several times within a minute, and a loss that closing reports.
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
        # No lock: a task that waits while it holds one blocks all others of its thread.
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
    """How far an attempt has come, which decides the meaning of an error."""

    writer: DualWriter | None = None
    handling: bool = False
    moving: bool = False


@dataclass
class Working:
    """Performs units, in any number of threads or tasks."""

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

        After an error, the handler's own or a `DualWriteError`, the consumer must stop.
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
        """Settle what our old writer left: until then the committed offsets are pending, and nobody gets them.

        This is also needed if partitions of the unit go to another member meanwhile: no peer settles what a member of the
        group left.
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
            # Before the transaction begins: a schema registry may take its time.
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
        if not part.is_dead:  # the dead letter tells why the work failed
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


# Messages set aside: as they were read, with the reason in headers.

_LONGEST_REASON: Final = 1000


def dead_letter_headers(
    message: Message, error: Exception, *, attempts: int, group: str
) -> list[tuple[str, str | bytes | None]]:
    """The headers of a dead letter: the message's own, then where it is from and why it was set aside.

    ``error`` is that of the last attempt; ``attempts`` says how often the work was tried with this message.
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
