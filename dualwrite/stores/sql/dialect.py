"""What the library needs of each kind of SQL database, and how a COMMIT is sent and its answer judged."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, exc, literal, literal_column

from dualwrite.errors import DualWriteError, IllegalStateError, TransactionAborted, TransactionInDoubt
from dualwrite.protocol.process import DatabaseVerdict
from dualwrite.stores.sql.access import Meaning, begun_on, driver_words, leave_to_parent, meaning_of
from dualwrite.stores.sql.drivers import Listeners

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Insert, Table, Update
    from sqlalchemy import Dialect as SqlalchemyDialect
    from sqlalchemy.engine.interfaces import DBAPIConnection

    from dualwrite.interfaces import DecisionWithCommit
    from dualwrite.protocol.values import Decision, WaitingMessages
    from dualwrite.stores.sql.drivers import CompiledOnce
    from dualwrite.stores.sql.savepoint_probe import Follower, Witness
    from dualwrite.stores.sql.tables import Tables
    from dualwrite.stores.sql.waiting_rows import Asked, Put


DECIDES_NOTHING: Final = {"dualwrite_decides_nothing": True}
"""Execution options of a connection for a dual write that is handed over undecided: it needs no guard of a decision."""


class Standing(Enum):
    """The status of a transaction, as the driver knows it without asking the server."""

    OPEN = "open"
    FAILED = "failed: the database would answer COMMIT with a ROLLBACK"
    ENDED = "not open"
    BROKEN = "the connection is lost"


@dataclass(frozen=True)
class Identity:
    """The server process and the database in it, or the file; and the library's state table there. Only to be compared."""

    database: tuple[object, ...]
    table: object


class Dialect(ABC):
    """One kind of database through one driver. What is not abstract does for those that need no more."""

    name: str
    shows_statements: bool
    """Whether the driver shows all statements that it sends, also those of other code than SQLAlchemy."""
    quotes_keep_case: bool
    """Whether quoted names that differ only in case name different savepoints."""

    @abstractmethod
    def refuse_left_open(self, connection: Connection) -> None:
        """Refuse a connection that other code has left in a transaction, past SQLAlchemy."""

    @abstractmethod
    def begin(self, connection: Connection, tables: Tables) -> None:
        """Begin a transaction that can hold a decision: durable, not in autocommit or read-only, and not begun before."""

    @abstractmethod
    def join(self, connection: Connection, tables: Tables) -> bool:
        """Make a transaction that other code has begun one that can hold a decision, unless it has gone too far for that.

        Returns whether statements have been executed in it, for :meth:`check_start` to judge.
        """

    @abstractmethod
    def begin_own(self, connection: Connection, tables: Tables, *, lock_timeout_s: float, light: bool = False) -> None:
        """Begin one of the store's own transactions: on the primary, at READ COMMITTED, durable, with limited waits.

        ``light`` leaves out what costs a statement of its own: see :meth:`ShortTransactions.run`.
        """

    def own_checks(self) -> Sequence[ColumnElement[object]]:
        """Columns that show what a ``light`` :meth:`begin_own` has not checked, for :meth:`check_own`."""
        return ()

    def check_own(self, values: Sequence[object]) -> None:
        """Check the values of :meth:`own_checks`."""
        del values

    @abstractmethod
    def begin_reading(self, connection: Connection, *, light: bool = False) -> None:
        """Begin a short transaction that only reads; refuse a standby, which may show old data.

        Or let each statement be one, on a connection that is known to lead to a primary. ``light`` as for :meth:`begin_own`.
        """

    def standing_alone(self, lock_timeout_s: float) -> Callable[[Connection], AbstractContextManager[object]] | None:
        """What lets an UPDATE in autocommit be like one in a transaction of :meth:`begin_own`; None where nothing does."""
        del lock_timeout_s
        return None

    def start_columns(self) -> Sequence[ColumnElement[object]]:
        """Columns that a dual write's first statement reads besides the incarnation; may configure the transaction."""
        return ()

    def check_start(self, connection: Connection, values: Sequence[object]) -> None:
        """Check the values of :meth:`start_columns`: a read-only transaction is refused."""
        del connection, values

    @abstractmethod
    def is_begun(self) -> Sequence[ColumnElement[bool]]:
        """The conditions that a statement is executed in the transaction that was begun, as far as SQL can say it.

        Part of every statement that decides: whatever ends the transaction unseen (a program, a trigger, a forked process, a
        pooler), no statement that stands alone can decide without the rows.
        """

    def begun(self, connection: Connection) -> Mapping[str, object]:
        """The values of :meth:`is_begun`."""
        del connection
        return {}

    @abstractmethod
    def require_begun(self, connection: Connection) -> None:
        """Check that the transaction is still the one that was begun: it was not ended, nor rolled back by the database."""

    def end_columns(self) -> Sequence[ColumnElement[object]]:
        """Columns that a dual write's last statement returns; may make the COMMIT durable."""
        return [literal_column("1")]

    @abstractmethod
    def check_end(self, connection: Connection, values: Sequence[object]) -> str | None:
        """Check the values of :meth:`end_columns`. Returns the database's name of the transaction, if it has one."""

    def deciding(
        self,
        update: Update,
        *,
        idle_ms: ColumnElement[int | None] | None = None,
        within_ms: ColumnElement[int | None] | None = None,
    ) -> Update:
        """The statement that records a decision, from the UPDATE of its row.

        ``idle_ms`` limits the pause between statements, ``within_ms`` the transaction with its COMMIT; NULL keeps the current
        limit, and so does None, which costs nothing. A limit that the block's code has set itself may be replaced. There are
        none where no server could end a paused process's transaction.
        """
        del idle_ms, within_ms
        return update.returning(*self.end_columns())

    def with_commit(
        self,
        update: Update,
        bound: Callable[[Connection, Decision], dict[str, Any]],
        mapped: Callable[[exc.SQLAlchemyError, str], DualWriteError],
    ) -> DecisionWithCommit | None:
        """What sends a decision, the UPDATE of its row, with its COMMIT; None if no driver of this database can.

        ``bound`` returns the values by which the UPDATE finds the row; ``mapped`` makes our error of SQLAlchemy's.
        """
        del update, bound, mapped
        return None

    def read_first(self, connection: Connection, statement: CompiledOnce, bound: Mapping[str, Any]) -> Sequence[Any]:
        """Execute the first statement of a dual write, with BEGIN in the same exchange if the driver has sent none."""
        row, _ = statement.execute(connection, bound)
        assert row is not None  # it has no FROM
        return row

    @abstractmethod
    def ask_last(
        self,
        connection: Connection,
        statement: CompiledOnce,
        bound: Mapping[str, Any],
        *,
        decides: bool,
        deferred_of: str | None = None,
        put: Put | None = None,
    ) -> Sequence[object] | None:
        """Execute the last statement of a dual write: that of :meth:`deciding`, or a SELECT of :meth:`end_columns`.

        If it decides, ``bound`` holds ``idle_ms_`` and ``within_ms_``. For the dual write ``deferred_of``,
        :meth:`run_deferred` goes before, in the same exchange if it can. If a row matched, messages are put after it, likewise.
        Returns the values for :meth:`check_end`; None if no row matched.
        """

    def ask_locked(
        self, connection: Connection, statement: CompiledOnce, bound: Mapping[str, Any], within_s: float
    ) -> Sequence[Any] | None:
        """Execute a statement that may wait for a lock, that long at most. Returns its row."""
        del within_s
        return statement.execute(connection, bound)[0]

    def server_mark(self) -> ColumnElement[Any] | None:
        """What tells this server from a copy that may lag behind; None where no dead rows are in the way of reads."""
        return None

    def read_waiting(self, connection: Connection, tables: Tables, asked: Asked) -> WaitingMessages:
        """The first messages that wait. See :meth:`dualwrite.interfaces.OutboxRows.read`."""
        from dualwrite.stores.sql.waiting_rows import on_server, read_in_two  # noqa: PLC0415 - loaded where messages wait

        mark = self.server_mark()
        above = literal(0) if mark is None else on_server(mark, asked.server, asked.floor)
        return read_in_two(connection, tables, asked, above)

    def delete_waiting(self, connection: Connection, table: Table, numbers: Sequence[int]) -> int:
        """Delete the messages with these numbers, and return how many there were."""
        from dualwrite.stores.sql.waiting_rows import delete_by_number  # noqa: PLC0415 - as above

        return delete_by_number(connection, table, numbers)

    def require_not_rolled_back(self, connection: Connection) -> None:
        """Refuse to continue once the database has rolled back all: the next statement would begin another transaction.

        Nothing, where :meth:`require_begun` or the next statement notices it.
        """
        del connection

    def restore(self, connection: Connection) -> None:
        """Restore the session's settings once the transaction has ended, if any outlives it. Never raises."""
        del connection

    def run_deferred(self, connection: Connection) -> None:
        """Run now what is deferred to COMMIT: constraints and their triggers.

        Nothing on others than PostgreSQL: InnoDB defers nothing, and SQLite counts violations of deferred foreign keys, so
        that COMMIT only checks the count.
        """
        del connection

    def commit_found_none(self, driver: DBAPIConnection) -> bool:
        """Whether the server has reported that the COMMIT that it answered found no transaction.

        No, where its answer does not tell: :meth:`standing` shows it up to the statement before.
        """
        del driver
        return False

    @abstractmethod
    def bounded(self, connection: Connection, seconds: float | None) -> AbstractContextManager[object]:
        """Make waits for the database in the block fail after this time, if any. The connection may then be lost."""

    @abstractmethod
    def begins_with(self, name: ColumnElement[str], prefix: str) -> ColumnElement[bool]:
        """The condition that a name begins with exactly that prefix. An index on the names serves it."""

    @abstractmethod
    def identity(self, connection: Connection, tables: Tables) -> Identity:
        """The database and table that statements on this connection reach. It is outside a transaction, or only reads."""

    @abstractmethod
    def witness(self, connection: Connection, follower: Follower) -> Witness:
        """Start watching what is sent on the driver's connection. If it :attr:`shows_statements`, the follower hears of it."""

    @abstractmethod
    def insert_if_missing(self, table: Table) -> Insert:
        """An INSERT of one row that does nothing if a row with that key exists."""

    @abstractmethod
    def standing(self, driver: DBAPIConnection) -> Standing:
        """The status of the driver's transaction, without a round trip."""

    @abstractmethod
    def certainly_rolled_back(self, driver: DBAPIConnection, error: BaseException) -> bool:
        """Whether a COMMIT that ended with this error certainly did not happen, and can no longer happen."""

    def prepared_transactions(self, connection: Connection) -> Sequence[tuple[str, datetime]]:
        """The names of this library's prepared transactions in this database, and when each was prepared."""
        del connection
        return ()

    def verdict(self, connection: Connection, transaction: str) -> DatabaseVerdict:
        """The database's verdict on a transaction that :meth:`check_end` named: unknown, where they have no names."""
        del connection, transaction
        return DatabaseVerdict.UNKNOWN


def name_of(connection: Connection, table: Table) -> str:
    """The table's quoted name as the server takes it. SQLAlchemy doubles each ``%``, for drivers that look for values there."""
    preparer = connection.dialect.identifier_preparer
    name = preparer.format_table(table)
    return name.replace("%%", "%") if preparer._double_percents else name  # noqa: SLF001 - nothing public tells


def quoted(dialect: SqlalchemyDialect, *parts: str | None) -> str:
    """As :func:`name_of`, of a name in parts. That one is asked for each message that waits, and calls nothing more."""
    preparer = dialect.identifier_preparer
    name = ".".join(preparer.quote(part) for part in parts if part is not None)
    return name.replace("%%", "%") if preparer._double_percents else name  # noqa: SLF001 - as above


def put_rows(connection: Connection, put: Put | None) -> None:
    """Put the messages, if any, by the driver: many in one call."""
    if put is not None and put.rows:
        from dualwrite.stores.sql.waiting_rows import put_by_driver  # noqa: PLC0415 - as above

        put_by_driver(connection, put)


# Sends COMMIT or PREPARE TRANSACTION and reports its true outcome; rolls back connections in any state.
#
# Refuses any other COMMIT of a dual write's transaction. A *joined* transaction belongs to other code, which ends it
# through SQLAlchemy: it is ended below SQLAlchemy here, so that both agree afterwards.

logger = logging.getLogger(__name__)

_RETRYABLE: Final = frozenset({Meaning.CONFLICT, Meaning.BUSY, Meaning.GONE, Meaning.FULL})


def refuse_commit(connection: Connection) -> None:
    """Refuse a COMMIT by other code, and roll back."""
    begun = begun_on(connection)
    if begun is None or not begun.refuses:
        return
    # Roll back at once: later work must not join the refused transaction.
    _roll_back_driver(connection.connection.dbapi_connection)
    raise IllegalStateError(
        "the connection was committed inside the block",
        next_step="the dual write commits when the block ends: remove the commit()",
    )


LISTENERS: Final = Listeners({"commit": refuse_commit})
"""Notice a COMMIT. One of other code is refused while :attr:`~dualwrite.stores.sql.access.Begun.refuses` says so."""


def _stop_refusing(connection: Connection) -> None:
    begun = begun_on(connection)
    if begun is not None:
        begun.refuses = False


def run_deferred(connection: Connection, dialect: Dialect, transactional_id: str | None = None) -> None:
    """Run deferred constraints and triggers now, so that their time is spent before the decision."""
    driver = driver_of(connection)
    if driver is None or dialect.standing(driver) is not Standing.OPEN:
        return  # COMMIT will report it, with the cause
    try:
        dialect.run_deferred(connection)
    except exc.SQLAlchemyError as error:
        raise deferred_failed(error, transactional_id) from error


def deferred_failed(error: exc.SQLAlchemyError, transactional_id: str | None) -> TransactionAborted:
    """The error for a deferred constraint or trigger that has failed with this one."""
    return TransactionAborted(
        f"a check deferred to COMMIT failed: {driver_words(error)}",
        transactional_id=transactional_id,
        retryable=meaning_of(error) in _RETRYABLE,
    )


def commit(
    connection: Connection,
    dialect: Dialect,
    transactional_id: str | None = None,
    *,
    prepare_as: str | None = None,
    answer_s: float | None = None,
    joined: bool = False,
    with_decision: Callable[[], None] | None = None,
) -> None:
    """Commit the connection's transaction, or prepare it. It is durable on return, and only then.

    ``prepare_as`` is plain ASCII without quotes. ``joined``: SQLAlchemy calls this while it commits the transaction, so its
    own state of the transaction is left to it. Without ``answer_s``, in seconds, the wait for the answer has no end.
    ``with_decision`` sends the last statement and COMMIT in one exchange; what is left to do then is SQLAlchemy's.

    Raises:
        TransactionAborted: The transaction has certainly been rolled back.
        TransactionInDoubt: The answer is missing: the transaction may have been committed, or may yet be. Also raised for any
            interruption (``KeyboardInterrupt``) while waiting. The connection was discarded.
    """
    verb = "COMMIT" if prepare_as is None else "PREPARE TRANSACTION"
    roll_back, throw_away = (rollback_joined, discard_joined) if joined else (rollback, discard)
    _stop_refusing(connection)
    leave_to_parent()
    driver = driver_of(connection)
    standing = Standing.BROKEN if driver is None else dialect.standing(driver)
    if driver is None or standing is Standing.BROKEN:
        roll_back(connection)
        raise TransactionAborted(
            f"the database connection was lost before {verb} was sent", transactional_id=transactional_id
        )
    if standing is Standing.FAILED:
        # The server would answer COMMIT with a silent ROLLBACK, and the driver would report success.
        roll_back(connection)
        raise TransactionAborted(
            f"a statement failed before, so {verb} would have been a ROLLBACK",
            transactional_id=transactional_id,
            next_step="stop after a failed statement, or run it in a savepoint (begin_nested)",
            retryable=False,
        )
    if standing is Standing.ENDED:
        throw_away(connection)
        raise _ended_before(verb, transactional_id)
    try:
        with dialect.bounded(connection, answer_s):
            if with_decision is not None:
                with_decision()
            if joined:
                _commit_driver(connection, driver)
            elif prepare_as is None:
                connection.commit()
            else:
                connection.exec_driver_sql(f"PREPARE TRANSACTION '{prepare_as}'")
                connection.rollback()  # only SQLAlchemy's state: the database has nothing left to roll back
    except BaseException as error:
        if dialect.certainly_rolled_back(driver, error):
            roll_back(connection)
            retryable = isinstance(error, exc.SQLAlchemyError) and meaning_of(error) in _RETRYABLE
            raise TransactionAborted(
                f"{verb} failed: {driver_words(error)}", transactional_id=transactional_id, retryable=retryable
            ) from error
        throw_away(connection, error)
        raise TransactionInDoubt(
            f"the answer to {verb} is missing: {driver_words(error)}", transactional_id=transactional_id
        ) from error
    if dialect.commit_found_none(driver):
        throw_away(connection)
        raise _ended_before(verb, transactional_id)


def _ended_before(verb: str, transactional_id: str | None) -> TransactionInDoubt:
    return TransactionInDoubt(
        f"other code ended the database transaction before {verb} was executed", transactional_id=transactional_id
    )


def rollback(connection: Connection) -> None:
    """Roll back any transaction of the connection. Never raises: discards a connection that cannot roll back."""
    _stop_refusing(connection)
    leave_to_parent()
    driver = driver_of(connection)
    try:
        connection.rollback()
    except Exception as error:  # noqa: BLE001 - the caller already has an error to raise; log this one
        logger.warning("discarding a database connection that did not roll back: %s", driver_words(error))
        discard(connection, error)
        return
    _roll_back_driver(driver)


def rollback_joined(connection: Connection) -> None:
    """Roll back what the database has of a joined transaction. Never raises. Its own code ends it in SQLAlchemy."""
    leave_to_parent()
    _roll_back_driver(driver_of(connection))


def discard_joined(connection: Connection, error: BaseException | None = None) -> None:
    """Close the driver's connection of a joined transaction for good. Never raises."""
    leave_to_parent()
    if not connection.closed:
        connection.invalidate(error)


def _commit_driver(connection: Connection, driver: DBAPIConnection) -> None:
    try:
        driver.commit()
    except connection.dialect.loaded_dbapi.Error as error:
        raise exc.DBAPIError.instance(
            None, None, error, connection.dialect.loaded_dbapi.Error, dialect=connection.dialect
        ) from error


def driver_of(connection: Connection) -> DBAPIConnection | None:
    """The driver's connection; None if it is lost. Never connects again."""
    if connection.closed or connection.invalidated:
        return None
    return connection.connection.dbapi_connection


def _roll_back_driver(driver: DBAPIConnection | None) -> None:
    """Roll back below SQLAlchemy, which sends nothing after a COMMIT was called, even if a listener stopped it."""
    try:
        if driver is not None:
            driver.rollback()
    except Exception as error:  # noqa: BLE001 - drivers raise different errors; the pool also rolls back or closes
        logger.warning("the database connection did not roll back: %s", driver_words(error))


def discard(connection: Connection, error: BaseException | None = None) -> None:
    """Close the driver's connection for good, and leave SQLAlchemy's connection outside a transaction. Never raises."""
    _stop_refusing(connection)
    leave_to_parent()
    if connection.closed:
        return
    connection.invalidate(error)
    connection.rollback()
