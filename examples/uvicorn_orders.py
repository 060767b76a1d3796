"""Orders from FastAPI under uvicorn: two workers, each with its event loop, take ids of their own, and one is killed.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name; then uvicorn, which loads this file as its application.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from dualwrite import AsyncDualWriter, WriterLimits, migrations
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """One order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


# --- the application


@asynccontextmanager
async def lifespan(shop: FastAPI) -> AsyncGenerator[None, None]:
    """Open a writer in each worker, in its event loop; at once, also while Kafka or the database is away."""
    shop.state.writer = writer = AsyncDualWriter.leased(
        "shop",
        kafka={"bootstrap.servers": os.environ["SHOP_KAFKA"]},
        database=os.environ["SHOP_DATABASE"],
        limits=WriterLimits(max_lanes=2),
        lease_timeout_s=3.0,  # 30 s by default; the example is in a hurry
    )
    await writer.open(wait=False)
    try:
        yield
    finally:
        await writer.close()


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{number}")
async def place_order(number: int, request: Request) -> dict[str, Any]:
    """Write the order to the database and announce it in Kafka."""
    writer: AsyncDualWriter = request.app.state.writer
    async with writer.transaction() as tx:
        tx.session.add(Order(id=number))
        await tx.produce(os.environ["SHOP_TOPIC"], key=str(number), value=str(number))
    return {"worker": os.getpid(), "id": writer.transactional_id}


# --- the example


def main() -> None:
    """Place orders at all workers, kill one, place more, and look at both sides."""
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        topic = kafka.create_topic(f"orders-{secrets.token_hex(4)}", partitions=2)
        engine = create_engine(postgres.create_database())
        with engine.connect() as connection:
            migrations.upgrade(connection)  # in production: `dualwrite migrate`, as the owner of the tables
        Base.metadata.create_all(engine)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        uvicorn = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "uvicorn_orders:app", "--workers", "2", "--port", str(port)],
            cwd=Path(__file__).parent,
            env={
                **os.environ,
                "SHOP_DATABASE": engine.url.render_as_string(hide_password=False),
                "SHOP_KAFKA": kafka.client_config()["bootstrap.servers"],
                "SHOP_TOPIC": topic,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            placed = place_orders(port, workers=2)
        finally:
            uvicorn.send_signal(signal.SIGTERM)
            uvicorn.wait(60)

        with Session(engine) as session:
            rows = Counter(session.scalars(select(Order.id)))
        engine.dispose()
        messages = Counter(int(record.value or b"") for record in read_committed(kafka.client_config(), topic))
        print("rows equal messages:", rows == messages == Counter(range(placed)))
        assert rows == messages, "the two sides differ"


def place_orders(port: int, workers: int) -> int:
    """Place orders until each worker has taken one; then kill a worker, and continue until its successor has taken one."""
    answers = [ask(port, 0)]
    while len({answer["worker"] for answer in answers}) < workers:
        answers.append(ask(port, len(answers)))
    print("workers take:", *sorted({answer["id"] for answer in answers}))
    os.kill(answers[0]["worker"], signal.SIGKILL)
    while len({answer["worker"] for answer in answers}) <= workers:
        answers.append(ask(port, len(answers)))
    print("one was killed, and another has taken its place")
    return len(answers)


def ask(port: int, number: int) -> dict[str, Any]:
    """Place one order; ask again while no worker listens."""
    for _ in range(600):
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        with suppress(OSError, HTTPException):
            connection.request("POST", f"/orders/{number}")
            answer = connection.getresponse()
            text = answer.read()
            connection.close()
            if answer.status == 200:
                placed: dict[str, Any] = json.loads(text)
                return placed
        time.sleep(0.1)
    raise TimeoutError("no worker answers")


if __name__ == "__main__":
    main()
