"""``write_batch`` against a naive ``foreachPartition``, and the memory of a task for 1 and for 10 million rows.

Run as ``python -m bench.spark_batch`` in ``tests``. The naive version is what is written first: per partition, ``executemany``
and ``produce`` side by side, without a transaction that spans both; a crash leaves whatever it leaves.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import psutil
import psycopg
import pyarrow as pa
from harness.spark import session
from pyspark.sql import DataFrame, Row, functions
from sqlalchemy import create_engine, make_url, text
from typing_extensions import Self

from bench.servers import Ground, machine, p50, servers
from dualwrite.sinks.spark import write_batch

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from flights import FLIGHTS, TABLE, read_flights, write_parquet  # the examples' own data

_INSERT_ROWS = 1000


def naive(ground: Ground, topic: str, table: str, columns: list[str]) -> Callable[[Iterator[Row]], None]:
    """Rows by ``executemany``, messages by ``produce``; neither knows of the other."""
    dsn = make_url(ground.url).set(drivername="postgresql").render_as_string(hide_password=False)
    kafka = ground.kafka
    statement = f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(columns))})"

    def write(rows: Iterator[Row]) -> None:
        from confluent_kafka import Producer  # a C class: it cannot be pickled with this function

        producer = Producer(kafka)
        with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
            while chunk := list(islice(rows, _INSERT_ROWS)):
                cursor.executemany(statement, chunk)
                for row in chunk:
                    value = json.dumps(row.asDict(), default=str)
                    while True:
                        try:
                            producer.produce(topic, value, row["tailnum"])
                            break
                        except BufferError:
                            producer.poll(0.1)
                producer.poll(0)
        producer.flush()

    return write


def speed(ground: Ground, rounds: int, times: int) -> dict[str, object]:
    """Interleaved runs of both, each into a fresh topic and table; medians."""
    seconds: dict[str, list[float]] = {"write_batch": [], "naive": []}
    with tempfile.TemporaryDirectory() as directory:
        spark = session("local[2]")
        source = Path(directory) / "flights"
        write_parquet(pa.concat_tables([read_flights()] * times), source, files=4)
        df = spark.read.parquet(str(source))
        engine = create_engine(ground.url)
        try:
            for number in range(rounds + 1):
                for name, samples in seconds.items():
                    topic, table = ground.topic(4), f"flights_{name}_{number}"
                    with engine.begin() as connection:
                        connection.execute(text(TABLE.replace("flights", table, 1)))
                    part = df if number else df.limit(10_000)  # the first round only warms up
                    took = _timed(lambda: _run(name, ground, part, topic, table))  # noqa: B023 - called at once
                    if number:
                        samples.append(took)
                        print(f"{name}: {took:.1f} s, {FLIGHTS * times / took / 1000:.0f}k rows/s", flush=True)
                        _check(engine.url.render_as_string(hide_password=False), table, FLIGHTS * times)
                    with engine.begin() as connection:
                        connection.execute(text(f"DROP TABLE {table}"))
                    ground.kafka_server.delete_topic(topic)
        finally:
            engine.dispose()
            spark.stop()
    medians = {name: p50(samples) for name, samples in seconds.items()}
    return {
        "rows": FLIGHTS * times,
        "seconds": seconds,
        "median_s": medians,
        "rows_per_s": {name: FLIGHTS * times / took for name, took in medians.items()},
        "times_as_fast": medians["naive"] / medians["write_batch"],
    }


def _run(name: str, ground: Ground, df: DataFrame, topic: str, table: str) -> None:
    if name == "naive":
        df.foreachPartition(naive(ground, topic, table, df.columns))
        return
    write_batch(
        df,
        sink=f"bench-{table}",
        batch_id="1",
        kafka=ground.kafka,
        url=ground.url,
        topic=topic,
        table=table,
        key="tailnum",
    )


def _check(url: str, table: str, rows: int) -> None:
    engine = create_engine(url)
    with engine.connect() as connection:
        found = connection.scalar(text(f"SELECT count(*) FROM {table}"))
    engine.dispose()
    assert found == rows, f"{table} has {found} rows, not {rows}"


def _timed(function: Callable[[], None]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def memory(ground: Ground, millions: tuple[int, ...]) -> dict[str, object]:
    """The greatest resident size that any Python worker had while it wrote one partition of so many rows."""
    peaks: dict[int, float] = {}
    engine = create_engine(ground.url)
    for count in millions:
        topic, table = ground.topic(1), f"numbers_{count}"
        with engine.begin() as connection:
            connection.execute(text(f"CREATE TABLE {table} (id bigint, name text, amount double precision)"))
        spark = session("local[1]")  # a session of its own, so that the worker is a new process
        df = spark.range(0, count * 1_000_000, 1, 1).select(
            "id", functions.concat(functions.lit("name of "), "id").alias("name"), functions.rand(1).alias("amount")
        )
        with _peak_of_workers() as peak:
            write_batch(
                df,
                sink=f"memory-{count}",
                batch_id="1",
                kafka=ground.kafka,
                url=ground.url,
                topic=topic,
                table=table,
            )
        spark.stop()
        peaks[count] = peak.mebibytes
        print(f"{count} million rows: {peak.mebibytes:.0f} MiB", flush=True)
        with engine.begin() as connection:
            connection.execute(text(f"DROP TABLE {table}"))
        ground.kafka_server.delete_topic(topic)
    engine.dispose()
    return {"peak_mib_by_million_rows": peaks}


class _peak_of_workers:  # noqa: N801 - used as a context manager
    """Watches the high-water marks of the Python workers below this process."""

    def __init__(self) -> None:
        self.mebibytes = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            for process in psutil.Process().children(recursive=True):
                try:
                    if "pyspark.daemon" in process.cmdline():
                        self.mebibytes = max(self.mebibytes, _high_water_mib(process.pid))
                except (psutil.Error, OSError):  # it has ended meanwhile
                    continue


def _high_water_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved runs of each version")
    parser.add_argument("--times", type=int, default=10, help="how many times over the 336,776 flights are written")
    parser.add_argument("--millions", type=int, nargs="*", default=[1, 10], help="rows of the memory measurement")
    parser.add_argument("--json", type=Path, help="write the figures into this file, too")
    arguments = parser.parse_args()
    figures: dict[str, object] = {"machine": machine()}
    with servers() as ground:
        if arguments.rounds:
            figures |= speed(ground, arguments.rounds, arguments.times)
            print(f"write_batch is {figures['times_as_fast']:.1f} times as fast")
        if arguments.millions:
            figures |= memory(ground, tuple(arguments.millions))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
