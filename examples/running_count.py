"""A running count of flights per airline, in a state store: killed in the middle, it resumes where Kafka's commits end.

Each block reads some flights, counts them in the store, publishes the counts, and moves the offsets: all of it in one Kafka
transaction. The first process dies after a transaction has committed, and before its store has: the second one takes what is
missing from the changelog, and counts no flight twice.

Run it without arguments: it starts a Kafka broker of its own, or uses the one that ``DUALWRITE_TEST_KAFKA`` names.
"""

from __future__ import annotations

import multiprocessing
import secrets
import signal
import tempfile
from collections import Counter
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from confluent_kafka import OFFSET_STORED, Consumer, Producer, TopicPartition
from flights import read_flights

from dualwrite import TransactionalProducer, failpoints
from dualwrite.state import KeyValueStore, ProducerBlocks, StateTask
from dualwrite.testing import EmbeddedKafka, read_committed

if TYPE_CHECKING:
    from collections.abc import Iterator

FLIGHTS = 3000
AT_A_TIME = 100


@contextmanager
def reading(kafka: dict[str, str], topic: str) -> Iterator[Consumer]:
    """A consumer of the input, from where the last committed block has moved the offsets."""
    settings = {"group.id": topic, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
    with closing(Consumer({**kafka, **settings})) as consumer:
        consumer.assign([TopicPartition(topic, 0, OFFSET_STORED)])
        yield consumer


def count(kafka: dict[str, str], topic: str, directory: str, die_in_block: int = 0) -> None:
    """Count to the input's end."""
    if die_in_block:
        failpoints.arm(f"state.before_commit:{die_in_block}")
    with (
        TransactionalProducer(kafka, topic) as producer,
        KeyValueStore(directory) as store,
        reading(kafka, topic) as consumer,
    ):
        producer.init_transactions()  # fences the former process, and aborts what it left open
        task = StateTask(ProducerBlocks(producer), store, kafka=kafka, changelog=f"{topic}-changelog", partition=0)
        before = store.committed.offset
        restored = task.restore()
        print(f"the store stands at offset {before}, {restored} records applied", flush=True)
        while messages := consumer.consume(AT_A_TIME, timeout=5):
            with task.transaction() as tx:
                for message in messages:
                    number = int(store.get(message.key()) or b"0") + 1
                    store.put(message.key(), str(number).encode())
                    tx.produce(f"{topic}-counts", key=message.key(), value=str(number))
                next_offset = TopicPartition(topic, 0, messages[-1].offset() + 1)
                tx.send_offsets_to_transaction([next_offset], consumer.consumer_group_metadata())
            if next_offset.offset == FLIGHTS:
                return


def main() -> None:
    """Count in two processes, the first of which is killed; compare the store, the messages and the input."""
    airlines = read_flights().slice(0, FLIGHTS).column("carrier").to_pylist()
    with EmbeddedKafka() as server, tempfile.TemporaryDirectory() as directory:
        topic = server.create_topic(f"flights-{secrets.token_hex(4)}", 1)
        counts = server.create_topic(f"{topic}-counts", 1)
        server.create_topic(f"{topic}-changelog", 1, config={"cleanup.policy": "compact"})
        kafka = server.client_config()
        producer = Producer(kafka)
        for airline in airlines:
            producer.produce(topic, key=airline, value=b"")
        producer.flush()

        fork = multiprocessing.get_context("spawn")
        for die_in_block in (12, 0):
            process = fork.Process(target=count, args=(kafka, topic, directory, die_in_block))
            process.start()
            process.join()
            print("killed" if process.exitcode == -signal.SIGKILL else f"ended with {process.exitcode}")

        with KeyValueStore(directory) as store:
            counted = {airline.decode(): int(number) for airline, number in store.range()}
        published = Counter(record.key for record in read_committed(kafka, counts))
        print(f"UA {counted['UA']}, B6 {counted['B6']}, all {sum(counted.values())}")
        print("store equals input:", counted == Counter(airlines))
        print("messages equal input:", {key.decode(): n for key, n in published.items()} == Counter(airlines))


if __name__ == "__main__":
    main()
