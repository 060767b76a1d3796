"""The connection of a block: one of the engine's, the user's own, or one made over a connection of psycopg's or of Django's.

Each unit of a group gets a :class:`UnitConnection` over that of its block.

A connection belongs to the process that began the dual write on it. In one that was forked meanwhile nothing must reach the
server: a ROLLBACK from there would end the parent's transaction, and the parent would not notice.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from sqlalchemy import Connection, CursorResult, Engine, StaticPool, exc

from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    IllegalStateError,
    OutcomeUnverifiable,
    TransactionAborted,
)
from dualwrite.stores.sql.access__stores_sql_access_connecting import fileno_of
from dualwrite.stores.sql.access__stores_sql_access_failures import map_database_error

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import PoolProxiedConnection

logger = logging.getLogger(__name__)

LEFT_OPEN: Final = "the driver's connection is already in a transaction"
LEFT_IN_AUTOCOMMIT: Final = "the connection is in autocommit: each statement would be committed by itself"
_LEFT: Final = frozenset({LEFT_OPEN, LEFT_IN_AUTOCOMMIT})
"""The errors of a connection that other code has left unusable, or that is so by the settings of its engine."""

_borrowed: Final[weakref.WeakSet[Connection]] = weakref.WeakSet()


class Begun:
    """The transaction of a dual write, from its beginning to its end.

    Attributes:
        pooled: Its connection, as the pool has handed it out.
        joined_late: Whether other code has executed statements in it before.
        started: The database's word for it, which its first statement has returned.
        decided: The ids whose decisions it holds.
        refuses: Whether a COMMIT by other code is refused.
        left: Whether it was left to the process that this one was forked from.
        plain: Whether nothing but plain statements on rows was executed in it, as far as this process can tell: it has watched
            all of them.
    """

    __slots__ = ("decided", "joined_late", "left", "plain", "pooled", "refuses", "started")

    def __init__(self, pooled: PoolProxiedConnection, *, joined_late: bool) -> None:
        self.pooled = pooled
        self.joined_late = joined_late
        self.started: object = None
        self.decided: list[str] = []
        self.refuses = False
        self.left = False
        self.plain = False


_in_dual_writes: Final[dict[Connection, Begun]] = {}
"""Strong references: what a forked process drops must not be collected there, as the pool would roll it back."""
_process = os.getpid()
_infos: Final[weakref.WeakKeyDictionary[object, dict[Any, Any]]] = weakref.WeakKeyDictionary()
"""Facts about each of the user's psycopg connections, which outlive the connection of SQLAlchemy over it."""
_PERMIT: Final = "dualwrite.permit"
_AFTER_THE_DECISION: Final = (CompletionPending, DecidedTransactionLost, OutcomeUnverifiable)
"""The errors of a block whose rows are committed."""


class DjangoConnection(Protocol):
    """``django.db.connection``, or one of ``django.db.connections``: what is used of it here."""

    alias: str
    in_atomic_block: bool
    needs_rollback: bool
    run_on_commit: list[Any]
    connection: Any

    def ensure_connection(self) -> None:
        """Connect, unless connected."""
        ...

    def run_and_clear_commit_hooks(self) -> None:
        """Run what ``on_commit`` was given."""
        ...


@contextmanager
def usable(given: object, engine: Engine) -> Generator[Connection, None, None]:
    """The user's connection as SQLAlchemy's.

    Args:
        given: A connection of SQLAlchemy's, of psycopg's or of Django's.
        engine: The writer's engine.

    Yields:
        The connection. One of psycopg's or Django's stays open, unless its transaction is in doubt.

    Raises:
        ConfigurationError: The connection is asynchronous, or not SQLAlchemy's while the writer uses another database.
        IllegalStateError: It is no connection.
    """
    if isinstance(given, Connection):
        yield given
    elif _is_psycopg(given):
        with _over(cast("psycopg.Connection[Any]", given), engine) as connection:
            yield connection
    elif _is_django(given):
        with _in_atomic(cast("DjangoConnection", given), engine) as connection:
            yield connection
    else:
        raise IllegalStateError(
            f"transaction() takes a connection of SQLAlchemy, psycopg 3 or Django, not {type(given).__name__}",
            next_step="give engine.connect(), or nothing; for sessions of your own use bind()",
        )


@contextmanager
def borrowed(engine: Engine) -> Generator[Connection, None, None]:
    """A connection of the engine's for as long as the block lasts.

    Raises:
        DualWriteError: The engine could not connect.
    """
    try:
        own = engine.connect()
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine) from error
    _borrowed.add(own)
    with own:
        yield own


def begin_on(connection: Connection, begin: Callable[[], None], *, own: bool | None = None) -> None:
    """Begin a transaction; on another connection of the pool if other code has left the engine's own one unusable.

    Args:
        connection: The connection.
        begin: Begins on it.
        own: Whether it is one of the engine's own, and not the user's; by default one that was :func:`borrowed` is.

    Raises:
        DualWriteError: As ``begin``.
    """
    others: int | None = None
    while True:
        try:
            begin()
        except DualWriteError as error:
            if error.what not in _LEFT or not (connection in _borrowed if own is None else own):
                raise
            if others is None:
                # All that wait in the pool may be like this one, but not the one that is made after them. A pool that keeps
                # none makes a new one each time, or shares one, which must not be taken from the others.
                waiting = getattr(connection.engine.pool, "checkedin", None)
                others = 0 if waiting is None else waiting() + 1
            if not others:
                raise
            others -= 1
            logger.warning("discarding a connection of the pool that other code has left unusable: %s", error.what)
            connection.invalidate()
        else:
            return


def keep(connection: Connection, *, joined_late: bool = False) -> Begun:
    """Note that a dual write begins on the connection. In a process that is forked meanwhile it is left to this one."""
    begun = _in_dual_writes[connection] = Begun(connection.connection, joined_late=joined_late)
    return begun


begun_on: Final = _in_dual_writes.get
"""The transaction of the dual write that is on this connection; None if there is none."""


def let_go(connection: Connection) -> None:
    """Note that the dual write has ended."""
    _in_dual_writes.pop(connection, None)


def leave_to_parent() -> None:
    """In a forked process, part with the connections of the parent's dual writes. Elsewhere it does nothing.

    It runs after each fork. Finalizers of the child run before that: they call it first.
    """
    global _process  # noqa: PLW0603 - the process is global to the process
    if os.getpid() == _process:
        return
    _process = os.getpid()
    for begun in _in_dual_writes.values():  # they stay: the parent's dual writes are to be refused here
        if not begun.left:
            begun.left = True
            _leave(begun.pooled)


os.register_at_fork(after_in_child=leave_to_parent)


def _leave(pooled: PoolProxiedConnection) -> None:
    """Take the driver's connection from SQLAlchemy without a word to the server, and make it useless in this process."""
    driver = pooled.driver_connection
    if driver is None:
        return
    import ctypes  # noqa: PLC0415 - in a forked process only

    # For good: SQLite rolls back what is open in the file when its connection is collected.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(driver))
    with suppress(Exception):  # an asynchronous driver's thread is in the parent
        if isinstance(driver, sqlite3.Connection):
            driver.set_authorizer(lambda *_: sqlite3.SQLITE_DENY)
        else:
            _sever(fileno_of(driver))
    record: Any = pooled._connection_record  # noqa: SLF001 - invalidate() would close it
    for holder in (record, pooled):
        if holder is not None:
            holder.dbapi_connection = None


def _sever(fileno: int) -> None:
    """Put a socket without a peer in the place of one that the parent uses: whatever is sent on it fails here."""
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        os.dup2(ours.fileno(), fileno, inheritable=False)


class UnitConnection(Connection):
    """The connection of one unit: that of its group, until the unit has ended.

    Parts of a unit may outlive it: the siblings of a part that has failed in ``asyncio.gather``, a thread. With the group's own
    connection they would write into the commit of the others.

    Args:
        group: The connection of the group.
        uses: Entered for each use; raises once the unit has ended.
    """

    def __init__(self, group: Connection, uses: AbstractContextManager[object]) -> None:
        vars(self).update(vars(group))  # the same driver's connection, transaction, events and options
        self._group = group
        self._uses = uses

    def _execute_context(self, *args: Any, **options: Any) -> CursorResult[Any]:
        """Every statement comes here, those of SQLAlchemy's own savepoints too."""
        with self._uses:
            return super()._execute_context(*args, **options)

    def commit(self) -> None:
        """As that of the group, which refuses it."""
        with self._uses:
            super().commit()

    def rollback(self) -> None:
        """As that of the group: the unit fails."""
        with self._uses:
            super().rollback()

    def close(self) -> None:
        """As that of the group: the unit fails."""
        with self._uses:
            self._group.close()
            self._dbapi_connection = None

    def invalidate(self, exception: BaseException | None = None) -> None:
        """As that of the group, which must know that the driver's connection is lost."""
        self._group.invalidate(exception)
        self._dbapi_connection = None


def permit_of(connection: Connection | None) -> Callable[[object], None]:
    """A function that may still refuse the decision, called right before COMMIT. For Django it looks at the marks."""
    return _permit_all if connection is None else connection.info.get(_PERMIT, _permit_all)


def _permit_all(_: object) -> None:
    pass


def _is_psycopg(given: object) -> bool:
    loaded = sys.modules.get("psycopg")
    if loaded is None:
        return False
    if isinstance(given, loaded.AsyncConnection):
        raise ConfigurationError(
            "the connection is asynchronous", next_step="give a psycopg.Connection, in a thread (asyncio.to_thread)"
        )
    return isinstance(given, loaded.Connection)


@contextmanager
def _over(driver: psycopg.Connection[Any], engine: Engine) -> Generator[Connection, None, None]:
    """A connection of SQLAlchemy's over one of the driver's, with the dialect that the writer's engine has found out."""
    from psycopg import Cursor  # noqa: PLC0415 - only SQLite's users may lack it
    from psycopg.pq import TransactionStatus  # noqa: PLC0415 - as above
    from psycopg.rows import tuple_row  # noqa: PLC0415 - as above

    if engine.dialect.name != "postgresql":
        raise ConfigurationError(
            f"a psycopg connection leads to another database than the writer's engine ({engine.dialect.name})",
            next_step="give a connection to the writer's database: a dual write is decided in one database",
        )
    if driver.closed:
        raise IllegalStateError("the psycopg connection is closed", next_step="give an open one")
    if driver.info.transaction_status != TransactionStatus.IDLE:
        raise IllegalStateError(
            "the psycopg connection is already in a transaction",
            next_step="end it first (psycopg begins one with the first statement, also with a SELECT)",
        )
    pool = StaticPool(lambda: driver, reset_on_return=None, dialect=engine.dialect)  # type: ignore[arg-type]
    with Engine(pool, engine.dialect, engine.url).connect() as connection:
        # The user's row factory and kind of cursor are for the user's statements.
        vars(connection.connection)["cursor"] = lambda: Cursor(driver, row_factory=tuple_row)
        connection.info.update(_infos.get(driver, {}))
        info = connection.info
        try:
            yield connection
        finally:
            _infos[driver] = info


def _is_django(given: object) -> bool:
    loaded = sys.modules.get("django.db")
    if loaded is None:
        return False
    from django.db.backends.base.base import BaseDatabaseWrapper  # noqa: PLC0415 - only Django's users have it

    return isinstance(given, BaseDatabaseWrapper) or given is loaded.connection


@contextmanager
def _in_atomic(given: DjangoConnection, engine: Engine) -> Generator[Connection, None, None]:
    """Django's ``atomic()`` around a block: Django's marks can roll it back, and its ``on_commit`` hooks run if it commits.

    ``atomic()`` itself then finds nothing left to commit or to roll back, and does what it does besides.
    """
    from django.db import transaction  # noqa: PLC0415 - only Django's users have it

    if given.in_atomic_block:
        raise IllegalStateError(
            "Django's connection is already inside atomic()",
            next_step="begin the block outside of it; with ATOMIC_REQUESTS, mark the view with "
            "@transaction.non_atomic_requests",
        )
    marked = TransactionAborted("Django has marked the transaction for rollback", retryable=False)
    asked = False
    told: BaseException | None = None
    hooks: list[Any] = []

    def permit(_: object) -> None:
        nonlocal asked
        if given.needs_rollback:
            raise marked
        asked = True

    try:
        with transaction.atomic(using=given.alias, durable=True):
            driver = _psycopg_of(given)
            with _over(driver, engine) as connection:
                connection.info[_PERMIT] = permit
                try:
                    yield connection
                except BaseException as error:
                    if error is not marked:
                        told = error
                        # Asked for a permit, the block's own code has ended: the error is not one that it has raised itself.
                        if not asked or not isinstance(error, _AFTER_THE_DECISION):
                            raise
                finally:
                    connection.info.pop(_PERMIT, None)  # a lost connection has lost it
            if asked and driver.closed:
                # Committed, and the connection lost since: Django would send it a COMMIT, and forget the hooks as it connects.
                hooks, given.run_on_commit, given.connection = given.run_on_commit, [], None
        if hooks:
            given.run_on_commit = hooks
            given.run_and_clear_commit_hooks()
    finally:
        if told is not None:
            raise told  # also if Django could not connect again, or a hook has failed: the outcome is what the caller must know


def _psycopg_of(given: DjangoConnection) -> psycopg.Connection[Any]:
    given.ensure_connection()
    if not _is_psycopg(given.connection):
        raise ConfigurationError(
            f"Django's connection is one of {type(given.connection).__module__}",
            next_step="use Django's PostgreSQL backend with psycopg 3",
        )
    return cast("psycopg.Connection[Any]", given.connection)
