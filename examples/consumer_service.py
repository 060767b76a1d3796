"""A consumer service: each payment becomes one row and one receipt, even if a member dies inside its transaction.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

from confluent_kafka import Message, Producer
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, insert, select

from dualwrite import ExactlyOnceConsumer, Transaction, migrations
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed

METADATA = MetaData()
PAYMENTS = Table("payments", METADATA, Column("id", Integer, primary_key=True))


def serve(member: str, bootstrap_servers: str, url: str, topic: str) -> None:
    """Run one member of the service, until SIGTERM."""

    def handle(tx: Transaction, messages: Sequence[Message]) -> None:
        for message in messages:
            number = int(message.value() or b"")  # a payment that is no number goes to the dead letters
            tx.connection.execute(insert(PAYMENTS).values(id=number))
            tx.produce(f"{topic}-receipts", key=message.key(), value=f"receipt {number}")

    consumer = ExactlyOnceConsumer(
        f"{topic}-service",
        member,
        topics=[topic],
        handler=handle,
        kafka={"bootstrap.servers": bootstrap_servers},
        database=url,
        consumer={"session.timeout.ms": 6000},
        attempts=2,
        dead_letter_topic=f"{topic}-dead",
    )
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    consumer.run()


def main() -> None:
    """Kill a member inside its transaction, and let another one take over."""
    with EmbeddedKafka() as servers, EmbeddedPostgres() as postgres:
        kafka, url = servers.client_config(), postgres.create_database()
        topic = servers.create_topic(f"payments-{secrets.token_hex(4)}", 1)
        receipts, dead = (servers.create_topic(f"{topic}-{name}", 1) for name in ("receipts", "dead"))
        engine = create_engine(url)
        with engine.connect() as connection:
            migrations.upgrade(connection)
        METADATA.create_all(engine)
        producer = Producer(kafka)
        for payment in [*range(10), "a button"]:
            producer.produce(topic, value=str(payment))
        producer.flush()

        # The fail point makes the member send SIGKILL to itself, with its offsets in an open transaction.
        command = [sys.executable, __file__]
        given = [kafka["bootstrap.servers"], url, topic]
        killed = subprocess.run(
            [*command, "0", *given], env={**os.environ, "DUALWRITE_FAILPOINT": "consume.moved"}, check=False
        )
        print(f"member 0 was killed: {killed.returncode == -signal.SIGKILL}")
        successor = subprocess.Popen([*command, "1", *given], stderr=subprocess.DEVNULL)
        while len(read_committed(kafka, receipts)) + len(read_committed(kafka, dead)) < 11:
            time.sleep(0.2)
        successor.terminate()
        assert successor.wait() == 0

        with engine.connect() as connection:
            rows = Counter(connection.scalars(select(PAYMENTS.c.id)))
        messages = Counter(int((record.value or b"").split()[1]) for record in read_committed(kafka, receipts))
        print(f"member 1 has settled it: {rows.total()} rows, {messages.total()} receipts")
        for record in read_committed(kafka, dead):
            reason = dict(record.headers)["dualwrite.dead_letter.reason"]
            print(f"dead letter: {record.value!r}, {(reason or b'').decode()}")
        engine.dispose()
        assert rows == messages == Counter(range(10))


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(*sys.argv[1:])
    else:
        main()
