"""A Spark Connect server on this machine, and a client of it, which has no JVM to ask."""

from __future__ import annotations

import os

from pyspark.sql import SparkSession
from tenacity import retry, retry_if_exception_message, stop_after_attempt

from dualwrite.sinks.spark import foreach_batch, foreach_partition, register, write_batch
from harness.driver_process import DriverProcess
from harness.spark import DAEMON, SparkCase, numbers, set_environment
from harness.spark_source import options, write_with


class Connected(DriverProcess):
    """A process with a session of Spark Connect."""

    def __init__(self) -> None:
        super().__init__(_start)


def _start() -> None:
    set_environment()
    # A port that is free, as Spark has it in tests of its own.
    os.environ |= {"SPARK_TESTING": "1", "SPARK_LOCAL_IP": "127.0.0.1"}
    register(SparkSession.builder.remote("local[2]").config(*DAEMON).getOrCreate())


def write(case: SparkCase, source: str = "dualwrite", **more) -> None:
    """Write the numbers by the Data Source."""
    write_with(case, numbers(SparkSession.active()), source=source, **more)


def stream(case: SparkCase, source: str, checkpoint: str) -> str:
    """Write each file of numbers as a micro-batch by the Data Source; return the query's id."""
    return _run(_files(source).writeStream.format("dualwrite").options(**options(case)), checkpoint)


def refused(case: SparkCase, way: str, source: str, checkpoint: str) -> None:
    """Try what needs a classic session."""
    if way == "foreach_batch":
        _run(_files(source).writeStream.foreachBatch(foreach_batch(**case.settings)), checkpoint)
    else:
        try_it = {"write_batch": write_batch, "foreach_partition": foreach_partition}[way]
        try_it(numbers(SparkSession.active()), batch_id="1", **case.settings)


def _files(source: str):
    schema = "id bigint, name string"
    return SparkSession.active().readStream.schema(schema).option("maxFilesPerTrigger", "1").parquet(source)


# Spark gives a Python worker ten seconds to start, which a busy machine does not always keep.
@retry(
    retry=retry_if_exception_message(match="(?s).*worker failed to connect back"),
    stop=stop_after_attempt(5),
    reraise=True,
)
def _started(writer):
    return writer.start()


def _run(writer, checkpoint: str) -> str:
    query = _started(writer.option("checkpointLocation", checkpoint).trigger(availableNow=True))
    query.awaitTermination()
    return query.id
