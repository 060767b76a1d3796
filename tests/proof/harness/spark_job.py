"""A Spark driver as a process of its own, to be killed: ``python -m harness.spark_job JOB.json``."""

import json
import sys
from functools import partial
from pathlib import Path

from dualwrite.sinks.spark import foreach_batch, per_partition, register, write_batch, write_many
from harness.spark import ArmedTask, numbers, session
from harness.spark_source import ArmedSource


def batch(spark, document):
    """Write the numbers once; the first attempt at one partition arms a fail point in its worker."""
    per_partition.PartitionTask = partial(
        ArmedTask, point=document.get("point", ""), pid_file=document.get("pid_file", "")
    )
    write_batch(numbers(spark), batch_id="1", **document["settings"])


def stream(spark, document):
    """Write each file of numbers that there is by now as a micro-batch, and end."""
    query = (
        spark.readStream.schema("id bigint, name string")
        .option("maxFilesPerTrigger", "1")
        .parquet(document["source"])
        .writeStream.foreachBatch(foreach_batch(**document["settings"]))
        .option("checkpointLocation", document["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def source_stream(spark, document):
    """Write each file of numbers as a micro-batch by the Data Source, which the options arm."""
    rows = spark.readStream.schema("id bigint, name string").option("maxFilesPerTrigger", "1")
    _write_armed(spark, document, rows.parquet(document["source"]).repartition(2))


def kafka_stream(spark, document):
    """Write what a topic has by now, some records in a micro-batch, by the Data Source, which the options arm, or as it is."""
    records = spark.readStream.format("kafka").options(**document["source"]).load()
    parsed = records.selectExpr("from_json(cast(value as string), 'id bigint, name string') AS found")
    _write_armed(spark, document, parsed.select("found.*"), document.get("format", "armed"))


def delta_streams(spark, document):
    """Make a Delta table in three commits, and write it by a stream of each way, a file in a micro-batch."""
    register(spark)
    for first in range(0, document["rows"], document["rows"] // 3):
        rows = spark.range(first, first + document["rows"] // 3, 1, 1)
        rows = rows.selectExpr("id", "concat('row ', id) AS name")
        rows.write.format("delta").mode("append").save(document["source"])
    rows = spark.readStream.format("delta").option("maxFilesPerTrigger", "1").load(document["source"])
    by_partition = rows.writeStream.foreachBatch(foreach_batch(**document["settings"]))
    whole = rows.writeStream.format("dualwrite").options(**document["options"])
    for number, stream in enumerate((by_partition, whole)):
        checkpointed = stream.option("checkpointLocation", f"{document['checkpoint']}-{number}")
        checkpointed.trigger(availableNow=True).start().awaitTermination()


def _write_armed(spark, document, rows, name="armed"):
    if name == "armed":
        spark.dataSource.register(ArmedSource)
    query = (
        rows.writeStream.format(name)
        .options(**document["options"])
        .option("checkpointLocation", document["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def continuous(spark, document):
    """Start a stream of the Data Source with the continuous trigger, which does not end by itself."""
    register(spark)
    rows = spark.readStream.format("rate").load().selectExpr("value AS id", "'x' AS name")
    stream = rows.writeStream.format("dualwrite").options(**document["options"])
    stream = stream.option("checkpointLocation", document["checkpoint"]).trigger(continuous="100 milliseconds")
    stream.start().awaitTermination()


def many(spark, document):
    """Write the rows of files into several tables, by their tags."""
    write_many(spark.read.parquet(document["source"]), batch_id="1", **document["settings"])


def source(spark, document):
    """Write the numbers by the Data Source, without registering it."""
    numbers(spark).write.format("dualwrite").mode("append").options(**document["options"]).save()


_DOES = {
    "batch": batch,
    "many": many,
    "stream": stream,
    "source": source,
    "source_stream": source_stream,
    "continuous": continuous,
    "kafka_stream": kafka_stream,
    "delta_streams": delta_streams,
}


def main():
    document = json.loads(Path(sys.argv[1]).read_text())
    spark = session(document.get("master", "local[2]"), **document.get("session", {}))
    _DOES[document["do"]](spark, document)
    spark.stop()


if __name__ == "__main__":
    main()
