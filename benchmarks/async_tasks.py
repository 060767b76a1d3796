"""Many tasks of one event loop: dual writes per second, and how long each takes with its wait for a lane.

``PYTHONPATH=tests/proof python -m benchmarks --only async``
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import CodeType, FrameType
from typing import Any, TypeAlias

from confluent_kafka.aio import AIOProducer
from sqlalchemy import create_engine, insert
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from benchmarks.calls import OWN, STANDARD, in_new_process, named, package_of
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


def sampled(
    ground: Ground, *, tasks: int = 64, seconds: float = 20.0, warm_up_s: float = 2.0
) -> dict[str, dict[str, float]]:
    """Find where the processor time of dual writes by tasks goes, in a new process.

    Returns:
        Percent, by ``packages``, of this library by its own, and by ``functions``: the 15 that take most, each without what it
        calls, but with functions of C.
    """
    engine = create_engine(ground.url)
    METADATA.create_all(engine)
    engine.dispose()
    return in_new_process(_sample, ground.kafka, ground.url, ground.topic(), tasks, seconds, warm_up_s)


def _sample(
    kafka: Mapping[str, str], url: str, topic: str, tasks: int, seconds: float, warm_up_s: float
) -> dict[str, dict[str, float]]:
    """Look at each tick of the process's processor time where the loop is: a profile cannot follow greenlets."""
    seen = Counter[CodeType]()

    def look(_: int, frame: FrameType | None) -> None:
        if frame is not None:
            seen[frame.f_code] += 1

    async def write_all() -> None:
        engine = create_async_engine(url, pool_size=LANES, max_overflow=0, pool_timeout=120)
        async with ours_in_tasks(kafka, engine, topic, NATIVE) as write:
            await slice_of_tasks(write, tasks, warm_up_s, 0.0, Measured())
            signal.signal(signal.SIGPROF, look)
            signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
            await slice_of_tasks(write, tasks, seconds, 0.0, Measured())
            signal.setitimer(signal.ITIMER_PROF, 0)
        await engine.dispose()

    asyncio.run(write_all())
    packages, functions = Counter[str](), Counter[str]()
    for code, times in seen.items():
        name, package = named(code), package_of(code.co_filename)
        if package == OWN:
            package = "/".join(name.partition(":")[0].split("/")[:2])
        packages[package or "the benchmark"] += 100 * times / seen.total()
        functions[name] += 100 * times / seen.total()
    return {"packages": dict(packages.most_common()), "functions": dict(functions.most_common(15))}


def shares(
    figures: Mapping[str, Mapping[str, float]], *, table: Callable[[Sequence[str], Any], list[str]]
) -> list[str]:
    """Where the time of tasks goes, for ``docs/benchmarks.md``."""
    packages, functions = figures["packages"], figures["functions"]
    own = sum(share for name, share in packages.items() if name.startswith(OWN))
    waits = packages[STANDARD] + packages[f"{OWN}/asyncio"]
    return [
        "Where the time goes: 64 tasks keep one core busy, so their writes per second go by the processor time of their loop. "
        f"Percent of it, by samples. This library's own functions take {own:.0f}. Waiting takes {waits:.0f}: the standard "
        "library's part is mostly asyncio and selectors, and `dualwrite/asyncio` carries each wait from the greenlet of a "
        "block to its task and back. Each time that a block waits for a server, the loop registers a file, looks at its "
        "selector, and resumes the task. The unsafe way waits less often, and librdkafka's threads, which need no interpreter, "
        "send and receive for it.",
        "",
        *table(("package", "percent"), ([name, f"{share:.1f}"] for name, share in packages.items() if share >= 1)),
        *table(("function", "percent"), ([f"`{name}`", f"{share:.1f}"] for name, share in functions.items())),
    ]
