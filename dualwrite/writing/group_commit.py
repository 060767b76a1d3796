"""Group commit: the units that wait, the threads that run groups, and what a caller gets.

Many callers share one dual write: one Kafka transaction and one COMMIT for all units of a group. A caller that finds nobody
else waiting runs its unit itself, which saves it a switch to another thread.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from dualwrite import failpoints, waiting
from dualwrite.clock import Deadline, now_s
from dualwrite.errors import Unavailable
from dualwrite.interfaces import Traits
from dualwrite.protocol.grouping import Unit, Units, takes_no_more
from dualwrite.protocol.lives import WriteState
from dualwrite.protocol.values import WriterLimits
from dualwrite.writing import transaction
from dualwrite.writing import transaction as entered
from dualwrite.writing.transaction import write_of
from dualwrite.writing.units_of_work import (
    Answer,
    Divided,
    Expiry,
    GroupRun,
    RowUnit,
    answer_all,
    check_within,
    closed_error,
    execute_rows,
    fail_left,
    named,
)
from dualwrite.writing.work import RUNNERS, pause_after_s, refuse_not_run

if TYPE_CHECKING:
    from dualwrite.writing.dual_write import DualWrite
    from dualwrite.writing.transaction import Transaction

logger = logging.getLogger(__name__)

_FEW: Final = 1000


def limits_for(traits: Traits, limits: WriterLimits) -> WriterLimits:
    """The limits of a group. Without savepoints it has one unit, since none could be rolled back alone."""
    return limits if traits.savepoints else replace(limits, group_units=1)


class Task:
    """The work of a unit, as a thread runs it.

    ``work`` is called with the transaction of the unit; for a unit of ``rows`` it produces the messages. No run begins later
    than ``within_s`` seconds from now. ``answered`` is set when a unit in line gets a place, or never will.
    """

    def __init__(
        self, name: str, work: Callable[[Transaction], Any] | RowUnit, future: Future[Any], within_s: float | None
    ) -> None:
        self.rows = work if isinstance(work, RowUnit) else None
        self.work: Callable[[Transaction], Any] = work.produce if isinstance(work, RowUnit) else work
        self.future = future
        self.context = contextvars.copy_context()
        self.answered = waiting.Event()
        self._expiry = Expiry(name, within_s)
        self._changing = threading.Lock()
        self._runs = self._over = False

    @property
    def until(self) -> Deadline | None:
        """When no run may begin any more; None if there is no limit."""
        return self._expiry.until

    def begin(self) -> bool:
        if self._expiry.is_over:
            self.expire()
        with self._changing:
            self._runs = self._may_run()
            self._over = not self._runs
            return self._runs

    def _may_run(self) -> bool:
        if self._over or (self.future.done() and not self.future.cancelled()):
            return False
        # From then on, concurrent.futures.wait() counts the cancelled future.
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def rest(self, error: BaseException | None) -> None:
        with self._changing:
            self._runs = False
            self._expiry.note(error)

    def expire(self) -> None:
        """Tell the caller that its time is over, unless the work is running; with the error of its last run, if any."""
        with self._changing:
            if self._runs:
                return
            may_run, self._over = self._may_run(), True
        if may_run:
            self.fail(self._expiry.error())

    def succeed(self, result: object) -> None:
        self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(error)


class _Later:
    """Does things at a given time, in a thread that starts with the first of them."""

    def __init__(self, name: str, groups: Groups) -> None:
        self._name = name
        self._groups = groups
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], object], Callable[[], bool]]] = []
        self._sweep_at = _FEW
        self._started = self._closed = False

    def after(self, seconds: float, do: Callable[[], object], over: Callable[[], bool] = lambda: False) -> None:
        """Do it after that many seconds, unless ``over`` says by then that it is no longer needed."""
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
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _serve(self) -> None:
        note_running(
            self._groups
        )  # callbacks of futures run in this thread: if one waited for a place, no unit would be woken
        while (do := self._next()) is not None:
            try:
                do()
            except BaseException:
                logger.critical("%s: a callback of a unit's future has raised", self._name, exc_info=True)

    def _next(self) -> Callable[[], object] | None:
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
    """Runs the units of a writer in groups. Up to ``runners`` groups exist at a time; one of them runs its units.

    Its threads start with the first unit. If a unit waits alone, the thread that waits for it runs it: switching to another
    thread and back would take longer than everything else that a unit costs on top of a block. After a group of several, the
    writer's thread takes the next one, too: until it wakes, more units arrive.

    ``grouped`` is called with the number of units of each group that is about to end.
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
        self._is_crowded = False  # where several have just come together, more follow until a thread wakes

    def submit(
        self,
        work: Callable[[Transaction], Any] | RowUnit,
        key: Hashable | None,
        within_s: float | None = None,
    ) -> Future[Any]:
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
        if self._idle:
            self._wake()
        elif self._threads < self._runners:
            self._threads += 1
            threading.Thread(target=self._serve, name=f"dualwrite group {self._name}", daemon=True).start()

    def _stand_in_line(self, unit: Unit[Task]) -> None:
        """Wait until the unit is added; only for a moment where waiting would keep all units from making progress."""
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
            unit.work.future.cancel()  # an interrupted caller gets no future, so nobody would wait for the unit
            raise

    def _admit(self) -> None:
        for unit in self._units.admit():
            unit.work.answered.set()

    def close(self, within_s: float) -> None:
        """Finish the waiting units, and refuse new ones. Units that have not begun in time fail. May be called again."""
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
        if self._group_may_begin:
            self._may_begin.notify()

    def _serve(self) -> None:
        while (group := self._next()) is not None:
            try:
                self._run(group)
            except BaseException:
                # Such as SystemExit: it would silently end this thread, and later units would wait for it.
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
        if self._running is not None or not waiting.in_own_thread() or entered.entered_here():
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
            if unit is None or unit.work.future is not future or not self._group_may_begin or self._is_crowded:
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
        answers = run_group(group, self._block, self._limits, self._call, lambda: self._let_next_run(group))
        self._let_next_run(group)
        if group.begun:
            self._is_crowded = group.begun > 1
            self._grouped(group.begun)
        answer_all(answers)

    def _end(self, group: GroupRun) -> None:
        with self._lock:
            if self._running is group:
                self._running = None
            if group in self._begun:
                # Once close() has waited, nothing wakes units in a pause: they run at once, and fail if the writer is closed.
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
        blocks = entered.entered_here()

        def call() -> object:
            entered.continue_inside(blocks)
            result = task.work(transaction)
            refuse_not_run(result, self._name)
            return result

        return task.context.copy().run(call)


# Runs one group: its block, and its units one after the other, each in a savepoint unless it is the only one.

Call = Callable[[Any, "Transaction"], object]
"""Calls a task's work with the transaction of its unit."""


def run_group(
    group: GroupRun,
    block: Callable[[], AbstractContextManager[Transaction]],
    limits: WriterLimits,
    call: Call,
    all_run: Callable[[], None],
) -> Sequence[Answer]:
    """Run a group to its end. Returns what to tell the callers; ``group.again`` are the units that run again.

    ``call`` calls the work of a unit; of a `RowUnit`, it produces the messages. ``all_run`` is called before the commit.
    """
    transaction: Transaction | None = None
    try:
        with block() as transaction:
            if len(group.taken) == 1:
                _run_one(group, group.taken[0], transaction, call)
            else:
                _Division(group, transaction, limits, call).run()
            all_run()
            group.require_any()
            failpoints.hit("group.units_done")
        failpoints.hit("group.committed")
        return group.committed()
    except BaseException as error:  # noqa: BLE001 - goes to the callers
        return group.failed(error, aborted=transaction is not None and transaction.state is WriteState.ABORTED)


def _run_one(group: GroupRun, unit: Unit[Any], transaction: Transaction, call: Call) -> None:
    """The only unit of a group is the whole block: it needs no savepoint."""
    cast("DualWrite", write_of(transaction)).of_unit = True
    if group.begins(unit):
        group.ended(unit, _work(unit, transaction, call), None)


def _work(unit: Unit[Any], transaction: Transaction, call: Call) -> object:
    result = call(unit.work, transaction)
    if (rows := unit.work.rows) is not None:
        execute_rows([rows], transaction)
    return result


class _Division:
    """Runs several units, as many as the limits allow: each in a savepoint, or in one with its neighbours."""

    def __init__(self, group: GroupRun, transaction: Transaction, limits: WriterLimits, call: Call) -> None:
        self._group = group
        self._divided = Divided(transaction)
        self._limits = limits
        self._call = call
        self._began = now_s()

    @property
    def _full(self) -> bool:
        reached = takes_no_more(self._limits, seconds=now_s() - self._began, size=self._divided.size)
        return bool(self._group.begun) and reached

    def run(self) -> None:
        waiting = deque(self._group.taken)
        try:
            while waiting and not self._full:
                if len(waiting) > 1 and _go_together(waiting[0], waiting[1]):
                    self._run_together(waiting)
                else:
                    self._run(waiting.popleft())
        finally:
            self._divided.give_up()  # after an error that ends the group

    def _run(self, unit: Unit[Any]) -> None:
        group, divided = self._group, self._divided
        if not group.begins(unit):
            return
        given = divided.begin()
        result: object = None
        error: BaseException | None = None
        try:
            result = _work(unit, given, self._call)
        except BaseException as raised:  # noqa: BLE001 - goes to the caller
            error = named(raised, given.transactional_id)
        divided.work_ended()
        group.has_run(unit, error)
        group.ended(unit, result, divided.end(error))

    def _run_together(self, waiting: deque[Unit[Any]]) -> None:
        """Run the first units, which have the same statement. If that fails, run them one by one, so that only one fails."""
        group, divided = self._group, self._divided
        given = divided.begin()
        tried: list[Unit[Any]] = []
        error: BaseException | None = None
        try:
            first = waiting[0]
            while waiting and _go_together(first, waiting[0]) and not self._full:
                unit = waiting.popleft()
                if group.begins(unit):
                    tried.append(unit)
                    self._call(unit.work, given)
            if tried:
                execute_rows([unit.work.rows for unit in tried], given)
        except BaseException as raised:  # noqa: BLE001 - goes to the caller of the failing unit
            error = named(raised, given.transactional_id)
        divided.work_ended()
        group.have_run(tried)
        error = divided.end(error)
        if error is None or len(tried) == 1:
            for unit in tried:
                group.ended(unit, None, error)
            return
        self._run(tried[0])
        for unit in tried[1:]:
            if not self._full:
                self._run(unit)


def _go_together(unit: Unit[Any], other: Unit[Any]) -> bool:
    mine, others = unit.work.rows, other.work.rows
    return mine is not None and others is not None and (unit is other or mine.goes_with(others))


Result = TypeVar("Result")


# Waiting for a place among the units that wait: which callers may, and the error of those that get none.

_running: Final[ContextVar[tuple[object, int] | None]] = ContextVar("dualwrite_running_groups", default=None)
"""The groups that this code runs, and its thread; callbacks of futures run there, too. Units have their caller's context."""


def note_running(groups: object) -> None:
    """Note that this thread runs a group of these, in this context."""
    _running.set((groups, threading.get_ident()))


def may_wait(groups: object) -> bool:
    """Whether the caller may wait for a place. It may not if all units, or all tasks of an event loop, would wait with it."""
    return _running.get() != (groups, threading.get_ident()) and not transaction.would_block_a_loop()


def full_error(name: str, limits: WriterLimits, *, waited: bool) -> Unavailable:
    """The error of a unit without a place; ``waited`` says whether its caller has waited for one."""
    why = (
        "none has left its place in time"
        if waited
        else "a thread that runs an event loop or a group must not wait for one"
    )
    return Unavailable(
        f"the queue of units is full (limit {limits.waiting_units}); {why}",
        transactional_id=name,
        next_step="submit it again later; wait for results before you submit more, or raise WriterLimits(waiting_units=...)",
    )


# The future of a unit: the thread that waits for it may run the unit, if it is alone.


class UnitFuture(Future[Result]):
    """The future of a unit. A thread that waits for it without a timeout may run the unit itself.

    ``run_here`` does so, unless something else is to run with the unit or before it.
    """

    def __init__(self, run_here: Callable[[Future[Any]], None]) -> None:
        super().__init__()
        self._run_here = run_here

    def result(self, timeout: float | None = None) -> Result:
        self._make_progress(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._make_progress(timeout)
        return super().exception(timeout)

    def _make_progress(self, timeout: float | None) -> None:
        if timeout is None and not self.done():
            self._run_here(self)
