"""The sender of messages that wait in the database: one dual write after another, on a thread of the writer.

A send deletes the next waiting rows and produces what they hold, so it is exactly once by the protocol of every dual write. It
runs under an id of its own, which is claimed and fenced as the lanes are. So nobody else sends the same rows: anyone who tries
finds fewer rows to delete than it has read, and aborts. `dualwrite.protocol.outbox` decides how large a send is, when it is the
last one, and which message Kafka refuses.

The writer's own COMMITs and Kafka's return wake the thread. It also looks by itself now and then, because another process may
have put messages back. No error ends it, except that another owner has taken over. While Kafka is known to be silent it tries
nothing.

A message that Kafka refuses for good is moved aside with the reason, or stops the sender, as configured. If it is moved aside,
later messages are sent, even those of its key; a person who puts it back puts it behind them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import repeat
from typing import TYPE_CHECKING, Final

from dualwrite import failpoints
from dualwrite.clock import Deadline, now_s, pause
from dualwrite.errors import (
    CompletionPending,
    DualWriteError,
    Fenced,
    IllegalStateError,
    TransactionAborted,
    Unavailable,
)
from dualwrite.protocol.message import OVERHEAD, Message, Unsendable, size_of
from dualwrite.protocol.outbox import (
    COLUMNS_FROM,
    MOST_BYTES,
    MOST_ROWS,
    MOST_ROWS_ALONE,
    PRODUCED_AT,
    STOPPED_PAUSE_S,
    Round,
    Sends,
    pause_after,
    refusal_behind,
    refuses_topic,
)
from dualwrite.protocol.values import OutboxMode
from dualwrite.recovery.claim import LOSSES
from dualwrite.writing.dual_write import DualWrite
from dualwrite.writing.outbox import Outbox
from dualwrite.writing.transaction import write_of

if TYPE_CHECKING:
    from dualwrite.interfaces import Database, Handle, OutboxRows, StateStore
    from dualwrite.protocol.message import Header, Sendable
    from dualwrite.protocol.values import WaitingMessages, WhenRefused
    from dualwrite.recovery.claim import OwnerContext
    from dualwrite.writing.health import HealthMonitor
    from dualwrite.writing.lane import Lane, Losses
    from dualwrite.writing.transaction import Transaction

logger = logging.getLogger(__name__)

_LOCK_S: Final = 0.25
"""How long the last send waits for the lock on the mode, while the writer's blocks wait at the gate."""
_LOOK_EVERY_S: Final = 5.0
"""How often an idle sender checks whether another process has put messages back."""
_COUNT_EVERY_S: Final = 1.0
_SETTLE_S: Final = 10.0
_SILENT_LOOK_S: Final = 0.25
_IMPORT_FROM: Final = 5_000
"""From this many messages on, importing pyarrow, if it is installed, pays off."""
_TIME_HEADER_BYTES: Final = size_of(None, None, [(PRODUCED_AT, b"%d" % 10**14)]) - OVERHEAD
_TRIES: Final = 5
"""How often in a row a caller that waits until everything is sent tries again."""


@contextmanager
def _looking(store: StateStore, handle: Handle) -> Generator[None, None, None]:
    """A transaction of the block's own in which the outbox is only read.

    It ends with COMMIT: at a ROLLBACK psycopg lets the session forget its prepared statements, and each send would prepare
    them again.
    """
    store.begin(handle)
    try:
        yield
    except BaseException:
        store.rollback(handle)
        raise
    store.commit(handle, answer_s=_SETTLE_S)


class NotLocked(Exception):
    """The lock on the mode was not free in time."""


class WentBack(Exception):
    """The database has lost a send: rows that were sent may wait again."""


class Sending:
    """Sends what waits of one writer, one dual write after another. Used by one thread at a time.

    ``lane`` is the writer's ``#outbox``, which nobody else uses. ``when_refused`` says what happens to a refused message, and
    ``turns_back`` whether the last send sets the mode back to direct. ``sent`` counts the messages since the mode was last
    direct, ``sent_before`` those until then. ``stopped`` says why it sends no more, if so.
    """

    def __init__(
        self,
        writer: str,
        lane: Lane,
        context: OwnerContext,
        database: Database,
        outbox: Outbox,
        *,
        turns_back: bool,
        when_refused: WhenRefused = "aside",
        margin_s: float,
        timeout_s: float,
    ) -> None:
        self._writer = writer
        self._lane = lane
        self._context = context
        self._database = database
        self._outbox = outbox
        self._when_refused = when_refused
        self._margin_s = margin_s
        self._timeout_s = timeout_s
        alone = database.traits.blocks == 1
        self._sends = Sends(turns_back=turns_back, most_rows=MOST_ROWS_ALONE if alone else MOST_ROWS)
        self._lock_at = 0.0
        self._read: WaitingMessages | None = None
        self._stopped_at: int | None = None
        self.sent = self.sent_before = 0
        self.stopped: str | None = None

    @property
    def _rows(self) -> OutboxRows:
        rows = self._context.store.outbox
        if rows is None:
            raise IllegalStateError("this database keeps no messages that wait", transactional_id=self._writer)
        return rows

    def mode(self) -> OutboxMode:
        """The writer's mode, by a transaction of its own."""
        return self._context.store.outbox_mode(self._writer)

    @property
    def needs_settling(self) -> bool:
        """Whether :meth:`settle` has something to do."""
        return self._lane.needs_settling

    def settle(self) -> None:
        """Settle what the last send, ours or a former owner's, may have left open in Kafka, even if nothing waits any more.

        That send may have been decided and have turned the mode back: then nobody else would complete it.
        """
        if self.needs_settling:
            self._lane.settle(Deadline(min(self._timeout_s, _SETTLE_S)))

    @property
    def rest_s(self) -> float:
        """For how long to let messages gather before the next send."""
        return self._sends.rest_s

    def get_ready(self) -> None:
        """Make the lane ready for the next send, if it has been used, so that this send need not ask Kafka first."""
        if self._lane.usable:
            self._lane.ready(Deadline(min(self._timeout_s, _SETTLE_S)))

    def send(self) -> float | None:
        """Send the next messages that wait. Returns the seconds after which to call it again; None if nothing is left to do.

        Nothing is left once the mode is direct, or once nothing waits and the mode stays *later*. Raises what a dual write
        raises, except for a message that Kafka refuses, which it handles. Call it again after any error but `Fenced`.

        Once the database has lost a send, it sends nothing more: what was sent waits again, and no row shows which it is.
        """
        if self._lane.lost_decision is not None:
            return self._stand(self._lane.lost_decision)
        made = self._sends.next(lock_due=now_s() >= self._lock_at)
        began = now_s()
        try:
            direct = self._write(made)
        except WentBack:
            return self.send()  # which says so
        except NotLocked:
            self._sends = self._sends.not_locked()
            self._lock_at = now_s() + self._sends.lock_pause_s
            return 0.0  # others may have put something meanwhile
        except CompletionPending:
            self._note_sent(made, now_s() - began)  # decided: whoever settles the lane completes it
            raise
        except DualWriteError as error:
            if (refusal := refusal_behind(error)) is not None and self._read is not None:
                self._refused(*refusal, whole_topic=refuses_topic(error))
                return STOPPED_PAUSE_S if self.stopped else 0.0
            if isinstance(error, TransactionAborted):
                self._sends = self._sends.failed()
            raise
        read = self._note_sent(made, now_s() - began)
        if direct:
            self._outbox.note_waiting(0, 0, None)
            self._outbox.note_mode(later=False, why=f"{self.sent} messages were sent that had waited")
            self.sent_before, self.sent = self.sent, 0
            return None
        if self._sends.turns_back:
            # If the lock is not free, all that is left to do is to wait for it.
            return 0.0 if read else max(0.0, self._lock_at - now_s())
        return 0.0 if read and not self._sends.caught_up else None

    def _note_sent(self, made: Round, seconds: float) -> int:
        found, self._read = self._read, None
        read = 0 if found is None else len(found.numbers)
        full = found is not None and found.more
        self._sends = self._sends.sent(made, read, seconds=seconds, full=full, news=self._outbox.has_news)
        if read:
            self._lane.heard_s = now_s() - seconds  # Kafka has acknowledged them since then
            self.sent += read
            if self.stopped:
                self.stopped = self._stopped_at = None
                self._outbox.note_stopped(None)
            self._outbox.note_sent(read)
        return read

    def _write(self, made: Round) -> bool:
        """One send. Returns whether it has set the mode to direct."""
        rows, turned, self._read = self._rows, False, None
        with self._database.connect_to_send() as handle:
            if not made.last:
                # Meanwhile the markers of the last send arrive. Deleting the rows checks that they are still there.
                with _looking(self._context.store, handle):
                    read = self._read_next(rows, handle, made)
                if not read.numbers:
                    return False
            self._lane.ready(Deadline(self._timeout_s))
            if self._lane.lost_decision is not None:  # found by a new claim, whose row shows nothing of it any more
                raise WentBack
            with self._dual_write(handle) as tx:
                if made.last:
                    self._lock(rows, handle)
                    # Only now: what the holders of shares put is visible once we have the lock.
                    read = self._read_next(rows, handle, made)
                self._take(tx, rows, handle, read)
                if made.last and not read.more:
                    rows.turn(handle, self._writer, OutboxMode.DIRECT)
                    turned = True
        return turned

    def _read_next(self, rows: OutboxRows, handle: Handle, made: Round) -> WaitingMessages:
        self._read = rows.read(handle, self._writer, limit=made.rows, max_bytes=MOST_BYTES)
        failpoints.hit("outbox.read")
        return self._read

    def _take(self, tx: Transaction, rows: OutboxRows, handle: Handle, read: WaitingMessages) -> None:
        """Produce what was read, and delete exactly that. Finding fewer rows means that somebody else has sent some."""
        if not read.numbers:
            return
        write = write_of(tx)
        for messages in messages_of(read, write.engine.max_message_bytes, self._lane.transactional_id):
            write.send(messages)
        failpoints.hit("outbox.sent")
        deleted = rows.delete(handle, self._writer, read.numbers)
        if deleted != len(read.numbers):
            raise _other_sender(deleted, len(read.numbers), self._lane.transactional_id)
        failpoints.hit("outbox.deleted")

    def _dual_write(self, handle: Handle) -> DualWrite:
        return DualWrite(
            self._lane,
            self._context,
            handle,
            traits=self._database.traits,
            margin_s=self._margin_s,
            timeout_s=self._timeout_s,
            savepoints=False,
        )

    def _lock(self, rows: OutboxRows, handle: Handle) -> None:
        with self._outbox.gate_closed():
            try:
                rows.lock(handle, self._writer, within_s=_LOCK_S)
            except (Unavailable, TransactionAborted) as error:
                raise NotLocked from error
        failpoints.hit("outbox.locked")

    # What Kafka refuses

    def _refused(self, topic: str, reason: str, *, whole_topic: bool) -> None:
        """Take one step towards finding the refused message, or move it aside."""
        read, self._read = self._read, None
        assert read is not None
        if whole_topic:
            numbers = [number for number, of in zip(read.numbers, read.topics, strict=True) if of == topic]
        else:
            self._sends = self._sends.refused(len(read.numbers))
            if not self._sends.found:
                return
            numbers = list(read.numbers)
        if self._when_refused == "stop":
            self._stop(topic, reason, numbers[0])
        else:
            self._move_aside(topic, reason, numbers)

    def _stand(self, why: str) -> float:
        self._note_stopped(
            f"{why}: messages that were sent may wait again; look with `dualwrite outbox list`, then open the writer again",
            new=not self.stopped,
        )
        return STOPPED_PAUSE_S

    def _stop(self, topic: str, reason: str, number: int) -> None:
        self._note_stopped(f"Kafka refuses a message for topic {topic!r}: {reason}", new=self._stopped_at != number)
        self._stopped_at = number

    def _note_stopped(self, why: str, *, new: bool) -> None:
        self.stopped = why
        if new:
            logger.error(
                "%s: waiting messages are not sent any more: %s",
                self._writer,
                why,
                extra={"dualwrite_event": "outbox_stopped", "dualwrite_transactional_id": self._writer},
            )
        self._outbox.note_stopped(why)

    def _move_aside(self, topic: str, reason: str, numbers: Sequence[int]) -> None:
        """Move messages aside in a dual write without messages: it is fenced as every send is."""
        self._lane.ready(Deadline(self._timeout_s))
        with self._database.connect_to_send() as handle, self._dual_write(handle):
            moved = self._rows.move_aside(handle, self._writer, numbers, reason)
            if moved != len(numbers):
                raise _other_sender(moved, len(numbers), self._lane.transactional_id)
        failpoints.hit("outbox.moved_aside")
        self._sends = self._sends.moved_aside()
        self._outbox.note_aside(len(numbers))
        logger.error(
            "%s: Kafka refuses %d waiting messages for topic %r, which were moved aside: %s",
            self._writer,
            len(numbers),
            topic,
            reason,
            extra={"dualwrite_event": "outbox_aside", "dualwrite_transactional_id": self._writer},
        )

    def count(self) -> None:
        """Count what waits, for people and for the bounds."""
        found = self._rows.waiting(self._writer)
        self._outbox.note_waiting(found.rows, found.size, found.oldest_s)

    def idle(self) -> None:
        """Record that the last send is complete, as nothing was sent for some time."""
        self._lane.record_completed()

    def close(self) -> None:
        """Record that the last send is complete, if it is, and release the lane. The next owner settles what is left."""
        try:
            if self._lane.unrecorded is not None:
                self._lane.record_completed()
        except DualWriteError as error:
            logger.warning("%s: left to the next settler: %s", self._lane.transactional_id, error)
        finally:
            self._lane.discard()


def _other_sender(found: int, expected: int, transactional_id: str) -> TransactionAborted:
    return TransactionAborted(
        f"of {expected} messages that were read, {found} still waited: somebody else has sent or deleted the others",
        transactional_id=transactional_id,
    )


def messages_of(read: WaitingMessages, max_bytes: int, transactional_id: str) -> Iterator[Sendable]:
    """What was read, as an engine takes it: by topic, in order. Between topics there is no order."""
    places: dict[str, list[int] | None]
    if len(set(read.topics)) == 1:
        places = {read.topics[0]: None}
    else:
        by_topic: dict[str, list[int]] = {}
        for at, topic in enumerate(read.topics):
            by_topic.setdefault(topic, []).append(at)
        places = dict(by_topic)
    fits = all(size + _TIME_HEADER_BYTES <= max_bytes for size in _sizes_of(read, max_bytes))
    for topic, chosen in places.items():
        rows = range(len(read.numbers)) if chosen is None else chosen
        if fits and _columns_pay(len(rows)):
            from dualwrite.kafka.native.arrow import columns_of_waiting  # noqa: PLC0415 - imports pyarrow

            yield columns_of_waiting(topic, read, chosen, PRODUCED_AT)
            continue
        for at in rows:
            yield _message(topic, read, at, max_bytes, transactional_id)


def _message(topic: str, read: WaitingMessages, at: int, max_bytes: int, transactional_id: str) -> Message:
    """One message with the header that says since when it waits; without the header, if that would make it too large."""
    own: Sequence[Header] = () if read.headers is None else read.headers[at]
    headers = [*own, (PRODUCED_AT, b"%d" % read.produced_ms[at])]
    if size_of(read.values[at], read.keys[at], headers) > max_bytes:
        headers = [*own]
    try:
        return Message.checked(
            topic,
            read.values[at],
            read.keys[at],
            partition=None if read.partitions is None else read.partitions[at],
            headers=headers,
            timestamp_ms=None if read.timestamps_ms is None else read.timestamps_ms[at],
            max_bytes=max_bytes,
        )
    except Unsendable as error:
        raise error.refusal(topic, transactional_id) from None


def _sizes_of(read: WaitingMessages, max_bytes: int) -> Iterator[int]:
    """The size of each message; empty if all together are smaller than one may be."""
    if read.size + OVERHEAD + _TIME_HEADER_BYTES <= max_bytes:
        return iter(())
    headers: Iterable[Sequence[Header]] = repeat(()) if read.headers is None else read.headers
    return map(size_of, read.values, read.keys, headers)


def _columns_pay(messages: int) -> bool:
    if messages < COLUMNS_FROM:
        return False
    if "pyarrow" in sys.modules:
        return True
    return messages >= _IMPORT_FROM and find_spec("pyarrow") is not None and find_spec("numpy") is not None


def send_all(sending: Sending, writer: str, deadline: Deadline) -> int:
    """Send until nothing waits, and return how many messages that were. Raises `Unavailable` if something is left."""
    failures, why = 0, "the time is over"
    while not deadline.expired:
        try:
            pause_s = sending.send()
        except (Fenced, *LOSSES):
            raise
        except DualWriteError as error:
            failures, why = failures + 1, error.what
            if failures >= _TRIES:
                break
            pause_s = pause_after(failures)
        else:
            failures = 0
        if pause_s is None:
            return sending.sent_before
        if sending.stopped:
            why = sending.stopped
            break
        pause(min(pause_s, deadline.remaining_s()))
    raise Unavailable(
        f"messages that wait in the database could not be sent: {why}",
        transactional_id=writer,
        next_step="run `dualwrite recover` for this id when Kafka answers",
    )


class Sender:
    """The thread that sends what waits of an open writer.

    ``monitor`` says whether Kafka is known to be silent, and watches what the sender asks Kafka. The sender tells it if another
    owner has taken over.
    """

    def __init__(
        self,
        writer: str,
        outbox: Outbox,
        sending: Sending,
        *,
        always: bool,
        monitor: HealthMonitor,
        losses: Losses,
        idle_after_s: float,
    ) -> None:
        self._writer = writer
        self._outbox = outbox
        self._sending = sending
        self._always = always
        self._monitor = monitor
        self._losses = losses
        self._idle_after_s = idle_after_s
        self._hurry = threading.Event()
        self._closing: Deadline | None = None
        self._at_work = True  # a former owner may have left something
        self._counted_at = 0.0
        self._worked_at = now_s()
        self._failures = 0
        self._told = ""
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin to send. Returns at once."""
        self._thread = threading.Thread(target=self._run, name=f"dualwrite {self._writer} outbox", daemon=True)
        self._thread.start()

    def kafka_is_back(self) -> None:
        """Try again now: Kafka answers. Returns at once; any thread may call it."""
        self._hurry.set()

    def close(self, within_s: float) -> None:
        """Send what waits, if Kafka answers, for at most that long; then stop. May be called more than once."""
        if self._thread is None or os.getpid() != self._pid:
            return
        self._closing = self._closing or Deadline(within_s)
        self._outbox.wake()
        self._hurry.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        pause_s: float | None = 0.0
        while not self._is_over():
            try:
                pause_s = self._step()
                self._failures = 0
            except Fenced as error:
                logger.warning("%s: its waiting messages are left to the new owner: %s", self._writer, error)
                self._monitor.note(error)
                break
            except Exception as error:  # noqa: BLE001 - whatever it is, only another try can help, and somebody must try
                pause_s = self._failed(error)
            self._rest(pause_s or 0.0)
        self._sending.close()

    def _is_over(self) -> bool:
        closing = self._closing
        if closing is None:
            return False
        # The last blocks may have put something since the last send; they reported it before the writer closes.
        idle = not self._at_work and not self._outbox.has_news
        return idle or closing.expired or self._failures > 0 or self._monitor.silence is not None

    def _failed(self, error: Exception) -> float:
        self._failures += 1
        pause_s = pause_after(self._failures)
        if isinstance(error, LOSSES):
            if str(error) != self._told:  # a claim that is lost is found again at each try
                self._told = str(error)
                self._losses.report(error)
        elif not isinstance(error, DualWriteError):
            logger.error("%s: could not send waiting messages; retrying in %g s", self._writer, pause_s, exc_info=error)
        else:
            # Once for each outage, which must not fill the log.
            level = logging.WARNING if self._failures == 1 else logging.DEBUG
            logger.log(level, "%s: waiting messages are not sent yet; retrying: %s", self._writer, error)
        return pause_s

    def _rest(self, seconds: float) -> None:
        """Wait, whatever blocks commit meanwhile: their news is that there is more to do, not that it would succeed.

        What waits is counted all the same: the bounds hold for a sender that cannot send, above all.
        """
        until = now_s() + seconds
        while (left_s := until - now_s()) > 0:
            if self._hurry.wait(min(left_s, _COUNT_EVERY_S)):
                self._hurry.clear()
                break
            with suppress(Exception):  # the database may be away, which the next try says
                self._count()

    def _step(self) -> float | None:
        """Send, look or wait. Returns for how long to rest before the next step."""
        sending = self._sending
        if self._monitor.silence is not None:  # nothing is tried: an outage is no failure of a message
            self._count()
            return _SILENT_LOOK_S
        if self._at_work or sending.needs_settling:
            self._monitor.note_sends()
        sending.settle()
        if not self._at_work:
            sending.get_ready()
            self._monitor.sends = False
            self._at_work = self._outbox.wait(_LOOK_EVERY_S) or self._always or sending.mode() is OutboxMode.LATER
            if not self._at_work and now_s() - self._worked_at > self._idle_after_s:
                sending.idle()
            return None
        if not self._outbox.state.later and not self._always and sending.mode() is OutboxMode.DIRECT:
            self._outbox.note_mode(later=False, why="nothing waits")
            self._at_work = False
            return None
        self._outbox.note_mode(later=True, why="the writer always does so" if self._always else "they did so before")
        if self._closing is None:
            self._rest(self._worked_at + sending.rest_s - now_s())
        pause_s = sending.send()
        self._worked_at = now_s()
        self._at_work = pause_s is not None
        self._count()
        return pause_s

    def _count(self) -> None:
        # Also once nothing is left, because blocks are refused by the last count.
        is_over = not self._at_work and self._outbox.state.rows > 0
        if is_over or now_s() - self._counted_at >= _COUNT_EVERY_S:
            self._sending.count()
            self._counted_at = now_s()
