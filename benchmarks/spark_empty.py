"""One row in 200 partitions, in each way, beside Spark's own work for them: ``PYTHONPATH=tests/proof python -m benchmarks.spark_empty``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from harness.spark import SparkCase, bare_session
from harness.spark_source import write_with
from pyspark.sql import functions
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

from benchmarks.servers import servers
from dualwrite.sinks.spark import register, write_batch

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

PARTITIONS = 200
RUNS = 3


class NothingSource(DataSource):
    """``format("nothing")``: takes all rows, and does nothing with them."""

    @classmethod
    def name(cls) -> str:
        """The short name."""
        return "nothing"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """A writer for whatever there is."""
        del schema, overwrite
        return _NothingWriter()


class _NothingWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Take all rows."""
        for _ in iterator:
            pass
        return WriterCommitMessage()


def main() -> None:
    """Print the seconds of a few runs of each way, taken in turns; the first ones start the workers."""
    spark = bare_session("local[2]")
    register(spark)
    spark.dataSource.register(NothingSource)
    rows = spark.range(0, PARTITIONS, 1, PARTITIONS).select("id", functions.lit("row").alias("name")).where("id = 0")
    with servers() as ground:
        case = SparkCase(ground.kafka, ground.url, ground.topic(2))
        ways: dict[str, Callable[[int], object]] = {
            "Spark's mapInArrow alone": lambda _: rows.mapInArrow(lambda batches: batches, rows.schema).collect(),
            "write_batch": lambda run: write_batch(rows, batch_id=f"partitions {run}", **case.settings),
            "a Data Source that does nothing": lambda _: rows.write.format("nothing").mode("append").save(),
            "staging": lambda run: write_with(case, rows, batchId=f"staging {run}", databaseLeg="staging"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for run in range(RUNS):
            for name, write in ways.items():
                begun = time.monotonic()
                write(run)
                seconds[name].append(time.monotonic() - begun)
        for name, found in seconds.items():
            print(f"{name}: {', '.join(f'{second:.1f}' for second in found)} s", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
