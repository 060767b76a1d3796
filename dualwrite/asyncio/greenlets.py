"""Runs blocking functions in the task that awaits them: each in a greenlet, which hands its waits to the event loop.

So tasks run the same code as threads. SQLAlchemy's asynchronous engines work in the same way, and their connections can await
in these greenlets, too.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, TypeVar, cast

from greenlet import getcurrent, greenlet

from dualwrite import waiting
from dualwrite.errors import DualWriteError
from dualwrite.waiting import Event

T = TypeVar("T")

_PROCESS: Final = os.getpid()
_SAYS_MORE: Final = frozenset({"decided", "lost", "unknown"})


async def run(pool: ThreadPoolExecutor, function: Callable[[], T], *, interruptible: bool = True) -> T:
    """Run a function that waits through :mod:`dualwrite.waiting`, without blocking the event loop.

    ``pool`` does work that can only block. If a cancellation may not interrupt the function, ``CancelledError`` is raised when
    it has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if os.getpid() == _PROCESS:
            raise  # a coroutine that is collected after its loop has ended must not block the thread that collects it
        return function()  # a forked process: no loop runs there, and nothing of its parent's waits there
    worker = _Worker(function, pool, interruptible=interruptible)
    given = worker.switch()
    while not worker.dead:
        try:
            value = await worker.awaited(given)
        except BaseException as error:  # noqa: BLE001 - raised in the greenlet, where it belongs
            given = worker.throw(error)
        else:
            given = worker.switch(value)
    return cast("T", given)


async def enter(pool: ThreadPoolExecutor, block: AbstractContextManager[T]) -> T:
    """Enter a block as :func:`run` does. A cancellation that is raised after it was entered leaves it again."""
    entered: list[T] = []
    try:
        await run(pool, lambda: entered.append(block.__enter__()))
    except BaseException as error:
        if entered:
            await run(pool, partial(block.__exit__, type(error), error, error.__traceback__), interruptible=False)
        raise
    return entered[0]


def awaited(awaitable: Awaitable[T]) -> T:
    """Await in the task whose greenlet calls this. Raises a cancellation where one is allowed; see :func:`run`."""
    worker = getcurrent()
    assert isinstance(worker, _Worker)
    return cast("T", worker.give(awaitable))


def says_more(error: BaseException) -> bool:
    """Whether the caller must see this error even if it was cancelled, because the work must not run again."""
    return isinstance(error, DualWriteError) and error.outcome in _SAYS_MORE


class _Worker(greenlet):  # type: ignore[misc] # it ships no types
    """One run, and how it waits. Implements :class:`dualwrite.waiting.Waiting`."""

    __sqlalchemy_greenlet_provider__ = True  # its connections await here
    cancelled: tuple[type[BaseException], ...] = (asyncio.CancelledError,)

    def __init__(self, function: Callable[[], object], pool: ThreadPoolExecutor, *, interruptible: bool) -> None:
        driver = getcurrent()
        super().__init__(lambda: self._run(function, interruptible), driver)
        self.gr_context = driver.gr_context  # the function sees and sets the task's context variables
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._pool = pool
        self._allowed = True
        self._put_off: asyncio.CancelledError | None = None

    def _run(self, function: Callable[[], object], interruptible: bool) -> object:  # noqa: FBT001 - its own caller's
        with self.interruptible(interruptible):
            return function()

    async def awaited(self, given: Awaitable[T]) -> T:
        """Await on behalf of the greenlet: raise a cancellation at once where allowed, and defer it otherwise."""
        if self._allowed:
            return await given
        future = asyncio.ensure_future(given)
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as cancelled:
                self._put_off = self._put_off or cancelled
        return future.result()

    @property
    def caller(self) -> object:
        return self._task

    @contextmanager
    def interruptible(self, allowed: bool) -> Generator[None, None, None]:  # noqa: FBT001 - as the protocol
        former, self._allowed = self._allowed, allowed
        try:
            if allowed:
                self._interrupt()
            yield
        except BaseException as error:
            self._allowed = former
            if former and not says_more(error):
                self._interrupt()
            raise
        self._allowed = former
        if former:
            self._interrupt()

    def _interrupt(self) -> None:
        cancelled, self._put_off = self._put_off, None
        if cancelled is not None:
            raise cancelled

    def sleep(self, seconds: float) -> None:
        self._wait(self._loop.create_future(), seconds)

    def wait_for(self, event: Event, seconds: float) -> None:
        future = self._loop.create_future()

        def wake() -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_resolve, future)

        event.wake = wake
        try:
            if not event.is_set:  # it may have been set before `wake` stood there
                self._wait(future, seconds)
        finally:
            event.wake = None

    def poll(self, poll: Callable[[float], None], fileno: Callable[[], int] | None, seconds: float) -> None:
        if seconds and fileno is None:
            self.elsewhere(lambda: poll(seconds))
            return
        if seconds and fileno is not None:
            self._until_readable(fileno(), seconds)
        poll(0)

    def _until_readable(self, fileno: int, seconds: float) -> None:
        future = self._loop.create_future()
        self._loop.add_reader(fileno, _resolve, future)
        try:
            self._wait(future, seconds)
        finally:
            self._loop.remove_reader(fileno)

    def elsewhere(self, work: Callable[[], T]) -> T:
        run_there = contextvars.copy_context().run
        with self.interruptible(False):
            return cast("T", self.give(self._loop.run_in_executor(self._pool, run_there, work)))

    def _wait(self, future: asyncio.Future[None], seconds: float) -> None:
        timer = self._loop.call_later(seconds, _resolve, future)
        try:
            self.give(future)
        finally:
            timer.cancel()

    def give(self, awaitable: Awaitable[object]) -> object:
        """Let the task await it. Returns its result, or raises its error."""
        assert self.parent is not None
        return cast("Any", self.parent.switch(awaitable))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _form() -> waiting.Waiting | None:
    current = getcurrent()
    return current if isinstance(current, _Worker) else None


waiting.install(_form)
