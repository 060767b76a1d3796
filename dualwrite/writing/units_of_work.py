"""Units of work within one dual write: each in a savepoint, each with a result of its own.

A unit that fails is rolled back alone, with its messages; the others commit. ``RowUnit`` is a unit given as data:
statement, parameters, messages.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from sqlalchemy import TextClause, exc
from sqlalchemy.sql.dml import UpdateBase

from dualwrite import failpoints, waiting
from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, DualWriteError, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.protocol.grouping import Fate, Unit, after_culprit, after_ending_group, after_group, after_unit
from dualwrite.protocol.lives import WriteState
from dualwrite.protocol.message import ProducerRecord
from dualwrite.protocol.process import leaves_nothing
from dualwrite.protocol.values import check_seconds
from dualwrite.stores.sql.access import conflict_behind
from dualwrite.writing.transaction import Refusals, Transaction, Work, raise_aborted, unit_of, write_of

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from dualwrite.interfaces import SavepointWatch
    from dualwrite.protocol.message import Sendable
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.writing.dual_write import DualWrite

# `RowUnit`: a unit of a group given as data, so that one statement writes the rows of many units.

_WRITES: Final = re.compile(r"\s*(?:insert|update|delete|merge|replace)\b", re.IGNORECASE)
_RETURNS: Final = re.compile(r"\breturning\b", re.IGNORECASE)


class RowUnit:
    """Rows and messages of one caller, for ``submit``: a unit of work as data instead of code.

    Consecutive units of a group with the same statement are executed together (``executemany``), in one savepoint. With many
    callers, this is several times as fast as functions. If it fails, each unit runs in a savepoint of its own, so that only the
    failing one gets the error.

    Two statements are the same if they are one object, or both a bare ``insert(table)``, and their parameters have the same
    names. So create a statement once, and pass what differs as parameters.

    Args:
        statement: ``insert()``, ``update()``, ``delete()``, or one of them as ``text()``. It must not return rows.
        parameters: The parameters of the statement, as for SQLAlchemy's ``Connection.execute()``: a mapping, or a sequence of
            mappings with the same names, for several rows.
        messages: The messages that commit with the rows, in their order; none if not given. Their headers are copied.

    The statement does not see the caller's context variables: if a column default reads one, pass its value as a parameter.
    Serializers and telemetry do see them.

    Raises:
        ConfigurationError: The statement returns rows, or is of another kind; or the parameters or messages cannot be used.
    """

    __slots__ = ("_names", "messages", "rows", "statement")

    def __init__(
        self,
        statement: UpdateBase | TextClause,
        parameters: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
        *,
        messages: Sequence[ProducerRecord] = (),
    ) -> None:
        _check_statement(statement)
        self.statement: Final = statement
        self.rows: Final = _rows_of(parameters)
        self._names: Final = self.rows[0].keys()
        self.messages: Final = tuple(map(_copied, messages))

    def goes_with(self, other: RowUnit) -> bool:
        """Whether one ``executemany`` can write the rows of both."""
        if not self._names or self._names != other._names:
            return False
        mine, others = self.statement, other.statement
        return mine is others or (type(mine) is type(others) and vars(mine) == vars(others))

    def produce(self, transaction: Transaction) -> None:
        """Produce its messages."""
        for topic, value, key, headers, partition, timestamp_ms in self.messages:
            transaction.produce(
                topic, value, key, headers=headers or None, partition=partition, timestamp_ms=timestamp_ms
            )

    def __repr__(self) -> str:
        return f"<RowUnit of {len(self.rows)} rows, {len(self.messages)} messages>"


def execute_rows(units: Sequence[RowUnit], transaction: Transaction) -> None:
    """Write the rows of units with the same statement."""
    rows = [row for unit in units for row in unit.rows]
    transaction.connection.execute(units[0].statement, rows[0] if len(rows) == 1 else rows)
    failpoints.hit("group.rows_executed")


def _copied(message: ProducerRecord) -> ProducerRecord:
    """A copy of the message: its caller may use the same headers for the next one."""
    if not isinstance(message, ProducerRecord):
        raise ConfigurationError(
            f"{type(message).__name__} is no message", next_step="give each as dualwrite.ProducerRecord(topic, value)"
        )
    given = message.headers
    if not given:
        return message
    pairs = given.items() if isinstance(given, Mapping) else given
    return message._replace(headers=tuple(tuple(pair) if isinstance(pair, list) else pair for pair in pairs))


def _check_statement(statement: object) -> None:
    if isinstance(statement, UpdateBase):
        returns = bool(statement._returning)  # noqa: SLF001 - what is public takes 40 µs, and changes the statement
    elif isinstance(statement, TextClause):
        if _WRITES.match(statement.text) is None:
            raise _not_a_write(f"text that begins with {statement.text.strip()[:20]!r}")
        returns = _RETURNS.search(statement.text) is not None
    else:
        raise _not_a_write(type(statement).__name__)
    if returns:
        raise ConfigurationError(
            "the statement of a RowUnit returns rows, which submit cannot give back",
            next_step="leave out RETURNING, or submit a function, which can return them",
        )


def _not_a_write(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the statement of a RowUnit is {what}",
        next_step="give insert(), update() or delete(), or one of them as text(); submit a function for anything else",
    )


def _rows_of(
    parameters: Mapping[str, object] | Sequence[Mapping[str, object]] | None,
) -> Sequence[Mapping[str, object]]:
    if parameters is None:
        return ({},)
    rows = [dict(row) for row in ([parameters] if isinstance(parameters, Mapping) else parameters)]
    if not rows:
        raise ConfigurationError("a RowUnit has an empty sequence of parameters", next_step="give at least one mapping")
    if any(row.keys() != rows[0].keys() for row in rows):
        raise ConfigurationError(
            "the rows of a RowUnit have parameters of different names", next_step="give each row the same names"
        )
    return rows


logger = logging.getLogger(__name__)


class Task(Protocol):
    """A unit's work, and the caller waiting for its result. ``rows`` is the unit, if it is one of rows."""

    rows: RowUnit | None

    def begin(self) -> bool:
        """Note that the work begins. Returns False if the caller has given it up, or its time is over.

        After True neither can happen until :meth:`rest`. Do not call it again after False.
        """
        ...

    def rest(self, error: BaseException | None) -> None:
        """Note that the work has not begun, or runs again later: until then it may be given up.

        ``error`` is the run's error; None if it has not begun.
        """
        ...

    def succeed(self, result: Any) -> None:
        """Complete the caller's future with the result."""
        ...

    def fail(self, error: BaseException) -> None:
        """Complete the caller's future with the error."""
        ...


Answer = Callable[[], None]


def closed_error(name: str) -> IllegalStateError:
    """The error of a unit that a closed writer will not run."""
    return IllegalStateError("the writer was closed before the unit began; nothing was written", transactional_id=name)


def answer_all(answers: Iterable[Answer]) -> None:
    """Tell the callers. If a callback raises, ``SystemExit`` for example, this raises it once all others have their answers."""
    raised: BaseException | None = None
    for tell in answers:
        try:
            tell()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised = raised or error
    if raised is not None:
        raise raised


def fail_left(units: Iterable[Unit[Any]], name: str) -> None:
    """Fail units that a closed writer never ran or will not rerun."""
    answer_all([_failed(unit, closed_error(name)) for unit in units if unit.work.begin()])


def late_error(name: str, within_s: float) -> Unavailable:
    """The error of a unit that has not begun in the time that its caller gave it."""
    return Unavailable(
        f"the unit has not begun within {within_s:g} s: nothing of it was written, and it will not run",
        transactional_id=name,
        next_step="submit it again later; see the writer's health() for what the units before it wait for",
    )


def check_within(within_s: float | None) -> None:
    """Refuse a time within which no unit can begin, or for which no thread can wait."""
    if within_s is not None:
        check_seconds("within_s", within_s)


class Expiry:
    """When a unit may no longer begin, and the error that its caller gets then. The same for threads and tasks."""

    def __init__(self, name: str, within_s: float | None) -> None:
        self.until = None if within_s is None else Deadline(within_s)
        self._name = name
        self._within_s = within_s or 0.0
        self._last: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self.until is not None and self.until.expired

    def note(self, error: BaseException | None) -> None:
        """Note how a run has failed, or None if it has not begun."""
        self._last = error or self._last

    def error(self) -> BaseException:
        """The error of the last run; if there was none, that the unit has not begun in time."""
        return late_error(self._name, self._within_s) if self._last is None else copied(self._last)


class NothingKept(Exception):
    """Leaves the block of a group without a unit to commit: both sides abort."""


class GroupRun:
    """Notes how the units of one group end, and derives what follows.

    ``taken`` are the units in the order in which they run. After the end, ``again`` are the units for a later group, in their
    order, and ``resting`` those among them that must wait, for a server or after a conflict. ``failures`` says how often these
    have failed; 0 if there are none.
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
        """How many units are done, and will commit."""
        return len(self._results)

    def begins(self, unit: Unit[Any]) -> bool:
        """Note that a unit is about to begin, unless its caller has given it up, or a unit with its key must come first."""
        if unit.key in self._postponed or unit in self._dropped:
            return False
        if unit not in self._begun:
            if not unit.work.begin():
                self._dropped.add(unit)
                return False
            self._begun.add(unit)
        return True

    def has_run(self, unit: Unit[Any], error: BaseException | None) -> None:
        """Note that a unit's work has run, and its error, if any: the cause if the group ends before :meth:`ended`."""
        self._running, self._raised = unit, error
        self._ran.add(unit)

    def have_run(self, units: Iterable[Unit[Any]]) -> None:
        """Note that units have run as one. If the group ends, any of them may be the cause."""
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
        """Leave the block, with `NothingKept`, if no unit will commit."""
        if not self._results:
            raise NothingKept

    def committed(self) -> Sequence[Answer]:
        """Note that the group has committed. Returns what to tell the callers."""
        answers: list[Answer] = []
        again = []
        for unit in self.taken:
            if unit in self._results:
                answers.append(_succeeded(unit, self._results[unit]))
            elif unit in self._errors:
                error = self._errors[unit]
                unit.failures += 1
                if after_unit(error, unit.failures) is Fate.FAIL:
                    answers.append(_failed(unit, error))
                else:
                    self._let_rest(unit)
                    unit.work.rest(error)
                    again.append(unit)
            elif unit not in self._dropped:
                unit.work.rest(None)
                again.append(unit)
        self.again = again
        return answers

    def failed(self, error: BaseException, *, aborted: bool = False) -> Sequence[Answer]:
        """Note that the group has ended with an error, which has left its block. Returns what to tell the callers.

        ``aborted`` says that both sides have certainly aborted, whatever the error is.
        """
        if isinstance(error, NothingKept):
            return self.committed()
        if not self._ran:  # the block could not begin: until a unit does, its caller may give it up
            self._ran = set(self.taken) - self._dropped
        answers: list[Answer] = []
        again = []
        for unit in self.taken:
            if unit in self._ran and not self._runs_again(unit, error, aborted=aborted):
                if unit in self._begun or self.begins(unit):
                    answers.append(_failed(unit, self._shown(unit, error)))
            elif unit not in self._dropped:
                unit.work.rest(error if unit in self._ran else None)
                again.append(unit)
        self.again = again
        self._log(error)
        return answers

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
        """The error for one caller. A unit's own error may be due to rows that are gone once the group is aborted."""
        if unit is self._running:
            raised = self._raised
            # It means that the unit was rolled back: true only if the group has left nothing behind.
            ours = isinstance(raised, DualWriteError) or isinstance(error, DualWriteError)
            claims_too_much = ours and not leaves_nothing(error)
            return error if raised is None or claims_too_much else raised
        if unit in self._errors and not leaves_nothing(error):
            return self._errors[unit]
        return error if len(self._ran) == 1 else copied(error)


def _succeeded(unit: Unit[Any], result: object) -> Answer:
    return lambda: unit.work.succeed(result)


def _failed(unit: Unit[Any], error: BaseException) -> Answer:
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


# A dual write divided into units: each has its own savepoint, messages and session, and is kept or dropped alone.


class Uses:
    """The uses of a unit by its code, each a block. The unit's end waits for those under way, and refuses later ones.

    A part of the unit may still run in another task or thread: its statement or message must not end up in the next unit.
    """

    def __init__(self, transactional_id: str) -> None:
        self._id = transactional_id
        self._changed = waiting.Condition()
        self._under_way = 0
        self._ended = False
        self._ended_by: object = None

    def require(self) -> None:
        """Raise `IllegalStateError` if the unit has ended."""
        if self._ended and (self._ended_by is None or self._ended_by != waiting.here().caller()):
            raise IllegalStateError(
                "the unit of work has ended, and its connection and messages with it: nothing of this call was written",
                transactional_id=self._id,
                next_step="await or join all parts of a unit before it ends: asyncio.TaskGroup does, gather does not",
            )

    def __enter__(self) -> None:
        with self._changed:
            self.require()
            self._under_way += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._under_way -= 1
            if not self._under_way:
                self._changed.notify_all()

    def end(self) -> None:
        """Refuse later uses, and wait for those under way. Only the caller may continue, until :meth:`close`."""
        with self._changed:
            self._ended = True
            while self._under_way:
                self._changed.wait()
        self._ended_by = waiting.here().caller()

    def close(self) -> None:
        """Refuse all later ones."""
        self._ended, self._ended_by = True, None


class UnitWrite(Work):
    """One unit of a dual write. ``uses`` is entered for each use of the unit; ``size`` counts the bytes of its messages."""

    def __init__(self, write: DualWrite, connection: Connection, uses: Uses) -> None:
        self._write = write
        self._connection = connection
        self.transactional_id = write.transactional_id
        self.observer = write.observer
        self.engine = write.engine
        self.refusals = Refusals()
        self._session = write.session_of_unit(connection, self.refusals.note)
        self.uses = uses
        self.size = 0
        self.dropped = False

    @property
    def state(self) -> WriteState:
        """That of its group, unless the unit was rolled back."""
        return WriteState.ABORTED if self.dropped else self._write.state

    @property
    def prepared(self) -> PreparedTxnState | None:
        return self._write.prepared

    @property
    def outbox(self) -> bool | None:
        """That of its group, unless the unit was rolled back."""
        return False if self.dropped else self._write.outbox

    def resource(self, name: str) -> Any:
        self.require_open()
        return self._write.resource(name)

    @property
    def connection(self) -> Connection:
        self.require_open()
        return self._connection

    @property
    def session(self) -> Session:
        self.require_open()
        self._write.expect_session()
        return self._session.session

    @property
    def in_savepoint(self) -> bool:
        """The unit itself is one."""
        return True

    def require_open(self) -> None:
        self.uses.require()
        self._write.require_open()

    def send(self, message: Sendable) -> None:
        """An error concerns this unit alone."""
        with self.uses:
            self._write.require_open()
            try:
                self.size += self._write.hold(message)
            except IllegalStateError:
                raise  # nothing was changed
            except DualWriteError as error:
                self.refuse(error)
                raise
        failpoints.hit("write.produced")

    def finish(self) -> None:
        """Flush its session, and release the savepoints that it has left open.

        Raises if the session continued after an error, or if the database refuses what was flushed.
        """
        if self.refusals.first is not None:
            raise_aborted(self.refusals.first, self.transactional_id, "the unit")
        self._session.flush()
        while (nested := self._connection.get_nested_transaction()) is not None:
            nested.commit()

    def close(self) -> None:
        """Close its session; its objects stay readable. Never raises: the connection may be lost, or refused to a late part."""
        with suppress(exc.SQLAlchemyError, IllegalStateError):
            self._session.close()


class Divided:
    """Begins and ends the units of one dual write, one at a time, inside the block of the dual write."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._write = cast("DualWrite", write_of(transaction))
        self._unit: UnitWrite | None = None
        self._kept_size = 0

    @property
    def size(self) -> int:
        """The size in bytes of the messages of all kept units and of the current one."""
        return self._kept_size + (0 if self._unit is None else self._unit.size)

    @property
    def _savepoints(self) -> SavepointWatch:
        savepoints = self._write.savepoints
        assert savepoints is not None
        return savepoints

    def begin(self) -> Transaction:
        """Begin a unit, and return its transaction. A `DualWriteError` says that the group cannot continue."""
        uses = Uses(self._write.transactional_id)
        self._unit = UnitWrite(self._write, self._savepoints.open_unit(uses), uses)
        failpoints.hit("group.unit_begun")
        return unit_of(self._transaction, self._unit)

    def work_ended(self) -> None:
        """Let the unit do nothing more, not even in parts that continue. Then make sure that its savepoint was opened.

        Without a savepoint, its errors concern the whole group. A `DualWriteError` says that the group cannot continue.
        """
        assert self._unit is not None
        self._unit.uses.end()
        self._savepoints.require_unit()

    def end(self, error: BaseException | None) -> BaseException | None:
        """End the unit: keep it, or roll it back if its work has failed.

        Returns its error, or None if it is kept. A `DualWriteError` says that the group cannot continue.
        """
        unit, self._unit = self._unit, None
        assert unit is not None
        if error is None:
            error = self._kept(unit)
        if error is not None:
            unit.dropped = True
            unit.close()
            unit.uses.close()
            self._savepoints.drop_unit()
            failpoints.hit("group.unit_dropped")
            return named(error, unit.transactional_id)
        unit.close()
        unit.uses.close()
        self._kept_size += unit.size
        failpoints.hit("group.unit_kept")
        return None

    def give_up(self) -> None:
        """Leave the current unit, if any, as it is: the group ends with an error. Never raises."""
        if self._unit is not None:
            self._unit.uses.close()

    def _kept(self, unit: UnitWrite) -> BaseException | None:
        try:
            unit.finish()
        except Exception as error:  # noqa: BLE001 - becomes the unit's own
            return error
        reason = self._savepoints.keep_unit()
        if reason is None:
            return None
        return TransactionAborted(
            reason,
            transactional_id=unit.transactional_id,
            next_step="after a failed statement, stop; or run it in a savepoint (begin_nested)",
            retryable=False,
        )


def named(error: BaseException, transactional_id: str) -> BaseException:
    """The error a block would raise: conflicts are mapped to ``TransactionAborted``."""
    if isinstance(error, Exception) and (conflict := conflict_behind(error, transactional_id)) is not None:
        conflict.__cause__ = error
        return conflict
    return error
