"""``AsyncExactlyOnceConsumer``: consume, transform, write to both sides, once, in the tasks of an event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine

from dualwrite.asyncio.transaction import AsyncTransaction, OneByOne, Threads, awaited, run, says_more
from dualwrite.asyncio.writer import THREADS, TaskWriter, async_engine_of, blocking_twin
from dualwrite.consumer.consumer import ConsumerProgress, Deserializers, Member
from dualwrite.errors import IllegalStateError
from dualwrite.stores.sql.access import engine_of
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.waiting import interruptible

if TYPE_CHECKING:
    from confluent_kafka import Message
    from sqlalchemy import Engine

    from dualwrite.state import PartitionStores
    from dualwrite.writing.transaction import AsyncWriterOptions, Transaction

T = TypeVar("T")

AsyncHandler = Callable[["AsyncTransaction", Sequence["Message"]], Awaitable[object]]


class AsyncExactlyOnceConsumer:
    """An `ExactlyOnceConsumer` whose handler is a coroutine function: the same promise, settings and rules, in one event loop.

    Handlers run in tasks, ``workers`` of them at a time, each with partitions of its own. One thread polls Kafka, so the group
    keeps the member whatever the event loop does.

    A cancellation of :meth:`run` has one of two outcomes for each transaction under way. Until the database is asked to commit,
    both sides abort, and the messages are read again by the next member to get them. From then on it is completed first.

    Args:
        group: As for `ExactlyOnceConsumer`.
        member: As for `ExactlyOnceConsumer`.
        topics: As for `ExactlyOnceConsumer`.
        handler: ``async def handler(tx, messages)``, called with an `AsyncTransaction` and a list of confluent-kafka's
            messages, in the order of each partition. It must not commit, and must not send offsets. It must await everything
            that it sends before it returns.
        kafka: As for `ExactlyOnceConsumer`.
        database: An ``AsyncEngine`` (psycopg, asyncpg or aiosqlite) or a database URL. The tables must exist:
            ``dualwrite migrate``.
        own_engine: An engine for the consumer's own short transactions, which run in threads; see `AsyncDualWriter`.
        schema, offsets, consumer: As for `ExactlyOnceConsumer`.
        writer: Further arguments of `AsyncDualWriter`.
        max_messages, linger_s, workers, attempts, dead_letter_topic, transient: As for `ExactlyOnceConsumer`.
        deserializers: As for `ExactlyOnceConsumer`. Called in a thread: they may ask a schema registry.
        state: As for `ExactlyOnceConsumer`. Its stores are read and written without awaiting.

    Raises:
        ConfigurationError: A setting cannot work, or would break the promise.
    """

    def __init__(
        self,
        group: str,
        member: str,
        *,
        topics: Sequence[str],
        handler: AsyncHandler,
        kafka: Mapping[str, object],
        database: AsyncEngine | str,
        own_engine: Engine | str | None = None,
        schema: str | None = None,
        offsets: Literal["kafka", "database"] = "kafka",
        consumer: Mapping[str, object] | None = None,
        writer: AsyncWriterOptions | None = None,
        max_messages: int = 500,
        linger_s: float = 0.0,
        workers: int = 1,
        attempts: int = 5,
        dead_letter_topic: str | None = None,
        transient: tuple[type[Exception], ...] = (),
        deserializers: Deserializers | None = None,
        state: PartitionStores | None = None,
    ) -> None:
        self._handler = handler
        self._owns_engine = not isinstance(database, AsyncEngine)
        self._engine = async_engine_of(database)
        own = blocking_twin(self._engine) if own_engine is None else engine_of(own_engine)
        self._member = Member(
            group,
            member,
            topics=topics,
            handler=self._handle,
            kafka=kafka,
            database=SqlDatabase(own, schema),
            dispose=own.dispose if own is not own_engine else lambda: None,
            make_writer=partial(TaskWriter, asynchronous=self._engine),
            offsets=offsets,
            consumer=consumer,
            writer=writer,
            max_messages=max_messages,
            linger_s=linger_s,
            workers=workers,
            attempts=attempts,
            dead_letter_topic=dead_letter_topic,
            transient=transient,
            deserializers=deserializers,
            state=state,
        )
        self.transactional_id = self._member.transactional_id
        self._pool = Threads(THREADS + self._member.limits.max_lanes, self.transactional_id)
        self._ended: asyncio.Future[None] | None = None

    @property
    def progress(self) -> ConsumerProgress:
        """The messages written, and those that wait. May be read in any thread."""
        return self._member.progress

    def stop(self) -> Awaitable[None]:
        """Make :meth:`run` end after the transactions under way. Called in the event loop; a signal handler of it may, too.

        Returns:
            An awaitable for the end of :meth:`run`. Do not await it in the handler: it would wait for itself.
        """
        self._member.stop()
        if self._ended is None:
            ended = asyncio.get_running_loop().create_future()
            ended.set_result(None)
            return ended
        return asyncio.shield(self._ended)

    async def run(self, *, max_messages: int | None = None, idle_s: float | None = None) -> None:
        """Join the group, and work until :meth:`stop`. Call it once.

        On return the member has left the group, and nothing that it began is open.

        Args:
            max_messages: End when at least this many messages are written; for tests.
            idle_s: End when nothing came for this many seconds; for tests.

        Raises:
            CancelledError: The task was cancelled. It comes when all transactions under way are aborted or complete.
            IllegalStateError: It ran before, the handler is no coroutine function, or a task that ran a handler was cancelled.
            DualWriteError: As :meth:`ExactlyOnceConsumer.run`.
            Exception: As :meth:`ExactlyOnceConsumer.run`.
        """
        self._member.begin()
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        tasks = _Tasks(loop, self._pool)
        reader = ThreadPoolExecutor(1, f"{self.transactional_id} reader")
        try:
            await self._until_ended(loop.run_in_executor(reader, self._member.run, tasks, max_messages, idle_s), tasks)
        finally:
            reader.shutdown(wait=False)
            self._pool.shutdown(wait=False)
            try:
                if self._owns_engine:
                    await self._engine.dispose()
            finally:
                self._ended.set_result(None)

    async def _until_ended(self, running: asyncio.Future[None], tasks: _Tasks) -> None:
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as interruption:
                cancelled = cancelled or interruption
                self._member.stop()
                tasks.cancel()
        error = running.exception()
        if cancelled is not None and (error is None or not says_more(error)):
            raise cancelled
        if isinstance(error, asyncio.CancelledError):
            raise IllegalStateError(
                "a task that ran the handler was cancelled",
                transactional_id=self.transactional_id,
                next_step="to end the consumer, call stop() or cancel run()",
            ) from error
        if error is not None:
            raise error

    def _handle(self, transaction: Transaction, messages: Sequence[Message]) -> None:
        turns = OneByOne()
        tx = AsyncTransaction(transaction, self._engine, self._pool, turns)
        try:
            with interruptible():
                given = self._handler(tx, messages)
                if not inspect.isawaitable(given):
                    raise IllegalStateError(
                        "the handler is not a coroutine function",
                        transactional_id=self.transactional_id,
                        next_step="write `async def`; or use ExactlyOnceConsumer",
                    )
                awaited(given)
        finally:
            turns.end()


class _Tasks:
    """The workers are tasks. Implements :class:`dualwrite.consumer.consumer.Workers`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: Threads) -> None:
        self._loop = loop
        self._pool = pool
        self._tasks: set[asyncio.Task[object]] = set()

    def call(self, work: Callable[[], T]) -> T:
        done: list[T] = []

        async def carry() -> None:
            with suppress(asyncio.CancelledError):  # it comes after the work
                await run(self._pool, lambda: done.append(work()), interruptible=False)

        asyncio.run_coroutine_threadsafe(carry(), self._loop).result()
        if not done:
            raise CancelledError
        return done[0]

    def start(self, work: Callable[[], None], name: str) -> Callable[[], None]:
        async def carry() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.set_name(name)
            self._tasks.add(task)
            with suppress(asyncio.CancelledError):  # the work has noted it
                await run(self._pool, work, interruptible=False)

        future = asyncio.run_coroutine_threadsafe(carry(), self._loop)

        def wait() -> None:
            with suppress(CancelledError):  # before its first step
                future.result()

        return wait

    def cancel(self) -> None:
        """Interrupt the handlers. Called in the event loop."""
        for task in self._tasks:
            task.cancel()
