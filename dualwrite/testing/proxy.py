"""Proxies that misbehave on demand: answers lost, late, cut or doubled, for Kafka and PostgreSQL.

A rule names requests in units that the protocol knows, so that a test says "the answer to the third EndTxn", not "byte
2,000".
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from sqlalchemy.engine import make_url

from dualwrite.errors import IllegalStateError, Unavailable
from dualwrite.testing.servers.embedded import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from dualwrite.testing.servers.databases import EmbeddedPostgres
    from dualwrite.testing.servers.kafka import EmbeddedKafka

# The units that a proxy forwards: requests and answers, which a codec cuts out of two byte streams.

RequestT = TypeVar("RequestT")


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


GONE = (asyncio.IncompleteReadError, ConnectionError)


class Connection(Generic[RequestT]):
    """Two pumps: requests to the server, answers to the client.

    The connection to the server stays open after the client has gone, as long as a request that a rule has taken waits to be
    sent or answered. So a request can arrive after its sender has given up, like a delayed packet.
    """

    def __init__(
        self,
        codec: Codec[RequestT],
        client: socket.socket,
        rule_for: Callable[[Unit[RequestT], Connection[RequestT]], Rule[RequestT] | None],
    ) -> None:
        # Errors of the proxy itself, once `serve` has ended.
        self.failures: list[Exception] = []
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


# Rules: a test's instructions for some of the requests that go through a proxy.


class Action(enum.Enum):
    """The treatment of a request that a rule takes."""

    WATCH = "forward it and its answer, and record it"
    DROP_REQUEST = "do not forward it; leave the connection open"
    RESET_REQUEST = "do not forward it; reset the client's connection"
    HOLD_REQUEST = "forward it, and all that follows on its connection, when released"
    DUPLICATE = "forward it, and a second copy when released, whose answer the client does not see"
    DROP_ANSWER = "forward it; withhold its answer from the client; leave the connection open"
    RESET_ANSWER = "forward it; when its answer arrives, reset the client's connection instead"
    HOLD_ANSWER = "forward it; forward its answer, and all that follows on its connection, when released"


class Rule(Generic[RequestT]):
    """One rule of a proxy, made by `Choice`. Thread-safe.

    Args:
        action: The treatment of the requests taken.
        matches: Whether a request counts.
        nth: The number of the matching request to take, from 1; all if None.
        loop: The proxy's event loop.
    """

    def __init__(
        self,
        action: Action,
        matches: Callable[[Unit[RequestT]], bool],
        nth: int | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.action = action
        self.discarded = False
        self.gate = asyncio.Event()
        self._matches = matches
        self._nth = nth
        self._loop = loop
        self._withdrawn = False
        self._seen = 0
        self._taken: list[RequestT] = []
        self._resets: list[Callable[[], None]] = []
        self._answers = 0
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"Rule({self.action.name}, seen={self._seen}, taken={len(self._taken)}, answers={self._answers})"

    def counts(self, unit: Unit[RequestT]) -> bool:
        """Count the request if it matches, and return whether to take it. Called by the proxy."""
        if self._withdrawn or unit.request is None or not self._matches(unit):
            return False
        self._seen += 1
        return self._nth is None or self._seen == self._nth

    def take(self, request: RequestT, reset_client: Callable[[], None]) -> None:
        """Record a request that this rule takes. Called by the proxy."""
        with self._changed:
            self._taken.append(request)
            self._resets.append(reset_client)
            self._changed.notify_all()

    def answered(self) -> None:
        """Record an answer of the server. Called by the proxy."""
        with self._changed:
            self._answers += 1
            self._changed.notify_all()

    @property
    def taken(self) -> list[RequestT]:
        """The requests that this rule has taken so far."""
        with self._changed:
            return list(self._taken)

    def wait(self, timeout_s: float = 120.0) -> RequestT:
        """Wait until this rule has taken a request, and return the first one taken.

        Raises:
            Unavailable: It took none in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._taken), timeout_s):
                raise Unavailable(f"no request came in {timeout_s} s for {self!r}")
            return self._taken[0]

    def wait_answered(self, count: int = 1, timeout_s: float = 120.0) -> None:
        """Wait until the server has given ``count`` answers to requests taken, copies included.

        Answers count whether or not they reach the client.

        Raises:
            Unavailable: The server did not answer in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._answers >= count, timeout_s):
                raise Unavailable(f"the server did not give {count} answers in {timeout_s} s: {self!r}")

    def release(self) -> None:
        """Release everything held, and hold nothing more.

        A held request reaches the server even if its client closed the connection long ago.
        """
        self._loop.call_soon_threadsafe(self.gate.set)

    def withdraw(self) -> None:
        """Take no more requests. Those already taken are not affected."""
        self._withdrawn = True

    def discard(self) -> None:
        """Discard everything held, and everything that this rule would hold from now on."""
        self.discarded = True
        self.release()

    def cut(self) -> None:
        """Reset the connections of the clients whose requests were taken. Held requests stay held."""
        with self._changed:
            for reset in self._resets:
                self._loop.call_soon_threadsafe(reset)


class Choice(Generic[RequestT]):
    """Requests chosen by the proxy's ``on``. Each method makes a rule for them, which counts from then on.

    Args:
        add: Adds the rule of an action to the proxy.
    """

    def __init__(self, add: Callable[[Action], Rule[RequestT]]) -> None:
        self._add = add

    def watch(self) -> Rule[RequestT]:
        """Forward it and its answer, and record it."""
        return self._add(Action.WATCH)

    def drop_request(self) -> Rule[RequestT]:
        """Do not forward it, and leave the connection open: the client waits without an answer."""
        return self._add(Action.DROP_REQUEST)

    def reset_request(self) -> Rule[RequestT]:
        """Do not forward it, and reset the client's connection."""
        return self._add(Action.RESET_REQUEST)

    def hold_request(self) -> Rule[RequestT]:
        """Hold it, and everything after it on its connection, until the rule is released; then forward it."""
        return self._add(Action.HOLD_REQUEST)

    def duplicate(self) -> Rule[RequestT]:
        """Forward it, and a second copy when the rule is released; the client does not see that copy's answer."""
        return self._add(Action.DUPLICATE)

    def drop_answer(self) -> Rule[RequestT]:
        """Forward it, withhold its answer, and leave the connection open: the client waits without an answer."""
        return self._add(Action.DROP_ANSWER)

    def reset_answer(self) -> Rule[RequestT]:
        """Forward it, and when its answer arrives, reset the client's connection instead of passing it on."""
        return self._add(Action.RESET_ANSWER)

    def hold_answer(self) -> Rule[RequestT]:
        """Forward it. Hold its answer, and everything after it on its connection, until the rule is released."""
        return self._add(Action.HOLD_ANSWER)


# A TCP proxy that loses, holds, repeats and cuts requests and answers as a test tells it.
#
# It runs in its own thread, and forwards whole requests and whole answers. A rule takes the nth request that matches
# it; everything else passes untouched. Nothing depends on time: a held request stays held until the test releases it.
#
# A client in the same process must wait for answers without holding the GIL, as psycopg and confluent-kafka do;
# otherwise the proxy could not run.


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


# A proxy that understands the frames and headers of Kafka's requests.


class Api(enum.IntEnum):
    """API keys of Kafka's protocol; you may use other numbers too."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    FIND_COORDINATOR = 10
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_PRODUCERS = 61
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66


@dataclass(frozen=True)
class KafkaRequest:
    """The header of one request."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None


class KafkaCodec:
    """Length-prefixed frames; requests and answers share a correlation id."""

    def __init__(self) -> None:
        self._copies = 0

    async def opening(self, client: asyncio.StreamReader, reply: asyncio.StreamWriter) -> bytes:  # noqa: ARG002 - see Codec
        """Nothing: a client begins with a request."""
        return b""

    async def next_request(self, client: asyncio.StreamReader) -> Unit[KafkaRequest]:
        """The next frame from the client."""
        frame = await _frame(client)
        api_key, api_version, correlation_id, length = struct.unpack_from(">hhih", frame, 4)
        client_id = None if length < 0 else frame[14 : 14 + length].decode()
        return Unit(KafkaRequest(api_key, api_version, correlation_id, client_id), frame, correlation_id)

    async def next_answer(self, server: asyncio.StreamReader) -> Answer:
        """The next frame from the broker."""
        frame = await _frame(server)
        (correlation_id,) = struct.unpack_from(">i", frame, 4)
        return Answer(correlation_id, frame, final=True)

    def copy_of(self, unit: Unit[KafkaRequest]) -> Unit[KafkaRequest]:
        """The same frame with a correlation id that no client uses."""
        self._copies += 1
        correlation_id = -1 - self._copies
        return Unit(unit.request, unit.data[:8] + struct.pack(">i", correlation_id) + unit.data[12:], correlation_id)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    length = await reader.readexactly(4)
    return length + await reader.readexactly(int.from_bytes(length, "big", signed=True))


class KafkaProxy(Proxy[KafkaRequest]):
    """A proxy in front of an embedded broker, which supports as many at a time as its ``proxies`` argument says.

    The broker directs clients that come through the proxy to the proxy's address only. Clients with the broker's own
    ``client_config`` bypass it, and so does the broker when it talks to itself.

    Example::

        with KafkaProxy(kafka) as proxy:
            held = proxy.on(Api.END_TXN).hold_request()
            ...  # a client made from proxy.client_config() commits
            held.wait()
            held.release()

    Args:
        kafka: A started broker.
        number: The number of the broker's proxy, from 0.
        broker: The id of the broker. The cluster's other brokers direct clients to their own proxies of this number.
    """

    def __init__(self, kafka: EmbeddedKafka, *, number: int = 0, broker: int = 1) -> None:
        proxied, proxy = kafka.proxy_ports(number, broker=broker)
        super().__init__(proxied, KafkaCodec, port=proxy)
        self._kafka = kafka

    def client_config(self, user: str | None = None) -> dict[str, str]:
        """As `EmbeddedKafka.client_config`, but through the proxy."""
        return {**self._kafka.client_config(user), "bootstrap.servers": f"{LOOPBACK}:{self.port}"}

    def on(
        self,
        api_key: int | None = None,
        *,
        nth: int | None = 1,
        client_id: str | None = None,
        containing: bytes | None = None,
    ) -> Choice[KafkaRequest]:
        """Choose requests. Call a method of the choice to make a rule, which counts requests from then on.

        Args:
            api_key: The kind of request, see `Api`; any if None.
            nth: The number of the matching request to take, from 1; all if None.
            client_id: Only requests of clients with this ``client.id``.
            containing: Only requests that contain these bytes, such as a transactional id or a topic.
        """

        def matches(unit: Unit[KafkaRequest]) -> bool:
            assert unit.request is not None
            return (
                (api_key is None or unit.request.api_key == api_key)
                and (client_id is None or unit.request.client_id == client_id)
                and (containing is None or containing in unit.data)
            )

        return Choice(partial(self._add, matches=matches, nth=nth))


# A proxy that understands enough of PostgreSQL's protocol to recognise a COMMIT.

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
        """Refused: a PostgreSQL session never repeats a request by accident."""
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
