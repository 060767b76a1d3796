"""The order service goes on while Kafka is away: its messages wait in the database, and are sent once Kafka is back.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, and stops the broker in the middle.
"""

from __future__ import annotations

import json
import secrets
import time

from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from dualwrite import DualWriter, WriterLimits, migrations
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """One order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


def place_order(writer: DualWriter, topic: str, item: str) -> None:
    """Write the order to the database and announce it: at once, or later if Kafka does not answer."""
    with writer.transaction() as tx:
        order = Order(item=item)
        tx.session.add(order)
        tx.session.flush()
        tx.produce(topic, key=str(order.id), value=json.dumps({"order": order.id, "item": item}))
    print(f"placed order {order.id}: {item}, {'its message waits' if tx.outbox else 'its message is in Kafka'}")


def wait_until_sent(writer: DualWriter, limit_s: float = 60.0) -> None:
    """Wait until nothing waits any more, and blocks write to Kafka directly again."""
    deadline = time.monotonic() + limit_s
    while writer.health().degraded:
        if time.monotonic() > deadline:
            raise TimeoutError("messages still wait")
        time.sleep(0.1)


def main() -> None:
    """Place orders before, during and after an outage, and look at both sides."""
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        topic = kafka.create_topic(f"orders-{secrets.token_hex(4)}", partitions=2)
        engine = create_engine(postgres.create_database())
        with engine.connect() as connection:
            migrations.upgrade(connection)  # in production: `dualwrite migrate`, as the owner of the tables
        Base.metadata.create_all(engine)

        limits = WriterLimits(fallback_after_s=0.5)  # the first order of an outage waits so long for Kafka
        with DualWriter(
            "order-service", kafka=kafka.client_config(), database=engine, outbox="fallback", limits=limits
        ) as writer:
            place_order(writer, topic, "tea")
            kafka.stop()
            print("Kafka is away")
            for item in ("cup", "pot", "milk"):
                place_order(writer, topic, item)
            kafka.start()
            print("Kafka is back")
            wait_until_sent(writer)
            place_order(writer, topic, "sugar")

        with Session(engine) as session:
            rows = {order.id: order.item for order in session.scalars(select(Order))}
        engine.dispose()
        events = [json.loads(record.value or b"") for record in read_committed(kafka.client_config(), topic)]
        messages = {event["order"]: event["item"] for event in events}
        print("rows:    ", dict(sorted(rows.items())))
        print("messages:", dict(sorted(messages.items())))
        assert rows == messages, "the two sides differ"
        assert len(events) == len(messages), "a message is there twice"


if __name__ == "__main__":
    main()
