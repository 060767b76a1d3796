"""The rules for durations, counts, ids and prefixes that callers give: the same for the Python calls and for the commands.

A script passes an empty id or prefix when a variable is unset, and NaN when a computation has failed. Every id begins with the
empty prefix, and no comparison with NaN is true: both would select what nobody has asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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


def check_count(name: str, count: int, *, least: int = 1) -> None:
    """Refuse a number that is too small.

    Args:
        name: The argument's name, for the message.
        count: The number.
        least: The smallest one that may be given.

    Raises:
        ConfigurationError: It is smaller.
    """
    if count < least:
        raise ConfigurationError(f"{name} is {count}", next_step=f"give at least {least}")


def check_writer_name(transactional_id: str) -> None:
    """Refuse a name that no writer can have.

    Raises:
        ConfigurationError: It cannot.
    """
    if not 1 <= len(transactional_id) <= _LONGEST_NAME or "#" in transactional_id:
        raise ConfigurationError(
            f"{transactional_id!r} cannot be a transactional id",
            next_step=f"use 1 to {_LONGEST_NAME} characters without '#', which separates the numbers of lanes",
        )


@dataclass(frozen=True, kw_only=True)
class WriterLimits:
    """The times and counts of a writer. Every one has a default: give those that you change.

    A *unit* is the work of one caller of :meth:`DualWriter.submit`; a *group* is the units that commit in one dual write.

    Args:
        max_lanes: The maximum number of concurrent transactions. A consumer makes it of its ``workers``.
        timeout_s: Limits opening, and each ending of a transaction, in seconds.
        lane_timeout_s: How long a transaction waits for a free lane, and ``submit`` for a place, in seconds.
        margin_s: The time that must be left of the broker's transaction timeout once the database has committed, in seconds; on
            PostgreSQL also the longest pause between the decision and its COMMIT.
        idle_after_s: After this time without a transaction the row records that its last one is complete, in seconds.
        paused_owner_timeout_s: An owner that is paused inside a transaction loses its PostgreSQL session after this time, so
            that it does not hold its row forever; None leaves the server's own setting. In seconds.
        group_units: The maximum number of units in a group. PostgreSQL keeps up to 64 savepoints of a transaction in shared
            memory; more of them slow down every query that meets their rows before the commit.
        group_open_s: No unit begins later than this after the group's first one; the others wait for the next group. So the
            first unit waits for the others no longer than this and the last unit take. A group never waits for units.
        group_bytes: No unit begins once the messages of the group are larger than this: their keys and values, in bytes.
        waiting_units: The maximum number of units that wait for a group. At that number ``submit`` lets its caller wait, first
            come, first served.

    Raises:
        ConfigurationError: A limit cannot work.
    """

    max_lanes: int = 8
    timeout_s: float = 60.0
    lane_timeout_s: float = 30.0
    margin_s: float = 10.0
    idle_after_s: float = 60.0
    paused_owner_timeout_s: float | None = 60.0
    group_units: int = 64
    group_open_s: float = 0.25
    group_bytes: int = 16 * 1024 * 1024
    waiting_units: int = 10_000

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        if self.paused_owner_timeout_s is not None:
            check_seconds("paused_owner_timeout_s", self.paused_owner_timeout_s)
        # At 0 s the others still mean something: do not wait, need no margin, record at once, no second unit.
        for name in ("lane_timeout_s", "margin_s", "idle_after_s", "group_open_s"):
            check_seconds(name, getattr(self, name), zero=True)
        for name in ("max_lanes", "group_units", "waiting_units"):
            check_count(name, getattr(self, name))
        check_count("group_bytes", self.group_bytes, least=0)


DEFAULT_LIMITS: Final = WriterLimits()
