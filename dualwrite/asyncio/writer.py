"""``AsyncDualWriter``: rows and messages, together or not at all, for tasks of an event loop; and the groups of its units.

It runs the writer for threads in greenlets, whose waits go to the event loop. Nothing here decides, settles or ends a dual
write by itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar, overload

from sqlalchemy import URL, Engine, event, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from tenacity import AsyncRetrying

from dualwrite.asyncio.transaction import (
    AsyncBoundSessions,
    AsyncTransaction,
    OneByOne,
    Sessions,
    Threads,
    awaited,
    enter,
    run,
    says_more,
    session_of_block,
)
from dualwrite.clock import now_s
from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.protocol.grouping import Unit, Units
from dualwrite.protocol.members import LeaseTiming
from dualwrite.protocol.values import DEFAULT_LIMITS, WriterLimits
from dualwrite.stores.sql.access import ASYNCPG, engine_of, keep_alive, liveness_of, unprepared, url_errors_mapped
from dualwrite.stores.sql.database import SqlDatabase, database_of, sql_of
from dualwrite.stores.sql.drivers import roll_back_before_closing
from dualwrite.stores.sql.tables import MYSQL
from dualwrite.waiting import elsewhere
from dualwrite.writing import transaction as entered
from dualwrite.writing.group_commit import full_error, run_group
from dualwrite.writing.leased import LeasedWriter
from dualwrite.writing.units_of_work import (
    Answer,
    Expiry,
    GroupRun,
    RowUnit,
    check_within,
    closed_error,
    fail_left,
)
from dualwrite.writing.work import Attempts, Patience, pause_after_s
from dualwrite.writing.writer import DualWriter

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker
    from typing_extensions import Self, Unpack

    from dualwrite.clock import Deadline
    from dualwrite.interfaces import Observer, StateStore
    from dualwrite.protocol.outbox import Outbox
    from dualwrite.protocol.process import Health
    from dualwrite.writing.lane import OnLoss
    from dualwrite.writing.lane_pool import Lanes
    from dualwrite.writing.sessions import Block
    from dualwrite.writing.transaction import AsyncWriterSettings, CommonSettings, Serializers, Transaction


logger = logging.getLogger(__name__)


class _Task:
    """The work of a unit, as a task runs it. Implements :class:`dualwrite.writing.units_of_work.Task`."""

    def __init__(
        self, name: str, work: Callable[[AsyncTransaction], Awaitable[Any]] | RowUnit, within_s: float | None
    ) -> None:
        self.work = work
        self.rows = work if isinstance(work, RowUnit) else None
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.context = contextvars.copy_context()
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expiry = Expiry(name, within_s)
        self._name = name
        self._runs = self._gone = False

    @property
    def until(self) -> Deadline | None:
        """When no run may begin any more; None if there is no limit."""
        return self._expiry.until

    def begin(self) -> bool:
        self._expire()
        self._runs = not self.future.done()
        return self._runs

    def rest(self, error: BaseException | None) -> None:
        self._runs = False
        self._expiry.note(error)
        if self._gone:
            self.future.cancel()
        self._expire()

    def _expire(self) -> None:
        """Tell the caller that its time is over, unless the work is running; with the error of its last run, if any."""
        if self._expiry.is_over and not self._runs and not self.future.done():
            self.fail(self._expiry.error())

    def succeed(self, result: object) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self._gone and says_more(error):
            logger.error("%s: a unit whose caller has stopped to wait has ended: %s", self._name, error)
        if not self.future.done():
            self.future.set_exception(error)
            if self._gone:
                self.future.exception()  # marks it as seen: nobody else asks for it

    def answer(self) -> None:
        """If the caller stands in line, let it see whether there is a place for it."""
        if not self.answered.done():
            self.answered.set_result(None)

    async def outcome(self, cancelled: asyncio.CancelledError | None) -> Any:
        """Wait for the result. A caller that is cancelled, or whose coroutine is closed, stops waiting.

        Work that has not begun, or whose group was aborted, then does not run. Work that is running ends with its group.
        ``cancelled`` is a cancellation that came before this call.
        """
        try:
            if cancelled is not None:
                raise cancelled
            while not self.future.done():
                left_s = None if self.until is None or self._expiry.is_over else self.until.remaining_s()
                await asyncio.wait([self.future], timeout=left_s)
                self._expire()
        except BaseException:  # a cancellation, or GeneratorExit
            self._gone = True
            if not self._runs:
                self.future.cancel()
            error = self.future.exception() if self.future.done() and not self.future.cancelled() else None
            if error is not None and says_more(error):
                raise error from None
            raise
        return self.future.result()


class AsyncGroups:
    """Runs the units of a writer in groups, up to ``runners`` at a time. Used in one event loop.

    ``block`` returns the block of a new dual write, which a greenlet enters. ``grouped`` is called with the number of units of
    each finished group. ``pool`` returns the threads for work that can only block.
    """

    def __init__(
        self,
        name: str,
        block: Callable[[], AbstractContextManager[Transaction]],
        limits: WriterLimits,
        *,
        runners: int,
        grouped: Callable[[int], None],
        engine: AsyncEngine,
        pool: Callable[[], Threads],
    ) -> None:
        self._name = name
        self._block = block
        self._limits = limits
        self._runners = runners
        self._grouped = grouped
        self._engine = engine
        self._pool = pool
        self._units: Units[_Task] = Units(limits.waiting_units)
        self._running: object | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._rests: set[asyncio.Task[None]] = set()
        self._closed = False

    async def submit(
        self,
        work: Callable[[AsyncTransaction], Awaitable[Any]] | RowUnit,
        key: Hashable | None,
        within_s: float | None = None,
    ) -> Any:
        check_within(within_s)
        if self._closed:
            raise closed_error(self._name)
        task = _Task(self._name, work, within_s)
        unit = Unit(task, ("task", asyncio.current_task()) if key is None else ("key", key))
        cancelled = None if self._units.offer(unit) else await self._stand_in_line(unit)
        self._start()
        return await task.outcome(cancelled)

    async def _stand_in_line(self, unit: Unit[_Task]) -> asyncio.CancelledError | None:
        """Wait until the unit is added. Returns a cancellation that came after that."""
        cancelled: asyncio.CancelledError | None = None
        until = unit.work.until
        within_s = (
            self._limits.lane_timeout_s if until is None else min(until.remaining_s(), self._limits.lane_timeout_s)
        )
        try:
            await asyncio.wait([unit.work.answered], timeout=within_s)
        except asyncio.CancelledError as error:
            cancelled = error
        if self._units.withdraw(unit):
            raise cancelled or (
                closed_error(self._name) if self._closed else full_error(self._name, self._limits, waited=True)
            )
        return cancelled

    async def close(self, within_s: float) -> None:
        """Finish the waiting units, and refuse new ones. Units that have not begun in time fail."""
        self._closed = True
        for unit in self._units.in_line:
            unit.work.answer()
        until = now_s() + within_s
        while (under_way := self._tasks | self._rests) and now_s() < until:
            await asyncio.wait(under_way, timeout=until - now_s(), return_when=asyncio.FIRST_COMPLETED)
        fail_left(self._units.drain(), self._name)

    def _start(self) -> None:
        """Start the next group, if one may run. Its task takes the units that wait when it begins."""
        if self._units.ready and self._running is None and len(self._tasks) < self._runners:
            self._running = token = object()
            # Its own context: the units have theirs.
            task = contextvars.Context().run(asyncio.get_running_loop().create_task, self._serve(token))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, token))

    def _ended(self, token: object, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._let_next_run(token)  # in case the task was cancelled before its first step
        self._start()

    def _let_next_run(self, token: object) -> None:
        if self._running is token:
            self._running = None
            self._start()

    def _let_run_again(self, rested: Sequence[Unit[_Task]], rest: asyncio.Task[None]) -> None:
        """Called when the units have rested, or when the event loop ends and cancels the rest."""
        self._rests.discard(rest)
        self._units.rested(rested)
        self._start()

    async def _serve(self, token: object) -> None:
        """Run one group. An event loop that ends cancels this task, too, at any await: the units still get their answers."""
        group = GroupRun(self._name, self._units.take(self._limits.group_units))
        for unit in self._units.admit():
            unit.work.answer()
        try:
            if group.taken:
                answers = await self._run(group, token)
                self._grouped(group.begun)
                for tell in answers:
                    tell()
        finally:
            if pause_s := pause_after_s(group.failures):
                rest = asyncio.get_running_loop().create_task(asyncio.sleep(pause_s))
                self._rests.add(rest)
                rest.add_done_callback(partial(self._let_run_again, group.resting))
            self._units.end(group.taken, group.again, rest=group.resting if pause_s else ())
            self._let_next_run(token)

    async def _run(self, group: GroupRun, token: object) -> Sequence[Answer]:
        try:
            pool = self._pool()
        except IllegalStateError as closed:  # while the units waited to run again
            return group.failed(closed)
        answers: list[Sequence[Answer]] = []
        with suppress(asyncio.CancelledError):  # it arrives after the group, when the units have their answers
            await run(
                pool,
                lambda: answers.append(
                    run_group(group, self._block, self._limits, self._call, lambda: self._let_next_run(token))
                ),
            )
        return answers[0] if answers else group.failed(asyncio.CancelledError())

    def _call(self, task: _Task, transaction: Transaction) -> object:
        work = task.work
        if isinstance(work, RowUnit):
            return task.context.copy().run(work.produce, transaction)
        given = AsyncTransaction(transaction, self._engine, self._pool())
        return awaited(self._in_task(work, task.context, given, entered.entered_here()))

    @staticmethod
    async def _in_task(
        work: Callable[[AsyncTransaction], Awaitable[Any]],
        context: contextvars.Context,
        transaction: AsyncTransaction,
        blocks: entered.Blocks,
    ) -> object:
        async def call() -> object:
            entered.continue_inside(blocks, asyncio.current_task())
            return await work(transaction)

        return await context.copy().run(asyncio.get_running_loop().create_task, call())


T = TypeVar("T")
SessionT = TypeVar("SessionT", bound=AsyncSession)


class AsyncDualWriter:
    """A :class:`DualWriter` for the tasks of one event loop: the same protocol, without a thread for each transaction.

    Tasks share one writer. Any number of them may ask for a transaction at once; they get lanes first come, first served. Raise
    ``WriterLimits.lane_timeout_s`` if more tasks wait than your servers can serve in that time.

    A cancellation has one of two outcomes, and ``tx.state`` shows which. Before the database is asked to commit, both sides
    abort, and ``CancelledError`` leaves the block. After that the dual write is completed first; then the block raises
    ``CancelledError``, or an error that says more. In either case, work that cannot be interrupted, such as claiming a lane, is
    finished first, within ``timeout_s``.

    Args:
        transactional_id: As for :class:`DualWriter`.
        kafka: As for :class:`DualWriter`.
        database: An ``AsyncEngine`` (psycopg, asyncpg or aiosqlite) or a database URL. The tables must exist:
            ``dualwrite migrate``.
        own_engine: An engine for the writer's own short transactions, which run in threads: claiming, settling, recording. By
            default one is made from the URL of ``database``. Give one if the URL alone does not lead to the database, for
            instance because ``database`` was made with ``connect_args``. It must lead to the same database; this is checked.
        session_factory: Makes the ORM session of ``tx.session``, called with ``bind=connection``; for example an
            ``async_sessionmaker``.
        schema, outbox, limits: As for :class:`DualWriter`.
        on_loss: As for :class:`DualWriter`. Called in the event loop's thread, or in one of the writer's.
        serializers: As for :class:`DualWriter`. Called in the event loop's thread: a serializer that asks a registry blocks the
            loop.
        telemetry: As for :class:`DualWriter`.

    Raises:
        ConfigurationError: A setting cannot work.
    """

    def __init__(
        self,
        transactional_id: str,
        *,
        kafka: Mapping[str, object],
        database: AsyncEngine | str,
        own_engine: Engine | str | None = None,
        schema: str | None = None,
        outbox: Outbox = "never",
        limits: WriterLimits = DEFAULT_LIMITS,
        session_factory: Callable[..., AsyncSession] = session_of_block,
        serializers: Serializers | None = None,
        on_loss: OnLoss | None = None,
        telemetry: Observer | None = None,
    ) -> None:
        self._owns_engine = not isinstance(database, AsyncEngine)
        self._engine = async_engine_of(database)
        self._makes_own = own_engine is None or not hasattr(own_engine, "connect")
        self._own_engine = blocking_twin(self._engine) if own_engine is None else engine_of(own_engine)
        self._limits = limits
        self._session_factory = session_factory
        self._common: CommonSettings = {
            "kafka": kafka,
            "schema": schema,
            "outbox": outbox,
            "limits": limits,
            "serializers": serializers,
            "on_loss": on_loss,
            "telemetry": telemetry,
        }
        self._writer: TaskWriter | LeasedTaskWriter = TaskWriter(
            transactional_id, self._engine, database=self._own_engine, session_factory=session_factory, **self._common
        )
        self._groups = self._writer.groups_of_tasks(limits, self._opened)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: Threads | None = None
        self._pid = os.getpid()

    @classmethod
    def leased(
        cls,
        fleet: str,
        *,
        lease_timeout_s: float = 30.0,
        heartbeat_s: float | None = None,
        **settings: Unpack[AsyncWriterSettings],
    ) -> Self:
        """Make a writer that takes a numbered id by itself: see :meth:`DualWriter.leased`.

        A thread sends its heartbeats, so that the writer keeps its id while the event loop is busy.

        Args:
            fleet: As for :meth:`DualWriter.leased`.
            lease_timeout_s: As for :meth:`DualWriter.leased`.
            heartbeat_s: As for :meth:`DualWriter.leased`.
            settings: The keyword arguments of `AsyncDualWriter`.

        Raises:
            ConfigurationError: A setting cannot work.
        """
        timing = LeaseTiming(lease_timeout_s, heartbeat_s)
        writer = cls(fleet, **settings)
        writer._writer = LeasedTaskWriter(
            fleet,
            timing,
            writer._engine,
            database=writer._own_engine,
            session_factory=writer._session_factory,
            **writer._common,
        )
        writer._groups = writer._writer.groups_of_tasks(writer._limits, writer._opened)
        return writer

    @property
    def transactional_id(self) -> str:
        """The transactional id; for a leased writer that is not open yet, the name of its fleet."""
        return self._writer.transactional_id

    async def open(self, *, wait: bool = True) -> None:
        """Claim the transactional id, settle what former owners left behind, and make the producers.

        Call it once, before the first transaction; ``async with writer:`` does so. The writer then belongs to this event loop.

        Args:
            wait: False returns at once, for applications that must start while a server is away: see :meth:`DualWriter.open`.

        Raises:
            ConfigurationError: As :meth:`DualWriter.open`; or ``database`` and ``own_engine`` lead to different databases.
            DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable: As :meth:`DualWriter.open`.
            Unavailable, IllegalStateError: As :meth:`DualWriter.open`.
        """
        if self._loop is not None:
            raise IllegalStateError("the writer was already opened", transactional_id=self.transactional_id)
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._pool = Threads(THREADS + self._limits.max_lanes, self.transactional_id)
        try:
            await run(self._pool, partial(self._writer.open, wait=wait))
        except BaseException:
            await self.close()
            raise

    @asynccontextmanager
    async def transaction(
        self, connection: AsyncConnection | None = None, *, outbox: Outbox | None = None
    ) -> AsyncGenerator[AsyncTransaction, None]:
        """Run one dual write: the block's end commits both sides, an exception in the block aborts both.

        Args:
            connection: A connection of the engine, not inside a transaction. By default one is taken from the engine. A
                connection of another engine must lead to the same database; this is checked once for each connection.
            outbox: As for :meth:`DualWriter.transaction`.

        Yields:
            The transaction, usable until the block ends.

        Raises:
            TransactionAborted, Fenced, TransactionInDoubt, CompletionPending: As :meth:`DualWriter.transaction`.
            DecidedTransactionLost, OutcomeUnverifiable, DatabaseWentBack: As :meth:`DualWriter.transaction`.
            ConfigurationError, Unavailable: As :meth:`DualWriter.transaction`.
            IllegalStateError: As :meth:`DualWriter.transaction`; or the writer was opened in another event loop.
            CancelledError: The task was cancelled: both sides are aborted, or both are committed, as ``tx.state`` shows.
        """
        pool = self._opened()
        given = None if connection is None else _sync_connection_of(connection)
        block = self._writer.transaction(given, outbox=outbox)
        turns = OneByOne()
        transaction = AsyncTransaction(await enter(pool, block), self._engine, pool, turns)

        def leave(
            kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> bool | None:
            return turns.do(lambda: block.__exit__(kind, error, traceback))

        try:
            yield transaction
        except BaseException as error:
            left = partial(leave, type(error), error, error.__traceback__)
            if not await run(pool, left, interruptible=False):
                raise
        else:
            await run(pool, partial(leave, None, None, None), interruptible=False)

    def bind(
        self,
        sessions: async_sessionmaker[SessionT] | async_scoped_session[SessionT] | type[SessionT],
        *,
        outbox: Outbox | None = None,
    ) -> AsyncBoundSessions:
        """Let the sessions of a factory produce messages that commit with their rows. See :meth:`DualWriter.bind`.

        Keep using the factory as before. Bind it once, before it makes sessions, and use the result in every task; the writer
        must be open when a session produces.

        Args:
            sessions: An ``async_sessionmaker``, an ``async_scoped_session`` of one, or a class (SQLModel's ``AsyncSession``).
                Its sessions must lead to the writer's database, and to no other in the same transaction.
            outbox: For the dual writes of these sessions, as for :meth:`transaction`.

        Raises:
            ConfigurationError: Its sessions are for threads or in two-phase mode, or it is not such a factory.
        """
        return self._writer.bind_for_tasks(sessions, self._opened, outbox)

    async def run(
        self,
        work: Callable[[AsyncTransaction], Awaitable[T]],
        *,
        attempts: int = 5,
        within_s: float | None = None,
        longest_pause_s: float = 5.0,
        connection: AsyncConnection | None = None,
        outbox: Outbox | None = None,
    ) -> T:
        """Run the work in a dual write, and again in a new one after an error that left nothing behind on either side.

        Args:
            work: An asynchronous function, called with the transaction, once for each attempt.
            attempts: As for :meth:`DualWriter.run`.
            within_s: As for :meth:`DualWriter.run`.
            longest_pause_s: As for :meth:`DualWriter.run`.
            connection: As for :meth:`transaction`.
            outbox: As for :meth:`transaction`.

        Returns:
            The result of the attempt that has committed. Both sides are durable, as after :meth:`transaction`.

        Raises:
            DualWriteError: As :meth:`transaction`, from the last attempt. Notes on the error name the earlier attempts.
            ConfigurationError: An argument cannot work.

        Every exception of the work is passed on unchanged, after the abort of both sides.
        """

        async def attempt() -> T:
            async with self.transaction(connection, outbox=outbox) as transaction:
                return await work(transaction)

        made = Attempts(self.transactional_id, Patience(attempts, within_s, longest_pause_s))
        try:
            result: T = await AsyncRetrying(**made.rules())(attempt)
        except BaseException as error:
            made.note_end(error)
            raise
        made.note_success()
        return result

    @overload
    async def submit(self, work: RowUnit, *, key: Hashable | None = None, within_s: float | None = None) -> None: ...

    @overload
    async def submit(
        self,
        work: Callable[[AsyncTransaction], Awaitable[T]],
        *,
        key: Hashable | None = None,
        within_s: float | None = None,
    ) -> T: ...

    async def submit(
        self,
        work: Callable[[AsyncTransaction], Awaitable[T]] | RowUnit,
        *,
        key: Hashable | None = None,
        within_s: float | None = None,
    ) -> T | None:
        """Run the work as one unit of a group: units of many tasks commit in one dual write. See :meth:`DualWriter.submit`.

        If `WriterLimits.waiting_units` units wait already, the task waits for a place, first come, first served.

        A cancellation, for example by ``asyncio.timeout``, ends the wait at once. Work that has not begun then never runs, and
        work that waits to run again does not. Work that is running ends with its group, which may commit it.

        Args:
            work: An asynchronous function, called with the transaction of the unit, in a task of its own with the
                context of the caller. It may run more than once. Or a `RowUnit`, as for :meth:`DualWriter.submit`.
            key: Units with the same key run and commit in the order of the calls. By default, the units of one task do.
            within_s: As for :meth:`DualWriter.submit`.

        Returns:
            The result of the work. Both sides are durable.

        Raises:
            DualWriteError: The error of the group, as :meth:`DualWriter.submit` says.
            Unavailable: Also if no place was free within ``lane_timeout_s``; the work has not run.
            IllegalStateError: Also if the task is inside a transaction or a unit of this writer.
            CancelledError: The task was cancelled.

        Every exception of the work is passed on unchanged, after its rollback.
        """
        await run(self._opened(), self._writer.refuse_nested)
        result: T | None = await self._groups.submit(work, key, within_s)
        return result

    async def close(self) -> None:
        """Finish running transactions and units, settle and record what is left, and disconnect. May be called more than once.

        If it is cancelled, it raises that at its end.

        Raises:
            DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable, Unavailable: As :meth:`DualWriter.close`.
            IllegalStateError: The writer was opened in another event loop.
        """
        await self._close(self._writer.close)

    async def _close(self, close: Callable[[], None]) -> None:
        if self._loop is None or os.getpid() != self._pid:
            return  # in a forked process the connections and the threads are the parent's
        self._require_own_loop()
        if (pool := self._pool) is None:
            return
        closed_here = False

        def end() -> None:
            nonlocal closed_here
            awaited(self._groups.close(self._limits.timeout_s))
            closed_here, self._pool = self._pool is not None, None
            if closed_here:
                elsewhere(close)

        try:
            await run(pool, end, interruptible=False)
        finally:
            if closed_here:
                pool.shutdown(wait=False)
                if self._makes_own:
                    self._own_engine.dispose()
                if self._owns_engine:
                    await self._engine.dispose()

    def health(self) -> Health:
        """Return the writer's knowledge of itself. See :meth:`DualWriter.health`; it never waits."""
        return self._writer.health()

    @property
    def ready(self) -> bool:
        """Whether dual writes are expected to work now: ``health().ready``."""
        return self.health().ready

    def _opened(self) -> Threads:
        if self._pool is None:
            state = "is not open" if self._loop is None else "is closed"
            raise IllegalStateError(
                f"the writer {state}",
                transactional_id=self.transactional_id,
                next_step="use `async with writer:` or await open()",
            )
        self._require_own_loop()
        return self._pool

    def _require_own_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise IllegalStateError(
                "the writer was opened in another event loop",
                transactional_id=self.transactional_id,
                next_step="make a writer in each event loop, with an id of its own; or stay in one loop",
            )

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close(lambda: self._writer.__exit__(kind, error, traceback))

    def __enter__(self) -> NoReturn:
        raise IllegalStateError(
            "an AsyncDualWriter is opened by a task",
            transactional_id=self.transactional_id,
            next_step="write `async with`; or use DualWriter",
        )

    def __exit__(self, *error: object) -> None:
        """Never called."""

    def __repr__(self) -> str:
        return f"<Async{repr(self._writer)[1:]}"


def _sync_connection_of(connection: object) -> Connection:
    if not isinstance(connection, AsyncConnection):
        raise IllegalStateError(
            f"transaction() takes a SQLAlchemy AsyncConnection, not {type(connection).__name__}",
            next_step="give `await engine.connect()`, or nothing; for the ORM use tx.session",
        )
    if connection.sync_connection is None:
        raise IllegalStateError("the AsyncConnection is not connected", next_step="await connection.start()")
    return connection.sync_connection


# The writer behind the asynchronous classes: its blocks run in greenlets, on connections that await.

THREADS: Final = 4
"""Threads for work that can only block, in addition to one for each lane. With the native engine, only claiming and settling
block."""


class _Writer(Protocol):
    transactional_id: str
    _asynchronous: AsyncEngine
    _group_runners: int
    _lanes: Lanes

    def transaction(self) -> AbstractContextManager[Transaction]: ...
    def _joined(self, outbox: Outbox | None) -> tuple[Engine | None, Block]: ...
    def _note_group(self, units: int) -> None: ...
    def _require_open(self) -> None: ...


class OfTasks:
    """What only tasks need of a writer. Called in greenlets (:mod:`dualwrite.asyncio.transaction`)."""

    def bind_for_tasks(
        self: _Writer, sessions: object, opened: Callable[[], Threads], outbox: Outbox | None
    ) -> AsyncBoundSessions:
        joins_first, block = self._joined(outbox)
        return AsyncBoundSessions(
            self.transactional_id,
            sessions,
            block,
            engine=self._asynchronous,
            opened=opened,
            joins_first=joins_first,
        )

    def groups_of_tasks(self: _Writer, limits: WriterLimits, pool: Callable[[], Threads]) -> AsyncGroups:
        """The groups of :meth:`AsyncDualWriter.submit`."""
        return AsyncGroups(
            self.transactional_id,
            self.transaction,
            limits,
            runners=self._group_runners,
            grouped=self._note_group,
            engine=self._asynchronous,
            pool=pool,
        )

    def refuse_nested(self: _Writer) -> None:
        """Raise if the writer is not open, or if the task is inside one of its transactions or units."""
        self._require_open()
        entered.refuse_nested(self._lanes, self.transactional_id)


class ForTasks(OfTasks, DualWriter):
    """A :class:`DualWriter` for greenlets (:mod:`dualwrite.asyncio.transaction`): all its methods are called in them."""

    _asynchronous: AsyncEngine
    _compares_later = False

    def open(self, *, wait: bool = True) -> None:
        """As :meth:`DualWriter.open`, without blocking the event loop."""
        self._compares_later = self._uncompared = not wait
        open_ = super().open
        elsewhere(lambda: open_(wait=wait))
        if not wait:
            return  # the thread that opens cannot use the event loop's connections: the first block compares
        try:
            self._compare(self._opened().context.store)
        except BaseException:
            self.close()
            raise

    def _compare(self, store: StateStore) -> None:
        with self._database.connect() as connection:
            store.check_same_database(connection)

    def _compare_first(self) -> None:
        self._compare(self._opened().context.store)
        self._uncompared = False

    def close(self) -> None:
        """As :meth:`DualWriter.close`, without blocking the event loop."""
        elsewhere(super().close)


def with_blocks_of(asynchronous: AsyncEngine, database: Engine | SqlDatabase, schema: str | None) -> SqlDatabase:
    """The database for threads, whose blocks run on the asynchronous engine."""
    own = sql_of(database_of(database, schema), "writers of tasks")
    return SqlDatabase(own.engine, own.schema, blocks=asynchronous.sync_engine)


class TaskWriter(ForTasks):
    """The writer of one transactional id.

    ``asynchronous`` is the engine of the blocks' connections. ``database`` leads to the same database, for the writer's own
    transactions, in threads.
    """

    def __init__(
        self,
        transactional_id: str,
        asynchronous: AsyncEngine,
        *,
        database: Engine | SqlDatabase,
        session_factory: Callable[..., AsyncSession] = session_of_block,
        **settings: Unpack[CommonSettings],
    ) -> None:
        made = Sessions(asynchronous, session_factory).make
        both = with_blocks_of(asynchronous, database, settings.get("schema"))
        super().__init__(transactional_id, database=both, session_factory=made, **settings)
        self._asynchronous = asynchronous
        roll_back_before_closing(asynchronous.sync_engine)


# `AsyncDualWriter.leased`: the writer behind it, with a leased id.
#
# A thread renews the lease, as for a `DualWriter`: an event loop that is busy for long must not lose its id.


class LeasedTaskWriter(ForTasks, LeasedWriter):
    """A `LeasedWriter` for tasks. Its arguments are those of a `TaskWriter`."""

    def __init__(
        self,
        fleet: str,
        timing: LeaseTiming,
        asynchronous: AsyncEngine,
        *,
        database: Engine,
        session_factory: Callable[..., AsyncSession],
        **settings: Unpack[CommonSettings],
    ) -> None:
        def make(name: str) -> TaskWriter:
            made = TaskWriter(name, asynchronous, database=database, session_factory=session_factory, **settings)
            made._uncompared = self._compares_later  # noqa: SLF001 - its own class
            return made

        both = with_blocks_of(asynchronous, database, settings.get("schema"))
        LeasedWriter.__init__(self, fleet, timing, make=make, database=both, **settings)
        self._asynchronous = asynchronous


# The engines of an AsyncDualWriter: the asynchronous one for its blocks, and one for threads.

_AWAITED: Final = {("postgresql", "psycopg"), ("postgresql", ASYNCPG), ("sqlite", "aiosqlite")}
_AWAITING: Final = {"sqlite": "sqlite+aiosqlite", "sqlite+pysqlite": "sqlite+aiosqlite"}
_BLOCKING: Final = {
    "sqlite+aiosqlite": "sqlite",
    "postgresql+psycopg_async": "postgresql+psycopg",
    "postgresql+asyncpg": "postgresql+psycopg",
}
_TO_LIBPQ: Final = {"ssl": "sslmode"}
_OF_ASYNCPG: Final = frozenset({"prepared_statement_cache_size", "prepared_statement_name_func", "async_fallback"})
"""Settings in a URL that libpq does not know, and does not need."""


def async_engine_of(engine: object) -> AsyncEngine:
    """The engine itself, or a new one for a URL, as :func:`engine_of`."""
    if isinstance(engine, (str, URL)):
        with url_errors_mapped():
            url = _with_driver(make_url(engine), _AWAITING)
            if url.get_backend_name() in MYSQL:
                raise _not_awaited(url.get_backend_name(), url.get_driver_name())
            engine = create_async_engine(url, connect_args={**liveness_of(url), **unprepared(url)})
            if url.get_driver_name() == ASYNCPG:
                event.listen(engine.sync_engine, "connect", keep_alive)
    if not isinstance(engine, AsyncEngine):
        kind = type(engine).__name__
        raise ConfigurationError(
            f"{kind} is not an asynchronous engine",
            next_step="give create_async_engine() the same database with postgresql+psycopg://, postgresql+asyncpg:// or "
            "sqlite+aiosqlite://"
            if isinstance(engine, Engine)
            else "give a SQLAlchemy AsyncEngine or a database URL",
        )
    if (found := (engine.dialect.name, engine.dialect.driver)) not in _AWAITED:
        raise _not_awaited(*found)
    return engine


def _not_awaited(database: str, driver: str) -> ConfigurationError:
    step = "use postgresql+psycopg://... (psycopg 3), postgresql+asyncpg://... or sqlite+aiosqlite:///..."
    if database in MYSQL:
        step = "use a DualWriter with mysql+pymysql://... in a thread (asyncio.to_thread)"
    return ConfigurationError(f"{database}+{driver} is not supported by an AsyncDualWriter", next_step=step)


def blocking_twin(engine: AsyncEngine) -> Engine:
    """An engine for threads, which connects to the same URL. The caller disposes of it."""
    url = engine.url
    if url.get_driver_name() == ASYNCPG:
        query = {_TO_LIBPQ.get(name, name): value for name, value in url.query.items() if name not in _OF_ASYNCPG}
        url = url.set(query=query)
    return engine_of(_with_driver(url, _BLOCKING))


def _with_driver(url: URL, drivers: Mapping[str, str]) -> URL:
    name = drivers.get(url.drivername)
    return url if name is None else url.set(drivername=name)
