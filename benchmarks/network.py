"""One message and one row over a network with a delay, and the round trips that are its price.

``PYTHONPATH=tests/proof python -m benchmarks --only network``
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from sqlalchemy import Engine, create_engine

from benchmarks import pipelined, round_trips
from benchmarks.delayed import far_away
from benchmarks.servers import Ground, p50
from benchmarks.ways import ENGINES, METADATA, SEQUENTIAL, UNSAFE, Write, in_turn, ours, unsafe, without_a_protocol

DELAYS_MS = (0.0, 0.5, 2.0)


def enter(stack: ExitStack, kafka: Mapping[str, str], engine: Engine, topic: str) -> dict[str, Write]:
    """The ways that are compared."""
    made = {
        **{name: ours(kafka, engine, topic, name) for name in ENGINES},
        SEQUENTIAL: without_a_protocol(kafka, engine, topic),
        UNSAFE: unsafe(kafka, engine, topic),
    }
    return {name: stack.enter_context(way) for name, way in made.items()}


def run(ground: Ground, *, operations: int = 300, warm_up: int = 30, counted: int = 100) -> dict[str, Any]:
    """Measure; median milliseconds by way and delay, and mean numbers of requests by way and request."""
    topic = ground.topic(1)
    with ExitStack() as stack:
        far = stack.enter_context(far_away(ground))
        engine = create_engine(far.url)
        METADATA.create_all(engine)
        ways = enter(stack, far.kafka, engine, topic)
        calls = {name: lambda note, write=write: write([note]) for name, write in ways.items()}
        delays: dict[str, dict[str, float]] = {name: {} for name in ways}
        for delay_ms in DELAYS_MS:
            far.delay.value = delay_ms / 1000
            for name, samples in in_turn(calls, operations, warm_up=warm_up).items():
                delays[name][str(delay_ms)] = p50(samples)
        together = pipelined.run(far, operations=operations, warm_up=warm_up)
        far.delay.value = 0.0  # closing takes round trips, too
        stack.callback(engine.dispose)
    return {"p50": delays, "requests": round_trips.count(ground, counted), "pipelined": together}
