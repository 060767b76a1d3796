"""A FastAPI service whose requests have asynchronous sessions: each order is a row and a message, or neither.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name.
"""

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from dualwrite import AsyncDualWriter, migrations
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed

IN_STOCK = 100


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """One order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    quantity: Mapped[int]


def create_app(kafka: Mapping[str, str], url: str, topic: str) -> FastAPI:
    """The service."""
    engine = create_async_engine(url)
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    writer = AsyncDualWriter("async-sessions", kafka=kafka, database=engine)
    messages = writer.bind(sessions)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with writer:
            yield
        await engine.dispose()

    async def in_transaction() -> AsyncIterator[AsyncSession]:
        async with sessions.begin() as session:
            yield session

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders/{item}")
    async def place_order(
        item: str,
        quantity: int,
        # The dual write comes before the response: the client reads of an abort.
        session: Annotated[AsyncSession, Depends(in_transaction, scope="function")],
    ) -> int:
        order = Order(item=item, quantity=quantity)
        session.add(order)
        await session.flush()  # the database assigns the order its number
        await messages.produce(session, topic, key=str(order.id), value=item)
        if quantity > IN_STOCK:  # noticed late: the row is inserted and the message is sent
            raise HTTPException(409, "out of stock")
        return order.id

    return app


def main() -> None:
    """Place three orders, one of which fails, and look at both sides."""
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        topic = kafka.create_topic(f"orders-{secrets.token_hex(4)}", partitions=2)
        url = postgres.create_database()
        engine = create_engine(url)
        with engine.connect() as connection:
            migrations.upgrade(connection)  # in production: `dualwrite migrate`, as the owner of the tables
        Base.metadata.create_all(engine)

        with TestClient(create_app(kafka.client_config(), url, topic)) as client:
            for item, quantity in [("tea", 2), ("cup", 500), ("pot", 1)]:
                response = client.post(f"/orders/{item}", params={"quantity": quantity})
                print(response.status_code, response.json())

        with Session(engine) as session:
            rows = {order.id: order.item for order in session.scalars(select(Order))}
        engine.dispose()
        records = read_committed(kafka.client_config(), topic)
        messages = {int(record.key or b""): (record.value or b"").decode() for record in records}
        print("rows:    ", dict(sorted(rows.items())))
        print("messages:", dict(sorted(messages.items())))
        assert rows == messages, "the two sides differ"


if __name__ == "__main__":
    main()
