"""An asynchronous consumer service: each order becomes one row and one bill, by tasks of one event loop.

The first run is cancelled in the middle of its transactions; the second one writes what is left. Run it without arguments:
it starts a Kafka broker and a PostgreSQL server of its own, or uses those that ``DUALWRITE_TEST_KAFKA`` and
``DUALWRITE_TEST_POSTGRES`` name.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Sequence

from confluent_kafka import Message, Producer
from confluent_kafka.serialization import SerializationContext
from sqlalchemy import create_engine, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from dualwrite import AsyncExactlyOnceConsumer, AsyncTransaction, migrations
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """One order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


def from_json(value: bytes, _context: SerializationContext) -> dict[str, int]:
    """A deserializer."""
    found: dict[str, int] = json.loads(value)
    return found


class Service:
    """The handler, and what it needs."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.slow = False
        self.begun = asyncio.Event()

    async def handle(self, tx: AsyncTransaction, messages: Sequence[Message]) -> None:
        """Write orders and bills."""
        for message in messages:
            order = message.deserialized_value()
            tx.session.add(Order(id=order["id"]))
            await tx.produce(f"{self.topic}-bills", key=message.key(), value=f"bill {order['id']}")
        if self.slow:
            self.begun.set()
            await asyncio.sleep(60)

    async def run(self, kafka: dict[str, str], url: str) -> None:
        """Be cancelled, and come again."""
        engine = create_async_engine(url)

        def consumer() -> AsyncExactlyOnceConsumer:
            return AsyncExactlyOnceConsumer(
                f"{self.topic}-service",
                "0",
                topics=[self.topic],
                handler=self.handle,
                kafka=kafka,
                database=engine,
                deserializers={"value": from_json},
                dead_letter_topic=f"{self.topic}-dead",
                workers=4,
            )

        self.slow = True
        running = asyncio.create_task(consumer().run())
        await self.begun.wait()
        running.cancel()
        await asyncio.wait([running])
        print("cancelled:", running.cancelled())

        self.slow = False
        # A service runs without max_messages: loop.add_signal_handler(signal.SIGTERM, consumer.stop) ends it.
        await consumer().run(max_messages=21)
        await engine.dispose()


def main() -> None:
    """Run the service, and look at both sides."""
    with EmbeddedKafka() as servers, EmbeddedPostgres() as postgres:
        kafka, url = servers.client_config(), postgres.create_database()
        topic = servers.create_topic(f"orders-{secrets.token_hex(4)}", 4)
        bills, dead = (servers.create_topic(f"{topic}-{name}", 1) for name in ("bills", "dead"))
        engine = create_engine(url)
        with engine.connect() as connection:
            migrations.upgrade(connection)
        Base.metadata.create_all(engine)
        producer = Producer(kafka)
        for number in range(20):
            producer.produce(topic, key=str(number), value=json.dumps({"id": number}))
        producer.produce(topic, value="a button")
        producer.flush()

        asyncio.run(Service(topic).run(kafka, url))

        with engine.connect() as connection:
            rows = Counter(connection.scalars(select(Order.id)))
        messages = Counter(int((record.value or b"").split()[1]) for record in read_committed(kafka, bills))
        print(f"{rows.total()} rows, {messages.total()} bills")
        print("dead letters:", [record.value for record in read_committed(kafka, dead)])
        engine.dispose()
        assert rows == messages == Counter(range(20))


if __name__ == "__main__":
    main()
