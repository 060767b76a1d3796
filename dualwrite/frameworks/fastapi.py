"""FastAPI: a block of a writer as a dependency, a lifespan for the writer, and the answers to its errors."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, cast

from dualwrite.errors import ConfigurationError, TransactionAborted, Unavailable, extra_missing
from dualwrite.frameworks import block_of, detail_of, opened

try:
    from fastapi import Depends, FastAPI, Request
    from fastapi.params import Depends as Dependency
    from fastapi.responses import JSONResponse
except ImportError as error:
    raise extra_missing("fastapi", error) from error

if TYPE_CHECKING:
    from dualwrite.frameworks import Writer
    from dualwrite.protocol.outbox import Outbox

__all__ = ["answer_errors", "in_transaction", "opened"]


def in_transaction(writer: Writer, *, outbox: Outbox | None = None) -> Dependency:
    """A dependency: the transaction of one block around the path function.

    The block ends when the function has returned, and before the response is sent: an abort becomes an error response. With an
    `AsyncDualWriter` the function is asynchronous; with a `DualWriter` it is a plain one, which FastAPI runs in a thread.
    `CompletionPending` is logged, and the response sent: the rows are committed.

    Args:
        writer: The writer, which :func:`opened` opens.
        outbox: As for ``transaction()``.

    Returns:
        What stands in ``Annotated[AsyncTransaction, in_transaction(writer)]``.

    Raises:
        ConfigurationError: FastAPI is older than 0.121, in which a dependency ends after the response.
    """
    if "scope" not in inspect.signature(Depends).parameters:
        raise ConfigurationError(
            "this version of FastAPI ends a dependency after the response: the client would read 200 of an abort",
            next_step="install FastAPI 0.121 or newer: pip install 'dualwrite[fastapi]'",
        )
    return cast("Dependency", Depends(block_of(writer, outbox), scope="function"))


def answer_errors(app: FastAPI) -> None:
    """Answer 503 to a request whose block has written nothing, and can be sent again; with ``Retry-After``.

    These are `Unavailable`, a `TransactionAborted` that is ``retryable``, and a `ConfigurationError` that ``may_pass``. All
    other errors stay as they are: 500.

    Args:
        app: The application, which gets an exception handler for each of them.
    """

    async def answer(request: Request, error: Exception) -> JSONResponse:
        del request
        detail = detail_of(error)
        if detail is None:
            raise error
        return JSONResponse({"detail": detail}, 503, {"Retry-After": "1"})

    app.add_exception_handler(Unavailable, answer)
    app.add_exception_handler(TransactionAborted, answer)
    app.add_exception_handler(ConfigurationError, answer)
