"""The longest transaction timeout, on a broker that allows it: librdkafka's arithmetic overflows there with its own settings."""

import threading

import pytest
from confluent_kafka import Producer
from harness.patience import patient

from dualwrite.clock import Deadline
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.engine import GREATEST_TIMEOUT_MS
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.testing.proxy import Api, KafkaProxy

HELD_S = 2.5  # librdkafka looks for requests that have timed out once a second


pytestmark = pytest.mark.usefixtures("through_librdkafka")


@pytest.fixture(scope="module")
def patient_kafka(mortal_kafka):
    mortal_kafka.create_topic("topic")
    with TransactionalProducer(patient(mortal_kafka.client_config()), "warm") as producer:
        producer.init_transactions()
    return mortal_kafka


@pytest.fixture
def proxy(patient_kafka):
    with KafkaProxy(patient_kafka) as proxy:
        yield proxy


def ends_sent_while_the_first_is_held(proxy, commit):
    held = proxy.on(Api.END_TXN).hold_request()
    committing = threading.Thread(target=commit)
    committing.start()
    held.wait()
    waited = threading.Event()
    waited.wait(HELD_S)
    held.release()
    committing.join()
    return [request.api_key for request in proxy.requests].count(Api.END_TXN)


def test_the_greatest_timeout_is_asked_for_and_not_warned_of(patient_kafka, caplog):
    with TransactionalProducer(patient_kafka.client_config(), "longest") as producer:
        producer.init_transactions()
        assert producer.transaction_timeout_ms == GREATEST_TIMEOUT_MS
    with KafkaCoordinator(KafkaConfig.parse(patient_kafka.client_config())) as coordinator:
        view = coordinator.describe(["longest"], Deadline(30))["longest"]
    assert view.timeout_ms == GREATEST_TIMEOUT_MS
    assert "transaction.max.timeout.ms" not in caplog.text


def test_an_end_that_is_answered_late_is_sent_once(proxy):
    settings = {"retry.backoff.ms": 2000, "retry.backoff.max.ms": 2000}  # 0.8 x 2 s: shorter than the answer is held
    with TransactionalProducer({**proxy.client_config(), **settings}, "patient") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce("topic", b"x")
        producer.prepare_transaction()
        assert ends_sent_while_the_first_is_held(proxy, producer.commit_transaction) == 1
        assert producer.doubtful


def test_librdkafka_left_to_itself_sends_it_again(proxy):
    settings = {"transactional.id": "hasty", "transaction.timeout.ms": GREATEST_TIMEOUT_MS, "log_level": 0}
    producer = Producer({**proxy.client_config(), **settings})
    producer.init_transactions(120)
    producer.begin_transaction()
    producer.produce("topic", b"x")
    assert producer.flush(120) == 0
    assert ends_sent_while_the_first_is_held(proxy, lambda: producer.commit_transaction(120)) > 1
