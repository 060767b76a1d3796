"""Runs one group: its block, and its units one after the other, each in a savepoint unless it is the only one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from dualwrite.protocol.grouping import GroupLimits, Unit
from dualwrite.runtime import failpoints
from dualwrite.runtime.deadline import now_s
from dualwrite.writing.group.divided import Divided, named
from dualwrite.writing.group.results import GroupRun, Told

if TYPE_CHECKING:
    from dualwrite.writing.transaction import Transaction

Call = Callable[[Any, "Transaction"], object]
"""Calls the work of a task with the transaction of its unit."""


def run_group(
    group: GroupRun,
    block: Callable[[], AbstractContextManager[Transaction]],
    limits: GroupLimits,
    call: Call,
    all_run: Callable[[], None],
) -> Sequence[Told]:
    """Run a group to its end. Returns what to tell the callers; ``group.again`` are the units that run again.

    Args:
        group: The units.
        block: The block of a new dual write.
        limits: When no more units begin.
        call: Calls the work of a unit.
        all_run: Called once the units have run, before the commit.
    """
    try:
        with block() as transaction:
            if len(group.taken) == 1:
                _run_one(group, group.taken[0], transaction, call)
            else:
                _run_units(group, transaction, limits, call)
            all_run()
            group.require_any()
            failpoints.hit("group.units_done")
        failpoints.hit("group.committed")
        return group.committed()
    except BaseException as error:  # noqa: BLE001 - goes to the callers
        return group.failed(error)


def _run_one(group: GroupRun, unit: Unit[Any], transaction: Transaction, call: Call) -> None:
    """The only unit of a group is the whole block: it needs no savepoint."""
    if group.begins(unit):
        group.ended(unit, call(unit.work, transaction), None)


def _run_units(group: GroupRun, transaction: Transaction, limits: GroupLimits, call: Call) -> None:
    divided = Divided(transaction)
    began = now_s()
    for unit in group.taken:
        if group.begun and limits.reached(seconds=now_s() - began, size=divided.size):
            break
        if not group.begins(unit):
            continue
        given = divided.begin()
        result: object = None
        error: BaseException | None = None
        try:
            result = call(unit.work, given)
        except BaseException as raised:  # noqa: BLE001 - goes to the caller
            error = named(raised, given.transactional_id)
        divided.require_begun()
        group.has_run(unit, error)
        group.ended(unit, result, divided.end(error))
