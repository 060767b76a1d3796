"""Many tasks of one event loop: dual writes per second, and how long each takes with its wait for a lane.

``PYTHONPATH=tests/proof python -m benchmarks --only async``
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

from confluent_kafka.aio import AIOProducer
from sqlalchemy import create_engine, insert
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from benchmarks.servers import Ground
from benchmarks.threads import LANES, Measured, Processor, Window, slice_of_threads
from benchmarks.ways import ENGINES, METADATA, NATIVE, QUIET, ROWS, UNSAFE, ours
from dualwrite import AsyncDualWriter, WriterLimits
from dualwrite.protocol.outbox import Outbox

TASKS = (1, 64, 1000)
THREADS = f"{NATIVE}, threads"
Write: TypeAlias = Callable[[], Awaitable[None]]


@asynccontextmanager
async def ours_in_tasks(
    kafka: Mapping[str, str], engine: AsyncEngine, topic: str, way: str, *, outbox: Outbox = "never"
) -> AsyncIterator[Write]:
    """This library, by one of its producer engines."""
    name = f"async {outbox} {way} {topic}".replace(" ", "-")
    limits = WriterLimits(max_lanes=LANES, lane_timeout_s=120.0)
    async with AsyncDualWriter(
        name, kafka={**kafka, "dualwrite.engine": ENGINES[way]}, database=engine, limits=limits, outbox=outbox
    ) as writer:

        async def write() -> None:
            async with writer.transaction() as tx:
                await tx.produce(topic, value="x")
                await tx.connection.execute(insert(ROWS).values(note="x"))

        yield write


@asynccontextmanager
async def unsafe_in_tasks(kafka: Mapping[str, str], engine: AsyncEngine, topic: str) -> AsyncIterator[Write]:
    """Database commit, then produce and flush, by one ``AIOProducer`` of all tasks."""
    settings = {**kafka, **QUIET, "acks": "all", "enable.idempotence": True, "linger.ms": 0}
    producer = AIOProducer(settings)

    async def write() -> None:
        async with engine.begin() as connection:
            await connection.execute(insert(ROWS).values(note="x"))
        delivered = await producer.produce(topic, value=b"x")
        await producer.flush()
        await delivered

    try:
        yield write
    finally:
        await producer.close()


def run(
    ground: Ground, *, tasks: tuple[int, ...] = TASKS, rounds: int = 3, slice_s: float = 5.0, warm_up_s: float = 1.0
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure in slices, the ways in turn; by number of tasks or threads, way and figure. Times in milliseconds."""
    engine = create_engine(ground.url, pool_size=2 * LANES, max_overflow=0)
    METADATA.create_all(engine)
    topic = ground.topic()
    found: dict[int, dict[str, Measured]] = {
        count: {name: Measured() for name in (*ENGINES, UNSAFE, THREADS)} for count in tasks
    }

    async def in_tasks() -> None:
        ours_, others = (
            create_async_engine(ground.url, pool_size=LANES, max_overflow=0, pool_timeout=120) for _ in "ab"
        )
        async with AsyncExitStack() as stack:
            in_thread = stack.enter_context(
                ours(ground.kafka, engine, topic, NATIVE, lanes=LANES, lane_timeout_s=120.0)
            )
            ways: dict[str, Write] = {}
            for name in ENGINES:
                ways[name] = await stack.enter_async_context(ours_in_tasks(ground.kafka, ours_, topic, name))
            ways[UNSAFE] = await stack.enter_async_context(unsafe_in_tasks(ground.kafka, others, topic))
            for write in ways.values():
                await slice_of_tasks(write, max(tasks), warm_up_s, 0.0, Measured())  # makes all lanes
            for _ in range(rounds):
                for count in tasks:
                    for name, write in ways.items():
                        await slice_of_tasks(write, count, slice_s, warm_up_s, found[count][name])
                    measured = found[count][THREADS]
                    await asyncio.to_thread(slice_of_threads, in_thread, count, slice_s, warm_up_s, measured)
        await ours_.dispose()
        await others.dispose()

    asyncio.run(in_tasks())
    engine.dispose()
    return {str(count): {name: one.figures() for name, one in by_way.items()} for count, by_way in found.items()}


async def slice_of_tasks(write: Write, tasks: int, seconds: float, warm_up_s: float, measured: Measured) -> None:
    """Let the tasks write; what begins in the window is measured."""
    window = Window(tasks, seconds, warm_up_s)

    async def work() -> tuple[int, list[float]]:
        calls, samples = 1, []
        try:
            await write()
        finally:
            window.has_written()
        while (started := time.perf_counter()) < window.end:
            await write()
            calls += 1
            if started >= window.begin:
                samples.append(1000 * (time.perf_counter() - started))
        return calls, samples

    processor = Processor()
    done = await asyncio.gather(*(work() for _ in range(tasks)))
    measured.note(done, seconds, processor.used_s())
