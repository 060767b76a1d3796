"""A process that counts messages by key in a state store, and publishes each count; killed by fail points.

Run as ``python -m harness.counting JOB.json``.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from sqlalchemy import text

from dualwrite import DualWriter, TransactionalProducer
from dualwrite.clock import Deadline
from dualwrite.state import KeyValueStore, ProducerBlocks, StateTask

AT_A_TIME = 5
_NO_COORDINATOR = {
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}
"""A broker's first group has none for a moment."""
TABLE = "CREATE TABLE counted (key text, number integer, PRIMARY KEY (key, number))"


def count(job):
    """Count from where the group stands to the end that the job names."""
    with ExitStack() as stack:
        if job.get("url"):
            blocks = stack.enter_context(DualWriter(job["id"], kafka=job["kafka"], database=job["url"]))
        else:
            producer = stack.enter_context(TransactionalProducer(job["kafka"], job["id"]))
            producer.init_transactions()
            blocks = ProducerBlocks(producer)
        store = stack.enter_context(KeyValueStore(job["directory"], max_memory_bytes=job["memory"]))
        task = StateTask(blocks, store, kafka=job["kafka"], changelog=job["changelog"], partition=0)
        consumer = stack.enter_context(closing(Consumer(settings(job))))
        at = committed_offset(consumer, job["input"])
        consumer.assign([TopicPartition(job["input"], 0, at)])
        while at < job["end"]:
            messages = consumer.consume(min(AT_A_TIME, job["end"] - at), timeout=30)
            with task.transaction() as tx:
                for message in messages:
                    publish(job, tx, message.key(), add_one(store, message.key()))
                at = messages[-1].offset() + 1
                tx.send_offsets_to_transaction(
                    [TopicPartition(job["input"], 0, at)], consumer.consumer_group_metadata()
                )


def committed_offset(consumer, topic):
    """Where the group stands in partition 0."""
    deadline = Deadline(60)
    while True:
        try:
            (stands,) = consumer.committed([TopicPartition(topic, 0)], timeout=60)
        except KafkaException as error:
            if error.args[0].code() not in _NO_COORDINATOR or deadline.expired:
                raise
            time.sleep(0.05)
        else:
            return max(0, stands.offset)


def settings(job):
    return {**job["kafka"], "group.id": job["id"], "enable.auto.commit": False, "isolation.level": "read_committed"}


def add_one(store, key):
    number = int(store.get(key) or 0) + 1
    store.put(key, str(number).encode())
    return number


def publish(job, tx, key, number):
    tx.produce(job["output"], value=str(number), key=key, partition=0)
    if job.get("url"):
        tx.connection.execute(text("INSERT INTO counted VALUES (:k, :n)"), {"k": key.decode(), "n": number})


if __name__ == "__main__":
    count(json.loads(Path(sys.argv[1]).read_text()))
