"""Kafka is killed under a steady load, stays away, and comes back: what each request waits, and how many rows wait.

``PYTHONPATH=tests/proof python -m benchmarks --only outage``

Requests come at fixed times, whether the former ones have ended or not, and each is measured from the time at which it was due:
a request that waits for a thread waits like any other.
"""

from __future__ import annotations

import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine, create_engine, func, select

from benchmarks.servers import Ground
from benchmarks.threads import shared_unsafe
from benchmarks.ways import METADATA, UNSAFE, Write, writing
from dualwrite import DualWriter, WriterLimits
from dualwrite.stores.sql.tables import declare_tables

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from line_chart import line_chart, linear

PICTURE: Final = "benchmarks-outage.svg"
FALLBACK: Final = "fallback"
THREADS: Final = 32
_EVERY_S: Final = 0.25
_BACK_WITHIN_S: Final = 180.0


@dataclass(frozen=True)
class Request:
    """When it was due and when it ended, on one clock, in seconds; and the error that its caller got."""

    due: float
    ended: float
    error: str | None = None

    @property
    def took_ms(self) -> float:
        return 1000 * (self.ended - self.due)


@contextmanager
def load(write: Write, per_second: float) -> Iterator[list[Request]]:
    """Requests at a steady rate for as long as the block lasts, as a list that grows; all have ended after it."""
    done: list[Request] = []
    stop = threading.Event()

    def one(due: float) -> None:
        error = None
        try:
            write(["a request"])
        except Exception as raised:  # noqa: BLE001 - counted, whatever it is
            error = f"{type(raised).__name__}: {raised}"
        done.append(Request(due, time.perf_counter(), error))

    def serve() -> None:
        with ThreadPoolExecutor(THREADS) as workers:
            due = time.perf_counter()
            while not stop.wait(max(0.0, due - time.perf_counter())):
                workers.submit(one, due)
                due += 1 / per_second

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        yield done
    finally:
        stop.set()
        serving.join()


def p99(requests: Sequence[Request]) -> float:
    """Of the time that they took, in milliseconds."""
    return statistics.quantiles([one.took_ms for one in requests], n=100, method="inclusive")[98]


def _waiting(engine: Engine, writer: str) -> Callable[[], int]:
    outbox = declare_tables(None).outbox
    statement = select(func.count()).where(outbox.c.writer == writer)

    def count() -> int:
        with engine.connect() as connection:
            return int(connection.execute(statement).scalar_one())

    return count


def run(
    ground: Ground,
    *,
    per_second: float = 200,
    slice_s: float = 10.0,
    slices: int = 2,
    away_s: float = 120.0,
    fallback_after_s: float = 1.0,
) -> dict[str, Any]:
    """Measure the unsafe way and ours in turn, then kill the broker under ours.

    Returns:
        The figures of the page, and the course of the outage for its picture.
    """
    engine, watch = create_engine(ground.url, pool_size=THREADS + 8), create_engine(ground.url)
    METADATA.create_all(engine)
    topic, name = ground.topic(), f"outage-{secrets.token_hex(4)}"
    limits = WriterLimits(fallback_after_s=fallback_after_s)
    with (
        shared_unsafe(ground.kafka, engine, topic) as unsafe,
        DualWriter(name, kafka=ground.kafka, database=engine, outbox="fallback", limits=limits) as writer,
    ):
        ours = writing(writer, topic)
        before: dict[str, list[Request]] = {UNSAFE: [], FALLBACK: []}
        for _ in range(slices):
            for way, write in ((UNSAFE, unsafe), (FALLBACK, ours)):
                with load(write, per_second) as done:
                    time.sleep(slice_s)
                before[way] += done[int(per_second) :]  # without the first second
        course: list[tuple[float, int]] = []
        waiting = _waiting(watch, name)
        with load(ours, per_second) as requests:
            begun = time.perf_counter()

            def watch_for(seconds: float, until: Callable[[], bool] = lambda: False) -> None:
                end = time.perf_counter() + seconds
                while time.perf_counter() < end and not until():
                    course.append((time.perf_counter() - begun, waiting()))
                    time.sleep(_EVERY_S)

            watch_for(slice_s)
            killed = time.perf_counter()
            ground.kafka_server.kill()
            watch_for(away_s)
            ground.kafka_server.start()
            back = time.perf_counter()
            watch_for(_BACK_WITHIN_S, lambda: not writer.health().degraded)
            direct = time.perf_counter()
            watch_for(slice_s)
    for one in (engine, watch):
        one.dispose()
    during = [one for one in requests if killed <= one.due < back]
    return {
        "per second": per_second,
        "away": back - killed,
        "fallback after": fallback_after_s,
        "p99 before": {way: p99(done) for way, done in before.items()},
        "errors": len([one for one in requests if one.error is not None]),
        "first error": next((one.error for one in requests if one.error is not None), None),
        "requests": len(requests),
        "first success": min(one.ended for one in during if one.error is None) - killed,
        "longest": max(one.took_ms for one in during),
        "p99 during": p99(during),
        # What waited while nobody knew yet that Kafka is away is the first request's wait, and in "longest".
        "p99 once known": p99([one for one in during if one.due > killed + 2 * fallback_after_s]),
        "most waiting": max(rows for _, rows in course),
        "direct after": direct - back,
        "course": {
            "waiting": [(round(at, 2), rows) for at, rows in course],
            "latency": _by_second(requests, begun),
            "killed": killed - begun,
            "back": back - begun,
        },
    }


def _by_second(requests: Sequence[Request], begun: float) -> list[tuple[int, float, int]]:
    """For each second: the slowest of the requests that were due in it, in milliseconds, and how many ended in it."""
    last = int(max(one.ended for one in requests) - begun)
    slowest, ended = [0.0] * (last + 1), [0] * (last + 1)
    for one in requests:
        ended[int(one.ended - begun)] += 1
        due = max(0, int(one.due - begun))
        slowest[due] = max(slowest[due], one.took_ms)
    return [(second, round(slowest[second], 1), ended[second]) for second in range(last + 1)]


def draw(figures: Mapping[str, Any], directory: Path) -> None:
    """The picture of an outage: requests that end in each second, their slowest latency, and rows that wait."""
    course = figures["course"]
    latency = course["latency"]
    most = max(1, *(rows for _, rows in course["waiting"]))
    slowest = max(took for _, took, _ in latency)
    busiest = max(ended for *_, ended in latency)
    series = {
        f"requests that end in a second (100 % is {busiest})": [
            (at, 100 * ended / busiest) for at, _, ended in latency
        ],
        f"slowest of each second (100 % is {slowest:,.0f} ms)": [(at, 100 * took / slowest) for at, took, _ in latency],
        f"rows that wait (100 % is {most:,})": [(at, 100 * rows / most) for at, rows in course["waiting"]],
    }
    times = [at for points in series.values() for at, _ in points]
    title = f"seconds; Kafka is killed at {course['killed']:.0f} and answers again at {course['back']:.0f}"
    chart = line_chart(series, linear(times), linear([100.0], "{:g} %".format), title=title)
    (directory / PICTURE).write_text(chart, encoding="utf-8")


def section(figures: Mapping[str, Any]) -> list[str]:
    """The section of the page."""
    before, after = figures["p99 before"], figures["direct after"]
    return [
        "## Kafka is killed under load",
        "",
        f"{figures['per second']:g} requests a second, each one row and one message, by {THREADS} threads; the broker is killed "
        f"and stays away for {figures['away']:.0f} s. `fallback_after_s` is {figures['fallback after']:g}.",
        "",
        f"![Requests, latency and waiting rows while Kafka is away]({PICTURE})",
        "",
        f"- Errors: **{figures['errors']}** of {figures['requests']} requests (aim: none).",
        f"- The first success after the kill: **{figures['first success']:.2f} s** (aim: at most "
        f"{figures['fallback after'] + 0.1:.1f} s); the longest request {figures['longest']:,.0f} ms.",
        f"- p99 once the silence is known: **{figures['p99 once known']:.1f} ms**, **"
        f"{figures['p99 once known'] / before[UNSAFE]:.2f}** of the unsafe way's before the outage (aim: at most 1.5); over the "
        f"whole outage {figures['p99 during']:.1f} ms, before it {before[FALLBACK]:.1f} ms.",
        f"- Most rows that waited: {figures['most waiting']:,}. All were sent and blocks direct again **{after:.1f} s** after "
        f"Kafka answered (aim: at most 5 s for each minute away).",
        "",
    ]
