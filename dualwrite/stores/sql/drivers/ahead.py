"""A statement sent ahead of the next one, by psycopg's pipeline: the server answers both after one round trip."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, Pipeline


class Ahead:
    """A statement that is sent ahead of another one.

    Attributes:
        statement: The statement.
        sent: Whether it was sent: only cursors that the driver's connection makes do so.
        failed: Whether the server has not executed it, although both were sent.
    """

    def __init__(self, statement: str) -> None:
        self.statement: Final = statement
        self.sent = False
        self.failed = False


class _Cursor(Cursor[Any]):
    """Sends the statement with that of its first caller. SQLAlchemy sees an ordinary cursor, in its events and errors too."""

    def __init__(self, connection: Connection[Any], *, ahead: Ahead, **options: Any) -> None:
        super().__init__(connection, **options)
        self._ahead = ahead

    def execute(self, *arguments: Any, **options: Any) -> _Cursor:
        """See psycopg."""
        first = Cursor(self.connection)
        try:
            with self.connection.pipeline():
                first.execute(self._ahead.statement, prepare=False)
                super().execute(*arguments, **options)
        finally:
            self._ahead.sent, self._ahead.failed = True, first.pgresult is None
        return self


class _AsyncCursor(AsyncCursor[Any]):
    """The same for an asynchronous connection."""

    def __init__(self, connection: AsyncConnection[Any], *, ahead: Ahead, **options: Any) -> None:
        super().__init__(connection, **options)
        self._ahead = ahead

    async def execute(self, *arguments: Any, **options: Any) -> _AsyncCursor:
        """See psycopg."""
        first = AsyncCursor(self.connection)
        try:
            async with self.connection.pipeline():
                await first.execute(self._ahead.statement, prepare=False)
                await super().execute(*arguments, **options)
        finally:
            self._ahead.sent, self._ahead.failed = True, first.pgresult is None
        return self


_CURSORS: Final[dict[object, type[Cursor[Any] | AsyncCursor[Any]]]] = {Cursor: _Cursor, AsyncCursor: _AsyncCursor}


def is_possible(driver: Any) -> bool:
    """Whether this connection can: its libpq knows pipelines (14 and newer), and its owner has not chosen other cursors."""
    return driver.cursor_factory in _CURSORS and Pipeline.is_supported()


@contextmanager
def sent_ahead(driver: Any, statement: str) -> Generator[Ahead, None, None]:
    """Send this statement with the one that SQLAlchemy executes in the block."""
    ahead, usual = Ahead(statement), driver.cursor_factory
    driver.cursor_factory = partial(_CURSORS[usual], ahead=ahead)
    try:
        yield ahead
    finally:
        driver.cursor_factory = usual
