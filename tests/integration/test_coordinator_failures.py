"""Coordinator access when the broker dies, hangs or loses an answer: asked again until the deadline, and never guessed."""

import logging
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.patience import wait_until
from harness.transactions import PlainProducer

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.values import EndAnswer, LogProof, TransactionStatus
from dualwrite.testing import Api, KafkaProxy, read_committed


def soon():
    return Deadline(60)


def coordinator_of(config):
    return KafkaCoordinator(KafkaConfig.parse(config))


def status(coordinator, producer, deadline=None):
    return coordinator.describe([producer.kafka_id], deadline or soon())[producer.kafka_id].status


def wait_for(coordinator, producer, wanted):
    wait_until(lambda: status(coordinator, producer) is wanted)


@pytest.fixture
def proxy(dualwrite_kafka):
    with KafkaProxy(dualwrite_kafka) as proxy:
        yield proxy


@pytest.fixture
def through_proxy(proxy):
    with coordinator_of(proxy.client_config()) as coordinator:
        yield coordinator


@pytest.fixture
def prepared(dualwrite_kafka, dualwrite_topic):
    """A producer that has prepared a transaction, and its state."""
    producer = PlainProducer(dualwrite_kafka.client_config())
    producer.write(dualwrite_topic, (0, 1), value=b"x")
    with coordinator_of(dualwrite_kafka.client_config()) as coordinator:
        return producer, producer.state(coordinator)


@pytest.fixture
def nowhere():
    """A port at which nothing answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_connections_like_others_need_no_bootstrap_server(dualwrite_kafka, nowhere, kafka_id):
    with (
        coordinator_of(dualwrite_kafka.client_config()) as first,
        KafkaCoordinator(KafkaConfig.parse({"bootstrap.servers": f"127.0.0.1:{nowhere}"}), like=first) as second,
    ):
        cluster = first.cluster_id(soon())
        assert second.describe([kafka_id], soon())[kafka_id].status is TransactionStatus.NO_SUCH_ID
        assert second.cluster_id(soon()) == cluster


def test_connections_like_others_bootstrap_where_the_brokers_have_moved(dualwrite_kafka, nowhere, kafka_id):
    config = KafkaConfig.parse(dualwrite_kafka.client_config())
    with KafkaCoordinator(config) as first:
        first.cluster_id(soon())
        addresses = first.brokers.addresses
        addresses.brokers = {node: (host, nowhere) for node, (host, _) in addresses.brokers.items()}
        with KafkaCoordinator(config, like=first) as second:
            assert second.describe([kafka_id], soon())[kafka_id].status is TransactionStatus.NO_SUCH_ID


@pytest.mark.parametrize("times", [1, 3])
def test_an_end_whose_answer_is_lost_is_sent_again(proxy, through_proxy, prepared, dualwrite_kafka, times):
    producer, state = prepared
    topic = state.first_offsets[0].topic
    lost = [proxy.on(Api.END_TXN, nth=number + 1).reset_answer() for number in range(times)]
    answers = through_proxy.end({producer.kafka_id: state}, committed=True, deadline=soon())
    assert [len(rule.taken) for rule in lost] == [1] * times
    assert answers[producer.kafka_id] in {EndAnswer.ENDED, EndAnswer.IN_PROGRESS}
    wait_for(through_proxy, producer, TransactionStatus.COMPLETE_COMMIT)
    assert len(read_committed(dualwrite_kafka.client_config(), topic)) == 2


def test_an_end_that_never_arrived_is_sent_again(proxy, through_proxy, prepared):
    producer, state = prepared
    lost = proxy.on(Api.END_TXN, nth=1).reset_request()
    assert through_proxy.end({producer.kafka_id: state}, committed=True, deadline=soon()) == {
        producer.kafka_id: EndAnswer.ENDED
    }
    assert len(lost.taken) == 1


@pytest.mark.parametrize("lost", [Api.DESCRIBE_TRANSACTIONS, Api.FIND_COORDINATOR, Api.METADATA])
def test_a_question_whose_answer_is_lost_is_asked_again(proxy, through_proxy, prepared, lost):
    producer, _ = prepared
    rule = proxy.on(lost, nth=1).reset_answer()
    assert status(through_proxy, producer) is TransactionStatus.ONGOING
    assert len(rule.taken) == 1


@pytest.mark.parametrize("lost", [Api.DESCRIBE_PRODUCERS, Api.METADATA])
def test_open_offsets_survive_a_lost_connection(proxy, through_proxy, prepared, lost):
    producer, state = prepared
    rule = proxy.on(lost, nth=1).reset_answer()
    assert through_proxy.open_offsets([state], soon()) == [producer.first_offsets]
    assert len(rule.taken) == 1


def test_a_proof_survives_a_lost_connection(proxy, through_proxy, prepared):
    producer, state = prepared
    producer.client.commit_transaction(120)
    rule = proxy.on(Api.FETCH, nth=1).reset_answer()
    assert through_proxy.prove([state], soon()) == [LogProof.COMMITTED]
    assert len(rule.taken) == 1


def test_retiring_survives_a_lost_answer(proxy, through_proxy, prepared):
    producer, _ = prepared
    rule = proxy.on(Api.INIT_PRODUCER_ID, nth=1).reset_answer()
    through_proxy.retire([producer.kafka_id], soon())
    assert len(rule.taken) == 1
    assert status(through_proxy, producer) is TransactionStatus.EMPTY


@pytest.mark.parametrize(
    ("held", "ask"),
    [
        (Api.DESCRIBE_TRANSACTIONS, lambda c, kafka_id, _, deadline: c.describe([kafka_id], deadline)),
        (Api.DESCRIBE_PRODUCERS, lambda c, _, state, deadline: c.open_offsets([state], deadline)),
        (Api.FETCH, lambda c, _, state, deadline: c.prove([state], deadline)),
        (
            Api.END_TXN,
            lambda c, kafka_id, state, deadline: c.end({kafka_id: state}, committed=False, deadline=deadline),
        ),
        (Api.INIT_PRODUCER_ID, lambda c, kafka_id, _, deadline: c.retire([kafka_id], deadline)),
    ],
    ids=["describe", "open offsets", "prove", "end", "retire"],
)
def test_no_answer_until_the_deadline_is_no_answer(proxy, through_proxy, prepared, held, ask):
    producer, state = prepared
    assert through_proxy.cluster_id(soon())
    rule = proxy.on(held).hold_answer()
    much_later = Deadline(15)
    with pytest.raises(Unavailable):
        ask(through_proxy, producer.kafka_id, state, Deadline(0.5))
    assert not much_later.expired
    assert rule.taken
    rule.release()
    ask(through_proxy, producer.kafka_id, state, soon())


def test_one_caller_waits_for_no_other_callers_answer_nor_ends_its_wait(proxy, through_proxy, prepared):
    producer, _ = prepared
    assert through_proxy.cluster_id(soon())
    rule = proxy.on(Api.DESCRIBE_TRANSACTIONS, nth=1).hold_answer()
    with ThreadPoolExecutor(1) as threads:
        patient = threads.submit(status, through_proxy, producer)
        rule.wait()
        assert status(through_proxy, producer) is TransactionStatus.ONGOING
        proxy.on(Api.DESCRIBE_TRANSACTIONS).hold_answer()
        with pytest.raises(Unavailable):
            status(through_proxy, producer, Deadline(0.2))
        assert not patient.done()
        rule.release()
        assert patient.result() is TransactionStatus.ONGOING


def test_a_broker_that_hangs_is_unavailable_and_found_again(mortal_kafka):
    with coordinator_of(mortal_kafka.client_config()) as coordinator:
        found = coordinator.cluster_id(soon())
        mortal_kafka.suspend()
        with pytest.raises(Unavailable):
            coordinator.cluster_id(Deadline(0.5))
        mortal_kafka.resume()
        assert coordinator.cluster_id(soon()) == found


def test_a_broker_that_is_killed_is_unavailable_and_waited_for(mortal_kafka):
    topic = mortal_kafka.create_topic("restarted", 2)
    producer = PlainProducer(mortal_kafka.client_config())
    producer.write(topic, (0, 1))
    with coordinator_of(mortal_kafka.client_config()) as coordinator:
        state = producer.state(coordinator)
        mortal_kafka.kill()
        with pytest.raises(Unavailable) as caught:
            coordinator.describe(["any"], Deadline(0.5))
        assert "bootstrap.servers" in str(caught.value)
        with ThreadPoolExecutor(4) as threads:
            answers = [
                threads.submit(status, coordinator, producer),
                threads.submit(coordinator.open_offsets, [state], soon()),
                threads.submit(coordinator.prove, [state], soon()),
                threads.submit(coordinator.list_ids, producer.kafka_id, soon()),
            ]
            mortal_kafka.start()
            seen, offsets, proof, ids = (answer.result() for answer in answers)
        assert seen is TransactionStatus.ONGOING
        assert offsets == [producer.first_offsets]
        assert proof == [LogProof.OPEN]
        assert ids == [producer.kafka_id]
        assert coordinator.end({producer.kafka_id: state}, committed=True, deadline=soon()) == {
            producer.kafka_id: EndAnswer.ENDED
        }


def test_an_address_where_nobody_listens_is_unavailable(caplog):
    caplog.set_level(logging.INFO)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        config = {"bootstrap.servers": f"127.0.0.1:{free.getsockname()[1]},no-such-host.invalid:1"}
        with coordinator_of(config) as coordinator, pytest.raises(Unavailable) as caught:
            coordinator.cluster_id(Deadline(0.5))
    assert "bootstrap.servers" in str(caught.value)
    assert not [record for record in caplog.records if record.name.startswith("kafka")], "kafka-python tries by itself"


def test_a_server_that_is_no_broker_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = {"bootstrap.servers": f"127.0.0.1:{server.getsockname()[1]}"}
        with coordinator_of(config) as coordinator, pytest.raises(Unavailable):
            coordinator.cluster_id(Deadline(0.5))


def test_a_login_at_a_listener_that_knows_none_is_refused(dualwrite_kafka):
    config = {
        **dualwrite_kafka.client_config(),
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "ann",
        "sasl.password": secrets.token_hex(8),
    }
    with coordinator_of(config) as coordinator, pytest.raises(ConfigurationError) as caught:
        coordinator.cluster_id(soon())
    assert config["sasl.password"] not in str(caught.value)
