"""A hundred tasks of one event loop place orders: each is a row and a message, or neither.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name.
"""

from __future__ import annotations

import asyncio
import secrets

from sqlalchemy import create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from dualwrite import AsyncDualWriter, WriterLimits, migrations
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """One order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class OutOfStockError(Exception):
    """There are not enough items in stock."""


async def place_order(writer: AsyncDualWriter, topic: str, number: int) -> None:
    """Write the order to the database and announce it in Kafka."""
    async with writer.transaction() as tx:
        tx.session.add(Order(id=number))
        await tx.produce(topic, key=str(number), value=str(number))
        if number % 10 == 9:  # noticed late: the row is there, and the message is sent
            raise OutOfStockError(number)


async def serve(kafka: dict[str, str], url: str, topic: str) -> list[int]:
    """Place the orders, all at once. Returns the rows."""
    engine = create_async_engine(url)
    async with AsyncDualWriter(
        "async-orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=4)
    ) as writer:
        orders = [place_order(writer, topic, number) for number in range(100)]
        outcomes = await asyncio.gather(*orders, return_exceptions=True)
    print("placed:  ", outcomes.count(None))
    print("refused: ", sum(isinstance(one, OutOfStockError) for one in outcomes))
    async with AsyncSession(engine) as session:
        rows = sorted((await session.scalars(select(Order.id))).all())
    await engine.dispose()
    return rows


def main() -> None:
    """Place the orders, and look at both sides."""
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        topic = kafka.create_topic(f"orders-{secrets.token_hex(4)}", partitions=2)
        url = postgres.create_database()
        engine = create_engine(url)
        with engine.connect() as connection:
            migrations.upgrade(connection)  # in production: `dualwrite migrate`, as the owner of the tables
        Base.metadata.create_all(engine)
        engine.dispose()

        rows = asyncio.run(serve(dict(kafka.client_config()), url, topic))
        messages = sorted(int(record.value or b"") for record in read_committed(kafka.client_config(), topic))
        print("rows:    ", len(rows))
        print("messages:", len(messages))
        assert rows == messages, "the two sides differ"


if __name__ == "__main__":
    main()
