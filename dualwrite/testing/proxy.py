"""A TCP proxy that loses, holds, repeats and cuts what a test tells it to.

It runs in a thread of its own, and forwards whole requests and whole answers. A rule takes the nth request that it
is about; everything else goes through untouched. Nothing here depends on time: what is held is held until the test
releases it.

A client in the same process must wait for its answers without holding the GIL, as psycopg and confluent-kafka do: the
proxy could not run otherwise.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING, Generic

from dualwrite.errors import IllegalStateError
from dualwrite.testing.ports import LOOPBACK
from dualwrite.testing.proxy_connection import Connection
from dualwrite.testing.proxy_rules import Action, Rule
from dualwrite.testing.proxy_units import Codec, RequestT, Unit

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self


class Proxy(Generic[RequestT]):
    """A proxy in front of one port of the loopback interface: a context manager.

    Args:
        upstream_port: Where the server listens.
        codec: Makes the codec of one connection.
        port: Where to listen; a free port if 0.
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

    # Not asyncio's own server: what that has accepted when it is closed stays open, and nobody can reach it.
    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone before we came
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
        # A task that was cancelled has closed nothing, and one that was cancelled early did not know what to close.
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
        """Where it listens, on 127.0.0.1.

        Raises:
            IllegalStateError: Outside the with block.
        """
        if self._listener is None:
            raise IllegalStateError("a proxy works only inside its with block")
        number: int = self._listener.getsockname()[1]
        return number

    @property
    def requests(self) -> list[RequestT]:
        """All requests that clients have sent so far, in the order in which they came."""
        with self._lock:
            return list(self._requests)

    def cut(self) -> None:
        """Reset all clients' connections, as a network does that fails. Requests that are held stay held."""
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
            # Every rule counts it, also those that come after the one that takes it.
            wanting = [rule for rule in self._rules if rule.counts(unit)]
        if not wanting:
            return None
        wanting[0].take(unit.request, connection.reset_client)
        return wanting[0]
