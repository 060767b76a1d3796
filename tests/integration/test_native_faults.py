"""The native engine when brokers are slow, speak garbage, move, or change: what is sent again, and what costs the producer."""

import threading
from contextlib import closing

import pytest
from confluent_kafka.admin import AdminClient
from harness.orders import on_postgresql, write
from harness.patience import PATIENCE_S, wait_until
from harness.spoiling import SPOILS, SpoilingProxy

from dualwrite import DualWriter, WriterLimits
from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.kafka.abandoned import Completion
from dualwrite.kafka.brokers import Connections
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.native import producer as instance
from dualwrite.kafka.native.coordination import CoordinatorRequests
from dualwrite.kafka.native.sender import Sender
from dualwrite.kafka.producer import LaneProducer, TransactionalProducer
from dualwrite.protocol.lives import ProducerState
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import EmbeddedKafka
from dualwrite.testing.checker import read_committed
from dualwrite.testing.proxy import Api, KafkaProxy


@pytest.fixture
def producer_engine():
    return "native"


@pytest.fixture
def values(kafka, dualwrite_topic):
    return lambda: [record.value for record in read_committed(kafka, dualwrite_topic)]


def commit_one(producer, topic, value):
    producer.begin_transaction()
    producer.produce(topic, value, partition=0)
    producer.commit_transaction()


@pytest.fixture
def spoiling(dualwrite_kafka):
    with SpoilingProxy(dualwrite_kafka) as proxy:
        yield proxy


@pytest.fixture
def spoiled(make_producer, spoiling):
    """A producer behind a proxy that spoils answers, which gives a request up soon."""
    return make_producer({**spoiling.client_config(), "socket.timeout.ms": 1500}, call_timeout_s=20)


REPEATED = [Api.METADATA, Api.PRODUCE, Api.END_TXN]


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_request_whose_answer_is_spoiled_is_sent_again(spoiled, spoiling, spoil, dualwrite_topic, values):
    spoiled.init_transactions()
    spoiling.spoils.update(dict.fromkeys(REPEATED, SPOILS[spoil]))
    commit_one(spoiled, dualwrite_topic, b"1")
    assert not spoiling.spoils
    commit_one(spoiled, dualwrite_topic, b"2")
    assert values() == [b"1", b"2"]


@pytest.mark.parametrize("spoil", SPOILS)
def test_an_init_whose_answer_is_spoiled_costs_the_producer(spoiled, spoiling, spoil, make_producer, dualwrite_topic):
    spoiling.spoils[Api.INIT_PRODUCER_ID] = SPOILS[spoil]
    with pytest.raises(Unavailable):
        spoiled.init_transactions()
    assert spoiled.doubtful
    successor = make_producer()
    successor.init_transactions()
    commit_one(successor, dualwrite_topic, b"1")


def late(held):
    """Releases what a rule holds a while after it has taken it."""

    def release():
        held.wait()
        threading.Timer(1.5, held.release).start()

    threading.Thread(target=release).start()


@pytest.mark.parametrize("api", [Api.PRODUCE, Api.END_TXN, Api.INIT_PRODUCER_ID])
def test_a_broker_that_answers_slowly_costs_nothing(make_producer, dualwrite_kafka, dualwrite_topic, values, api):
    """Longer than a producer of librdkafka is kept."""
    with KafkaProxy(dualwrite_kafka) as proxy:
        producer = make_producer(proxy.client_config())
        late(proxy.on(api).hold_answer())
        producer.init_transactions()
        for value in (b"1", b"2"):
            commit_one(producer, dualwrite_topic, value)
        assert producer.state is ProducerState.READY
    assert values() == [b"1", b"2"]


def test_a_batch_that_comes_after_its_abort_shows_nowhere(make_producer, dualwrite_kafka, dualwrite_topic, values):
    with KafkaProxy(dualwrite_kafka) as proxy:
        producer = make_producer(proxy.client_config())
        producer.init_transactions()
        commit_one(producer, dualwrite_topic, b"1")
        held = proxy.on(Api.PRODUCE).hold_request()
        producer.begin_transaction()
        producer.produce(dualwrite_topic, b"aborted", partition=0)
        producer.poll()
        held.wait()
        held.cut()
        producer.abort_transaction()
        with pytest.raises(TransactionAborted, match="not known to have ended"):
            producer.begin_transaction()
        assert producer.doubtful, "the copy may come"
        successor = make_producer()
        successor.init_transactions()
        successor.begin_transaction()
        successor.produce(dualwrite_topic, b"2", partition=0)
        held.release()
        held.wait_answered()
        successor.commit_transaction()
    assert values() == [b"1", b"2"]


def test_an_incarnation_ends_long_before_its_epochs_do(make_producer, dualwrite_topic, values, monkeypatch):
    monkeypatch.setattr(instance, "_EPOCHS", 2)
    producer = make_producer()
    producer.init_transactions()
    for value in (b"1", b"2"):
        commit_one(producer, dualwrite_topic, value)
    assert producer.doubtful, "its epochs are nearly used up"
    with pytest.raises(IllegalStateError, match="make a new one"):
        producer.begin_transaction()
    assert values() == [b"1", b"2"]


@on_postgresql
def test_a_writer_goes_on_with_another_incarnation_before_its_epochs_end(
    kafka, engine, orders, both, dualwrite_topic, monkeypatch
):
    monkeypatch.setattr(instance, "_EPOCHS", 3)
    with DualWriter(
        "orders", kafka={**kafka, "dualwrite.engine": "native"}, database=engine, limits=WriterLimits(max_lanes=1)
    ) as writer:
        for number in range(10):
            write(writer, dualwrite_topic, orders, number)
    assert both() == (list(range(10)), list(range(10)))
    [row] = SqlStateStore(engine).read(["orders"])
    assert row.incarnation > 2
    assert row.completed is not None


def raise_epoch(kafka, kafka_id, to):
    """Raise the id's epoch by aborts of nothing."""
    with closing(Sender(Connections(KafkaConfig.parse(kafka)), kafka_id)) as sender:
        requests = CoordinatorRequests(sender.brokers, kafka_id)
        ids = requests.init_producer_id(60_000, Deadline(PATIENCE_S)).ids
        while ids[1] < to:
            ids = requests.end(ids, Deadline(PATIENCE_S), committed=False).ids


@pytest.mark.thorough
@pytest.mark.slow
def test_a_producer_passes_the_last_epoch(make_producer, kafka, kafka_id, dualwrite_topic, values, coordinator):
    """Only one whose id was used before comes there: a writer's ids begin at 0, and end at 30,000."""
    raise_epoch(kafka, kafka_id, 32_755)
    producer = make_producer()
    producer.init_transactions()
    ids, numbers = [], [b"%d" % number for number in range(20)]
    for number in numbers:
        producer.begin_transaction()
        producer.produce(dualwrite_topic, number, partition=0)
        state = producer.prepare_transaction()
        ids.append((state.producer_id, state.epoch))
        producer.commit_transaction()
    assert max(epoch for _, epoch in ids) > 32_760
    assert len({producer_id for producer_id, _ in ids}) == 2
    assert len(set(ids)) == len(ids)
    assert values() == numbers


def test_a_transaction_version_that_is_lowered_harms_nobody_and_concerns_the_next_producer(
    mortal_kafka, lowered, kafka_id
):
    kafka = mortal_kafka.client_config()
    topic = mortal_kafka.create_topic(f"lowered-{kafka_id}", 1)
    with closing(KafkaCoordinator(KafkaConfig.parse(kafka))) as coordinator:

        def producer(engine, name=kafka_id):
            return LaneProducer(kafka, name, engine=engine, coordinator=coordinator)

        with producer("native") as running:
            running.init_transactions()
            commit_one(running, topic, b"1")
            running.begin_transaction()
            running.produce(topic, b"2")
            state = running.prepare_transaction()
            lowered(1)
            wait_until(lambda: coordinator.transaction_version(Deadline(30)) == 1)
            running.commit_transaction()
            commit_one(running, topic, b"3")
            with (
                producer("native", "another") as refused,
                pytest.raises(ConfigurationError, match="transaction.version is 1"),
            ):
                refused.init_transactions()
            running.begin_transaction()
            running.produce(topic, b"4")
            left = running.prepare_transaction()
        with producer("librdkafka") as successor:
            successor.init_transactions(keep_prepared_txn=True)
            assert successor.complete_transaction(left) is Completion.COMMITTED
            commit_one(successor, topic, b"5")
    assert left != state
    assert [record.value for record in read_committed(kafka, topic)] == [b"%d" % number for number in range(1, 6)]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_leader_that_moves_in_the_middle_costs_nothing(kafka_id):
    """Killed between two messages, while batches are on their way."""
    with EmbeddedKafka(brokers=3, start_timeout_s=PATIENCE_S) as cluster:
        kafka = cluster.client_config()
        topic = cluster.create_topic(f"moves-{kafka_id}", 6)
        admin = AdminClient({**kafka, "log_level": 0})

        def partitions():
            return admin.list_topics(topic, timeout=60).topics[topic].partitions.values()

        expected = [b"first"]
        with TransactionalProducer(
            {**kafka, "dualwrite.engine": "native"}, kafka_id, call_timeout_s=PATIENCE_S
        ) as producer:
            producer.init_transactions()
            commit_one(producer, topic, b"first")
            for turn in range(3):
                killed = next(iter(partitions())).leader
                producer.begin_transaction()
                numbers = [b"%d %d" % (turn, number) for number in range(600)]
                for number, value in enumerate(numbers):
                    if number == 300:
                        cluster.kill(killed)
                    producer.produce(topic, value, partition=number % 6)
                producer.commit_transaction()
                expected += numbers
                cluster.start(killed)
                wait_until(lambda: all(len(partition.isrs) == 3 for partition in partitions()))
        found = [record.value for record in read_committed(kafka, topic)]
    assert sorted(found) == sorted(expected)
