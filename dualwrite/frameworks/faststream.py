"""FastStream over confluent-kafka: a handler's rows, what it publishes, and the offsets of its messages, in one dual write.

The middleware opens a block of the writer around each handler, and sends through it what the handler publishes, by its
decorators or by ``broker.publish()``. The message's offset is committed in the same Kafka transaction. So each message counts
once, and a handler that fails gets it again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from dualwrite.asyncio.transaction import AsyncTransaction
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    OutcomeUnverifiable,
    TransactionInDoubt,
    extra_missing,
)
from dualwrite.frameworks import logger
from dualwrite.frameworks import opened as opened_by_asgi

try:
    from confluent_kafka import TopicPartition
    from faststream import BaseMiddleware, Context
    from faststream.confluent.message import KafkaMessage
    from faststream.exceptions import AckMessage, RejectMessage, StopApplication
except ImportError as error:
    raise extra_missing("faststream", error) from error

if TYPE_CHECKING:
    from types import TracebackType

    from faststream import ContextRepo

    from dualwrite.asyncio.writer import AsyncDualWriter

__all__ = ["DualWrite", "in_transaction", "opened"]

_NAME: Final = "dual_write"
Middleware: TypeAlias = BaseMiddleware[Any, Any]
DualWrite: TypeAlias = Annotated[AsyncTransaction, Context(_NAME, cast=False)]
"""The annotation of a handler's argument that takes the transaction: ``async def handle(body: str, tx: DualWrite)``."""

_current: ContextVar[AsyncTransaction | None] = ContextVar(_NAME, default=None)
_COMMITTED: Final = (CompletionPending, DecidedTransactionLost, OutcomeUnverifiable)


def opened(writer: AsyncDualWriter) -> Callable[[], AbstractAsyncContextManager[None]]:
    """The lifespan of an application: ``FastStream(broker, lifespan=opened(writer))``.

    It opens the writer without waiting for a server, and closes it after the broker has stopped.

    Args:
        writer: The writer, not opened.
    """

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with opened_by_asgi(writer)(None):
            yield

    return lifespan


def in_transaction(writer: AsyncDualWriter) -> Callable[..., Middleware]:
    """A middleware of a broker, ``KafkaBroker(..., middlewares=[in_transaction(writer)])``, or of a router.

    Its subscribers need ``ack_policy=AckPolicy.MANUAL``, and one worker each. What they publish is sent by the writer; what is
    published outside of a handler goes FastStream's own way.

    A handler that raises aborts both sides, and gets its message again; after ``RejectMessage`` only the offset moves.
    `CompletionPending` and losses come after the decision: they are logged, and the next message follows. After
    `TransactionInDoubt` the application stops: started again, its writer settles, and it goes on where the offsets say.

    Args:
        writer: The writer, opened before the broker starts: by ``FastStream(broker, lifespan=opened(writer))``.
    """

    def made(msg: object, /, *, context: ContextRepo) -> Middleware:
        return _Middleware(msg, context=context, writer=writer)

    return made


class _Middleware(BaseMiddleware[Any, Any]):
    """The middleware of one message; or, for what is published outside of a handler, of none."""

    __slots__ = ("_block", "_message", "_metadata", "_tokens", "_writer")

    def __init__(self, msg: object, /, *, context: ContextRepo, writer: AsyncDualWriter) -> None:
        super().__init__(msg, context=context)
        self._writer = writer
        self._block: AbstractAsyncContextManager[AsyncTransaction] | None = None
        self._message: KafkaMessage | None = None
        self._metadata: object = None
        self._tokens: tuple[Token[Any], Token[AsyncTransaction | None]] | None = None

    async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: Any) -> Any:
        """Open the block, before the handler."""
        if not isinstance(msg, KafkaMessage):
            raise ConfigurationError(
                f"{type(msg).__name__} is no message of faststream.confluent",
                next_step="use faststream.confluent.KafkaBroker: the offsets of others cannot be committed in a transaction",
            )
        if not msg.is_manual:
            raise ConfigurationError(
                "the subscriber commits offsets by itself",
                next_step="give it ack_policy=AckPolicy.MANUAL: the offset is committed with the rows",
            )
        self._message = msg
        consumer: Any = msg.consumer
        # As it is now: with it Kafka refuses the offsets if the group gives the partition away meanwhile.
        self._metadata = consumer.consumer.consumer_group_metadata() if hasattr(consumer, "consumer") else None
        block = self._writer.transaction()
        tx = await block.__aenter__()
        self._block = block
        self._tokens = self.context.set_local(_NAME, tx), _current.set(tx)
        return await call_next(msg)

    async def publish_scope(self, call_next: Callable[[Any], Awaitable[Any]], cmd: Any) -> Any:
        """Send what is published inside a block through it."""
        tx = _current.get()
        if tx is None:
            return await call_next(cmd)
        producer = self.context.get("broker").config.producer
        for number, body in enumerate(cmd.batch_bodies or (None,)):
            value, kind = (None, None) if body is None else await producer.codec.encode(body, producer.serializer)
            headers = {**({"content-type": kind} if kind else {}), **cmd.headers_to_publish()}
            await tx.produce(
                cmd.destination,
                value,
                cmd.key_for(number),
                partition=cmd.partition,
                headers=headers,
                timestamp_ms=cmd.timestamp_ms,
            )
        return None

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool | None:
        """End the block, once the handler's results are published."""
        block, self._block = self._block, None
        if block is None or self._tokens is None or self._message is None:
            if self._message is not None:  # the block has not begun
                await self._message.nack()
            return False
        tx = _current.get()
        assert tx is not None
        try:
            if exc_val is None or isinstance(exc_val, AckMessage):
                await self._end(block, tx)
            elif not await block.__aexit__(exc_type, exc_val, exc_tb):
                raise exc_val
        except BaseException as error:  # noqa: BLE001 - judged, and raised again
            return await self._judge(error, raised_by_handler=error is exc_val)
        finally:
            local, current = self._tokens
            self.context.reset_local(_NAME, local)
            _current.reset(current)
        return exc_val is not None

    async def _end(self, block: AbstractAsyncContextManager[AsyncTransaction], tx: AsyncTransaction) -> None:
        try:
            await self._move_offsets(tx)
        except BaseException as error:
            if not await block.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            await block.__aexit__(None, None, None)

    async def _judge(self, error: BaseException, *, raised_by_handler: bool) -> bool:
        """Whether to go on with the next message after this error, which has left the block. Raises it otherwise."""
        assert self._message is not None
        if raised_by_handler and isinstance(error, RejectMessage):
            async with self._writer.transaction() as only_offsets:
                await self._move_offsets(only_offsets)
            return True
        if not raised_by_handler and isinstance(error, _COMMITTED):
            logger.warning("%s: its rows are committed: %s", self._writer.transactional_id, error)
            return True
        if not raised_by_handler and isinstance(error, TransactionInDoubt):
            logger.critical("%s: the application stops: %s", self._writer.transactional_id, error)
            raise StopApplication from error
        await self._message.nack()  # back to where it began
        if raised_by_handler:
            return False
        raise error

    async def _move_offsets(self, tx: AsyncTransaction) -> None:
        assert self._message is not None
        raw = self._message.raw_message
        records: Sequence[Any] = raw if isinstance(raw, tuple) else (raw,)
        last = {(one.topic(), one.partition()): one.offset() for one in records}
        await tx.send_offsets_to_transaction(
            [TopicPartition(topic, partition, offset + 1) for (topic, partition), offset in last.items()],
            self._metadata,
        )
