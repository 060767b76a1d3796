"""The cost of knowing how each transaction has ended: one writer with and without that check, in turns.

``PYTHONPATH=tests/proof python -m benchmarks --only known_end``
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial

import pytest
from sqlalchemy import create_engine

from benchmarks.servers import Ground, p50, p95
from benchmarks.ways import ENGINES, LIBRDKAFKA, METADATA, NATIVE, writing
from dualwrite import DualWriter, WriterLimits
from dualwrite.writing.lane import Lane

WITH, WITHOUT = "knows how each transaction has ended", "believes the answer"
THREADS = 8

Write = Callable[[], None]


def writer_name(known: str, way: str) -> str:
    """The name of a writer that knows, or does not, by one of the ways of this library."""
    return {NATIVE: known, LIBRDKAFKA: f"{known}, through librdkafka"}[way]


class BelievingLane(Lane):
    """Continues after each answer as if every partition had shown it."""

    def come_to_rest(self) -> None:
        """Believe it."""
        if self._producer is not None:
            self._producer._instance.pending_end = None


def run(
    ground: Ground, *, operations: int = 1500, rounds: int = 10, seconds: float = 1.0, warm_up_s: float = 2.0
) -> dict[str, dict[str, float]]:
    """Measure: milliseconds of a call by one thread, and dual writes in a second by one thread and by eight."""
    engine = create_engine(ground.url, pool_size=2 * THREADS)
    METADATA.create_all(engine)
    topic = ground.topic(1)
    with ExitStack() as stack:
        ways: dict[str, Write] = {}
        for way, producer_engine in ENGINES.items():
            for known in (WITH, WITHOUT):
                name = writer_name(known, way)
                with pytest.MonkeyPatch.context() as patch:
                    if known == WITHOUT:
                        patch.setattr("dualwrite.writing.writer_resources.Lane", BelievingLane)
                    writer = DualWriter(
                        name.replace(" ", "-"),
                        kafka={**ground.kafka, "dualwrite.engine": producer_engine},
                        database=engine,
                        limits=WriterLimits(max_lanes=THREADS),
                    )
                    writer.open()
                    stack.enter_context(closing(writer))
                    ways[name] = partial(writing(writer, topic), ["a message"])
                    _for_a_while(ways[name], THREADS, warm_up_s)  # makes all lanes
        calls = _calls(ways, operations)
        rates: dict[str, dict[int, list[float]]] = {name: {1: [], THREADS: []} for name in ways}
        for _ in range(rounds):
            for threads in (1, THREADS):
                for name, write in ways.items():
                    rates[name][threads].append(_for_a_while(write, threads, seconds))
    engine.dispose()
    return {
        name: {
            "call p50": p50(calls[name]),
            "call p95": p95(calls[name]),
            "per second": p50(rates[name][1]),
            f"per second by {THREADS} threads": p50(rates[name][THREADS]),
        }
        for name in ways
    }


def _calls(ways: dict[str, Write], operations: int) -> dict[str, list[float]]:
    """Ten of each in turn: one of each would give a lane a rest that it has not in a loop."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(operations // 10):
        for name, write in ways.items():
            for _ in range(10):
                started = time.perf_counter()
                write()
                samples[name].append((time.perf_counter() - started) * 1000)
    return samples


def _for_a_while(write: Write, threads: int, seconds: float) -> float:
    """Dual writes in a second."""
    until = time.perf_counter() + seconds

    def work() -> int:
        count = 0
        while time.perf_counter() < until:
            write()
            count += 1
        return count

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        done = sum(future.result() for future in [pool.submit(work) for _ in range(threads)])
    return done / (time.perf_counter() - started)
