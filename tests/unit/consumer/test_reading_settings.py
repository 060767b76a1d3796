"""Settings of a consumer: what would break the promise is refused, with the reason."""

import pytest

from dualwrite import ConfigurationError, ExactlyOnceConsumer
from dualwrite.consumer.partitions import consumer_settings, is_incremental

KAFKA = {"bootstrap.servers": "localhost:9092", "linger.ms": 5, "security.protocol": "plaintext"}


def test_the_producers_settings_stay_with_the_producer():
    found = consumer_settings(KAFKA, {"session.timeout.ms": 6000}, group="g", client_id="g/0")
    assert found["bootstrap.servers"] == "localhost:9092"
    assert "linger.ms" not in found
    assert found["isolation.level"] == "read_committed"
    assert found["enable.auto.commit"] == "false"
    assert found["auto.offset.reset"] == "earliest"
    assert (found["group.id"], found["client.id"]) == ("g", "g/0")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable.auto.commit": True}, "enable.auto.commit"),
        ({"isolation.level": "read_uncommitted"}, "read_committed"),
        ({"group.id": "other"}, "group.id"),
        ({"client.id": "other"}, "client.id"),
        ({"group.instance.id": "static"}, "group.instance.id"),
    ],
)
def test_settings_that_break_the_promise_are_refused(given, words):
    with pytest.raises(ConfigurationError, match=words):
        consumer_settings(KAFKA, given, group="g", client_id="g/0")


@pytest.mark.parametrize("given", [{"enable.auto.commit": False}, {"isolation.level": "READ_COMMITTED"}])
def test_settings_that_say_what_is_so_are_allowed(given):
    consumer_settings(KAFKA, given, group="g", client_id="g/0")


@pytest.mark.parametrize(
    ("settings", "incremental"),
    [
        ({}, False),
        ({"partition.assignment.strategy": "range,roundrobin"}, False),
        ({"partition.assignment.strategy": "cooperative-sticky"}, True),
        ({"group.protocol": "classic"}, False),
        ({"group.protocol": "consumer"}, True),
    ],
)
def test_the_protocol_of_rebalances_is_known_from_the_settings(settings, incremental):
    assert is_incremental(settings) is incremental


@pytest.mark.parametrize(
    "wrong",
    [
        {"member": "a/b"},
        {"member": ""},
        {"topics": "input"},
        {"topics": []},
        {"max_messages": 0},
        {"workers": 0},
        {"attempts": 0},
        {"linger_s": -1.0},
        {"offsets": "zookeeper"},
        {"writer": {"max_lanes": 2}},
        {"writer": {"database": "sqlite://"}},
        {"writer": {"outbox": "always"}},
        {"deserializers": {"values": print}},
        {"kafka": {}},
    ],
)
def test_arguments_that_cannot_work_are_refused(wrong):
    arguments = {"member": "0", "topics": ["input"], "kafka": KAFKA, **wrong}
    with pytest.raises(ConfigurationError):
        ExactlyOnceConsumer("g", handler=print, database="sqlite://", **arguments)


@pytest.mark.parametrize(
    "given", [{"writer": {"outbox": "fallback"}}, {"writer": {"outbox": "always"}, "offsets": "database"}]
)
def test_messages_may_wait_where_the_offsets_need_no_transaction_of_kafkas(given):
    ExactlyOnceConsumer("g", "0", topics=["input"], handler=print, kafka=KAFKA, database="sqlite://", **given)
