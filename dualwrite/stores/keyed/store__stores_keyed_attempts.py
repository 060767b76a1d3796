"""Retries an attempt whose input changed underneath it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from tenacity import Retrying, retry_if_exception_type, wait_random_exponential

from dualwrite.clock import Deadline, pause
from dualwrite.errors import Unavailable

Result = TypeVar("Result")
_WITHIN_S: Final = 30.0


class Conflict(Exception):
    """A key had changed since it was read: nothing was written."""


def until_unchanged(attempt: Callable[[], Result], deadline: Deadline | None = None) -> Result:
    """Run the attempt until it ends without a conflict.

    Args:
        attempt: Reads, computes and writes. After a conflict it runs again from the start, so it must have no other effect.
        deadline: No attempt begins later than this; half a minute if not given.

    Raises:
        Unavailable: The conflicts did not end.
    """
    until = deadline or Deadline(_WITHIN_S)
    retrying = Retrying(
        retry=retry_if_exception_type(Conflict),
        stop=lambda _: until.expired,
        wait=wait_random_exponential(multiplier=0.005, max=0.25),
        sleep=lambda seconds: pause(min(seconds, until.remaining_s())),
        reraise=True,
    )
    try:
        result: Result = retrying(attempt)
    except Conflict as error:
        raise Unavailable("other processes keep changing the same rows", next_step="try again") from error
    return result
