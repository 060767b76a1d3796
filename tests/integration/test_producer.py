"""A producer's librdkafka as its user sees it: its lines in the log, and the user's error callback."""

import logging

import pytest
from confluent_kafka import KafkaError


@pytest.fixture
def producer_engine():
    return "librdkafka"


def test_every_line_of_the_log_names_the_transactional_id(ready, dualwrite_topic, caplog, kafka_id):
    caplog.set_level(logging.DEBUG, "dualwrite.kafka.producer")
    producer = ready({"debug": "eos"})
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"x")
    producer.commit_transaction()
    producer.poll()
    lines = [record.getMessage() for record in caplog.records if record.name == "dualwrite.kafka.producer"]
    assert any("TXNAPI" in line for line in lines), "librdkafka's own lines are routed, too"
    assert all(line.startswith(kafka_id) for line in lines)


def test_a_users_own_error_callback_is_called(ready):
    errors = []
    producer = ready({"error_cb": errors.append})
    producer._instance._handle._note_client_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    assert [error.code() for error in errors] == [KafkaError._ALL_BROKERS_DOWN]
