"""``async with writer.transaction() as tx``, the application's own asynchronous sessions, and blocking functions run in tasks.

Runs blocking functions in the task that awaits them: each in a greenlet, which hands its waits to the event loop.

So tasks run the same code as threads. SQLAlchemy's asynchronous engines work in the same way, and their connections can await
in these greenlets, too.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import weakref
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from greenlet import getcurrent, greenlet
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util.concurrency import await_only

from dualwrite import waiting
from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, DualWriteError, IllegalStateError
from dualwrite.waiting import Event, here
from dualwrite.writing.fair_queue import FairQueue
from dualwrite.writing.sessions import Joining, Kind, two_phase

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, TopicPartition
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from dualwrite.kafka.engine import Column
    from dualwrite.protocol.lives import WriteState
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.writing.sessions import Block
    from dualwrite.writing.transaction import Transaction


T = TypeVar("T")

_SAYS_MORE: Final = frozenset({"decided", "lost", "unknown"})


class Threads(ThreadPoolExecutor):
    """The threads of one writer or consumer, for work that can only block."""

    def __init__(self, max_workers: int, transactional_id: str) -> None:
        super().__init__(max_workers, f"dualwrite {transactional_id}")
        self.made_in = os.getpid()


async def run(pool: Threads, function: Callable[[], T], *, interruptible: bool = True) -> T:
    """Run a function that waits through :mod:`dualwrite.waiting`, without blocking the event loop.

    ``pool`` does work that can only block. If a cancellation may not interrupt the function, ``CancelledError`` is raised when
    it has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if os.getpid() == pool.made_in:
            raise  # a coroutine that is collected after its loop has ended must not block the thread that collects it
        return function()  # a forked process: no loop runs there, and nothing of its parent's waits there
    worker = _Worker(function, pool, interruptible=interruptible)
    given = worker.switch()
    while not worker.dead:
        try:
            value = await worker.awaited(given)
        except BaseException as error:  # noqa: BLE001 - raised in the greenlet, where it belongs
            given = worker.throw(error)
        else:
            given = worker.switch(value)
    return cast("T", given)


async def enter(pool: Threads, block: AbstractContextManager[T]) -> T:
    """Enter a block as :func:`run` does. A cancellation that is raised after it was entered leaves it again."""
    entered: list[T] = []
    try:
        await run(pool, lambda: entered.append(block.__enter__()))
    except BaseException as error:
        if entered:
            await run(pool, partial(block.__exit__, type(error), error, error.__traceback__), interruptible=False)
        raise
    return entered[0]


def awaited(awaitable: Awaitable[T]) -> T:
    """Await in the task whose greenlet calls this. Raises a cancellation where one is allowed; see :func:`run`."""
    worker = getcurrent()
    assert isinstance(worker, _Worker)
    return cast("T", worker.give(awaitable))


def says_more(error: BaseException) -> bool:
    """Whether the caller must see this error even if it was cancelled, because the work must not run again."""
    return isinstance(error, DualWriteError) and error.outcome in _SAYS_MORE


class _Worker(greenlet):  # type: ignore[misc] # it ships no types
    """One run, and how it waits. Implements :class:`dualwrite.waiting.Waiting`."""

    __sqlalchemy_greenlet_provider__ = True  # its connections await here
    cancelled: tuple[type[BaseException], ...] = (asyncio.CancelledError,)

    def __init__(self, function: Callable[[], object], pool: Threads, *, interruptible: bool) -> None:
        driver = getcurrent()
        super().__init__(lambda: self._run(function, interruptible), driver)
        self.gr_context = driver.gr_context  # the function sees and sets the task's context variables
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._pool = pool
        self._allowed = True
        self._put_off: asyncio.CancelledError | None = None

    def _run(self, function: Callable[[], object], interruptible: bool) -> object:  # noqa: FBT001 - its own caller's
        with self.interruptible(interruptible):
            return function()

    async def awaited(self, given: Awaitable[T]) -> T:
        """Await on behalf of the greenlet: raise a cancellation at once where allowed, and defer it otherwise."""
        if self._allowed:
            return await given
        future = self._begun(given)
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as cancelled:
                self._put_off = self._put_off or cancelled
        return future.result()

    def _begun(self, given: Awaitable[T]) -> asyncio.Future[T]:
        # What need not wait, such as the driver's COMMIT or ROLLBACK with nothing open, costs no turn of the loop.
        if sys.version_info >= (3, 12) and asyncio.iscoroutine(given):
            return asyncio.Task(given, loop=self._loop, eager_start=True)
        return asyncio.ensure_future(given)

    def caller(self) -> object:
        return self._task

    @contextmanager
    def interruptible(self, allowed: bool) -> Generator[None, None, None]:  # noqa: FBT001 - as the protocol
        former, self._allowed = self._allowed, allowed
        try:
            if allowed:
                self._interrupt()
            yield
        except BaseException as error:
            self._allowed = former
            if former and not says_more(error):
                self._interrupt()
            raise
        self._allowed = former
        if former:
            self._interrupt()

    def _interrupt(self) -> None:
        cancelled, self._put_off = self._put_off, None
        if cancelled is not None:
            raise cancelled

    def sleep(self, seconds: float) -> None:
        self._wait(self._loop.create_future(), seconds)

    def wait_for(self, event: Event, seconds: float) -> None:
        future = self._loop.create_future()

        def wake() -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_resolve, future)

        event.wake = wake
        try:
            if not event.is_set:  # it may have been set before `wake` stood there
                self._wait(future, seconds)
        finally:
            event.wake = None

    def poll(self, poll: Callable[[float], None], fileno: Callable[[], int] | None, seconds: float) -> None:
        if seconds and fileno is None:
            self.elsewhere(lambda: poll(seconds))
            return
        if seconds and fileno is not None:
            self._until_readable(fileno(), seconds)
        poll(0)

    def _until_readable(self, fileno: int, seconds: float) -> None:
        future = self._loop.create_future()
        self._loop.add_reader(fileno, _resolve, future)
        try:
            self._wait(future, seconds)
        finally:
            self._loop.remove_reader(fileno)

    def elsewhere(self, work: Callable[[], T]) -> T:
        run_there = contextvars.copy_context().run
        with self.interruptible(False):
            return cast("T", self.give(self._loop.run_in_executor(self._pool, run_there, work)))

    def _wait(self, future: asyncio.Future[None], seconds: float) -> None:
        timer = self._loop.call_later(seconds, _resolve, future)
        try:
            self.give(future)
        finally:
            timer.cancel()

    def give(self, awaitable: Awaitable[object]) -> object:
        """Let the task await it. Returns its result, or raises its error."""
        assert self.parent is not None
        return cast("Any", self.parent.switch(awaitable))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _form() -> waiting.Waiting | None:
    current = getcurrent()
    return current if isinstance(current, _Worker) else None


waiting.install(_form)


_OURS: Final = "dualwrite.async_session"
_FOR_EVER_S: Final = 1e9


def session_of_block(bind: AsyncConnection) -> AsyncSession:
    """The ORM session of a block, whose objects stay readable after the block has ended."""
    return AsyncSession(bind=bind, expire_on_commit=False)


class Sessions:
    """Makes the plain session of each block, and the ``AsyncSession`` through which tasks await it."""

    def __init__(self, engine: AsyncEngine, factory: Callable[..., AsyncSession]) -> None:
        self._engine = engine
        self._factory = factory

    def make(self, bind: Connection) -> Session:
        """The session on that connection."""
        made = self._factory(bind=AsyncConnection(self._engine, bind))
        made.sync_session.info[_OURS] = made
        return made.sync_session


class OneByOne:
    """Lets only one task at a time work at a dual write. After its end it refuses sends: they could meet the decision."""

    def __init__(self) -> None:
        self.ended = False
        self._turns: FairQueue[None] = FairQueue([None])
        self._worker: object = None

    def do(self, work: Callable[[], T]) -> T:
        """Do the work while no other task works. Called in a greenlet.

        If this task is already the one that works, it continues: an error may make it end the dual write at once.
        """
        caller = here().caller()
        if caller is self._worker:
            return work()
        turn = self._turns.ticket()
        try:
            turn.wait(Deadline(_FOR_EVER_S))
            self._worker = caller
            try:
                return work()
            finally:
                self._worker = None
                turn.end()
        finally:
            turn.end()

    def end(self) -> None:
        """Wait for work under way, and refuse later sends. Called in a greenlet."""
        self.do(self._end)

    def _end(self) -> None:
        self.ended = True


class AsyncTransaction:
    """One dual write: rows through :attr:`connection` or :attr:`session`, messages through :meth:`produce`.

    Made by ``AsyncDualWriter.transaction()``; usable until its block ends, by the tasks of the block. Calls that send wait for
    each other. The block commits or aborts it: leave the block normally, or raise.
    """

    def __init__(
        self, transaction: Transaction, engine: AsyncEngine, pool: Threads, turns: OneByOne | None = None
    ) -> None:
        self._transaction = transaction
        self._engine = engine
        self._pool = pool
        self._connection: AsyncConnection | None = None
        self._turns = OneByOne() if turns is None else turns

    @property
    def transactional_id(self) -> str:
        """The id that this dual write runs under: the writer's own or that of one of its lanes."""
        return self._transaction.transactional_id

    @property
    def state(self) -> WriteState:
        """The present state of this dual write. After a cancelled block it shows how both sides have ended."""
        return self._transaction.state

    @property
    def prepared(self) -> PreparedTxnState | None:
        """The identity of its Kafka transaction, once the block has ended; None if it was not prepared."""
        return self._transaction.prepared

    @property
    def outbox(self) -> bool | None:
        """See :attr:`Transaction.outbox`."""
        return self._transaction.outbox

    @property
    def connection(self) -> AsyncConnection:
        """The SQLAlchemy connection, inside the database transaction. Never commit or roll it back yourself.

        Savepoints (``connection.begin_nested()``) are yours to use: messages go with them as rows do, see :meth:`produce`.

        Raises:
            IllegalStateError: The block has ended.
        """
        bound = self._transaction.connection
        if self._connection is None:
            self._connection = AsyncConnection(self._engine, bound)
        return self._connection

    @property
    def session(self) -> AsyncSession:
        """An ORM session on :attr:`connection`, made at first use and flushed before the transaction is prepared.

        Its ``commit()`` only flushes: the dual write commits when the block ends.

        Raises:
            IllegalStateError: The block has ended.
        """
        session: AsyncSession = self._transaction.session.info[_OURS]
        return session

    async def produce(
        self,
        topic: str,
        value: object = None,
        key: object = None,
        *,
        partition: int | None = None,
        headers: Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]] | None = None,
        timestamp_ms: int | None = None,
        on_delivery: Callable[[KafkaError | None, Message], None] | None = None,
    ) -> None:
        """Hand one message to the producer. It is sent in the background and becomes visible after the database commit.

        It is awaited because it may wait: for room while the brokers take messages more slowly than they come, for a topic
        that is new to the writer, or for the database in a savepoint. Nothing is durable on return.

        Arguments and errors are those of :meth:`Transaction.produce`. ``on_delivery`` is called in the event loop's thread, or
        in one of the writer's threads with librdkafka's engine.
        """
        await self._send(
            lambda: self._transaction.produce(
                topic,
                value,
                key,
                partition=partition,
                headers=headers,
                timestamp_ms=timestamp_ms,
                on_delivery=on_delivery,
            )
        )

    async def produce_many(self, topic: str, values: Sequence[object], keys: Sequence[object] | None = None) -> None:
        """Hand many messages to the producer: as `produce` for each, several times as fast.

        Blocks the event loop except while it waits for room: give it thousands of messages, not millions.
        Arguments and errors are those of :meth:`Transaction.produce_many`.
        """
        await self._send(lambda: self._transaction.produce_many(topic, values, keys))

    async def produce_arrow(
        self,
        topic: str,
        values: Column,
        keys: Column | None = None,
        headers: Column | None = None,
        partitions: Column | None = None,
        *,
        timestamps: Column | None = None,
    ) -> None:
        """Hand the rows of Arrow's columns to the producer. Arguments and errors: :meth:`Transaction.produce_arrow`."""
        await self._send(
            lambda: self._transaction.produce_arrow(topic, values, keys, headers, partitions, timestamps=timestamps)
        )

    async def send_offsets_to_transaction(self, offsets: Sequence[TopicPartition], group_metadata: object) -> None:
        """Commit consumed offsets together with this dual write. See :meth:`Transaction.send_offsets_to_transaction`."""
        await self._send(lambda: self._transaction.send_offsets_to_transaction(offsets, group_metadata))

    async def _send(self, send: Callable[[], None]) -> None:
        await run(self._pool, lambda: self._turns.do(lambda: self._send_now(send)))

    def _send_now(self, send: Callable[[], None]) -> None:
        if self._turns.ended:
            raise IllegalStateError(
                "the handler has returned",
                transactional_id=self.transactional_id,
                next_step="await in the handler all that it sends",
            )
        send()

    def __repr__(self) -> str:
        return f"<AsyncTransaction {self.transactional_id} {self.state.value}>"


# `AsyncDualWriter.bind`: the application's own asynchronous sessions, and their messages.
#
# An `AsyncSession` runs a plain session in a greenlet, whose waits its task awaits. So the dual write of such a session
# is that of `dualwrite.writing.sessions`: its beginning and its end run in a greenlet of ours, which the session's
# greenlet awaits.

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
        opened: Callable[[], Threads],
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

    def __init__(self, block: AbstractContextManager[Transaction], pool: Threads, turns: OneByOne) -> None:
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
        self._home: tuple[asyncio.AbstractEventLoop, Threads] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def come_from(self, pool: Threads) -> None:
        """Note the event loop, and the threads for its tasks."""
        self._home = asyncio.get_running_loop(), pool

    def abandon(self, end: Callable[[], None]) -> None:
        """Call ``end`` soon. Called by the garbage collector, in any thread. Does nothing once the event loop is closed."""
        if self._home is not None:
            loop, pool = self._home
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._begin, loop, pool, end)

    def _begin(self, loop: asyncio.AbstractEventLoop, pool: Threads, end: Callable[[], None]) -> None:
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
