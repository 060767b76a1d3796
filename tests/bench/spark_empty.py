"""One row in 200 partitions, in each way, beside Spark's own work for them: ``python -m bench.spark_empty`` in ``tests``."""

from __future__ import annotations

import time
from collections.abc import Callable

from harness.spark import SparkCase, session
from harness.spark_source import write_with
from pyspark.sql import functions

from bench.servers import servers
from dualwrite.sinks.spark import register, write_batch

PARTITIONS = 200
RUNS = 2


def main() -> None:
    """Print the seconds of each of a few runs; the first starts the workers."""
    spark = session("local[2]")
    register(spark)
    rows = spark.range(0, PARTITIONS, 1, PARTITIONS).select("id", functions.lit("row").alias("name")).where("id = 0")
    with servers() as ground:
        case = SparkCase(ground.kafka, ground.url, ground.topic(2))
        ways: dict[str, Callable[[int], object]] = {
            "Spark alone": lambda _: rows.mapInArrow(lambda batches: batches, rows.schema).collect(),
            "write_batch": lambda run: write_batch(rows, batch_id=f"partitions {run}", **case.settings),
            "staging": lambda run: write_with(case, rows, batchId=f"staging {run}", databaseLeg="staging"),
        }
        for name, write in ways.items():
            seconds = []
            for run in range(RUNS):
                begun = time.monotonic()
                write(run)
                seconds.append(time.monotonic() - begun)
            print(f"{name}: {', '.join(f'{second:.1f}' for second in seconds)} s", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
