"""Runs the work of a dual write again after errors that left nothing behind on either side."""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar

from dualwrite.clock import pause
from dualwrite.errors import ConfigurationError, DualWriteError, IllegalStateError
from dualwrite.protocol.process import Redo, redo_after

if TYPE_CHECKING:
    from tenacity import RetryCallState
    from tenacity.retry import RetryBaseT
    from tenacity.stop import StopBaseT
    from tenacity.wait import WaitBaseT

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
    """Make attempts until one commits both sides, or may not be followed by another.

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
    """The pause after so many failures before an attempt that :func:`run_again` does not make, by its rule, in seconds."""
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
    """Whether it is the result of a coroutine or generator function, which has not run. A coroutine is closed."""
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
