"""A relay of ``txoutbox`` over ``aiokafka``, as its documentation has it: arguments are rows a round and rows at a time."""

import asyncio
import os
import sys
from datetime import timedelta

import asyncpg
from aiokafka import AIOKafkaProducer
from txoutbox import OutboxMessage, Relay, RelayConfig
from txoutbox.adapters.postgres import PostgresStorage


async def main(rows: int, at_once: int) -> None:
    """Relay until the process is stopped."""
    given = os.environ
    pool = await asyncpg.create_pool(
        host=given["RIVAL_HOST"],
        port=int(given["RIVAL_PORT"]),
        user=given["RIVAL_USER"],
        password=given["RIVAL_PASSWORD"],
        database=given["RIVAL_DATABASE"],
    )
    producer = AIOKafkaProducer(bootstrap_servers=given["RIVAL_KAFKA"], acks="all", enable_idempotence=True)
    await producer.start()

    async def publish(message: OutboxMessage) -> None:
        key = message.key.encode() if message.key else None
        await producer.send_and_wait(message.topic, message.payload, key=key)

    storage = PostgresStorage(pool, table="outbox", delete_on_ack=True)
    config = RelayConfig(batch_size=rows, concurrency=at_once, lease=timedelta(seconds=60))
    await Relay(storage, publish, config=config).run(handle_signals=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
