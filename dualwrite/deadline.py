"""A point in time that bounds a call, shared by everything the call does."""

from __future__ import annotations

import time


class Deadline:
    """A moment on the monotonic clock. Make one at the outermost call and pass it inwards.

    Args:
        seconds: How far away the moment is, from now.
    """

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment has come."""
        return time.monotonic() >= self._at
