"""One librdkafka instance behind own deadlines: made, called, measured and destroyed without ever blocking the caller long."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from dualwrite.deadline import Deadline, now_s
from dualwrite.kafka.bounded_call import BoundedCaller, NoAnswer
from dualwrite.kafka.config import KafkaConfig, Setting

if TYPE_CHECKING:
    from collections.abc import MutableMapping

logger = logging.getLogger("dualwrite.kafka.producer")

_DESTROY_WAIT_S = 2.0


_SOCKET_TIMEOUT_MS: Final = 30_000
_MESSAGE_TIMEOUT_MS: Final = 300_000
_PROPAGATION_MS: Final = 5_000


def producer_settings(
    config: KafkaConfig, transactional_id: str, transaction_timeout_ms: int, *, bulk: bool
) -> dict[str, object]:
    """Configure librdkafka for one producer: the user's settings, the protocol's own, and better defaults.

    ``socket.timeout.ms`` must never be left out. librdkafka then takes the transaction timeout for it, and a transaction
    timeout above 35 minutes overflows in its 32-bit microseconds: requests time out at once, and are silently sent again,
    ``EndTxn`` too.
    """
    defaults: dict[str, Setting] = {
        "socket.timeout.ms": min(_SOCKET_TIMEOUT_MS, transaction_timeout_ms),
        # librdkafka would take the transaction timeout: a message that cannot be delivered would stall for days.
        "message.timeout.ms": min(_MESSAGE_TIMEOUT_MS, transaction_timeout_ms),
        # How long an unknown topic is hoped for: librdkafka's 30 s stall a prepare.
        "topic.metadata.propagation.max.ms": _PROPAGATION_MS,
    }
    if bulk:
        # It costs both ends less processor time than the bytes that it saves.
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
"""The facility under which librdkafka warns that it has got no producer id and asks again. Nothing else tells of it."""
_NOTHING_DONE: Final = tuple(
    KafkaError(code).str()
    for code in (
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError.CONCURRENT_TRANSACTIONS,
    )
)
"""A broker that answers so has finished with the request: nothing of it comes later."""
_LINE: Final = 3
"""A line of librdkafka's comes as its facility, the name of the client, and the text."""
_INFO: Final = 6
_WARNING: Final = 4
"""syslog's numbers, as librdkafka counts levels. It warns that it asks for a producer id again."""
_QUIET: Final = {3: logging.ERROR, 2: logging.CRITICAL}


_NAMES = {
    "message.timeout.ms": ("message.timeout.ms", "delivery.timeout.ms"),
    "linger.ms": ("linger.ms", "queue.buffering.max.ms"),
    "compression.type": ("compression.type", "compression.codec"),
}


class IdLogger(logging.LoggerAdapter):  # type: ignore[type-arg] # not generic at run time on Python 3.10
    """Puts the transactional id in front of every line, librdkafka's own lines too.

    Args:
        transactional_id: The id.
        quiet_below: Lines of lower levels than this are not passed on.

    Attributes:
        init_unanswered: Whether librdkafka has said that it asks for a producer id once more while it does not know what
            became of the first request.
    """

    def __init__(self, transactional_id: str, *, quiet_below: int = logging.NOTSET) -> None:
        super().__init__(logger, {})
        self._prefix = transactional_id.replace("%", "%%") + ": "
        self._quiet_below = quiet_below
        self.init_unanswered = False

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log one line, and take note of what librdkafka tells in it."""
        # Not everything can be compared with a string: a KafkaError cannot.
        facility = args[0] if len(args) == _LINE and isinstance(args[0], str) else None
        if facility == _INIT_FAILED and level >= logging.WARNING:
            self.init_unanswered |= not any(done in str(args[-1]) for done in _NOTHING_DONE)
        if level >= self._quiet_below:
            super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Prefix one line."""
        return self._prefix + str(msg), kwargs


class Handle:
    """A librdkafka producer instance.

    Args:
        settings: librdkafka's configuration.
        transactional_id: For the names of threads and log lines.
        deadline: Until when the instance must have been made.

    Attributes:
        raw: The confluent-kafka producer, for calls that keep their timeout (``produce``, ``poll``, ``flush``).
        client_error: The newest error of the client itself (not of a call), as librdkafka reported it.

    Raises:
        NoAnswer: The deadline came first.
        KafkaException: librdkafka refuses the settings.
    """

    def __init__(self, settings: Mapping[str, object], transactional_id: str, deadline: Deadline) -> None:
        self.client_error: KafkaError | None = None
        log_level = int(str(settings.get("log_level", _INFO)))
        quiet = log_level < _WARNING
        self._log = IdLogger(
            transactional_id,
            quiet_below=_QUIET.get(log_level, logging.CRITICAL + 1) if quiet else logging.NOTSET,
        )
        self._users_error_cb = settings.get("error_cb")
        # We have to hear of a producer id that is asked for again.
        own = {**settings, "error_cb": self._note_client_error, "logger": self._log}
        if quiet:
            own["log_level"] = _WARNING
        self._caller = BoundedCaller(f"dualwrite producer {transactional_id}")
        self.raw = self._caller.call(lambda: Producer(own), deadline)

    def timed(self, function: Callable[[Producer, float], object], deadline: Deadline) -> float:
        """Call the instance with the seconds that are left, and say how many it took.

        Raises:
            NoAnswer: The deadline came first: the instance must be thrown away.
        """
        raw, left_s = self.raw, deadline.remaining_s()
        began = now_s()
        self._caller.call(lambda: function(raw, left_s), deadline)
        return now_s() - began

    @property
    def init_unanswered(self) -> bool:
        """Whether a producer id was asked for more than once, and not all of the requests are known to be over.

        librdkafka asks again as soon as it has connected again, which can be within milliseconds. Current when ``poll`` has
        just been called: librdkafka's lines are logged from there.
        """
        return self._log.init_unanswered

    def close(self) -> None:
        """Destroy the instance without ending its transaction: what is prepared stays prepared on the broker.

        Messages that are not delivered are given up. Returns within two seconds; if librdkafka needs longer, it goes on in
        the background.
        """
        raw = self.raw
        del self.raw
        try:
            raw.purge()
            raw.poll(0)  # callbacks of the messages given up
        except KafkaException as error:  # after a fatal error, librdkafka tells it once more from here
            self._log.info("given up after: %s", error.args[0])
        last = [raw]
        del raw
        try:
            # The last reference dies on the thread: destroying an instance joins its threads, which can take long.
            self._caller.finish(last.clear, _DESTROY_WAIT_S)
        except NoAnswer:
            self._log.warning("librdkafka is still closing after %.0f s; it goes on in the background", _DESTROY_WAIT_S)

    def _note_client_error(self, error: KafkaError) -> None:
        self.client_error = error
        self._log.warning("%s (%s)", error.str(), error.name())
        if callable(self._users_error_cb):
            self._users_error_cb(error)


MakeHandle = Callable[[Mapping[str, object], str, Deadline], Handle]
"""Makes a handle of settings, a transactional id and a deadline, as :class:`Handle` itself does."""
