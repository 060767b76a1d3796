"""Requests to the brokers of one cluster: sent, interpreted, and retried until answered.

One :class:`Brokers` serves many threads; no call outlasts its deadline, whatever the network does.
"""

from __future__ import annotations

import os
import random
import ssl
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Generic, TypeVar

import kafka.errors as kafka_errors
from kafka.net.manager import KafkaConnectionManager
from kafka.protocol.metadata import MetadataRequest
from tenacity import Retrying, retry_if_exception_type, wait_exponential

from dualwrite.clock import FIRST_PAUSE_S, LONGEST_PAUSE_S, Deadline, pause
from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.kafka.callers_network import CallersNetwork
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.network import Message, Network, NetworkLoopEnded, NotYet, quieten_logs

Key = TypeVar("Key")
Value = TypeVar("Value")

_WINDOW: Final = 200  # requests of one call in flight: other users of the connection queue behind them
_LANES: Final = 4  # connections to a broker for many requests: a broker serves one connection's requests in turn
_SPREAD_FROM: Final = 32  # requests
_LOOKUP_TIMEOUT_MS: Final = 5000  # any broker can answer a lookup: move on to the next one soon
_UNREACHABLE: Final = (
    "try again when the brokers answer; if they never did, check bootstrap.servers and security.protocol"
)


def until_answered(
    keys: Iterable[Key],
    ask: Callable[[list[Key]], Mapping[Key, Value | NotYet]],
    deadline: Deadline,
    what: str,
) -> dict[Key, Value]:
    """Ask for all keys, and retry those without an answer, with a growing wait in between.

    Args:
        keys: The keys to ask for.
        ask: Asks once. It returns an answer for each key, or raises :class:`NotYet` for all of them.
        deadline: Covers all attempts.
        what: The action, for error messages: "Kafka could not ``what`` in time".

    Raises:
        Unavailable: Some keys had no answer in time.
    """
    asking = _Asking(keys, ask, deadline)
    growing = wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S)
    retrying = Retrying(
        retry=retry_if_exception_type(NotYet),
        wait=lambda state: min(growing(state), deadline.remaining_s()),
        stop=lambda _: deadline.expired,
        sleep=pause,
        reraise=True,
    )
    try:
        retrying(asking.go_on)
    except NotYet as last:
        total = len(asking.pending) + len(asking.answers)
        left = f" ({len(asking.pending)} of {total} left)" if asking.answers else ""
        raise Unavailable(
            f"Kafka could not {what} in time{left}: {last}", next_step=_UNREACHABLE if last.unreachable else None
        ) from last
    return asking.answers


class _Asking(Generic[Key, Value]):
    """The answers so far, and the keys still pending."""

    def __init__(
        self, keys: Iterable[Key], ask: Callable[[list[Key]], Mapping[Key, Value | NotYet]], deadline: Deadline
    ) -> None:
        self.pending = list(dict.fromkeys(keys))
        self.answers: dict[Key, Value] = {}
        self._ask = ask
        self._deadline = deadline
        self._last: NotYet | None = None

    def go_on(self) -> None:
        """Ask for all pending keys."""
        if self._last is not None and self._deadline.expired:  # asking now would replace the last reason by a timeout
            raise self._last
        try:
            self._ask_once()
        except NotYet as reason:
            self._last = reason
            raise

    def _ask_once(self) -> None:
        missing = NotYet("the broker left it out of its answer")
        for key, answer in (self._ask(self.pending) if self.pending else {}).items():
            if isinstance(answer, NotYet):
                missing = answer
            else:
                self.answers[key] = answer
        self.pending = [key for key in self.pending if key not in self.answers]
        if self.pending:
            raise missing


def metadata_request(topics: Collection[str]) -> Message:
    """A request for the brokers, the cluster id, and the metadata of these topics. Creates no topic."""
    named = [MetadataRequest.MetadataRequestTopic(name=topic) for topic in topics]
    return MetadataRequest(topics=named, allow_auto_topic_creation=False)


def verdict(code: int, subject: str, grant: str) -> NotYet | None:
    """Decide what a broker's error code means for the caller: success, retry, or failure.

    Args:
        code: The error code in a response.
        subject: The subject of the request, for error messages.
        grant: The right that the request needs, for error messages.

    Returns:
        None if there is no error, else the reason to retry.

    Raises:
        ConfigurationError: The right is missing.
        Unavailable: Retrying would not help.
    """
    kind = kafka_errors.for_code(code)
    if kind is kafka_errors.NoError:
        return None
    if issubclass(kind, kafka_errors.AuthorizationError):
        raise ConfigurationError(
            f"Kafka refused {subject}: {kind.__name__}", next_step=f"let an administrator grant this user {grant}"
        )
    if kind.retriable or kind is kafka_errors.UnknownError:
        return NotYet(f"{subject}: {kind.__name__}", moved=kind is not kafka_errors.ConcurrentTransactionsError)
    raise Unavailable(f"the broker answered {kind.__name__} about {subject}")


class Brokers:
    """The brokers of one cluster. Connects on the first request; thread-safe.

    Args:
        config: How to connect.
        make_network: Makes the connections from kafka-python's settings.
        like: Other connections to the same cluster. What they know of its brokers need not be asked for again: the first
            request goes straight to its broker, not first to a bootstrap server.

    Attributes:
        listener: Decides which of their addresses the brokers tell.

    Raises:
        ConfigurationError: A certificate or key of the configuration cannot be used.
    """

    def __init__(
        self,
        config: KafkaConfig,
        make_network: Callable[[Mapping[str, object]], Network] = Network,
        *,
        like: Brokers | None = None,
    ) -> None:
        self.listener = config.listener
        self._like = like
        self._known: Message | None = None
        self._make_network = make_network
        self._arguments = config.kafka_python()
        unknown = self._arguments.keys() - KafkaConnectionManager.DEFAULT_CONFIG.keys()
        if unknown:  # kafka-python would ignore them silently
            raise ConfigurationError(f"the installed kafka-python does not know {', '.join(sorted(unknown))}")
        quieten_logs()
        self._lock = threading.Lock()
        self._network: Network | None = None
        self._pid = os.getpid()
        self._closed = False
        self._outdated = True

    def exchange(
        self, requests: Sequence[tuple[int, Message]], deadline: Deadline, *, spread: bool = False
    ) -> list[Message | NotYet]:
        """Send each request to its broker, all at once, and return the responses in the same order.

        Args:
            requests: Broker ids with requests. Build the requests afresh: kafka-python writes into them.
            deadline: Limits the wait. A request already sent is not withdrawn.
            spread: Whether many requests may use several connections. Otherwise a broker gets them in this order.

        Raises:
            NotYet: No broker could be reached, or some did not answer in time.
            ConfigurationError: The brokers refuse our credentials or our way of connecting, or are too old.
            IllegalStateError: Closed, or used in a forked process.
        """
        if requests:
            self._look_around(deadline)
        lanes = _LANES if spread and len(requests) >= _SPREAD_FROM else 1
        answers: list[Message | NotYet] = []
        for start in range(0, len(requests), _WINDOW):
            answers += self._exchange(requests[start : start + _WINDOW], deadline, lanes=lanes)
        return answers

    def post(self, node: int, request: Message, done: Callable[[Message | NotYet], None]) -> None:
        """Send a request without a wait, on connections of one caller at a time (:class:`CallersNetwork`).

        Args:
            node: The broker's id.
            request: The request, built afresh.
            done: Called once, with the answer or the reason why there is none, by this call or by a later :meth:`serve`.

        Raises:
            IllegalStateError: As `exchange`.
        """

        def judged(answer: Message | Exception) -> None:
            try:
                found = self._judged(answer)
            except ConfigurationError as error:  # raised to callers that wait
                found = NotYet(str(error))
            done(found)

        network = self._connected()
        assert isinstance(network, CallersNetwork)
        if self._outdated and self._like is not None:
            known = self._like._known  # noqa: SLF001 - its own class
            if known is not None and known is not self._known:
                network.learn(known)
                self._known, self._outdated = known, False
        network.post(node, request, judged)

    def serve(self) -> None:
        """Send and receive what can be without a wait, for requests that were posted. Raises as `post`."""
        network = self._connected()
        assert isinstance(network, CallersNetwork)
        network.serve(0)

    def metadata(self, topics: Collection[str], deadline: Deadline, *, node: int | None = None) -> Message:
        """Fetch the brokers, the cluster id, and the metadata of these topics. Creates no topic.

        Args:
            topics: Names of topics.
            deadline: Limits the wait.
            node: The broker to ask; any broker if not given.

        Raises:
            NotYet: No broker answered.
            ConfigurationError: As `exchange`.
            IllegalStateError: As `exchange`.
        """
        answered_by, answer = self._first_answer(
            self._candidates() if node is None else [node], lambda: metadata_request(topics), deadline
        )
        if not answer.brokers:
            raise NotYet("the broker knows no brokers yet")
        network = self._connected()
        network.learn(answer)
        self._known, self._outdated = answer, False
        if isinstance(answered_by, str):  # a bootstrap connection: later requests connect to the broker by its id
            network.disconnect(answered_by)
        return answer

    def lookup(self, request: Callable[[], Message], deadline: Deadline) -> Message:
        """Send what ``request`` makes to the brokers in turn, until one answers. Raises as `metadata`."""
        self._look_around(deadline)
        return self._first_answer(self._candidates(), request, deadline)[1]

    def nodes(self, deadline: Deadline) -> list[int]:
        """The ids of all brokers, asked now. Raises as `metadata`."""
        return [broker.node_id for broker in self.metadata((), deadline).brokers]

    def _look_around(self, deadline: Deadline) -> None:
        self._connected()
        if self._outdated:
            self.metadata((), deadline)

    def close(self) -> None:
        """Close all connections. Idempotent; in a forked process it leaves the parent's connections alone."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            network, self._network, self._closed = self._network, None, True
        if network is not None:
            network.close()

    def _candidates(self) -> list[int | str]:
        connections = self._connected().lanes[0]
        known = [broker.node_id for broker in connections.cluster.brokers()]
        random.shuffle(known)
        best = connections.least_loaded_node()
        first = [best] if best in known else []
        bootstrap = [broker.node_id for broker in connections.cluster.bootstrap_brokers()]
        return first + [node for node in known if node != best] + bootstrap

    def _first_answer(
        self, candidates: Sequence[int | str], request: Callable[[], Message], deadline: Deadline
    ) -> tuple[int | str, Message]:
        last: NotYet | None = None
        for node in candidates:
            try:
                [answer] = self._exchange([(node, request())], deadline, lookup=True)
            except NotYet as no_time:  # the previous broker's answer says more than a timeout
                raise last or no_time from no_time
            if not isinstance(answer, NotYet):
                return node, answer
            last = answer
        raise last or NotYet("no broker is known")

    def _connected(self) -> Network:
        if os.getpid() != self._pid:
            raise IllegalStateError(
                "connections to Kafka were made before this process was forked",
                next_step="make the object in the process that uses it",
            )
        with self._lock:
            if self._closed:
                raise IllegalStateError("the connections to Kafka are closed")
            if self._network is None:
                self._network = self._make_network(self._arguments)
                if self._like is not None and (known := self._like._known) is not None:  # noqa: SLF001 - its own class
                    self._network.learn(known)
                    self._outdated = False
            return self._network

    def _exchange(
        self, requests: Sequence[tuple[int | str, Message]], deadline: Deadline, *, lanes: int = 1, lookup: bool = False
    ) -> list[Message | NotYet]:
        network = self._connected()
        try:
            answers = network.exchange(requests, deadline, lanes, _LOOKUP_TIMEOUT_MS if lookup else None)
        except NetworkLoopEnded as ended:
            with self._lock:
                if self._network is network:
                    self._network, self._outdated = None, True
            network.close()
            raise NotYet("kafka-python's network loop has ended") from ended
        return [self._judged(answer) for answer in answers]

    def _judged(self, answer: Message | Exception) -> Message | NotYet:
        if not isinstance(answer, Exception):
            return answer
        _raise_if_misconfigured(answer)
        self._outdated = True
        failure = NotYet(str(answer), unreachable=True)
        failure.__cause__ = answer
        return failure


def _raise_if_misconfigured(error: Exception) -> None:
    refusals = (
        kafka_errors.SaslAuthenticationFailedError,
        kafka_errors.UnsupportedSaslMechanismError,
        kafka_errors.IllegalSaslStateError,
    )
    if isinstance(error, refusals):
        raise ConfigurationError(
            f"Kafka refused the authentication: {error}",
            next_step="check security.protocol and the settings that begin with sasl.",
        ) from error
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        raise ConfigurationError(
            f"a Kafka broker's certificate was not accepted: {error.__context__.verify_message}",
            next_step="check ssl.ca.location, and that bootstrap.servers has the names that the certificates have",
        ) from error
    if isinstance(error, kafka_errors.IncompatibleBrokerVersion):
        raise ConfigurationError(f"the Kafka broker is too old: {error}", next_step="use Kafka 3.0 or newer") from error
