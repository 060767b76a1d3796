"""``write_batch`` against a naive ``foreachPartition``, and the memory of a task for 1 and for 10 million rows.

Run as ``python -m bench.spark_batch`` in ``tests``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from pathlib import Path

import psutil
from harness.spark import session
from pyspark.sql import functions
from sqlalchemy import create_engine, text
from typing_extensions import Self

from bench.servers import Ground, machine, servers
from bench.spark_ways import by_hand, by_write_batch, compare, flights, ratio
from dualwrite.sinks.spark import write_batch


def speed(ground: Ground, rounds: int, times: int) -> dict[str, object]:
    """``write_batch`` and the naive way in turn, on flights."""
    with tempfile.TemporaryDirectory() as directory:
        spark = session("local[2]")
        try:
            ways = {"write_batch": by_write_batch, "naive": by_hand}
            figures = compare(ground, flights(spark, Path(directory), times), ways, rounds)
        finally:
            spark.stop()
    return {**figures, "times_as_fast": ratio(figures, "naive", "write_batch")}


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
