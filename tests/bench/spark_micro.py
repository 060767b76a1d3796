"""Micro-batches of a stream: what a sink adds to one that keeps nothing, and whether it stays as fast."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession, functions
from sqlalchemy import create_engine, text

from bench.servers import Ground, p50, p95
from dualwrite.sinks.spark import foreach_batch

ROWS = 1000
EMPTY = "an empty sink (noop)"
FORMAT = 'format("dualwrite")'
FOREACH = "foreach_batch"
PATIENCE_S = 3600.0
_AROUND = 10  # the 2nd to the 11th, and as many up to the last


def measure(ground: Ground, spark: SparkSession, directory: Path, batches: int, rounds: int) -> dict[str, Any]:
    """Streams in turn, so many micro-batches each; milliseconds of each micro-batch from its second on."""
    samples: dict[str, list[list[float]]] = {EMPTY: [], FORMAT: [], FOREACH: []}
    for number in range(rounds):
        for name, found in samples.items():
            found.append(_stream(ground, spark, directory / f"{number}-{secrets.token_hex(4)}", name, batches))
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


def _stream(ground: Ground, spark: SparkSession, checkpoint: Path, name: str, batches: int) -> list[float]:
    table = f"micro_{secrets.token_hex(4)}"
    topic = ground.topic(4)
    _execute(ground, f"CREATE TABLE {table} (id bigint, body text)")
    # Its rows are numbered, the same ones again in a replay.
    df = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", ROWS)
        .option("numPartitions", 2)
        .load()
        .select(functions.col("value").alias("id"), functions.lit("x" * 92).alias("body"))
    )
    query = _sink(ground, name, table, topic)(df).option("checkpointLocation", str(checkpoint)).start()
    try:
        until = time.monotonic() + PATIENCE_S
        while query.isActive and (query.lastProgress or {"batchId": -1})["batchId"] < batches - 1:
            if time.monotonic() > until:
                raise TimeoutError(f"{name}: {query.lastProgress}")
            time.sleep(0.2)
    finally:
        query.stop()
    failure = query.exception()
    if failure is not None and query.lastProgress["batchId"] < batches - 1:
        raise failure
    took = {one["batchId"]: float(one["durationMs"]["triggerExecution"]) for one in query.recentProgress}
    if name != EMPTY and _execute(ground, f"SELECT count(*) FROM {table}") < ROWS * batches:
        raise RuntimeError(f"{name}: rows are missing")
    _execute(ground, f"DROP TABLE {table}")
    return [took[number] for number in range(1, batches)]  # the first one starts everything


def _sink(ground: Ground, name: str, table: str, topic: str) -> Callable[[DataFrame], Any]:
    if name == EMPTY:
        return lambda df: df.writeStream.format("noop")
    if name == FOREACH:
        write = foreach_batch(
            sink=f"bench-{table}", kafka=ground.kafka, url=ground.url, topic=topic, table=table, key="id"
        )
        return lambda df: df.writeStream.foreachBatch(write)
    options = {"sink": f"bench-{table}", "url": ground.url, "dbtable": table, "topic": topic, "keyColumn": "id"}
    kafka = {f"kafka.{key}": value for key, value in ground.kafka.items()}
    return lambda df: df.writeStream.format("dualwrite").options(**options, **kafka)


def _execute(ground: Ground, statement: str) -> Any:
    engine = create_engine(ground.url)
    try:
        with engine.begin() as connection:
            result = connection.execute(text(statement))
            return result.scalar() if result.returns_rows else None
    finally:
        engine.dispose()
