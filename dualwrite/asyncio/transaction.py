"""The object of ``async with writer.transaction() as tx``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from dualwrite.asyncio.greenlets import run
from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError
from dualwrite.waiting import here
from dualwrite.writing.fair_queue import Turns

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, TopicPartition
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import Session

    from dualwrite.kafka.engine import Column
    from dualwrite.protocol.lives__protocol_tables_write_life import WriteState
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.writing.transaction import Transaction

T = TypeVar("T")

_OURS: Final = "dualwrite.async_session"
_FOR_EVER_S: Final = 1e9


def session_of_block(bind: AsyncConnection) -> AsyncSession:
    """The ORM session of a block, whose objects stay readable after the block has ended."""
    return AsyncSession(bind=bind, expire_on_commit=False)


class Sessions:
    """Makes the plain session of each block, and the ``AsyncSession`` through which tasks await it.

    Args:
        engine: The engine of the blocks' connections.
        factory: Makes a session, called with ``bind=connection``.
    """

    def __init__(self, engine: AsyncEngine, factory: Callable[..., AsyncSession]) -> None:
        self._engine = engine
        self._factory = factory

    def make(self, bind: Connection) -> Session:
        """The session on that connection."""
        made = self._factory(bind=AsyncConnection(self._engine, bind))
        made.sync_session.info[_OURS] = made
        return made.sync_session


class OneByOne:
    """Lets tasks work at one dual write one by one.

    Attributes:
        ended: Whether later sends are refused: they could meet the decision.
    """

    def __init__(self) -> None:
        self.ended = False
        self._turns: Turns[None] = Turns([None])
        self._worker: object = None

    def do(self, work: Callable[[], T]) -> T:
        """Do the work while no other task works. Called in a greenlet.

        A task that is already working continues: an error that it meets may end the dual write at once.
        """
        caller = here().caller
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
        self, transaction: Transaction, engine: AsyncEngine, pool: ThreadPoolExecutor, turns: OneByOne | None = None
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
