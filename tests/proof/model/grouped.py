"""Group commit in the model: an owner whose callers submit units; it makes groups of them by the product's own functions."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dualwrite import WriterLimits
from dualwrite.clock import Deadline
from dualwrite.errors import DualWriteError, Fenced, TransactionAborted
from dualwrite.protocol.grouping import Unit, Units
from dualwrite.writing.dual_write import DualWrite
from dualwrite.writing.group_commit import run_group
from dualwrite.writing.units_of_work import GroupRun
from model.checker import Finding
from model.owners import MEANING, NAME, OF_THE_USERS_STATEMENT, TIMEOUT_S, TOPIC, CodeFailed, Owner, Write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulator.connection import SimulatedConnection

    from dualwrite.recovery.claim import OwnerContext
    from dualwrite.writing.transaction import Transaction
    from model.owners import Told


@dataclass
class Divided:
    """The database transaction of a group, for the check of the run.

    Attributes:
        writes: Its units that were not rolled back, in their order.
    """

    writes: list[Write] = field(default_factory=list)


@dataclass
class Task:
    """The work of a unit, and its caller. See :class:`dualwrite.writing.units_of_work.Task`."""

    write: Write
    told: Told
    error: BaseException | None = None
    rows: None = None

    def begin(self) -> bool:
        return True

    def rest(self, error: BaseException | None) -> None:
        del error

    def succeed(self, result: object) -> None:
        del result
        self._tell("committed")

    def fail(self, error: BaseException) -> None:
        self.error = error
        if isinstance(error, DualWriteError):
            self.told.note(error)
            self._tell(MEANING[error.outcome] if self.write.runs else "aborted")
        elif isinstance(error, (CodeFailed, *OF_THE_USERS_STATEMENT)):
            self._tell("aborted")
        else:
            raise error

    def _tell(self, told: str) -> None:
        if self.write.told is not None:
            raise Finding(f"write {self.write.number}: told {told} after {self.write.told}")
        self.write.told = told


class GroupingOwner(Owner):
    """An owner that also takes units: a :class:`Write` with a key waits; :class:`WriterLimits` let it run all that wait."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._units: Units[Task] = Units()

    def _obey(self, context: OwnerContext, connection: SimulatedConnection, command: object) -> bool:
        if isinstance(command, Write) and command.key is not None:
            self._units.add(Unit(Task(command, self._told), command.key))
            return True
        if isinstance(command, WriterLimits):
            return self._run_groups(context, connection, command)
        return super()._obey(context, connection, command)

    def _run_groups(self, context: OwnerContext, connection: SimulatedConnection, limits: WriterLimits) -> bool:
        """Run groups until no unit waits, as the threads of a writer do; False where the owner has to stop."""
        while self._units.ready:
            group = GroupRun(NAME, self._units.take(limits.group_units))
            told = run_group(
                group,
                lambda: self._block(context, connection),
                limits,
                lambda task, transaction: _run_unit(task.write, transaction, connection),
                lambda: None,
            )
            for tell in told:
                tell()
            self._units.end(group.taken, group.again)
            if any(unit.work.write.told is None for unit in group.taken if unit not in group.again):
                raise Finding("the caller of a unit waits for ever: its group has ended, and it runs in no other")
            if any(isinstance(unit.work.error, Fenced) for unit in group.taken):
                return False
        return True

    @contextmanager
    def _block(self, context: OwnerContext, connection: SimulatedConnection) -> Iterator[Transaction]:
        """The block of a group, as a writer gives it."""
        lane = self._next_lane()
        lane.ready(Deadline(TIMEOUT_S))
        with DualWrite(lane, context, connection, margin_s=10.0, timeout_s=TIMEOUT_S) as transaction:
            connection.about(Divided())
            yield transaction


def _run_unit(write: Write, transaction: Transaction, connection: SimulatedConnection) -> None:
    write.lane = transaction.transactional_id
    write.runs += 1
    connection.add(write)
    for name, partition in write.messages:
        connection.insert(name)
        transaction.produce(TOPIC, name, partition=partition)
    if write.fails == "code":
        raise CodeFailed
    if write.fails == "once" and write.runs == 1:
        raise TransactionAborted("the database reports a conflict")
    if write.fails == "statement":
        connection.fail()
    if write.fails == "connection":
        connection.cut()
        connection.insert("nothing")
    if write.fails == "transaction":
        connection.roll_back()
