"""One caller, one message and one row: how long a dual write takes, and when a ``read_committed`` consumer sees it.

The ways are interleaved, one operation of each in turn, so that the machine's noise falls on all alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event

from confluent_kafka import OFFSET_END, Consumer, TopicPartition
from sqlalchemy import create_engine

from benchmarks.servers import Ground, p50, p95
from benchmarks.ways import (
    ENGINES,
    METADATA,
    OUTBOX,
    OVERLAPPED,
    SEQUENTIAL,
    SPAWN,
    UNSAFE,
    Write,
    in_turn,
    ours,
    outbox,
    process,
    unsafe,
    without_a_protocol,
)


def watch(kafka: dict[str, str], topic: str, seen: SimpleQueue[tuple[str, float]], ready: Event, stop: Event) -> None:
    """A ``read_committed`` consumer, a process of its own, that tells when each message arrives (monotonic clock)."""
    consumer = Consumer(
        {**kafka, "group.id": "watcher", "isolation.level": "read_committed", "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, 0, OFFSET_END)])
    consumer.poll(1.0)
    ready.set()
    while not stop.is_set():
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            seen.put((message.value().decode(), time.perf_counter()))
    consumer.close()


def visibility(
    ways: Mapping[str, Write], kafka: Mapping[str, str], topic: str, operations: int
) -> dict[str, list[float]]:
    """Milliseconds from the start of each call until the watcher has its message."""
    seen: SimpleQueue[tuple[str, float]] = SPAWN.SimpleQueue()
    samples: dict[str, list[float]] = {name: [] for name in ways}
    with process(watch, dict(kafka), topic, seen):
        for number in range(operations):
            for name, write in ways.items():
                note = f"{name} {number} seen"
                started = time.perf_counter()
                write([note])
                arrived, at = seen.get()
                while arrived != note:
                    arrived, at = seen.get()
                if number >= operations // 10:
                    samples[name].append((at - started) * 1000)
    return samples


def run(
    ground: Ground, *, operations: int = 1500, visible: int = 200, warm_up: int = 100
) -> dict[str, dict[str, float]]:
    """Measure; milliseconds by way and figure."""
    engine = create_engine(ground.url)
    METADATA.create_all(engine)
    with ExitStack() as stack:
        topic = ground.topic(1)
        made = {
            **{name: ours(ground.kafka, engine, topic, name) for name in ENGINES},
            SEQUENTIAL: without_a_protocol(ground.kafka, engine, topic),
            OVERLAPPED: without_a_protocol(ground.kafka, engine, topic, overlapped=True),
            UNSAFE: unsafe(ground.kafka, engine, topic),
            OUTBOX: outbox(ground.kafka, engine, topic),
        }
        ways = {name: stack.enter_context(way) for name, way in made.items()}
        calls = {name: lambda note, write=write: write([note]) for name, write in ways.items()}
        samples = in_turn(calls, operations, warm_up=warm_up)
        watched = visibility(ways, ground.kafka, topic, visible)
    engine.dispose()
    return {
        name: {
            "call p50": p50(samples[name]),
            "call p95": p95(samples[name]),
            "visible p50": p50(watched[name]),
            "visible p95": p95(watched[name]),
        }
        for name in samples
    }
