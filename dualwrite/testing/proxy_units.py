"""What a proxy forwards: requests and answers, cut out of two byte streams by a codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio

RequestT = TypeVar("RequestT")
"""What a test sees of one request."""


@dataclass(frozen=True)
class Unit(Generic[RequestT]):
    """One request on its way."""

    request: RequestT | None
    """None for a part of the conversation that no rule can take."""
    data: bytes
    key: int
    """Finds the answer: no two requests that wait for one on a connection have the same."""


@dataclass(frozen=True)
class Answer:
    """An answer, or a part of one."""

    key: int
    data: bytes
    final: bool
    """Whether the answer ends here."""


class Codec(Protocol[RequestT]):
    """Cuts the streams of one connection. Each method raises IncompleteReadError at the end of its stream."""

    async def opening(self, client: asyncio.StreamReader, reply: asyncio.StreamWriter) -> bytes:
        """What precedes the first request: answer the client where the proxy has to, return what the server gets."""
        ...

    async def next_request(self, client: asyncio.StreamReader) -> Unit[RequestT]:
        """The next unit."""
        ...

    async def next_answer(self, server: asyncio.StreamReader) -> Answer:
        """The next answer, or part of one."""
        ...

    def copy_of(self, unit: Unit[RequestT]) -> Unit[RequestT]:
        """The same request once more, with a key of its own."""
        ...
