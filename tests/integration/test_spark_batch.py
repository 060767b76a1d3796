"""A batch on real Spark, Kafka and PostgreSQL: written once, however often it is run and whatever its tasks suffer."""

import re
import threading
from functools import partial

import pytest
from harness.spark import PARTITIONS, ROWS, SPARKS_ERRORS, ArmedTask, newest_job
from harness.spark import numbers as numbered
from pyspark.sql import functions

from dualwrite import ConfigurationError, Fenced, TransactionAborted, failpoints
from dualwrite.sinks.spark import foreach_partition, per_partition, write_batch
from dualwrite.sinks.spark.options import SinkOptions
from dualwrite.sinks.spark.partition_task import write_partition
from dualwrite.sinks.spark.per_partition import BatchJob
from dualwrite.sinks.spark.sendable import row_batches

TASK_POINTS = [
    "spark.task_started",
    "ledger.checked",
    "slot.leased",
    "claim.before",
    "claim.row_raised",
    "claim.settled",
    "claim.initialized",
    "write.begun",
    "write.checked",
    "write.produced",
    "spark.rows_copied",
    "ledger.inserted",
    "write.body_done",
    "write.prepared",
    "write.recorded",
    "write.decided",
    "write.completed",
    "slot.released",
    "spark.task_done",
]
DECIDED = {"write.decided", "write.completed", "slot.released", "spark.task_done"}


def test_the_report_tells_what_the_batch_has_and_what_this_run_has_written(spark, numbers):
    for written_rows, written_partitions in ((ROWS, PARTITIONS), (0, 0)):
        report = write_batch(numbered(spark), batch_id="1", **numbers.settings)
        assert (report.rows, report.messages, report.partitions) == (ROWS, ROWS, PARTITIONS)
        assert (report.written_rows, report.written_partitions) == (written_rows, written_partitions)
    numbers.verify()


def test_a_done_partition_takes_no_row_and_no_slot(spark, numbers):
    df = numbered(spark)
    write_batch(df, batch_id="1", **numbers.settings)
    before = numbers.execute("SELECT transactional_id, incarnation FROM kafka_transaction_state ORDER BY 1")
    with BatchJob(SinkOptions(**numbers.settings), "1") as batch:
        task = batch.plan(df.schema)

        def rows():
            raise AssertionError("a row was asked for")
            yield

        assert not write_partition(task, 0, 0, rows()).written
    assert before == numbers.execute("SELECT transactional_id, incarnation FROM kafka_transaction_state ORDER BY 1")


@pytest.mark.parametrize("partitions", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_an_empty_dataframe_writes_nothing_and_is_done(spark, numbers, partitions):
    empty = numbered(spark, partitions=partitions).where("name = 'nothing'")
    for _ in range(2):
        report = write_batch(empty, batch_id="1", **numbers.settings)
        assert (report.rows, report.partitions) == (0, partitions)
    numbers.verify(0)


def test_partitions_without_rows_are_recorded_by_the_driver_in_one_transaction(spark, numbers):
    """Most partitions of a shuffle may be empty; their tasks connect to nothing."""
    one_row = numbered(spark, 20, 20).where("id = 0")
    report = write_batch(one_row, batch_id="1", **numbers.settings)
    assert (report.rows, report.partitions, report.written_partitions, report.written_rows) == (1, 20, 20, 1)
    [(transactions, empty)] = numbers.execute(
        "SELECT count(DISTINCT xmin::text), count(*) FROM dualwrite_ledger WHERE partition_id >= 0 AND row_count = 0"
    )
    assert (transactions, empty) == (1, 19)
    assert [seen.phase for seen in numbers.batches()] == ["completed"]
    assert write_batch(one_row, batch_id="1", **numbers.settings).written_partitions == 0
    numbers.verify(1)


def test_a_dataframe_without_partitions_writes_nothing(spark, numbers):
    empty = numbered(spark).where("1 = 0")
    assert write_batch(empty, batch_id="1", **numbers.settings).partitions == 0
    numbers.verify(0)


@pytest.mark.thorough
def test_a_shuffled_dataframe_is_written_as_adaptive_execution_cuts_it(spark, numbers):
    df = numbered(spark).repartition("id").groupBy("id").agg(functions.max("name").alias("name"))
    report = write_batch(df, batch_id="1", **numbers.settings)
    numbers.verify()
    assert report.partitions == numbers.execute("SELECT max(partition_count) FROM dualwrite_ledger")[0][0]


def test_a_batch_of_which_nothing_is_written_may_be_cut_otherwise(spark, numbers):
    with BatchJob(SinkOptions(**numbers.settings), "1") as batch:
        batch.plan(numbered(spark).schema)
        batch.begin(7)
    assert write_batch(numbered(spark), batch_id="1", **numbers.settings).partitions == 4
    numbers.verify()
    with pytest.raises(ConfigurationError, match=r"begun with 4 partitions and now has 7.*repartition\(4"):
        write_batch(numbered(spark, partitions=7), batch_id="1", **numbers.settings)
    numbers.verify()


def test_a_task_of_a_run_that_was_cut_otherwise_writes_nothing(spark, numbers):
    df = numbered(spark, partitions=7)
    former = foreach_partition(df, batch_id="1", **numbers.settings)
    foreach_partition(numbered(spark), batch_id="1", **numbers.settings)
    with pytest.raises(SPARKS_ERRORS, match="was given up, or another one has begun"):
        df.foreachPartition(former)
    numbers.verify(0)


def test_foreach_partition_and_write_batch_know_of_each_other(spark, numbers):
    df = numbered(spark)
    df.foreachPartition(foreach_partition(df, batch_id="1", **numbers.settings))
    assert write_batch(df, batch_id="1", **numbers.settings).written_partitions == 0
    numbers.verify()


def test_tasks_that_die_each_at_another_point_are_run_again_and_their_rows_are_there_once(spark, numbers, monkeypatch):
    points = dict(enumerate(TASK_POINTS))
    monkeypatch.setattr(per_partition, "PartitionTask", partial(ArmedTask, points=points))
    # A task that continued with the slot of a former one would not claim it.
    settings = {**numbers.settings, "keep_slots": False}
    report = write_batch(numbered(spark, partitions=len(points)), batch_id="1", **settings)
    numbers.verify()
    assert newest_job(spark)["failed_tasks"] == len(points)
    assert report.written_partitions == len(points) - len(DECIDED)
    assert not numbers.execute("SELECT * FROM dualwrite_slot WHERE lease_owner IS NOT NULL")


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["kill", "raise"])
@pytest.mark.parametrize("point", TASK_POINTS)
def test_a_task_that_dies_at_any_point_is_run_again_and_its_rows_are_there_once(
    spark, numbers, monkeypatch, point, action
):
    monkeypatch.setattr(per_partition, "PartitionTask", partial(ArmedTask, point=f"{point}:1:{action}"))
    report = write_batch(numbered(spark), batch_id="1", **numbers.settings)
    numbers.verify()
    # The attempt that died after the decision has written the partition; the next one finds it done.
    assert report.written_partitions == PARTITIONS - (point in DECIDED)
    assert not numbers.execute("SELECT * FROM dualwrite_slot WHERE lease_owner IS NOT NULL")


@pytest.mark.parametrize("point", [pytest.param("spark.rows_copied", marks=pytest.mark.thorough), "write.decided"])
def test_a_task_of_foreach_partition_that_dies_is_run_again(spark, numbers, monkeypatch, point):
    monkeypatch.setattr(per_partition, "PartitionTask", partial(ArmedTask, point=point))
    df = numbered(spark)
    df.foreachPartition(foreach_partition(df, batch_id="1", **numbers.settings))
    monkeypatch.undo()
    # Nothing settles at its end: the next run of the batch does, or any run once the lease is over.
    foreach_partition(df, batch_id="1", **numbers.settings)
    numbers.verify()


@pytest.mark.parametrize("way", ["write_batch", "foreach_partition"])
def test_a_failure_in_the_middle_of_the_input_leaves_no_half_partition(spark, numbers, way):
    """Spark closes the socket to the worker, which then sees an end like any other: the rows so far must not be committed."""
    rows = 20_000

    def write(df):
        if way == "write_batch":
            write_batch(df, batch_id="1", **numbers.settings)
        else:
            df.foreachPartition(foreach_partition(df, batch_id="1", **numbers.settings))

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    try:
        name = functions.when(functions.col("id") < 17_050, functions.col("name")).otherwise(
            functions.raise_error("no more of the input")
        )
        with pytest.raises(SPARKS_ERRORS, match="no more of the input"):
            write(numbered(spark, rows).withColumn("name", name))
        write(numbered(spark, rows))
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    numbers.verify(rows)
    assert {row_count for (row_count,) in numbers.execute("SELECT row_count FROM dualwrite_ledger")} == {
        0,
        rows // PARTITIONS,
    }


def test_of_two_attempts_at_once_one_wins(spark, numbers):
    df = numbered(spark, partitions=1)
    rows = df.collect()
    both_have_begun = threading.Barrier(2)
    reports = {}

    with BatchJob(SinkOptions(**numbers.settings), "1") as batch:
        task = batch.plan(df.schema)
        batch.begin(1)

        def batches():
            yield from row_batches(rows[:500], df.schema, task.layout)
            both_have_begun.wait(120)
            yield from row_batches(rows[500:], df.schema, task.layout)

        def attempt(number):
            reports[number] = write_partition(task, 0, number, batches())

        attempts = [threading.Thread(target=attempt, args=(number,)) for number in range(2)]
        for thread in attempts:
            thread.start()
        for thread in attempts:
            thread.join()
    assert sorted(report.written for report in reports.values()) == [False, True]
    numbers.verify()


def test_of_two_attempts_at_rows_with_a_primary_key_one_wins(spark, numbers):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    df = numbered(spark, partitions=1)
    rows = df.collect()
    reports = {}
    with BatchJob(SinkOptions(**numbers.settings), "1") as batch:
        task = batch.plan(df.schema)
        batch.begin(1)

        def attempt(number):
            reports[number] = write_partition(task, 0, number, row_batches(rows, df.schema, task.layout))

        attempts = [threading.Thread(target=attempt, args=(number,)) for number in range(2)]
        for thread in attempts:
            thread.start()
        for thread in attempts:
            thread.join()
    assert sorted(report.written for report in reports.values()) == [False, True]
    numbers.verify()


def test_another_driver_of_the_batch_takes_over_from_a_running_task(spark, numbers):
    df = numbered(spark, partitions=1)
    rows = df.collect()
    settings = SinkOptions(**numbers.settings)
    with BatchJob(settings, "1") as batch:
        task = batch.plan(df.schema)
        batch.begin(1)

        def batches():
            yield from row_batches(rows, df.schema, task.layout)
            with BatchJob(settings, "1"):
                pass  # it settles what tasks of the batch hold, and gives their run up

        with pytest.raises((Fenced, TransactionAborted)):
            write_partition(task, 0, 0, batches())
        numbers.verify(0)
        with pytest.raises(Fenced, match="was given up"):
            write_partition(task, 0, 1, row_batches(rows, df.schema, task.layout))
    with BatchJob(settings, "1") as other:
        task = other.plan(df.schema)
        other.begin(1)
        assert write_partition(task, 0, 0, row_batches(rows, df.schema, task.layout)).written
    numbers.verify()


def test_progress_is_logged(spark, numbers, caplog):
    with caplog.at_level("INFO", "dualwrite.sinks.spark"):
        write_batch(numbered(spark), batch_id="1", **{**numbers.settings, "progress_s": 0.01})
    assert re.findall(r"batch '1': (settling|writing, begun|decided|completed)", caplog.text) == [
        "settling",
        "writing, begun",
        "decided",
        "settling",
        "completed",
    ]
    assert "of 4 partitions committed" in caplog.text
    assert "completed, 1000 rows in 4 partitions" in caplog.text
    assert "put aside" not in caplog.text, "there is no quarantine"


def test_the_batch_is_in_the_view_with_its_moments(spark, numbers):
    first = None
    for _ in range(2):  # the second run writes nothing, and changes nothing that is seen
        report = write_batch(numbered(spark), batch_id="1", **numbers.settings)
        (seen,) = numbers.batches()
        assert (seen.phase, seen.row_count, seen.message_count) == ("completed", ROWS, ROWS)
        assert (seen.written_partitions, seen.partition_count) == (PARTITIONS, PARTITIONS)
        assert seen.started_at < seen.decided_at < seen.completed_at
        first = first or seen
        assert seen == first
        assert bool(report.written_bytes) == bool(report.written_rows)
    begun = numbers.execute("SELECT min(started_at), max(written_at) FROM dualwrite_ledger WHERE partition_id >= 0")[0]
    assert seen.started_at < begun[0] < begun[1] == seen.decided_at


@pytest.mark.parametrize("own", [None, pytest.param("my own job", marks=pytest.mark.thorough)])
def test_spark_shows_which_batch_a_job_belongs_to(spark, numbers, own):
    context = spark.sparkContext
    context.setLocalProperty("spark.job.description", own)
    try:
        write_batch(numbered(spark), batch_id="1", **numbers.settings)
        assert context.getLocalProperty("spark.job.description") == own
    finally:
        context.setLocalProperty("spark.job.description", None)
    jobs = context._jsc.sc().statusStore().jobsList(None)
    newest = max((jobs.apply(number) for number in range(jobs.size())), key=lambda job: job.jobId())
    assert newest.description().get() == (own or f"dualwrite: sink {numbers.sink!r} batch '1'")


def test_every_fail_point_of_the_sink_is_tested():
    names = {name for name in failpoints.FAILPOINTS if name.startswith(("spark.", "slot.", "ledger."))}
    assert names <= {*TASK_POINTS, "ledger.begun", "spark.driver_started", "spark.driver_done"}
