"""Micro-batches of a stream: what a sink adds to one that keeps nothing, and whether it stays as fast."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import create_engine, text

from benchmarks.delayed import far_database
from benchmarks.servers import Ground, p50, p95
from benchmarks.spark_ways import SPARKS, Job, by_sparks_sinks
from dualwrite.sinks.spark import foreach_batch

ROWS = 1000
EMPTY = "an empty sink (noop)"
FORMAT = 'format("dualwrite")'
FOREACH = "foreach_batch"
PATIENCE_S = 3600.0
ROUND_TRIPS_MS = (0, 1, 5)
_LOOKS_EVERY_S = 0.002
_WARM_UP = 3  # micro-batches that start everything
_FILES = 2  # in each micro-batch
_AROUND = 10  # the 2nd to the 11th, and as many up to the last


def measure(ground: Ground, spark: SparkSession, directory: Path, batches: int, rounds: int) -> dict[str, Any]:
    """Streams in turn, that many micro-batches each; milliseconds of each micro-batch from its second on."""
    source = directory / "micro"
    _write_files(source, batches)
    samples: dict[str, list[list[float]]] = {EMPTY: [], FORMAT: [], FOREACH: []}
    for number in range(rounds):
        for name, found in samples.items():
            found.append(_stream(ground, spark, source, directory / f"{number}-{secrets.token_hex(4)}", name, batches))
            print(
                f"{name}: p50 {p50(found[-1]):.0f} ms, the 2nd {found[-1][0]:.0f}, the last {found[-1][-1]:.0f}",
                flush=True,
            )
    together = {name: [one for run in found for one in run] for name, found in samples.items()}
    return {
        "rows": ROWS,
        "batches": batches,
        "rounds": rounds,
        "ms": {name: {"p50": p50(found), "p95": p95(found)} for name, found in together.items()},
        "first_ms": {name: p50([one for run in found for one in run[:_AROUND]]) for name, found in samples.items()},
        "last_ms": {name: p50([one for run in found for one in run[-_AROUND:]]) for name, found in samples.items()},
    }


def _write_files(directory: Path, batches: int) -> None:
    """The rows of each micro-batch in files of their own, which Spark reads as a partition each."""
    directory.mkdir()
    rows = ROWS // _FILES
    for number in range(batches * _FILES):
        ids = range(number * rows, (number + 1) * rows)
        table = pa.table({"id": pa.array(ids, pa.int64()), "body": ["x" * 92] * rows})
        pyarrow.parquet.write_table(table, directory / f"{number:06}.parquet")


def _stream(
    ground: Ground, spark: SparkSession, source: Path, checkpoint: Path, name: str, batches: int
) -> list[float]:
    table = f"micro_{secrets.token_hex(4)}"
    topic = ground.topic(4)
    _execute(ground, f"CREATE TABLE {table} (id bigint, body text)")
    df = spark.readStream.schema("id bigint, body string").option("maxFilesPerTrigger", _FILES).parquet(str(source))
    query = (
        _sink(ground, name, table, topic)(df)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)  # it ends by itself: who stops a query breaks into its micro-batch
        .start()
    )
    try:
        if not query.awaitTermination(PATIENCE_S):
            raise TimeoutError(f"{name}: {query.lastProgress}")
    finally:
        query.stop()
    took = {one["batchId"]: float(one["durationMs"]["triggerExecution"]) for one in query.recentProgress}
    if name != EMPTY and _execute(ground, f"SELECT count(*) FROM {table}") != ROWS * batches:
        raise RuntimeError(f"{name}: rows are missing, or too many")
    _execute(ground, f"DROP TABLE {table}")
    return [took[number] for number in range(1, batches)]  # the first one starts everything


def _sink(ground: Ground, name: str, table: str, topic: str) -> Callable[[DataFrame], Any]:
    if name == EMPTY:
        return lambda df: df.writeStream.format("noop")
    if name == SPARKS:
        return lambda df: df.writeStream.foreachBatch(
            lambda rows, _: by_sparks_sinks(Job(ground, rows, "id", topic, table))
        )
    if name == FOREACH:
        write = foreach_batch(
            sink=f"bench-{table}",
            kafka=ground.kafka,
            url=ground.url,
            topic=topic,
            table=table,
            key="id",
            producer_engine="native",
        )
        return lambda df: df.writeStream.foreachBatch(write)
    options = {"sink": f"bench-{table}", "url": ground.url, "dbtable": table, "topic": topic}
    options |= {"keyColumn": "id", "producerEngine": "native"}
    kafka = {f"kafka.{key}": value for key, value in ground.kafka.items()}
    return lambda df: df.writeStream.format("dualwrite").options(**options, **kafka)


def latency(
    ground: Ground, spark: SparkSession, directory: Path, batches: int, rounds: int, *, compared: bool
) -> dict[str, Any]:
    """Streams of one row in each micro-batch, beside Spark's own sinks if `compared`, with the database at several distances.

    Milliseconds from the moment at which a file with one row is there until the row is in the table and its message with a
    ``read_committed`` consumer; and of the micro-batch by itself.
    """
    ways = [FORMAT, FOREACH, *([SPARKS] if compared else [])]
    samples: dict[float, dict[str, list[tuple[float, float]]]] = {
        ms: {name: [] for name in ways} for ms in ROUND_TRIPS_MS
    }
    with far_database(ground) as far:
        for number in range(rounds):
            for round_trip_ms, by_way in samples.items():
                far.delay.value = round_trip_ms / 2000
                for name, found in by_way.items():
                    place = directory / f"latency-{number}-{round_trip_ms}-{secrets.token_hex(4)}"
                    found.extend(_one_by_one(ground, replace(ground, url=far.url), spark, place, name, batches))
                    print(f"{name}, {round_trip_ms} ms away: p50 {p50([one for one, _ in found]):.0f} ms", flush=True)
    return {
        "batches": batches,
        "rounds": rounds,
        "visible_ms": [
            [
                ms,
                name,
                p50([seen for seen, _ in found]),
                p95([seen for seen, _ in found]),
                p50([own for _, own in found]),
            ]
            for ms, by_way in samples.items()
            for name, found in by_way.items()
        ],
    }


def _one_by_one(
    ground: Ground, far: Ground, spark: SparkSession, place: Path, name: str, batches: int
) -> list[tuple[float, float]]:
    """Each file comes when the row of the one before is visible."""
    table, topic, source = f"micro_{secrets.token_hex(4)}", ground.topic(1), place / "source"
    source.mkdir(parents=True)
    _execute(ground, f"CREATE TABLE {table} (id bigint, body text)")
    df = spark.readStream.schema("id bigint, body string").parquet(str(source))
    query = _sink(far, name, table, topic)(df).option("checkpointLocation", str(place / "checkpoint")).start()
    seen: list[float] = []
    consumer = Consumer({**ground.kafka, "group.id": "latency", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    engine = create_engine(ground.url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            for number in range(batches):
                rows = pa.table({"id": pa.array([number], pa.int64()), "body": ["x" * 92]})
                pyarrow.parquet.write_table(rows, place / "next")
                began_s = time.perf_counter()
                (place / "next").rename(source / f"{number:06}.parquet")
                while connection.execute(text(f"SELECT count(*) FROM {table}")).scalar() != number + 1:
                    if not query.isActive or time.perf_counter() - began_s > PATIENCE_S:
                        raise RuntimeError(f"{name}: the row does not come")
                    time.sleep(_LOOKS_EVERY_S)
                while (message := consumer.poll(PATIENCE_S)) is None or message.error():
                    pass
                seen.append((time.perf_counter() - began_s) * 1000)
        query.processAllAvailable()
    finally:
        query.stop()
        consumer.close()
        engine.dispose()
    _execute(ground, f"DROP TABLE {table}")
    took = [float(one["durationMs"]["triggerExecution"]) for one in query.recentProgress if one["numInputRows"]]
    return list(zip(seen[_WARM_UP:], took[_WARM_UP:], strict=True))


def _execute(ground: Ground, statement: str) -> Any:
    engine = create_engine(ground.url)
    try:
        with engine.begin() as connection:
            result = connection.execute(text(statement))
            return result.scalar() if result.returns_rows else None
    finally:
        engine.dispose()
