"""Sessions that the application makes itself: each joins a dual write with its first message, and its COMMIT ends both.

SQLAlchemy begins and ends the transaction of such a session. A joined session's pooled connection has a ``commit`` of ours:
SQLAlchemy calls it in place of the driver's once everything is flushed. It ends the dual write, whose decision is the
database's COMMIT, as at the end of a block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

from sqlalchemy import Connection, Engine, TwoPhaseTransaction, event, exc
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.writing.sending import raise_aborted

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message
    from sqlalchemy.orm import SessionTransaction
    from sqlalchemy.pool import ConnectionPoolEntry

    from dualwrite.writing.transaction import Transaction

Block = Callable[[Connection], AbstractContextManager["Transaction"]]
"""A dual write in the transaction that the connection is in: entered before its first message, left in place of COMMIT."""

_ASYNC: Final = "sqlalchemy.ext.asyncio"
_JOINED: Final = "dualwrite.joined"


class BoundSessions:
    """The sessions of one factory, which may produce messages that commit with their rows. Made by ``DualWriter.bind``.

    A session that produces joins a dual write: it takes a lane, and the writer checks in the session's transaction that it
    still owns the lane, before the message is sent. From then on ``session.commit()``, or the end of ``with session.begin()``,
    commits both sides, with the errors of ``DualWriter.transaction()``; after an error call ``session.rollback()``, as after
    every commit that fails. ``rollback()`` and ``close()`` abort both sides. A message that is produced inside
    ``begin_nested()`` is dropped when that savepoint is rolled back. Sessions that produce nothing are left alone.

    Args:
        transactional_id: The writer's.
        source: The factory, or the class, of the sessions.
        block: Begins a dual write in a transaction.
        joins_first: Sessions of this engine join a dual write before ``begin_nested()`` sends their first SAVEPOINT: SQLite's,
            where a savepoint that no BEGIN precedes commits at its end.

    Raises:
        ConfigurationError: Sessions of this kind cannot be bound.
    """

    def __init__(
        self, transactional_id: str, source: object, block: Block, *, joins_first: Engine | None = None
    ) -> None:
        self.transactional_id = transactional_id
        self._class = _class_of(source)
        self._block = block
        self._eager = joins_first
        self._connections: weakref.WeakKeyDictionary[Session, weakref.WeakSet[Connection]] = weakref.WeakKeyDictionary()
        self._joined: weakref.WeakKeyDictionary[Session, _Joined] = weakref.WeakKeyDictionary()
        event.listen(self._class, "after_begin", self._began)
        event.listen(self._class, "after_transaction_create", self._created)
        event.listen(self._class, "after_transaction_end", self._ended)

    def produce(
        self,
        session: Session | scoped_session[Any],
        topic: str,
        value: object = None,
        key: object = None,
        *,
        partition: int | None = None,
        headers: Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]] | None = None,
        timestamp_ms: int | None = None,
        on_delivery: Callable[[KafkaError | None, Message], None] | None = None,
    ) -> None:
        """Hand one message to the producer, in the session's transaction; see :meth:`Transaction.produce`.

        Nothing is durable on return: the message becomes visible once ``session.commit()`` has committed both sides.

        Raises:
            DualWriteError: As :meth:`join` and :meth:`Transaction.produce`. The session can no longer commit: roll it back.
        """
        self.join(session).produce(
            topic,
            value,
            key,
            partition=partition,
            headers=headers,
            timestamp_ms=timestamp_ms,
            on_delivery=on_delivery,
        )

    def join(self, session: Session | scoped_session[Any]) -> Transaction:
        """Let the session's transaction join a dual write, unless it has; :meth:`produce` does so by itself.

        Call it before the session's first statement if its isolation level is REPEATABLE READ or SERIALIZABLE: with a snapshot
        that is older than the dual write, the writer could not see that another owner has taken over.

        Returns:
            The dual write, for its other methods (``produce_many``, ``send_offsets_to_transaction``); usable until the
            transaction of the session ends. It has no session of its own.

        Raises:
            IllegalStateError: The session is not one of the bound factory, this thread is inside another dual write of this
                writer, or the transaction has gone too far.
            ConfigurationError: The session leads to another database, works with several databases, is in autocommit, in
                two-phase mode, or asynchronous.
            Unavailable: No lane was free, or a server does not answer.
            Fenced: Another owner took over.
        """
        session = self._own(session)
        return self._join(session, session.connection())

    def _join(self, session: Session, connection: Connection) -> Transaction:
        joined = _joined_on(connection)
        if joined is None:
            joined = self._joined[session] = _Joined(self, connection)
            joined.begin(session)
        elif joined.sessions is not self:
            raise IllegalStateError(
                "the session's transaction has joined a dual write through another bind()",
                transactional_id=self.transactional_id,
                next_step="bind a factory once, and use the result everywhere",
            )
        return joined.transaction

    def _own(self, session: object) -> Session:
        found = session() if isinstance(session, scoped_session) else session
        if isinstance(found, self._class):
            return found
        raise IllegalStateError(
            f"{type(found).__name__} is not a session of the factory that was bound",
            transactional_id=self.transactional_id,
            next_step="make the session with that factory, or bind the factory that made it",
        )

    def block_of(self, session: Session, connection: Connection) -> AbstractContextManager[Transaction]:
        """A dual write in the session's transaction; not begun yet.

        Raises:
            ConfigurationError: The session cannot have one.
        """
        if session.twophase or isinstance(connection.get_transaction(), TwoPhaseTransaction):
            raise _two_phase()
        if connection.dialect.is_async:
            raise _asynchronous()
        if type(connection.dialect).do_commit is not DefaultDialect.do_commit:  # it would pass by our own commit
            raise ConfigurationError(f"{type(connection.dialect).__name__} has a COMMIT of its own")
        others = self._connections.get(session, weakref.WeakSet())
        if any(not other.closed and other.in_transaction() for other in others if other is not connection):
            raise _several()
        return self._block(connection)

    def _began(self, session: Session, transaction: SessionTransaction, connection: Connection) -> None:
        del transaction
        self._connections.setdefault(session, weakref.WeakSet()).add(connection)
        joined = self._open(session)
        if joined is not None and joined.connection is not connection:
            joined.refusal = _several()
            raise joined.refusal

    def _created(self, session: Session, transaction: SessionTransaction) -> None:
        if not transaction.nested:
            return
        if self._open(session) is not None:
            # Otherwise SAVEPOINT would be sent with its first statement, and a message before that would not belong to it.
            session.connection()
        elif transaction.parent is not None and self._joins_first(session):
            self._join(session, transaction.parent.connection(None))
            session.connection()

    def _joins_first(self, session: Session) -> bool:
        if self._eager is None:
            return False
        with suppress(exc.UnboundExecutionError):  # no engine of its own: its statements name one each
            bind = session.get_bind()
            return isinstance(bind, Engine) and bind.pool is self._eager.pool
        return False

    def _ended(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None and (joined := self._open(session)) is not None:
            joined.leave_to_owner()

    def _open(self, session: Session) -> _Joined | None:
        joined = self._joined.get(session)
        return joined if joined is not None and joined.is_open else None

    def __repr__(self) -> str:
        return f"<BoundSessions {self.transactional_id} {self._class.__name__}>"


class _RolledBack(Exception):
    """Leaves the block of a dual write whose session was rolled back."""


class _Joined:
    """One dual write in the transaction of a connection, until SQLAlchemy commits it or rolls it back.

    Attributes:
        sessions: Of which sessions the connection is one.
        connection: The connection.
        refusal: The first error after which the transaction must not commit.
        is_open: Whether the transaction has not ended.
    """

    def __init__(self, sessions: BoundSessions, connection: Connection) -> None:
        self.sessions = sessions
        self.connection = connection
        self.refusal: BaseException | None = None
        self.is_open = True
        self._pooled = connection.connection
        self._block: AbstractContextManager[Transaction] | None = None
        self._transaction: Transaction | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    @property
    def transaction(self) -> Transaction:
        """The dual write."""
        if self.refusal is not None:
            self._raise_aborted(self.refusal)
        assert self._transaction is not None
        return self._transaction

    def begin(self, session: Session) -> None:
        """Begin the dual write. From now on COMMIT is ours, even if this fails: rows without their messages must not commit."""
        vars(self._pooled)["commit"] = self.commit
        _joined[self.connection] = weakref.ref(self)
        self._pooled.info[_JOINED] = weakref.ref(self)
        if not event.contains(self.connection, "rollback", _rolled_back):
            event.listen(self.connection, "rollback", _rolled_back)
        for name in ("reset", "invalidate"):
            if not event.contains(self.connection.engine.pool, name, _returned):
                event.listen(self.connection.engine.pool, name, _returned)
        self._finalizer = weakref.finalize(session, self.abandon)
        self._finalizer.atexit = False
        try:
            block = self.sessions.block_of(session, self.connection)
            self._transaction = block.__enter__()
        except BaseException as error:
            self.refusal = error
            raise
        self._block = block

    def commit(self) -> None:
        """End the dual write. SQLAlchemy calls it in place of the driver's COMMIT.

        Raises:
            DualWriteError: As the end of a block. The database has rolled back, unless the error says otherwise.
        """
        self._close()
        if self.refusal is not None:
            self._abort()
            self._raise_aborted(self.refusal)
        assert self._block is not None
        self._block.__exit__(None, None, None)

    def roll_back(self) -> None:
        """Abort both sides. SQLAlchemy then sends its ROLLBACK, which finds nothing left."""
        self._close()
        self._abort()

    def abandon(self) -> None:
        """Abort both sides, and return the connection, whose session was dropped without an end."""
        if self.is_open:
            self.roll_back()
            self.connection.close()

    def leave_to_owner(self) -> None:
        """Go on without the session: its transaction was part of another one on the connection, whose owner will end it."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def _abort(self) -> None:
        if self._block is None:
            driver = self._pooled.dbapi_connection
            if driver is not None:
                driver.rollback()
        else:
            self._block.__exit__(_RolledBack, _RolledBack(), None)

    def _close(self) -> None:
        self.is_open = False
        vars(self._pooled).pop("commit", None)
        self._pooled.info.pop(_JOINED, None)
        _joined.pop(self.connection, None)
        self.leave_to_owner()

    def _raise_aborted(self, refusal: BaseException) -> NoReturn:
        raise_aborted(refusal, self.sessions.transactional_id, "the session")


_joined: weakref.WeakKeyDictionary[Connection, weakref.ref[_Joined]] = weakref.WeakKeyDictionary()


def _joined_on(connection: Connection) -> _Joined | None:
    reference = _joined.get(connection)
    return None if reference is None else reference()


def _rolled_back(connection: Connection) -> None:
    joined = _joined_on(connection)
    if joined is not None:
        joined.roll_back()


def _returned(driver: object, record: ConnectionPoolEntry | None, why: object) -> None:
    """Abort both sides before the pool gives the connection to other code, or closes it.

    SQLAlchemy sends no ROLLBACK, and calls no listener, after a COMMIT that another listener or a lost connection has stopped:
    the rows would stay in the connection, for the next session that uses it to commit.
    """
    del driver, why
    reference = None if record is None else record.info.get(_JOINED)
    joined = None if reference is None else reference()
    if joined is not None and joined.is_open:
        joined.roll_back()


def _class_of(source: object) -> type[Session]:
    """The class of a factory's sessions, which is the factory's own."""
    kind = source if isinstance(source, type) else type(source)
    if any(base.__module__.startswith(_ASYNC) for base in kind.__mro__):
        raise _asynchronous()
    if isinstance(source, scoped_session):
        source = source.session_factory
    if isinstance(source, sessionmaker):
        if source.kw.get("twophase"):
            raise _two_phase()
        source = source.class_
    if isinstance(source, type) and issubclass(source, Session):
        return source
    raise ConfigurationError(
        f"{source!r} makes no sessions that can be bound",
        next_step="give a sessionmaker, a scoped_session with a sessionmaker, or a subclass of Session",
    )


def _asynchronous() -> ConfigurationError:
    return ConfigurationError(
        "asynchronous sessions cannot be bound to this writer",
        next_step="bind the sessionmaker of a plain engine (create_engine), and use it in threads (asyncio.to_thread)",
    )


def _two_phase() -> ConfigurationError:
    return ConfigurationError(
        "the session commits in two phases, which a dual write cannot take part in",
        next_step="leave twophase out: a dual write is decided by the COMMIT of one database",
    )


def _several() -> ConfigurationError:
    return ConfigurationError(
        "the session works on more than one connection in one transaction",
        next_step="leave other databases to a session of their own: a dual write is decided in one database",
    )
