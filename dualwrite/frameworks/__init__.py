"""Dual writes in the words of web and stream frameworks: ``dualwrite.frameworks.fastapi``, ``litestar``, ``faststream``.

What belongs here: a dependency, a lifespan or a middleware that a framework calls, over a writer's own calls. May use:
``dualwrite.writing``, ``dualwrite.asyncio`` and what is below them. The library itself never imports it; each module imports
its framework, and this one imports none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from dualwrite.asyncio.transaction import AsyncTransaction
from dualwrite.asyncio.writer import AsyncDualWriter
from dualwrite.errors import CompletionPending, DualWriteError
from dualwrite.protocol.lives import WriteState
from dualwrite.protocol.process import Redo, redo_after
from dualwrite.writing.transaction import Transaction

if TYPE_CHECKING:
    from dualwrite.protocol.outbox import Outbox
    from dualwrite.testing.memory.writer import InMemoryWriter
    from dualwrite.writing.writer import DualWriter

    Writer: TypeAlias = DualWriter | InMemoryWriter | AsyncDualWriter

logger = logging.getLogger(__name__)


def opened(writer: Writer) -> Callable[[object], AbstractAsyncContextManager[None]]:
    """The lifespan of an ASGI application that uses the writer, of FastAPI, Starlette or Litestar.

    It opens the writer without waiting for a server, so that the application starts while one is away, and closes it at the
    end. In each worker process: a writer that several of them share by name must be ``leased``.

    Args:
        writer: The writer, not opened.
    """

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        del app
        if isinstance(writer, AsyncDualWriter):
            await writer.open(wait=False)
        else:
            writer.open(wait=False)
        try:
            yield
        finally:
            if isinstance(writer, AsyncDualWriter):
                await writer.close()
            else:
                await asyncio.to_thread(writer.close)

    return lifespan


def block_of(writer: Writer, outbox: Outbox | None) -> Callable[[], Any]:
    """A generator function that gives the transaction of one block, for a framework's dependencies.

    `CompletionPending` does not leave it: the rows are committed, and the messages follow, so the request has succeeded. It is
    logged.
    """
    if isinstance(writer, AsyncDualWriter):

        async def in_task() -> AsyncGenerator[AsyncTransaction, None]:
            tx = None
            try:
                async with writer.transaction(outbox=outbox) as tx:
                    yield tx
            except CompletionPending as error:
                _pass_unless_decided(tx, error)

        return in_task

    async def in_threads() -> AsyncGenerator[Transaction, None]:
        from anyio import CancelScope, to_thread  # noqa: PLC0415 - the frameworks have it

        # A cancelled request waits for the thread: the block would be left open otherwise.
        block = writer.transaction(outbox=outbox)
        tx = await to_thread.run_sync(block.__enter__)
        try:
            try:
                yield tx
            except BaseException as error:
                with CancelScope(shield=True):
                    left = await to_thread.run_sync(block.__exit__, type(error), error, error.__traceback__)
                if not left:
                    raise
            else:
                await to_thread.run_sync(block.__exit__, None, None, None)
        except CompletionPending as error:
            _pass_unless_decided(tx, error)

    return in_threads


def _pass_unless_decided(tx: Transaction | AsyncTransaction | None, error: CompletionPending) -> None:
    """Raise the error, unless it says that this block is committed: one of another writer may have passed through."""
    if tx is None or tx.state is not WriteState.DECIDED or error.transactional_id != tx.transactional_id:
        raise error
    logger.warning("%s: the request is answered, and its messages follow: %s", tx.transactional_id, error)


def detail_of(error: Exception) -> str | None:
    """What a block's error tells a client that can send its request again, as nothing was written; None if it cannot."""
    if redo_after(error) is not Redo.AGAIN:
        return None
    return f"nothing was written: {error.what if isinstance(error, DualWriteError) else ''}"
