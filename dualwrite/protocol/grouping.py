"""Group commit: which units of work go into the next group, when a group takes no more, and what follows a failed one.

A *unit* is the work of one caller; a *group* is the units that commit together. Units of one key keep their order: while some
of them are in a group, the others wait. A limited number of units wait; further callers stand in line. A unit that must run
again pauses first, while the others continue.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

from dualwrite.errors import ConfigurationError, TransactionAborted, Unavailable
from dualwrite.protocol.process import Redo, leaves_nothing, redo_after
from dualwrite.protocol.values import DEFAULT_LIMITS, WriterLimits

Work = TypeVar("Work")

ATTEMPTS: Final = 5
"""The maximum number of groups that a unit runs in."""


def takes_no_more(limits: WriterLimits, *, seconds: float, size: int) -> bool:
    """Whether a group takes no more units: so long after its first one began, with messages of that size in bytes."""
    return seconds >= limits.group_open_s or size > limits.group_bytes


@dataclass(eq=False)
class Unit(Generic[Work]):
    """The work of one caller. Units with the same ``key`` run, and commit, in the order in which they came."""

    work: Work
    key: Hashable
    # How many runs of it have left nothing behind.
    failures: int = 0
    # Whether it must be the only one of its group.
    alone: bool = False


class Units(Generic[Work]):
    """The units that wait. Keys take turns, so that a caller with many units does not hold up those with few.

    At most ``places`` units wait; the others stand in line. Units that run again need no place.
    """

    def __init__(self, places: int = DEFAULT_LIMITS.waiting_units) -> None:
        self._places = places
        self._ready: OrderedDict[Hashable, deque[Unit[Work]]] = OrderedDict()
        self._busy: dict[Hashable, deque[Unit[Work]]] = {}
        self._resting: set[Hashable] = set()
        self._in_line: OrderedDict[Unit[Work], None] = OrderedDict()
        self._at_most = 0  # an upper bound: an interruption may have come before it was counted down

    @property
    def ready(self) -> bool:
        """Whether a group could begin now."""
        return bool(self._ready)

    @property
    def lone(self) -> Unit[Work] | None:
        """The unit that a group would consist of if it began now; None if there are none, or several."""
        if len(self._ready) != 1:
            return None
        (waiting,) = self._ready.values()
        return waiting[0] if len(waiting) == 1 else None

    @property
    def empty(self) -> bool:
        """Whether no unit waits, and none is in a group."""
        return not self._ready and not self._busy

    def offer(self, unit: Unit[Work]) -> bool:
        """Add a unit, or let it stand in line if others do, or if there is no place. Returns whether it was added."""
        if self._in_line or self._full:
            self._in_line[unit] = None
            return False
        self.add(unit)
        return True

    def admit(self) -> Sequence[Unit[Work]]:
        """Add the first units in line, as many as there are places for. Returns them."""
        admitted: list[Unit[Work]] = []
        while self._in_line and not self._full:
            unit, _ = self._in_line.popitem(last=False)
            self.add(unit)
            admitted.append(unit)
        return admitted

    def withdraw(self, unit: Unit[Work]) -> bool:
        """Take a unit out of the line. Returns whether it still stood there."""
        stood = unit in self._in_line
        self._in_line.pop(unit, None)
        return stood

    @property
    def in_line(self) -> Sequence[Unit[Work]]:
        """The units that stand in line, the first one first."""
        return list(self._in_line)

    @property
    def _full(self) -> bool:
        if self._at_most >= self._places:
            self._at_most = sum(map(len, (*self._ready.values(), *self._busy.values())))
        return self._at_most >= self._places

    def add(self, unit: Unit[Work]) -> None:
        """Let a unit wait behind the others of its key."""
        self._at_most += 1
        waiting = self._busy.get(unit.key)
        if waiting is None:
            waiting = self._ready.setdefault(unit.key, deque())
        waiting.append(unit)

    def take(self, limit: int) -> Sequence[Unit[Work]]:
        """The units of the next group, in the order in which they are to run. Their keys are busy until :meth:`end`."""
        taken: list[Unit[Work]] = []
        while self._ready and len(taken) < limit:
            key = next(iter(self._ready))
            waiting = self._ready[key]
            alone = waiting[0].alone
            if alone and taken:
                break
            taken.append(waiting.popleft())
            if waiting:
                self._ready.move_to_end(key)
            else:
                del self._ready[key]
            if alone:
                break
        for key in keys_of(taken):
            self._busy[key] = self._ready.pop(key, deque())
        self._at_most -= len(taken)
        return taken

    def take_lone(self) -> None:
        """Take :attr:`lone`, as :meth:`take` would. If this is interrupted, no other unit is lost, and :meth:`end` is right."""
        unit = self.lone
        assert unit is not None
        del self._ready[unit.key]
        self._busy[unit.key] = deque()
        self._at_most -= 1

    def end(
        self, taken: Iterable[Unit[Work]], again: Sequence[Unit[Work]] = (), *, rest: Sequence[Unit[Work]] = ()
    ) -> None:
        """Note that a group has ended. May be called again if it was interrupted.

        The units in ``again`` run in a later group, in their order, as the next ones of their keys. Those of them in ``rest``
        wait until :meth:`rested`, and all units of their keys with them.
        """
        for unit in reversed(again):
            waiting = self._busy.get(unit.key)
            if waiting is not None and unit not in waiting:
                self._at_most += 1
                waiting.appendleft(unit)
        self._resting.update(keys_of(rest))  # only once they wait: drain() takes all units of a key that rests
        self._free(key for key in keys_of(taken) if key not in self._resting)
        self._first(again)

    def rested(self, units: Sequence[Unit[Work]]) -> None:
        """Let units run again that have rested. May be called again."""
        keys = [key for key in keys_of(units) if key in self._resting]
        self._resting.difference_update(keys)
        self._free(keys)
        self._first(units)

    def _free(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            if waiting := self._busy.get(key):
                self._ready[key] = waiting
            self._busy.pop(key, None)

    def _first(self, units: Sequence[Unit[Work]]) -> None:
        for key in reversed(keys_of(units)):
            if key in self._ready:
                self._ready.move_to_end(key, last=False)

    def drain(self) -> Sequence[Unit[Work]]:
        """Take all units that wait: no group will run them."""
        drained = [unit for waiting in (*self._ready.values(), *self._busy.values()) for unit in waiting]
        self._ready.clear()
        for waiting in self._busy.values():
            waiting.clear()
        for key in self._resting:  # in no group whose end would free it
            self._busy.pop(key, None)
        self._resting.clear()
        self._at_most = 0
        return drained


def keys_of(units: Iterable[Unit[Work]]) -> Sequence[Hashable]:
    """The keys of units, each once, in the order of their first units."""
    return list(dict.fromkeys(unit.key for unit in units))


class Fate(Enum):
    """The possible consequences of an error."""

    TOGETHER = "run again, with others"
    ALONE = "run again, each unit alone"
    FAIL = "fail with the error"


def after_unit(error: BaseException, failures: int) -> Fate:
    """Judge the error of one unit, whose savepoint was rolled back.

    ``failures`` counts the runs of the unit that have left nothing behind, this one included; in the functions below, too.
    """
    return Fate.TOGETHER if redo_after(error) is Redo.AGAIN and failures < ATTEMPTS else Fate.FAIL


def after_group(error: BaseException, *, units: int, failures: int, aborted: bool = False) -> Fate:
    """Judge the error that ended a group of so many units, for one of them.

    A group that was aborted for a reason that may lie in one of its units runs again as single units, so that the others do
    not fail with it: a message that a broker refuses, say, or the exception of a delivery callback. One that was refused
    because Kafka is known to be silent does not run again: its callers would wait as long as the outage lasts.

    ``aborted`` says that both sides have certainly aborted, whatever the error is.
    """
    if isinstance(error, Unavailable) and error.silent:
        return Fate.FAIL
    advice = redo_after(error)
    if advice is Redo.AGAIN and failures < ATTEMPTS:
        return Fate.TOGETHER if failures == 1 else Fate.ALONE
    if advice is Redo.USELESS and units > 1 and isinstance(error, (TransactionAborted, ConfigurationError)):
        return Fate.ALONE
    if advice is Redo.FOREIGN and units > 1 and aborted and isinstance(error, Exception):
        return Fate.ALONE
    return Fate.FAIL


def after_ending_group(raised: BaseException | None, error: BaseException, failures: int) -> Fate:
    """Judge the error of a unit that has ended its group, as a deadlock does where the database then rolls back everything.

    It runs again alone, so that it ends no other group. ``raised`` is the error of its work, and ``error`` that of the group.
    """
    if raised is None or not leaves_nothing(error) or after_unit(raised, failures) is Fate.FAIL:
        return Fate.FAIL
    return Fate.ALONE


def after_culprit(error: BaseException, failures: int) -> Fate:
    """Judge the error of a group that a known unit has ended, for one of the others."""
    return Fate.TOGETHER if leaves_nothing(error) and failures < ATTEMPTS else Fate.FAIL
