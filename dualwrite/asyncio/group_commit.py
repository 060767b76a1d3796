"""The groups of a writer that serves the tasks of an event loop: the units that wait, and the tasks that run them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from dualwrite.asyncio.greenlets import awaited, run, says_more
from dualwrite.asyncio.transaction import AsyncTransaction
from dualwrite.clock import now_s
from dualwrite.errors import IllegalStateError
from dualwrite.protocol.grouping import Unit, Units
from dualwrite.protocol.values import WriterLimits
from dualwrite.writing import transaction as entered
from dualwrite.writing.group_commit import full_error, run_group
from dualwrite.writing.retry import pause_after_s
from dualwrite.writing.units_of_work import (
    Answer,
    Expiry,
    GroupRun,
    RowUnit,
    check_within,
    closed_error,
    fail_left,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from dualwrite.clock import Deadline
    from dualwrite.writing.transaction import Transaction

logger = logging.getLogger(__name__)


class _Task:
    """The work of a unit, as a task runs it. Implements :class:`dualwrite.writing.units_of_work.Task`."""

    def __init__(
        self, name: str, work: Callable[[AsyncTransaction], Awaitable[Any]] | RowUnit, within_s: float | None
    ) -> None:
        self.work = work
        self.rows = work if isinstance(work, RowUnit) else None
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.context = contextvars.copy_context()
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expiry = Expiry(name, within_s)
        self._name = name
        self._runs = self._gone = False

    @property
    def until(self) -> Deadline | None:
        """When no run may begin any more; None if there is no limit."""
        return self._expiry.until

    def begin(self) -> bool:
        self._expire()
        self._runs = not self.future.done()
        return self._runs

    def rest(self, error: BaseException | None) -> None:
        self._runs = False
        self._expiry.note(error)
        if self._gone:
            self.future.cancel()
        self._expire()

    def _expire(self) -> None:
        """Tell the caller that its time is over, unless the work runs: with the error of its last run, if it has one."""
        if self._expiry.is_over and not self._runs and not self.future.done():
            self.fail(self._expiry.error())

    def succeed(self, result: object) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self._gone and says_more(error):
            logger.error("%s: a unit whose caller has stopped to wait has ended: %s", self._name, error)
        if not self.future.done():
            self.future.set_exception(error)
            if self._gone:
                self.future.exception()  # nobody else asks for it

    def answer(self) -> None:
        """If the caller stands in line, let it see whether there is a place for it."""
        if not self.answered.done():
            self.answered.set_result(None)

    async def outcome(self, cancelled: asyncio.CancelledError | None) -> Any:
        """Wait for the result. A caller that is cancelled, or whose coroutine is closed, stops waiting.

        Its work then does not run if it has not begun, or if its group was aborted. Work that is running ends with its group.
        ``cancelled`` is a cancellation that came before this call.
        """
        try:
            if cancelled is not None:
                raise cancelled
            while not self.future.done():
                left_s = None if self.until is None or self._expiry.is_over else self.until.remaining_s()
                await asyncio.wait([self.future], timeout=left_s)
                self._expire()
        except BaseException:  # a cancellation, or GeneratorExit
            self._gone = True
            if not self._runs:
                self.future.cancel()
            error = self.future.exception() if self.future.done() and not self.future.cancelled() else None
            if error is not None and says_more(error):
                raise error from None
            raise
        return self.future.result()


class AsyncGroups:
    """Runs the units of a writer in groups, of which ``runners`` may exist at a time. Used in one event loop.

    ``block`` returns the block of a new dual write, which a greenlet enters. ``grouped`` is called with the number of units of
    each group that has ended. ``pool`` returns the threads for work that can only block.
    """

    def __init__(
        self,
        name: str,
        block: Callable[[], AbstractContextManager[Transaction]],
        limits: WriterLimits,
        *,
        runners: int,
        grouped: Callable[[int], None],
        engine: AsyncEngine,
        pool: Callable[[], ThreadPoolExecutor],
    ) -> None:
        self._name = name
        self._block = block
        self._limits = limits
        self._runners = runners
        self._grouped = grouped
        self._engine = engine
        self._pool = pool
        self._units: Units[_Task] = Units(limits.waiting_units)
        self._running: object | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._rests: set[asyncio.Task[None]] = set()
        self._closed = False

    async def submit(
        self,
        work: Callable[[AsyncTransaction], Awaitable[Any]] | RowUnit,
        key: Hashable | None,
        within_s: float | None = None,
    ) -> Any:
        check_within(within_s)
        if self._closed:
            raise closed_error(self._name)
        task = _Task(self._name, work, within_s)
        unit = Unit(task, ("task", asyncio.current_task()) if key is None else ("key", key))
        cancelled = None if self._units.offer(unit) else await self._stand_in_line(unit)
        self._start()
        return await task.outcome(cancelled)

    async def _stand_in_line(self, unit: Unit[_Task]) -> asyncio.CancelledError | None:
        """Wait until the unit was added. Returns a cancellation that came after that."""
        cancelled: asyncio.CancelledError | None = None
        until = unit.work.until
        within_s = (
            self._limits.lane_timeout_s if until is None else min(until.remaining_s(), self._limits.lane_timeout_s)
        )
        try:
            await asyncio.wait([unit.work.answered], timeout=within_s)
        except asyncio.CancelledError as error:
            cancelled = error
        if self._units.withdraw(unit):
            raise cancelled or (
                closed_error(self._name) if self._closed else full_error(self._name, self._limits, waited=True)
            )
        return cancelled

    async def close(self, within_s: float) -> None:
        """Finish the waiting units, and refuse new ones. Units that have not begun in time fail."""
        self._closed = True
        for unit in self._units.in_line:
            unit.work.answer()
        until = now_s() + within_s
        while (under_way := self._tasks | self._rests) and now_s() < until:
            await asyncio.wait(under_way, timeout=until - now_s(), return_when=asyncio.FIRST_COMPLETED)
        fail_left(self._units.drain(), self._name)

    def _start(self) -> None:
        """Start the next group, if it may run. Its task takes all units that wait when it begins."""
        if self._units.ready and self._running is None and len(self._tasks) < self._runners:
            self._running = token = object()
            # Its own context: the units have theirs.
            task = contextvars.Context().run(asyncio.get_running_loop().create_task, self._serve(token))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, token))

    def _ended(self, token: object, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._let_next_run(token)  # the task may have been cancelled before its first step
        self._start()

    def _let_next_run(self, token: object) -> None:
        if self._running is token:
            self._running = None
            self._start()

    def _let_run_again(self, rested: Sequence[Unit[_Task]], rest: asyncio.Task[None]) -> None:
        """Called when they have rested; or the event loop ends, and has cancelled that."""
        self._rests.discard(rest)
        self._units.rested(rested)
        self._start()

    async def _serve(self, token: object) -> None:
        """Run one group. An event loop that ends cancels this task, too, at any await: the units still get their answers."""
        group = GroupRun(self._name, self._units.take(self._limits.group_units))
        for unit in self._units.admit():
            unit.work.answer()
        try:
            if group.taken:
                answers = await self._run(group, token)
                self._grouped(group.begun)
                for tell in answers:
                    tell()
        finally:
            if pause_s := pause_after_s(group.failures):
                rest = asyncio.get_running_loop().create_task(asyncio.sleep(pause_s))
                self._rests.add(rest)
                rest.add_done_callback(partial(self._let_run_again, group.resting))
            self._units.end(group.taken, group.again, rest=group.resting if pause_s else ())
            self._let_next_run(token)

    async def _run(self, group: GroupRun, token: object) -> Sequence[Answer]:
        try:
            pool = self._pool()
        except IllegalStateError as closed:  # while the units waited to run again
            return group.failed(closed)
        answers: list[Sequence[Answer]] = []
        with suppress(asyncio.CancelledError):  # it comes after the group, whose units have their answers
            await run(
                pool,
                lambda: answers.append(
                    run_group(group, self._block, self._limits, self._call, lambda: self._let_next_run(token))
                ),
            )
        return answers[0] if answers else group.failed(asyncio.CancelledError())

    def _call(self, task: _Task, transaction: Transaction) -> object:
        work = task.work
        if isinstance(work, RowUnit):
            return task.context.copy().run(work.produce, transaction)
        given = AsyncTransaction(transaction, self._engine, self._pool())
        return awaited(self._in_task(work, task.context, given, entered.entered_here()))

    @staticmethod
    async def _in_task(
        work: Callable[[AsyncTransaction], Awaitable[Any]],
        context: contextvars.Context,
        transaction: AsyncTransaction,
        blocks: entered.Blocks,
    ) -> object:
        async def call() -> object:
            entered.continue_inside(blocks, asyncio.current_task())
            return await work(transaction)

        return await context.copy().run(asyncio.get_running_loop().create_task, call())
