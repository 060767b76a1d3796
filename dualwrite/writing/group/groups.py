"""The groups of a writer that serves threads: the units that wait, and the threads that run them."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dualwrite.protocol.grouping import GroupLimits, Unit, Units
from dualwrite.runtime.deadline import Deadline, pause
from dualwrite.writing import entered
from dualwrite.writing.group.results import GroupRun, closed_error, fail_left
from dualwrite.writing.group.running import run_group
from dualwrite.writing.redo import pause_after_s, refuse_not_run

if TYPE_CHECKING:
    from dualwrite.ports.database import Traits
    from dualwrite.writing.transaction import Transaction

Result = TypeVar("Result")
RUNNERS: Final = 2
"""While one group commits, the next one runs."""


def runners_for(traits: Traits, max_lanes: int) -> int:
    """How many groups a writer may have at a time: on SQLite one, because there is one write lock."""
    return min(RUNNERS, max_lanes, traits.blocks or RUNNERS)


def limits_for(traits: Traits, limits: GroupLimits) -> GroupLimits:
    """The limits of a group: without savepoints, no unit of it could be rolled back alone."""
    return limits if traits.savepoints else replace(limits, units=1)


@dataclass(frozen=True)
class Task:
    """The work of a unit, as a thread runs it.

    Attributes:
        work: Called with the transaction of the unit.
        future: What its caller waits for.
        context: The context variables of its caller.
    """

    work: Callable[[Transaction], Any]
    future: Future[Any]
    context: contextvars.Context

    def begin(self) -> bool:
        """See :class:`dualwrite.writing.group.results.Task`."""
        return self.future.set_running_or_notify_cancel() if not self.future.running() else True

    def succeed(self, result: object) -> None:
        """See :class:`dualwrite.writing.group.results.Task`."""
        self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """See :class:`dualwrite.writing.group.results.Task`."""
        self.future.set_exception(error)


class Groups:
    """Runs the units of a writer in groups. Its threads start with the first unit.

    Args:
        name: The writer's transactional id.
        block: The block of a new dual write.
        limits: When a group takes no more units.
        runners: How many groups there may be at a time, one of them running its units.
        grouped: Called with the number of units of each group that is about to end.
    """

    def __init__(
        self,
        name: str,
        block: Callable[[], AbstractContextManager[Transaction]],
        limits: GroupLimits,
        *,
        runners: int = RUNNERS,
        grouped: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._block = block
        self._limits = limits
        self._runners = runners
        self._grouped = grouped
        self._units: Units[Task] = Units()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._running: GroupRun | None = None
        self._closed = False

    def submit(self, work: Callable[[Transaction], Result], key: Hashable | None) -> Future[Result]:
        """See :meth:`dualwrite.writing.group.submitting.Submitting.submit`."""
        future: Future[Result] = Future()
        unit = Unit(
            Task(work, future, contextvars.copy_context()),
            ("thread", threading.get_ident()) if key is None else ("key", key),
        )
        with self._changed:
            if self._closed:
                raise closed_error(self._name)
            self._units.add(unit)
            if self._idle:
                self._changed.notify()
            elif self._threads < self._runners:
                self._threads += 1
                threading.Thread(target=self._serve, name=f"dualwrite group {self._name}", daemon=True).start()
        return future

    def close(self, within_s: float) -> None:
        """Finish the units that wait, and refuse others. Those that have not begun by then fail. May be called again.

        Args:
            within_s: How long to wait, in seconds.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            deadline = Deadline(within_s)
            self._changed.wait_for(lambda: self._units.empty, deadline.remaining_s())
            left = self._units.drain()
            self._changed.notify_all()
        fail_left(left, self._name)

    def _serve(self) -> None:
        while (group := self._next()) is not None:
            self._run(group)

    def _next(self) -> GroupRun | None:
        """Wait until a group may run, and take its units. None are left once the writer is closed."""
        with self._changed:
            self._idle += 1
            try:
                self._changed.wait_for(lambda: (self._units.ready and self._running is None) or self._done)
            finally:
                self._idle -= 1
            if not self._units.ready:
                self._threads -= 1
                return None
            self._running = GroupRun(self._name, self._units.take(self._limits.units))
            return self._running

    @property
    def _done(self) -> bool:
        return self._closed and self._units.empty

    def _let_next_run(self, group: GroupRun) -> None:
        with self._changed:
            if self._running is group:
                self._running = None
                self._changed.notify()

    def _run(self, group: GroupRun) -> None:
        told = run_group(group, self._block, self._limits, self._call, lambda: self._let_next_run(group))
        self._let_next_run(group)
        if group.begun:
            self._grouped(group.begun)
        for tell in told:
            tell()
        pause(pause_after_s(group.failures))
        with self._changed:
            self._units.end(group.taken, group.again)
            self._changed.notify_all()

    def _call(self, task: Task, transaction: Transaction) -> object:
        blocks = entered.entered_here()

        def call() -> object:
            entered.go_on_inside(blocks)
            result = task.work(transaction)
            refuse_not_run(result, self._name)
            return result

        return task.context.copy().run(call)
