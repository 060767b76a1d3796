"""The clock, and a point in time that bounds a call, shared by everything the call does.

Recipes measure and wait by this clock alone, so that a simulator can run them in a time of its own.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol


class Clock(Protocol):
    """What is needed of a clock; the standard library's module ``time`` is one."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Return after so many seconds."""
        ...


_clock: Clock = time


def now_s() -> float:
    """Seconds on the monotonic clock."""
    return _clock.monotonic()


def pause(seconds: float) -> None:
    """Wait that long."""
    _clock.sleep(seconds)


@contextmanager
def running_on(clock: Clock) -> Generator[None, None, None]:
    """Replace the clock of this whole process while the block runs. For simulators: no real server may be in use."""
    global _clock  # noqa: PLW0603 - the clock belongs to the process, as the system's does
    former, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = former


class Deadline:
    """A moment on the monotonic clock. Make one at the outermost call and pass it inwards.

    Args:
        seconds: How far away the moment is, from now.
    """

    def __init__(self, seconds: float) -> None:
        self._at = now_s() + seconds

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._at - now_s())

    @property
    def expired(self) -> bool:
        """Whether the moment has come."""
        return now_s() >= self._at
