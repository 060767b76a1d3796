"""Detects statements sent past SQLAlchemy, and rollbacks to savepoints among them.

A *witness* is a number that the database keeps in the open transaction. A rollback to a savepoint reverts it like a
row, whichever code sends the rollback, and by whichever route.
"""

from __future__ import annotations

import secrets
import sqlite3
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from sqlalchemy import exc, text
from sqlalchemy.util import await_only

from dualwrite.errors import IllegalStateError
from dualwrite.stores.sql.drivers.awaited import is_awaited

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator, Sequence

    from sqlalchemy import Connection

_ACTIVE: Final = 1
_DONE: Final = frozenset({1, 2})  # COMMAND_OK, TUPLES_OK


class Witness(Protocol):
    """The witness of one dual write."""

    @property
    def doubtful(self) -> bool:
        """Whether a statement may have run past SQLAlchemy since the last :meth:`keep`."""
        ...

    def expect(self, *, many: bool) -> None:
        """Note that SQLAlchemy is about to execute a statement, perhaps many times."""
        ...

    def seen(self) -> None:
        """Note that SQLAlchemy has executed the statement."""
        ...

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        """Store the number in place of the known one (0: none). Returns False if the database shows another one.

        Raises:
            IllegalStateError: The connection is busy with a COPY, or a pipeline.
            SQLAlchemyError: The database failed.
        """
        ...

    def shows(self, connection: Connection, number: int) -> bool:
        """Whether the database shows that number.

        Raises:
            SQLAlchemyError: The database failed.
        """
        ...

    def execute(
        self, connection: Connection, statements: Sequence[str], number: int | None, *, later: bool = False
    ) -> None:
        """Execute statements below SQLAlchemy, in one exchange with the server, and store the number if there is one.

        The number is stored without a look at the known one.

        Args:
            connection: The connection.
            statements: The statements.
            number: The number.
            later: Whether the answers may come with those to the next statement, which then also gets their error.

        Raises:
            SQLAlchemyError: The database failed.
        """
        ...

    def settle(self, connection: Connection) -> None:
        """Take the answers that may come later.

        Raises:
            SQLAlchemyError: One of them is an error, perhaps one that another statement got before.
        """
        ...

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        ...


class _Psycopg(Protocol):
    """The part of ``psycopg.Connection`` and ``AsyncConnection`` used here."""

    @property
    def pgconn(self) -> _PGconn: ...

    def wait(self, gen: Generator[object, object, object], *args: object, **kwargs: object) -> object: ...


class _PGconn(Protocol):
    @property
    def transaction_status(self) -> int: ...

    def send_query(self, command: bytes) -> None: ...

    def flush(self) -> int: ...


@contextmanager
def _mapped(connection: Connection) -> Generator[None, None, None]:
    """Raise the driver's errors as SQLAlchemy's."""
    kind = connection.dialect.loaded_dbapi.Error
    try:
        yield
    except kind as error:
        raise exc.DBAPIError.instance(None, None, error, kind, dialect=connection.dialect) from error


_SHOWN: Final = "coalesce(nullif(current_setting('dualwrite.witness', true), ''), '0') = :known"
_KEEP: Final = text(f"SELECT CASE WHEN {_SHOWN} THEN set_config('dualwrite.witness', :number, true) END")
_SHOWS: Final = text(f"SELECT {_SHOWN}")


class PsycopgWitness:
    """The witness is a transaction-local setting. An unexpected call of ``wait`` reveals a statement past SQLAlchemy.

    psycopg does all its exchanges with the server through ``Connection.wait``: cursors, COPY, and its own
    ``transaction()``.
    """

    def __init__(self, connection: Connection, *, doubtful: bool) -> None:
        self.doubtful = doubtful
        self._driver = cast("_Psycopg", connection.connection.driver_connection)
        self._awaits = is_awaited(connection.connection.dbapi_connection)
        self._wait = self._driver.wait
        self._expected = 0.0
        self._unanswered = False
        self._failure: Exception | None = None
        self._driver.wait = self._noticing  # type: ignore[method-assign]

    def _noticing(self, gen: Generator[object, object, object], *args: object, **kwargs: object) -> object:
        if self._expected:
            self._expected -= 1
        else:
            self.doubtful = True
        if self._unanswered:
            gen = self._after_answers(gen)
        try:
            result = self._wait(gen, *args, **kwargs)
        except BaseException:
            self._expected = 0
            raise
        return self._awaited(cast("Awaitable[object]", result)) if self._awaits else result

    async def _awaited(self, result: Awaitable[object]) -> object:
        try:
            return await result
        except BaseException:
            self._expected = 0
            raise

    def expect(self, *, many: bool) -> None:
        """See :class:`Witness`. ``execute`` waits once, ``executemany`` for each batch."""
        self._expected = float("inf") if many else 1

    def seen(self) -> None:
        """See :class:`Witness`."""
        self._expected = 0

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        """See :class:`Witness`."""
        self.settle(connection)
        if self._driver.pgconn.transaction_status == _ACTIVE:
            raise IllegalStateError(
                "savepoints cannot be checked while the driver's connection is in a COPY or a pipeline",
                next_step="produce before it begins or after it has ended",
            )
        found = connection.scalar(_KEEP, {"known": str(known), "number": str(number)})
        self.doubtful = False
        return found is not None

    def shows(self, connection: Connection, number: int) -> bool:
        """See :class:`Witness`."""
        return bool(connection.scalar(_SHOWS, {"known": str(number)}))

    def execute(
        self, connection: Connection, statements: Sequence[str], number: int | None, *, later: bool = False
    ) -> None:
        """See :class:`Witness`."""
        self.settle(connection)
        witness = [] if number is None else [f"SELECT set_config('dualwrite.witness', '{number}', true)"]
        with _mapped(connection):
            self._driver.pgconn.send_query("; ".join([*statements, *witness]).encode())
            self._driver.pgconn.flush()
        self._unanswered = True
        self.doubtful = False
        if not later:
            self.settle(connection)

    def settle(self, connection: Connection) -> None:
        """See :class:`Witness`."""
        if not self._unanswered and self._failure is None:
            return
        with _mapped(connection):
            self._take_answers()
            if self._failure is not None:
                raise self._failure

    def _take_answers(self) -> None:
        if self._unanswered:
            answered = self._wait(self._answers())
            if self._awaits:
                await_only(cast("Awaitable[object]", answered))

    def _answers(self) -> Generator[object, object, None]:
        from psycopg import errors, generators  # noqa: PLC0415 - only SQLite's users may lack it

        self._unanswered = False
        for result in (yield from generators.execute(cast("Any", self._driver.pgconn))):
            if result.status not in _DONE:
                self._failure = errors.error_from_result(result)
                raise self._failure

    def _after_answers(self, gen: Generator[object, object, object]) -> Generator[object, object, object]:
        yield from self._answers()
        return (yield from gen)

    def stop(self) -> None:
        """See :class:`Witness`."""
        with suppress(Exception):  # a connection that is lost, or will show it
            self._take_answers()
        vars(self._driver).pop("wait", None)


_MAKE: Final = "CREATE TEMPORARY TABLE IF NOT EXISTS dualwrite_witness (id INTEGER PRIMARY KEY, number INTEGER)"
_BEGIN: Final = "INSERT OR REPLACE INTO temp.dualwrite_witness VALUES (1, ?)"
_RENEW: Final = "UPDATE temp.dualwrite_witness SET number = ? WHERE id = 1 AND number = ?"
_FIND: Final = "SELECT 1 FROM temp.dualwrite_witness WHERE id = 1 AND number = ?"


class SqliteWitness:
    """The witness is a row of a temporary table. The driver does not reveal its statements, so each message renews it.

    That costs microseconds: the database is in this process.
    """

    def __init__(self, connection: Connection) -> None:
        self.doubtful = True
        # A rollback may bring back the row of an earlier transaction: no two of them use the same numbers.
        self._first = secrets.randbits(40) << 20
        self._cursor = cast("sqlite3.Connection", connection.connection.dbapi_connection).cursor()

    def expect(self, *, many: bool) -> None:
        """Nothing to do."""
        del many

    def seen(self) -> None:
        """Nothing to do."""

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        """See :class:`Witness`."""
        del connection
        if not known:
            self._cursor.execute(_MAKE)
            self._cursor.execute(_BEGIN, (self._first + number,))
            return True
        try:
            self._cursor.execute(_RENEW, (self._first + number, self._first + known))
        except sqlite3.OperationalError:  # the rollback also removed the table
            return False
        return self._cursor.rowcount == 1

    def shows(self, connection: Connection, number: int) -> bool:
        """See :class:`Witness`."""
        del connection
        try:
            self._cursor.execute(_FIND, (self._first + number,))
            return self._cursor.fetchone() is not None
        except sqlite3.OperationalError:
            return False

    def settle(self, connection: Connection) -> None:
        """Nothing to do."""
        del connection

    def execute(
        self, connection: Connection, statements: Sequence[str], number: int | None, *, later: bool = False
    ) -> None:
        """See :class:`Witness`."""
        del later
        with _mapped(connection):
            for statement in statements:
                self._cursor.execute(statement)
            if number is not None:
                self._cursor.execute(_MAKE)
                self._cursor.execute(_BEGIN, (self._first + number,))

    def stop(self) -> None:
        """See :class:`Witness`."""
        # An interrupted statement has closed the connection; ValueError is aiosqlite's.
        with suppress(sqlite3.ProgrammingError, ValueError):
            self._cursor.close()
