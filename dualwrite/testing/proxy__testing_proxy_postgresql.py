"""A proxy that understands enough of PostgreSQL's protocol to recognise a COMMIT."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy.engine import make_url

from dualwrite.errors import IllegalStateError
from dualwrite.testing.proxy__testing_proxy_rules import Choice
from dualwrite.testing.proxy__testing_proxy_tcp import Proxy
from dualwrite.testing.proxy__testing_proxy_units import Answer, Unit
from dualwrite.testing.servers.embedded__testing_servers_ports import LOOPBACK

if TYPE_CHECKING:
    import asyncio

    from dualwrite.testing.servers.postgresql import EmbeddedPostgres

ENCRYPTION_REQUESTS = {80877103, 80877104}  # SSLRequest, GSSENCRequest
STARTUP = 0
NOTHING_ASKED = -1
QUERY, PARSE, BIND, SYNC, FUNCTION_CALL = b"Q", b"P", b"B", b"S", b"F"
PARTS_OF_A_BATCH = {PARSE, BIND, b"D", b"E", b"C"}  # Describe, Execute, Close
READY_FOR_QUERY, COPY_IN = b"Z", b"G"
_STATEMENTS = re.compile(r"""(?:'[^']*'|"[^"]*"|[^;'"])+""")
_PREPARE = re.compile(r"\s*prepare\s+(\w+)\s+as\s+(.*)", re.IGNORECASE | re.DOTALL)
_EXECUTE = re.compile(r"\s*execute\s+(\w+)", re.IGNORECASE)


@dataclass(frozen=True)
class PostgresRequest:
    """One request of a client: a simple query, or everything up to a Sync."""

    statements: tuple[str, ...]
    """One line each, in capitals, without the semicolon."""


class PostgresCodec:
    """Messages with a type letter and a length, after a startup message without a letter.

    No rule can take requests that end with a Flush instead of a Sync, since their answers have no visible end; they are
    forwarded.
    """

    def __init__(self) -> None:
        self._asked: deque[tuple[int, bytes]] = deque([(STARTUP, b"")])
        self._prepared: dict[bytes, str] = {}
        self._named: dict[str, str] = {}
        self._last_key = STARTUP

    async def opening(self, client: asyncio.StreamReader, reply: asyncio.StreamWriter) -> bytes:
        """The startup message. Declines encryption, which the proxy could not read."""
        while True:
            length = await client.readexactly(4)
            body = await client.readexactly(int.from_bytes(length, "big") - 4)
            if int.from_bytes(body[:4], "big") not in ENCRYPTION_REQUESTS:
                return length + body
            reply.write(b"N")

    async def next_request(self, client: asyncio.StreamReader) -> Unit[PostgresRequest]:
        """The next query, the next batch up to its Sync, or any other single message."""
        batch = b""
        statements: list[str] = []
        while True:
            kind, data = await _message(client)
            batch += data
            if kind == QUERY:
                statements += self._executed(data[5:].rstrip(b"\0").decode(errors="replace"))
            elif kind == PARSE:
                name, text = data[5:].split(b"\0")[:2]
                self._prepared[name] = text.decode(errors="replace")
            elif kind == BIND:
                statements.append(self._prepared.get(data[5:].split(b"\0")[1], ""))
            if kind in {QUERY, SYNC, FUNCTION_CALL}:
                self._last_key += 1
                self._asked.append((self._last_key, kind))
                request = PostgresRequest(tuple(_normal(text) for text in statements if text.strip()))
                return Unit(request, batch, self._last_key)
            if kind not in PARTS_OF_A_BATCH:
                return Unit(None, batch, NOTHING_ASKED)

    def _executed(self, text: str) -> Iterator[str]:
        """The statements of a simple query: in place of EXECUTE, what PREPARE has prepared."""
        for statement in _STATEMENTS.findall(text):
            if prepared := _PREPARE.match(statement):
                self._named[prepared[1].lower()] = prepared[2]
            elif executed := _EXECUTE.match(statement):
                yield self._named.get(executed[1].lower(), statement)
            else:
                yield statement

    async def next_answer(self, server: asyncio.StreamReader) -> Answer:
        """The server's next message; ReadyForQuery ends an answer."""
        kind, data = await _message(server)
        key, asked = self._asked[0] if self._asked else (NOTHING_ASKED, b"")
        # A server that enters COPY IN discards the Sync sent with the statement, and does not answer it.
        final = kind == READY_FOR_QUERY or (kind == COPY_IN and asked == SYNC)
        if final:
            self._asked.popleft()
        return Answer(key, data, final)

    def copy_of(self, unit: Unit[PostgresRequest]) -> Unit[PostgresRequest]:
        """Refused: a PostgreSQL session never sends a request twice by accident."""
        raise IllegalStateError(f"PostgreSQL's protocol has no duplicates: {unit.request}")


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readexactly(5)
    return head[:1], head + await reader.readexactly(int.from_bytes(head[1:], "big") - 4)


def _normal(statement: str) -> str:
    return " ".join(statement.split()).upper()


class PostgresProxy(Proxy[PostgresRequest]):
    """A proxy in front of an embedded PostgreSQL server. Connections through it are not encrypted.

    Args:
        server: A started server.
    """

    def __init__(self, server: EmbeddedPostgres) -> None:
        super().__init__(server.port, PostgresCodec)

    def url(self, url: str) -> str:
        """Change the SQLAlchemy URL of one of the server's databases to lead through the proxy."""
        through = make_url(url).set(host=LOOPBACK, port=self.port)
        return through.render_as_string(hide_password=False)

    def on(self, statement: str = "COMMIT", *, nth: int | None = 1) -> Choice[PostgresRequest]:
        """Choose requests by a statement. Call a method of the choice to make a rule, which counts from then on.

        Args:
            statement: The beginning of the statement, in any case. Several statements sent at once are one request.
            nth: The number of the matching request to take, from 1; all if None.
        """
        wanted = _normal(statement)

        def matches(unit: Unit[PostgresRequest]) -> bool:
            assert unit.request is not None
            return any(text.startswith(wanted) for text in unit.request.statements)

        return Choice(partial(self._add, matches=matches, nth=nth))
