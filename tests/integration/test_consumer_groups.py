"""Consume, transform, write to both: a member of a consumer group dies inside its block, and another one takes over."""

import os
import signal
import subprocess
import sys
import time

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from harness.engines import ENGINES

from dualwrite import DualWriter, recover
from dualwrite.operations import blocking_transactions

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)

MEMBER = """\
import sys
from confluent_kafka import Consumer, TopicPartition
from dualwrite import DualWriter

servers, url, group, topic, engine = sys.argv[1:]
consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "session.timeout.ms": 8000, "enable.auto.commit": False,
                     "auto.offset.reset": "earliest"})
consumer.subscribe([topic])
while (message := consumer.poll(1.0)) is None or message.error() is not None:
    pass
settings = {"kafka": {"bootstrap.servers": servers, "dualwrite.engine": engine}, "database": url}
with DualWriter(f"{group}-0", **settings) as writer, writer.transaction() as tx:
    tx.produce(topic, value="receipt")
    tx.send_offsets_to_transaction([TopicPartition(topic, 0, message.offset() + 1)], consumer.consumer_group_metadata())
"""


def expect_a_warning_of_a_writer(kafka, engine, topic, group, caplog, producer_engine):
    """It writes to the same partitions, and warns of the dead member's transaction once."""

    def warnings():
        return [line for line in caplog.messages if "consumers are held back" in line]

    deadline = time.monotonic() + 120
    with DualWriter(f"other-{topic}", kafka={**kafka, "dualwrite.engine": producer_engine}, database=engine) as writer:
        while not warnings():
            assert time.monotonic() < deadline
            for partition in (0, 1):
                with writer.transaction() as tx:
                    tx.produce(topic, value="other", partition=partition)
        for _ in range(3):
            with writer.transaction() as tx:
                tx.produce(topic, value="other")
    [warning] = warnings()
    assert f"held back in {topic}[" in warning
    assert f"run `dualwrite recover {group}-0`" in warning
    assert "open since 2" in warning


@pytest.mark.parametrize("producer_engine", ENGINES)
def test_what_a_dead_member_has_left_is_settled_when_its_partitions_are_assigned(
    kafka, url, engine, dualwrite_topic, caplog, producer_engine
):
    servers, group = kafka["bootstrap.servers"], f"group-{dualwrite_topic}"
    producer = Producer(kafka)
    producer.produce(dualwrite_topic, value="payment", partition=0)
    producer.flush()
    dead = subprocess.run(
        [sys.executable, "-c", MEMBER, servers, url, group, dualwrite_topic, producer_engine],
        env={**os.environ, "DUALWRITE_FAILPOINT": "write.prepared"},
        check=False,
    )
    assert dead.returncode == -signal.SIGKILL
    expect_a_warning_of_a_writer(kafka, engine, dualwrite_topic, group, caplog, producer_engine)
    found = blocking_transactions(kafka, topics=[dualwrite_topic], group=group)
    found = [one for one in found if one.kafka_id.startswith(group)]
    assert {one.topic for one in found} == {dualwrite_topic, "__consumer_offsets"}
    assert {one.writer for one in found} == {f"{group}-0"}

    stalled = []

    def assigned(consumer, partitions):
        [partition] = [one for one in partitions if one.partition == 0]
        with pytest.raises(KafkaException):
            consumer.committed([partition], timeout=0.5)
        stalled.append(partition)
        # What the group has taken from a dead member is as old as the session's time-out; living members are younger.
        report = recover(prefix=f"{group}-", kafka=kafka, database=engine, open_for_s=1.5)
        assert report.settled
        found = blocking_transactions(kafka, topics=[dualwrite_topic], group=group, open_for_s=0)
        # The consumed offsets of other tests' groups are in the same partition.
        assert not [one for one in found if one.kafka_id.startswith(group)]

    settings = {
        "group.id": group,
        "session.timeout.ms": 2000,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
    }
    consumer = Consumer({"bootstrap.servers": servers, **settings})
    consumer.subscribe([dualwrite_topic], on_assign=assigned)
    try:
        while (message := consumer.poll(1.0)) is None or message.error() is not None or message.partition() != 0:
            pass
        assert message.value() == b"payment"
        assert stalled
        [committed] = consumer.committed([TopicPartition(dualwrite_topic, 0)], timeout=60)
        assert committed.offset < 0
    finally:
        consumer.close()
