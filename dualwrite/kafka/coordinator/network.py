"""kafka-python's connections and their thread.

This library uses kafka-python below its admin client, which cannot send all the requests needed here, and which logs
its configuration, passwords included. kafka-python's loggers are silenced here unless the application sets their level:
this library reports what a lost connection means. Loggers that write whole requests at DEBUG, SASL passwords among
them, are held at INFO.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias
from weakref import WeakSet

from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector

from dualwrite.runtime.deadline import Deadline

Message: TypeAlias = Any  # kafka-python's requests and responses have no types


class NotYet(Exception):
    """A request has no answer yet, or one that may soon change: ask again.

    Args:
        why: The reason.
        moved: Whether another broker may now be the one to ask.
        unreachable: Whether no broker answered at all.
    """

    def __init__(self, why: str, *, moved: bool = True, unreachable: bool = False) -> None:
        super().__init__(why)
        self.moved = moved
        self.unreachable = unreachable


class NetworkLoopEnded(Exception):
    """kafka-python's thread has ended, by `close` or by an internal error."""


class _NoRequestsAtDebug(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.INFO


_NO_REQUESTS_AT_DEBUG: Final = _NoRequestsAtDebug()


_our_threads: Final[WeakSet[threading.Thread]] = WeakSet()


class _QuietOnOurThreads(logging.Filter):
    """Silences kafka-python on our threads: not the application's own clients, nor loggers whose level it has set."""

    def filter(self, record: logging.LogRecord) -> bool:
        if threading.current_thread() not in _our_threads or record.levelno >= logging.CRITICAL:
            return True
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None and logger.name.partition(".")[0] == "kafka":
            if logger.level != logging.NOTSET:
                return True
            logger = logger.parent
        return False


_QUIET_ON_OUR_THREADS: Final = _QuietOnOurThreads()


class _Selector(NetworkSelector):  # type: ignore[misc]  # it has no types
    def run_forever(self) -> None:
        """Run the loop on its own thread, marked as ours."""
        _our_threads.add(threading.current_thread())
        super().run_forever()


@contextmanager
def _quietly() -> Generator[None, None, None]:
    """Treat the caller's thread as ours while the block runs."""
    thread = threading.current_thread()
    if thread in _our_threads:
        yield
        return
    _our_threads.add(thread)
    try:
        yield
    finally:
        _our_threads.discard(thread)


def quieten_logs() -> None:
    """Silence kafka-python's loggers on our threads, and its DEBUG lines with whole requests in the whole process."""
    for name in ("kafka.protocol.parser", "kafka.net.connection"):
        logging.getLogger(name).addFilter(_NO_REQUESTS_AT_DEBUG)
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "kafka":
            logging.getLogger(name).addFilter(_QUIET_ON_OUR_THREADS)


class Network:
    """kafka-python's network loop on its thread, and its connections.

    Args:
        arguments: kafka-python's settings.
    """

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self._arguments = arguments
        self._metadata: Message | None = None
        with _quietly():
            self._loop = _Selector(client_id=arguments["client_id"])
            self.lanes = [self._lane()]
            self._start()

    def _start(self) -> None:
        self._loop.start()

    def _lane(self) -> KafkaConnectionManager:
        # No limit on requests in flight: kafka-python fails those above it instead of queueing them.
        lane = KafkaConnectionManager(self._loop, max_in_flight_requests_per_connection=2**31, **self._arguments)
        if self._metadata is not None:
            lane.cluster.update_metadata(self._metadata)
        return lane

    def learn(self, metadata: Message) -> None:
        """Use the brokers' addresses from this metadata."""
        self._metadata = metadata
        with _quietly():
            for lane in self.lanes:
                lane.cluster.update_metadata(metadata)

    def disconnect(self, node: str) -> None:
        """Ask the loop to close a connection."""
        self._loop.call_soon_threadsafe(lambda: self.lanes[0].close(node_id=node))

    def exchange(
        self, requests: Sequence[tuple[int | str, Message]], deadline: Deadline, lanes: int, timeout_ms: int | None
    ) -> list[Message | Exception]:
        """Send all requests, and wait for the answer or error of each.

        Raises:
            NotYet: The deadline passed first.
            NetworkLoopEnded: kafka-python's loop is gone.
        """
        patience = timeout_ms and min(timeout_ms, self.lanes[0].config["request_timeout_ms"])

        async def send_all() -> list[Message | Exception]:
            while len(self.lanes) < lanes:
                self.lanes.append(self._lane())
            futures = [
                _sent(self.lanes[index % lanes], node, request, patience)
                for index, (node, request) in enumerate(requests)
            ]
            answers = []
            for future in futures:
                try:
                    answers.append(future if isinstance(future, Exception) else await future)
                except Exception as error:  # noqa: BLE001 - returned as this request's result
                    answers.append(error)
            return answers

        try:
            future = self._loop.call_soon_with_future(send_all)
        except Exception as error:
            raise NetworkLoopEnded from error
        if not self._wait(future, deadline):
            raise NotYet("no answer", unreachable=True)
        if future.exception is not None:
            raise NetworkLoopEnded from future.exception
        answers: list[Message | Exception] = future.value
        return answers

    def _wait(self, future: Message, deadline: Deadline) -> bool:
        done = threading.Event()
        future.add_both(lambda _: done.set())
        return done.wait(deadline.remaining_s())

    def close(self) -> None:
        """Close the connections and end the thread."""
        closed = threading.Event()
        with _quietly():
            self._loop.call_soon_with_future(self._close_lanes).add_both(lambda _: closed.set())
            closed.wait(1.0)  # a loop that hangs in a DNS look-up does not answer
            self._loop.close()

    def _close_lanes(self) -> None:
        for lane in self.lanes:
            lane.close()


class CallersNetwork(Network):
    """The same without a thread: the loop runs while its one user waits. No answer has to pass from one thread to another.

    Between calls nothing happens but what the kernel does with bytes that were written.

    Args:
        arguments: kafka-python's settings.
    """

    def _start(self) -> None:
        self._loop.config["slow_task_threshold_secs"] = 0  # its warnings are about a thread that many wait for

    def _wait(self, future: Message, deadline: Deadline) -> bool:
        while not future.is_done and not deadline.expired:
            self.serve(deadline.remaining_s())
        return bool(future.is_done)

    def post(self, node: int, request: Message, done: Callable[[Message | Exception], None]) -> None:
        """Send a request without a wait for its answer.

        Args:
            node: The broker's id.
            request: The request, built afresh.
            done: Called once, with the answer or the error, by this call or by a later one of this object.
        """
        with _quietly():
            answer = _sent(self.lanes[0], node, request, None)
            if isinstance(answer, Exception):
                done(answer)
                return
            answer.add_both(lambda _: done(answer.value if answer.exception is None else answer.exception))

    def serve(self, seconds: float) -> None:
        """Send and receive what can be at once; wait up to that long for something to do."""
        with _quietly():
            self._loop.poll(timeout_ms=seconds * 1000)

    def close(self) -> None:
        """Close the connections."""
        with _quietly():
            self._close_lanes()
            self._loop.close()


def _sent(connections: KafkaConnectionManager, node: int | str, request: Message, timeout_ms: int | None) -> Message:
    try:
        # Keep its own metadata refresh off: it would bootstrap forever, and nothing uses the result.
        connection = connections.get_connection(node, refresh_metadata_on_err=False)
        return connection.send_request(request, request_timeout_ms=timeout_ms)
    except Exception as error:  # noqa: BLE001 - returned as this request's result
        return error
