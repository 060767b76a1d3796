"""A call that gives up waiting at a deadline even when the called function does not.

librdkafka's ``begin_transaction`` has no timeout and has hung, ``send_offsets_to_transaction`` ignores its own, and
``abort_transaction`` has blocked for minutes. Python cannot interrupt a thread inside them, so these calls run on a
thread that can be abandoned. The hop costs tens of microseconds.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from dualwrite.clock import Deadline
from dualwrite.waiting import Event

T = TypeVar("T")


class NoAnswer(Exception):
    """The deadline passed before the function returned. The function may still be running."""


class BoundedCaller:
    """One daemon thread that runs calls in turn.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True).start()

    def call(self, function: Callable[[], T], deadline: Deadline) -> T:
        """Run the function on the thread and wait for it. Its exceptions are raised here.

        Raises:
            NoAnswer: The deadline passed first. Later calls queue behind the one that hangs.
        """
        call = _Call(function)
        self._calls.put(call.run)
        return call.wait(deadline.remaining_s())

    def finish(self, last: Callable[[], T], wait_s: float) -> T:
        """Run one last function after the calls already queued, then end the thread.

        Raises:
            NoAnswer: It did not finish within ``wait_s``; it continues in the background.
        """
        call = _Call(last)
        self._calls.put(call.run)
        self._calls.put(None)
        return call.wait(wait_s)

    def __del__(self) -> None:
        self._calls.put(None)


class _Call(Generic[T]):
    """One call and its answer."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._returned: list[T] = []
        self._raised: BaseException | None = None
        self._done = Event()

    def run(self) -> None:
        try:
            self._returned.append(self._function())
        except BaseException as error:  # noqa: BLE001 - re-raised in the waiting thread
            self._raised = error
        self._done.set()

    def wait(self, seconds: float) -> T:
        if not self._done.wait(seconds):
            raise NoAnswer
        if self._raised is not None:
            raise self._raised
        return self._returned[0]


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it may hold the last reference to a librdkafka instance
