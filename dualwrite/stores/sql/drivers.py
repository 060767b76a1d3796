"""Limits the wait for a database's answer by shutting the connection when the time is up.

libpq waits for an answer as long as the connection lives, and neither keepalives nor ``tcp_user_timeout`` end a
connection to a server or pooler that is alive but does not answer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dualwrite.clock import Deadline


@dataclass(eq=False)
class Watch:
    """One wait.

    Attributes:
        deadline: When to shut the connection.
        connection: A duplicate of its socket: by then the original descriptor may belong to another file.
        expired: Whether the connection was shut. It is unusable then, even if the answer arrived.
    """

    deadline: Deadline
    connection: socket.socket
    expired: bool = False


class Watchdog:
    """Shuts connections whose answers are overdue, on one thread for all of them, started on first use."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start with nothing to watch. A fork inherits no thread, perhaps a held lock, and its parent's connections."""
        self._changed = threading.Condition()
        self._watched: set[Watch] = set()
        self._runs = False
        self._wakes: Deadline | None = None

    @contextmanager
    def watching(self, fileno: int, seconds: float) -> Generator[Watch, None, None]:
        """Shut the connection if the block lasts longer, so that a wait for its answer fails.

        Args:
            fileno: File descriptor of a connected socket of any family.
            seconds: Seconds that the block may last.
        """
        with socket.fromfd(fileno, socket.AF_INET, socket.SOCK_STREAM) as connection:
            watch = Watch(Deadline(seconds), connection)
            with self._changed:
                self._watched.add(watch)
                self._see_to_it_by(watch.deadline)
            try:
                yield watch
            finally:
                with self._changed:
                    self._watched.discard(watch)

    def _see_to_it_by(self, deadline: Deadline) -> None:
        if not self._runs:
            self._runs = True
            threading.Thread(target=self._run, name="dualwrite watchdog", daemon=True).start()
        elif self._wakes is None or self._wakes.remaining_s() > deadline.remaining_s():
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while True:
                for watch in [watch for watch in self._watched if watch.deadline.expired]:
                    self._watched.discard(watch)
                    watch.expired = True
                    with contextlib.suppress(OSError):  # the peer closed it first
                        watch.connection.shutdown(socket.SHUT_RDWR)
                deadlines = [watch.deadline for watch in self._watched]
                self._wakes = min(deadlines, key=Deadline.remaining_s, default=None)
                self._changed.wait(None if self._wakes is None else self._wakes.remaining_s())


WATCHDOG: Final = Watchdog()
os.register_at_fork(after_in_child=WATCHDOG.begin)
