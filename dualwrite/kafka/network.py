"""kafka-python's connections and their thread.

This library uses kafka-python below its admin client, which cannot send all the requests needed here, and which logs
its configuration, passwords included. kafka-python's loggers are silenced here unless the application sets their level:
this library reports what a lost connection means. Loggers that write whole requests at DEBUG, SASL passwords among
them, are held at INFO.
"""

from __future__ import annotations

import logging
import selectors
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakSet

from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector

from dualwrite.clock import Deadline
from dualwrite.waiting import Event

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

logger = logging.getLogger(__name__)

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


class _Swallowed(threading.local):
    error: BaseException | None = None


swallowed: Final = _Swallowed()
"""The interruption of this thread that kafka-python has swallowed: it logs a ``KeyboardInterrupt`` as an error."""


class _QuietOnOurThreads(logging.Filter):
    """Silences kafka-python on our threads: not the application's own clients, nor loggers whose level it has set."""

    def filter(self, record: logging.LogRecord) -> bool:
        if threading.current_thread() not in _our_threads or record.levelno >= logging.CRITICAL:
            return True
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, Exception):
            swallowed.error = error
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None and logger.name.partition(".")[0] == "kafka":
            if logger.level != logging.NOTSET:
                return True
            logger = logger.parent
        return False


_QUIET_ON_OUR_THREADS: Final = _QuietOnOurThreads()


class Loop(NetworkSelector):  # type: ignore[misc]  # it has no types
    """kafka-python's loop."""

    def run_forever(self) -> None:
        """Run the loop on its own thread, marked as ours."""
        _our_threads.add(threading.current_thread())
        super().run_forever()

    def close(self) -> None:
        """End the thread, drop the tasks, and close every socket that one of them waits for.

        kafka-python drops a socket with its task, and leaves it open: one with bytes left to write, or in a TLS handshake.
        """
        if self._closed:
            return
        self.stop()
        try:
            self.drain()
        except Exception:
            logger.debug("the network loop cannot continue", exc_info=True)
            self._ready.clear()
        waiting = [key.fileobj for key in self._selector.get_map().values()]
        super().close()
        for one in waiting:
            one.close()


class _Files(selectors.DefaultSelector):
    """Refuses unknown files at once: kafka-python asks for every file before it registers it.

    The standard selector describes the socket in its refusal, with both its addresses, which takes two system calls.
    """

    def get_key(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        """The key of a registered file."""
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if (known := self.get_map()) is not None and number not in list(known):
            raise KeyError(number)
        return super().get_key(fileobj)


class Quietly:
    """Treats the caller's thread as ours while the block runs."""

    def __enter__(self) -> None:
        thread = threading.current_thread()
        self._marked = None if thread in _our_threads else thread
        if self._marked is not None:
            _our_threads.add(thread)

    def __exit__(self, kind: type[BaseException] | None, *of_error: object) -> None:
        if self._marked is not None:
            _our_threads.discard(self._marked)


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

    _make_loop = Loop

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self._arguments = arguments
        self._metadata: Message | None = None
        with Quietly():
            self._loop = self._make_loop(client_id=arguments["client_id"], selector=_Files)
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
        with Quietly():
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

        async def send_all() -> list[Message | Exception]:
            answers = []
            for future in self._sent_by_lanes(requests, lanes, timeout_ms):
                try:
                    answers.append(future if isinstance(future, Exception) else await future)
                except Exception as error:  # noqa: BLE001 - returned as this request's result
                    answers.append(error)
            return answers

        try:
            future = self._loop.call_soon_with_future(send_all)
        except Exception as error:
            raise NetworkLoopEnded from error
        done = Event()
        future.add_both(lambda _: done.set())
        if not done.wait(deadline.remaining_s()):
            raise NotYet("no answer", unreachable=True)
        if future.exception is not None:
            if not isinstance(future.exception, Exception):
                raise future.exception  # an interruption of the caller, whose thread this is
            raise NetworkLoopEnded from future.exception
        answers: list[Message | Exception] = future.value
        return answers

    def _sent_by_lanes(
        self, requests: Sequence[tuple[int | str, Message]], lanes: int, timeout_ms: int | None
    ) -> list[Message]:
        """The future of each request's answer, or the error that kept it from being sent."""
        patience = timeout_ms and min(timeout_ms, self.lanes[0].config["request_timeout_ms"])
        while len(self.lanes) < lanes:
            self.lanes.append(self._lane())
        return [
            self._sent(self.lanes[index % lanes], node, request, patience)
            for index, (node, request) in enumerate(requests)
        ]

    def _sent(
        self, connections: KafkaConnectionManager, node: int | str, request: Message, timeout_ms: int | None
    ) -> Message:
        try:
            # Keep its own metadata refresh off: it would bootstrap forever, and nothing uses the result.
            connection = connections.get_connection(node, refresh_metadata_on_err=False)
            self._note_asked(connection)
            # While a broker throttles us, kafka-python would fail requests. The broker lets them wait by itself (KIP-219).
            connection.unpause("throttle")
            return connection.send_request(request, request_timeout_ms=timeout_ms)
        except Exception as error:  # noqa: BLE001 - returned as this request's result
            return error

    def _note_asked(self, connection: Message) -> None:
        """A request is about to be given to this connection."""

    def close(self) -> None:
        """Close the connections and end the thread. After that no socket is open."""
        closed = threading.Event()
        with Quietly():
            try:
                self._loop.call_soon_with_future(self._close_lanes).add_both(lambda _: closed.set())
            except Exception:
                logger.debug("the network loop has ended before", exc_info=True)
            else:
                closed.wait(1.0)  # a loop that hangs in a DNS look-up does not answer
            self._loop.close()

    def _close_lanes(self) -> None:
        for lane in self.lanes:
            lane.close()
