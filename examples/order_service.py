"""An order service: each order is a row and a message, or neither.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name.
"""

from __future__ import annotations

import json
import secrets

from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from dualwrite import DualWriter, migrations
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """One order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    quantity: Mapped[int]


class OutOfStockError(Exception):
    """There are not enough items in stock."""


def place_order(writer: DualWriter, topic: str, item: str, quantity: int, in_stock: int) -> int:
    """Write the order to the database and announce it in Kafka. Returns its number."""
    with writer.transaction() as tx:
        order = Order(item=item, quantity=quantity)
        tx.session.add(order)
        tx.session.flush()  # the database assigns the order its number
        event = {"order": order.id, "item": item, "quantity": quantity}
        tx.produce(topic, key=str(order.id), value=json.dumps(event))
        if quantity > in_stock:  # noticed late: the row is inserted and the message is sent
            raise OutOfStockError(f"{quantity} x {item}")
    return order.id


def main() -> None:
    """Place three orders, one of which fails, and look at both sides."""
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        topic = kafka.create_topic(f"orders-{secrets.token_hex(4)}", partitions=2)
        engine = create_engine(postgres.create_database())
        with engine.connect() as connection:
            migrations.upgrade(connection)  # in production: `dualwrite migrate`, as the owner of the tables
        Base.metadata.create_all(engine)

        with DualWriter("order-service", kafka=kafka.client_config(), database=engine) as writer:
            for item, quantity in [("tea", 2), ("cup", 500), ("pot", 1)]:
                try:
                    number = place_order(writer, topic, item, quantity, in_stock=100)
                    print(f"placed order {number}: {quantity} x {item}")
                except OutOfStockError as error:
                    print(f"refused: {error}")

        with Session(engine) as session:
            rows = {order.id: order.item for order in session.scalars(select(Order))}
        engine.dispose()
        events = [json.loads(record.value or b"") for record in read_committed(kafka.client_config(), topic)]
        messages = {event["order"]: event["item"] for event in events}
        print("rows:    ", dict(sorted(rows.items())))
        print("messages:", dict(sorted(messages.items())))
        assert rows == messages, "the two sides differ"


if __name__ == "__main__":
    main()
