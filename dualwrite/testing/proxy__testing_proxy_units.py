"""The units that a proxy forwards: requests and answers, which a codec cuts out of two byte streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio

RequestT = TypeVar("RequestT")
"""A request as a test sees it."""


@dataclass(frozen=True)
class Unit(Generic[RequestT]):
    """One request on its way."""

    request: RequestT | None
    """None for a part of the conversation that no rule can take."""
    data: bytes
    key: int
    """Identifies the answer: unique among a connection's unanswered requests."""


@dataclass(frozen=True)
class Answer:
    """An answer, or a part of one."""

    key: int
    data: bytes
    final: bool
    """Whether the answer ends here."""


class Codec(Protocol[RequestT]):
    """Splits the streams of one connection. Each method raises IncompleteReadError at the end of its stream."""

    async def opening(self, client: asyncio.StreamReader, reply: asyncio.StreamWriter) -> bytes:
        """Handle the bytes before the first request: answer the client if needed, and return those for the server."""
        ...

    async def next_request(self, client: asyncio.StreamReader) -> Unit[RequestT]:
        """The next unit."""
        ...

    async def next_answer(self, server: asyncio.StreamReader) -> Answer:
        """The next answer, or part of one."""
        ...

    def copy_of(self, unit: Unit[RequestT]) -> Unit[RequestT]:
        """A copy of the request with its own key."""
        ...
