"""The cost of telemetry: one writer without it, with the API alone, and with an SDK, in turns.

``PYTHONPATH=tests/proof python -m benchmarks --only telemetry``
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from sqlalchemy import create_engine

from benchmarks.servers import Ground, p50, p95
from benchmarks.ways import METADATA, in_turn, writing
from dualwrite import DualWriter
from dualwrite.interfaces import Observer
from dualwrite.protocol.lives import Phase, WriteState

NONE, NO_SDK, SDK = "without telemetry", "the API without an SDK", "an SDK, every trace sampled"


def observers() -> dict[str, Observer]:
    """One for each way. The process must have no global SDK."""
    # Not before: every writer that is opened where OpenTelemetry is loaded notes what it does.
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from dualwrite import Telemetry

    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    meters = MeterProvider([InMemoryMetricReader()])
    return {
        NONE: Observer(),
        NO_SDK: Telemetry(),
        SDK: Telemetry(tracer_provider=tracers, meter_provider=meters),
    }


def one_dual_write(observer: Observer) -> None:
    """All calls that a dual write with one message makes to its observer, and nothing else."""
    with observer.writing("orders", "postgresql") as observed:
        observed.lane("orders")
        observed.moved(WriteState.CHECKED)
        observed.producing("orders", None)
        observed.sent("orders", 1)
        observed.enter(Phase.PREPARE)
        observed.moved(WriteState.PREPARED)
        observed.moved(WriteState.RECORDED)
        observed.moved(WriteState.DECIDED)
        observed.enter(Phase.COMPLETE)
        observed.moved(WriteState.COMPLETED)


def _microseconds(call: Callable[[], None], repetitions: int) -> float:
    """Processor time of a call: the lowest of five means, as all that disturbs it makes it longer."""
    found = []
    for _ in range(5):
        begun = time.thread_time()
        for _ in range(repetitions):
            call()
        found.append((time.thread_time() - begun) / repetitions * 1e6)
    return min(found)


def run(
    ground: Ground, *, operations: int = 3000, warm_up: int = 100, repetitions: int = 5000
) -> dict[str, dict[str, float]]:
    """Measure: milliseconds of a call, and microseconds of processor time that the observer takes of it."""
    engine = create_engine(ground.url)
    METADATA.create_all(engine)
    topic = ground.topic(1)
    ways = observers()
    alone = {name: _microseconds(partial(one_dual_write, observer), repetitions) for name, observer in ways.items()}
    with ExitStack() as stack:
        calls = {}
        for name, observer in ways.items():
            writer = DualWriter(
                f"telemetry-{name.replace(' ', '-')}", kafka=ground.kafka, database=engine, telemetry=observer
            )
            write = writing(stack.enter_context(writer), topic)
            calls[name] = lambda note, write=write: write([note])
        samples = in_turn(calls, operations, warm_up=warm_up)
    engine.dispose()
    return {
        name: {"call p50": p50(found), "call p95": p95(found), "observer alone": alone[name]}
        for name, found in samples.items()
    }
