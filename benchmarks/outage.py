"""Kafka goes away under a steady load, stays away, and comes back: what each request waits, and how many rows wait.

``PYTHONPATH=tests/proof python -m benchmarks --only outage`` (six minutes)

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
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import Engine, create_engine, func, select

from benchmarks.servers import Ground
from benchmarks.threads import shared_unsafe
from benchmarks.ways import METADATA, UNSAFE, Write, writing
from dualwrite import DualWriter, WriterLimits
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.testing import EmbeddedKafka

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from line_chart import line_chart, linear

PICTURE: Final = "benchmarks-outage.svg"
KILLED: Final = "killed"
AWAY: Final[Mapping[str, tuple[Callable[[EmbeddedKafka], None], Callable[[EmbeddedKafka], None]]]] = {
    KILLED: (EmbeddedKafka.kill, EmbeddedKafka.start),
    "stopped": (EmbeddedKafka.stop, EmbeddedKafka.start),
    "suspended": (EmbeddedKafka.suspend, EmbeddedKafka.resume),
}
"""How the broker goes and comes back. A suspended one keeps its connections open, and accepts new ones, but answers nothing."""
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
    away_s: Mapping[str, float] = MappingProxyType({KILLED: 120.0, "stopped": 30.0, "suspended": 60.0}),
    **given: float,
) -> dict[str, Any]:
    """Measure an outage of each kind, for so many seconds; the figures of the page, and the courses for its picture."""
    return {way: _outage(ground, *AWAY[way], away_s=seconds, **given) for way, seconds in away_s.items()}


def _outage(
    ground: Ground,
    leave: Callable[[EmbeddedKafka], None],
    come_back: Callable[[EmbeddedKafka], None],
    *,
    away_s: float,
    per_second: float = 200,
    slice_s: float = 10.0,
    slices: float = 2,
    fallback_after_s: float = 1.0,
) -> dict[str, Any]:
    """Measure the unsafe way and ours in turn, then take the broker away under ours."""
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
        for _ in range(int(slices)):
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
            left = time.perf_counter()
            leave(ground.kafka_server)
            watch_for(away_s)
            come_back(ground.kafka_server)
            back = time.perf_counter()
            watch_for(_BACK_WITHIN_S, lambda: not writer.health().degraded)
            direct = time.perf_counter()
            watch_for(slice_s)
    for one in (engine, watch):
        one.dispose()
    during = [one for one in requests if left <= one.due < back]
    return {
        "per second": per_second,
        "away": back - left,
        "fallback after": fallback_after_s,
        "p99 before": {way: p99(done) for way, done in before.items()},
        "errors": len([one for one in requests if one.error is not None]),
        "first error": next((one.error for one in requests if one.error is not None), None),
        "requests": len(requests),
        "first success": min(one.ended for one in during if one.error is None) - left,
        "longest": max(one.took_ms for one in during),
        "p99 during": p99(during),
        # What waited while nobody knew yet that Kafka is away is the first request's wait, and in "longest".
        "p99 once known": p99([one for one in during if one.due > left + 2 * fallback_after_s]),
        "most waiting": max(rows for _, rows in course),
        "direct after": direct - back,
        "course": {
            "waiting": [(round(at, 2), rows) for at, rows in course],
            "latency": _by_second(requests, begun),
            "killed": left - begun,
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
    course = figures[KILLED]["course"]
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


def section(figures: Mapping[str, Any], *, table: Callable[[Sequence[str], Any], list[str]]) -> list[str]:
    """The section of the page."""
    killed = figures[KILLED]
    unsafe = killed["p99 before"][UNSAFE]
    return [
        "## Kafka goes away under load",
        "",
        f"{killed['per second']:g} requests a second, each one row and one message, by {THREADS} threads, and one broker, which "
        f"is killed, stopped as an operator does it, or suspended: then it accepts connections and answers nothing. "
        f"`fallback_after_s` is {killed['fallback after']:g}. The picture is of the broker that is killed.",
        "",
        f"![Requests, latency and waiting rows while Kafka is away]({PICTURE})",
        "",
        *table(
            (
                "the broker is",
                "away, s",
                "errors",
                "first success, s",
                "longest, ms",
                "p99 before, ms",
                "p99 of the outage, ms",
                "p99 once known, ms",
                "to unsafe before",
                "rows waiting",
                "direct again after, s",
            ),
            (
                [
                    way,
                    f"{one['away']:.0f}",
                    f"{one['errors']} of {one['requests']}",
                    f"{one['first success']:.2f}",
                    f"{one['longest']:,.0f}",
                    f"{one['p99 before'][FALLBACK]:.1f}",
                    f"{one['p99 during']:.1f}",
                    f"{one['p99 once known']:.1f}",
                    f"{one['p99 once known'] / one['p99 before'][UNSAFE]:.2f}",
                    f"{one['most waiting']:,}",
                    f"{one['direct after']:.1f}",
                ]
                for way, one in figures.items()
            ),
        ),
        "The requests of the first second wait until the writer knows that Kafka is silent. In an outage of less than 100 s they "
        "are more than one in a hundred, and set its p99; so those that are due "
        f"{2 * killed['fallback after']:g} s after its beginning or later have a column of their own.",
        "",
        f"Aims: no errors; the first success within {killed['fallback after'] + 0.1:.1f} s; p99 once the silence is known at most "
        f"1.5 of the unsafe way's before it ({unsafe:.1f} ms when the broker was killed); all sent and blocks direct again "
        "within 5 s for each minute away.",
        "",
    ]
