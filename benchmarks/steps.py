"""Where the time of a dual write goes: between its named points. Alone: ``PYTHONPATH=tests/proof python -m benchmarks --only steps``."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
from sqlalchemy import create_engine

from benchmarks.servers import Ground, p50
from benchmarks.ways import ENGINES, METADATA, ours
from dualwrite import failpoints

STEPS = {
    "write.begun": "take a lane and a connection",
    "write.checked": "BEGIN, read the row",
    "write.produced": "`produce`",
    "write.body_done": "INSERT",
    "write.prepared": "flush: wait until the broker has the message",
    "write.recorded": "record what was sent in the row",
    "write.decided": "COMMIT of the database",
    "write.completed": "commit in Kafka",
    "": "give back lane and connection",
}
"""By point, the work since the point before it."""


def run(ground: Ground, *, operations: int = 500, warm_up: int = 50) -> dict[str, dict[str, float]]:
    """Measure one message and one row, the engines in turn; median milliseconds of each step by way."""
    engine = create_engine(ground.url)
    METADATA.create_all(engine)
    topic = ground.topic(1)
    taken: dict[str, list[float]] = {name: [] for name in ENGINES}
    samples: dict[str, dict[str, list[float]]] = {name: {step: [] for step in STEPS.values()} for name in ENGINES}
    reached: list[tuple[str, float]] = []
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        ways = {name: stack.enter_context(ours(ground.kafka, engine, topic, name)) for name in ENGINES}
        patch.setattr(failpoints, "hit", lambda name: reached.append((name, time.perf_counter())))
        for number in range(warm_up + operations):
            for name, write in ways.items():
                reached.clear()
                last = started = time.perf_counter()
                write([f"{name} {number}"])
                ended = time.perf_counter()
                if number < warm_up:
                    continue
                at = {point: when for point, when in reached if point in STEPS}
                for point, step in STEPS.items():
                    now = at[point] if point else ended
                    samples[name][step].append((now - last) * 1000)
                    last = now
                taken[name].append((ended - started) * 1000)
        patch.undo()
    engine.dispose()
    return {
        name: {**{step: p50(found) for step, found in by.items()}, "together": p50(taken[name])}
        for name, by in samples.items()
    }
