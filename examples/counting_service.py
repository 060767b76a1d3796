"""A consumer service with state: flights per airline, counted by a group whose members die; no flight is counted twice.

Each partition's counts are in a state store, which commits with the partition's messages and offsets. The first member is
killed when its transaction has committed, and its store has not; the second one takes the partitions over, and builds its
stores from the changelog.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence

from confluent_kafka import Message, Producer
from flights import read_flights
from sqlalchemy import create_engine

from dualwrite import ExactlyOnceConsumer, Transaction, migrations
from dualwrite.state import PartitionStores
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed

FLIGHTS, PARTITIONS = 3000, 2


def serve(member: str, bootstrap_servers: str, url: str, topic: str, directory: str) -> None:
    """Run one member of the service, until SIGTERM."""
    kafka = {"bootstrap.servers": bootstrap_servers}
    with PartitionStores(f"{directory}/{member}", kafka=kafka, changelog=f"{topic}-changelog") as stores:

        def handle(tx: Transaction, messages: Sequence[Message]) -> None:
            for message in messages:
                store = stores.of(message)
                airline = message.key() or b""
                number = int(store.get(airline) or b"0") + 1
                store.put(airline, str(number).encode())
                tx.produce(f"{topic}-counts", key=airline, value=str(number))

        consumer = ExactlyOnceConsumer(
            f"{topic}-service",
            member,
            topics=[topic],
            handler=handle,
            kafka=kafka,
            database=url,
            consumer={"session.timeout.ms": 6000},
            state=stores,
            max_messages=200,
        )
        signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
        consumer.run()


def main() -> None:
    """Kill a member between the two commits, let another one continue, and compare the counts with the input."""
    airlines = read_flights().slice(0, FLIGHTS).column("carrier").to_pylist()
    with EmbeddedKafka() as servers, EmbeddedPostgres() as postgres, tempfile.TemporaryDirectory() as directory:
        kafka, url = servers.client_config(), postgres.create_database()
        topic = servers.create_topic(f"flights-{secrets.token_hex(4)}", PARTITIONS)
        counts = servers.create_topic(f"{topic}-counts", 1)
        servers.create_topic(f"{topic}-changelog", PARTITIONS, config={"cleanup.policy": "compact"})
        engine = create_engine(url)
        with engine.connect() as connection:
            migrations.upgrade(connection)
        engine.dispose()
        producer = Producer(kafka)
        for airline in airlines:
            producer.produce(topic, key=airline, value=b"")
        producer.flush()

        command = [sys.executable, __file__]
        given = [kafka["bootstrap.servers"], url, topic, directory]
        killed = subprocess.run(
            [*command, "0", *given], env={**os.environ, "DUALWRITE_FAILPOINT": "state.before_commit:5"}, check=False
        )
        print(f"member 0 was killed: {killed.returncode == -signal.SIGKILL}")
        successor = subprocess.Popen([*command, "1", *given], stderr=subprocess.DEVNULL)
        while len(read_committed(kafka, counts)) < FLIGHTS:
            time.sleep(0.2)
        successor.terminate()
        assert successor.wait() == 0

        last = {record.key: int(record.value or b"0") for record in read_committed(kafka, counts)}
        counted = {(airline or b"").decode(): number for airline, number in last.items()}
        print(f"member 1 has counted on: UA {counted['UA']}, B6 {counted['B6']}, all {sum(counted.values())}")
        print("counts equal input:", counted == Counter(airlines))


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(*sys.argv[1:])
    else:
        main()
