"""What a block does with messages that may wait in the database, and what blocks and their sender tell each other.

Blocks put messages into the database, and one thread sends them. Each needs the other's news at once: that something waits,
that the mode has changed, that the sender is about to lock the mode. Only the database decides what the mode is and what waits.
What this process knows of it serves to wake the sender, to inform people, and to spare waits.

A block of such a writer keeps its messages as values until Kafka has all of them. If Kafka falls silent before that, the
values become rows of the block's own transaction, in the statements that decide. What was sent is left undecided: the row of
the lane does not name it, so settling aborts it before the lane sends again.

Only silence makes a block fall back: what Kafka refuses now, it would refuse later, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final, cast

from dualwrite import failpoints, waiting
from dualwrite.clock import Deadline, Patience, now_s
from dualwrite.errors import DualWriteError, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.interfaces import NO_OBSERVER, Observer, OutboxNews
from dualwrite.protocol.message import ConsumedOffsets, MessageBatch, MessageColumns, Unsendable
from dualwrite.protocol.outbox import (
    OutboxState,
    Way,
    asks_kafka_first,
    full,
    full_error,
    must_come_first,
    setting_of_block,
    way_of,
)
from dualwrite.protocol.values import FirstLook, OutboxMode

if TYPE_CHECKING:
    from dualwrite.interfaces import Handle, OutboxRows
    from dualwrite.kafka.engine import ProducerEngine
    from dualwrite.protocol.message import Sendable
    from dualwrite.protocol.outbox import Outbox as Setting
    from dualwrite.protocol.values import Decision, StateRow, WriterLimits
    from dualwrite.writing.health import HealthMonitor
    from dualwrite.writing.lane import Lane


logger = logging.getLogger(__name__)

_GATE_S: Final = 0.5
"""The longest that a block waits for the sender to lock the mode. After it, both wait in the database, as blocks of other
processes do."""


class Outbox:
    """The news of one writer's outbox, as its process knows it. Used by many threads and tasks at once."""

    def __init__(self, writer: str, observer: Observer = NO_OBSERVER) -> None:
        self._writer = writer
        self._observer = observer
        self._wanted = threading.Event()
        self._gate = waiting.Condition()
        self._closed_until: float | None = None
        self._state = OutboxState()

    # For blocks

    def wake(self) -> None:
        """Tell the sender that something waits. Call it after the COMMIT of a block whose messages wait; it never blocks."""
        if not self._wanted.is_set():  # a sender at work has usually been woken already
            self._wanted.set()

    def note_later(self, why: str) -> None:
        """Note that a block has turned the mode to *later*, after its COMMIT. ``why`` is for people."""
        self._observer.outbox(self._writer, OutboxNews.FELL_BACK, 1)
        self._change(later=True, why=why)
        self.wake()

    def pass_gate(self) -> None:
        """Wait until the sender has locked the mode and is done with it. Call it before a block takes a share of that lock.

        Otherwise the shares of a busy writer's blocks would overlap forever, and the last send would never get its lock: a
        database grants further shares although somebody waits for the exclusive lock.
        """
        if self._closed_until is None:
            return
        with self._gate:
            while (until := self._closed_until) is not None and (left_s := until - now_s()) > 0:
                self._gate.wait(left_s)

    # For the sender

    @contextmanager
    def gate_closed(self) -> Generator[None, None, None]:
        """Hold back the blocks of this process while the sender locks the mode."""
        with self._gate:
            self._closed_until = now_s() + _GATE_S
        try:
            yield
        finally:
            with self._gate:
                self._closed_until = None
                self._gate.notify_all()

    def wait(self, seconds: float | None) -> bool:
        """Wait for news from a block, or until the time is over; returns whether there is news. For one thread."""
        found = self._wanted.wait(seconds)
        self._wanted.clear()
        return found

    @property
    def has_news(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._wanted.is_set()

    def note_sent(self, messages: int) -> None:
        """Messages were sent: decided, whether or not Kafka has completed them yet."""
        self._observer.outbox(self._writer, OutboxNews.SENT, messages)

    def note_aside(self, messages: int) -> None:
        """Messages were moved aside."""
        self._observer.outbox(self._writer, OutboxNews.ASIDE, messages)

    def note_mode(self, *, later: bool, why: str) -> None:
        """Note the mode as the sender has read it, or set it."""
        self._change(later=later, why=why)

    def note_stopped(self, why: str | None) -> None:
        """Note why the sender has stopped at a message that Kafka refuses; None if it goes on."""
        self._state = self._state.with_stop(why)

    def note_waiting(self, rows: int, size: int, oldest_s: float | None) -> None:
        """Note what waits: how many messages, their bytes, and for how long the oldest has waited."""
        oldest_at = None if oldest_s is None else now_s() - oldest_s
        self._state = self._state.with_rows(rows, size, oldest_at)

    def _change(self, *, later: bool, why: str) -> None:
        before = self._state
        if before.later is later:
            return
        self._state = before.turned(later, datetime.now(timezone.utc))
        if later:
            logger.warning("%s: messages wait in the database from now on, and are sent later: %s", self._writer, why)
        elif before.later is not None:
            logger.warning("%s: messages go to Kafka directly again: %s", self._writer, why)

    # For both, and for people

    @property
    def state(self) -> OutboxState:
        """What is known of the outbox. Returns at once."""
        return self._state


_LOCK_S: Final = 10.0
"""Limits the wait for the lock on the mode. The last send holds it exclusively for one small transaction."""
_MESSAGES_ONLY: Final = (
    "run the work again when Kafka answers; offsets that are kept as rows of the database, in the same block, can wait"
)


class Recipient:
    """Stands in for the engine of a block whose messages wait: it provides what checks need, and accepts no message."""

    begun_for_s = 0.0

    def __init__(self, transactional_id: str, *, max_message_bytes: int, bulk: bool) -> None:
        self._id = transactional_id
        self.max_message_bytes = max_message_bytes
        self.bulk = bulk
        self.corked = False

    def require_topic(self, topic: str) -> None:
        """Any topic will do, until the message is sent."""

    def refuse_callback(self) -> None:
        """As the engine does: an outage must not change what a program may do."""
        if self.bulk:
            raise IllegalStateError("a producer in bulk mode calls no on_delivery", transactional_id=self._id)


@dataclass(frozen=True, eq=False)
class Outboxes:
    """What all blocks share whose messages may wait. ``known`` is what this process knows of the rows."""

    writer: str
    setting: Setting
    known: Outbox
    limits: WriterLimits
    max_message_bytes: int
    bulk: bool

    def of_block(self, setting: Setting | None) -> MayWait:
        """For one block."""
        return MayWait(self, setting_of_block(self.setting, setting))

    @property
    def full(self) -> str | None:
        """Why no more messages may wait; None if they may."""
        state = self.known.state
        oldest_s = None if state.oldest_at is None else now_s() - state.oldest_at
        return full(self.limits, rows=state.rows, size=state.size, oldest_s=oldest_s)


class MayWait:
    """The messages of one block that may wait. Used by its thread alone."""

    def __init__(self, outboxes: Outboxes, setting: Setting) -> None:
        self.setting = setting
        self.way = Way.DIRECT
        self.callback_error: BaseException | None = None
        self.decision: Decision | None = None  # its number shows later whether it was committed
        self.refused = False  # refused by the rules, not by a server
        self._outboxes = outboxes
        self._id = outboxes.writer
        self._monitor: HealthMonitor | None = None
        self._can_send = False
        self._why = 'a block has outbox="always"'
        self._rows: OutboxRows | None = None
        self._look = FirstLook(None, OutboxMode.DIRECT)
        self._kept: list[Sendable] = []
        self._size = 0
        self._cannot: str | None = None
        self._turned = False

    @property
    def patience_s(self) -> float:
        """How long the block waits for each answer of Kafka."""
        return self._outboxes.limits.fallback_after_s

    def waiting_is_in_vain(self) -> bool:
        """Whether Kafka is known to be silent: then the block need not use up its patience."""
        return self._monitor is not None and self._monitor.silence is not None

    @property
    def waits(self) -> bool:
        """Whether its messages wait, if it has any."""
        return self.way is Way.WAIT or self.way is Way.TURN

    @property
    def has_waiting(self) -> bool:
        """Whether it has messages that wait."""
        return self.waits and bool(self._kept)

    def recipient(self) -> ProducerEngine:
        """Stands in for the engine, once the messages wait."""
        made = Recipient(self._id, max_message_bytes=self._outboxes.max_message_bytes, bulk=self._outboxes.bulk)
        return cast("ProducerEngine", made)  # it has what the block calls

    # Its beginning

    def make_ready(self, lane: Lane, monitor: HealthMonitor, timeout_s: float) -> None:
        """Make the lane ready to send if the block may need that and Kafka answers in time; otherwise ready to wait."""
        self._id, self._monitor = lane.transactional_id, monitor
        later = self._outboxes.known.state.later is True
        if self.setting == "never":
            lane.ready(Deadline(timeout_s), monitor.refuse_in_silence)
            self._can_send = True
        elif asks_kafka_first(self.setting, silent=monitor.silence is not None, later=later):
            self._make_ready_to_send(lane, timeout_s)
        elif monitor.silence is not None:
            self._why = str(monitor.silence)
        if not self._can_send:
            lane.ready_to_wait(Deadline(timeout_s))

    def _make_ready_to_send(self, lane: Lane, timeout_s: float) -> None:
        try:
            lane.ready(Patience(min(self.patience_s, timeout_s), self.waiting_is_in_vain))
        except Unavailable as error:
            self._why = error.what
        else:
            self._can_send = True

    def pass_gate(self) -> None:
        """Let the sender go first if it is about to lock the mode. Call it before the database transaction begins."""
        if self.setting != "never" and self._outboxes.setting != "always":
            self._outboxes.known.pass_gate()

    def look(self, rows: OutboxRows | None, connection: Handle, row: StateRow) -> int | None:
        """Execute the first statement. Returns the row's present incarnation."""
        assert rows is not None  # checked when the writer opened
        self._rows = rows
        self._look = rows.read_first(
            connection, row.transactional_id, self._outboxes.writer, namespace=row.namespace, known=row
        )
        return self._look.incarnation

    def choose(self, connection: Handle, lane: Lane) -> None:
        """Choose whether the messages are sent or wait, once the row has named our incarnation. Locks the mode if necessary."""
        always = self._outboxes.setting == "always"
        self.way = way_of(self.setting, self._look.mode, can_send=self._can_send, shared=False, always=always)
        if self.way is Way.SHARE:
            mode = self._own_rows.share(connection, self._outboxes.writer, within_s=_LOCK_S)
            self.way = way_of(self.setting, mode, can_send=self._can_send, shared=True)
        if self.way is Way.TURN and self.setting == "fallback" and self._monitor is not None:
            # What this process knew of the mode was out of date, so the lane was not made ready.
            if self._monitor.silence is None and not self._can_send:
                self._make_ready_to_send(lane, self.patience_s)
            if self._can_send:
                self.way = Way.DIRECT
        self.refused = True
        if self.way is Way.REFUSE:
            raise must_come_first(self._id)
        if self.waits and (why := self._outboxes.full) is not None:
            raise full_error(why, self._id)
        self.refused = False

    @property
    def _own_rows(self) -> OutboxRows:
        assert self._rows is not None
        return self._rows

    # Its messages

    def keep(self, message: Sendable) -> Sendable | None:
        """Keep a message. Returns what to send, as long as the block sends directly; None once its messages wait.

        Raises if the block's messages wait and this one cannot, or if Kafka would refuse it.
        """
        if isinstance(message, ConsumedOffsets):
            self._cannot = "it has sent consumed offsets, which are a part of its transaction in Kafka"
            if self.waits:
                raise self._offsets_cannot_wait()
            return message
        if isinstance(message, MessageBatch):
            try:
                message = message.checked(self._outboxes.max_message_bytes)
            except Unsendable as error:
                raise error.refusal(message.topic, self._id) from None
        if self._cannot is None or self.waits:
            if isinstance(message, MessageColumns) and self.waits:
                self._keep_rows(message)
            else:
                self._kept.append(message)
            self._count(message)
        return None if self.waits else message

    def _count(self, message: Sendable) -> None:
        self._size += message.payload
        most = self._outboxes.limits.outbox_bytes
        if self._size <= most:
            return
        if self.waits:
            raise TransactionAborted(
                f"the messages of the block have {self._size} bytes: too many to wait in the database "
                f"(outbox_bytes={most})",
                transactional_id=self._id,
                next_step="do less in one transaction, or raise outbox_bytes",
                retryable=self.setting == "fallback",  # when Kafka answers, they need not wait
            )
        self._cannot = f"its messages have more than {most} bytes (outbox_bytes)"
        self._kept.clear()

    def _keep_rows(self, columns: MessageColumns) -> None:
        # Reads the columns just as the engine does that sends them one by one. Loads Kafka's clients.
        from dualwrite.kafka.librdkafka.producer import messages_of  # noqa: PLC0415 - as above

        try:
            self._kept += messages_of(columns, self._outboxes.max_message_bytes)
        except Unsendable as error:
            raise error.refusal(columns.topic, self._id) from None

    def _offsets_cannot_wait(self) -> TransactionAborted:
        return TransactionAborted(
            "consumed offsets are a part of Kafka's transaction, and the messages of this block wait in the database",
            transactional_id=self._id,
            next_step=_MESSAGES_ONLY,
            retryable=self.setting == "fallback",
        )

    def finish(self) -> None:
        """Take no more messages. Call it once Kafka has all of them, undecided, or they wait.

        Raises what a delivery callback raised before the block fell back.
        """
        if self.callback_error is not None:
            raise self.callback_error
        if not self.waits:
            self._kept.clear()

    def fall_back(self, error: DualWriteError) -> None:
        """Let the messages wait from now on, because Kafka is silent, as ``error`` says. Raises if they cannot."""
        why = self._cannot or self._outboxes.full
        if why is not None:
            raise TransactionAborted(
                f"{error.what}; the block does not fall back: {why}", transactional_id=self._id
            ) from error
        kept, self._kept = self._kept, []
        self.way, self._why = Way.TURN, error.what
        for message in kept:
            if isinstance(message, MessageColumns):
                self._keep_rows(message)
            else:
                self._kept.append(message)
        logger.info("%s: the messages of a block wait in the database: %s", self._id, error.what)
        failpoints.hit("write.falls_back")

    # Its end

    def decide(self, connection: Handle, decision: Decision) -> tuple[bool, str | None]:
        """Execute the last statements: turn the mode if necessary, raise the count of the lane's row, put the messages."""
        rows, writer = self._own_rows, self._outboxes.writer
        if self.way is Way.TURN:
            self._turn(rows, connection, writer)
        self.decision = decision._replace(waits=self._look.next_decision)
        return rows.decide(connection, self.decision, writer, self._kept)

    def _turn(self, rows: OutboxRows, connection: Handle, writer: str) -> None:
        mode = rows.mode(connection, writer)
        if mode is OutboxMode.LATER:
            mode = rows.share(connection, writer, within_s=_LOCK_S)
        if mode is OutboxMode.DIRECT:
            mode = rows.lock(connection, writer, within_s=_LOCK_S, beside_shares=True)
        if mode is OutboxMode.DIRECT:
            rows.turn(connection, writer, OutboxMode.LATER)
            self._turned = True
            failpoints.hit("write.turns")

    def note_committed(self) -> None:
        """Tell the sender that messages wait. Call it after the COMMIT."""
        if self._turned:
            self._outboxes.known.note_later(self._why)
        else:
            self._outboxes.known.wake()
