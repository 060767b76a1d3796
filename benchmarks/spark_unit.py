"""A Spark batch of a thousand transactions as one unit; its driver is killed in the middle, and so is its first reader.

The driver runs in a process of its own on ``local[8]``. It is killed when half of the transactions are decided: no reader may
see anything of the batch then. It runs again, and writes a second, small batch. A reader that has waited from the beginning is
killed in the middle of the batch; the next one must find each row once, each partition in order, and then the second batch.
``make bench-spark ONLY=unit`` (four minutes)
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from harness.drivers import kill_group
from harness.spark import bare_session
from pyspark.sql import functions
from sqlalchemy import create_engine, text

from benchmarks.servers import Ground
from dualwrite.protocol.values import pool_of_sink
from dualwrite.sinks.spark import write_batch
from dualwrite.units import BatchReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).parents[1]
SINK, TABLE, LARGE, SECOND = "unit", "unit_rows", "1", "2"
TASKS = 8
ROWS_OF_SECOND = 100
LATER_S = 5.0
TOPIC_PARTITIONS = 4
MIB = 1 << 20


def measure(ground: Ground, directory: Path, *, partitions: int = 1000, rows: int = 2_000_000) -> dict[str, Any]:
    """Write, kill, and read; what the second reader needed.

    Raises:
        RuntimeError: A batch was seen in part, or not as it was written.
    """
    topic, unit_topic = ground.topic(TOPIC_PARTITIONS), ground.topic(1)
    _execute(ground, f"CREATE TABLE {TABLE} (id bigint, body text)")
    settings = {"kafka": ground.kafka, "url": ground.url, "topic": topic, "unit_topic": unit_topic}
    job = directory / "unit.json"
    job.write_text(json.dumps({"settings": settings, "partitions": partitions, "rows": rows}), encoding="utf-8")
    with _reader(ground.kafka, unit_topic, rows) as (first, told_by_first):
        decided = _killed_in_the_middle(ground, job, partitions)
        with BatchReader(unit_topic, kafka=ground.kafka) as reader:
            _require(reader.next_batch(LATER_S) is None, "a batch is visible whose driver was killed in the middle")
        begun = time.perf_counter()
        _require(_driver(job).wait() == 0, "the driver has failed")
        wrote_s = time.perf_counter() - begun
        _require(told_by_first.recv() == "half", "the first reader has not come to the middle of the batch")
        os.kill(first.pid or 0, signal.SIGKILL)
    with _reader(ground.kafka, unit_topic, rows) as (_, told):
        _require(told.recv() == "half", "the second reader has not come to the middle of the batch")
        found: dict[str, Any] = told.recv()
    _require("wrong" not in found, found.get("wrong", ""))
    done = {
        **found,
        "decided before": decided,
        "transactions": _decided(ground),
        "producers": _execute(ground, f"SELECT count(*) FROM dualwrite_slot WHERE pool = '{pool_of_sink(SINK)}'"),
        "rows": rows,
        "wrote_s": wrote_s,
    }
    _execute(ground, f"DROP TABLE {TABLE}")
    print(done, flush=True)
    return done


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


def _decided(ground: Ground) -> int:
    """How many partitions of the batch are in the ledger, each by a transaction of its own."""
    found: int = _execute(
        ground,
        f"SELECT count(*) FROM dualwrite_ledger WHERE sink = '{SINK}' AND batch_id = '{LARGE}' AND partition_id >= 0",
    )
    return found


def _execute(ground: Ground, statement: str) -> Any:
    engine = create_engine(ground.url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            result = connection.execute(text(statement))
            return result.scalar() if result.returns_rows else None
    finally:
        engine.dispose()


# The driver


def _driver(job: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "benchmarks.spark_unit", str(job)], cwd=ROOT, start_new_session=True)


def _killed_in_the_middle(ground: Ground, job: Path, partitions: int) -> int:
    """Start a driver, and kill it with its JVM once half of the partitions are decided; how many were."""
    process = _driver(job)
    decided = 0
    while decided < partitions // 2:
        _require(process.poll() is None, "the driver has ended before it was killed")
        decided = _decided(ground)
        time.sleep(0.1)
    kill_group(process)
    return decided


def _rows(spark: SparkSession, rows: int, partitions: int) -> DataFrame:
    """Rows of about 250 bytes of digits that look random."""
    hashes = (functions.xxhash64("id", functions.lit(number)).cast("string") for number in range(12))
    return spark.range(0, rows, 1, partitions).select("id", functions.concat(*hashes).alias("body"))


def drive(job: Path) -> None:
    """Write both batches."""
    document = json.loads(job.read_text(encoding="utf-8"))
    spark = bare_session(f"local[{TASKS}]")
    for batch, rows, partitions in (
        (LARGE, document["rows"], document["partitions"]),
        (SECOND, ROWS_OF_SECOND, 2),
    ):
        write_batch(
            _rows(spark, rows, partitions), batch_id=batch, sink=SINK, table=TABLE, key="id", **document["settings"]
        )
    spark.stop()


# Its readers


@contextmanager
def _reader(kafka: Mapping[str, str], unit_topic: str, rows: int) -> Iterator[tuple[BaseProcess, Connection]]:
    """A reader in a process of its own, and what it tells."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_read, args=(theirs, dict(kafka), unit_topic, rows))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


def _read(tell: Connection, kafka: dict[str, str], unit_topic: str, rows: int) -> None:
    myself = psutil.Process()
    seen = bytearray(rows)
    read = size = 0
    last: dict[int, int] = {}
    wrong: list[str] = []
    with BatchReader(unit_topic, kafka=kafka) as reader:
        before = most = myself.memory_info().rss
        large = next(batch for batch in iter(reader.next_batch, ...) if batch is not None)
        started = time.perf_counter()
        for record in large.records():
            if record.offset <= last.get(record.partition, -1):
                wrong.append(f"offset {record.offset} of partition {record.partition} is out of order")
            last[record.partition] = record.offset
            seen[int(record.key or b"")] += 1
            size += len(record.value or b"")
            read += 1
            if read % 1000 == 0:
                most = max(most, myself.memory_info().rss)
            if read == rows // 2:
                tell.send("half")
        took = time.perf_counter() - started
        second = next(batch for batch in iter(reader.next_batch, ...) if batch is not None)
        of_second = sum(1 for _ in second.records())
    if (large.name, second.name) != (LARGE, SECOND):
        wrong.append(f"the batches are {large.name} and {second.name}")
    if seen.count(1) != rows or read != rows or of_second != ROWS_OF_SECOND:
        wrong.append(f"{seen.count(1)} rows once, {read} messages, {of_second} in the second batch")
    figures = {"MiB": size / MIB, "MiB of the reader": (most - before) / MIB, "per second": read / took}
    tell.send({**figures, **({"wrong": "; ".join(wrong[:3])} if wrong else {})})


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
