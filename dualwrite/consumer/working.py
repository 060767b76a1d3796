"""Performs units of work, one transaction each: retries, splits and sets messages aside by the rules of the protocol."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from sqlalchemy.exc import SQLAlchemyError

from dualwrite import failpoints
from dualwrite.clock import Deadline, now_s
from dualwrite.consumer.partitions__apps_consumer_offsets import Offsets, PartitionLost
from dualwrite.consumer.working__apps_consumer_dead_letters import dead_letter_headers
from dualwrite.consumer.working__apps_consumer_deserializing import Deserializing, Unreadable, registry_is_away
from dualwrite.errors import DualWriteError, Fenced, text_of
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
from dualwrite.stores.sql.access__stores_sql_access_failures import Meaning, meaning_of
from dualwrite.writing.fair_queue import Turns
from dualwrite.writing.retry import refuse_not_run

if TYPE_CHECKING:
    from confluent_kafka import Message

    from dualwrite.consumer.partitions import Partitions, Unit
    from dualwrite.writing.transaction import Transaction
    from dualwrite.writing.writer import DualWriter

logger = logging.getLogger(__name__)

Handler = Callable[["Transaction", Sequence["Message"]], object]


Join = Callable[["Transaction"], Callable[[], None]]
"""Called with a transaction that has begun; returns the function to call when the handler is done."""


class State(Protocol):
    """The state of a member, by partition: `dualwrite.state.PartitionStores`."""

    def _block(self, assignments: Mapping[int, object], check: Callable[[], None]) -> AbstractContextManager[Join]:
        """Surround a transaction.

        Hidden from handlers, which have the object too.

        Args:
            assignments: By the number of each partition, its assignment.
            check: Raises if the transaction must not begin any more.
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
        self._turns: Turns[None] = Turns([None])
        self._writer: DualWriter | None = None
        self._fenced_at: deque[float] = deque(maxlen=_OFTEN)

    def get(self) -> DualWriter:
        """The open writer; opens one if there is none.

        Raises:
            DualWriteError: As :meth:`DualWriter.open`.
        """
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

        Raises:
            Fenced: It has happened several times within a minute.
            DualWriteError: A loss that closing reports.
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
    """How far an attempt has come: what an error means depends on it."""

    writer: DualWriter | None = None
    handling: bool = False
    moving: bool = False


@dataclass
class Working:
    """Performs units, in any number of threads or tasks.

    Attributes:
        group: The ``group.id``.
        handler: The user's work.
        writer: The member's writer.
        offsets: Where the offsets stand.
        partitions: The member's partitions.
        attempts: How often the work may fail before its messages are split or set aside.
        dead_letter_topic: Where messages are set aside; None stops the consumer instead.
        transient: Errors of the handler and of deserializers that do not count: something that they need is unavailable.
        deserializing: Makes the keys and values that the handler gets.
        state: The member's state stores; None without any.
        counts: The totals.
    """

    group: str
    handler: Handler
    writer: CurrentWriter
    offsets: Offsets
    partitions: Partitions
    attempts: int
    dead_letter_topic: str | None
    transient: tuple[type[Exception], ...]
    deserializing: Deserializing = field(default_factory=Deserializing)
    state: State | None = None
    counts: Counts = field(default_factory=Counts)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def perform(self, unit: Unit) -> bool:
        """Perform a unit. Returns whether its partitions must be read again from the committed offsets.

        Raises:
            Exception: The handler's own, or a `DualWriteError`: the consumer must stop.
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

        Also if partitions of the unit go to another member meanwhile: no peer settles a member of the group.
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
