"""``writer.bind``: the application's own ORM sessions, whose COMMIT ends a dual write.

The session's transaction and the writer's block become one: the first message joins them, and the session's own commit
and rollback end both sides. Asynchronous sessions use the same code below their own classes.

SQLAlchemy begins and ends the transaction of such a session. We give the pooled connection of a joined session a ``commit`` of
our own, which SQLAlchemy calls instead of the driver's once everything is flushed. It ends the dual write, whose decision is
the database's COMMIT, as at the end of a block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from sqlalchemy import Connection, Engine, TwoPhaseTransaction, event, exc
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from dualwrite.errors import ConfigurationError, DualWriteError, IllegalStateError
from dualwrite.stores.sql.access import leave_to_parent
from dualwrite.stores.sql.drivers import listens
from dualwrite.stores.sql.savepoints import watch_sessions
from dualwrite.writing.transaction import as_value, raise_aborted

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message
    from sqlalchemy.orm import SessionTransaction
    from sqlalchemy.pool import ConnectionPoolEntry

    from dualwrite.writing.transaction import Transaction

Block = Callable[[Session, Connection], AbstractContextManager["Transaction"]]
"""A dual write in the transaction that the session's connection is in: entered before its first message, left instead of
COMMIT."""

_JOINED: Final = "dualwrite.joined"


@dataclass(frozen=True)
class Kind:
    """The sessions that may join.

    Attributes:
        of: Their class.
        awaited: Whether their connections are asynchronous.
        abandon: Calls the function that ends a dual write whose session was dropped. The garbage collector calls it, in any
            thread.
    """

    of: type[Session]
    awaited: bool = False
    abandon: Callable[[Callable[[], None]], None] = lambda end: end()


class Joining:
    """The sessions of one factory, and the dual writes that they have joined.

    Sessions of the engine ``joins_first`` join a dual write before ``begin_nested()`` sends their first SAVEPOINT. This is for
    SQLite, where a savepoint without a BEGIN before it commits at its end.
    """

    def __init__(self, transactional_id: str, kind: Kind, block: Block, *, joins_first: Engine | None = None) -> None:
        self.transactional_id = transactional_id
        self.kind = kind
        self._block = block
        self._eager = joins_first
        self._connections: weakref.WeakKeyDictionary[Session, weakref.WeakSet[Connection]] = weakref.WeakKeyDictionary()
        self._joined: weakref.WeakKeyDictionary[Session, _Joined] = weakref.WeakKeyDictionary()
        watch_sessions()  # SQLAlchemy fails if a listener is added while it calls others, as in begin_nested()
        event.listen(kind.of, "after_begin", self._began)
        event.listen(kind.of, "after_transaction_create", self._created)
        event.listen(kind.of, "after_transaction_end", self._ended)

    def join(self, session: Session) -> Transaction:
        """The dual write of the session's transaction, which first joins one if necessary."""
        return self._join(session, session.connection())

    def _join(self, session: Session, connection: Connection) -> Transaction:
        joined = _joined_on(connection)
        if joined is None:
            joined = self._joined[session] = _Joined(self, connection)
            joined.begin(session)
        elif joined.sessions is not self:
            joined.refuse(
                "the session's transaction has joined a dual write through another bind()",
                "bind a factory once, and use the result everywhere",
            )
        elif not joined.is_of(session):
            joined.refuse(
                "another session on this connection has joined a dual write, and has not ended its transaction",
                "commit or roll back the other session first, or give each a connection of its own",
            )
        return joined.transaction

    def block_of(self, session: Session, connection: Connection) -> AbstractContextManager[Transaction]:
        """A dual write in the session's transaction, not begun yet. Refuses sessions that cannot have one."""
        if session.twophase or isinstance(connection.get_transaction(), TwoPhaseTransaction):
            raise two_phase()
        if connection.dialect.is_async and not self.kind.awaited:
            raise asynchronous()
        if type(connection.dialect).do_commit is not DefaultDialect.do_commit:  # it would bypass our commit hook
            raise ConfigurationError(f"{type(connection.dialect).__name__} has a COMMIT of its own")
        others = self._connections.get(session, weakref.WeakSet())
        if any(not other.closed and other.in_transaction() for other in others if other is not connection):
            raise _several()
        return self._block(session, connection)

    def _began(self, session: Session, transaction: SessionTransaction, connection: Connection) -> None:
        del transaction
        self._connections.setdefault(session, weakref.WeakSet()).add(connection)
        joined = self._open(session)
        if joined is not None and joined.connection is not connection:
            joined.refusal = _several()
            raise _several()

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


class _RolledBack(Exception):
    """Leaves the block of a dual write whose session was rolled back."""


class _Joined:
    """One dual write in the transaction of a connection, until SQLAlchemy commits it or rolls it back.

    ``refusal`` is the first error after which the transaction must not commit, as a value.
    """

    def __init__(self, sessions: Joining, connection: Connection) -> None:
        self.sessions = sessions
        self.connection = connection
        self.refusal: DualWriteError | None = None
        self.is_open = True
        self._pooled = connection.connection
        self._block: AbstractContextManager[Transaction] | None = None
        self._transaction: Transaction | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._session: weakref.ref[Session] | None = None

    @property
    def transaction(self) -> Transaction:
        """The dual write."""
        if self.refusal is not None:
            self._raise_aborted(self.refusal)
        assert self._transaction is not None
        return self._transaction

    def begin(self, session: Session) -> None:
        """Begin the dual write. From now on COMMIT is ours, even if this fails: rows must not commit without messages."""
        vars(self._pooled)["commit"] = self.commit
        self._session = weakref.ref(session)
        _joined[self.connection] = weakref.ref(self)
        self._pooled.info[_JOINED] = weakref.ref(self)
        if not listens(self.connection, "rollback", _rolled_back):
            event.listen(self.connection, "rollback", _rolled_back)
            # Put to the front, because SQLAlchemy takes no insert=True here: if a listener of the application raises,
            # SQLAlchemy calls neither the later ones nor ROLLBACK.
            listeners: Any = self.connection.dispatch.rollback
            listeners.local.listeners.rotate(1)
        pool = self.connection.engine.pool
        for name in ("reset", "invalidate"):
            if not listens(pool, name, _returned):
                event.listen(pool, name, _returned)
        self._finalizer = weakref.finalize(session, self.sessions.kind.abandon, self.abandon)
        self._finalizer.atexit = False
        try:
            block = self.sessions.block_of(session, self.connection)
            self._transaction = block.__enter__()
        except BaseException as error:
            self.refusal = as_value(error)
            raise
        self._block = block

    def is_of(self, session: Session) -> bool:
        """Whether this session may produce: it is the one that joined, or that one's part of the transaction has ended."""
        return self._session is None or self._session() is session

    def refuse(self, what: str, next_step: str) -> NoReturn:
        """Refuse a message, and let the transaction not commit without it."""
        error = IllegalStateError(what, transactional_id=self.sessions.transactional_id, next_step=next_step)
        self.refusal = self.refusal or as_value(error)
        raise error

    def commit(self) -> None:
        """End the dual write. SQLAlchemy calls it in place of the driver's COMMIT. It raises as the end of a block does."""
        block = self._take_block()
        try:
            self._close()
            if self.refusal is not None:
                self._raise_aborted(self.refusal)
        except BaseException:  # an interruption, too
            self._abort(block)
            raise
        assert block is not None
        block.__exit__(None, None, None)

    def roll_back(self) -> None:
        """Abort both sides. SQLAlchemy then sends its ROLLBACK, which finds nothing left."""
        block = self._take_block()
        try:
            self._close()
        finally:
            self._abort(block)

    def abandon(self) -> None:
        """Abort both sides, and return the connection, whose session was dropped without an end.

        A forked process drops the sessions of its parent's other threads, and must leave them alone.
        """
        if self.is_open:
            self.roll_back()
            self.connection.close()

    def leave_to_owner(self) -> None:
        """Continue without the session: its transaction was part of another one, which the connection's owner will end."""
        self._session = None
        if self._finalizer is not None:
            self._finalizer.detach()

    def _take_block(self) -> AbstractContextManager[Transaction] | None:
        """The block, which the caller ends. If that is interrupted, it ends as it is dropped: nothing else refers to it."""
        block, self._block, self._transaction = self._block, None, None
        return block

    def _abort(self, block: AbstractContextManager[Transaction] | None) -> None:
        if block is None:
            driver = self._pooled.dbapi_connection
            if driver is not None:
                with suppress(
                    Exception
                ):  # the connection is lost: the caller has an error to raise, and SQLAlchemy closes the connection
                    driver.rollback()
        else:
            block.__exit__(_RolledBack, _RolledBack(), None)

    def _close(self) -> None:
        leave_to_parent()
        self.is_open = False
        vars(self._pooled).pop("commit", None)
        self._pooled.info.pop(_JOINED, None)
        _joined.pop(self.connection, None)
        self.leave_to_owner()

    def _raise_aborted(self, refusal: DualWriteError) -> NoReturn:
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

    After a COMMIT that another listener or a lost connection has stopped, SQLAlchemy sends no ROLLBACK and calls no listener.
    The rows would stay in the connection, and the next session that uses it would commit them.
    """
    del driver, why
    reference = None if record is None else record.info.get(_JOINED)
    joined = None if reference is None else reference()
    if joined is not None and joined.is_open:
        joined.roll_back()


def asynchronous() -> ConfigurationError:
    """The error for asynchronous sessions where threads are expected."""
    return ConfigurationError(
        "asynchronous sessions cannot be bound to a writer for threads",
        next_step="bind them to an AsyncDualWriter; or bind the sessionmaker of a plain engine (create_engine), and use it in "
        "threads (asyncio.to_thread)",
    )


def two_phase() -> ConfigurationError:
    """The error for sessions in two-phase mode."""
    return ConfigurationError(
        "the session commits in two phases, which a dual write cannot take part in",
        next_step="leave twophase out: a dual write is decided by the COMMIT of one database",
    )


def _several() -> ConfigurationError:
    return ConfigurationError(
        "the session works on more than one connection in one transaction",
        next_step="leave other databases to a session of their own: a dual write is decided in one database",
    )


# `DualWriter.bind`: the application's own sessions, and their messages.

SessionT = TypeVar("SessionT", bound=Session)

_ASYNC: Final = "sqlalchemy.ext.asyncio"
_BIND_ASYNC: Final = "bind the async_sessionmaker to an AsyncDualWriter, and await its produce()"


class BoundSessions:
    """The sessions of one factory, which may produce messages that commit with their rows. Made by ``DualWriter.bind``.

    A session that produces joins a dual write: it takes a lane, and before the message is sent the writer checks in the
    session's transaction that it still owns the lane. From then on ``session.commit()``, or the end of ``with
    session.begin()``, commits both sides, with the errors of ``DualWriter.transaction()``; after an error call
    ``session.rollback()``, as after every failed commit. ``rollback()`` and ``close()`` abort both sides. A message that is
    produced inside ``begin_nested()`` is dropped when that savepoint is rolled back. Sessions that produce nothing are left
    alone.

    Args:
        transactional_id: The writer's.
        source: The factory, or the class, of the sessions.
        block: Begins a dual write in a transaction.
        joins_first: See :class:`dualwrite.writing.sessions.Joining`.

    Raises:
        ConfigurationError: Sessions of this kind cannot be bound.
    """

    def __init__(
        self, transactional_id: str, source: object, block: Block, *, joins_first: Engine | None = None
    ) -> None:
        self.transactional_id = transactional_id
        self._class = _class_of(source)
        self._joining = Joining(transactional_id, Kind(self._class), block, joins_first=joins_first)

    def produce(
        self,
        session: Session | scoped_session[SessionT],
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

    def join(self, session: Session | scoped_session[SessionT]) -> Transaction:
        """Let the session's transaction join a dual write, unless it has joined one; :meth:`produce` does so by itself.

        Call it before the session's first statement if its isolation level is REPEATABLE READ or SERIALIZABLE: with a snapshot
        that is older than the dual write, the writer could not see that another owner has taken over.

        Returns:
            The dual write, for its other methods (``produce_many``, ``send_offsets_to_transaction``); usable until the
            transaction of the session ends. It has no session of its own.

        Raises:
            IllegalStateError: The session is not one of the bound factory, this thread is inside another dual write of this
                writer, or the transaction can no longer join.
            ConfigurationError: The session leads to another database, works with several databases, is in autocommit, in
                two-phase mode, or asynchronous.
            Unavailable: No lane was free, or a server does not answer.
            Fenced: Another owner took over.
        """
        return self._joining.join(self._own(session))

    def _own(self, session: object) -> Session:
        found = session() if isinstance(session, scoped_session) else session
        if isinstance(found, self._class):
            return found
        raise IllegalStateError(
            f"{type(found).__name__} is not a session of the factory that was bound",
            transactional_id=self.transactional_id,
            next_step=_BIND_ASYNC
            if is_asynchronous(type(found))
            else "make the session with that factory, or bind the factory that made it",
        )

    def __repr__(self) -> str:
        return f"<BoundSessions {self.transactional_id} {self._class.__name__}>"


def _class_of(source: object) -> type[Session]:
    kind = source if isinstance(source, type) else type(source)
    if is_asynchronous(kind):
        raise asynchronous()
    if isinstance(source, scoped_session):
        source = source.session_factory
    if isinstance(source, sessionmaker):
        if source.kw.get("twophase"):
            raise two_phase()
        source = source.class_
    if isinstance(source, type) and issubclass(source, Session):
        return source
    raise ConfigurationError(
        f"{source!r} makes no sessions that can be bound",
        next_step="give a sessionmaker, a scoped_session with a sessionmaker, or a subclass of Session",
    )


def is_asynchronous(kind: type) -> bool:
    """Whether this is a class of SQLAlchemy's asynchronous sessions, or of their factories."""
    return any(base.__module__.startswith(_ASYNC) for base in kind.__mro__)
