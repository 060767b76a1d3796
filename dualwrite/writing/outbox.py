"""What the blocks of a writer and its sender tell each other about messages that wait in the database.

Blocks put messages there, and one thread sends them. Both need the other's news at once: that something waits, that the mode
has changed, and that the sender is about to lock the mode. The database alone decides what the mode is and what waits. What
stands here is known, not decided: it wakes, shows, and spares a wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Final

from dualwrite import waiting
from dualwrite.clock import now_s
from dualwrite.interfaces import NO_OBSERVER, Observer, OutboxNews
from dualwrite.protocol.outbox import OutboxState

logger = logging.getLogger(__name__)

_GATE_S: Final = 0.5
"""No block waits longer for the sender to lock the mode: from then on both wait in the database, as strangers do."""


class Outbox:
    """The news of one writer's outbox, as its process knows it. Used by many threads and tasks at once."""

    def __init__(self, writer: str, observer: Observer = NO_OBSERVER) -> None:
        self._writer = writer
        self._observer = observer
        self._wanted = threading.Event()
        self._gate = waiting.Condition()
        self._closed_until: float | None = None
        self._state = OutboxState()
        self._later_since: float | None = None

    # For blocks

    def wake(self) -> None:
        """Tell the sender that something waits. Call it after the COMMIT of a block whose messages wait; it never blocks."""
        if not self._wanted.is_set():  # many blocks wake it while it is at work on what they have put there
            self._wanted.set()

    def note_later(self, why: str) -> None:
        """Note that a block has turned the mode to *later*, after its COMMIT. ``why`` is for people."""
        self._observer.outbox(self._writer, OutboxNews.FELL_BACK, 1)
        self._change(later=True, why=why)
        self.wake()

    def pass_gate(self) -> None:
        """Wait until the sender has locked the mode and done with it. Call it before a block takes a share of that lock.

        Without it the shares of a busy writer's blocks would overlap for ever, and the last send would never get its lock: a
        database grants a share beside others although somebody waits to have the row alone.
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
        """Wait until a block has told something, or the time is over; returns whether one has. For one thread."""
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
        """Note the mode as the sender has read it, or made it."""
        self._change(later=later, why=why)

    def note_stopped(self, why: str | None) -> None:
        """Note that the sender stands at a message that Kafka refuses, and why; None if it goes on."""
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
        """What is known of it. Returns at once."""
        return self._state
