"""A job fails while one of its tasks goes on: nothing of that task is left open when the run is given up, or is left later."""

import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from harness.one_task import ROWS, OneTask
from harness.patience import PATIENCE_S
from harness.spark import SPARKS_ERRORS, WaitingTask
from harness.spark import numbers as numbered
from harness.spark_source import nothing_is_left, options, write_with
from pyspark import TaskContext

from dualwrite import DualWriteError, Fenced, Unavailable, failpoints, recover
from dualwrite.clock import Deadline
from dualwrite.sinks.spark import JobFailed, foreach_batch, register, write_batch
from dualwrite.sinks.spark import per_partition as job_module
from dualwrite.sinks.spark.per_partition import BatchJob
from dualwrite.sinks.spark.plan import SparkJobs
from dualwrite.sinks.spark.worker import Attempt
from dualwrite.stores.sql.leases import SlotPool
from dualwrite.stores.sql.ledger import Runs


@pytest.fixture(params=["staging", "prepared", "write_batch"])
def job(numbers, request):
    made = OneTask(numbers, request.param)
    made.begin()
    return made


@contextmanager
def failing_at(point, job):
    """Let the job fail when the task first passes a point."""
    passed = []

    def observe(name):
        has_failed = point in passed
        passed.append(name)
        if name == point and not has_failed:
            passed[:] = [name]
            job.fail()

    with failpoints.watched(observe):
        yield passed
    assert point in passed


POINTS = [
    "spark.task_started", "slot.leased", "claim.before", "claim.row_raised", "claim.initialized",
    "write.begun", "write.checked", "write.produced", "write.prepared",
]  # fmt: skip
# Up to the claim all ways do the same.
IN_EVERY_RUN = {
    *(("write_batch", point) for point in ("spark.task_started", "claim.before", "write.prepared")),
    *((way, "write.prepared") for way in ("staging", "prepared")),
}


@pytest.mark.parametrize(
    ("job", "point"),
    [
        pytest.param(way, point, marks=() if (way, point) in IN_EVERY_RUN else pytest.mark.thorough)
        for way in ("staging", "prepared", "write_batch")
        for point in POINTS
    ],
    indirect=["job"],
)
def test_a_task_that_goes_on_when_its_job_has_failed_leaves_nothing(numbers, job, point):
    with pytest.raises(DualWriteError), failing_at(point, job) as passed:
        job.run_task()
    if point == "claim.before":  # the settler does not come again: if the task died here, this would stay open
        assert "write.begun" not in passed
    assert numbers.rows() == numbers.messages() == []
    nothing_is_left(numbers)
    job.finish()
    nothing_is_left(numbers)


@pytest.mark.parametrize(
    "point",
    [
        "write.prepared",
        *(pytest.param(point, marks=pytest.mark.thorough) for point in ("claim.initialized", "write.produced", "write.recorded")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("job", ["staging", "write_batch"], indirect=True)
def test_a_recovery_on_a_schedule_leaves_alone_a_task_that_is_at_work(numbers, job, point):
    """A lease that has not expired is the task's sign of life; so is the lease of an undecided part that it has handed over."""
    reports = []

    def recover_at(name):
        if name == point:
            reports.append(recover(kafka=numbers.kafka, database=numbers.url, open_for_s=0.001))

    with failpoints.watched(recover_at):
        done = job.run_task()
    if job.way == "staging":
        recover_at(point)
    assert reports
    assert [report.settled for report in reports] == [[]] * len(reports)
    nothing_was_open = point == "claim.initialized" and job.way != "staging"
    assert reports[-1].skipped == ([] if nothing_was_open else [f"{numbers.sink}.spark#1"])
    job.decide(done)
    numbers.verify(ROWS)
    nothing_is_left(numbers)


@pytest.mark.parametrize(
    ("job", "slot_is_taken"),
    [
        ("staging", False),
        pytest.param("prepared", False, marks=pytest.mark.thorough),
        pytest.param("prepared", True, marks=pytest.mark.thorough),
    ],
    indirect=["job"],
)
def test_a_job_that_fails_waits_for_the_task_that_is_handing_over_and_undoes_that(
    numbers, job, slot_is_taken, monkeypatch
):
    """The task was let through, and its transaction is not prepared or committed yet: a settler could not see what it leaves.

    A prepared task keeps its slot for the driver after that, and the job may have taken it already. A staged one keeps it in the
    same transaction.
    """
    waits, real_replace, real_written = threading.Event(), Runs.replace, Attempt.require_written
    real_keep = SlotPool.keep
    failing = threading.Thread(target=job.fail)

    def keep(self, *args):
        if slot_is_taken:
            failing.join(PATIENCE_S)
        kept = real_keep(self, *args)
        if job.way == "staging":  # it has looked at the run in the same statement
            fail()
        return kept

    def fail():
        failing.start()
        while failing.is_alive() and not waits.wait(0.05):
            pass

    def replace(self, sink, name, connection):
        run = real_replace(self, sink, name, connection)
        if run is None:
            waits.set()
        return run

    def require_written(self, *args):
        found = real_written(self, *args)
        passed.append(self.partition)
        fail()
        return found

    passed = []
    monkeypatch.setattr(Runs, "replace", replace)
    monkeypatch.setattr(Attempt, "require_written", require_written)
    monkeypatch.setattr(SlotPool, "keep", keep)
    with pytest.raises(Fenced, match="no longer holds the slot") if slot_is_taken else suppress(Fenced):
        assert job.run_task() is not None
    failing.join(PATIENCE_S)
    assert not failing.is_alive()
    assert len(passed) == (0 if job.way == "staging" else 1)
    assert waits.is_set()
    assert numbers.rows() == numbers.messages() == []
    nothing_is_left(numbers)


def test_a_task_commits_nothing_after_its_job_has_failed_though_its_slot_could_not_be_settled(
    numbers, monkeypatch, caplog
):
    """Kafka, or the database, is away for a moment when the job fails: so no claim of the slot fences the task."""
    job, left, failed = OneTask(numbers, "write_batch"), ExitStack(), []

    def fail(name):
        if name != "write.prepared" or failed:
            return
        monkeypatch.setattr(BatchJob, "_settle_slots", raising(Unavailable("Kafka does not answer")))
        with pytest.raises(ZeroDivisionError) as caught, left:
            raise ZeroDivisionError
        failed.append(caught.value)
        monkeypatch.undo()

    left.enter_context(job.driving())
    with pytest.raises(Fenced, match="was given up"), failpoints.watched(fail):
        job.run_task()
    words = "none of its 1 partitions is committed, on either side; run it again with the same batch id"
    assert f"failed: {words}" in caplog.text
    assert "not settled after a failure; the next run does it: Kafka does not answer" in caplog.text
    if sys.version_info >= (3, 11):
        assert [note.partition(" failed: ")[2] for note in failed[0].__notes__] == [words]
    assert numbers.rows() == numbers.messages() == []
    job.finish()
    nothing_is_left(numbers)


def raising(error):
    """A function that raises it."""

    def function(*_):
        raise error

    return function


@pytest.fixture
def patient_spark(spark):
    """The session, which leaves the workers of killed tasks alone: such a task goes on until it ends by itself."""
    conf, name = spark._jvm.org.apache.spark.SparkEnv.get().conf(), "spark.python.task.killTimeout"
    conf.set(name, f"{PATIENCE_S:.0f}s")
    yield spark
    conf.remove(name)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "committed"), [pytest.param("_settle_slots", 0, marks=pytest.mark.thorough), ("_end_run", 1)]
)
def test_nothing_is_committed_after_write_batch_has_raised_though_it_could_not_settle(
    patient_spark, numbers, tmp_path, monkeypatch, method, committed
):
    """The task holds its slot, and has flushed its messages: it decides, unless its run is given up, and that is awaited."""
    stands, goes_on = tmp_path / "stands", tmp_path / "goes on"
    real_begin, real_end = BatchJob.begin, SparkJobs.end

    def begin(self, *arguments):
        written = real_begin(self, *arguments)
        monkeypatch.setattr(BatchJob, method, raising(Unavailable("the database does not answer")))
        return written

    def end(self, *arguments):
        goes_on.touch()
        real_end(self, *arguments)

    def fail_when_the_other_stands(batches):
        if TaskContext.get().partitionId() == 1:
            while not stands.exists():
                time.sleep(0.01)
            raise RuntimeError("a task fails")
        yield from batches

    monkeypatch.setattr(BatchJob, "begin", begin)
    monkeypatch.setattr(SparkJobs, "end", end)
    monkeypatch.setattr(job_module, "PartitionTask", partial(WaitingTask, stands=str(stands), goes_on=str(goes_on)))
    df = numbered(patient_spark, 10, 2)
    jobs = SparkJobs(patient_spark.sparkContext)
    with pytest.raises(JobFailed) as caught, jobs.started():
        write_batch(df.mapInArrow(fail_when_the_other_stands, df.schema), batch_id="1", **numbers.settings)
    found = numbers.rows()
    jobs.end("the test", Deadline(PATIENCE_S))
    assert numbers.rows() == numbers.messages() == found
    assert len(found) == committed * 5
    [reason, words] = str(caught.value).splitlines()
    assert reason.endswith("batch '1': RuntimeError: a task fails")
    assert words.startswith(
        "1 of its 2 partitions are committed" if committed else "none of its 2 partitions is committed"
    )
    assert ("may commit more" in words) is (method == "_end_run")
    monkeypatch.undo()
    write_batch(df, batch_id="1", **numbers.settings)
    numbers.verify(10)
    nothing_is_left(numbers)


@pytest.mark.parametrize("job", ["staging", "write_batch"], indirect=True)
def test_the_tasks_of_a_former_run_write_nothing_when_another_has_begun(job):
    """Two drivers for one batch: the second one's tasks count."""
    former = OneTask(job.case, job.way)
    former.begin()
    job.begin()
    with pytest.raises(Fenced, match="another one has begun"):
        former.run_task()
    job.finish()


LAST_ATTEMPT = 2
"""Of the session that the tests share, which runs a task three times."""


def half_failing(flag, fails_after_s, ends_after_s):
    """Rows of two partitions: when the last attempt at one of them has begun, one fails after a time, the other ends after a time.

    Args:
        flag: A file to be made by the one, for which the other waits.
        fails_after_s: In seconds; so long rows of the one are awaited.
        ends_after_s: In seconds.
    """

    def pass_through(batches):
        context = TaskContext.get()
        for batch in batches:
            if context.partitionId() == 1:
                if context.attemptNumber() == LAST_ATTEMPT:
                    Path(flag).touch()
                    time.sleep(fails_after_s)
                raise RuntimeError("a task fails")
            yield batch
            ends_at = None
            while ends_at is None or time.monotonic() < ends_at:
                if ends_at is None and Path(flag).exists():
                    ends_at = time.monotonic() + ends_after_s
                time.sleep(0.01)

    return pass_through


WAYS = ["write_batch", "staging", "prepared"]
STREAMS = ["foreach_batch", "staging_stream", "prepared_stream"]
LATER = [pytest.param(number, marks=pytest.mark.thorough) for number in range(1, 50)]
"""When one task fails and the other ends: fifty times."""


def write_in(way, numbers, spark, fail, tmp_path):
    """Write a batch, or the first micro-batch of a stream, in that way."""
    leg = {"databaseLeg": way.partition("_")[0]}
    if way == "write_batch":
        write_batch(fail(numbered(spark, partitions=2)), batch_id="1", **numbers.settings)
        return
    if way in WAYS:
        write_with(numbers, fail(numbered(spark, partitions=2)), batchId="1", **leg)
        return
    numbered(spark, partitions=2).write.parquet(str(tmp_path / "source"))
    rows = fail(spark.readStream.schema("id long, name string").parquet(str(tmp_path / "source")))
    stream = rows.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    if way == "foreach_batch":
        stream = stream.foreachBatch(foreach_batch(**numbers.settings))
    else:
        stream = stream.format("dualwrite").options(**options(numbers, **leg))
    stream.start().awaitTermination()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("number", [0, *LATER])
@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.thorough) for way in STREAMS)])
def test_a_job_of_which_a_task_fails_leaves_nothing_when_its_tasks_have_ended(
    spark, numbers, tmp_path, dualwrite_topic, way, number
):
    register(spark)
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    source = half_failing(str(tmp_path / "flag"), 0.3, 0.3 + 0.05 * (number % 50) * (1 if number % 2 else -0.12))
    jobs = SparkJobs(spark.sparkContext)
    with pytest.raises(SPARKS_ERRORS), jobs.started():
        write_in(way, numbers, spark, lambda df: df.mapInArrow(source, "id long, name string"), tmp_path)
    if way not in {"write_batch", "foreach_batch"}:  # these have waited themselves
        jobs.end(way, Deadline(PATIENCE_S))
    nothing_is_left(numbers)
    assert numbers.rows() == numbers.messages()
