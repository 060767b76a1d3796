"""The groups of a writer that serves threads: the units that wait, and the threads that run them."""

from __future__ import annotations

import contextvars
import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from dualwrite import waiting
from dualwrite.clock import Deadline, now_s
from dualwrite.protocol.grouping import Unit, Units
from dualwrite.protocol.values__protocol_allowed import WriterLimits
from dualwrite.writing import transaction__writing_entered
from dualwrite.writing.group_commit__writing_group_alone import UnitFuture
from dualwrite.writing.group_commit__writing_group_places import full_error, may_wait, note_running
from dualwrite.writing.group_commit__writing_group_running import run_group
from dualwrite.writing.retry import pause_after_s, refuse_not_run
from dualwrite.writing.units_of_work import (
    GroupRun,
    check_within,
    closed_error,
    copied,
    fail_left,
    late_error,
    tell_all,
)
from dualwrite.writing.units_of_work__writing_group_row_unit import RowUnit

if TYPE_CHECKING:
    from dualwrite.interfaces__ports_database import Traits
    from dualwrite.writing.transaction import Transaction

logger = logging.getLogger(__name__)

_FEW: Final = 1000
RUNNERS: Final = 2
"""While one group commits, the next one runs."""


def runners_for(traits: Traits, max_lanes: int) -> int:
    """How many groups a writer may have at a time: on SQLite one, because there is one write lock."""
    return min(RUNNERS, max_lanes, traits.blocks or RUNNERS)


def limits_for(traits: Traits, limits: WriterLimits) -> WriterLimits:
    """The limits of a group: without savepoints, no unit of it could be rolled back alone."""
    return limits if traits.savepoints else replace(limits, group_units=1)


class Task:
    """The work of a unit, as a thread runs it.

    Args:
        name: The writer's transactional id.
        work: Called with the transaction of the unit; or the unit, if it is one of rows: it then produces its messages.
        future: What its caller waits for.
        within_s: No run begins later than this, in seconds; None sets no limit.

    Attributes:
        work: What is called.
        future: As given.
        context: The context variables of its caller.
        rows: The unit, if it is one of rows.
        answered: Set when a unit that stands in line was given a place, or never will be.
        until: When no run may begin any more; None if there is no limit.
    """

    def __init__(
        self, name: str, work: Callable[[Transaction], Any] | RowUnit, future: Future[Any], within_s: float | None
    ) -> None:
        self.rows = work if isinstance(work, RowUnit) else None
        self.work: Callable[[Transaction], Any] = work.produce if isinstance(work, RowUnit) else work
        self.future = future
        self.context = contextvars.copy_context()
        self.answered = waiting.Event()
        self.until = None if within_s is None else Deadline(within_s)
        self._name, self._within_s = name, within_s or 0.0
        self._changing = threading.Lock()
        self._runs = self._over = False
        self._last: BaseException | None = None

    def begin(self) -> bool:
        """See :class:`dualwrite.writing.units_of_work.Task`."""
        if self.until is not None and self.until.expired:
            self.expire()
        with self._changing:
            self._runs = self._may_run()
            self._over = not self._runs
            return self._runs

    def _may_run(self) -> bool:
        if self._over or (self.future.done() and not self.future.cancelled()):
            return False
        # concurrent.futures.wait() counts a cancelled one from then on.
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def rest(self, error: BaseException | None) -> None:
        """See :class:`dualwrite.writing.units_of_work.Task`."""
        with self._changing:
            self._runs = False
            self._last = error or self._last

    def expire(self) -> None:
        """Tell the caller that its time is over, unless the work runs: with the error of its last run, if it has one."""
        with self._changing:
            if self._runs:
                return
            may_run, self._over = self._may_run(), True
        if may_run:
            self.fail(late_error(self._name, self._within_s) if self._last is None else copied(self._last))

    def succeed(self, result: object) -> None:
        """See :class:`dualwrite.writing.units_of_work.Task`."""
        self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """See :class:`dualwrite.writing.units_of_work.Task`."""
        self.future.set_exception(error)


class _Later:
    """Does things at their time, in a thread that starts with the first of them.

    Args:
        name: The writer's transactional id.
        groups: The groups that wait for these things.
    """

    def __init__(self, name: str, groups: Groups) -> None:
        self._name = name
        self._groups = groups
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], object], Callable[[], bool]]] = []
        self._sweep_at = _FEW
        self._started = self._closed = False

    def after(self, seconds: float, do: Callable[[], object], over: Callable[[], bool] = lambda: False) -> None:
        """Do it later.

        Args:
            seconds: The time from now.
            do: Does it.
            over: Whether it need not be done any more.
        """
        with self._changed:
            if len(self._waiting) > self._sweep_at:  # most units end long before their time is over
                self._waiting = [one for one in self._waiting if not one[3]()]
                heapq.heapify(self._waiting)
                self._sweep_at = _FEW + 2 * len(self._waiting)
            heapq.heappush(self._waiting, (now_s() + seconds, next(self._numbers), do, over))
            if not self._started:
                self._started = True
                threading.Thread(target=self._serve, name=f"dualwrite later {self._name}", daemon=True).start()
            elif self._waiting[0][2] is do:
                self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _serve(self) -> None:
        note_running(self._groups)  # callbacks of futures run here: if one waited for a place, no unit would be woken
        while (do := self._next()) is not None:
            try:
                do()
            except BaseException:
                logger.critical("%s: a callback of a unit's future has raised", self._name, exc_info=True)

    def _next(self) -> Callable[[], object] | None:
        """Wait for the next thing whose time has come."""
        with self._changed:
            while not self._closed:
                while self._waiting and self._waiting[0][3]():
                    heapq.heappop(self._waiting)
                left_s = self._waiting[0][0] - now_s() if self._waiting else None
                if left_s is not None and left_s <= 0:
                    return heapq.heappop(self._waiting)[2]
                self._changed.wait(left_s)
            return None


class Groups:
    """Runs the units of a writer in groups.

    Its threads start with the first unit. A unit that waits alone is run by the thread that waits for it, if there is one: the
    switches to another thread and back would take longer than all else that a unit costs beside a block.

    Args:
        name: The writer's transactional id.
        block: The block of a new dual write.
        limits: When a group takes no more units; how many may wait, and how long :meth:`submit` waits then.
        runners: How many groups there may be at a time, one of them running its units.
        grouped: Called with the number of units of each group that is about to end.
    """

    def __init__(
        self,
        name: str,
        block: Callable[[], AbstractContextManager[Transaction]],
        limits: WriterLimits,
        *,
        runners: int = RUNNERS,
        grouped: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._block = block
        self._limits = limits
        self._runners = runners
        self._grouped = grouped
        self._units: Units[Task] = Units(limits.waiting_units)
        self._later = _Later(name, self)
        self._lock = threading.RLock()
        self._may_begin = threading.Condition(self._lock)
        self._emptied = threading.Condition(self._lock)
        self._threads = 0
        self._idle = 0
        self._begun: list[GroupRun] = []
        self._running: GroupRun | None = None
        self._closed = self._drained = False

    def submit(
        self,
        work: Callable[[Transaction], Any] | RowUnit,
        key: Hashable | None,
        within_s: float | None = None,
    ) -> Future[Any]:
        """See :meth:`dualwrite.writing.group_commit__writing_group_submitting.Submitting.submit`."""
        check_within(within_s)
        future: UnitFuture[Any] = UnitFuture(self._run_here)
        task = Task(self._name, work, future, within_s)
        unit = Unit(task, ("thread", threading.get_ident()) if key is None else ("key", key))
        with self._lock:
            if self._closed:
                raise closed_error(self._name)
            if added := self._units.offer(unit):
                self._have_served()
        if not added:
            self._stand_in_line(unit)
        if task.until is not None:
            self._later.after(task.until.remaining_s(), task.expire, future.done)
        return future

    def _have_served(self) -> None:
        """Let a thread serve a unit that was added: one that is idle, or a new one."""
        if self._idle:
            self._wake()
        elif self._threads < self._runners:
            self._threads += 1
            threading.Thread(target=self._serve, name=f"dualwrite group {self._name}", daemon=True).start()

    def _stand_in_line(self, unit: Unit[Task]) -> None:
        """Wait until the unit was added; at most a moment where waiting would keep all units from making progress."""
        waits = may_wait(self)
        try:
            if waits:
                until = unit.work.until
                unit.work.answered.wait(
                    self._limits.lane_timeout_s
                    if until is None
                    else min(until.remaining_s(), self._limits.lane_timeout_s)
                )
            with self._lock:
                if self._units.withdraw(unit):
                    raise (
                        closed_error(self._name) if self._closed else full_error(self._name, self._limits, waited=waits)
                    )
                self._have_served()
        except BaseException:
            with self._lock:
                self._units.withdraw(unit)
            unit.work.future.cancel()  # an interrupted caller has no future to wait for
            raise

    def _admit(self) -> None:
        for unit in self._units.admit():
            unit.work.answered.set()

    def close(self, within_s: float) -> None:
        """Finish the waiting units, and refuse new ones. Units that have not begun in time fail. May be called again.

        Args:
            within_s: How long to wait, in seconds.
        """
        with self._lock:
            self._closed = True
            self._may_begin.notify_all()
            for unit in self._units.in_line:
                unit.work.answered.set()
            deadline = Deadline(within_s)
            self._emptied.wait_for(lambda: self._units.empty, deadline.remaining_s())
            left = self._units.drain()
            self._drained = True
            self._go_on()
        self._later.close()
        fail_left(left, self._name)

    @property
    def _group_may_begin(self) -> bool:
        return self._units.ready and self._running is None and len(self._begun) < self._runners

    @property
    def _done(self) -> bool:
        return self._closed and self._units.empty

    def _wake(self) -> None:
        """Wake a thread of this writer if there is something for it to do."""
        if self._group_may_begin:
            self._may_begin.notify()

    def _serve(self) -> None:
        while (group := self._next()) is not None:
            try:
                self._run(group)
            except BaseException:
                # SystemExit, say: it would end this thread without a word, and later units would wait for it.
                logger.critical("%s: a callback of a unit's future has raised", self._name, exc_info=True)
            finally:
                self._end(group)

    def _next(self) -> GroupRun | None:
        """Wait until a group may begin, and take its units. None are left once the writer is closed."""
        with self._lock:
            self._idle += 1
            try:
                self._may_begin.wait_for(lambda: self._group_may_begin or self._done)
            finally:
                self._idle -= 1
            if self._done:
                self._threads -= 1
                return None
            self._running = group = GroupRun(self._name, self._units.take(self._limits.group_units))
            self._begun.append(group)
            self._admit()
            return group

    def _run_here(self, future: Future[Any]) -> None:
        """Run the unit of a future in the thread that waits for it, if nothing else is to run with it or before it.

        An interruption (``KeyboardInterrupt``) may come between any two lines; the group still ends.
        """
        if self._running is not None or not waiting.in_own_thread() or transaction__writing_entered.entered_here():
            return
        mine: list[GroupRun] = []
        try:
            try:
                self._run_alone(future, mine)
            finally:
                self._end_alone(mine)
        finally:
            self._end_alone(mine)

    def _run_alone(self, future: Future[Any], mine: list[GroupRun]) -> None:
        try:
            self._begin_alone(future, mine)
            for group in mine:
                contextvars.Context().run(self._run, group)  # its own context: the unit has that of submit()
        except BaseException as error:
            self._end_alone(mine, error)
            raise

    def _begin_alone(self, future: Future[Any], mine: list[GroupRun]) -> None:
        """Put the group of the future's unit into ``mine``, unless a thread of the writer has taken it meanwhile."""
        with self._lock:
            unit = self._units.lone
            if unit is None or unit.work.future is not future or not self._group_may_begin:
                return
            mine.append(group := GroupRun(self._name, [unit]))  # first: after an interruption it will be ended
            self._begun.append(group)
            self._running = group
            self._units.take_lone()
            self._admit()

    def _end_alone(self, mine: list[GroupRun], error: BaseException | None = None) -> None:
        with self._lock:
            for group in mine:
                future = group.taken[0].work.future
                if error is not None and group in self._begun and not group.again and not future.done():
                    future.set_exception(error)
                self._end(group)
            self._wake()

    def _let_next_run(self, group: GroupRun) -> None:
        with self._lock:
            if self._running is group:
                self._running = None
                self._wake()

    def _run(self, group: GroupRun) -> None:
        note_running(self)
        told = run_group(group, self._block, self._limits, self._call, lambda: self._let_next_run(group))
        self._let_next_run(group)
        if group.begun:
            self._grouped(group.begun)
        tell_all(told)

    def _end(self, group: GroupRun) -> None:
        with self._lock:
            if self._running is group:
                self._running = None
            if group in self._begun:
                # Once close() has waited, nothing wakes units that rest: they run at once, and fail if the writer is closed.
                pause_s = 0.0 if self._drained else pause_after_s(group.failures)
                if pause_s:
                    # First: after an interruption they will run again in any case.
                    self._later.after(pause_s, lambda: self._let_run_again(group.resting))
                self._units.end(group.taken, group.again, rest=group.resting if pause_s else ())
                self._begun.remove(group)
            self._go_on()

    def _let_run_again(self, rested: Sequence[Unit[Task]]) -> None:
        with self._lock:
            self._units.rested(rested)
            self._go_on()

    def _go_on(self) -> None:
        self._wake()
        if self._units.empty:
            self._emptied.notify_all()
            if self._closed:
                self._may_begin.notify_all()

    def _call(self, task: Task, transaction: Transaction) -> object:
        blocks = transaction__writing_entered.entered_here()

        def call() -> object:
            transaction__writing_entered.go_on_inside(blocks)
            result = task.work(transaction)
            refuse_not_run(result, self._name)
            return result

        return task.context.copy().run(call)
