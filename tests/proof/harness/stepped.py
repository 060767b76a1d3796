"""Tasks whose order and time come from a seed: an event loop without a thread, and SQLite and Kafka that let tasks wait in it.

SQLAlchemy, aiosqlite's and the standard library's driver, and the file are real. What they and the library would do in threads is done
by tasks: whatever a task waits for takes a random time, by the loop's own clock. When nothing is left to wait for, the loop
raises `Stuck`, instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import selectors
import sqlite3
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from random import Random
from typing import Any, Final, TypeVar

import aiosqlite
from simulator.requests import Request, Response
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from typing_extensions import Self

from dualwrite import waiting
from dualwrite.asyncio import transaction
from dualwrite.clock import now_s, running_on
from harness.served import ServedKafka

T = TypeVar("T")

_WAITS_S: Final = (0.0, 0.0, 0.001, 0.003, 0.02)
_LOCK_S: Final = 5.0
"""How long a statement waits for SQLite's write lock, as the driver's ``timeout`` says by default."""
_LOOK_S: Final = 0.03
"""How often it looks."""


class Stuck(Exception):
    """Tasks wait for something that nobody will ever do."""


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, which jumps to what is due next. A clock of the library, too.

    Attributes:
        random: Draws how long everything takes.
        busiest: The largest number of threads that were needed at once.
    """

    def __init__(self) -> None:
        self.random = Random(0)
        self.busiest = 0
        self._seconds = 0.0
        self._work: set[asyncio.Task[Any]] = set()
        super().__init__(_Jumping(self._jump))

    def begin(self, seed: int) -> None:
        """Begin at zero, when nothing runs."""
        self.random = Random(seed)
        self._seconds = 0.0

    def time(self) -> float:
        return self._seconds

    monotonic = time

    def sleep(self, seconds: float, /) -> None:
        """See :class:`dualwrite.clock.Clock`."""
        waiting.here().sleep(seconds)

    def on_its_clock(self) -> AbstractContextManager[None]:
        """Let the library use this clock while the block runs."""
        return running_on(self)

    def some_time_s(self) -> float:
        """How long something takes."""
        return self.random.choice(_WAITS_S)

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise Stuck("tasks wait, and nothing is left to happen")
        self._seconds += seconds

    def run_in_executor(  # type: ignore[override] # the loop's own is no coroutine function either
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run it in a task instead of a thread: where it waits, others go on."""
        del executor
        future: asyncio.Future[T] = self.create_future()

        async def work() -> T:
            await asyncio.sleep(self.some_time_s())
            return await transaction.run(None, lambda: func(*args), interruptible=False)  # type: ignore[arg-type] # it comes back here

        def ended(task: asyncio.Task[T]) -> None:
            self._work.discard(task)
            if future.cancelled():
                return
            if (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        task = self.create_task(work())
        self._work.add(task)
        self.busiest = max(self.busiest, len(self._work))
        task.add_done_callback(ended)
        return future


class _Jumping(selectors.DefaultSelector):
    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> Any:
        if timeout != 0:  # no thread and no socket has anything to tell
            self._jump(timeout)
        return []


class SteppedKafka(ServedKafka):
    """Each request and each answer takes some time, and other tasks go on meanwhile. The broker's clock is the loop's."""

    def __init__(self, loop: SteppedLoop) -> None:
        super().__init__()
        self._loop = loop

    def ask(self, request: Request) -> Response:
        pass_time(self._loop)
        self.now_s = 1000.0 + self._loop.time()
        answer = self._handle(request)
        pass_time(self._loop)
        return answer


def pass_time(loop: SteppedLoop) -> None:
    """Let other tasks go on, if that takes any time. A cancellation comes later, as from work that a thread does."""
    if (form := waiting.here()).cancelled and (seconds := loop.some_time_s()):
        with form.interruptible(False):
            form.sleep(seconds)


def async_engine(file: str, loop: SteppedLoop) -> AsyncEngine:
    """An engine of aiosqlite, whose connections have no threads."""

    async def connect() -> aiosqlite.Connection:
        return await _Stepped(lambda: sqlite3.connect(file, timeout=0, check_same_thread=False), loop)

    return create_async_engine(f"sqlite+aiosqlite:///{file}", async_creator=connect, pool_size=50)


def engine(file: str, loop: SteppedLoop) -> Engine:
    """An engine of the standard library's driver, whose connections wait for locks as tasks do."""

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(file, timeout=0, check_same_thread=False, factory=_Waiting)
        connection.loop = loop
        return connection

    return create_engine(f"sqlite:///{file}", creator=connect, pool_size=50)


class _Stepped(aiosqlite.Connection):
    def __init__(self, connect: Callable[[], sqlite3.Connection], loop: SteppedLoop) -> None:
        super().__init__(connect, 64)
        self._thread = _NoThread()  # type: ignore[assignment] # its steps run in the loop
        self._tx = _Steps(loop)  # type: ignore[assignment] # as above


class _NoThread:
    def start(self) -> None:
        pass


class _Steps:
    """The functions that a connection's thread would call, one after the other. Implements its queue."""

    def __init__(self, loop: SteppedLoop) -> None:
        self._loop = loop
        self._left: deque[tuple[asyncio.Future[Any] | None, Callable[[], Any]]] = deque()
        self._until_s: float | None = None

    def put_nowait(self, step: tuple[asyncio.Future[Any] | None, Callable[[], Any]]) -> None:
        if self._loop.is_closed():
            step[1]()
            return
        self._left.append(step)
        if len(self._left) == 1:
            self._later()

    def _later(self) -> None:
        if seconds := self._loop.some_time_s():
            self._loop.call_later(seconds, self._next)
        else:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        future, function = self._left[0]
        if self._until_s is None:
            self._until_s = self._loop.time() + _LOCK_S
        tell: Callable[[], None] = lambda: None  # noqa: E731 - the function is done, nobody asked for more
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - the awaiting task gets every error
            if _is_locked(error) and self._loop.time() < self._until_s:
                self._loop.call_later(_LOOK_S, self._next)
                return
            told = error
            if future is not None:
                tell = lambda: None if future.done() else future.set_exception(told)  # noqa: E731
        else:
            if future is not None:
                tell = lambda: None if future.done() else future.set_result(result)  # noqa: E731
        self._until_s = None
        self._left.popleft()
        self._loop.call_soon(tell)
        if self._left:
            self._later()


class _Waiting(sqlite3.Connection):
    loop: SteppedLoop

    def cursor(self, factory: Any = None) -> Any:
        del factory
        return super().cursor(_WaitingCursor)

    def commit(self) -> None:
        _patiently(self.loop, super().commit)


class _WaitingCursor(sqlite3.Cursor):
    def execute(self, *args: Any) -> Any:
        return _patiently(self.connection.loop, lambda: super(_WaitingCursor, self).execute(*args))  # type: ignore[attr-defined]


def _patiently(loop: SteppedLoop, do: Callable[[], T]) -> T:
    form = waiting.here()
    if not form.cancelled:  # outside of the loop
        return do()
    pass_time(loop)
    until = now_s() + _LOCK_S
    while True:
        try:
            return do()
        except sqlite3.OperationalError as error:
            if not _is_locked(error) or now_s() >= until:
                raise
        with form.interruptible(False):
            form.sleep(_LOOK_S)


def _is_locked(error: BaseException) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


class Inline:
    """In place of a pool of threads: calls at once."""

    def __init__(self, _: int) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, function: Callable[..., T], *args: Any) -> Any:
        future: Any = asyncio.Future()
        try:
            future.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001 - raised by result()
            future.set_exception(error)
        return future
