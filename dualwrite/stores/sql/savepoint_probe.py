"""Asks the database itself which savepoints still exist, where its statements do not show it.

A row of a temporary table is written under each savepoint: if the savepoint was rolled back, the row is gone, and so
are the messages that waited for it.

A *witness* is a number that the database keeps in the open transaction. A rollback to a savepoint reverts it like a
row, whichever code sends the rollback, and by whichever route.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from sqlalchemy import exc, text
from sqlalchemy.util import await_only

from dualwrite.errors import IllegalStateError, TransactionAborted
from dualwrite.protocol.message import may_move
from dualwrite.stores.sql import access
from dualwrite.stores.sql.access import number_of
from dualwrite.stores.sql.drivers import (
    ddl_in,
    end_in,
    is_awaited,
    may_hide_savepoints,
    moves_savepoints,
    without_comments,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator, Sequence

    from sqlalchemy import Connection
    from sqlalchemy.engine.interfaces import DBAPIConnection

    from dualwrite.stores.sql.access import Begun

_ACTIVE: Final = 1
_DONE: Final = frozenset({1, 2})  # COMMAND_OK, TUPLES_OK


class Follower(Protocol):
    """A watch over savepoints, which is told of the statements on a connection where the driver shows them."""

    def after(self, statement: str, *, many: bool) -> None:
        """Follow a statement that the database has executed, perhaps many times."""
        ...

    def failed(self, statement: str, error: BaseException) -> None:
        """Judge a statement that has failed, or whose answer was not waited for."""
        ...

    def doubt(self) -> None:
        """Note that savepoints may have been opened, and those that are open rolled back, unseen."""
        ...


class Witness(Protocol):
    """The witness of one dual write."""

    doubtful: bool
    """Whether a savepoint may have been opened or rolled back unseen since the last :meth:`keep`."""

    @property
    def shown_all(self) -> bool:
        """Whether the driver shows every statement: only if it is :attr:`doubtful` is there anything to ask the database."""
        ...

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        """Store the number in place of the known one (0: none). Returns False if the database shows another one."""
        ...

    def shows(self, connection: Connection, number: int) -> bool:
        """Whether the database shows that number."""
        ...

    def execute(
        self, connection: Connection, statements: Sequence[str], number: int | None, *, later: bool = False
    ) -> None:
        """Execute statements below SQLAlchemy, in one exchange with the server, and store the number if there is one.

        The number is stored without a look at the known one. With ``later``, the answers may come with those to the next
        statement, which then also gets their error.
        """
        ...

    def settle(self, connection: Connection) -> None:
        """Take the answers that were left for later; an error may be one that another statement got before."""
        ...

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        ...


class _Psycopg(Protocol):
    @property
    def pgconn(self) -> _PGconn: ...

    def wait(self, gen: Generator[object, object, object], *args: object, **kwargs: object) -> object: ...


class _PGconn(Protocol):
    @property
    def transaction_status(self) -> int: ...

    @property
    def pipeline_status(self) -> int: ...

    def send_query(self, command: bytes) -> None: ...

    def flush(self) -> int: ...


def _text_of(query: object, driver: object) -> str | None:
    if isinstance(query, str):
        return query
    if isinstance(query, bytes):
        return query.decode("utf-8", "replace")
    with suppress(Exception):  # it is not to be sent, then
        return str(cast("Any", query).as_string(driver))
    return None


@contextmanager
def mapped(connection: Connection) -> Generator[None, None, None]:
    """Raise the driver's errors as SQLAlchemy's."""
    kind = connection.dialect.loaded_dbapi.Error
    try:
        yield
    except kind as error:
        raise exc.DBAPIError.instance(None, None, error, kind, dialect=connection.dialect) from error


_SHOWN: Final = "coalesce(nullif(current_setting('dualwrite.witness', true), ''), '0') = :known"
_KEEP: Final = text(f"SELECT CASE WHEN {_SHOWN} THEN set_config('dualwrite.witness', :number, true) END")
_SHOWS: Final = text(f"SELECT {_SHOWN}")


def set_number(number: int) -> str:
    """The statement that stores the number."""
    return f"SELECT set_config('dualwrite.witness', '{number}', true)"


class NumberInSetting:
    """The witness of PostgreSQL: a setting of the transaction, which is asked only where the driver hides what it sends."""

    shown_all = True
    doubtful: bool

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        self.settle(connection)
        found = connection.scalar(_KEEP, {"known": str(known), "number": str(number)})
        self.doubtful = False
        return found is not None

    def shows(self, connection: Connection, number: int) -> bool:
        return bool(connection.scalar(_SHOWS, {"known": str(number)}))

    def settle(self, connection: Connection) -> None:
        raise NotImplementedError


# What stands in the generators by which psycopg talks to the server, as they wait: by their names, the argument with the text.
_CARRIERS: Final = {
    "_execute_gen": "query",
    "_executemany_gen_pipeline": "query",
    "_executemany_gen_no_pipeline": "query",
    "_stream_send_gen": "query",
    "_declare_gen": "query",
    "_start_copy_gen": "statement",
}
_SILENT: Final = frozenset(
    {
        "_commit_gen", "_rollback_gen",  # of the whole transaction: noticed elsewhere
        "_read_gen", "_read_row_gen", "_end_copy_out_gen", "copy_from", "copy_to", "copy_end",
        "_fetch_gen", "_close_gen", "_scroll_gen", "_stream_fetchone_gen", "_sync_gen", "notifies",
    }
)  # fmt: skip
"""Generators that send no statement of the user's."""
_PIPELINES: Final = "BasePipeline."
"""The owner of generators that only take answers, to statements of others."""
_TRANSACTION: Final = frozenset({"_enter_gen", "_exit_gen"})
"""Those of ``Connection.transaction()``, which opens a savepoint and ends that one: no other is touched."""
_PLAIN: Final = re.compile(r"\s*(?:insert|select|update|delete|with|merge|values)\b", re.IGNORECASE)


class PsycopgWitness(NumberInSetting):
    """The witness of psycopg's connections.

    psycopg does all its exchanges with the server through ``Connection.wait``: for SQLAlchemy, for cursors, for COPY
    and for its own ``transaction()``. What is sent stands in the generator that is waited for. One that is not known (of
    another version of psycopg, or of other code) makes doubt, and then the database is asked. On PostgreSQL nothing else sends
    savepoints: no function, procedure or prepared statement can.
    """

    def __init__(self, connection: Connection, follower: Follower, begun: Begun | None) -> None:
        self.doubtful = begun is not None and begun.joined_late
        self._follower = follower
        if begun is None:
            self._driver: _Psycopg = connection.connection.driver_connection  # type: ignore[assignment]
            self._awaits = is_awaited(connection.connection.dbapi_connection)
        else:
            self._driver, self._awaits = begun.driver, begun.awaits
        self._wait = self._driver.wait
        self._unanswered = False
        self._failure: Exception | None = None
        self._driver.wait = self._noticing  # type: ignore[method-assign]

    def _noticing(self, gen: Generator[object, object, object], *args: object, **kwargs: object) -> object:
        carrier = _CARRIERS.get(getattr(gen, "__name__", ""))
        frame = getattr(gen, "gi_frame", None)
        query = None if carrier is None or frame is None else frame.f_locals.get(carrier)
        if isinstance(query, str) and ";" not in query and _PLAIN.match(query) and not self._unanswered:
            return self._wait(gen, *args, **kwargs)  # nearly always
        return self._looked_at(gen, query, args, kwargs)

    def _looked_at(
        self, gen: Generator[object, object, object], query: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        name = getattr(gen, "__name__", "")
        statement = _text_of(query, self._driver)
        if self._unanswered:
            gen = self._after_answers(gen)
        silent = name in _SILENT or getattr(gen, "__qualname__", "").startswith(_PIPELINES)
        if statement is None and not silent:
            if name in _TRANSACTION:
                self.doubtful = True
            else:
                self._follower.doubt()
        if statement is None or not may_move(statement):
            return self._wait(gen, *args, **kwargs)
        if self._driver.pgconn.pipeline_status:  # it may fail later
            self._follower.doubt()
            return self._wait(gen, *args, **kwargs)
        many = name.startswith("_executemany")
        if self._awaits:
            return self._followed_later(gen, statement, many, args, kwargs)
        try:
            result = self._wait(gen, *args, **kwargs)
        except BaseException as error:
            self._follower.failed(statement, error)
            raise
        self._follower.after(statement, many=many)
        return result

    async def _followed_later(
        self,
        gen: Generator[object, object, object],
        statement: str,
        many: bool,  # noqa: FBT001 - passed on
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        try:
            result = await cast("Awaitable[object]", self._wait(gen, *args, **kwargs))
        except BaseException as error:
            self._follower.failed(statement, error)
            raise
        self._follower.after(statement, many=many)
        return result

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        self.settle(connection)
        if self._driver.pgconn.transaction_status == _ACTIVE:
            raise IllegalStateError(
                "savepoints cannot be checked while the driver's connection is in a COPY or a pipeline",
                next_step="produce before it begins or after it has ended",
            )
        return super().keep(connection, known, number)

    def execute(
        self, connection: Connection, statements: Sequence[str], number: int | None, *, later: bool = False
    ) -> None:
        self.settle(connection)
        witness = [] if number is None else [set_number(number)]
        with mapped(connection):
            self._driver.pgconn.send_query("; ".join([*statements, *witness]).encode())
            self._driver.pgconn.flush()
        self._unanswered = True
        self.doubtful = False
        if not later:
            self.settle(connection)

    def settle(self, connection: Connection) -> None:
        if not self._unanswered and self._failure is None:
            return
        with mapped(connection):
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
        if self._unanswered:
            with suppress(Exception):  # a connection that is lost, or will show it
                self._take_answers()
        vars(self._driver).pop("wait", None)


_MAKE_ON_SQLITE: Final = (
    "CREATE TEMPORARY TABLE IF NOT EXISTS dualwrite_witness (id INTEGER PRIMARY KEY, number INTEGER)"
)
_BEGIN_ON_SQLITE: Final = "INSERT OR REPLACE INTO temp.dualwrite_witness VALUES (1, ?)"
_RENEW_ON_SQLITE: Final = "UPDATE temp.dualwrite_witness SET number = ? WHERE id = 1 AND number = ?"
_FIND: Final = "SELECT 1 FROM temp.dualwrite_witness WHERE id = 1 AND number = ?"


class SqliteWitness:
    """The witness is a row of a temporary table. The driver does not reveal its statements, so each message renews it.

    That costs microseconds: the database is in this process.
    """

    shown_all = False

    def __init__(self, connection: Connection) -> None:
        self.doubtful = True
        # A rollback may bring back the row of an earlier transaction: no two of them use the same numbers.
        self._first = secrets.randbits(40) << 20
        self._cursor = cast("sqlite3.Connection", connection.connection.dbapi_connection).cursor()

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        del connection
        if not known:
            self._cursor.execute(_MAKE_ON_SQLITE)
            self._cursor.execute(_BEGIN_ON_SQLITE, (self._first + number,))
            return True
        try:
            self._cursor.execute(_RENEW_ON_SQLITE, (self._first + number, self._first + known))
        except sqlite3.OperationalError:  # the rollback also removed the table
            return False
        return self._cursor.rowcount == 1

    def shows(self, connection: Connection, number: int) -> bool:
        del connection
        try:
            self._cursor.execute(_FIND, (self._first + number,))
            return self._cursor.fetchone() is not None
        except sqlite3.OperationalError:
            return False

    def settle(self, connection: Connection) -> None:
        del connection

    def execute(
        self, connection: Connection, statements: Sequence[str], number: int | None, *, later: bool = False
    ) -> None:
        del later
        with mapped(connection):
            for statement in statements:
                self._cursor.execute(statement)
            if number is not None:
                self._cursor.execute(_MAKE_ON_SQLITE)
                self._cursor.execute(_BEGIN_ON_SQLITE, (self._first + number,))

    def stop(self) -> None:
        # An interrupted statement has closed the connection; ValueError is aiosqlite's.
        with suppress(sqlite3.ProgrammingError, ValueError):
            self._cursor.close()


# Notices every statement that a connection of PyMySQL or mysqlclient executes, also past SQLAlchemy.
#
# Both drivers send every statement of a cursor through `Connection.query`, and COMMIT through `Connection.commit`.

ROLLED_BACK: Final = frozenset(
    {
        1213,  # a deadlock
        1020,  # a row changed after the snapshot (MariaDB's innodb_snapshot_isolation)
    }
)
"""Errors with which the server has rolled back the whole transaction: the next statement begins another one."""
LOCK_WAIT_TIMEOUT: Final = 1205
IN_TRANSACTION: Final = 1
_NO_TABLE: Final = 1146
_KEPT: Final = "dualwrite_queries"


class _Driver(Protocol):
    def query(self, *arguments: object, **options: object) -> object: ...

    def commit(self) -> object: ...

    def cursor(self) -> Any: ...


class Queries:
    """Watches one driver's connection for as long as it lives. Made by :func:`queries_of`.

    Attributes:
        doubtful: Whether a statement may have set or rolled back to a savepoint unseen.
        ended: Whether the server has shown that the dual write's transaction was ended. Nothing more is sent then: it would be
            committed by itself, or with the next transaction.
        timeout_rolls_back: Whether a lock wait that times out rolls back the whole transaction (innodb_rollback_on_timeout).
        rolled_back: The error with which the server rolled back the whole transaction; None if it did not.
        commit_sent: Whether COMMIT may have been sent in this transaction.
    """

    def __init__(self, driver: _Driver) -> None:
        self.follower: Follower | None = None
        self.has_table = False
        self.timeout_rolls_back = False
        self.begin()
        self._driver = driver
        self._query = driver.query
        self._commit = driver.commit
        vars(driver).update(query=self._noticing, commit=self._committing)

    def begin(self) -> None:
        self.doubtful = False
        self.ended = False
        self.rolled_back: BaseException | None = None
        self.commit_sent = False
        self._watches = self._was_open = False

    def watch(self) -> None:
        """Notice from the server's status when the transaction is ended, until :meth:`begin` or COMMIT. PyMySQL tells it."""
        self._watches = True

    def _noticing(self, *arguments: object, **options: object) -> object:
        if self.ended:
            raise ended_inside()
        text = _statement_in(arguments)
        if self._watches:
            self.require_not_rolled_back()
            if text is not None:
                _refuse(text)
        moves = text is not None and self._moves(text)
        try:
            result = self._query(*arguments, **options)
        except BaseException as error:
            number = number_of(error)
            if number in ROLLED_BACK or (number == LOCK_WAIT_TIMEOUT and self.timeout_rolls_back):
                self.rolled_back = error
            if moves and self.follower is not None:
                self.follower.failed(cast("str", text), error)
            raise
        if moves and self.follower is not None:
            self.follower.after(without_comments(cast("str", text)), many=False)
        if self._watches and (status := status_of(self._driver)) is not None:
            # MySQL, which has none before the first statement on a table, does not show it at once.
            is_open = bool(status & IN_TRANSACTION)
            if self._was_open and not is_open:
                self.ended, self._watches = True, False
                raise ended_inside()
            self._was_open = is_open
        return result

    def _moves(self, text: str) -> bool:
        """Whether savepoints can be followed in it. Its text holds values, so words in the middle say nothing for certain."""
        if may_hide_savepoints(text):
            self.doubtful = True
            return False
        return moves_savepoints(text)

    def require_not_rolled_back(self) -> None:
        """Refuse to continue once the server has rolled back all: the next statement would begin another transaction."""
        if (lost := self.rolled_back) is not None:
            raise TransactionAborted(
                f"the database has rolled back the whole transaction: {access.driver_words(lost)}",
                next_step="run the same work again: not even a savepoint is left to go back to",
            ) from lost

    def _committing(self) -> object:
        self.commit_sent = True
        self._watches = False
        return self._commit()


def _refuse(statement: str) -> None:
    """Refuse a statement whose text shows that it ends the transaction. The server would tell it too late: rows would stay."""
    if (words := ddl_in(statement)) is not None:
        raise IllegalStateError(
            f"{words} would have committed the rows of the dual write without its messages: it was not sent",
            next_step="run DDL before or after the block; CREATE TEMPORARY TABLE is allowed in it",
        )
    if (words := end_in(statement)) is not None:
        raise IllegalStateError(
            f"{words} was sent as text inside the block", next_step="leave COMMIT and ROLLBACK to the dual write"
        )


def _statement_in(arguments: Sequence[object]) -> str | None:
    text = arguments[0] if arguments else None
    return (
        text
        if isinstance(text, str)
        else text.decode("utf-8", "replace")
        if isinstance(text, (bytes, bytearray))
        else None
    )


def status_of(driver: object) -> int | None:
    """The server's status after its last answer; None if the driver does not tell (mysqlclient)."""
    status = getattr(driver, "server_status", None)
    return status if isinstance(status, int) else None


def ended_inside() -> IllegalStateError:
    """The error for a dual write whose transaction was ended inside it."""
    return access.ended_inside(
        "by a COMMIT or ROLLBACK sent as text or in a procedure, or by a statement that commits (DDL)",
        "leave COMMIT and ROLLBACK to the dual write, and run DDL outside of it",
    )


def queries_of(driver: DBAPIConnection) -> Queries:
    """The watch over that connection, which begins with the first call."""
    found: Queries | None = vars(driver).get(_KEPT)
    if found is None:
        found = vars(driver)[_KEPT] = Queries(cast("_Driver", driver))
    return found


_MAKE_ON_MARIADB: Final = (
    "CREATE TEMPORARY TABLE IF NOT EXISTS dualwrite_witness (id INT PRIMARY KEY, number BIGINT NOT NULL) ENGINE=InnoDB"
)
_BEGIN_ON_MARIADB: Final = "REPLACE INTO dualwrite_witness VALUES (1, {number})"
_RENEW_ON_MARIADB: Final = "UPDATE dualwrite_witness SET number = {number} WHERE id = 1 AND number = {known}"
_SHOW: Final = "SELECT 1 FROM dualwrite_witness WHERE id = 1 AND number = {number}"


class QueryWitness:
    """The witness is a row of a temporary table, which commits nothing when it is made. A procedure may hide savepoints."""

    shown_all = False

    def __init__(self, connection: Connection, follower: Follower) -> None:
        driver = connection.connection.dbapi_connection
        assert driver is not None
        self._driver = cast("_Driver", driver)
        self._queries = queries_of(driver)
        self._queries.follower = follower
        # A rollback may bring back the row of an earlier transaction: no two of them use the same numbers.
        self._first = secrets.randbits(40) << 20

    @property
    def doubtful(self) -> bool:
        return self._queries.doubtful

    @doubtful.setter
    def doubtful(self, doubtful: bool) -> None:
        self._queries.doubtful = doubtful

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        with mapped(connection):
            if not known:
                self._store(number)
                self._queries.doubtful = False
                return True
            kept = self._changes(_RENEW_ON_MARIADB.format(number=self._first + number, known=self._first + known))
        self._queries.doubtful = False
        return kept

    def shows(self, connection: Connection, number: int) -> bool:
        with mapped(connection):
            return self._changes(_SHOW.format(number=self._first + number))

    def _store(self, number: int) -> None:
        if not self._queries.has_table:
            self._run(_MAKE_ON_MARIADB)
            self._queries.has_table = True
        self._run(_BEGIN_ON_MARIADB.format(number=self._first + number))

    def _changes(self, statement: str) -> bool:
        try:
            return self._run(statement) == 1
        except Exception as error:
            if number_of(error) == _NO_TABLE:
                return False
            raise

    def _run(self, statement: str) -> int:
        follower, self._queries.follower = self._queries.follower, None  # its own savepoints are the caller's to follow
        try:
            with closing(self._driver.cursor()) as cursor:
                cursor.execute(statement)
                return int(cursor.rowcount)
        finally:
            self._queries.follower = follower

    def execute(
        self, connection: Connection, statements: Sequence[str], number: int | None, *, later: bool = False
    ) -> None:
        del later
        with mapped(connection):
            for statement in statements:
                self._run(statement)
            if number is not None:
                self._store(number)
        self._queries.doubtful = False

    def settle(self, connection: Connection) -> None:
        del connection

    def stop(self) -> None:
        self._queries.follower = None
