"""Where the library's words stand in what a user of the Data Source is shown: as near to its beginning as Spark allows."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.drivers import paused_below
from harness.spark import SPARKS_ERRORS
from harness.spark import numbers as numbered
from harness.spark_source import ArmedSource, nothing_is_left, options, write_with
from pyspark.errors import StreamingQueryException

from dualwrite import Unavailable
from dualwrite.sinks.spark import JobFailed, foreach_batch, register, write_batch
from dualwrite.sinks.spark.per_partition import BatchJob

pytestmark = [pytest.mark.spark, pytest.mark.slow]

REFUSED = "dualwrite.errors.TransactionAborted: table 'numbers' does not take the "
NO_TABLE = "dualwrite.errors.ConfigurationError: there is no table 'missing'"


def first_lines(error):
    """The first line with anything in it, and the next."""
    return [line for line in str(error).splitlines() if line][:2]


def test_a_batch_that_fails_says_why_before_any_traceback(spark, numbers):
    register(spark)
    with pytest.raises(SPARKS_ERRORS) as planned:
        write_with(numbers, numbered(spark, 10, 1), batchId="1", dbtable="missing")
    assert NO_TABLE in first_lines(planned.value)[0]

    numbers.execute("ALTER TABLE numbers ADD CHECK (id <> 5)")
    with pytest.raises(SPARKS_ERRORS) as decided:
        write_with(numbers, numbered(spark, 10, 2), batchId="1", databaseLeg="staging")
    assert REFUSED in first_lines(decided.value)[0]
    assert "(row 1 of partition 1, key '5')" in first_lines(decided.value)[0]

    with pytest.raises(SPARKS_ERRORS) as in_task:
        write_with(numbers, numbered(spark, 10, 1), batchId="1", databaseLeg="prepared")
    # Spark's own first line is about the worker; with other versions it is the same line.
    assert REFUSED in " ".join(first_lines(in_task.value))
    assert "(row 6 of partition 0, key '5')" in " ".join(first_lines(in_task.value))

    with pytest.raises(JobFailed) as by_partition:
        write_batch(numbered(spark, 10, 1), batch_id="2", **numbers.settings)
    [reason, stays] = str(by_partition.value).splitlines()
    assert reason.startswith(f"sink '{numbers.sink}' batch '2': TransactionAborted: ")
    assert "table 'numbers' does not take the " in reason
    assert "(row 6 of partition 0, key '5')" in reason
    assert stays.startswith("none of its 1 partitions is committed")
    assert isinstance(by_partition.value.__cause__, SPARKS_ERRORS)


def test_a_stream_by_foreach_batch_says_why_in_the_last_lines_of_the_one_traceback_that_it_shows(
    spark, numbers, run_stream
):
    """Before that line, Spark shows its own stack, which cannot be changed."""
    numbers.execute("ALTER TABLE numbers ADD CHECK (id <> 5)")
    with pytest.raises(StreamingQueryException) as caught:
        run_stream(by=foreach_batch(**numbers.settings))
    _before, *shown = str(caught.value).split("Traceback (most recent call last):")
    assert len(shown) == 1
    told = [line for line in shown[0].splitlines() if line and not line.startswith(" ")]
    assert "JobFailed: sink '" in told[0]
    assert "TransactionAborted: " in told[0]
    assert "table 'numbers' does not take the " in told[0]
    assert told[1].startswith("none of its 1 partitions is committed")


def test_a_stream_by_foreach_batch_that_cannot_be_completed_asks_in_these_lines_to_be_started_again(
    numbers, run_stream, monkeypatch
):
    finish = BatchJob.finish

    def unavailable(_job, **_):
        raise Unavailable("Kafka is away") from OSError("refused")

    def finish_without_kafka(job, *arguments):
        with monkeypatch.context() as away:
            away.setattr(BatchJob, "_end_at_once", lambda *_: None)  # something is left
            away.setattr(BatchJob, "settle_left", unavailable)
            return finish(job, *arguments)

    with monkeypatch.context() as away:
        away.setattr(BatchJob, "finish", finish_without_kafka)
        with pytest.raises(StreamingQueryException) as caught:
            run_stream(by=foreach_batch(**numbers.settings))
    _before, *shown = str(caught.value).split("Traceback (most recent call last):")
    assert len(shown) == 1
    told = [line for line in shown[0].splitlines() if line and not line.startswith(" ")]
    assert "CompletionPending: sink '" in told[0]
    assert (
        "not all of it yet: Kafka is away (run the batch again with the same batch id, or start the stream" in told[0]
    )
    run_stream(by=foreach_batch(**numbers.settings))
    numbers.verify(10)
    nothing_is_left(numbers)


@pytest.fixture
def run_stream(spark, numbers, tmp_path):
    register(spark)
    numbered(spark, 10, 1).write.parquet(str(tmp_path / "source"))

    def run(mode="append", by=None, source="dualwrite", **more):
        rows = spark.readStream.schema("id bigint, name string").parquet(str(tmp_path / "source"))
        if mode != "append":
            rows = rows.groupBy("id").agg({"name": "max"}).toDF("id", "name")
        if by is None:
            stream = rows.writeStream.format(source).outputMode(mode).options(**options(numbers, **more))
        else:
            stream = rows.writeStream.foreachBatch(by)
        stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        stream.start().awaitTermination()

    return run


@pytest.mark.parametrize(
    ("words", "more"),
    [
        pytest.param(NO_TABLE, {"dbtable": "missing"}, marks=pytest.mark.thorough),
        pytest.param(REFUSED, {"databaseLeg": "prepared"}, marks=pytest.mark.thorough),
        (REFUSED, {"databaseLeg": "staging"}),
    ],
)
def test_a_stream_that_fails_says_why_in_its_first_line(numbers, run_stream, words, more):
    numbers.execute("ALTER TABLE numbers ADD CHECK (id <> 5)")
    with pytest.raises(StreamingQueryException) as caught:
        run_stream(**more)
    assert words in first_lines(caught.value)[0]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        pytest.param("update", "dualwrite does not support Update mode", marks=pytest.mark.thorough),  # Spark's own
        ("complete", 'outputMode("update") and foreachBatch with df.write.format("dualwrite")'),
    ],
)
def test_output_modes_that_replace_rows_are_refused_in_the_first_line(numbers, run_stream, mode, words):
    with pytest.raises(StreamingQueryException) as caught:
        run_stream(mode)
    assert words in first_lines(caught.value)[0]
    assert numbers.rows() == numbers.messages() == []


@pytest.fixture
def run_batch(spark, numbers):
    register(spark)

    def run(**more):
        write_with(numbers, numbered(spark, 10, 1), batchId="1", **more)

    return run


@pytest.mark.parametrize("numbers", ["mortal"], indirect=True)
@pytest.mark.parametrize("way", ["run_batch", pytest.param("run_stream", marks=pytest.mark.thorough)])
def test_a_batch_that_is_decided_when_kafka_goes_away_says_first_that_it_must_run_again(
    spark, numbers, mortal_kafka, request, way
):
    """Nothing else completes it: later its messages would be lost. Nor does Spark's failed call of ``abort`` stand before it."""
    run = request.getfixturevalue(way)
    spark.dataSource.register(ArmedSource)

    def go_away():
        [deciding] = paused_below(os.getpid())
        mortal_kafka.kill()
        deciding.resume()

    with ThreadPoolExecutor(1) as threads:
        gone = threads.submit(go_away)
        try:
            with pytest.raises(SPARKS_ERRORS) as caught:
                run(source="armed", inCommit="batch.decided:1:stop", timeoutSeconds="10")
        finally:
            gone.result()
            mortal_kafka.start()
    first = first_lines(caught.value)[0]
    assert "dualwrite.errors.CompletionPending: sink '" in first
    assert "decided, and Kafka has not all of it yet" in first
    assert "(run the batch again with the same batch id, or start the stream again: nothing is written twice, " in first
    assert "do not run" not in str(caught.value)
    assert len(numbers.rows()) == 10
    run()
    numbers.verify(10)
    nothing_is_left(numbers)
