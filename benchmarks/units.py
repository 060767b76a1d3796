"""Units of many transactions against the same transactions without units, and the memory of a reader of a large unit.

Records of 100 bytes into one partition, one `produce` for each, 10,000 in a transaction; the ways take turns. Then a unit of a
million records of 300 bytes is read in a process of its own, into an image of a thousand sums.
``PYTHONPATH=tests/proof python -m benchmarks --only units`` (four minutes)
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import psutil
from sqlalchemy import create_engine

from benchmarks.servers import Ground, p50
from dualwrite import DualWriter, WriterLimits
from dualwrite.units import KeyedImage, UnitReader, UnitRecord, UnitWriter

PART = 10_000
UNITS, PLAIN = "one unit", "transactions"
VALUE, LARGE = b"v" * 100, b"v" * 300
KEYS = 1000
MIB = 1 << 20


class Sums:
    """The number of bytes by the remainder of the key: an image that does not grow with the log."""

    def __init__(self) -> None:
        self.shown: dict[int, int] = {}
        self.change: dict[int, int] = {}

    def apply(self, record: UnitRecord) -> None:
        number = int(record.key or b"") % KEYS
        self.change[number] = self.change.get(number, 0) + len(record.value or b"")

    def publish(self) -> None:
        for number, size in self.change.items():
            self.shown[number] = self.shown.get(number, 0) + size
        self.change = {}

    def revert(self) -> None:
        self.change = {}

    def contents(self) -> dict[int, int]:
        return dict(self.shown)


def run(ground: Ground, *, records: int = 200_000, rounds: int = 5, large: int = 1_000_000) -> dict[str, Any]:
    """Measure; medians."""
    seconds: dict[str, list[float]] = {UNITS: [], PLAIN: [], "read": []}
    for _ in range(rounds):
        topic = ground.topic(1)
        seconds[UNITS].append(_timed(lambda topic=topic: _in_units(ground, topic, records)))
        seconds[PLAIN].append(_timed(lambda: _plain(ground, ground.topic(1), records)))
        image = KeyedImage()
        with UnitReader(topic, kafka=ground.kafka, image=image) as reader:
            seconds["read"].append(_timed(reader.catch_up))
        assert len(image) == records
    topic = ground.topic(1)
    _in_units(ground, topic, large, LARGE)
    read_s, grown = _measured_apart(ground.kafka, topic, large * len(LARGE))
    return {
        "records": records,
        "per second": {name: records / p50(found) for name, found in seconds.items()},
        "large": {
            "records": large,
            "MiB": large * len(LARGE) / MIB,
            "per second": large / read_s,
            "MiB of the reader": grown / MIB,
        },
    }


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _in_units(ground: Ground, topic: str, records: int, value: bytes = VALUE) -> None:
    with (
        UnitWriter(topic, kafka=ground.kafka, database=ground.url, part_records=PART) as writer,
        writer.unit("bench") as unit,
    ):
        for number in range(records):
            unit.produce(value, b"%d" % number)


def _plain(ground: Ground, topic: str, records: int) -> None:
    engine = create_engine(ground.url)
    with DualWriter(topic, kafka=ground.kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        for begin in range(0, records, PART):
            with writer.transaction() as tx:
                for number in range(begin, min(begin + PART, records)):
                    tx.produce(topic, VALUE, b"%d" % number, partition=0)
    engine.dispose()


def _measured_apart(kafka: Mapping[str, str], topic: str, expected: int) -> tuple[float, int]:
    """Seconds of reading the unit, and the bytes by which a fresh process has grown meanwhile."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read_apart, args=(theirs, dict(kafka), topic, expected))
    process.start()
    theirs.close()
    found: tuple[float, int] = ours.recv()
    process.join()
    return found


def _read_apart(answer: Connection, kafka: dict[str, str], topic: str, expected: int) -> None:
    myself = psutil.Process()
    image = Sums()
    with UnitReader(topic, kafka=kafka, image=image) as reader:
        before = most = myself.memory_info().rss
        started = time.perf_counter()
        while not image.shown:
            reader.poll()
            most = max(most, myself.memory_info().rss)
        took = time.perf_counter() - started
    assert sum(image.shown.values()) == expected
    answer.send((took, most - before))


def section(figures: Mapping[str, Any]) -> list[str]:
    """The part of the page."""
    rates, large = figures["per second"], figures["large"]
    return [
        "## Units larger than a transaction",
        "",
        f"[A unit](units.md) of {figures['records']:,} records of {len(VALUE)} bytes with keys, against as many in plain dual writes, "
        f"each way with {PART:,} records in a transaction and one `produce` for each record; opening and closing included. The "
        "ways take turns; medians.",
        "",
        "| way | records per second |",
        "|---|---:|",
        f"| a unit, written | {rates[UNITS]:,.0f} |",
        f"| the same transactions without a unit | {rates[PLAIN]:,.0f} |",
        f"| a unit, read into a `KeyedImage` | {rates['read']:,.0f} |",
        "",
        f"- A unit against plain transactions: **{rates[UNITS] / rates[PLAIN]:.2f}** of the records per second.",
        f"- A unit of {large['records']:,} records, {large['MiB']:,.0f} MiB, read into an image of {KEYS:,} sums: its reader "
        f"grew by **{large['MiB of the reader']:.0f} MiB**, and read {large['per second']:,.0f} records per second.",
        "",
    ]
