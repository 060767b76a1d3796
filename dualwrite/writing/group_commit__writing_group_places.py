"""Waiting for a place among the units that wait: which callers may, and the error of those that get none."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from dualwrite.errors import Unavailable
from dualwrite.writing import transaction__writing_entered

if TYPE_CHECKING:
    from dualwrite.protocol.values__protocol_allowed import WriterLimits

_running: Final[ContextVar[tuple[object, int] | None]] = ContextVar("dualwrite_running_groups", default=None)
"""The groups that this code runs, and its thread; callbacks of futures run there, too. Units have their caller's context."""


def note_running(groups: object) -> None:
    """Note that this thread runs a group of these, in this context."""
    _running.set((groups, threading.get_ident()))


def may_wait(groups: object) -> bool:
    """Whether the caller may wait for a place. Not if all units would wait with it, or all tasks of an event loop.

    Args:
        groups: Those that it waits for.
    """
    return _running.get() != (groups, threading.get_ident()) and not transaction__writing_entered.would_block_a_loop()


def full_error(name: str, limits: WriterLimits, *, waited: bool) -> Unavailable:
    """The error of a unit for which there was no place.

    Args:
        name: The writer's transactional id.
        limits: They say how many units may wait.
        waited: Whether its caller has waited for a place.
    """
    why = (
        "none has left its place in time"
        if waited
        else "a thread that runs an event loop or a group must not wait for one"
    )
    return Unavailable(
        f"the queue of units is full (limit {limits.waiting_units}); {why}",
        transactional_id=name,
        next_step="submit it again later; wait for results before you submit more, or raise WriterLimits(waiting_units=...)",
    )
