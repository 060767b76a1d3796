"""Orders and stock in an embedded RocksDB, messages in Kafka. A process dies between its two commits; recovery completes them.

Run it without arguments: it starts a Kafka broker of its own, or uses the one that ``DUALWRITE_TEST_KAFKA`` names.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from dualwrite import DualWriter, Transaction, recover, status
from dualwrite.databases import RocksDatabase
from dualwrite.testing import EmbeddedKafka, read_committed


class OutOfStock(Exception):
    """Leaves the block, so that neither the order nor its message is written."""


def place(writer: DualWriter, topic: str, number: int, item: str) -> None:
    """Place one order: its row, one less in stock, and its message, or none of them."""

    def work(tx: Transaction) -> None:
        left = tx.batch.get_for_update(f"stock/{item}", 0)
        assert isinstance(left, int)
        if left == 0:
            raise OutOfStock(item)
        tx.batch.put(f"stock/{item}", left - 1)
        tx.batch.put(f"order/{number}", item)
        tx.produce(topic, value=item, key=str(number))

    writer.run(work)  # once more if another thread has sold the same item meanwhile


def serve(bootstrap_servers: str, path: str, topic: str) -> None:
    """Run the service: three orders."""
    with (
        RocksDatabase(path) as database,
        DualWriter("shop", kafka={"bootstrap.servers": bootstrap_servers}, database=database) as writer,
    ):
        database.rdict["stock/tea"] = 3
        for number, item in enumerate(["tea", "cup", "tea"], start=1):
            try:
                place(writer, topic, number, item)
                print(f"placed order {number}: {item}", flush=True)
            except OutOfStock:
                print(f"refused order {number}: no {item}", flush=True)


def main() -> None:
    """Kill the service right after its last decision, then recover."""
    with EmbeddedKafka() as servers, tempfile.TemporaryDirectory() as directory:
        kafka, path = servers.client_config(), str(Path(directory) / "shop")
        topic = servers.create_topic(f"orders-{secrets.token_hex(4)}")

        # The fail point makes the service send SIGKILL to itself as the second order is decided.
        service = subprocess.run(
            [sys.executable, __file__, kafka["bootstrap.servers"], path, topic],
            env={**os.environ, "DUALWRITE_FAILPOINT": "write.decided:2"},
            check=False,
        )
        assert service.returncode == -signal.SIGKILL

        with RocksDatabase(path) as database:
            orders = {key: item for key, item in database.rdict.items() if str(key).startswith("order/")}
            [left] = [item for item in status("shop", kafka=kafka, database=database) if item.needs_recovery]
            print(
                f"killed: {len(orders)} orders in RocksDB, the last one's Kafka transaction is {left.kafka_status.value}"
            )

            recover("shop", kafka=kafka, database=database)
            messages = {
                f"order/{(record.key or b'').decode()}": (record.value or b"").decode()
                for record in read_committed(kafka, topic)
            }
            print(f"orders:   {orders}")
            print(f"messages: {messages}")
            print(f"tea left: {database.rdict['stock/tea']}")
            assert orders == messages


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(*sys.argv[1:])
    else:
        main()
