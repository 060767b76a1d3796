"""The brokers of one cluster: connections to them, requests to whichever broker must answer, and what errors mean.

:class:`Connections` belong to one caller at a time, a thread or a task, which waits for their answers itself: a dual write
sends and receives in its own thread. :class:`Brokers` serve any number of callers: each call borrows connections that no
other call uses meanwhile, so no caller waits for another's answer, and no lock is held during a wait.

Brokers are known by their ids. The bootstrap servers are asked while no id is known, or none of those answers. Whatever goes
wrong makes the addresses outdated: the next call asks for them first.

No call outlasts its deadline, whatever the network does.
"""

from __future__ import annotations

import os
import random
import select
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from dualwrite.clock import Deadline, GrowingPause, now_s, pause
from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.kafka.connection import (
    READABLE,
    WRITABLE,
    Connection,
    ConnectionBroken,
    ConnectionSettings,
)
from dualwrite.kafka.error_codes import MISSING_RIGHT, RETRIABLE, Code, code_name
from dualwrite.kafka.messages import Answer, Done, Message, NotOffered, Rare, Request
from dualwrite.kafka.opening_messages import Broker, ClusterMetadata, Metadata
from dualwrite.waiting import BLOCKING, here

if TYPE_CHECKING:
    from dualwrite.kafka.config import KafkaConfig

Key = TypeVar("Key")
Value = TypeVar("Value")
Node: TypeAlias = int | str
"""A broker's id, or the name of a bootstrap server."""

_WINDOW: Final = 200  # requests of one call in flight: other users of the connection queue behind them
_LANES: Final = 4  # connections to a broker for many requests: a broker serves one connection's requests in turn
_SPREAD_FROM: Final = 32  # requests
_LOOKUP_S: Final = 5.0  # any broker can answer a lookup: move on to the next one soon
_MOST_IDLE: Final = 4
_JITTER: Final = (0.8, 1.2)
_KNOCK_WITHIN_S: Final = 0.2
_JUST_S: Final = 0.1
"""A broker that has answered so lately is taken to be there still."""
_LOOK_AFTER_S: Final = 1.0
"""A connection that has rested for longer is looked at before it is used: the broker may have closed it."""
_UNREACHABLE: Final = (
    "try again when the brokers answer; if they never did, check bootstrap.servers and security.protocol"
)


class NotYet(Exception):
    """A request has no answer yet, or one that may soon change: ask again.

    ``moved``: another broker may now be the one to ask. ``unreachable``: no broker answered at all.
    """

    def __init__(self, why: str, *, moved: bool = True, unreachable: bool = False) -> None:
        super().__init__(why)
        self.moved = moved
        self.unreachable = unreachable


def until_answered(
    keys: Iterable[Key],
    ask: Callable[[list[Key]], Mapping[Key, Value | NotYet]],
    deadline: Deadline,
    what: str,
) -> dict[Key, Value]:
    """Ask for all keys, and retry those without an answer, with a growing wait in between.

    ``ask`` asks once: it returns an answer for each key, or raises :class:`NotYet` for all of them. The error at the
    deadline says "Kafka could not ``what`` in time".
    """
    pending, answers = list(dict.fromkeys(keys)), dict[Key, Value]()
    between = GrowingPause()
    while pending:
        try:
            last = NotYet("the broker left it out of its answer")
            for key, answer in ask(pending).items():
                if isinstance(answer, NotYet):
                    last = answer
                else:
                    answers[key] = answer
            pending = [key for key in pending if key not in answers]
        except NotYet as reason:
            last = reason
        if not pending:
            break
        if not deadline.expired:
            between.wait(deadline)
        if deadline.expired:  # asking now would replace the last reason by a timeout
            left = f" ({len(pending)} of {len(pending) + len(answers)} left)" if answers else ""
            raise Unavailable(
                f"Kafka could not {what} in time{left}: {last}", next_step=_UNREACHABLE if last.unreachable else None
            ) from last
    return answers


def until_known(ask: Callable[[], Value | NotYet], deadline: Deadline, what: str) -> Value:
    """As :func:`until_answered`, for one question."""

    def alone(_: list[None]) -> dict[None, Value | NotYet]:
        return {None: ask()}

    return until_answered([None], alone, deadline, what)[None]


def answers_of_all(brokers: Brokers, make: Callable[[int], Request | Message], deadline: Deadline) -> Iterator[Answer]:
    """The answers of all brokers, each to the request that ``make`` has for its id. Raises `NotYet` if one has none.

    Those that came are first: what a broker refuses is known, although another one is away.
    """
    answers = brokers.exchange([(node, make(node)) for node in brokers.nodes(deadline)], deadline)
    yield from (answer for answer in answers if not isinstance(answer, NotYet))
    for answer in answers:
        if isinstance(answer, NotYet):
            raise answer


def verdict(code: int, subject: str, grant: str) -> NotYet | None:
    """Decide what a broker's error code means: None for no error, else the reason to retry.

    `ConfigurationError` if the right is missing that ``grant`` names; `Unavailable` if retrying would not help.
    """
    if not code:
        return None
    if code in MISSING_RIGHT:
        raise ConfigurationError(
            f"Kafka refused {subject}: {code_name(code)}", next_step=f"let an administrator grant this user {grant}"
        )
    if code in RETRIABLE or code == Code.UNKNOWN_SERVER_ERROR:
        return NotYet(f"{subject}: {code_name(code)}", moved=code != Code.CONCURRENT_TRANSACTIONS)
    raise Unavailable(f"the broker answered {code_name(code)} about {subject}")


class Addresses:
    """Where the brokers of a cluster are. What others (``like``) know at the first use need not be asked for again."""

    def __init__(self, bootstrap: Sequence[tuple[str, int]], like: Addresses | None = None) -> None:
        self._bootstrap = {f"bootstrap-{number}": server for number, server in enumerate(bootstrap)}
        self._like = like
        self.brokers: Mapping[int, tuple[str, int]] = {}  # replaced as a whole: any thread may read it
        self.outdated = True

    def must_ask(self) -> bool:
        """Whether to ask for the brokers' addresses before anything else."""
        like, self._like = self._like, None
        if like is not None and like.brokers:
            self.brokers, self.outdated = like.brokers, False
        return self.outdated

    @property
    def bootstrap(self) -> list[str]:
        """The names of the bootstrap servers."""
        return list(self._bootstrap)

    def of(self, node: Node) -> tuple[str, int] | None:
        """Host and port; None if no broker has that id."""
        return self._bootstrap.get(node) if isinstance(node, str) else self.brokers.get(node)

    def learn(self, brokers: Iterable[Broker]) -> None:
        """Take the brokers of a metadata answer."""
        self.brokers = {broker.node_id: (broker.host, broker.port) for broker in brokers}
        self.outdated = False


class Connections:
    """The connections of one caller to the brokers of one cluster. Used by one caller at a time.

    Between calls nothing happens but what the kernel does with bytes that were written. What others (``like``) know of the
    brokers need not be asked for again: the first request goes straight to its broker, not first to a bootstrap server.
    """

    def __init__(
        self,
        config: KafkaConfig,
        *,
        like: Connections | Brokers | None = None,
        settings: ConnectionSettings | None = None,
        addresses: Addresses | None = None,
    ) -> None:
        self._settings = config.connecting() if settings is None else settings
        self.addresses = addresses or _addresses_like(self._settings, like)
        self._connections: dict[Node, Connection] = {}
        self._more_lanes: dict[tuple[Node, int], Connection] = {}
        self._asked: list[Connection] = []
        self._failures: dict[Node, tuple[int, float, Exception]] = {}
        self._pid = os.getpid()
        self._closed = False

    # Requests whose answers are waited for.

    def exchange(
        self, requests: Sequence[tuple[int, Request | Message]], deadline: Deadline, *, spread: bool = False
    ) -> list[Answer | NotYet]:
        """Send each request to its broker, all at once, and return the answers in the same order.

        A request already sent is not withdrawn at the deadline. With ``spread`` many requests may use several connections;
        otherwise a broker gets them in this order.

        Raises `NotYet` if no broker could be reached, or some did not answer in time; `ConfigurationError` if the brokers
        refuse our credentials or our way of connecting, or are too old; `IllegalStateError` if closed, or used in a forked
        process.
        """
        self._check()
        if requests and self.addresses.outdated and self.addresses.must_ask():
            self.metadata((), deadline)
        lanes = _LANES if spread and len(requests) >= _SPREAD_FROM else 1
        answers: list[Answer | NotYet] = []
        for start in range(0, len(requests), _WINDOW):
            answers += self._exchange(requests[start : start + _WINDOW], deadline, lanes=lanes)
        return answers

    def ask(self, node: int, request: Request | Message, deadline: Deadline) -> Answer | NotYet:
        """Send one request, and return its answer. Raises as :meth:`exchange`."""
        if self._closed or os.getpid() != self._pid:
            self._check()
        if self.addresses.outdated and self.addresses.must_ask():
            self.metadata((), deadline)
        box: list[Answer | Exception] = []
        ours = request if hasattr(request, "frame") else Rare(request)
        connection = self.post(node, ours, box.append)
        try:
            while not box:
                seconds = deadline.remaining_s()
                if not seconds:
                    raise self._no_answer(node)
                self.serve(seconds)
        finally:
            if not box and connection is not None:  # out of time, or interrupted
                connection.withdraw(box.append)
        answer = box[0]
        return self._judged(answer) if isinstance(answer, Exception) else answer

    def metadata(self, topics: Collection[str], deadline: Deadline, *, node: int | None = None) -> ClusterMetadata:
        """Fetch the brokers, the cluster id, and the metadata of these topics. Creates no topic.

        Raises as :meth:`exchange`.
        """
        self._check()
        self.addresses.must_ask()
        nodes: list[Node] = self._candidates() if node is None else [node]
        answer: ClusterMetadata
        answered_by, answer = self._first_answer(nodes, lambda: Metadata(topics), deadline)
        if not answer.brokers:
            raise NotYet("the broker knows no brokers yet")
        self.addresses.learn(answer.brokers)
        if isinstance(answered_by, str):  # a bootstrap connection: later requests connect to the broker by its id
            self._disconnect(answered_by)
        return answer

    def lookup(self, request: Callable[[], Request | Message], deadline: Deadline) -> Answer:
        """Send what ``request`` makes to the brokers in turn, until one answers. Raises as :meth:`metadata`."""
        self._check()
        if self.addresses.must_ask():
            self.metadata((), deadline)
        return self._first_answer(self._candidates(), request, deadline)[1]

    def nodes(self, deadline: Deadline) -> list[int]:
        """The ids of all brokers, asked now. Raises as :meth:`metadata`."""
        return [broker.node_id for broker in self.metadata((), deadline).brokers]

    def has_just_answered(self, node: int) -> bool:
        """Whether the broker has answered all that it was asked on a connection that is open, a moment ago."""
        connection = self._connections.get(node)
        return connection is not None and connection.is_quiet and now_s() - connection.used_at < _JUST_S

    # Requests whose answers are taken later.

    def post(
        self,
        node: Node,
        request: Request,
        done: Done,
        patience_s: float | None = None,
        *,
        lane: int = 0,
        more: bool = False,
    ) -> Connection | None:
        """Send a request without a wait for its answer.

        ``done`` is called once, with the answer or the error, by this call or by a later one of this object, unless the request
        is withdrawn from the connection that is returned. ``patience_s`` is how long the broker may take. With ``more`` it
        leaves together with the next request to this broker, which must follow at once.
        """
        if self._closed or os.getpid() != self._pid:
            self._check()
        connection = self._connections.get(node) if not lane else self._more_lanes.get((node, lane))
        now = now_s()
        if (
            connection is None
            or connection.error is not None
            or (now - connection.used_at > _LOOK_AFTER_S and not connection.rests_in_peace(now))
        ):
            made = self._connect(node, lane, connection, now)
            if isinstance(made, Exception):
                done(made)
                return None
            connection = made
        connection.used_at = now
        due_at = now + (self._settings.request_s if patience_s is None else patience_s)
        connection.post(request, done, due_at, more=more)
        if connection not in self._asked:
            self._asked.append(connection)
        return connection

    def serve(self, seconds: float = 0.0) -> None:
        """Send and receive what can be at once; wait up to that long, or a little, for something to do."""
        asked = self._asked
        if len(asked) == 1 and (one := asked[0]).is_open and not one.unsent:
            # One broker has requests: its socket is all that there is to wait for.
            if seconds:
                due_at = one.in_flight[0][4] if len(one.in_flight) == 1 else one.due_at()
                left_s = due_at - now_s()
                wait_s = min(seconds, left_s) if left_s > 0 else 0.0
                if (form := here()) is BLOCKING:
                    one.receive(wait_s)
                else:
                    form.poll(one.receive, one.fileno, wait_s)
                if one.in_flight and left_s <= seconds:
                    one.expire(now_s())
            else:
                one.receive(0)
            if not one.in_flight and (one.error is not None or not (one.waiting or one.unsent)):
                asked.clear()
            return
        if not asked:
            if seconds:
                pause(seconds)
            return
        self._serve_all(seconds)

    def close(self) -> None:
        """Close all connections. Idempotent; in a forked process it leaves the parent's connections alone."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        ended = ConnectionBroken("the connections to Kafka are closed")
        for connection in (*self._connections.values(), *self._more_lanes.values()):
            connection.fail(ended)
        self._connections.clear()
        self._more_lanes.clear()
        self._asked.clear()

    def _check(self) -> None:
        if self._closed:
            raise IllegalStateError("the connections to Kafka are closed")
        if os.getpid() != self._pid:
            raise _forked()

    def _serve_all(self, seconds: float) -> None:
        """As :meth:`serve`, for any connections."""
        now = now_s()
        due_at = min(one.due_at() for one in self._asked)
        waits = _Wait(self._asked)
        try:
            here().poll(waits.poll, waits.fileno, max(0.0, min(seconds, due_at - now)))
        finally:
            waits.close()
        for one in waits.ready:
            one.advance()
        now = now_s()
        for one in list(self._asked):
            if one.error is None and now >= one.due_at():
                one.expire(now)
        self._asked = [one for one in self._asked if one.is_busy]

    def _candidates(self) -> list[Node]:
        """The brokers in the order in which to ask them: first one that is connected and has nothing else to answer."""
        known = list(self.addresses.brokers)
        random.shuffle(known)
        now = now_s()

        def unfit(node: int) -> int:
            connection = self._connections.get(node)
            if connection is not None and connection.error is None:
                return len(connection.in_flight) if connection.is_open else 2
            return 1_000 if now < self._failures.get(node, (0, 0.0, None))[1] else 1

        return [*sorted(known, key=unfit), *self.addresses.bootstrap]

    def _first_answer(
        self, candidates: Sequence[Node], request: Callable[[], Request | Message], deadline: Deadline
    ) -> tuple[Node, Answer]:
        last: NotYet | None = None
        for node in candidates:
            try:
                [answer] = self._exchange([(node, request())], deadline, patience_s=_LOOKUP_S)
            except NotYet as no_time:  # the previous broker's answer says more than a timeout
                raise last or no_time from no_time
            if not isinstance(answer, NotYet):
                return node, answer
            last = answer
        raise last or NotYet("no broker is known")

    def _exchange(
        self,
        requests: Sequence[tuple[Node, Request | Message]],
        deadline: Deadline,
        *,
        lanes: int = 1,
        patience_s: float | None = None,
    ) -> list[Answer | NotYet]:
        patience_s = self._settings.request_s if patience_s is None else min(patience_s, self._settings.request_s)
        boxes: list[list[Answer | Exception]] = []
        used: list[Connection | None] = []
        all_answered = False
        try:
            for number, (node, request) in enumerate(requests):
                box: list[Answer | Exception] = []
                boxes.append(box)
                ours = request if hasattr(request, "frame") else Rare(request)
                used.append(self.post(node, ours, box.append, patience_s, lane=number % lanes))
            for (node, _), box in zip(requests, boxes, strict=True):
                while not box:
                    seconds = deadline.remaining_s()
                    if not seconds:
                        raise self._no_answer(node)
                    self.serve(seconds)
            all_answered = True
        finally:
            if not all_answered:  # out of time, or interrupted
                for box, connection in zip(boxes, used, strict=False):
                    if not box and connection is not None:
                        connection.withdraw(box.append)
        return [self._judged(box[0]) for box in boxes]

    def _no_answer(self, node: Node) -> NotYet:
        host, port = self.addresses.of(node) or ("broker", node)
        return NotYet(f"no answer from {host}:{port}", unreachable=True)

    def _judged(self, answer: Answer | Exception) -> Answer | NotYet:
        if not isinstance(answer, Exception):
            return answer
        if isinstance(answer, NotOffered):
            raise ConfigurationError(
                f"the Kafka broker is too old: {answer}", next_step="use Kafka 3.0 or newer"
            ) from answer
        if isinstance(answer, ConfigurationError):
            raise answer
        self.addresses.outdated = True
        failure = NotYet(str(answer), unreachable=True)
        failure.__cause__ = answer
        return failure

    def _connect(self, node: Node, lane: int, former: Connection | None, now: float) -> Connection | Exception:
        failures, not_before, why = self._failures.get(node, (0, 0.0, ConnectionBroken("not connected")))
        if former is not None:
            self._drop(former, "the connection has rested for too long")
            if former.was_open:
                failures = 0
                self._failures.pop(node, None)
            elif former.error is not None and former.error is not why:
                failures, why = failures + 1, former.error
                self.addresses.outdated = True  # it may have moved
                longest_s, first_s = self._settings.longest_pause_s, self._settings.pause_s
                pause_s = min(longest_s, first_s * 2.0 ** min(failures - 1, 30)) * random.uniform(*_JITTER)  # noqa: S311 - as for every backoff
                not_before = former.broken_at + pause_s
                self._failures[node] = failures, not_before, why
        if failures and now < not_before:
            return why
        address = self.addresses.of(node)
        if address is None:
            return ConnectionBroken(f"no broker has the id {node}")
        opens_within_s = min(self._settings.longest_opening_s, self._settings.opening_s * 2.0 ** min(failures, 30))
        made = Connection(self._settings, *address, opens_within_s=opens_within_s)
        if lane:
            self._more_lanes[node, lane] = made
        else:
            self._connections[node] = made
        made.advance()
        return made

    def _drop(self, connection: Connection, why: str) -> None:
        if connection.error is None:
            connection.fail(ConnectionBroken(f"{connection.address}: {why}"))
        if connection in self._asked:
            self._asked.remove(connection)

    def _disconnect(self, node: Node) -> None:
        connection = self._connections.get(node)
        if connection is not None:  # closed before it is forgotten: an interruption may come between both
            self._drop(connection, "it has told the brokers' addresses")
            del self._connections[node]


class _Wait:
    """The wait for several connections, or for one that has bytes to send or is not open yet."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._by_file = {one.fileno(): one for one in connections if one.error is None and one.fileno() >= 0}
        self._selector: selectors.BaseSelector | None = None
        self.ready: list[Connection] = [one for one in connections if one.fileno() < 0 and one.error is None]

    def poll(self, seconds: float) -> None:
        """Find out which are ready; wait up to that long for the first."""
        if not hasattr(select, "poll"):  # Windows
            self._selected(seconds)
            return
        look = select.poll()  # unlike select(), it takes descriptors above 1023
        for file, one in self._by_file.items():
            look.register(file, one.wants)
        self.ready += [self._by_file[file] for file, _ in look.poll(seconds * 1000)]

    def _selected(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            self._register(selector)
            self.ready += [key.data for key, _ in selector.select(seconds)]

    def fileno(self) -> int:
        """A file that is readable when one of them is ready: for the wait of a task."""
        self._selector = selectors.DefaultSelector()
        self._register(self._selector)
        return self._selector.fileno() if hasattr(self._selector, "fileno") else next(iter(self._by_file))

    def _register(self, selector: selectors.BaseSelector) -> None:
        for file, one in self._by_file.items():
            events = (selectors.EVENT_READ if one.wants & READABLE else 0) | (
                selectors.EVENT_WRITE if one.wants & WRITABLE else 0
            )
            selector.register(file, events, one)

    def close(self) -> None:
        """Close what :meth:`fileno` has made."""
        if self._selector is not None:
            self._selector.close()


class Brokers:
    """The brokers of one cluster, for any number of threads and tasks. Connects on the first request.

    ``listener`` decides which of their addresses the brokers tell.
    """

    def __init__(self, config: KafkaConfig, *, like: Connections | Brokers | None = None) -> None:
        self.listener = config.listener
        self._config = config
        self._settings = replace(config.connecting(), largest_answer=_ANY_SIZE)
        self.addresses = _addresses_like(self._settings, like)
        self._lock = threading.Lock()
        self._idle: list[Connections] = []
        self._pid = os.getpid()
        self._closed = False
        _made.add(self)

    @property
    def is_inherited(self) -> bool:
        """Whether they were made, and not closed, before this process was forked."""
        return not self._closed and self._pid != os.getpid()

    def exchange(
        self, requests: Sequence[tuple[int, Request | Message]], deadline: Deadline, *, spread: bool = False
    ) -> list[Answer | NotYet]:
        with self._borrowed() as ours:
            return ours.exchange(requests, deadline, spread=spread)

    def metadata(self, topics: Collection[str], deadline: Deadline, *, node: int | None = None) -> ClusterMetadata:
        with self._borrowed() as ours:
            return ours.metadata(topics, deadline, node=node)

    def lookup(self, request: Callable[[], Request | Message], deadline: Deadline) -> Answer:
        with self._borrowed() as ours:
            return ours.lookup(request, deadline)

    def nodes(self, deadline: Deadline) -> list[int]:
        return [broker.node_id for broker in self.metadata((), deadline).brokers]

    def refuse(self) -> bool:
        """Whether every broker that is known, and every bootstrap server, refuses a connection: nothing listens there.

        Says nothing to one that accepts. Returns within a fraction of a second, unless a name must be looked up.
        """
        places = {*self.addresses.brokers.values(), *self._settings.servers}
        return all(_refuses(host, port) for host, port in places)

    def close(self) -> None:
        """Close all connections. Idempotent; in a forked process it leaves the parent's connections alone."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for ours in idle:
            ours.close()

    @contextmanager
    def _borrowed(self) -> Generator[Connections, None, None]:
        if os.getpid() != self._pid:
            raise _forked()
        with self._lock:
            if self._closed:
                raise IllegalStateError("the connections to Kafka are closed")
            # Those that were used last: the others may be closed by their brokers.
            idle = self._idle.pop() if self._idle else None
        ours = idle or Connections(self._config, settings=self._settings, addresses=self.addresses)
        try:
            yield ours
        finally:
            with self._lock:
                kept = not self._closed and len(self._idle) < _MOST_IDLE
                if kept:
                    self._idle.append(ours)
            if not kept:
                ours.close()


def _refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _KNOCK_WITHIN_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # such as no answer in time: that is for those to judge who wait for one
        return False
    return False


_ANY_SIZE: Final = 2**31 - 1
"""The largest batch of a log must fit into an answer: the brokers limit it."""


_made: Final[weakref.WeakSet[Brokers]] = weakref.WeakSet()
_loaded_in: Final = os.getpid()


def was_forked() -> bool:
    """Whether this process was forked after it had loaded this module."""
    return os.getpid() != _loaded_in


def inherited() -> int:
    """How many connections of writers and callers to a cluster came through a fork. Each is refused in this process."""
    return sum(brokers.is_inherited for brokers in list(_made))


def _forked() -> IllegalStateError:
    return IllegalStateError(
        "connections to Kafka were made before this process was forked",
        next_step="make the object in the process that uses it",
    )


def _addresses_like(settings: ConnectionSettings, like: Connections | Brokers | None) -> Addresses:
    bootstrap = _canonical(settings) if settings.canonical_names else settings.servers
    return Addresses(bootstrap, None if like is None else like.addresses)


def _canonical(settings: ConnectionSettings) -> list[tuple[str, int]]:
    """The canonical names of the bootstrap servers' addresses, for Kerberos; one that is not found stays as it is."""
    found: list[tuple[str, int]] = []
    for host, port in settings.servers:
        try:
            addresses = socket.getaddrinfo(host, port, settings.family, socket.SOCK_STREAM, 0, socket.AI_CANONNAME)
        except socket.gaierror:
            found.append((host, port))
            continue
        found += dict.fromkeys((name or host, port) for _, _, _, name, _ in addresses)
    return found
