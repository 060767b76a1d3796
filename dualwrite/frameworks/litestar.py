"""Litestar: a block of a writer as a dependency, and a lifespan for the writer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualwrite.errors import extra_missing
from dualwrite.frameworks import block_of, detail_of, opened

try:
    from litestar import Request, Response
    from litestar.di import Provide
except ImportError as error:
    raise extra_missing("litestar", error) from error

if TYPE_CHECKING:
    from dualwrite.frameworks import Writer
    from dualwrite.protocol.outbox import Outbox

__all__ = ["answer_error", "in_transaction", "opened"]


def in_transaction(writer: Writer, *, outbox: Outbox | None = None) -> Provide:
    """A dependency: the transaction of one block around the handler.

    The block ends when the handler has returned, and before the response is sent: an abort becomes an error response. With an
    `AsyncDualWriter` the handler is asynchronous; with a `DualWriter` it is a plain one with ``sync_to_thread=True``.
    `CompletionPending` is logged, and the response sent: the rows are committed.

    Args:
        writer: The writer, which :func:`opened` opens.
        outbox: As for ``transaction()``.

    Returns:
        What stands in ``dependencies={"tx": in_transaction(writer)}``.
    """
    return Provide(block_of(writer, outbox))


def answer_error(request: Request, error: Exception) -> Response:  # type: ignore[type-arg] # of any state
    """Answer 503 to a request whose block has written nothing, and can be sent again; with ``Retry-After``.

    Register it with ``exception_handlers={Unavailable: answer_error, TransactionAborted: answer_error}``, and for
    `ConfigurationError`, which is raised during a failover, too. A `TransactionAborted` that is not ``retryable``, and a
    `ConfigurationError` without ``may_pass``, are answered with 500.

    Args:
        request: The request.
        error: What left the block.
    """
    del request
    detail = detail_of(error)
    if detail is None:
        return Response({"status_code": 500, "detail": "Internal Server Error"}, status_code=500)
    return Response({"status_code": 503, "detail": detail}, status_code=503, headers={"Retry-After": "1"})
