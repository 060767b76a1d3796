"""librdkafka's settings: it must never be left to its own time-outs."""

import pytest
from confluent_kafka import Producer

from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.engine import GREATEST_TIMEOUT_MS
from dualwrite.kafka.librdkafka.handle import producer_settings

NOWHERE = {"bootstrap.servers": "127.0.0.1:1"}


def settings(timeout_ms=GREATEST_TIMEOUT_MS, *, bulk=False, **user):
    config = KafkaConfig.parse({**NOWHERE, **{key.replace("_", "."): value for key, value in user.items()}})
    return producer_settings(config, "tx", timeout_ms, bulk=bulk)


@pytest.mark.parametrize("timeout_ms", [1000, 60_000, 900_000, GREATEST_TIMEOUT_MS])
def test_requests_and_messages_time_out_long_before_librdkafkas_arithmetic_overflows(timeout_ms):
    found = settings(timeout_ms)
    assert found["transaction.timeout.ms"] == timeout_ms
    for key in ("socket.timeout.ms", "message.timeout.ms"):
        assert found[key] <= timeout_ms
        assert found[key] * 1000 < 2**31 - 1


def test_the_users_own_values_stay():
    found = settings(socket_timeout_ms=5000, delivery_timeout_ms=7000, linger_ms=3, compression_type="lz4")
    assert (found["socket.timeout.ms"], found["delivery.timeout.ms"], found["linger.ms"]) == (5000, 7000, 3)
    assert "message.timeout.ms" not in found
    assert found["compression.type"] == "lz4"


def test_small_transactions_do_not_linger_and_bulk_does():
    assert settings()["linger.ms"] == 0
    assert "linger.ms" not in settings(bulk=True)
    assert settings(bulk=True)["delivery.report.only.error"] is True


@pytest.mark.parametrize("timeout_ms", [1000, GREATEST_TIMEOUT_MS])
@pytest.mark.parametrize("bulk", [False, True])
def test_librdkafka_takes_the_settings(timeout_ms, bulk):
    Producer({**settings(timeout_ms, bulk=bulk), "log_level": 0})
