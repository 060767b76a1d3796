"""Tracks the blocks that this thread is inside of, to refuse a block inside another of the same writer.

Each entry is noted in the context (:mod:`contextvars`) together with its thread: a web framework enters a block in one thread
and leaves it in another, each in a copy of the request's context. Entries need not be removed: a block that has ended no
longer counts, wherever and however it ended.
"""

from __future__ import annotations

import threading
import weakref
from contextvars import ContextVar
from typing import Any, Final

from dualwrite.errors import IllegalStateError
from dualwrite.writing.lanes.turns import Ticket

_Entered = tuple[int, int, "weakref.ref[Ticket[Any]]"]

_entered: Final[ContextVar[tuple[_Entered, ...]]] = ContextVar("dualwrite_entered", default=())
"""For each block: the identity of its writer and of its thread, and the ticket that holds its lane."""


def refuse_nested(writer: object, transactional_id: str) -> None:
    """Raise if this thread is inside a block of that writer: the two could wait for each other, and would commit apart.

    Raises:
        IllegalStateError: It is.
    """
    here = (id(writer), threading.get_ident())
    if any((of, thread) == here for of, thread, _ in _open()):
        raise IllegalStateError(
            "this thread is already inside a transaction of this writer",
            transactional_id=transactional_id,
            next_step="a dual write cannot be nested: use connection.begin_nested() for a savepoint",
        )


def enter(writer: object, ticket: Ticket[Any]) -> None:
    """Note that this thread enters a block of that writer. The block lasts until the ticket has ended."""
    _entered.set((*_open(), (id(writer), threading.get_ident(), weakref.ref(ticket))))


def _open() -> tuple[_Entered, ...]:
    return tuple(one for one in _entered.get() if (ticket := one[2]()) is not None and not ticket.ended)
