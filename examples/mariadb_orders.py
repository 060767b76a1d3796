"""Orders on MariaDB: DDL that would commit half of an order is refused, and an order whose process dies is completed.

Run it without arguments: it starts a Kafka broker and a MariaDB server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_MARIADB`` name.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys

from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, insert, select, text

from dualwrite import DualWriter, migrations, recover
from dualwrite.errors import IllegalStateError
from dualwrite.recovery.recover import status
from dualwrite.testing import EmbeddedKafka, EmbeddedMariaDB, read_committed

METADATA = MetaData()
ORDERS = Table(
    "orders", METADATA, Column("id", Integer, primary_key=True), Column("item", String(40)), mysql_engine="InnoDB"
)


def place(writer: DualWriter, topic: str, number: int, item: str, *, and_execute: str = "SELECT 1") -> None:
    """One order: a row and a message, or neither."""
    with writer.transaction() as tx:
        tx.connection.execute(insert(ORDERS).values(id=number, item=item))
        tx.produce(topic, key=str(number), value=item)
        tx.connection.execute(text(and_execute))


def serve(bootstrap_servers: str, url: str, topic: str) -> None:
    """The service that dies: one order."""
    with DualWriter("orders", kafka={"bootstrap.servers": bootstrap_servers}, database=url) as writer:
        place(writer, topic, 2, "pot")


def main() -> None:
    """Place an order, try DDL in one, kill the service in another, and look at both sides."""
    with EmbeddedKafka() as servers, EmbeddedMariaDB() as mariadb:
        kafka, url = servers.client_config(), mariadb.create_database()
        topic = servers.create_topic(f"orders-{secrets.token_hex(4)}")
        engine = create_engine(url)
        with engine.connect() as connection:
            migrations.upgrade(connection)  # in production: `dualwrite migrate`, as the owner of the tables
        METADATA.create_all(engine)

        def show(what: str) -> None:
            with engine.connect() as connection:
                rows = {row.id: row.item for row in connection.execute(select(ORDERS))}
            messages = {
                int(record.key or b""): (record.value or b"").decode() for record in read_committed(kafka, topic)
            }
            print(f"{what}: rows {rows}, messages {messages}")

        with DualWriter("orders", kafka=kafka, database=engine) as writer:
            place(writer, topic, 1, "tea")
            show("placed")
            try:
                place(writer, topic, 9, "cup", and_execute="ALTER TABLE orders ADD COLUMN note TEXT")
            except IllegalStateError as error:
                print("refused:", error.what)
            show("aborted")

        # The fail point makes the service send SIGKILL to itself, after the database commit.
        service = subprocess.run(
            [sys.executable, __file__, kafka["bootstrap.servers"], url, topic],
            env={**os.environ, "DUALWRITE_FAILPOINT": "write.decided"},
            check=False,
        )
        assert service.returncode == -signal.SIGKILL
        [left] = [item for item in status("orders", kafka=kafka, database=engine) if item.needs_recovery]
        print(f"killed after the database commit: Kafka transaction {left.kafka_status.value}")
        recover("orders", kafka=kafka, database=engine, open_for_s=0)
        show("recovered")
        engine.dispose()


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(*sys.argv[1:])
    else:
        main()
