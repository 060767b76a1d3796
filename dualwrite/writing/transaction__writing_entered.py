"""Tracks the blocks that this thread or task is inside of, to refuse a block inside another of the same writer.

Each entry is noted in the context (:mod:`contextvars`) together with its thread or task: a web framework enters a
block in one thread and leaves it in another, each in a copy of the request's context. Entries need not be removed: a block that
has ended no longer counts, wherever and however it ended.
"""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final

from dualwrite.errors import IllegalStateError
from dualwrite.waiting import blocks_a_loop, here
from dualwrite.writing.fair_queue import Ticket

_Entered = tuple[int, object, "weakref.ref[Ticket[Any]]"]
Blocks = Sequence[_Entered]
"""The blocks that a thread or task is inside of."""

_entered: Final[ContextVar[tuple[_Entered, ...]]] = ContextVar("dualwrite_entered", default=())
"""For each block: the identity of its writer and of its thread or task, and the ticket that holds its lane."""


def would_block_a_loop() -> bool:
    """Whether the caller would block an event loop of the application if it waited; see :func:`refuse_blocking_a_loop`."""
    return blocks_a_loop() and not hasattr(builtins, "__IPYTHON__")


def refuse_blocking_a_loop(transactional_id: str) -> None:
    """Raise if the caller would block an event loop: all of its tasks would stand still, perhaps forever.

    Two tasks that wait for one another's rows are an example: the one that could continue never gets its turn. A notebook runs
    its cells in an event loop, where nothing else of the application runs.

    Raises:
        IllegalStateError: It would.
    """
    if would_block_a_loop():
        raise IllegalStateError(
            "a DualWriter blocks its thread, and this one runs an event loop",
            transactional_id=transactional_id,
            next_step="use AsyncDualWriter and `async with`, or run the block in a thread: await asyncio.to_thread(...)",
        )


def refuse_nested(writer: object, transactional_id: str) -> None:
    """Raise if this thread or task is inside a block of that writer: the two could wait for each other, and would commit apart.

    Raises:
        IllegalStateError: It is.
    """
    entering = (id(writer), here().caller)
    if any((of, caller) == entering for of, caller, _ in _open()):
        raise IllegalStateError(
            f"this {'thread' if isinstance(entering[1], int) else 'task'} is already inside a transaction of this writer",
            transactional_id=transactional_id,
            next_step="a dual write cannot be nested: use connection.begin_nested() for a savepoint",
        )


def enter(writer: object, ticket: Ticket[Any]) -> None:
    """Note that this thread or task enters a block of that writer. The block lasts until the ticket has ended."""
    _entered.set((*_open(), (id(writer), here().caller, weakref.ref(ticket))))


def entered_here() -> Blocks:
    """The open blocks that this thread or task is inside of, for :func:`go_on_inside`."""
    return _open()


def go_on_inside(blocks: Blocks, task: object = None) -> None:
    """Note that work in another context is done inside these blocks, by this thread or by the given task."""
    caller = here().caller if task is None else task
    _entered.set((*_open(), *((of, caller, ticket) for of, _, ticket in blocks)))


def _open() -> tuple[_Entered, ...]:
    return tuple(one for one in _entered.get() if (ticket := one[2]()) is not None and not ticket.ended)
