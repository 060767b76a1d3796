"""Asks the servers from a background thread, now and then: a caller gets the last answer and never waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from dualwrite.clock import now_s

EVERY_S: Final = 30.0
_FORGOTTEN_AFTER_S: Final = 180.0


class Probe:
    """Asks in a thread of its own: one question at a time, at most one every ``every_s`` seconds. Thread-safe.

    Args:
        name: The thread's name.
        ask: The question. It handles its errors.
        every_s: The time between two questions, in seconds.
    """

    def __init__(self, name: str, ask: Callable[[], None], *, every_s: float) -> None:
        self._name = name
        self._ask = ask
        self._every_s = every_s
        self._lock = threading.Lock()
        self._next_at = 0.0

    def start(self) -> None:
        """Ask, unless it is too soon. Returns at once."""
        with self._lock:
            if now_s() < self._next_at:
                return
            self._next_at = float("inf")  # one at a time
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._ask()
        finally:
            self._next_at = now_s() + self._every_s


class SeldomAsked:
    """A number that a server reports, as of the last time it was asked. Reading it starts another request once that is due.

    Args:
        name: The thread's name.
        ask: Asks the server.
        on_error: Called with what the question raises.
    """

    def __init__(self, name: str, ask: Callable[[], float], on_error: Callable[[Exception], None]) -> None:
        self._question = ask
        self._on_error = on_error
        self._probe = Probe(name, self._ask, every_s=EVERY_S)
        self._answer: tuple[float, float] | None = None

    def __call__(self) -> float | None:
        """The last answer. None before the first one, and three minutes after the last."""
        answer = self._answer
        self._probe.start()
        return None if answer is None or now_s() - answer[1] > _FORGOTTEN_AFTER_S else answer[0]

    def _ask(self) -> None:
        try:
            self._answer = self._question(), now_s()
        except Exception as error:  # noqa: BLE001 - the next question may be answered
            self._on_error(error)
