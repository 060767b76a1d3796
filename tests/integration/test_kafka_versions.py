"""Brokers of other versions than the one of all other tests: the engines write, and settle what each other's process left.

`make brokers` runs them all, and more tests on some.
"""

import secrets
from contextlib import closing

import pytest
from confluent_kafka import Consumer, TopicPartition
from harness.engines import ENGINES
from harness.native_requests import Producer
from harness.orders import write
from harness.patience import PATIENCE_S
from sqlalchemy import select

from dualwrite import DualWriter, failpoints
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.native.coordination import Group, Offset
from dualwrite.kafka.native.produce_state import Code
from dualwrite.testing import EmbeddedKafka, read_committed
from dualwrite.testing.proxy import Api, KafkaProxy
from dualwrite.testing.servers.embedded import kafka_jars

IN_EVERY_RUN = {"3.0.2", "4.0.2"}
"""The oldest for each engine."""
LIBRDKAFKAS = ("3.0.2", "3.1.2", "3.2.3", "3.3.2", "3.4.1", "3.5.2", "3.6.2", "3.7.2", "3.8.1", "3.9.2")
BOTH_ENGINES = ("4.0.2", "4.1.2", "4.2.2", "4.3.1")
pytestmark = [pytest.mark.kafka, pytest.mark.longest]


def on(*versions):
    """Runs a test on a broker of each of these versions; on some of them only in a thorough run."""
    marks = {version: () if version in IN_EVERY_RUN else pytest.mark.thorough for version in versions}
    params = [pytest.param(version, marks=mark) for version, mark in marks.items()]
    return pytest.mark.parametrize("broker", params, indirect=True)


@pytest.fixture(scope="module")
def broker(request):
    assert list(kafka_jars(version=request.param).glob(f"kafka_*-{request.param}.jar"))
    with EmbeddedKafka({"transaction.max.timeout.ms": "2147483647"}, version=request.param) as started:
        yield started


def crash_and_settle(broker, changes, engine, orders):
    """Write, die after the decision, and settle with another engine, for each pair of engines; then compare both sides."""
    numbers = []
    topic = broker.create_topic("orders")
    kafka = broker.client_config()
    for first, (wrote, settles) in enumerate(changes):
        name = f"{wrote}-to-{settles}"
        writer = DualWriter(name, kafka={**kafka, "dualwrite.engine": wrote}, database=engine)
        writer.open()
        write(writer, topic, orders, 10 * first)
        failpoints.arm("write.decided:1:raise")
        with pytest.raises(failpoints.FailpointError):
            write(writer, topic, orders, 10 * first + 1)
        failpoints.arm("")
        with DualWriter(name, kafka={**kafka, "dualwrite.engine": settles}, database=engine) as successor:
            write(successor, topic, orders, 10 * first + 2)
        writer.close()  # it would go on asking this broker, once it is gone
        numbers += [10 * first + number for number in range(3)]
    messages = sorted(int(record.value) for record in read_committed(kafka, topic))
    with engine.connect() as connection:
        assert sorted(connection.execute(select(orders.c.id)).scalars()) == messages == numbers


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@on(*BOTH_ENGINES)
def test_both_engines_write_and_settle(broker, url, engine, orders):
    crash_and_settle(broker, [ENGINES, ENGINES[::-1]], engine, orders)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@on(*LIBRDKAFKAS)
def test_before_4_0_librdkafka_writes_and_settles_and_is_chosen_by_itself(broker, url, engine, orders):
    kafka = broker.client_config()
    with pytest.raises(ConfigurationError, match="native transactions need 2"):
        DualWriter("native", kafka={**kafka, "dualwrite.engine": "native"}, database=engine).open()
    crash_and_settle(broker, [("librdkafka", "auto"), ("auto", "librdkafka")], engine, orders)


@on(*BOTH_ENGINES)
def test_offsets_are_committed_by_the_topics_names_which_are_all_that_these_brokers_know(broker):
    topic, group = broker.create_topic(f"t-{secrets.token_hex(4)}"), f"g-{secrets.token_hex(4)}"
    with KafkaProxy(broker) as proxy, closing(Producer(proxy.client_config())) as producer:
        producer.init()
        assert producer.commit_offsets(Group(group), {(topic, 0): Offset(7)}) == Code.NONE
        assert producer.end() == Code.NONE
        sent = {one.api_version for one in proxy.requests if one.api_key == Api.TXN_OFFSET_COMMIT}
    assert sent == {5}
    with closing(Consumer({**broker.client_config(), "group.id": group})) as consumer:
        [committed] = consumer.committed([TopicPartition(topic, 0)], timeout=PATIENCE_S)
    assert committed.offset == 7
