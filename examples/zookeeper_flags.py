"""Settings in ZooKeeper and their announcement in Kafka: a change is on both sides, or on neither.

Run it without arguments: it starts a Kafka broker and a ZooKeeper server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_ZOOKEEPER`` name.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets

from kazoo.client import KazooClient

from dualwrite import DualWriter, TransactionAborted, failpoints, recover
from dualwrite.databases import ZooKeeperDatabase
from dualwrite.testing import EmbeddedKafka, EmbeddedZooKeeper, read_committed


def change(writer: DualWriter, topic: str, path: str, value: str, version: int) -> None:
    """Set a flag that nobody has changed since it was read, and announce it."""
    with writer.transaction() as tx:
        tx.multi.set_data(path, value.encode(), version=version)
        tx.produce(topic, key=path, value=json.dumps({"flag": path, "value": value}))


def change_and_die(kafka: dict[str, str], hosts: str, root: str, topic: str, path: str) -> None:
    """A process that is killed when ZooKeeper has decided and Kafka has not heard of it."""
    failpoints.arm("write.decided")
    with ZooKeeperDatabase(hosts, root=root) as database, DualWriter("flags", kafka=kafka, database=database) as writer:
        change(writer, topic, path, "red", version=1)


def main() -> None:
    """Change a flag, lose a race for it, die on the way, recover, and look at both sides."""
    with EmbeddedKafka() as broker, EmbeddedZooKeeper() as zookeeper:
        kafka, name = broker.client_config(), f"flags-{secrets.token_hex(4)}"
        topic = broker.create_topic(name)
        client = KazooClient(zookeeper.hosts)
        client.start()
        path, root = f"/{name}/colour", f"/{name}/kafka_transaction_state"
        client.create(path, b"white", makepath=True)

        with ZooKeeperDatabase(zookeeper.hosts, root=root) as database:
            with DualWriter("flags", kafka=kafka, database=database) as writer:
                change(writer, topic, path, "green", version=0)
                print("changed to green")
                try:
                    change(writer, topic, path, "blue", version=0)
                except TransactionAborted as error:
                    print(f"not changed to blue: {type(error.__cause__).__name__}, nothing announced")

            arguments = (kafka, zookeeper.hosts, root, topic, path)
            worker = multiprocessing.get_context("spawn").Process(target=change_and_die, args=arguments)
            worker.start()
            worker.join()
            print(f"killed: {worker.exitcode == -9}, the flag is {client.get(path)[0].decode()}")
            report = recover("flags", kafka=kafka, database=database)
            print(f"recovered: {len(report.rolled_forward)} announcement")

        announced = [json.loads(record.value or b"")["value"] for record in read_committed(kafka, topic)]
        client.sync(path)
        value, stat = client.get(path)
        print(f"flag: {value.decode()}, changes: {stat.version}, announced: {announced}")
        assert (announced[-1], len(announced)) == (value.decode(), stat.version), "the two sides differ"
        client.stop()
        client.close()


if __name__ == "__main__":
    main()
