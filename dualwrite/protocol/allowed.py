"""The rules for durations, ids and prefixes that callers give: the same for the Python calls and for the commands.

A script passes an empty id or prefix when a variable is unset, and NaN when a computation has failed. Every id begins with the
empty prefix, and no comparison with NaN is true: both would select what nobody has asked for.
"""

from __future__ import annotations

import math
from typing import Final

from dualwrite.errors import ConfigurationError

LONGEST_S: Final = 100 * 365 * 86400.0
"""A hundred years: more than threads can wait, and databases subtract from a time."""
_LONGEST_NAME: Final = 240  # leaves room for a lane's number


def check_seconds(name: str, seconds: float, *, zero: bool = False) -> None:
    """Refuse a duration that is no time: NaN, infinite, negative.

    Args:
        name: The argument's name, for the message.
        seconds: The duration.
        zero: Whether it may be 0.

    Raises:
        ConfigurationError: It cannot be used.
    """
    if not math.isfinite(seconds) or not 0 <= seconds <= LONGEST_S or (seconds == 0 and not zero):
        raise ConfigurationError(
            f"{name} is {seconds:g} s",
            next_step=f"give {'0 or more' if zero else 'more than 0'} seconds, and at most {LONGEST_S:g}, a hundred years",
        )


def check_not_empty(name: str, given: str, instead: str = "") -> None:
    """Refuse an empty text.

    Args:
        name: What it is, for the message.
        given: The text.
        instead: How to ask for what the empty text may have meant.

    Raises:
        ConfigurationError: It is empty.
    """
    if not given:
        raise ConfigurationError(f"{name} is empty", next_step=f"give one{instead}: an unset variable selects nothing")


def check_selection(transactional_id: str | None, prefix: str | None) -> None:
    """Refuse a selection of ids that is not an id, a prefix, or neither of the two, which selects every id.

    Raises:
        ConfigurationError: The id or the prefix is empty.
        TypeError: Both are given.
    """
    if transactional_id is not None and prefix is not None:
        raise TypeError("transactional_id and prefix cannot be combined")
    if transactional_id is not None:
        check_not_empty("the transactional id", transactional_id)
    if prefix is not None:
        check_not_empty("the prefix", prefix, ", or none at all (--all) for every id")


def check_writer(transactional_id: str, max_lanes: int) -> None:
    """Refuse a name or a number of lanes that no writer can have.

    Raises:
        ConfigurationError: It cannot.
    """
    if not 1 <= len(transactional_id) <= _LONGEST_NAME or "#" in transactional_id:
        raise ConfigurationError(
            f"{transactional_id!r} cannot be a transactional id",
            next_step=f"use 1 to {_LONGEST_NAME} characters without '#', which separates the numbers of lanes",
        )
    if max_lanes < 1:
        raise ConfigurationError(f"max_lanes is {max_lanes}; it must be at least 1", transactional_id=transactional_id)
