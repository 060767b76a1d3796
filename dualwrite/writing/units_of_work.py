"""One run of a group: the fate of each unit, the answer for its caller, and the units to run again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from dualwrite.errors import DualWriteError, IllegalStateError, Unavailable
from dualwrite.protocol.grouping import Fate, Unit, after_culprit, after_ending_group, after_group, after_unit
from dualwrite.protocol.process__protocol_process_redo import leaves_nothing
from dualwrite.protocol.values__protocol_allowed import check_seconds

if TYPE_CHECKING:
    from dualwrite.writing.units_of_work__writing_group_row_unit import RowUnit

logger = logging.getLogger(__name__)


class Task(Protocol):
    """A unit's work, and the caller waiting for its result.

    Attributes:
        rows: The unit, if it is one of rows.
    """

    rows: RowUnit | None

    def begin(self) -> bool:
        """Note that the work begins. Returns False if the caller has given it up, or its time is over.

        From then on it can do neither, until :meth:`rest`. Not to be called again after False.
        """
        ...

    def rest(self, error: BaseException | None) -> None:
        """Note that the work has not begun, or that it runs again later: until then it may be given up.

        Args:
            error: What the run has failed with; None if it has not begun.
        """
        ...

    def succeed(self, result: Any) -> None:
        """Complete the caller's future with the result."""
        ...

    def fail(self, error: BaseException) -> None:
        """Complete the caller's future with the error."""
        ...


TaskT = TypeVar("TaskT", bound=Task)
Told = Callable[[], None]


def closed_error(name: str) -> IllegalStateError:
    """The error of a unit that a closed writer will not run.

    Args:
        name: The writer's transactional id.
    """
    return IllegalStateError("the writer was closed before the unit began; nothing was written", transactional_id=name)


def tell_all(told: Iterable[Told]) -> None:
    """Tell the callers. What a callback of one raises, ``SystemExit`` say, comes out once all others have their answer."""
    raised: BaseException | None = None
    for tell in told:
        try:
            tell()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised = raised or error
    if raised is not None:
        raise raised


def fail_left(units: Iterable[Unit[Any]], name: str) -> None:
    """Fail units that a closed writer never ran or will not rerun."""
    tell_all([_failed(unit, closed_error(name)) for unit in units if unit.work.begin()])


def late_error(name: str, within_s: float) -> Unavailable:
    """The error of a unit that has not begun in time.

    Args:
        name: The writer's transactional id.
        within_s: The time that its caller gave it, in seconds.
    """
    return Unavailable(
        f"the unit has not begun within {within_s:g} s: nothing of it was written, and it will not run",
        transactional_id=name,
        next_step="submit it again later; see the writer's health() for what the units before it wait for",
    )


def check_within(within_s: float | None) -> None:
    """Refuse a time that no unit can begin in, or that no thread can wait for.

    Raises:
        ConfigurationError: It is one.
    """
    if within_s is not None:
        check_seconds("within_s", within_s)


class NothingKept(Exception):
    """Leaves the block of a group without a unit to commit: both sides abort."""


class GroupRun:
    """Notes how the units of one group end, and derives what follows.

    Args:
        name: The writer's transactional id.
        taken: The units, in the order in which they are to run.

    Attributes:
        taken: The units.
        again: After the end: the units for a later group, in their order.
        resting: After the end: those of them that wait for a server or a conflict. The others have nothing to wait for.
        failures: After the end: how often those that wait for a server or a conflict have failed; 0 if there are none.
    """

    def __init__(self, name: str, taken: Sequence[Unit[Any]]) -> None:
        self._name = name
        self.taken = taken
        self._begun: set[Unit[Any]] = set()
        self._ran: set[Unit[Any]] = set()
        self._dropped: set[Unit[Any]] = set()
        self._results: dict[Unit[Any], object] = {}
        self._errors: dict[Unit[Any], BaseException] = {}
        self._postponed: set[Hashable] = set()
        self._running: Unit[Any] | None = None
        self._raised: BaseException | None = None
        self.again: Sequence[Unit[Any]] = ()
        self.resting: list[Unit[Any]] = []
        self.failures = 0

    @property
    def begun(self) -> int:
        """How many units have begun."""
        return len(self._begun)

    @property
    def kept(self) -> int:
        """How many units are done, and are to commit."""
        return len(self._results)

    def begins(self, unit: Unit[Any]) -> bool:
        """Note that a unit is about to begin, unless its caller has given it up, or one of its key must come first."""
        if unit.key in self._postponed or unit in self._dropped:
            return False
        if unit not in self._begun:
            if not unit.work.begin():
                self._dropped.add(unit)
                return False
            self._begun.add(unit)
        return True

    def has_run(self, unit: Unit[Any], error: BaseException | None) -> None:
        """Note that the work of a unit has run, and its error if any: the cause if the group ends before :meth:`ended`."""
        self._running, self._raised = unit, error
        self._ran.add(unit)

    def have_run(self, units: Iterable[Unit[Any]]) -> None:
        """Note that units have run as one. What ends the group may be due to any of them."""
        self._ran.update(units)

    def ended(self, unit: Unit[Any], result: object, error: BaseException | None) -> None:
        """Note how a unit has ended: kept, or rolled back with an error."""
        self._running = None
        self._ran.add(unit)
        if error is None:
            self._results[unit] = result
            return
        self._errors[unit] = error
        if after_unit(error, unit.failures + 1) is not Fate.FAIL:
            self._postponed.add(unit.key)

    def require_any(self) -> None:
        """Leave the block if no unit is to commit.

        Raises:
            NothingKept: None is.
        """
        if not self._results:
            raise NothingKept

    def committed(self) -> Sequence[Told]:
        """Note that the group has committed. Returns what to tell the callers."""
        told: list[Told] = []
        again = []
        for unit in self.taken:
            if unit in self._results:
                told.append(_succeeded(unit, self._results[unit]))
            elif unit in self._errors:
                error = self._errors[unit]
                unit.failures += 1
                if after_unit(error, unit.failures) is Fate.FAIL:
                    told.append(_failed(unit, error))
                else:
                    self._let_rest(unit)
                    unit.work.rest(error)
                    again.append(unit)
            elif unit not in self._dropped:
                unit.work.rest(None)
                again.append(unit)
        self.again = again
        return told

    def failed(self, error: BaseException, *, aborted: bool = False) -> Sequence[Told]:
        """Note that the group has ended with an error, which has left its block.

        Args:
            error: The error.
            aborted: Whether both sides have certainly aborted, whatever the error is.

        Returns:
            What to tell the callers.
        """
        if isinstance(error, NothingKept):
            return self.committed()
        if not self._ran:  # the block could not begin: until a unit does, its caller may give it up
            self._ran = set(self.taken) - self._dropped
        told: list[Told] = []
        again = []
        for unit in self.taken:
            if unit in self._ran and not self._runs_again(unit, error, aborted=aborted):
                if unit in self._begun or self.begins(unit):
                    told.append(_failed(unit, self._shown(unit, error)))
            elif unit not in self._dropped:
                unit.work.rest(error if unit in self._ran else None)
                again.append(unit)
        self.again = again
        self._log(error)
        return told

    def _runs_again(self, unit: Unit[Any], error: BaseException, *, aborted: bool) -> bool:
        unit.failures += 1
        if self._running is None:
            fate = after_group(error, units=len(self._ran), failures=unit.failures, aborted=aborted)
        elif unit is self._running:
            fate = after_ending_group(self._raised, error, unit.failures)
        else:
            fate = after_culprit(error, unit.failures)
        unit.alone = fate is Fate.ALONE
        if fate is not Fate.FAIL and self._running in {None, unit}:
            self._let_rest(unit)
        return fate is not Fate.FAIL

    def _let_rest(self, unit: Unit[Any]) -> None:
        self.resting.append(unit)
        self.failures = max(self.failures, unit.failures)

    def _log(self, error: BaseException) -> None:
        if len(self._ran) > 1 or self.again:
            text = "%s: a group of %d units ended: %s; %d units run again"
            logger.info(text, self._name, len(self._ran), error, len(self.again))

    def _shown(self, unit: Unit[Any], error: BaseException) -> BaseException:
        """The error for one caller. A unit's own error may depend on rows that are gone once the group is aborted."""
        if unit is self._running:
            raised = self._raised
            # It means that the unit was rolled back: true only if the group has left nothing behind.
            ours = isinstance(raised, DualWriteError) or isinstance(error, DualWriteError)
            claims_too_much = ours and not leaves_nothing(error)
            return error if raised is None or claims_too_much else raised
        if unit in self._errors and not leaves_nothing(error):
            return self._errors[unit]
        return error if len(self._ran) == 1 else copied(error)


def _succeeded(unit: Unit[Any], result: object) -> Told:
    return lambda: unit.work.succeed(result)


def _failed(unit: Unit[Any], error: BaseException) -> Told:
    return lambda: unit.work.fail(error)


_NOTES: Final = "__notes__"


def copied(error: BaseException) -> BaseException:
    """A copy for one of many callers: each raises it with a traceback and notes of its own."""
    try:
        made = copy.copy(error)
    except Exception:  # noqa: BLE001 - a foreign error that cannot be copied is shared
        return error
    if _NOTES in vars(made):
        vars(made)[_NOTES] = list(vars(made)[_NOTES])
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)
