"""One librdkafka instance under our own deadlines: no step of its life blocks the caller for long.

Some of its calls may hang, so each runs in a thread that the caller stops waiting for at its deadline.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from dualwrite.clock import Deadline, now_s
from dualwrite.kafka.config import KafkaConfig, Setting
from dualwrite.kafka.engine import IdLogger
from dualwrite.waiting import Event

# A call that gives up waiting at a deadline even when the called function does not.
#
# librdkafka's `begin_transaction` has no timeout and has hung, `send_offsets_to_transaction` ignores its own, and
# `abort_transaction` has blocked for minutes. Python cannot interrupt a thread inside them, so these calls run on a
# thread that can be abandoned. The hop costs tens of microseconds.

T = TypeVar("T")


class NoAnswer(Exception):
    """The deadline passed before the function returned. The function may still be running."""


class BoundedCaller:
    """One daemon thread that runs calls in turn."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True).start()

    def call(self, function: Callable[[], T], deadline: Deadline) -> T:
        """Run the function on the thread and wait for it. Its exceptions are raised here.

        After `NoAnswer`, later calls queue behind the one that hangs.
        """
        call = _Call(function)
        self._calls.put(call.run)
        return call.wait(deadline.remaining_s())

    def finish(self, last: Callable[[], T], wait_s: float) -> T:
        """Run one last function after the calls already queued, then end the thread.

        After `NoAnswer`, it continues in the background.
        """
        call = _Call(last)
        self._calls.put(call.run)
        self._calls.put(None)
        return call.wait(wait_s)

    def __del__(self) -> None:
        if hasattr(self, "_calls"):  # unless its making was interrupted
            self._calls.put(None)


class _Call(Generic[T]):
    """One call and its answer."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._returned: list[T] = []
        self._raised: BaseException | None = None
        self._done = Event()

    def run(self) -> None:
        try:
            self._returned.append(self._function())
        except BaseException as error:  # noqa: BLE001 - re-raised in the waiting thread
            self._raised = error
        self._done.set()

    def wait(self, seconds: float) -> T:
        if not self._done.wait(seconds):
            raise NoAnswer
        if self._raised is not None:
            raise self._raised
        return self._returned[0]


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it may hold the last reference to a librdkafka instance


_DESTROY_WAIT_S = 2.0


_SOCKET_TIMEOUT_MS: Final = 30_000
_MESSAGE_TIMEOUT_MS: Final = 300_000
_PROPAGATION_MS: Final = 5_000


def producer_settings(
    config: KafkaConfig, transactional_id: str, transaction_timeout_ms: int, *, bulk: bool
) -> dict[str, object]:
    """Build one producer's librdkafka settings: the user's, those that the protocol needs, and better defaults.

    Always set ``socket.timeout.ms``. Without it librdkafka uses the transaction timeout, which overflows its 32-bit
    microseconds above 35 minutes: requests time out at once and are silently resent, ``EndTxn`` included.
    """
    defaults: dict[str, Setting] = {
        "socket.timeout.ms": min(_SOCKET_TIMEOUT_MS, transaction_timeout_ms),
        # librdkafka would use the transaction timeout: an undeliverable message would stall for days.
        "message.timeout.ms": min(_MESSAGE_TIMEOUT_MS, transaction_timeout_ms),
        # How long to wait for an unknown topic to appear: librdkafka's 30 s would stall a prepare.
        "topic.metadata.propagation.max.ms": _PROPAGATION_MS,
    }
    if bulk:
        # Compressing costs client and broker less CPU than handling the bytes that it saves.
        defaults["compression.type"] = "lz4"
    else:
        defaults["linger.ms"] = 0
    own: dict[str, Setting] = {"transactional.id": transactional_id, "transaction.timeout.ms": transaction_timeout_ms}
    return {
        **{
            key: value
            for key, value in defaults.items()
            if all(config.get(name) is None for name in _NAMES.get(key, (key,)))
        },
        **config.librdkafka(**own),
        "delivery.report.only.error": bulk,
    }


_INIT_FAILED: Final = "GETPID"
"""The log facility of librdkafka's warning that it got no producer id and asks again. Nothing else reports this."""
_NOTHING_DONE: Final = tuple(
    KafkaError(code).str()
    for code in (
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError.CONCURRENT_TRANSACTIONS,
    )
)
"""A broker that answers with one of these is done with the request: it has no later effect."""
_LINE: Final = 3
"""librdkafka's log lines have three arguments: the facility, the client's name, and the text."""
_INFO: Final = 6
_WARNING: Final = 4
"""syslog levels, as librdkafka uses. It logs a repeated request for a producer id as a warning."""
_QUIET: Final = {3: logging.ERROR, 2: logging.CRITICAL}


_NAMES = {
    "message.timeout.ms": ("message.timeout.ms", "delivery.timeout.ms"),
    "linger.ms": ("linger.ms", "queue.buffering.max.ms"),
    "compression.type": ("compression.type", "compression.codec"),
}


class ClientLog(IdLogger):
    """Takes librdkafka's log lines, prefixed like our own."""

    def __init__(self, transactional_id: str, *, quiet_below: int = logging.NOTSET) -> None:
        super().__init__(transactional_id)
        self._quiet_below = quiet_below
        # Whether librdkafka asked for a producer id again although the first request may still take effect.
        self.init_unanswered = False

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log one line, and look in it for a repeated request for a producer id."""
        # Check the type first: comparing a KafkaError with a string fails.
        facility = args[0] if len(args) == _LINE and isinstance(args[0], str) else None
        if facility == _INIT_FAILED and level >= logging.WARNING:
            self.init_unanswered |= not any(done in str(args[-1]) for done in _NOTHING_DONE)
        if level >= self._quiet_below:
            super().log(level, msg, *args, **kwargs)


class Handle:
    """A librdkafka instance. Making it raises `NoAnswer` at the deadline, `KafkaException` if the settings are refused."""

    def __init__(self, settings: Mapping[str, object], transactional_id: str, deadline: Deadline) -> None:
        log_level = int(str(settings.get("log_level", _INFO)))
        quiet = log_level < _WARNING
        self._log = ClientLog(
            transactional_id,
            quiet_below=_QUIET.get(log_level, logging.CRITICAL + 1) if quiet else logging.NOTSET,
        )
        self._users_error_cb = settings.get("error_cb")
        # The warning about a repeated request for a producer id must reach us.
        own = {**settings, "error_cb": self._note_client_error, "logger": self._log}
        if quiet:
            own["log_level"] = _WARNING
        self._caller = BoundedCaller(f"dualwrite producer {transactional_id}")
        # Use it directly only for calls that respect their timeout: produce, poll, flush.
        self.raw = self._caller.call(lambda: Producer(own), deadline)

    def timed(self, function: Callable[[Producer, float], object], deadline: Deadline) -> float:
        """Call the function with the instance and the seconds left. Returns the seconds that it took.

        After `NoAnswer`, the instance must be discarded.
        """
        raw, left_s = self.raw, deadline.remaining_s()
        began = now_s()
        self._caller.call(lambda: function(raw, left_s), deadline)
        return now_s() - began

    @property
    def init_unanswered(self) -> bool:
        """Whether librdkafka asked for a producer id more than once, and a request may still be on its way.

        librdkafka asks again as soon as it reconnects, which can be within milliseconds. Call ``poll`` first: it
        delivers the log lines that this property depends on.
        """
        return self._log.init_unanswered

    def close(self) -> None:
        """Destroy the instance without ending its transaction: what is prepared stays prepared on the broker.

        Drops undelivered messages. Returns within two seconds; librdkafka may continue closing in the background.
        """
        raw = self.raw
        del self.raw
        try:
            raw.purge()
            raw.poll(0)  # callbacks of the dropped messages
        except KafkaException as error:  # librdkafka raises an earlier fatal error here once more
            self._log.info("closing after a fatal error: %s", error.args[0])
        last = [raw]
        del raw
        try:
            # Drop the last reference on the thread: destroying an instance joins its threads, which can take long.
            self._caller.finish(last.clear, _DESTROY_WAIT_S)
        except NoAnswer:
            self._log.warning("librdkafka needs over %.0f s to close; it continues in the background", _DESTROY_WAIT_S)

    def _note_client_error(self, error: KafkaError) -> None:
        self._log.warning("%s (%s)", error.str(), error.name())
        if callable(self._users_error_cb):
            self._users_error_cb(error)


MakeHandle = Callable[[Mapping[str, object], str, Deadline], Handle]


_LEADERS_S: Final = 10.0
PASSING: Final = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError._NOENT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
        KafkaError._RESOLVE,
    }
)
"""Transient errors: a broker is starting, moving partitions or not answering. Ask again, until a deadline."""


def list_offsets(
    admin: AdminClient, wanted: Mapping[TopicPartition, OffsetSpec], isolation: IsolationLevel, *, timeout_s: float
) -> dict[TopicPartition, int]:
    """Ask once. After an error that passes, the client's metadata is refreshed, so that it may be asked again.

    librdkafka does not refresh it by itself: it repeats the leader epoch that it has cached, and the broker refuses each
    request.
    """
    answers = admin.list_offsets(dict(wanted), isolation_level=isolation, request_timeout=timeout_s)
    try:
        return {where: int(answer.result().offset) for where, answer in answers.items()}
    except KafkaException as refused:
        if refused.args[0].code() in PASSING:
            for topic in {where.topic for where in wanted}:
                with suppress(KafkaException):
                    admin.list_topics(topic, timeout=min(timeout_s, _LEADERS_S))
        raise
