"""Work that a writer runs: in a dual write of its own, and again after an error; or as one unit of a group.

It runs again only after errors that left nothing behind on either side. :mod:`dualwrite.writing.group_commit` runs units.
"""

from __future__ import annotations

import inspect
import logging
import random
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar, overload

from dualwrite.clock import pause
from dualwrite.errors import ConfigurationError, DualWriteError, IllegalStateError
from dualwrite.interfaces import SQL, Traits
from dualwrite.protocol.process import Redo, redo_after
from dualwrite.writing import transaction as entered

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Connection
    from tenacity import RetryCallState
    from tenacity.retry import RetryBaseT
    from tenacity.stop import StopBaseT
    from tenacity.wait import WaitBaseT

    from dualwrite.protocol.outbox import Outbox
    from dualwrite.stores.sql.adopted import DjangoConnection
    from dualwrite.writing.group_commit import Groups
    from dualwrite.writing.lane_pool import Lanes
    from dualwrite.writing.transaction import Transaction
    from dualwrite.writing.units_of_work import RowUnit

logger = logging.getLogger(__name__)

Given = TypeVar("Given")
Result = TypeVar("Result")
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0


class _Rules(TypedDict):
    retry: RetryBaseT
    stop: StopBaseT
    wait: WaitBaseT
    before_sleep: Callable[[RetryCallState], None]
    reraise: bool


@dataclass(frozen=True)
class Patience:
    """How often and for how long to try. No attempt begins later than ``within_s`` after the first one."""

    attempts: int
    within_s: float | None
    longest_pause_s: float

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigurationError(f"attempts is {self.attempts}; it must be at least 1")


class Attempts:
    """The attempts at one piece of work: judges, logs and remembers their errors. The caller makes them."""

    def __init__(self, name: str, patience: Patience) -> None:
        self._name = name
        self._patience = patience
        self._failed: list[str] = []

    def rules(self) -> _Rules:
        """The parameters of ``tenacity.Retrying`` and ``AsyncRetrying``. The pauses have full jitter."""
        from tenacity import (  # noqa: PLC0415 - loaded with the first run(): many writers only have blocks
            retry_if_exception,
            stop_after_attempt,
            stop_any,
            stop_before_delay,
            wait_random_exponential,
        )

        limit = stop_after_attempt(self._patience.attempts)
        within_s = self._patience.within_s
        return {
            "retry": retry_if_exception(lambda error: redo_after(error) is Redo.AGAIN),
            "stop": limit if within_s is None else stop_any(limit, stop_before_delay(within_s)),
            "wait": wait_random_exponential(multiplier=_FIRST_PAUSE_S, max=self._patience.longest_pause_s),
            "before_sleep": self._note_failed,
            "reraise": True,
        }

    def note_success(self) -> None:
        """Log that the last attempt has committed both sides."""
        self._log(logging.INFO if self._failed else logging.DEBUG, "committed both sides", outcome="committed")

    def note_end(self, error: BaseException) -> None:
        """Log the error that ends the attempts, and add the earlier ones to it as notes."""
        level = logging.INFO if redo_after(error) is Redo.FOREIGN else logging.WARNING
        self._log(level, f"{_shown(error)}; not run again: {self._reason(error)}", outcome=_outcome(error))
        for note in self._failed:
            _add_note(error, note)

    def _note_failed(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        assert error is not None
        pause_s = state.upcoming_sleep
        self._log(logging.INFO, f"{_shown(error)}; run again in {pause_s:.3f} s", outcome=_outcome(error))
        self._failed.append(f"attempt {self._number} of {self._patience.attempts}: {_shown(error)}")

    @property
    def _number(self) -> int:
        return len(self._failed) + 1

    def _reason(self, error: BaseException) -> str:
        advice = redo_after(error)
        if advice is not Redo.AGAIN:
            return str(advice.value)
        if self._number >= self._patience.attempts:
            return "it was the last attempt"
        return f"the next attempt would begin later than {self._patience.within_s:g} s after the first"

    def _log(self, level: int, text: str, *, outcome: str) -> None:
        extra = {
            "dualwrite_event": "attempt",
            "dualwrite_transactional_id": self._name,
            "dualwrite_attempt": self._number,
            "dualwrite_outcome": outcome,
        }
        logger.log(
            level, "%s: attempt %d of %d: %s", self._name, self._number, self._patience.attempts, text, extra=extra
        )


def run_again(
    block: Callable[[], AbstractContextManager[Given]],
    work: Callable[[Given], Result],
    name: str,
    patience: Patience,
) -> Result:
    """Make attempts until one commits both sides, or no further one is allowed.

    ``block`` returns the block of a new dual write, and ``work`` is called with the transaction of each. The error of the last
    attempt is raised; its notes name those of the earlier ones.
    """
    from tenacity import Retrying  # noqa: PLC0415 - as above

    def attempt() -> Result:
        with block() as given:
            result = work(given)
            refuse_not_run(result, name)
        return result

    attempts = Attempts(name, patience)
    try:
        result: Result = Retrying(sleep=pause, **attempts.rules())(attempt)
    except BaseException as error:
        attempts.note_end(error)
        raise
    attempts.note_success()
    return result


def pause_after_s(failures: int) -> float:
    """The pause after so many failures, in seconds, by the rule of :func:`run_again`, for attempts made elsewhere."""
    return 0.0 if not failures else random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**failures))  # noqa: S311 - no secret


def refuse_not_run(result: object, name: str) -> None:
    """Refuse the result of a coroutine or generator function: none of it has run, so an empty dual write would commit."""
    if not is_not_run(result):
        return
    raise IllegalStateError(
        f"the work is {'asynchronous' if inspect.isawaitable(result) else 'a generator'}: none of it has run",
        transactional_id=name,
        next_step="give a plain function, and call run() in a thread (asyncio.to_thread)",
    )


def is_not_run(result: object) -> bool:
    """Whether this is the result of a coroutine or generator function, which has not run. Closes a coroutine."""
    if inspect.iscoroutine(result):
        result.close()
    if inspect.isgenerator(result):
        # Not a generator expression, which may be a result of work that has run.
        return result.gi_code.co_name != "<genexpr>"
    return inspect.isasyncgen(result) or inspect.isawaitable(result)


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, DualWriteError) else type(error).__name__


def _outcome(error: BaseException) -> str:
    if isinstance(error, DualWriteError):
        return error.outcome
    return "aborted" if isinstance(error, Exception) else "unknown"  # an interruption may come after the decision


def _add_note(error: BaseException, note: str) -> None:
    """As ``error.add_note``, which Python has since 3.11; tracebacks of 3.10 do not show it."""
    vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), note]


RUNNERS: Final = 2
"""While one group commits, the next one runs."""


def runners_for(traits: Traits, max_lanes: int) -> int:
    """How many groups a writer may have at a time: on SQLite one, because there is one write lock."""
    return min(RUNNERS, max_lanes, traits.blocks or RUNNERS)


# `run` and `submit`: the ways to give a writer work, besides its blocks.


class Submitting:
    """The part of a writer that runs work. The writer sets its attributes."""

    transactional_id: str
    _lanes: Lanes
    _traits: Traits = SQL
    _making_groups: threading.Lock  # the writer's own: a fork copies a lock that another thread holds
    _made_groups: Groups | None = None
    _takes_units = True

    @property
    def _groups(self) -> Groups:
        """Made with the first unit: group commit is large, and many writers never use it."""
        if (made := self._made_groups) is not None:
            return made
        with self._making_groups:
            if self._made_groups is None:
                self._made_groups = self._make_groups()
                if not self._takes_units:
                    self._made_groups.close(0.0)
            return self._made_groups

    def _make_groups(self) -> Groups:
        raise NotImplementedError

    def _close_groups(self, within_s: float) -> None:
        """Finish the waiting units, and refuse new ones: see :meth:`Groups.close`."""
        with self._making_groups:
            self._takes_units = False
            made = self._made_groups
        if made is not None:
            made.close(within_s)

    def run(
        self,
        work: Callable[[Transaction], Result],
        *,
        attempts: int = 5,
        within_s: float | None = None,
        longest_pause_s: float = 5.0,
        connection: Connection | psycopg.Connection[object] | DjangoConnection | None = None,
        outbox: Outbox | None = None,
    ) -> Result:
        """Run the work in a dual write, and again in a new one after an error that left nothing behind on either side.

        It runs again after `TransactionAborted` with ``retryable`` (which includes deadlocks and serialization failures of the
        work's own statements and of COMMIT), after `Unavailable` while nothing was decided, and while the database is a standby
        or read-only, as during a failover. It never runs again after an error that leaves a side in doubt or committed, or
        after an exception of the work itself. The pauses between attempts are random and grow. The log names each attempt with
        its outcome.

        Args:
            work: Called with the transaction, once for each attempt. Each attempt repeats everything, including reads, and what
                the work does elsewhere.
            attempts: The maximum number of attempts.
            within_s: No attempt begins later than this after the call; None sets no limit. In seconds.
            longest_pause_s: The longest pause between two attempts, in seconds.
            connection: As for :meth:`transaction`.
            outbox: As for :meth:`transaction`.

        Returns:
            The result of the attempt that has committed. Both sides are durable, as after :meth:`transaction`.

        Raises:
            DualWriteError: As :meth:`transaction`, from the last attempt. Notes on the error name the earlier attempts.
            ConfigurationError: An argument cannot work.
            IllegalStateError: Also if the work is asynchronous, or a generator.

        Every exception of the work is passed on unchanged, after the abort of both sides.
        """
        patience = Patience(attempts, within_s, longest_pause_s)
        return run_again(lambda: self.transaction(connection, outbox=outbox), work, self.transactional_id, patience)

    @overload
    def submit(self, work: RowUnit, *, key: Hashable | None = None, within_s: float | None = None) -> Future[None]: ...

    @overload
    def submit(
        self, work: Callable[[Transaction], Result], *, key: Hashable | None = None, within_s: float | None = None
    ) -> Future[Result]: ...

    def submit(
        self,
        work: Callable[[Transaction], Result] | RowUnit,
        *,
        key: Hashable | None = None,
        within_s: float | None = None,
    ) -> Future[Result] | Future[None]:
        """Run the work as one unit of a group: units of many callers commit in one dual write. Returns at once.

        Only if `WriterLimits.waiting_units` units wait already does it wait for a place, first come, first served.

        A group begins as soon as the previous one has run its units, with those that wait then. So a single caller waits for
        nobody, and many callers share the cost of a commit. Each unit runs in a savepoint of its own, in a thread of the
        writer, with the context variables of its caller. A unit that is alone runs without a savepoint and, if a thread waits
        for its result without a timeout, in that thread. A unit that raises is rolled back alone: its rows are gone, its
        messages are never sent, and the others commit.

        A unit may run up to five times, by the rule of :meth:`run`: again after a conflict of its own, and when its group was
        aborted on both sides. What it does elsewhere happens in each run. It never runs again after an error that leaves a side
        in doubt or committed.

        A group is one block, so the writer's ``outbox`` holds for all its units.

        Args:
            work: Called with a transaction, as the body of a block of :meth:`transaction`. It may neither commit nor roll back
                the transaction of its group. Or a `RowUnit`: rows and messages as data, which is several times as fast with
                many callers; its result is None.
            key: Units with the same key run and commit in the order of the calls. By default, the units of one thread do.
            within_s: No run begins later than this after the call, in seconds: then the future fails at once, with
                `Unavailable` or the error of the last run. A run that has begun ends with its group. None sets no limit.

        Returns:
            The future of the result. It is done once both sides are durable, or once it is certain that they never will be.
            ``cancel()`` works until the unit begins. A cancelled unit never runs. A unit whose caller has only stopped waiting
            (``result(timeout=...)``) still runs: cancel it, or give ``within_s``.

            Its exception is what the work raised; or, for every unit of a failed group, the error that :meth:`transaction`
            would raise: after `TransactionInDoubt` and `CompletionPending` do not submit the work again. If a unit has lost the
            database connection or rolled back the transaction, it fails, and the others run again.

        Raises:
            IllegalStateError: The writer is not open; or this thread is inside a transaction or a unit of this writer, which
                would wait for itself; or the work is a `RowUnit`, and the database is not a SQL database.
            Unavailable: No place was free within ``lane_timeout_s``; or none is free, and the caller must not wait, because its
                thread runs an event loop or a callback of a future of this writer. The work will not run.
            ConfigurationError: ``within_s`` is not positive, or longer than a hundred years.
        """
        self._require_open()
        entered.refuse_nested(self._lanes, self.transactional_id)
        if self._traits.gives != SQL.gives:
            self._refuse_rows(work)
        return self._groups.submit(work, key, within_s)

    def _refuse_rows(self, work: Callable[[Transaction], object] | RowUnit) -> None:
        from dualwrite.writing.units_of_work import RowUnit  # noqa: PLC0415 - it is loaded with the first unit

        if isinstance(work, RowUnit):
            raise IllegalStateError(
                f"a RowUnit writes rows of SQL, and this writer's database is {self._traits.name}",
                transactional_id=self.transactional_id,
                next_step=f"submit a function instead, which has tx.{self._traits.gives}",
            )

    def transaction(
        self,
        connection: Connection | psycopg.Connection[object] | DjangoConnection | None = None,
        *,
        outbox: Outbox | None = None,
    ) -> AbstractContextManager[Transaction]:
        """A block around one dual write."""
        raise NotImplementedError

    def _require_open(self) -> None:
        raise NotImplementedError
