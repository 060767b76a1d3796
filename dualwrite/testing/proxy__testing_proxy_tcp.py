"""A TCP proxy that loses, holds, repeats and cuts requests and answers as a test tells it.

It runs in its own thread, and forwards whole requests and whole answers. A rule takes the nth request that matches it;
everything else passes untouched. Nothing depends on time: a held request stays held until the test releases it.

A client in the same process must wait for answers without holding the GIL, as psycopg and confluent-kafka do; otherwise
the proxy could not run.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING, Generic

from dualwrite.errors import IllegalStateError
from dualwrite.testing.proxy import Connection
from dualwrite.testing.proxy__testing_proxy_rules import Action, Rule
from dualwrite.testing.proxy__testing_proxy_units import Codec, RequestT, Unit
from dualwrite.testing.servers.embedded__testing_servers_ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self


class Proxy(Generic[RequestT]):
    """A proxy in front of one port of the loopback interface: a context manager.

    Args:
        upstream_port: The server's port.
        codec: Makes the codec of one connection.
        port: The port to listen on; a free one if 0.
    """

    def __init__(self, upstream_port: int, codec: Callable[[], Codec[RequestT]], *, port: int = 0) -> None:
        self._upstream_port = upstream_port
        self._codec = codec
        self._asked_port = port
        self._running: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._rules: list[Rule[RequestT]] = []
        self._requests: list[RequestT] = []
        self._connections: dict[Connection[RequestT], asyncio.Task[None]] = {}
        self._failures: list[Exception] = []
        self._listener: socket.socket | None = None

    def __enter__(self) -> Self:
        self._listener = socket.create_server((LOOPBACK, self._asked_port), backlog=128)
        self._listener.setblocking(False)
        self._running = asyncio.new_event_loop()
        self._running.add_reader(self._listener, self._accept, self._listener)
        self._thread = threading.Thread(target=self._running.run_forever, name="dualwrite-proxy", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        loop, self._running = self._loop, None
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()
        if self._failures and exc is None:
            raise self._failures[0]

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._running is None:
            raise IllegalStateError("a proxy works only inside its with block")
        return self._running

    # Not asyncio's own server: on close, connections that it has just accepted would stay open and unreachable.
    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client has already gone
            return
        connection = Connection(self._codec(), client, self._rule_for)
        self._connections[connection] = asyncio.ensure_future(self._serve(connection))

    async def _close(self) -> None:
        assert self._listener is not None
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        for serving in self._connections.values():
            serving.cancel()
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks)
        # A cancelled task closes nothing, and one cancelled early may not even have its connections yet.
        for connection, serving in self._connections.items():
            connection.abort()
            await connection.closed()
            if not serving.cancelled() and isinstance(error := serving.exception(), Exception):
                self._failures.append(error)

    async def _serve(self, connection: Connection[RequestT]) -> None:
        try:
            await connection.serve(self._upstream_port)
        finally:
            self._failures += connection.failures  # raised when the with block ends
        del self._connections[connection]

    @property
    def port(self) -> int:
        """The port that it listens on, at 127.0.0.1.

        Raises:
            IllegalStateError: Outside the with block.
        """
        if self._listener is None:
            raise IllegalStateError("a proxy works only inside its with block")
        number: int = self._listener.getsockname()[1]
        return number

    @property
    def requests(self) -> list[RequestT]:
        """All requests that clients have sent so far, in order of arrival."""
        with self._lock:
            return list(self._requests)

    def cut(self) -> None:
        """Reset all clients' connections, like a failing network. Held requests stay held."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()

    async def _cut(self) -> None:
        for connection in self._connections:
            connection.reset_client()

    def _add(self, action: Action, matches: Callable[[Unit[RequestT]], bool], nth: int | None) -> Rule[RequestT]:
        rule = Rule(action, matches, nth, self._loop)
        with self._lock:
            self._rules.append(rule)
        return rule

    def _rule_for(self, unit: Unit[RequestT], connection: Connection[RequestT]) -> Rule[RequestT] | None:
        if unit.request is None:
            return None
        with self._lock:
            self._requests.append(unit.request)
            # Every rule counts the request, even those after the one that takes it.
            wanting = [rule for rule in self._rules if rule.counts(unit)]
        if not wanting:
            return None
        wanting[0].take(unit.request, connection.reset_client)
        return wanting[0]
