"""The figures of Spark, measured now: ``make bench-spark`` (hours, on a machine that does nothing else).

Each part is kept as soon as it is measured. With ``--small`` everything runs once, on little data, into a directory of its own:
it shows that the harness works, and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.spark import bare_session, connector_jars
from pyspark.sql import SparkSession

from benchmarks import page, spark_micro, spark_page, spark_unit, transactions
from benchmarks.servers import Ground, kafka_version, machine, p50, servers
from benchmarks.spark_ways import (
    ALL_WAYS,
    BATCH_BYTES,
    COMPARING,
    NO_BATCH_BYTES,
    OUR_WAYS,
    OVERWRITING,
    SPARKS,
    SPARKS_LZ4,
    WARM_UP_ROWS,
    compare,
    flights,
    overwriting_rows,
    run,
    small_rows,
)
from dualwrite.errors import Unavailable
from dualwrite.sinks.spark import register

ROOT = Path(__file__).parents[1]
PARTS = ("flights", "small", "comparing", "overwriting", "micro", "latency", "rows", "partitions", "deciding", "unit")


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int = 5
    flights_times: int = 10
    small_rows: int = 1_000_000
    batches: int = 100
    latency_batches: int = 30
    rows: Sequence[int] = (10_000, 100_000, 1_000_000, 10_000_000)
    partitions: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    partition_rows: int = 1_000_000
    transactions: Sequence[int] = (64, 1000)
    unit: tuple[int, int] = (1000, 2_000_000)


SMALL = Size(1, 1, 20_000, 12, 5, (1_000, 10_000), (1, 4), 10_000, (8, 16), (24, 24_000))


def sparks_jars() -> str | None:
    """The jars of Spark's own sinks; None, and a word, where they cannot be had."""
    try:
        return connector_jars()
    except Unavailable as error:
        print(f"Spark's own sinks are left out: {error}", flush=True)
        return None


def costs(
    ground: Ground, spark: SparkSession, points: Sequence[tuple[int, int]], rounds: int
) -> dict[str, list[tuple[int, int, float]]]:
    """Median seconds of our ways for a number of rows and partitions."""
    for name, way in OUR_WAYS.items():
        run(
            ground, small_rows(spark, WARM_UP_ROWS), name, way, df=small_rows(spark, WARM_UP_ROWS).df, rows=WARM_UP_ROWS
        )
    samples: dict[str, dict[tuple[int, int], list[float]]] = {name: {one: [] for one in points} for name in OUR_WAYS}
    for _ in range(rounds):
        for rows, partitions in points:
            data = small_rows(spark, rows, partitions)
            for name, way in OUR_WAYS.items():
                samples[name][rows, partitions].append(run(ground, data, name, way, df=data.df, rows=rows))
                print(
                    f"{name}: {rows} rows, {partitions} partitions: {samples[name][rows, partitions][-1]:.2f} s",
                    flush=True,
                )
    return {name: [(*point, p50(found)) for point, found in by.items()] for name, by in samples.items()}


def deciding(ground: Ground, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Median seconds to decide and to complete that many prepared transactions."""
    topic = ground.topic(4)
    transactions.measure(ground, 8, topic, partitions=4)
    legs = {
        count: [transactions.measure(ground, count, topic, partitions=4) for _ in range(rounds)] for count in counts
    }
    return [
        {"count": count, **{f"{leg}_s": p50([one[leg].seconds for one in found]) for leg in ("decide", "complete")}}
        for count, found in legs.items()
    ]


def main() -> None:
    """Measure what is asked for, keep the figures, and write page and pictures from all that are known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--rounds", type=int, help="interleaved rounds of each part, 5 if not given")
    parser.add_argument("--small", action="store_true", help="everything once, on little data, into .cache/bench-spark")
    arguments = parser.parse_args()
    size = SMALL if arguments.small else Size()
    rounds = arguments.rounds or size.rounds
    directory = ROOT / ".cache" / "bench-spark" if arguments.small else ROOT / "docs"
    directory.mkdir(parents=True, exist_ok=True)
    store = directory / page.FIGURES.name if arguments.small else page.FIGURES
    figures = page.known(store)
    figures["machine"], figures["kafka"] = machine(), kafka_version()
    jars = sparks_jars()
    ways = {name: way for name, way in ALL_WAYS.items() if name not in (SPARKS, SPARKS_LZ4) or jars is not None}
    with servers() as ground, tempfile.TemporaryDirectory() as temporary:
        spark = bare_session("local[2]", **_settings(jars))
        register(spark)
        made = Path(temporary)
        measures: Mapping[str, Callable[[], object]] = {
            "flights": lambda: compare(ground, flights(spark, made, size.flights_times), ways, rounds),
            "small": lambda: compare(ground, small_rows(spark, size.small_rows), ways, rounds),
            "comparing": lambda: compare(ground, flights(spark, made, size.flights_times), COMPARING, rounds),
            "overwriting": lambda: compare(ground, overwriting_rows(spark, size.small_rows), OVERWRITING, rounds),
            "micro": lambda: spark_micro.measure(ground, spark, made, size.batches, rounds),
            "latency": lambda: spark_micro.latency(
                ground, spark, made, size.latency_batches, rounds, compared=jars is not None
            ),
            "rows": lambda: costs(ground, spark, [(rows, 4) for rows in size.rows], rounds),
            "partitions": lambda: costs(
                ground, spark, [(size.partition_rows, number) for number in size.partitions], rounds
            ),
            "deciding": lambda: deciding(ground, size.transactions, rounds),
            "unit": lambda: spark_unit.measure(ground, made, partitions=size.unit[0], rows=size.unit[1]),
        }
        try:
            for name in PARTS:
                if name in (arguments.only or PARTS):
                    print(f"{name} ...", flush=True)
                    figures.setdefault("bench_spark", {})[name] = measures[name]()
                    # After each: what took an hour to measure is not lost to what comes after it.
                    page.keep(figures, store, directory / page.PAGE.name)
                    spark_page.draw(figures["bench_spark"], directory)
        finally:
            spark.stop()
    print(f"written: {directory.name}/benchmarks.md", flush=True)


def _settings(jars: str | None) -> dict[str, str]:
    found = {"spark.sql.streaming.numRecentProgressUpdates": "10000", BATCH_BYTES: NO_BATCH_BYTES}
    return found if jars is None else {**found, "spark.jars": jars}


if __name__ == "__main__":
    main()
