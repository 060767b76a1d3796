"""A TCP proxy that loses, holds, repeats and cuts what a test tells it to.

It runs in a thread of its own, and forwards whole requests and whole answers. A rule takes the nth request that it
is about; everything else goes through untouched. Nothing here depends on time: what is held is held until the test
releases it.

A client in the same process must wait for its answers without holding the GIL, as psycopg and confluent-kafka do: the
proxy could not run otherwise.
"""

from __future__ import annotations

import asyncio
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
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Self:
        self._running = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._running.run_forever, name="dualwrite-proxy", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._end_loop()
        if self._failures and exc is None:
            raise self._failures[0]

    def _end_loop(self) -> None:
        loop, self._running = self._loop, None
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._running is None:
            raise IllegalStateError("a proxy works only inside its with block")
        return self._running

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, LOOPBACK, self._asked_port)

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._server = None
        # Also those that were accepted a moment ago, and whose connection nobody has noted yet.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # a transport that was aborted closes its socket in the loop's next round

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = Connection(self._codec(), reader, writer, self._rule_for)
        self._connections[connection] = task
        try:
            await connection.serve(self._upstream_port)
        except asyncio.CancelledError:
            connection.reset_client()
        finally:
            self._failures += connection.failures  # raised when the with block ends
            del self._connections[connection]

    @property
    def port(self) -> int:
        """Where it listens, on 127.0.0.1.

        Raises:
            IllegalStateError: Outside the with block.
        """
        if self._server is None:
            raise IllegalStateError("a proxy works only inside its with block")
        number: int = self._server.sockets[0].getsockname()[1]
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
