"""Which blocks this thread is inside of, so that a block inside a block of the same writer is refused.

What is entered is noted in the context (:mod:`contextvars`), with the thread: a web framework enters a block in one thread
and leaves it in another, each in a copy of the request's context. Nothing need be taken back: a block that has ended counts
for nothing, wherever it ended, and however.
"""

from __future__ import annotations

import threading
import weakref
from contextvars import ContextVar
from typing import Any, Final

from dualwrite.errors import IllegalStateError
from dualwrite.turns import Ticket

_Entered = tuple[int, int, "weakref.ref[Ticket[Any]]"]

_entered: Final[ContextVar[tuple[_Entered, ...]]] = ContextVar("dualwrite_entered", default=())
"""Of each block: its writer's and its thread's identity, and what it holds its lane with."""


def refuse_nested(writer: object, transactional_id: str) -> None:
    """Raise where this thread is inside a block of that writer: the two could wait for each other, and commit apart.

    Raises:
        IllegalStateError: It is.
    """
    here = (id(writer), threading.get_ident())
    if any((of, thread) == here for of, thread, _ in _open()):
        raise IllegalStateError(
            "this thread is inside a transaction of this writer already",
            transactional_id=transactional_id,
            next_step="a dual write cannot be nested: use connection.begin_nested() for a savepoint",
        )


def enter(writer: object, ticket: Ticket[Any]) -> None:
    """Note that this thread enters a block of that writer, which lasts until the ticket has ended."""
    _entered.set((*_open(), (id(writer), threading.get_ident(), weakref.ref(ticket))))


def _open() -> tuple[_Entered, ...]:
    return tuple(one for one in _entered.get() if (ticket := one[2]()) is not None and not ticket.ended)
