"""The proxy in front of the embedded broker: each way in which it can misbehave, seen from a real client."""

from __future__ import annotations

import gc
import select
import socket
from contextlib import closing
from threading import Thread

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from harness.patience import PATIENCE_S
from kafka.admin import KafkaAdminClient

from dualwrite.errors import IllegalStateError, Unavailable
from dualwrite.testing import Api, EmbeddedKafka, KafkaProxy, read_committed

# As short as librdkafka goes without giving up on a slow machine: what is dropped is sent again after this.
IMPATIENT = {
    "socket.timeout.ms": 1000,
    "retry.backoff.ms": 100,
    "log_level": 0,
    "socket.connection.setup.timeout.ms": 5000,
}


@pytest.fixture
def proxy(dualwrite_kafka):
    with KafkaProxy(dualwrite_kafka) as proxy:
        yield proxy


def transactional(config, transactional_id, **more):
    producer = Producer({**config, **IMPATIENT, "transactional.id": transactional_id, **more})
    producer.init_transactions(PATIENCE_S)
    return producer


def begin(producer, topic, *values, partition=0):
    producer.begin_transaction()
    send(producer, topic, *values, partition=partition)


def send(producer, topic, *values, partition=0):
    errors = []
    for value in values:
        producer.produce(topic, value, partition=partition, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(PATIENCE_S) == 0
    assert not any(errors)


def values_in(kafka, topic):
    return [record.value for record in read_committed(kafka.client_config(), topic)]


def state_of(kafka, transactional_id):
    with closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        return admin.describe_transactions([transactional_id])[transactional_id].state


def in_a_thread(call):
    thread = Thread(target=call)
    thread.start()
    return thread


def test_clients_that_come_through_the_proxy_stay_with_it_and_others_go_around(proxy, dualwrite_kafka, dualwrite_topic):
    producer = transactional(proxy.client_config(), "through")
    begin(producer, dualwrite_topic, b"through")
    producer.commit_transaction(PATIENCE_S)
    kinds = [request.api_key for request in proxy.requests]
    assert {Api.METADATA, Api.INIT_PRODUCER_ID, Api.PRODUCE, Api.END_TXN} <= set(kinds)

    assert values_in(dualwrite_kafka, dualwrite_topic) == [b"through"]
    # The broker's own requests and the direct reader's are not seen.
    assert Api.WRITE_TXN_MARKERS not in kinds
    assert Api.FETCH not in [request.api_key for request in proxy.requests]


def test_while_its_end_is_held_a_transaction_stays_ongoing(proxy, dualwrite_kafka, dualwrite_topic):
    producer = transactional(proxy.client_config(), "held", **{"socket.timeout.ms": 30_000})
    begin(producer, dualwrite_topic, b"held")
    held = proxy.on(Api.END_TXN).hold_request()
    committing = in_a_thread(lambda: producer.commit_transaction(PATIENCE_S))
    assert held.wait().api_key == Api.END_TXN
    assert state_of(dualwrite_kafka, "held") == "Ongoing"
    held.release()
    committing.join()
    assert values_in(dualwrite_kafka, dualwrite_topic) == [b"held"]


def test_when_an_answer_is_dropped_the_client_asks_again_and_says_nothing(proxy, dualwrite_kafka, dualwrite_topic):
    errors = []
    producer = transactional(proxy.client_config(), "dropped answer", error_cb=errors.append)
    begin(producer, dualwrite_topic, b"once")
    dropped = proxy.on(Api.END_TXN).drop_answer()
    producer.commit_transaction(PATIENCE_S)
    dropped.wait_answered()
    ends = [request for request in proxy.requests if request.api_key == Api.END_TXN]
    assert len(ends) == 2
    assert dropped.taken == ends[:1]
    assert values_in(dualwrite_kafka, dualwrite_topic) == [b"once"]
    assert errors == []


def test_a_dropped_request_never_arrives(proxy, dualwrite_kafka, dualwrite_topic):
    producer = transactional(proxy.client_config(), "dropped request", **{"socket.timeout.ms": 30_000})
    begin(producer, dualwrite_topic, b"waiting")
    dropped = proxy.on(Api.END_TXN, nth=None).drop_request()
    with pytest.raises(KafkaException):
        producer.commit_transaction(1)
    assert len(dropped.taken) == 1
    assert state_of(dualwrite_kafka, "dropped request") == "Ongoing"
    with pytest.raises(Unavailable, match="DROP_REQUEST, seen=1, taken=1, answers=0"):
        dropped.wait_answered(timeout_s=0.1)


def test_a_held_first_copy_that_arrives_late_ends_the_next_transaction(proxy, dualwrite_kafka, dualwrite_topic):
    # KAFKA-17754: why this library throws an instance away after any call that may have been sent twice.
    producer = transactional(proxy.client_config(), "late")
    begin(producer, dualwrite_topic, b"first")
    held = proxy.on(Api.END_TXN).hold_request()
    producer.commit_transaction(PATIENCE_S)  # by the second copy, over another connection
    begin(producer, dualwrite_topic, b"half")
    held.release()
    held.wait_answered()
    assert values_in(dualwrite_kafka, dualwrite_topic) == [b"first", b"half"]


def test_a_duplicate_is_answered_to_nobody(proxy, dualwrite_kafka, dualwrite_topic):
    producer = transactional(proxy.client_config(), "twice")
    begin(producer, dualwrite_topic, b"first")
    twice = proxy.on(Api.END_TXN).duplicate()
    producer.commit_transaction(PATIENCE_S)
    assert values_in(dualwrite_kafka, dualwrite_topic) == [b"first"]
    begin(producer, dualwrite_topic, b"half")
    twice.release()
    twice.wait_answered(2)
    assert values_in(dualwrite_kafka, dualwrite_topic) == [b"first", b"half"]
    assert len([request for request in proxy.requests if request.api_key == Api.END_TXN]) == 1


@pytest.mark.parametrize("misdeed", ["reset_request", "reset_answer", "drop_request", "drop_answer"])
def test_an_idempotent_producer_survives_what_happens_to_a_produce(proxy, dualwrite_kafka, dualwrite_topic, misdeed):
    producer = Producer({**proxy.client_config(), **IMPATIENT, "enable.idempotence": True})
    rule = getattr(proxy.on(Api.PRODUCE, containing=b"once"), misdeed)()
    send(producer, dualwrite_topic, b"once")
    assert len(rule.taken) == 1
    assert len([request for request in proxy.requests if request.api_key == Api.PRODUCE]) == 2
    assert values_in(dualwrite_kafka, dualwrite_topic) == [b"once"]


def test_a_held_answer_is_done_and_not_heard_of(proxy, dualwrite_kafka, dualwrite_topic):
    producer = transactional(proxy.client_config(), "held answer", **{"socket.timeout.ms": 30_000})
    begin(producer, dualwrite_topic, b"done")
    held = proxy.on(Api.END_TXN).hold_answer()
    committing = in_a_thread(lambda: producer.commit_transaction(PATIENCE_S))
    held.wait_answered()
    assert values_in(dualwrite_kafka, dualwrite_topic) == [b"done"]
    assert committing.is_alive()
    held.release()
    committing.join()


def test_what_is_discarded_is_never_sent(proxy, dualwrite_kafka, dualwrite_topic):
    producer = transactional(proxy.client_config(), "discarded")
    begin(producer, dualwrite_topic, b"waiting")
    held = proxy.on(Api.END_TXN).hold_request()
    with pytest.raises(KafkaException):
        producer.commit_transaction(0.5)
    held.discard()
    producer.commit_transaction(PATIENCE_S)  # librdkafka asks again after its socket timeout
    assert len([request for request in proxy.requests if request.api_key == Api.END_TXN]) == 2
    assert values_in(dualwrite_kafka, dualwrite_topic) == [b"waiting"]
    with pytest.raises(Unavailable):
        held.wait_answered(timeout_s=0.1)


def test_a_rule_counts_only_what_matches_it(proxy, dualwrite_topic):
    second = proxy.on(Api.INIT_PRODUCER_ID, nth=2, client_id="counted", containing=b"b-").watch()
    for name in ("b-1", "a-1", "b-2", "b-3"):
        transactional(proxy.client_config(), name, **{"client.id": "counted"})
        transactional(proxy.client_config(), name, **{"client.id": "other"})
    everything = [request for request in proxy.requests if request.api_key == Api.INIT_PRODUCER_ID]
    assert len(everything) == 8
    of_counted = [request for request in everything if request.client_id == "counted"]
    assert second.taken == [of_counted[2]]


def test_after_a_cut_clients_come_back(proxy):
    admin = AdminClient({**proxy.client_config(), "log_level": 0})
    admin.list_topics(timeout=120)
    before = len(proxy.requests)
    proxy.cut()
    admin.list_topics(timeout=120)
    # A new connection begins with ApiVersions.
    assert 18 in [request.api_key for request in proxy.requests[before:]]


@pytest.mark.parametrize("leaving", ["before the proxy closes", "after it has closed"])
def test_nothing_stays_open_whatever_moment_the_proxy_closes_at(dualwrite_kafka, leaving):
    """Each connection may be just accepted, half made, or about to end: a socket left open is a ResourceWarning."""
    for count in range(1, 120):
        with KafkaProxy(dualwrite_kafka) as proxy:
            clients = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(1 + count % 4)]
            select.select(clients, [], [], count % 30 / 10_000)  # so long that the moment differs
            if leaving == "before the proxy closes":
                for client in clients:
                    client.close()
        for client in clients:
            client.close()
    gc.collect()


def test_the_proxy_outlives_a_killed_broker(mortal_kafka):
    kafka = mortal_kafka
    with KafkaProxy(kafka) as proxy:
        topic = kafka.create_topic("behind")
        producer = Producer({**proxy.client_config(), "log_level": 0, "reconnect.backoff.max.ms": 500})
        send(producer, topic, b"before")
        kafka.kill()
        producer.produce(topic, b"meanwhile")
        kafka.start()
        assert producer.flush(PATIENCE_S) == 0
        assert values_in(kafka, topic) == [b"before", b"meanwhile"]


def test_clients_with_a_password_can_go_through(guarded_kafka):
    with KafkaProxy(guarded_kafka) as proxy:
        topic = guarded_kafka.create_topic("through")
        guarded_kafka.allow("mail", "write", "topic", topic)
        send(Producer(proxy.client_config("mail")), topic, b"through")
        assert Api.PRODUCE in {request.api_key for request in proxy.requests}


def test_a_proxy_needs_a_broker_of_ours_and_its_with_block(dualwrite_kafka, monkeypatch):
    with pytest.raises(IllegalStateError, match="with block"):
        KafkaProxy(dualwrite_kafka).client_config()
    monkeypatch.setenv("DUALWRITE_TEST_KAFKA", dualwrite_kafka.bootstrap_servers)
    with pytest.raises(IllegalStateError, match="is not ours"):
        KafkaProxy(EmbeddedKafka())
