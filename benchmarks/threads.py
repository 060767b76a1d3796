"""Many threads: dual writes per second, how long each takes with its wait for a lane, and whether all threads get their turn.

``PYTHONPATH=tests/proof python -m benchmarks --only threads``
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
from sqlalchemy import Engine, create_engine, insert

from benchmarks.processors import servers_s
from benchmarks.servers import Ground, p50
from benchmarks.ways import ENGINES, METADATA, ROWS, UNSAFE, Write, idempotent, ours

THREADS = (8, 64)
LANES = 8


@dataclass
class Measured:
    """The measurements of one way in all its slices.

    Attributes:
        samples: Milliseconds of each call.
        rates: Calls per second of each slice.
        processor: Milliseconds of processor time for each call, of each slice: of this ``process``, and of each server.
        counts: Calls of each thread, by its place among those that start.
    """

    samples: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    processor: dict[str, list[float]] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)

    def note(self, done: Sequence[tuple[int, list[float]]], seconds: float, used_s: Mapping[str, float]) -> None:
        """Take what the workers have done in a slice.

        Args:
            done: How many calls each has made, and the milliseconds of those in the window.
            seconds: The length of the window.
            used_s: The processor time of all calls, by process.
        """
        took = [samples for _, samples in done]
        self.samples += [sample for mine in took for sample in mine]
        self.rates.append(sum(map(len, took)) / seconds)
        self.counts.update({number: len(mine) for number, mine in enumerate(took)})
        for process, used in used_s.items():
            self.processor.setdefault(process, []).append(1000 * used / sum(calls for calls, _ in done))

    def figures(self) -> dict[str, float]:
        """Those of the page."""
        return {
            "p50": p50(self.samples),
            "p99": statistics.quantiles(self.samples, n=100, method="inclusive")[98],
            "longest": max(self.samples),
            "per second": p50(self.rates),
            "fewest of a thread": min(self.counts.values()),
            "most of a thread": max(self.counts.values()),
            **{process: p50(found) for process, found in self.processor.items()},
        }


class Processor:
    """The processor time that this process and the servers below it use from now on."""

    def __init__(self) -> None:
        self._before = self._seconds()

    @staticmethod
    def _seconds() -> dict[str, float]:
        return {"process": time.process_time(), **servers_s(psutil.Process())}

    def used_s(self) -> dict[str, float]:
        """The seconds so far, by process."""
        return {process: seconds - self._before[process] for process, seconds in self._seconds().items()}


class Window:
    """The time in which calls are measured: it begins once each worker has written, so that none is measured while others start.

    Args:
        workers: How many threads or tasks there are.
        seconds: How long it is.
        warm_up_s: It begins no earlier than this, in seconds.

    Attributes:
        begin: When it begins, by ``time.perf_counter``; infinite until that is known.
        end: When it ends, likewise.
    """

    def __init__(self, workers: int, seconds: float, warm_up_s: float) -> None:
        self._left = workers
        self._seconds = seconds
        self._not_before = time.perf_counter() + warm_up_s
        self._lock = threading.Lock()
        self.begin = self.end = math.inf

    def has_written(self) -> None:
        """Note that one more worker has written for the first time."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.begin = max(time.perf_counter(), self._not_before)
                self.end = self.begin + self._seconds


@contextmanager
def shared_unsafe(kafka: Mapping[str, str], engine: Engine, topic: str) -> Iterator[Write]:
    """Database commit, then produce, by one producer of all threads: each waits for its own messages alone."""
    producer = idempotent(kafka)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            producer.poll(0.1)

    def write(notes: Sequence[str]) -> None:
        with engine.begin() as connection:
            connection.execute(insert(ROWS).values(note=notes[0]))
        answers: list[Any] = []
        all_answered = threading.Event()

        def answered(error: Any, _: Any) -> None:
            answers.append(error)
            if len(answers) == len(notes):
                all_answered.set()

        for note in notes:
            producer.produce(topic, value=note, on_delivery=answered)
        if not all_answered.wait(30) or any(answers):
            raise RuntimeError(f"not delivered: {answers}")

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        yield write
    finally:
        stop.set()
        serving.join()


def run(
    ground: Ground,
    *,
    threads: Sequence[int] = THREADS,
    rounds: int = 4,
    slice_s: float = 5.0,
    warm_up_s: float = 1.0,
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure in slices, the ways in turn; by number of threads, way and figure. Times in milliseconds."""
    engine = create_engine(ground.url, pool_size=2 * LANES, max_overflow=0)
    unsafes = create_engine(ground.url, pool_size=LANES, max_overflow=0, pool_timeout=60)
    METADATA.create_all(engine)
    topic = ground.topic()
    with ExitStack() as stack:
        ways: dict[str, Write] = {
            name: stack.enter_context(ours(ground.kafka, engine, topic, name, lanes=LANES)) for name in ENGINES
        }
        ways[UNSAFE] = stack.enter_context(shared_unsafe(ground.kafka, unsafes, topic))
        found = {count: {name: Measured() for name in ways} for count in threads}
        for write in ways.values():
            slice_of_threads(write, max(threads), warm_up_s, 0.0, Measured())  # makes all lanes
        for _ in range(rounds):
            for count, by_way in found.items():
                for name, write in ways.items():
                    slice_of_threads(write, count, slice_s, warm_up_s, by_way[name])
    engine.dispose()
    unsafes.dispose()
    return {str(count): {name: one.figures() for name, one in by_way.items()} for count, by_way in found.items()}


def slice_of_threads(write: Write, threads: int, seconds: float, warm_up_s: float, measured: Measured) -> None:
    """Let the threads write; what begins in the :class:`Window` is measured."""
    window = Window(threads, seconds, warm_up_s)

    def work() -> tuple[int, list[float]]:
        calls, samples = 1, []
        try:
            write(["x"])
        finally:
            window.has_written()  # else the others would never end
        while (started := time.perf_counter()) < window.end:
            write(["x"])
            calls += 1
            if started >= window.begin:
                samples.append(1000 * (time.perf_counter() - started))
        return calls, samples

    processor = Processor()
    with ThreadPoolExecutor(threads) as pool:
        done = [future.result() for future in [pool.submit(work) for _ in range(threads)]]
    measured.note(done, seconds, processor.used_s())
