"""Follows a connection's savepoints in its statements; a witness savepoint reveals those that no statement shows.

Where the driver shows what it sends (psycopg, PyMySQL, mysqlclient), all savepoints are followed, whoever sends them; on
SQLite, only those of SQLAlchemy. The database is not asked before there is a savepoint, or doubt.
"""

from __future__ import annotations

import secrets
import sys
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, event, exc

from dualwrite.errors import IllegalStateError, TransactionAborted, TransactionInDoubt, Unavailable
from dualwrite.protocol.message import Move, NotUnderstood, Savepoints, moves_of
from dualwrite.stores.sql import dialect as committing
from dualwrite.stores.sql.access import SAVEPOINTS, UnitConnection, begun_on, map_database_error, number_of, sqlstate_of
from dualwrite.stores.sql.dialect import Standing
from dualwrite.stores.sql.drivers import Listeners

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from sqlalchemy.orm import Session, SessionTransaction

    from dualwrite.protocol.message import Sendable
    from dualwrite.stores.sql.dialect import Dialect

_STEP: Final = (
    "use connection.begin_nested() or session.begin_nested(), or execute SAVEPOINT, RELEASE and ROLLBACK TO one by one through "
    "the SQLAlchemy connection"
)
# No unit has one of this name: of several, only the innermost could be rolled back.
_UNIT: Final = f"dualwrite_unit_{secrets.token_hex(4)}"
_NO_SAVEPOINT: Final = 1305  # on MariaDB and MySQL
_ORM: Final = "sqlalchemy.orm"

_watched: Final[dict[Connection, SavepointWatch]] = {}


def _before(connection: Connection, cursor: object, statement: str, *others: object) -> None:
    del cursor, others
    if (watch := _watched.get(connection)) is not None:
        watch.before(statement)


def _after(connection: Connection, cursor: object, statement: str, *others: object) -> None:
    del cursor
    if (watch := _watched.get(connection)) is not None:
        watch.after(statement, many=_is_executemany(others))


LISTENERS: Final = Listeners({"before_cursor_execute": _before, "after_cursor_execute": _after})
"""Follow statements on databases whose driver shows none (SQLite). Elsewhere a statement costs no such call."""


def _open_now(session: Session, transaction: SessionTransaction) -> None:
    """Send a session's SAVEPOINT at ``begin_nested()``: a message produced before its next statement would fall outside."""
    if transaction.nested and session.bind in _watched:
        session.connection()


def watch_sessions() -> None:
    """Send the SAVEPOINTs of all sessions at once. Not to be called first while a session begins a transaction."""
    from sqlalchemy.orm import Session  # noqa: PLC0415 - large, and loaded only where the application uses it

    if not event.contains(Session, "after_transaction_create", _open_now):
        event.listen(Session, "after_transaction_create", _open_now)  # on all sessions: users bind their own


def _open_savepoints(connection: Connection) -> Sequence[str]:
    """The names of the savepoints that SQLAlchemy has opened on the connection, the outermost first."""
    names = []
    nested = connection.get_nested_transaction()
    while nested is not None:
        names.append(nested._savepoint)  # noqa: SLF001 - SQLAlchemy tells listeners the name, but only as it opens one
        nested = nested._previous_nested  # noqa: SLF001 - as above
    return names[::-1]


class SavepointWatch:
    """Watches one connection during one dual write. Implements :class:`dualwrite.interfaces.SavepointWatch`."""

    def __init__(self, connection: Connection, dialect: Dialect, transactional_id: str) -> None:
        self._connection = connection
        self._dialect = dialect
        self._id = transactional_id
        self._savepoints: Savepoints[Sendable] = Savepoints()
        begun = begun_on(connection)
        if begun is not None and begun.joined_late:
            for name in connection.info.get(SAVEPOINTS, ()):  # of Django's, which SQLAlchemy does not know
                self._savepoints.apply(Move.OPEN, name)
        if connection.get_nested_transaction() is not None:
            for name in _open_savepoints(connection):
                self._savepoints.apply(Move.OPEN, name)
        self._witness = dialect.witness(connection, self)
        self._unanswered: str | None = None
        self._lost_track: str | None = None
        self._sees_sessions = False
        self._unit: Connection | None = None
        self._unit_kept = False
        if _ORM in sys.modules:
            self.expect_session()
        if not dialect.shows_statements:
            LISTENERS.require(connection)
        _watched[connection] = self

    def expect_session(self) -> None:
        watch_sessions()
        self._sees_sessions = True

    @property
    def direct(self) -> bool:
        if not self._sees_sessions and _ORM in sys.modules:
            # A session made since then may have begun a savepoint that it has not sent yet.
            self.expect_session()
            raise TransactionAborted(
                "sqlalchemy.orm was imported inside the block, for the first time in this process: a savepoint may have been "
                "missed",
                transactional_id=self._id,
                next_step="run the work again; import sqlalchemy.orm before the block",
            )
        return self._savepoints.idle and not self._witness.doubtful and self._lost_track is None

    @property
    def holds(self) -> bool:
        return self._savepoints.holds

    @property
    def may_roll_back(self) -> bool:
        return self._savepoints.may_roll_back

    def add(self, message: Sendable) -> None:
        self._require_track()
        if self._witness.doubtful or (self._savepoints.needs_witness and not self._witness.shown_all):
            self._renew_witness()
        self._savepoints.add(message)

    def _renew_witness(self) -> None:
        self.require_unit()
        known = self._savepoints.witness
        number = self._savepoints.new_witness()
        driver = self._connection.connection.dbapi_connection
        if driver is None or self._dialect.standing(driver) is not Standing.OPEN:
            return  # the database cannot be asked: finish() will miss this number, unless a rollback is seen
        try:
            kept = self._witness.keep(self._connection, known, number)
        except IllegalStateError:
            self._savepoints.witness = known
            raise
        except exc.SQLAlchemyError as error:
            raise self._mapped(error) from error
        if not kept:
            self._lost_track = _TAKEN_BACK
            self._require_track()

    def open_unit(self, uses: AbstractContextManager[object]) -> Connection:
        """The answers, also to the renewed witness, come with that to the unit's first statement."""
        self._require_track()
        release = [f"RELEASE SAVEPOINT {_UNIT}"] if self._unit_kept else []
        self._unit_kept = False
        self._savepoints.apply(Move.OPEN, _UNIT)
        self._execute([*release, f"SAVEPOINT {_UNIT}"], self._savepoints.new_witness(), later=True)
        self._unit = UnitConnection(self._connection, uses)
        _watched[self._unit] = self
        return self._unit

    def require_unit(self) -> None:
        try:
            self._witness.settle(self._connection)
        except exc.SQLAlchemyError as error:
            raise self._gone(error) from error

    def keep_unit(self) -> str | None:
        """The next unit, or COMMIT, releases its savepoint in the database."""
        self._require_transaction()
        driver = committing.driver_of(self._connection)
        if driver is not None and self._dialect.standing(driver) is Standing.FAILED:
            return "a statement failed, and the unit continued"
        try:
            self._judge_unanswered()
            self._require_track()
            if self._witness.doubtful:
                self._require_witness()
            self._end_unit(Move.RELEASE)
        except TransactionAborted as lost:
            return lost.what
        self._unit_kept = True
        return None

    def drop_unit(self) -> None:
        self._require_transaction()
        # Whatever the unit did is undone, if its savepoint is still there.
        self._unanswered = self._lost_track = None
        self._execute([f"ROLLBACK TO SAVEPOINT {_UNIT}", f"RELEASE SAVEPOINT {_UNIT}"], None)
        self._end_unit(Move.ROLL_BACK, Move.RELEASE)

    def _require_transaction(self) -> None:
        """Raise if the unit has ended the transaction through SQLAlchemy, or lost its connection."""
        driver = committing.driver_of(self._connection)
        if driver is None or self._dialect.standing(driver) is Standing.BROKEN:
            raise Unavailable("a unit of the group has lost the database connection", transactional_id=self._id)
        self._dialect.require_not_rolled_back(
            self._connection
        )  # after a deadlock, MariaDB has nothing of the group left
        transaction = self._connection.get_transaction()
        if transaction is None or not transaction.is_active:
            raise TransactionAborted(
                "a unit has rolled back the transaction of its group, or tried to commit it",
                transactional_id=self._id,
                next_step="leave COMMIT and ROLLBACK to the group: raise to undo the unit, or use begin_nested()",
                retryable=False,
            )

    def _end_unit(self, *moves: Move) -> None:
        self._unwatch_unit()
        try:
            for move in moves:
                self._savepoints.apply(move, _UNIT)
        except NotUnderstood as error:
            self._lost_track = str(error)
            self._require_track()

    def _execute(self, statements: Sequence[str], number: int | None, *, later: bool = False) -> None:
        try:
            self._witness.execute(self._connection, statements, number, later=later)
        except exc.SQLAlchemyError as error:
            raise self._gone(error) from error

    def _gone(self, error: exc.SQLAlchemyError) -> Exception:
        if isinstance(error, exc.DBAPIError) and _is_gone(error):
            return TransactionInDoubt(
                "a unit has ended its savepoint, or the transaction of its group, by statements of its own",
                transactional_id=self._id,
                next_step="compare the rows of the group's units; leave COMMIT and ROLLBACK to the group",
            )
        return self._mapped(error)

    def take(self) -> Sequence[Sendable]:
        return self._savepoints.take()

    def finish(self) -> None:
        if self._unanswered is not None:
            self._judge_unanswered()
        if self._lost_track is not None:
            self._require_track()
        if self._unit_kept:
            # Also shows that the transaction is the one that the units ran in.
            self._execute([f"RELEASE SAVEPOINT {_UNIT}"], None)
        elif self._savepoints.witness:
            self._require_witness()
        self._savepoints.end()
        self.stop()

    def _require_witness(self) -> None:
        try:
            shown = self._witness.shows(self._connection, self._savepoints.witness)
        except exc.SQLAlchemyError as error:
            raise self._mapped(error) from error
        if not shown:
            self._lost_track = _TAKEN_BACK
            self._require_track()

    def _unwatch_unit(self) -> None:
        unit, self._unit = self._unit, None
        if unit is not None:
            _watched.pop(unit, None)

    def stop(self) -> None:
        if self._unit is not None:
            self._unwatch_unit()
        if _watched.get(self._connection) is self:
            del _watched[self._connection]
            self._witness.stop()

    def before(self, statement: str) -> None:
        self._judge_unanswered()
        self._unanswered = statement

    def after(self, statement: str, *, many: bool) -> None:
        self._unanswered = None
        try:
            moves = self._moves_of(statement)
            if moves and many:
                raise NotUnderstood("a savepoint in executemany()")
            for move, name in moves:
                self._savepoints.apply(move, name)
        except NotUnderstood as error:
            self._lost_track = self._lost_track or str(error)

    def failed(self, statement: str, error: BaseException) -> None:
        self._unanswered = statement
        self._judge_unanswered(interrupted=not isinstance(error, Exception))

    def doubt(self) -> None:
        self._witness.doubtful = True
        if self._savepoints.at_risk:
            self._lost_track = self._lost_track or "statements that the driver does not show were sent after it"

    def _moves_of(self, statement: str) -> Sequence[tuple[Move, str]]:
        return moves_of(statement, quotes_keep_case=self._dialect.quotes_keep_case)

    def _judge_unanswered(self, *, interrupted: bool = False) -> None:
        """Lose track if several statements sent as one text failed: the first of them may have been executed."""
        statement, self._unanswered = self._unanswered, None
        if statement is None or not (interrupted or ";" in statement):
            return
        try:
            moves = self._moves_of(statement)
        except NotUnderstood as error:
            self._lost_track = self._lost_track or str(error)
            return
        if moves:
            several = "several statements in one text, savepoints among them, failed"
            self._lost_track = self._lost_track or ("a savepoint was interrupted" if interrupted else several)

    def _require_track(self) -> None:
        if self._lost_track is not None:
            raise TransactionAborted(
                f"lost track of the messages that belong to a rolled-back savepoint: {self._lost_track}",
                transactional_id=self._id,
                next_step=_STEP,
                retryable=False,
            )

    def _mapped(self, error: exc.SQLAlchemyError) -> Exception:
        return map_database_error(error, self._connection.engine, transactional_id=self._id)


def _is_executemany(arguments: Sequence[object]) -> bool:
    return bool(arguments[-1])


def _is_gone(error: exc.DBAPIError) -> bool:
    """Whether the savepoint or the transaction is no longer there."""
    if number_of(error.orig) == _NO_SAVEPOINT:
        return True
    return sqlstate_of(error.orig) in {"3B001", "25P01"} or "no such savepoint" in str(error.orig)


_TAKEN_BACK: Final = (
    "a savepoint, or the whole transaction, was rolled back past SQLAlchemy after a message was produced"
)
