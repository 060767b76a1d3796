"""The native engine takes librdkafka's settings with librdkafka's bounds, and refuses the others by name."""

import dataclasses
import re

import pytest
from confluent_kafka import KafkaException, Producer
from harness.places import ROOT

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.config import CONNECTING, KafkaConfig
from dualwrite.kafka.engine import GREATEST_TIMEOUT_MS
from dualwrite.kafka.librdkafka.handle import producer_settings
from dualwrite.kafka.native.produce_state import Limits
from dualwrite.kafka.native.records import Codec
from dualwrite.kafka.native.settings import (
    REFUSED,
    SETTINGS,
    Decimal,
    Function,
    NativeSettings,
    Whole,
    Words,
    native_settings,
)

NOWHERE = {"bootstrap.servers": "127.0.0.1:1"}
OTHER_ENGINE = "choose librdkafka: 'dualwrite.engine' among the Kafka settings, producerEngine in Spark"
BOUNDED = [
    (name, row.takes)
    for row in SETTINGS
    for name in row.names
    if isinstance(row.takes, Whole | Decimal) and not name.startswith("max.in.flight")
]


def settings(user=None, *, bulk=False, timeout_ms=GREATEST_TIMEOUT_MS):
    config = KafkaConfig.parse({**NOWHERE, **(user or {})})
    return native_settings(config, bulk=bulk, transaction_timeout_ms=timeout_ms)


def changed(user, **bulk):
    """The settings that differ from the defaults."""
    found, default = settings(user, **bulk), settings(**bulk)
    flat = lambda made: {**dataclasses.asdict(made), **dataclasses.asdict(made.limits)}  # noqa: E731
    there, usual = flat(found), flat(default)
    return {key: value for key, value in there.items() if value != usual[key] and key != "limits"}


def test_the_defaults_of_small_transactions():
    assert settings() == NativeSettings(
        limits=Limits(linger_s=0.0, delivery_s=300.0, topic_s=5.0, first_backoff_s=0.002, longest_backoff_s=1.0),
        codec=Codec("none"),
        partitioner="consistent_random",
        batch_bytes=1_000_000,
        batch_messages=1_000_000,
        max_message_bytes=1_000_000,
        queue_bytes=1 << 30,
        queue_messages=100_000,
        sticky_s=0.01,
    )


def test_a_batch_has_the_limits_of_its_settings():
    builder = settings({"batch.num.messages": 2, "batch.size": 100}).make_builder()
    assert [builder.append(b"", None, (), 0) for _ in range(3)] == [True, True, False]
    builder = settings({"batch.size": 100}).make_builder()
    assert [builder.append(b"x" * 30, None, (), 0) for _ in range(2)] == [True, False]


def test_bulk_lingers_and_compresses():
    made = settings(bulk=True)
    assert (made.limits.linger_s, made.sticky_s, made.codec) == (0.005, 0.01, Codec("lz4", must_halve=True))


@pytest.mark.parametrize("name", ["compression.type", "compression.codec"])
def test_a_codec_of_the_users_compresses_every_batch(name):
    assert settings({name: "lz4"}, bulk=True).codec == settings({name: "lz4"}).codec == Codec("lz4")


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("timeout_ms", [1000, 60_000, GREATEST_TIMEOUT_MS])
def test_the_defaults_that_this_library_prefers_are_those_of_the_other_engine(timeout_ms, bulk):
    made = settings(bulk=bulk, timeout_ms=timeout_ms)
    theirs = producer_settings(KafkaConfig.parse(NOWHERE), "tx", timeout_ms, bulk=bulk)
    assert made.limits.linger_s * 1000 == theirs.get("linger.ms", 5)
    assert made.limits.delivery_s * 1000 == theirs["message.timeout.ms"]
    assert made.limits.topic_s * 1000 == theirs["topic.metadata.propagation.max.ms"]
    assert made.codec.name == theirs.get("compression.type", "none")


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({"linger.ms": 0.5}, {"linger_s": 0.0005, "sticky_s": 0.001}),
        ({"queue.buffering.max.ms": "20"}, {"linger_s": 0.02, "sticky_s": 0.04}),
        ({"linger.ms": 900_000}, {"linger_s": 900.0, "sticky_s": 900.0}),
        ({"linger.ms": 5, "sticky.partitioning.linger.ms": 0}, {"linger_s": 0.005, "sticky_s": 0.0}),
        ({"linger.ms": 0}, {"sticky_s": 0.0}),
        ({"sticky.partitioning.linger.ms": 7}, {"sticky_s": 0.007}),
        ({"batch.size": 16_384}, {"batch_bytes": 16_384}),
        ({"batch.size": 2_000_000}, {}),
        ({"batch.num.messages": 100}, {"batch_messages": 100}),
        (
            {"message.max.bytes": 5000},
            {"batch_bytes": 5000, "max_message_bytes": 5000, "request_bytes": 5000},
        ),
        (
            {"message.max.bytes": 8_000_000, "batch.size": 4_000_000},
            {"batch_bytes": 4_000_000, "max_message_bytes": 8_000_000, "request_bytes": 8_000_000},
        ),
        ({"compression.codec": "ZSTD", "compression.level": 12}, {"codec": dataclasses.asdict(Codec("zstd", 12))}),
        ({"partitioner": "murmur2_random"}, {"partitioner": "murmur2_random"}),
        ({"delivery.timeout.ms": 7000}, {"delivery_s": 7.0}),
        ({"message.timeout.ms": 0}, {"delivery_s": GREATEST_TIMEOUT_MS / 1000}),
        ({"topic.metadata.propagation.max.ms": 0}, {"topic_s": 0.0}),
        ({"request.timeout.ms": 1}, {"replicas_s": 0.001}),
        ({"retry.backoff.ms": 100}, {"first_backoff_s": 0.1}),
        ({"retry.backoff.ms": 5000}, {"first_backoff_s": 5.0, "longest_backoff_s": 5.0}),
        ({"retry.backoff.max.ms": 1}, {"first_backoff_s": 0.001, "longest_backoff_s": 0.001}),
        ({"retry.backoff.ms": 50, "retry.backoff.max.ms": 20}, {"first_backoff_s": 0.02, "longest_backoff_s": 0.02}),
        ({"max.in.flight": 1}, {"in_flight": 1}),
        ({"queue.buffering.max.messages": 0}, {"queue_messages": 2**63 - 1}),
        ({"queue.buffering.max.kbytes": 3}, {"queue_bytes": 3072}),
        ({"statistics.interval.ms": 500}, {}),
        ({"statistics.interval.ms": 500, "stats_cb": print}, {"statistics_s": 0.5, "stats_cb": print}),
    ],
)
def test_each_setting_has_its_effect(user, expected):
    assert changed(user) == expected


def test_a_user_may_choose_in_bulk_mode_too():
    assert changed({"compression.type": "none", "linger.ms": 0}, bulk=True) == {
        "codec": dataclasses.asdict(Codec("none")),
        "linger_s": 0.0,
        "sticky_s": 0.0,
    }


def test_each_value_of_a_choice_is_taken():
    for row in SETTINGS:
        if isinstance(row.takes, Words):
            for name, word in ((name, word) for name in row.names for word in row.takes.words):
                settings({name: word})


@pytest.mark.parametrize(("name", "takes"), BOUNDED)
def test_the_bounds_are_librdkafkas(name, takes):
    for value in (takes.least - 1, takes.most + 1, "x", ""):
        with pytest.raises(ConfigurationError, match=re.escape(repr(name))):
            settings({name: value})
        with pytest.raises(KafkaException):
            Producer({**NOWHERE, "log_level": 0, name: value})


@pytest.mark.parametrize("end", ["least", "most"])
def test_librdkafka_takes_every_value_up_to_the_bounds(end):
    values = {row.names[0]: getattr(row.takes, end) for row in SETTINGS if isinstance(row.takes, Whole | Decimal)}
    values.pop("transaction.timeout.ms")
    Producer({**NOWHERE, "log_level": 0, **values})
    if end == "most":
        values["message.timeout.ms"] = GREATEST_TIMEOUT_MS
    settings(values)


def test_more_than_five_in_flight_are_refused():
    with pytest.raises(ConfigurationError, match=r"'max\.in\.flight' is not a whole number from 1 to 5"):
        settings({"max.in.flight": 6})


@pytest.mark.parametrize(
    ("user", "why"),
    [
        ({"message.timeout.ms": 1001}, "above the transaction timeout of 1000 ms"),
        ({"message.timeout.ms": 5, "linger.ms": 5}, "not above 'linger.ms'"),
    ],
)
def test_both_engines_refuse_what_contradicts_itself(user, why):
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        settings(user, timeout_ms=1000)
    with pytest.raises(KafkaException):
        Producer(
            {
                **NOWHERE,
                "log_level": 0,
                "transactional.id": "tx",
                "transaction.timeout.ms": 1000,
                "socket.timeout.ms": 900,
                **user,
            }
        )


def test_two_names_of_a_setting_must_agree():
    settings({"linger.ms": 5, "queue.buffering.max.ms": "5.0"})
    with pytest.raises(ConfigurationError, match="given by two names"):
        settings({"linger.ms": 5, "queue.buffering.max.ms": 6})


@pytest.mark.parametrize("key", [*REFUSED, "client.rack", "plugin.library.paths", "group.id", "nonsense"])
def test_a_setting_that_is_not_known_is_refused_by_name_and_says_what_to_do(key):
    security = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "GSSAPI"} if key.startswith("sasl") else {}
    with pytest.raises(ConfigurationError, match=f"{key!r} is not known to the native engine") as raised:
        settings({key: "1", **security})
    assert raised.value.next_step.startswith(REFUSED.get(key, "leave it out"))
    assert raised.value.next_step.endswith(OTHER_ENGINE)


@pytest.mark.parametrize(
    ("key", "value"),
    [("retries", 3), ("queuing.strategy", "lifo"), ("enable.metrics.push", "true"), ("stats_cb", "print")],
)
def test_a_value_that_this_engine_cannot_follow_is_refused_by_name(key, value):
    with pytest.raises(ConfigurationError, match=f"Kafka setting {key!r} is not"):
        settings({key: value})


def test_a_fixed_setting_says_why_it_is_and_what_to_do():
    with pytest.raises(ConfigurationError) as raised:
        settings({"retries": 3})
    assert "repeated until `message.timeout.ms`" in str(raised.value)
    assert raised.value.next_step.endswith(OTHER_ENGINE)


def test_what_concerns_the_connections_is_taken():
    user = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.config": "x",
        "oauth_cb": print,
        "ssl.ca.location": "/nowhere",
        "client.id": "me",
        "socket.timeout.ms": 5000,
        "broker.address.family": "v4",
    }
    assert user.keys() <= CONNECTING
    assert changed(user) == {}


def test_no_setting_is_known_twice():
    names = [*(name for row in SETTINGS for name in row.names), *REFUSED, *CONNECTING]
    assert len(names) == len(set(names))


def shown(row):
    """The row of the page's table."""
    default = (
        "" if row.default is None else f"`{row.default:g}`" if isinstance(row.default, float) else f"`{row.default}`"
    )
    if row.in_bulk is not None:
        default += (
            f"; in bulk mode `{row.in_bulk:g}`" if isinstance(row.in_bulk, float) else f"; in bulk mode `{row.in_bulk}`"
        )
    names = ", ".join(f"`{name}`" for name in row.names)
    takes = (
        str(row.takes)
        if isinstance(row.takes, Whole | Decimal | Function)
        else ", ".join(f"`{word}`" for word in row.takes.words)
    )
    return f"| {names} | {takes} | {default} | {row.effect} |"


def test_the_page_has_every_setting_and_no_other():
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if re.match(r"\| `", line)] == [
        *map(shown, SETTINGS),
        *(f"| `{name}` | {advice} |" for name, advice in REFUSED.items()),
    ]


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("linger.mss", "linger.ms"), ("Compresion.type", "compression.type"), ("clientid", "client.id")],
)
def test_a_misspelt_setting_is_refused_with_the_one_that_is_meant(misspelt, meant):
    with pytest.raises(ConfigurationError, match=f"did you mean {meant!r}"):
        settings({misspelt: "1"})
