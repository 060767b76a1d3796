"""The drivers' own connections behind those that SQLAlchemy adapts from an asynchronous driver.

Statements need none of this: on such a connection they await by themselves, in the greenlet that runs them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlalchemy import AdaptedConnection

if TYPE_CHECKING:
    import sqlite3

    from sqlalchemy.engine.interfaces import DBAPIConnection

T = TypeVar("T")


def is_awaited(driver: object) -> bool:
    """Whether this is an asynchronous driver's connection, adapted by SQLAlchemy."""
    return isinstance(driver, AdaptedConnection)


def own_connection(driver: DBAPIConnection | sqlite3.Connection) -> object:
    """The driver's own connection, synchronous or not."""
    return driver.driver_connection if isinstance(driver, AdaptedConnection) else driver


def ask(driver: object, question: Callable[[sqlite3.Connection], T]) -> T:
    """Call ``question`` with the connection of ``sqlite3``, in the one thread that may use it."""
    if not isinstance(driver, AdaptedConnection):
        return question(cast("sqlite3.Connection", driver))

    def awaitable(connection: Any) -> Awaitable[T]:
        answer: Awaitable[T] = connection._execute(lambda: question(connection._conn))  # noqa: SLF001 - no public method runs a function there
        return answer

    return driver.run_async(awaitable)
