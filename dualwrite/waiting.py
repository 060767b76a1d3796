"""How a caller waits: its thread blocks, or, in a greenlet of an event loop, its task awaits.

Whatever waits between a block and the servers waits through this module, so the same code serves threads and tasks. Never wait
while you hold a ``threading.Lock``: another task of the same thread would wait for it forever.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol, TypeVar

T = TypeVar("T")

_LONGEST_WAIT_S: Final = 3600.0


class Event:
    """Something that happens once. Any thread may set it, even a finalizer that interrupts another line of code.

    :meth:`set` calls ``wake``, for the form of waiting that does not block.
    """

    def __init__(self) -> None:
        self.is_set = False
        self.wake: Callable[[], object] | None = None
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()  # a finalizer may put, unlike with threading.Event

    def set(self) -> None:
        """Note that it has happened. May be called more than once."""
        self.is_set = True
        self._woken.put(None)
        if (wake := self.wake) is not None:
            wake()

    def wait(self, seconds: float) -> bool:
        """Wait until it has happened, by one caller at a time. Returns whether it has."""
        if not self.is_set:
            here().wait_for(self, seconds)
        return self.is_set

    def block(self, seconds: float) -> None:
        """Block the thread until it has happened or the time is over."""
        try:
            self._woken.get(timeout=seconds)
        except queue.Empty:
            return


class Condition:
    """As :class:`threading.Condition`, for threads and tasks at once: a task that waits does not block its thread.

    Hold it only while you look or change something. Wait in a loop, as a wait may end early.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Event] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, seconds: float | None = None) -> None:
        """Release it, wait until notified or until the time is over, and hold it again. May be interrupted meanwhile."""
        event = Event()
        self._waiting.append(event)
        self._lock.release()
        try:
            with interruptible():
                event.wait(_LONGEST_WAIT_S if seconds is None else min(seconds, _LONGEST_WAIT_S))
        finally:
            self._lock.acquire()
            self._waiting.remove(event)

    def notify_all(self) -> None:
        """Wake those that wait. Called while it is held."""
        for event in self._waiting:
            event.set()


class Waiting(Protocol):
    """One form of waiting."""

    cancelled: tuple[type[BaseException], ...]
    """The interruptions that only a wait can raise: code that does not wait is never interrupted."""

    def caller(self) -> object:
        """The thread or task that waits: compare it with others by equality."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for that many seconds."""
        ...

    def wait_for(self, event: Event, seconds: float) -> None:
        """Wait until the event has happened or the time is over."""
        ...

    def poll(self, poll: Callable[[float], None], fileno: Callable[[], int] | None, seconds: float) -> None:
        """Call ``poll`` once, and wait before it or in it until there is something to do or the time is over.

        ``poll`` does what can be done, and waits up to that many seconds for something to do. ``fileno`` returns a descriptor
        that is readable when there is something to do; None if there is none.
        """
        ...

    def elsewhere(self, work: Callable[[], T]) -> T:
        """Do work that may block its thread. It is never interrupted; an interruption comes after it."""
        ...

    def interruptible(self, allowed: bool) -> AbstractContextManager[object]:  # noqa: FBT001 - its only argument
        """Whether waits in the block may raise an interruption; if not, it is raised after the block, or after an outer one.

        Only interruptions of tasks can be deferred: ``KeyboardInterrupt`` comes between any two lines.
        """
        ...


_NO_CONTEXT: Final = nullcontext()


class _Blocking:
    cancelled: tuple[type[BaseException], ...] = ()
    caller = staticmethod(threading.get_ident)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(self, event: Event, seconds: float) -> None:
        event.block(seconds)

    def poll(self, poll: Callable[[float], None], fileno: Callable[[], int] | None, seconds: float) -> None:
        del fileno
        poll(seconds)

    def elsewhere(self, work: Callable[[], T]) -> T:
        return work()

    def interruptible(self, allowed: bool) -> AbstractContextManager[object]:  # noqa: FBT001 - as the protocol
        del allowed
        return _NO_CONTEXT


BLOCKING: Final = _Blocking()
"""The form of waiting of threads."""
_forms: list[Callable[[], Waiting | None]] = []


def install(form: Callable[[], Waiting | None]) -> None:
    """Add a form of waiting. ``form`` is called for every wait; it returns None if this code does not run under it."""
    _forms.append(form)


def here() -> Waiting:
    """The form of waiting of the code that calls this."""
    for form in _forms:
        if (found := form()) is not None:
            return found
    return BLOCKING


def blocks_a_loop() -> bool:
    """Whether the code that calls this would block an event loop if it waited."""
    return here() is BLOCKING and runs_in_a_loop()


def runs_in_a_loop() -> bool:
    """Whether an event loop runs in this thread. Whether it is blocked by a wait depends on the form of waiting."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_cancellation(error: BaseException) -> bool:
    """Whether the error is the cancellation of a task of an event loop."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and isinstance(error, asyncio.CancelledError)


def in_own_thread() -> bool:
    """Whether the code that calls this has its thread to itself: no event loop runs there."""
    return here() is BLOCKING and not blocks_a_loop()


def interruptible() -> AbstractContextManager[object]:
    """See :meth:`Waiting.interruptible`."""
    return here().interruptible(True)


def uninterrupted() -> AbstractContextManager[object]:
    """See :meth:`Waiting.interruptible`."""
    return here().interruptible(False)


def elsewhere(work: Callable[[], T]) -> T:
    """See :meth:`Waiting.elsewhere`."""
    return here().elsewhere(work)
