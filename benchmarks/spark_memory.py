"""The memory of a Spark task for 1 and for 10 million rows in its partition."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
from harness.spark import bare_session
from pyspark.sql import functions
from sqlalchemy import create_engine, text
from typing_extensions import Self

from benchmarks.servers import Ground
from dualwrite.sinks.spark import write_batch


def measure(ground: Ground, *, millions: tuple[int, ...] = (1, 10)) -> dict[str, object]:
    """The greatest resident size that any Python worker had while it wrote one partition of that many rows."""
    peaks: dict[int, float] = {}
    engine = create_engine(ground.url)
    for count in millions:
        topic, table = ground.topic(1), f"numbers_{count}"
        with engine.begin() as connection:
            connection.execute(text(f"CREATE TABLE {table} (id bigint, name text, amount double precision)"))
        spark = bare_session("local[1]")  # a session of its own, so that the worker is a new process
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
                allow_nondeterministic=True,  # the numbers have a seed
                producer_engine="native",
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
