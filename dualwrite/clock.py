"""The clock, and deadlines: the end of a call's time, shared by everything that the call does.

Recipes measure and wait by this clock alone, so that a simulator can run them in simulated time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Final, Protocol

from dualwrite import waiting


class Clock(Protocol):
    """A clock that recipes can run on."""

    def monotonic(self) -> float:
        """Seconds since some moment, including those while the machine was suspended; never goes back."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Return after that many seconds."""
        ...


def _system_clock() -> partial[float]:
    """Reads the system clock that keeps running while the machine is suspended, as the brokers' clocks do.

    On Linux ``time.monotonic`` stops meanwhile: after a laptop or a virtual machine wakes up, a transaction that the broker
    has already aborted would seem young. On macOS CLOCK_MONOTONIC keeps running, but ``time.monotonic`` reads another clock; on
    Windows ``time.monotonic`` keeps running.
    """
    number = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC if sys.platform == "darwin" else None)
    return partial(time.monotonic) if number is None else partial(time.clock_gettime, number)


def _system_sleep(seconds: float) -> None:
    waiting.here().sleep(seconds)


now_s: Final = _system_clock()
"""Seconds on a clock that never goes back and counts the time while the machine is suspended.

A dual write reads it about twenty times, so it is C's: no frame of Python's. Modules import it by name, so another clock is
set in this object, not in its place.
"""
_sleep: Callable[[float], None] = _system_sleep


def pause(seconds: float) -> None:
    """Wait for that many seconds."""
    _sleep(seconds)


@contextmanager
def running_on(clock: Clock) -> Generator[None, None, None]:
    """Replace the clock of the whole process while the block runs. For simulators: no real server may be in use."""
    global _sleep  # noqa: PLW0603 - the process has one clock
    former, former_sleep = partial(now_s.func, *now_s.args), _sleep
    _set_clock(partial(clock.monotonic))
    _sleep = clock.sleep
    try:
        yield
    finally:
        _set_clock(former)
        _sleep = former_sleep


def _set_clock(read: partial[float]) -> None:
    now_s.__setstate__((read.func, read.args, {}, None))  # type: ignore[attr-defined] # what copies of a partial use


class Deadline:
    """A moment so many seconds from now, on the clock of :func:`now_s`. Make one at the outermost call and pass it inwards."""

    __slots__ = ("_at",)

    def __init__(self, seconds: float) -> None:
        self._at = now_s() + seconds

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        left_s = self._at - now_s()
        return left_s if left_s > 0 else 0.0

    @property
    def expired(self) -> bool:
        """Whether the moment has come."""
        return now_s() >= self._at


class Patience(Deadline):
    """A deadline that comes early, once it is known that waiting is in vain: whoever waits asks at each look."""

    __slots__ = ("_in_vain",)

    def __init__(self, seconds: float, in_vain: Callable[[], bool]) -> None:
        super().__init__(seconds)
        self._in_vain = in_vain

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return 0.0 if self._in_vain() else super().remaining_s()

    @property
    def expired(self) -> bool:
        """Whether the moment has come, or waiting is in vain."""
        return self._in_vain() or super().expired


FIRST_PAUSE_S: Final = 0.002
LONGEST_PAUSE_S: Final = 0.2
"""The first and the longest pause between polls of a broker: many answers come within milliseconds, and a long wait must not
load it."""


class GrowingPause:
    """Waits between polls of something that may take a moment or a long while: each is twice as long as the one before."""

    def __init__(self, first_s: float = FIRST_PAUSE_S, longest_s: float = LONGEST_PAUSE_S) -> None:
        self._next_s = first_s
        self._longest_s = longest_s

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait, but no longer than until the deadline."""
        pause(self._next_s if deadline is None else min(self._next_s, deadline.remaining_s()))
        self._next_s = min(2 * self._next_s, self._longest_s)
