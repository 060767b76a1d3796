"""The native engine's settings, by librdkafka's names, and the values that each may have.

One table has every setting of a producer that this engine takes; a setting that is not there is refused by name, so that none
is silently without effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.config import (
    BULK,
    CONNECTING,
    ENGINE,
    KERBEROS_TICKETS,
    TWO_PHASE_COMMIT,
    KafkaConfig,
    Setting,
    nearest_setting,
)
from dualwrite.kafka.native import records
from dualwrite.kafka.native.produce_state import MAX_IN_FLIGHT, Limits
from dualwrite.kafka.native.records import Codec, RecordsBuilder

# The kinds of values that a setting takes: how each is read, and what errors call it. Pure.

Value: TypeAlias = Any  # of the type that the kind reads


@dataclass(frozen=True)
class Whole:
    """Whole numbers."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    def read(self, given: Setting) -> Value:
        """The value; None if it is not one of these."""
        text = str(given)
        return int(text) if re.fullmatch(r"-?[0-9]{1,10}", text) and self.least <= int(text) <= self.most else None


@dataclass(frozen=True)
class Decimal:
    """Numbers that may have decimal places."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"a number from {self.least} to {self.most}"

    def read(self, given: Setting) -> Value:
        """The value; None if it is not one of these."""
        text = str(given)
        fits = re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", text) and self.least <= float(text) <= self.most
        return float(text) if fits else None


@dataclass(frozen=True)
class Words:
    """Some words, in lower or upper case; with ``exact``, only as they stand here."""

    words: tuple[str, ...]
    exact: bool = False

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}" if len(self.words) > 1 else self.words[0]

    def read(self, given: Setting) -> Value:
        """The value; None if it is not one of these."""
        word = str(given) if self.exact else str(given).lower()
        return word if word in self.words else None


@dataclass(frozen=True)
class Function:
    """Something to call."""

    def __str__(self) -> str:
        return "a function"

    def read(self, given: Setting) -> Value:
        """The value; None if it is not one of these."""
        return given if callable(given) else None


StatisticsCallback: TypeAlias = Callable[[str], object]

_MAX_INT: Final = 2**31 - 1
_NO_LIMIT: Final = 2**63 - 1
_FIRST_BACKOFF_MS: Final = 2
_LONGEST_BACKOFF_MS: Final = 1000
_MESSAGE_TIMEOUT_MS: Final = 300_000
_STICKY_MS: Final = 10
_LONGEST_STICKY_MS: Final = 900_000

OTHER_ENGINE: Final = "or choose librdkafka: 'dualwrite.engine' among the Kafka settings, producerEngine in Spark"
"""The way on for the user of a setting that only librdkafka has."""


@dataclass(frozen=True)
class NativeSettings:
    """The checked settings of one native producer; make them with :func:`native_settings`."""

    limits: Limits
    codec: Codec
    partitioner: str
    batch_bytes: int  # before compression; a single larger message is alone in its batch
    batch_messages: int
    max_message_bytes: int  # of key and value together
    queue_bytes: int  # of keys and values that are not acknowledged
    queue_messages: int
    sticky_s: float  # how long messages without a key go to the same partition; 0 chooses one for each
    statistics_s: float = 0.0  # between two calls of stats_cb; 0 for none
    stats_cb: StatisticsCallback | None = None  # gets JSON text

    @property
    def make_builder(self) -> Callable[[], RecordsBuilder]:
        """Makes an empty batch."""
        return partial(RecordsBuilder, self.codec, limit_bytes=self.batch_bytes, limit_records=self.batch_messages)


@dataclass(frozen=True)
class Known:
    """A setting that this engine takes: ``names`` are librdkafka's, its aliases last.

    A default of None depends on other settings, or there is none; ``in_bulk`` is that of bulk mode, if it is another.
    """

    names: tuple[str, ...]
    takes: Whole | Decimal | Words | Function
    effect: str
    default: Value = None
    in_bulk: Value = None

    @property
    def is_fixed(self) -> bool:
        """Whether it takes only what this engine does in any case."""
        return isinstance(self.takes, Words) and len(self.takes.words) == 1


SETTINGS: Final = (
    Known(
        ("linger.ms", "queue.buffering.max.ms"),
        Decimal(0, 900_000),
        "how long a batch collects messages before it is sent",
        default=0.0,
        in_bulk=5.0,
    ),
    Known(
        ("batch.size",),
        Whole(1, _MAX_INT),
        "greatest size of a batch in bytes, before compression; never above `message.max.bytes`",
        default=1_000_000,
    ),
    Known(
        ("batch.num.messages",),
        Whole(1, 1_000_000),
        "most messages in a batch; librdkafka's default is 10000",
        default=1_000_000,
    ),
    Known(
        ("message.max.bytes",),
        Whole(1000, 1_000_000_000),
        "greatest size of a message's key and value together, and of the batches in one request",
        default=1_000_000,
    ),
    Known(
        ("compression.type", "compression.codec"),
        Words(("none", "gzip", "snappy", "lz4", "zstd")),
        "codec of the batches; if not set, bulk mode leaves a batch as it is that `lz4` does not make half as long",
        default="none",
        in_bulk="lz4",
    ),
    Known(("compression.level",), Whole(-1, 12), "level of the codec; -1 is the codec's own default", default=-1),
    Known(
        ("partitioner",),
        Words(records.NAMES, exact=True),
        "partition of a message that names none: where librdkafka puts it",
        default=records.DEFAULT,
    ),
    Known(
        ("sticky.partitioning.linger.ms",),
        Whole(0, _LONGEST_STICKY_MS),
        "how long messages without a key go to the same partition; 0 chooses a partition for each; if not set, twice "
        "`linger.ms`, or 10 if that is not set either",
    ),
    Known(
        ("message.timeout.ms", "delivery.timeout.ms"),
        Whole(0, _MAX_INT),
        "how long a batch is repeated until it is acknowledged; if not set, 300000, and at most the transaction timeout; 0 "
        "is the transaction timeout",
    ),
    Known(
        ("topic.metadata.propagation.max.ms",),
        Whole(0, 3_600_000),
        "how long to wait for a topic or partition that the brokers do not know",
        default=5000,
    ),
    Known(
        ("request.timeout.ms",),
        Whole(1, 900_000),
        "how long a broker may wait for its replicas before it answers",
        default=30_000,
    ),
    Known(
        ("retry.backoff.ms",),
        Whole(1, 300_000),
        "pause before the first repetition of a request; it doubles with each further one",
        default=_FIRST_BACKOFF_MS,
    ),
    Known(
        ("retry.backoff.max.ms",),
        Whole(1, 300_000),
        "the longest pause; never below `retry.backoff.ms` if only that is set",
        default=_LONGEST_BACKOFF_MS,
    ),
    Known(
        ("max.in.flight.requests.per.connection", "max.in.flight"),
        Whole(1, MAX_IN_FLIGHT),
        "batches in flight for each partition, not for each connection",
        default=MAX_IN_FLIGHT,
    ),
    Known(
        ("queue.buffering.max.messages",),
        Whole(0, _MAX_INT),
        "most messages that are not acknowledged; 0 is no limit",
        default=100_000,
    ),
    Known(
        ("queue.buffering.max.kbytes",),
        Whole(1, _MAX_INT),
        "greatest size of the messages that are not acknowledged, in units of 1024 bytes",
        default=1_048_576,
    ),
    Known(
        ("statistics.interval.ms",),
        Whole(0, 86_400_000),
        "time between two calls of `stats_cb`; 0 is none",
        default=0,
    ),
    Known(("stats_cb",), Function(), "called with this engine's own statistics, as JSON text"),
    Known(
        ("transaction.timeout.ms",),
        Whole(1000, _MAX_INT),
        "when the broker aborts an open transaction; if not set, the greatest timeout that the brokers allow",
    ),
    Known(
        (TWO_PHASE_COMMIT,),
        Words(("true", "false")),
        "`true` requires two-phase commit (KIP-939), and refuses to start without it; `false` never asks for it; if not set, "
        "it is used where the brokers allow it",
    ),
    Known(("enable.idempotence",), Words(("true",)), "a transaction needs it"),
    Known(("acks",), Words(("all", "-1")), "a transaction needs the acknowledgement of all replicas in sync"),
    Known(("enable.gapless.guarantee",), Words(("false",)), "a failed message aborts its transaction"),
    Known(("queuing.strategy",), Words(("fifo",)), "the messages of a partition keep their order"),
    Known(
        ("message.send.max.retries", "retries"),
        Words((str(_MAX_INT),)),
        "a batch is repeated until `message.timeout.ms`, however often",
    ),
    Known(("allow.auto.create.topics",), Words(("false",)), "this engine creates no topics"),
    Known(("socket.nagle.disable",), Words(("true",)), "no request waits for more bytes"),
    Known(("enable.metrics.push",), Words(("false",)), "this engine sends no metrics to the brokers"),
)
"""Every setting that this engine takes, besides those that concern its connections."""

_LOGGING: Final = "set the levels of the loggers dualwrite.kafka.producer and kafka"
_LOOK_UPS: Final = (
    "leave it out: a topic is looked up every five minutes, and whenever a leader moves or a partition is missing"
)
REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "error_cb": "leave it out: the calls raise the errors, and the logger dualwrite.kafka.producer has the rest",
        "throttle_cb": "leave it out: the brokers report throttling in their own metrics",
        **dict.fromkeys(
            ("logger", "log_level", "debug", "log.queue", "log.thread.name", "log.connection.close"), _LOGGING
        ),
        **dict.fromkeys(sorted(KERBEROS_TICKETS), "fetch the Kerberos ticket with kinit"),
        "metadata.max.age.ms": _LOOK_UPS,
        "topic.metadata.refresh.interval.ms": _LOOK_UPS,
    }
)
"""Settings that librdkafka's users often have, and what to do instead. All others have the general advice."""

_BY_NAME: Final = {name: row for row in SETTINGS for name in row.names}


def native_settings(config: KafkaConfig, *, bulk: bool, transaction_timeout_ms: int) -> NativeSettings:
    """Read the native engine's settings out of a configuration; an error names the setting.

    Bulk mode has other defaults. No message can be delivered for longer than the transaction timeout.
    """
    given = _given(config)
    value = {row.names[0]: row.in_bulk if bulk and row.in_bulk is not None else row.default for row in SETTINGS} | given
    linger_ms: float = value["linger.ms"]
    message_timeout_ms = _message_timeout_ms(given, transaction_timeout_ms)
    first_ms, longest_ms = _backoff_ms(given)
    sticky_ms: float | None = value["sticky.partitioning.linger.ms"]
    if sticky_ms is None:
        # This library's own linger of 0 must not scatter the messages of a small transaction over all partitions.
        sticky_ms = min(2 * linger_ms, _LONGEST_STICKY_MS) if "linger.ms" in given else _STICKY_MS
    max_message_bytes: int = value["message.max.bytes"]
    callback: StatisticsCallback | None = value["stats_cb"]
    return NativeSettings(
        limits=Limits(
            linger_s=linger_ms / 1000,
            delivery_s=message_timeout_ms / 1000,
            topic_s=value["topic.metadata.propagation.max.ms"] / 1000,
            first_backoff_s=first_ms / 1000,
            longest_backoff_s=longest_ms / 1000,
            request_bytes=max_message_bytes,
            in_flight=value["max.in.flight.requests.per.connection"],
            replicas_s=value["request.timeout.ms"] / 1000,
        ),
        codec=Codec(
            value["compression.type"],
            value["compression.level"],
            must_halve=bulk and "compression.type" not in given,
        ),
        partitioner=value["partitioner"],
        batch_bytes=min(value["batch.size"], max_message_bytes),
        batch_messages=value["batch.num.messages"],
        max_message_bytes=max_message_bytes,
        queue_bytes=value["queue.buffering.max.kbytes"] * 1024,
        queue_messages=value["queue.buffering.max.messages"] or _NO_LIMIT,
        sticky_s=sticky_ms / 1000,
        statistics_s=value["statistics.interval.ms"] / 1000 if callback else 0.0,
        stats_cb=callback,
    )


def _given(config: KafkaConfig) -> dict[str, Value]:
    """The user's settings, checked, under librdkafka's own names."""
    given: dict[str, Value] = {}
    for key in config.names:
        row = _BY_NAME.get(key)
        if row is not None:
            value = _checked(key, row, config.get(key))
            if given.setdefault(row.names[0], value) != value:
                raise ConfigurationError(f"Kafka setting {key!r} is given by two names with different values")
        elif key not in CONNECTING:
            raise _unknown(key)
    return given


def _checked(key: str, row: Known, given: Setting | None) -> Value:
    value = None if given is None else row.takes.read(given)
    if value is None:
        raise ConfigurationError(
            f"Kafka setting {key!r} is not {row.takes}{f': {row.effect}' if row.is_fixed else ''}",
            next_step=f"leave it out, {OTHER_ENGINE}" if row.is_fixed else None,
        )
    return value


def _unknown(key: str) -> ConfigurationError:
    meant = None if key in REFUSED else nearest_setting(key, _BY_NAME.keys() | CONNECTING | {ENGINE, BULK})
    advice = REFUSED.get(key, "leave it out") if meant is None else f"did you mean {meant!r}? If not, leave it out"
    return ConfigurationError(
        f"Kafka setting {key!r} is not known to the native engine", next_step=f"{advice}, {OTHER_ENGINE}"
    )


def _message_timeout_ms(given: Mapping[str, Value], transaction_timeout_ms: int) -> int:
    asked_ms: int | None = given.get("message.timeout.ms")
    if not asked_ms:
        return min(_MESSAGE_TIMEOUT_MS, transaction_timeout_ms) if asked_ms is None else transaction_timeout_ms
    # librdkafka refuses both, too: a configuration must not become invalid with a change of engine.
    if asked_ms > transaction_timeout_ms:
        raise ConfigurationError(
            f"Kafka setting 'message.timeout.ms' is {asked_ms}, above the transaction timeout of {transaction_timeout_ms} ms"
        )
    if asked_ms <= given.get("linger.ms", 0.0):
        raise ConfigurationError("Kafka setting 'message.timeout.ms' is not above 'linger.ms'")
    return asked_ms


def _backoff_ms(given: Mapping[str, Value]) -> tuple[int, int]:
    first: int | None = given.get("retry.backoff.ms")
    longest: int | None = given.get("retry.backoff.max.ms")
    if longest is None:
        longest = max(first or 0, _LONGEST_BACKOFF_MS)
    return min(first or _FIRST_BACKOFF_MS, longest), longest
