"""Notices what a connection of PyMySQL or mysqlclient is asked to execute, also past SQLAlchemy.

Both drivers send every statement of a cursor through ``Connection.query``, and COMMIT through ``Connection.commit``.
"""

from __future__ import annotations

import secrets
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from sqlalchemy import exc

from dualwrite.errors import IllegalStateError, TransactionAborted
from dualwrite.stores.sql import access__stores_sql_access_failures
from dualwrite.stores.sql.access__stores_sql_access_failures import number_of
from dualwrite.stores.sql.drivers__stores_sql_drivers_implicit_commits import (
    ddl_in,
    end_in,
    may_hide_savepoints,
    moves_savepoints,
    without_comments,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from sqlalchemy import Connection
    from sqlalchemy.engine.interfaces import DBAPIConnection

    from dualwrite.stores.sql.savepoint_probe import Follower

ROLLED_BACK: Final = frozenset(
    {
        1213,  # a deadlock
        1020,  # a row changed after the snapshot (MariaDB's innodb_snapshot_isolation)
    }
)
"""Errors with which the server has rolled back the whole transaction: the next statement begins another one."""
LOCK_WAIT_TIMEOUT: Final = 1205
IN_TRANSACTION: Final = 1
"""The flag of the server's status (SERVER_STATUS_IN_TRANS) in the answer to a statement."""
_NO_TABLE: Final = 1146
_KEPT: Final = "dualwrite_queries"


class _Driver(Protocol):
    """The part of the drivers' connections used here."""

    def query(self, *arguments: object, **options: object) -> object: ...

    def commit(self) -> object: ...

    def cursor(self) -> Any: ...


class Queries:
    """Watches one driver's connection for as long as it lives. Made by :func:`queries_of`.

    Attributes:
        follower: Hears of savepoints.
        doubtful: Whether a statement may have set or rolled back to a savepoint unseen.
        ended: Whether the server has shown that the dual write's transaction was ended. Nothing more is sent then: it would be
            committed by itself, or with the next transaction.
        timeout_rolls_back: Whether a lock wait that times out rolls back the whole transaction (innodb_rollback_on_timeout).
        rolled_back: The error with which the server rolled back the whole transaction; None if it did not.
        commit_sent: Whether COMMIT may have been sent in this transaction.
        has_table: Whether the connection has the witness's table.
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
        """A transaction begins."""
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
        text = _text_of(arguments)
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
        """Whether it is a statement about savepoints that can be followed. Others that may be make doubt.

        The values of a statement stand in its text, so that words in the middle of it say nothing for certain.
        """
        if may_hide_savepoints(text):
            self.doubtful = True
            return False
        return moves_savepoints(text)

    def require_not_rolled_back(self) -> None:
        """Refuse to continue after an error with which the server has rolled back the whole transaction.

        Raises:
            TransactionAborted: It has: it would execute the next statement in another one.
        """
        if (lost := self.rolled_back) is not None:
            raise TransactionAborted(
                f"the database has rolled back the whole transaction: {access__stores_sql_access_failures.driver_words(lost)}",
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


def _text_of(arguments: Sequence[object]) -> str | None:
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
    return access__stores_sql_access_failures.ended_inside(
        "by a COMMIT or ROLLBACK sent as text or in a procedure, or by a statement that commits (DDL)",
        "leave COMMIT and ROLLBACK to the dual write, and run DDL outside of it",
    )


def queries_of(driver: DBAPIConnection) -> Queries:
    """The watch over that connection, which begins with the first call."""
    found: Queries | None = vars(driver).get(_KEPT)
    if found is None:
        found = vars(driver)[_KEPT] = Queries(cast("_Driver", driver))
    return found


@contextmanager
def _mapped(connection: Connection) -> Generator[None, None, None]:
    """Raise the driver's errors as SQLAlchemy's."""
    kind = connection.dialect.loaded_dbapi.Error
    try:
        yield
    except kind as error:
        raise exc.DBAPIError.instance(None, None, error, kind, dialect=connection.dialect) from error


_MAKE: Final = (
    "CREATE TEMPORARY TABLE IF NOT EXISTS dualwrite_witness (id INT PRIMARY KEY, number BIGINT NOT NULL) ENGINE=InnoDB"
)
_BEGIN: Final = "REPLACE INTO dualwrite_witness VALUES (1, {number})"
_RENEW: Final = "UPDATE dualwrite_witness SET number = {number} WHERE id = 1 AND number = {known}"
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
        """See :class:`~dualwrite.stores.sql.savepoint_probe.Witness`."""
        return self._queries.doubtful

    @doubtful.setter
    def doubtful(self, doubtful: bool) -> None:
        self._queries.doubtful = doubtful

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        """See :class:`~dualwrite.stores.sql.savepoint_probe.Witness`."""
        with _mapped(connection):
            if not known:
                self._store(number)
                self._queries.doubtful = False
                return True
            kept = self._changes(_RENEW.format(number=self._first + number, known=self._first + known))
        self._queries.doubtful = False
        return kept

    def shows(self, connection: Connection, number: int) -> bool:
        """See :class:`~dualwrite.stores.sql.savepoint_probe.Witness`."""
        with _mapped(connection):
            return self._changes(_SHOW.format(number=self._first + number))

    def _store(self, number: int) -> None:
        if not self._queries.has_table:
            self._run(_MAKE)
            self._queries.has_table = True
        self._run(_BEGIN.format(number=self._first + number))

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
        """See :class:`~dualwrite.stores.sql.savepoint_probe.Witness`."""
        del later
        with _mapped(connection):
            for statement in statements:
                self._run(statement)
            if number is not None:
                self._store(number)
        self._queries.doubtful = False

    def settle(self, connection: Connection) -> None:
        """Nothing to do: every statement waits for its answer."""
        del connection

    def stop(self) -> None:
        """See :class:`~dualwrite.stores.sql.savepoint_probe.Witness`."""
        self._queries.follower = None
