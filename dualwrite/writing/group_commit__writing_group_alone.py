"""The future of a unit: the thread that waits for it may run the unit, if it is alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class UnitFuture(Future[Result]):
    """The future of a unit. A thread that waits for it without a timeout may run the unit itself.

    Args:
        run_here: Runs the unit in this thread, if nothing else is to run with it or before it.
    """

    def __init__(self, run_here: Callable[[Future[Any]], None]) -> None:
        super().__init__()
        self._run_here = run_here

    def result(self, timeout: float | None = None) -> Result:
        """See :meth:`concurrent.futures.Future.result`."""
        self._make_progress(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See :meth:`concurrent.futures.Future.exception`."""
        self._make_progress(timeout)
        return super().exception(timeout)

    def _make_progress(self, timeout: float | None) -> None:
        if timeout is None and not self.done():
            self._run_here(self)
