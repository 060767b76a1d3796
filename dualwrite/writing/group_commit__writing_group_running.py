"""Runs one group: its block, and its units one after the other, in savepoints unless there is only one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from dualwrite import failpoints
from dualwrite.clock import now_s
from dualwrite.protocol.grouping import Unit, takes_no_more
from dualwrite.protocol.lives__protocol_tables_write_life import WriteState
from dualwrite.protocol.values__protocol_allowed import WriterLimits
from dualwrite.writing.transaction import write_of
from dualwrite.writing.units_of_work import GroupRun, Told
from dualwrite.writing.units_of_work__writing_group_divided import Divided, named
from dualwrite.writing.units_of_work__writing_group_row_unit import execute_rows

if TYPE_CHECKING:
    from dualwrite.writing.dual_write import DualWrite
    from dualwrite.writing.transaction import Transaction

Call = Callable[[Any, "Transaction"], object]
"""Calls the work of a task with the transaction of its unit."""


def run_group(
    group: GroupRun,
    block: Callable[[], AbstractContextManager[Transaction]],
    limits: WriterLimits,
    call: Call,
    all_run: Callable[[], None],
) -> Sequence[Told]:
    """Run a group to its end. Returns what to tell the callers; ``group.again`` are the units that run again.

    Args:
        group: The units.
        block: The block of a new dual write.
        limits: When no more units begin.
        call: Calls the work of a unit; of a `RowUnit`, it produces the messages.
        all_run: Called once the units have run, before the commit.
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
    cast("DualWrite", write_of(transaction)).sending.of_unit = True
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
        """Run the first units, which have the same statement; one by one if that fails, so that only the failing one does."""
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
