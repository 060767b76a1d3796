"""How long what a killed writer has decided stays open in Kafka, by who settles it: a picture of each way's deaths.

Writers are killed after their decision, at random moments. Each wrote one message to a partition of its own; its transaction has
ended when a ``read_committed`` consumer gets that message.

``PYTHONPATH=tests/proof python -m benchmarks --only settled``
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Consumer, TopicPartition
from harness.forking import processes
from harness.patience import wait_until
from sqlalchemy import create_engine

from benchmarks.servers import Ground, p50
from benchmarks.serving import service
from dualwrite import DualWriter, WriterLimits, failpoints

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from line_chart import line_chart, linear, logarithmic

NEXT, BESIDE, LEASE = "the next owner", "a member beside it", "its lease alone"
QUICK, USUAL = "serve, 5 s", "serve, 60 s"
WAYS: Final = {
    BESIDE: "a member of its [fleet](fleets.md) on the same machine, which sees the process end",
    NEXT: "its supervisor starts it again at once: a new process opens the same name",
    QUICK: "[`dualwrite serve`](serve.md) with `settle_after_s = 5` and `interval_s = 1`",
    LEASE: "a member of its fleet elsewhere, which sees the lease expire (`lease_timeout_s = 30`, the default)",
    USUAL: "`dualwrite serve` with its defaults: `settle_after_s = 60`, `interval_s = 10`",
}
"""Who settles."""
SERVICES: Final = {QUICK: (5.0, 1.0), USUAL: (60.0, 10.0)}
"""By way, ``settle_after_s`` and ``interval_s``."""
PICTURE: Final = "benchmarks-settled.svg"
_OPENS: Final = """
import sys
from dualwrite import DualWriter
name, servers, url = sys.argv[1:]
with DualWriter(name, kafka={"bootstrap.servers": servers}, database=url):
    pass
"""
_LIMITS: Final = WriterLimits(max_lanes=1)


def _victim(
    fleet: bool, name: str, kafka: Mapping[str, str], url: str, topic: str, number: int, told: Connection
) -> None:
    """A process of its own: opens, waits for a word, and dies by SIGKILL with a transaction decided."""
    settings: dict[str, Any] = {"kafka": kafka, "database": url, "limits": _LIMITS}
    with DualWriter.leased(name, **settings) if fleet else DualWriter(name, **settings) as writer:
        told.send("open")
        told.recv()
        failpoints.arm("write.decided:1:kill")
        with writer.transaction() as tx:
            tx.produce(topic, str(number), partition=number)


@contextmanager
def _arrivals(kafka: Mapping[str, str], topic: str, count: int) -> Iterator[dict[int, float]]:
    """When a reader has got the message of each partition."""
    got: dict[int, float] = {}
    stopped = threading.Event()

    def read() -> None:
        consumer = Consumer({**kafka, "group.id": topic, "fetch.wait.max.ms": 50})
        consumer.assign([TopicPartition(topic, number, 0) for number in range(count)])
        while not stopped.is_set():
            message = consumer.poll(0.1)
            if message is not None and not message.error():
                got[int(message.value() or b"")] = time.perf_counter()
        consumer.close()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield got
    finally:
        stopped.set()
        thread.join()


def _deaths(
    ground: Ground,
    name: str,
    count: int,
    spread_s: float,
    *,
    fleet: bool = False,
    ready: Callable[[], bool] = lambda: True,
    then: Callable[[str], None] = lambda _: None,
) -> list[float]:
    """Seconds from each death to the end of its transaction.

    All writers open; once ``ready``, each dies at a random moment within ``spread_s``. At each death ``then`` is called with
    the name of the dead writer.
    """
    topic, context, died = ground.topic(count), processes(), dict[int, float]()
    pipes, victims = [], []
    for number in range(count):
        here, there = context.Pipe()
        given = (fleet, f"{name}-{number}", ground.kafka, ground.url, topic, number, there)
        victims.append(context.Process(target=_victim, args=given))
        pipes.append(here)
        victims[-1].start()
    for pipe in pipes:
        pipe.recv()
    wait_until(ready, 60.0)

    def dies(number: int) -> None:
        time.sleep(random.uniform(0, spread_s))
        pipes[number].send("go")
        victims[number].join()
        died[number] = time.perf_counter()
        then(f"{name}-{number}")

    with _arrivals(ground.kafka, topic, count) as got:
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(dies, range(count)))
        wait_until(lambda: len(got) == count, 180.0)
    return sorted(got[number] - died[number] for number in range(count))


def _opened_again(ground: Ground, count: int) -> list[float]:
    servers = ground.kafka["bootstrap.servers"]

    def again(name: str) -> None:
        subprocess.run([sys.executable, "-c", _OPENS, name, servers, ground.url], check=True)

    # One at a time: starting many processes at once would be measured, too.
    return sorted(took for number in range(count) for took in _deaths(ground, f"again-{number}", 1, 0.0, then=again))


def _beside_a_member(ground: Ground, name: str, count: int, spread_s: float, *, sees: bool) -> list[float]:
    """Each victim is of a fleet of two; the other members live in this process."""
    engine = create_engine(ground.url, pool_size=10)
    with ExitStack() as stack:
        if not sees:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr("dualwrite.writing.leased.has_ended", lambda _: False)
        members: list[Any] = [
            stack.enter_context(
                DualWriter.leased(f"{name}-{number}", kafka=ground.kafka, database=engine, limits=_LIMITS)
            )
            for number in range(count)
        ]

        def ready() -> bool:
            return all(member._keeper._beside for member in members)

        return _deaths(ground, name, count, spread_s, fleet=True, ready=ready)


def run(ground: Ground, *, deaths: int = 20) -> dict[str, Any]:
    """Measure; seconds."""
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        began = time.perf_counter()
        for settle_after_s, interval_s in SERVICES.values():
            prefix = f"left-{settle_after_s:g}-"
            stack.enter_context(service(ground, settle_after_s=settle_after_s, interval_s=interval_s, prefix=prefix))
        found[NEXT] = _opened_again(ground, deaths)
        found[BESIDE] = _beside_a_member(ground, "beside", deaths, 2.0 * deaths, sees=True)
        found[LEASE] = _beside_a_member(ground, "lease", deaths, 10.0, sees=False)
        for way, (settle_after_s, interval_s) in SERVICES.items():
            # Until then it leaves everything alone, as after an outage.
            time.sleep(max(0.0, began + settle_after_s + interval_s - time.perf_counter()))
            found[way] = _deaths(ground, f"left-{settle_after_s:g}", deaths, 2.0 * deaths)
    return {"deaths": deaths, "seconds": {way: found[way] for way in WAYS}, "load": os.getloadavg()[0]}


def draw(figures: Mapping[str, Any], directory: Path) -> None:
    """Draw the picture."""
    (directory / PICTURE).write_text(picture(figures), encoding="utf-8")


def picture(figures: Mapping[str, Any]) -> str:
    """The picture as SVG: of each way, how many of its deaths were settled after so many seconds."""
    seconds: Mapping[str, Sequence[float]] = figures["seconds"]
    axis = logarithmic([took for took_all in seconds.values() for took in took_all], "{:g} s".format)
    return line_chart(
        {way: _steps(took, axis.low, axis.high) for way, took in seconds.items()},
        axis,
        linear([100.0], "{:g} %".format),
        title=f"of {figures['deaths']} deaths, those whose decided transaction has ended, by the time since the death",
    )


def _steps(took: Sequence[float], low: float, high: float) -> list[tuple[float, float]]:
    points = [(low, 0.0)]
    for number, seconds in enumerate(sorted(took), 1):
        points += [(seconds, points[-1][1]), (seconds, 100.0 * number / len(took))]
    return [*points, (high, 100.0)]


def section(figures: Mapping[str, Any]) -> list[str]:
    """The section of the page."""
    rows = [
        f"| {way} | {WAYS[way]} | {p50(took):.1f} s | {max(took):.1f} s |" for way, took in figures["seconds"].items()
    ]
    limits = [
        f"`settle_after_s = {after_s:g}`: **{max(figures['seconds'][way]) - after_s:.1f} s** after the limit at the longest"
        for way, (after_s, _) in SERVICES.items()
    ]
    return [
        "## From a death to the end of its transaction",
        "",
        f"By `make bench ONLY=settled`: {figures['deaths']} writers of each way are killed after their decision, at random moments; until "
        "their transactions have ended, `read_committed` consumers of their partitions wait. The time runs from the death of the "
        f"process until a consumer has its message. The machine's load was {figures['load']:.0f} at the end.",
        "",
        f"![How many deaths are settled after so many seconds, by who settles]({PICTURE})",
        "",
        "| way | who settles | median | longest |",
        "|---|---|---:|---:|",
        *rows,
        "",
        f"- `dualwrite serve`, {'; '.join(limits)} (aim: 5 s).",
        "- *The next owner* is a new process, with its imports: a busy machine starts it slowly. Opening alone takes [half a "
        "second](fleets.md#what-a-dead-member-holds-back).",
        "",
    ]
