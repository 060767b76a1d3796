"""One client's connection through a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Generic

from dualwrite.testing.proxy__testing_proxy_rules import Action, Rule
from dualwrite.testing.proxy__testing_proxy_units import Answer, Codec, RequestT, Unit
from dualwrite.testing.servers.embedded__testing_servers_ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable

GONE = (asyncio.IncompleteReadError, ConnectionError)
"""The errors raised once a peer has closed or reset its connection."""


class Connection(Generic[RequestT]):
    """Two pumps: requests to the server, answers to the client.

    The server's side outlives the client's while a request that a rule has taken waits to be sent or answered. So a
    request can arrive after its sender has given up, like a delayed packet.

    Args:
        codec: Splits the streams into units.
        client: The client's connected socket.
        rule_for: Finds the rule that takes a unit.
    """

    def __init__(
        self,
        codec: Codec[RequestT],
        client: socket.socket,
        rule_for: Callable[[Unit[RequestT], Connection[RequestT]], Rule[RequestT] | None],
    ) -> None:
        self.failures: list[Exception] = []
        """Errors of the proxy itself, once `serve` has ended."""
        self._codec = codec
        self._socket = client
        self._client: asyncio.StreamWriter | None = None
        self._server: asyncio.StreamWriter | None = None
        self._rule_for = rule_for
        self._unanswered: dict[int, Rule[RequestT]] = {}
        self._copies: set[int] = set()
        self._parts: dict[int, bytes] = {}
        self._later: set[asyncio.Task[None]] = set()
        self._less_is_owed = asyncio.Event()

    async def serve(self, upstream_port: int) -> None:
        """Forward until the server has gone, or until the client has gone and nothing is left to deliver.

        If it fails or is cancelled, call `abort` and `closed` afterwards.
        """
        try:
            client_reader, self._client = await asyncio.open_connection(sock=self._socket)
            server_reader, self._server = await asyncio.open_connection(LOOPBACK, upstream_port)
        except OSError:  # the server is down: show the client just that
            self.abort()
            await self.closed()
            return
        requests = asyncio.ensure_future(self._forward_requests(client_reader, self._client))
        answers = asyncio.ensure_future(self._forward_answers(server_reader))
        owed: asyncio.Future[None] | None = None
        try:
            await asyncio.wait({requests, answers}, return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                owed = asyncio.ensure_future(self._until_nothing_is_owed())
                await asyncio.wait({owed, answers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = [task for task in (requests, answers, owed, *self._later) if task is not None]
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self.failures = [result for result in results if isinstance(result, Exception)]
        self._server.transport.abort()
        self._client.close()
        await self.closed()

    def abort(self) -> None:
        """Reset the client's connection and drop the server's. Do not call it while `serve` runs."""
        self.reset_client()
        if self._client is None:
            self._socket.close()
        if self._server is not None:
            self._server.transport.abort()

    async def closed(self) -> None:
        """Wait until both sockets are closed, after they were closed or aborted."""
        writers = [writer for writer in (self._client, self._server) if writer is not None]
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)

    def reset_client(self) -> None:
        """Reset the client's connection: an RST, not an orderly close."""
        if self._socket.fileno() < 0:
            return
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self._client is not None:
            self._client.transport.abort()
        else:  # asyncio is about to take over the socket, and fails on a closed one
            with contextlib.suppress(OSError):  # the client was quicker
                self._socket.shutdown(socket.SHUT_RDWR)

    async def _forward_requests(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*GONE):
            await self._send(await self._codec.opening(client_reader, client))
            while True:
                unit = await self._codec.next_request(client_reader)
                rule = self._rule_for(unit, self)
                if rule is None:
                    await self._send(unit.data)
                else:
                    await self._obey(rule, unit)

    async def _obey(self, rule: Rule[RequestT], unit: Unit[RequestT]) -> None:
        if rule.action is Action.DROP_REQUEST:
            return
        if rule.action is Action.RESET_REQUEST:
            self.reset_client()
            return
        if rule.action is Action.HOLD_REQUEST:
            await rule.gate.wait()
            if rule.discarded:
                return
        copy = self._codec.copy_of(unit) if rule.action is Action.DUPLICATE else None
        self._unanswered[unit.key] = rule
        await self._send(unit.data)
        if copy is not None:
            sending = asyncio.ensure_future(self._send_copy(rule, copy))
            self._later.add(sending)
            sending.add_done_callback(self._copy_sent)

    async def _send_copy(self, rule: Rule[RequestT], copy: Unit[RequestT]) -> None:
        await rule.gate.wait()
        if not rule.discarded:
            self._unanswered[copy.key] = rule
            self._copies.add(copy.key)
            with contextlib.suppress(*GONE):
                await self._send(copy.data)

    def _copy_sent(self, task: asyncio.Task[None]) -> None:
        self._later.discard(task)
        self._less_is_owed.set()

    async def _send(self, data: bytes) -> None:
        assert self._server is not None
        self._server.write(data)
        await self._server.drain()

    async def _forward_answers(self, server_reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(*GONE):
            while True:
                answer = await self._codec.next_answer(server_reader)
                rule = self._unanswered.get(answer.key)
                if rule is None:
                    await self._hand_over(answer.data)
                else:
                    await self._treat(answer, rule)

    async def _treat(self, answer: Answer, rule: Rule[RequestT]) -> None:
        whole = self._parts.pop(answer.key, b"") + answer.data
        if not answer.final:
            self._parts[answer.key] = whole
            return
        rule.answered()
        if answer.key in self._copies or rule.action is Action.DROP_ANSWER:
            pass
        elif rule.action is Action.RESET_ANSWER:
            self.reset_client()
        else:
            if rule.action is Action.HOLD_ANSWER:
                await rule.gate.wait()
            if not (rule.action is Action.HOLD_ANSWER and rule.discarded):
                await self._hand_over(whole)
        del self._unanswered[answer.key]
        self._copies.discard(answer.key)
        self._less_is_owed.set()

    async def _hand_over(self, data: bytes) -> None:
        assert self._client is not None
        with contextlib.suppress(ConnectionError):  # the client has gone; a test may still wait for later answers
            self._client.write(data)
            await self._client.drain()

    async def _until_nothing_is_owed(self) -> None:
        while self._unanswered or self._later:
            self._less_is_owed.clear()
            await self._less_is_owed.wait()
