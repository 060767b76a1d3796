"""``AsyncDualWriter.bind``: the application's own asynchronous sessions, and their messages.

An ``AsyncSession`` runs a plain session in a greenlet, whose waits its task awaits. So the dual write of such a session is that
of :mod:`dualwrite.writing.sessions`: its beginning and its end run in a greenlet of ours, which the session's greenlet awaits.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util.concurrency import await_only

from dualwrite.asyncio.greenlets import enter, run
from dualwrite.asyncio.transaction import AsyncTransaction, OneByOne
from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.writing.sessions import Joining, Kind, two_phase

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from dualwrite.writing.sessions import Block
    from dualwrite.writing.transaction import Transaction

T = TypeVar("T")
SessionT = TypeVar("SessionT", bound=AsyncSession)

_own_classes: Final[weakref.WeakSet[type[Session]]] = weakref.WeakSet()
_BIND: Final = (
    "bind the async_sessionmaker of an AsyncEngine; or bind plain sessions to a DualWriter, and use them in threads"
)


class AsyncBoundSessions:
    """The sessions of one factory, which may produce messages that commit with their rows. Made by ``AsyncDualWriter.bind``.

    As :class:`BoundSessions`: a session that produces joins a dual write, which takes a lane. From then on
    ``await session.commit()`` commits both sides, with the errors of ``AsyncDualWriter.transaction()``; after an error call
    ``await session.rollback()``, as after every commit that fails. ``rollback()`` and ``close()`` abort both sides. A message
    that is produced inside ``begin_nested()`` is dropped when that savepoint is rolled back. Sessions that produce nothing are
    left alone.

    A cancellation of ``commit()`` aborts both sides until the database is asked to commit. From then on the dual write is
    completed first, and ``CancelledError`` is raised after it. ``state`` of the transaction that :meth:`join` gives shows
    which.

    Args:
        transactional_id: The writer's.
        source: The factory, or the class, of the sessions.
        block: Begins a dual write in a transaction.
        engine: The writer's.
        opened: Returns the writer's threads, or raises if it is not open in this event loop.
        joins_first: See :class:`dualwrite.writing.sessions.Joining`.

    Raises:
        ConfigurationError: Sessions of this kind cannot be bound.
    """

    def __init__(
        self,
        transactional_id: str,
        source: object,
        block: Block,
        *,
        engine: AsyncEngine,
        opened: Callable[[], ThreadPoolExecutor],
        joins_first: Engine | None = None,
    ) -> None:
        self.transactional_id = transactional_id
        self._class = _class_of(source)
        self._block = block
        self._engine = engine
        self._opened = opened
        self._turns: weakref.WeakKeyDictionary[Session, OneByOne] = weakref.WeakKeyDictionary()
        self._abandoning = _Abandoning()
        kind = Kind(self._class, awaited=True, abandon=self._abandoning.abandon)
        self._joining = Joining(transactional_id, kind, self._block_of, joins_first=joins_first)

    async def produce(
        self,
        session: AsyncSession | async_scoped_session[SessionT],
        topic: str,
        value: object = None,
        key: object = None,
        *,
        partition: int | None = None,
        headers: Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]] | None = None,
        timestamp_ms: int | None = None,
        on_delivery: Callable[[KafkaError | None, Message], None] | None = None,
    ) -> None:
        """Hand one message to the producer, in the session's transaction; see :meth:`AsyncTransaction.produce`.

        Nothing is durable on return: the message becomes visible once ``await session.commit()`` has committed both sides.

        Raises:
            DualWriteError: As :meth:`join` and :meth:`AsyncTransaction.produce`. The session can no longer commit: roll it
                back.
        """
        await self._in_turn(
            self._own(session),
            lambda joined: joined.produce(
                topic,
                value,
                key,
                partition=partition,
                headers=headers,
                timestamp_ms=timestamp_ms,
                on_delivery=on_delivery,
            ),
        )

    async def join(self, session: AsyncSession | async_scoped_session[SessionT]) -> AsyncTransaction:
        """Let the session's transaction join a dual write, unless it has; see :meth:`BoundSessions.join`.

        Returns:
            The dual write, for its ``state`` and other methods (``produce_many``, ``send_offsets_to_transaction``); it sends
            until the transaction of the session ends. It has no session of its own.

        Raises:
            IllegalStateError: As :meth:`BoundSessions.join`, of this task; or the writer was opened in another event loop.
            ConfigurationError: The session leads to another database, works with several databases, is in autocommit or in
                two-phase mode.
            Unavailable, Fenced: As :meth:`BoundSessions.join`.
        """
        own = self._own(session)
        joined = await self._in_turn(own, lambda joined: joined)
        return AsyncTransaction(joined, self._engine, self._opened(), self._turns_of(own))

    async def _in_turn(self, session: Session, work: Callable[[Transaction], T]) -> T:
        turns = self._turns_of(session)
        return await run(self._opened(), lambda: turns.do(lambda: work(self._joining.join(session))))

    def _turns_of(self, session: Session) -> OneByOne:
        return self._turns.setdefault(session, OneByOne())

    def _own(self, session: object) -> Session:
        found = session() if isinstance(session, async_scoped_session) else session
        if isinstance(found, AsyncSession) and isinstance(found.sync_session, self._class):
            return found.sync_session
        raise IllegalStateError(
            f"{type(found).__name__} is not a session of the factory that was bound",
            transactional_id=self.transactional_id,
            next_step="give the AsyncSession, not the plain session in it"
            if isinstance(found, Session)
            else "make the session with that factory, after it was bound; or bind the factory that made it",
        )

    def _block_of(self, session: Session, connection: Connection) -> AbstractContextManager[Transaction]:
        pool = self._opened()
        self._abandoning.come_from(pool)
        return _Awaited(self._block(session, connection), pool, self._turns_of(session))

    def __repr__(self) -> str:
        return f"<AsyncBoundSessions {self.transactional_id} {self._class.__name__}>"


class _Awaited(AbstractContextManager["Transaction"]):
    """A block whose beginning and end are awaited by the greenlet that enters and leaves it."""

    def __init__(self, block: AbstractContextManager[Transaction], pool: ThreadPoolExecutor, turns: OneByOne) -> None:
        self._block = block
        self._pool = pool
        self._turns = turns

    def __enter__(self) -> Transaction:
        entered: Transaction = await_only(enter(self._pool, self._block))
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        leave = partial(self._block.__exit__, kind, error, traceback)
        left: bool | None = await_only(run(self._pool, lambda: self._turns.do(leave), interruptible=False))
        return left


class _Abandoning:
    """Ends the dual writes of sessions that were dropped, in tasks of the event loop that they ran in."""

    def __init__(self) -> None:
        self._home: tuple[asyncio.AbstractEventLoop, ThreadPoolExecutor] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def come_from(self, pool: ThreadPoolExecutor) -> None:
        """Note the event loop, and the threads for its tasks."""
        self._home = asyncio.get_running_loop(), pool

    def abandon(self, end: Callable[[], None]) -> None:
        """Call ``end`` soon. Called by the garbage collector, in any thread. Does nothing once the event loop is closed."""
        if self._home is not None:
            loop, pool = self._home
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._begin, loop, pool, end)

    def _begin(self, loop: asyncio.AbstractEventLoop, pool: ThreadPoolExecutor, end: Callable[[], None]) -> None:
        task = loop.create_task(run(pool, end, interruptible=False))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _class_of(source: object) -> type[Session]:
    """The class of the plain sessions in a factory's sessions. From now on it is the factory's own."""
    if isinstance(source, async_scoped_session):
        source = source.session_factory
    if isinstance(source, async_sessionmaker):
        if source.kw.get("twophase"):
            raise two_phase()
        own = _own_class(source.kw.get("sync_session_class") or source.class_.sync_session_class)
        source.configure(sync_session_class=own)
        return own
    if isinstance(source, type) and issubclass(source, AsyncSession):
        own = source.sync_session_class = _own_class(source.sync_session_class)
        return own
    raise ConfigurationError(f"{source!r} makes no asynchronous sessions", next_step=_BIND)


def _own_class(plain: type[Session] | sessionmaker[Session]) -> type[Session]:
    # A sessionmaker has a class of its own; an async_sessionmaker has not.
    plain = plain.class_ if isinstance(plain, sessionmaker) else plain
    if plain not in _own_classes:
        plain = type(plain.__name__, (plain,), {})
        _own_classes.add(plain)
    return plain
