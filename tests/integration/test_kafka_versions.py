"""Brokers of other versions than those of all other tests: both engines write, and settle what each other's process left."""

import pytest
from harness.engines import ENGINES
from harness.orders import write
from sqlalchemy import select

from dualwrite import DualWriter, failpoints
from dualwrite.testing import EmbeddedKafka, read_committed
from dualwrite.testing.servers.jars import kafka_jars

VERSIONS = ["4.4.0"]
pytestmark = [pytest.mark.kafka, pytest.mark.longest]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("version", VERSIONS)
def test_both_engines_write_and_settle(version, url, engine, orders):
    numbers = []
    assert list(kafka_jars(version=version).glob(f"kafka_*-{version}.jar"))
    with EmbeddedKafka({"transaction.max.timeout.ms": "2147483647"}, version=version) as broker:
        topic = broker.create_topic("orders")
        kafka = broker.client_config()
        for first, (wrote, settles) in enumerate([ENGINES, ENGINES[::-1]]):
            name = f"{wrote}-to-{settles}"
            writer = DualWriter(name, kafka=kafka, database=engine, producer_engine=wrote)
            writer.open()
            write(writer, topic, orders, 10 * first)
            failpoints.arm("write.decided:1:raise")
            with pytest.raises(failpoints.FailpointError):
                write(writer, topic, orders, 10 * first + 1)
            failpoints.arm("")
            with DualWriter(name, kafka=kafka, database=engine, producer_engine=settles) as successor:
                write(successor, topic, orders, 10 * first + 2)
            numbers += [10 * first + number for number in range(3)]
        messages = sorted(int(record.value) for record in read_committed(kafka, topic))
    with engine.connect() as connection:
        assert sorted(connection.execute(select(orders.c.id)).scalars()) == messages == numbers
