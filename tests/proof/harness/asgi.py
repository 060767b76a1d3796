"""A client of an ASGI application, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

from dualwrite import TransactionAborted


def answer(app: Any, path: str) -> tuple[list[int], TransactionAborted | None]:
    """The statuses that a client of ``POST path`` reads, and the error that the server is left with."""
    return asyncio.run(ask(app, path))


async def ask(app: Any, path: str) -> tuple[list[int], TransactionAborted | None]:
    """See :func:`answer`; in the event loop of the caller."""
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [],
    }
    try:
        await app(scope, receive, send)
    except TransactionAborted as error:
        return statuses, error
    return statuses, None
