"""A relay of ``faststream-outbox`` to Kafka: arguments are rows of a fetch and workers; ``--make`` makes its table instead."""

import asyncio
import os
import sys

from faststream import FastStream
from faststream.kafka import KafkaBroker
from faststream_outbox import OutboxBroker, make_outbox_table
from sqlalchemy import URL, MetaData
from sqlalchemy.ext.asyncio import create_async_engine

GIVEN = os.environ
METADATA = MetaData()
TABLE = make_outbox_table(METADATA, table_name="outbox")
ENGINE = create_async_engine(
    URL.create(
        "postgresql+asyncpg",
        GIVEN["RIVAL_USER"],
        GIVEN["RIVAL_PASSWORD"],
        GIVEN["RIVAL_HOST"],
        int(GIVEN["RIVAL_PORT"]),
        GIVEN["RIVAL_DATABASE"],
    ),
    pool_size=40,
)


async def make() -> None:
    """Make the table."""
    async with ENGINE.begin() as connection:
        await connection.run_sync(METADATA.create_all)


async def relay(rows: int, workers: int) -> None:
    """Relay until the process is stopped."""
    outbox, kafka = OutboxBroker(ENGINE, outbox_table=TABLE), KafkaBroker(GIVEN["RIVAL_KAFKA"], acks="all")

    @kafka.publisher(GIVEN["RIVAL_TOPIC"])
    @outbox.subscriber(
        "events",
        fetch_batch_size=rows,
        max_workers=workers,
        min_fetch_interval=0.01,
        terminal_flush_batch_size=max(1, rows // 10),
    )
    async def forward(body: str) -> str:
        return body

    await FastStream(outbox, on_startup=[kafka.connect]).run()


if __name__ == "__main__":
    asyncio.run(make() if "--make" in sys.argv else relay(int(sys.argv[1]), int(sys.argv[2])))
