"""kafka-python's connections without its thread: their one user sends and receives while it waits.

No answer has to pass from one thread to another, and most take no turn of kafka-python's loop: a request is written at once,
and while a single connection has requests in flight its socket is read without the loop. The loop does the rest: connecting,
logging in, timeouts, sockets that take no more bytes, several brokers at a time.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import kafka.errors as kafka_errors
from kafka.net.selector import Task, TaskState

from dualwrite.clock import Deadline
from dualwrite.kafka.network import Loop, Message, Network, NotYet, Quietly, swallowed
from dualwrite.waiting import here

_WRITES: Final = "_write_to_sock"
_AWAY_FROM_THE_LOOP_S: Final = 0.1
"""For no longer than this a wait for one socket keeps the loop from what else it has to do."""


class _AtOnce:
    """Awaiting it continues the task without a turn of the loop."""

    def __await__(self) -> Iterator[None]:
        return iter(())


_AT_ONCE: Final = _AtOnce()


class _CallersLoop(Loop):
    """A loop without a thread: each turn that it saves is one less that the caller waits for."""

    def wait_write(self, fileobj: Message, timeout_at: float | None = None) -> Message:
        """Wait until the socket takes bytes; it usually does."""
        return _AT_ONCE if _is_ready(fileobj, select.POLLOUT, 0) else super().wait_write(fileobj, timeout_at)

    def call_soon(self, task: Message) -> Message:
        """Let a task begin with the next turn; one that writes to a socket begins at once."""
        if self._current is not None or getattr(task, "__name__", None) != _WRITES:
            return super().call_soon(task)
        return self._begun(Task(task))

    def _begun(self, task: Message) -> Message:
        self._pending_tasks.add(task)
        self._current, task.state = task, TaskState.RUNNING
        try:
            waits = task()
            getattr(self, waits.method)(*waits.args)
        except StopIteration:
            self._task_done(task)
        except BaseException:
            self._pending_tasks.discard(task)
            raise
        finally:
            self._current = None
        return task

    @property
    def fileno(self) -> Callable[[], int] | None:
        """The descriptor of the selector itself, which is readable when one of its sockets is ready; None on Windows."""
        return getattr(self._selector, "fileno", None)

    def idle_s(self, seconds: float) -> float:
        """For how many of these seconds nothing will be to do unless a socket becomes ready."""
        if self._ready:
            return 0.0
        scheduled_s = self._next_scheduled_timeout(time.monotonic())
        return seconds if scheduled_s is None else max(0.0, min(seconds, scheduled_s))

    @property
    def has_work(self) -> bool:
        """Whether there is something to do now, even if no socket is ready."""
        return self.idle_s(1.0) == 0.0

    @property
    def keeps_an_interruption(self) -> bool:
        """Whether an interruption of this turn would come out in the next, which may be another call's."""
        return any(task._exc is not None and not isinstance(task._exc, Exception) for task in self._ready)  # noqa: SLF001


class _InCallersThread(Quietly):
    """Runs kafka-python's code on the caller's thread: an interruption that it swallows comes out after it."""

    def __exit__(self, kind: type[BaseException] | None, *of_error: object) -> None:
        super().__exit__(kind, *of_error)
        if kind is not None:
            return
        error, swallowed.error = swallowed.error, None
        if error is not None:
            raise error


class CallersNetwork(Network):
    """As `Network`, without a thread. Used by one thread at a time.

    Between calls nothing happens but what the kernel does with bytes that were written.

    Args:
        arguments: kafka-python's settings.
    """

    _make_loop = _CallersLoop

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self._asked: list[Message] = []
        super().__init__(arguments)

    def _start(self) -> None:
        self._loop.config["slow_task_threshold_secs"] = 0  # its warnings are about a thread that many wait for

    def exchange(
        self, requests: Sequence[tuple[int | str, Message]], deadline: Deadline, lanes: int, timeout_ms: int | None
    ) -> list[Message | Exception]:
        """Send all requests, and wait for the answer or error of each. Raises as `Network.exchange`."""
        with _InCallersThread():
            futures = self._sent_by_lanes(requests, lanes, timeout_ms)
        for future in futures:
            while not (isinstance(future, Exception) or future.is_done):
                if deadline.expired:
                    raise NotYet("no answer", unreachable=True)
                self.serve(deadline.remaining_s())
        return [future if isinstance(future, Exception) else _result(future) for future in futures]

    def post(self, node: int, request: Message, done: Callable[[Message | Exception], None]) -> None:
        """Send a request without a wait for its answer.

        Args:
            node: The broker's id.
            request: The request, built afresh.
            done: Called once, with the answer or the error, by this call or by a later one of this object.
        """
        with _InCallersThread():
            answer = self._sent(self.lanes[0], node, request, None)
            if isinstance(answer, Exception):
                done(answer)
                return
            answer.add_both(lambda _: done(_result(answer)))

    def _note_asked(self, connection: Message) -> None:
        if connection not in self._asked:
            self._asked.append(connection)

    def serve(self, seconds: float) -> None:
        """Send and receive what can be at once; wait up to that long, or a little, for something to do."""
        idle_s = self._loop.idle_s(seconds)
        connection = self._only_one_asked()
        if connection is None:
            here().poll(self._turn, self._loop.fileno, idle_s)
            return
        found = False

        def read(patience_s: float) -> None:
            nonlocal found
            found = self._read(connection, patience_s)

        here().poll(read, connection.transport._sock.fileno, min(idle_s, _AWAY_FROM_THE_LOOP_S))  # noqa: SLF001
        if seconds and not found:
            self._turn(0)

    def _only_one_asked(self) -> Message | None:
        """The connection whose answers are all that there is to wait for; None if there is more to do, or nothing."""
        self._asked = [one for one in self._asked if one.initializing or one.in_flight_requests]
        if len(self._asked) != 1 or self._loop.has_work:
            return None
        [connection] = self._asked
        return connection if connection.connected else None

    def _read(self, connection: Message, seconds: float) -> bool:
        """Do what kafka-python's loop would, once the connection's socket is ready. Returns whether it was."""
        transport = connection.transport
        if not _is_ready(transport._sock, select.POLLIN, seconds):  # noqa: SLF001 - as its own task does
            return False
        with _InCallersThread():
            data, error = transport._sock_recv()  # noqa: SLF001 - as above
            try:
                if error is None:
                    transport.last_read = time.monotonic()
                    connection.data_received(data)
            except Exception as unreadable:  # noqa: BLE001 - ends the connection
                error = kafka_errors.KafkaConnectionError(unreadable)
            if error is not None:
                transport.abort(error=error)
        return True

    def _turn(self, seconds: float) -> None:
        with _InCallersThread():
            self._loop.poll(timeout_ms=seconds * 1000)
            while self._loop.keeps_an_interruption:
                self._loop.poll(timeout_ms=0)

    def close(self) -> None:
        """Close the connections. After that no socket is open."""
        with _InCallersThread():
            self._close_lanes()
            self._loop.close()


def _is_ready(one: Message, event: int, seconds: float) -> bool:
    """Whether a socket is ready, or becomes so within these seconds."""
    look = select.poll()  # unlike select(), it takes descriptors above 1023
    look.register(one, event)
    return bool(look.poll(1000 * seconds))


def _result(future: Message) -> Message | Exception:
    return future.value if future.exception is None else future.exception
