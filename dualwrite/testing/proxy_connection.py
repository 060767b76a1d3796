"""One client's connection through a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Generic

from dualwrite.testing.ports import LOOPBACK
from dualwrite.testing.proxy_rules import Action, Rule
from dualwrite.testing.proxy_units import Answer, Codec, RequestT, Unit

if TYPE_CHECKING:
    from collections.abc import Callable

GONE = (asyncio.IncompleteReadError, ConnectionError)
"""How a peer that has closed or reset its connection shows."""


class Connection(Generic[RequestT]):
    """Two pumps: requests to the server, answers to the client.

    The server's side outlives the client's while a request that a rule has taken is still to be sent or answered.
    So a request can arrive after its sender has given up, as a delayed packet does.

    Args:
        codec: Cuts the streams.
        reader: From the client.
        writer: To the client.
        rule_for: Finds the rule that takes a unit.
    """

    def __init__(
        self,
        codec: Codec[RequestT],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rule_for: Callable[[Unit[RequestT], Connection[RequestT]], Rule[RequestT] | None],
    ) -> None:
        self.failures: list[Exception] = []
        """What went wrong in the proxy itself, once `serve` has ended."""
        self._codec = codec
        self._client_reader = reader
        self._client = writer
        self._rule_for = rule_for
        self._unanswered: dict[int, Rule[RequestT]] = {}
        self._copies: set[int] = set()
        self._parts: dict[int, bytes] = {}
        self._later: set[asyncio.Task[None]] = set()
        self._less_is_owed = asyncio.Event()

    async def serve(self, upstream_port: int) -> None:
        """Forward until the server has gone, or the client has and nothing is owed any more."""
        try:
            server_reader, self._server = await asyncio.open_connection(LOOPBACK, upstream_port)
        except OSError:  # the server is down: the client is to see just that
            self.reset_client()
            return
        requests = asyncio.ensure_future(self._forward_requests())
        answers = asyncio.ensure_future(self._forward_answers(server_reader))
        try:
            await asyncio.wait({requests, answers}, return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                owed = asyncio.ensure_future(self._until_nothing_is_owed())
                await asyncio.wait({owed, answers}, return_when=asyncio.FIRST_COMPLETED)
                owed.cancel()
        except asyncio.CancelledError:  # the proxy closes, and does not wait for a client that does not read
            self.reset_client()
            raise
        finally:
            tasks = (requests, answers, *self._later)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self.failures = [result for result in results if isinstance(result, Exception)]
            self._server.transport.abort()
            self._client.close()
            await asyncio.gather(self._server.wait_closed(), self._client.wait_closed(), return_exceptions=True)

    def reset_client(self) -> None:
        """Reset the client's connection: an RST, not an orderly end."""
        transport = self._client.transport
        if not transport.is_closing():
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()

    async def _forward_requests(self) -> None:
        with contextlib.suppress(*GONE):
            await self._send(await self._codec.opening(self._client_reader, self._client))
            while True:
                unit = await self._codec.next_request(self._client_reader)
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
        with contextlib.suppress(ConnectionError):  # the client has gone; later answers may still be waited for
            self._client.write(data)
            await self._client.drain()

    async def _until_nothing_is_owed(self) -> None:
        while self._unanswered or self._later:
            self._less_is_owed.clear()
            await self._less_is_owed.wait()
