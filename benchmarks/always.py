"""One message and one row with ``outbox="always"``: beside a direct block, the unsafe way, and an outbox that a relay polls.

``PYTHONPATH=tests/proof python -m benchmarks.always`` (two minutes)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from benchmarks import async_tasks, threads
from benchmarks.calls import in_new_process
from benchmarks.latency import visibility
from benchmarks.servers import Ground, p50, p95, servers
from benchmarks.ways import METADATA, NATIVE, OUTBOX, UNSAFE, Write, ours, outbox, unsafe

ALWAYS = 'outbox="always"'
THREADS, TASKS = 8, 64
always = partial(ours, way=NATIVE, lanes=threads.LANES, outbox="always")
direct = partial(ours, way=NATIVE, lanes=threads.LANES)
OF_ONE_CALLER = ("call p50", "call p95", "processor", "visible p50", "visible p95")


def run(
    ground: Ground,
    *,
    rounds: int = 9,
    operations: int = 100,
    visible: int = 200,
    slices: int = 4,
    slice_s: float = 5.0,
) -> dict[str, dict[str, float]]:
    """Measure, the ways in slices in turn; by way and figure. The sender's work counts: it is in this process."""
    found = in_new_process(_one_caller, ground.kafka, ground.url, ground.topic(1), rounds, operations, visible)
    for name, per_second in _threads(ground, slices, slice_s).items():
        found[name]["threads a second"] = per_second
    for name, per_second in asyncio.run(_tasks(ground, slices, slice_s)).items():
        found[name]["tasks a second"] = per_second
    return found


def _one_caller(
    kafka: Mapping[str, str], url: str, topic: str, rounds: int, operations: int, visible: int
) -> dict[str, dict[str, float]]:
    engine = create_engine(url)
    METADATA.create_all(engine)
    with ExitStack() as stack:
        ways = {
            name: stack.enter_context(way(kafka, engine, topic))
            for name, way in ((ALWAYS, always), (NATIVE, direct), (UNSAFE, unsafe), (OUTBOX, outbox))
        }
        samples: dict[str, list[float]] = {name: [] for name in ways}
        processor: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, write in ways.items():
                took, processor_ms = _slice(write, operations)
                if number:
                    samples[name] += took
                    processor[name].append(processor_ms)
        watched = visibility(ways, kafka, topic, visible)
    engine.dispose()
    return {
        name: {
            "call p50": p50(samples[name]),
            "call p95": p95(samples[name]),
            "processor": p50(processor[name]),
            "visible p50": p50(watched[name]),
            "visible p95": p95(watched[name]),
        }
        for name in ways
    }


def _slice(write: Write, operations: int) -> tuple[list[float], float]:
    """The milliseconds of each call, and of processor time a call, with what the sender does for them after the last."""
    took = []
    processor_s = time.process_time()
    for _ in range(operations):
        began = time.perf_counter()
        write(["x"])
        took.append(1000 * (time.perf_counter() - began))
    time.sleep(0.1)
    return took, 1000 * (time.process_time() - processor_s) / operations


def _threads(ground: Ground, slices: int, slice_s: float) -> dict[str, float]:
    engine = create_engine(ground.url, pool_size=2 * threads.LANES, max_overflow=0)
    unsafes = create_engine(ground.url, pool_size=threads.LANES, max_overflow=0, pool_timeout=60)
    topic = ground.topic()
    with ExitStack() as stack:
        ways: dict[str, Write] = {
            ALWAYS: stack.enter_context(always(ground.kafka, engine, topic)),
            UNSAFE: stack.enter_context(threads.shared_unsafe(ground.kafka, unsafes, topic)),
        }
        measured = {name: threads.Measured() for name in ways}
        for _ in range(slices):
            for name, write in ways.items():
                threads.slice_of_threads(write, THREADS, slice_s, 1.0, measured[name])
    engine.dispose()
    unsafes.dispose()
    return {name: one.figures()["per second"] for name, one in measured.items()}


async def _tasks(ground: Ground, slices: int, slice_s: float) -> dict[str, float]:
    engines: Sequence[AsyncEngine] = [
        create_async_engine(ground.url, pool_size=threads.LANES, max_overflow=0, pool_timeout=120) for _ in range(2)
    ]
    topic = ground.topic()
    async with AsyncExitStack() as stack:
        ways: dict[str, async_tasks.Write] = {
            ALWAYS: await stack.enter_async_context(
                async_tasks.ours_in_tasks(ground.kafka, engines[0], topic, NATIVE, outbox="always")
            ),
            UNSAFE: await stack.enter_async_context(async_tasks.unsafe_in_tasks(ground.kafka, engines[1], topic)),
        }
        measured = {name: threads.Measured() for name in ways}
        for _ in range(slices):
            for name, write in ways.items():
                await async_tasks.slice_of_tasks(write, TASKS, slice_s, 1.0, measured[name])
    for engine in engines:
        await engine.dispose()
    return {name: one.figures()["per second"] for name, one in measured.items()}


if __name__ == "__main__":
    with servers({"transaction.max.timeout.ms": "2147483647"}) as started:
        for way, figures in run(started).items():
            print(way, ", ".join(f"{name}: {figure:,.2f}" for name, figure in figures.items()), flush=True)
