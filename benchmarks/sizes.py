"""One row and 1, 10 or 100 messages. Alone: ``PYTHONPATH=tests/proof python -m benchmarks --only sizes``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from sqlalchemy import create_engine

from benchmarks.servers import Ground, p50
from benchmarks.ways import ENGINES, METADATA, SEQUENTIAL, UNSAFE, Write, in_turn, ours, unsafe, without_a_protocol

SIZES = (1, 10, 100)


def run(ground: Ground, *, operations: int = 400, warm_up: int = 30) -> dict[str, dict[str, float]]:
    """Measure; median milliseconds by way and number of messages."""
    engine = create_engine(ground.url)
    METADATA.create_all(engine)
    topic = ground.topic(1)
    with ExitStack() as stack:
        made = {
            **{name: ours(ground.kafka, engine, topic, name) for name in ENGINES},
            SEQUENTIAL: without_a_protocol(ground.kafka, engine, topic),
            UNSAFE: unsafe(ground.kafka, engine, topic),
        }
        ways = {name: stack.enter_context(way) for name, way in made.items()}
        calls: dict[tuple[str, int], Callable[[str], None]] = {
            (name, size): partial(_write, write, size) for size in SIZES for name, write in ways.items()
        }
        samples = in_turn(calls, operations, warm_up=warm_up)
    engine.dispose()
    return {name: {str(size): p50(samples[name, size]) for size in SIZES} for name in ways}


def _write(write: Write, size: int, note: str) -> None:
    write([note] * size)
