"""Drivers that die, workers that are paused and wake up too late, streams that start again: both sides end up equal."""

import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest
from harness.drivers import Drivers, kill_group
from harness.patience import PATIENCE_S, wait_until
from harness.spark import ROWS, ArmedTask
from harness.spark import numbers as numbered

from dualwrite.sinks.spark import JobFailed, per_partition, write_batch
from dualwrite.testing.checker import read_committed

pytestmark = pytest.mark.slow


@pytest.fixture
def drivers(tmp_path):
    return Drivers(tmp_path)


# In every run a driver is killed that has begun its batch: by the next test.
@pytest.mark.thorough
@pytest.mark.parametrize("point", ["ledger.begun", "spark.driver_started", "spark.driver_done"])
def test_a_driver_that_kills_itself_is_followed_by_one_that_finishes(spark, numbers, drivers, point):
    drivers.run(do="batch", settings=numbers.settings, failpoint=point, ends_with=-signal.SIGKILL)
    report = write_batch(numbered(spark), batch_id="1", **numbers.settings)
    assert report.written_rows == (0 if point == "spark.driver_done" else ROWS)
    numbers.verify()


# The database ends the session of a paused owner that holds locks; the tests do not wait a minute for it.
POINTS = [
    "write.decided",
    *(
        pytest.param(point, marks=pytest.mark.thorough)
        for point in (
            "spark.task_started",
            "slot.leased",
            "spark.rows_copied",
            "ledger.inserted",
            "write.prepared",
            "write.recorded",
            "spark.task_done",
        )
    ),
]


@pytest.mark.parametrize("point", POINTS)
def test_a_paused_worker_of_a_killed_driver_wakes_up_and_changes_nothing(spark, numbers, drivers, tmp_path, point):
    database = numbers.url.rpartition("/")[2]
    numbers.execute(f"ALTER DATABASE {database} SET idle_in_transaction_session_timeout = '3s'")
    pid_file = tmp_path / "pid"
    driver = drivers.start(
        do="batch", settings=numbers.settings, point=f"{point}:1:stop", pid_file=str(pid_file), master="local[2]"
    )
    try:
        wait_until(lambda: driver.poll() is not None or (pid_file.exists() and pid_file.read_text()))
        assert driver.poll() is None, drivers.log.read_text()[-3000:]
    except AssertionError:
        kill_group(driver)
        raise
    worker = psutil.Process(int(pid_file.read_text()))
    try:
        wait_until(lambda: worker.status() == psutil.STATUS_STOPPED)
        kill_group(driver)
        write_batch(numbered(spark), batch_id="1", **numbers.settings)
        numbers.verify()
        assert worker.status() == psutil.STATUS_STOPPED
        worker.resume()
        _, alive = psutil.wait_procs([worker], timeout=PATIENCE_S)
        assert not alive
    finally:
        kill_group(driver)
        if worker.is_running():
            worker.kill()
    numbers.verify()
    write_batch(numbered(spark), batch_id="1", **numbers.settings)
    numbers.verify()


@pytest.mark.parametrize(
    "point",
    [
        "write.produced",
        pytest.param("spark.rows_copied", marks=pytest.mark.thorough),
        pytest.param("write.decided", marks=pytest.mark.thorough),
    ],
)
def test_a_cancelled_job_whose_workers_are_killed_is_run_again(spark, numbers, tmp_path, monkeypatch, point):
    pid_file = tmp_path / "pid"
    monkeypatch.setattr(
        per_partition, "PartitionTask", partial(ArmedTask, point=f"{point}:1:stop", pid_file=str(pid_file))
    )
    with ThreadPoolExecutor(1) as threads:
        cancelled = threads.submit(write_batch, numbered(spark), batch_id="1", **numbers.settings)
        wait_until(lambda: cancelled.done() or (pid_file.exists() and pid_file.read_text()))
        worker = psutil.Process(int(pid_file.read_text()))
        try:
            wait_until(lambda: worker.status() == psutil.STATUS_STOPPED)
            spark.sparkContext.cancelAllJobs()
            with pytest.raises(JobFailed, match="(?i)cancelled"):
                cancelled.result(PATIENCE_S)
        finally:
            if worker.is_running():
                worker.kill()
    monkeypatch.undo()
    write_batch(numbered(spark), batch_id="1", **numbers.settings)
    numbers.verify()


# In every run the example of a stream dies once, and a stream of the Data Source again and again.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "kills", [("spark.driver_done:1", "write.decided:1"), ("spark.driver_started:2", "spark.rows_copied:1")]
)
def test_a_stream_killed_again_and_again_writes_each_file_once(spark, numbers, drivers, tmp_path, kills):
    source = tmp_path / "source"
    numbered(spark, ROWS, 1).repartitionByRange(5, "id").write.parquet(str(source))
    document = {
        "do": "stream",
        "settings": numbers.settings,
        "source": str(source),
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    for failpoint in kills:
        process = drivers.start(**document, failpoint=failpoint)
        assert process.wait(PATIENCE_S) != 0, drivers.log.read_text()[-3000:]
        kill_group(process)
    assert 0 < len(numbers.rows()) < ROWS
    drivers.run(**document)
    numbers.verify()
    # Five micro-batches of one query, by the id that the checkpoint keeps.
    batches = numbers.execute("SELECT DISTINCT batch_id FROM dualwrite_ledger ORDER BY 1")
    queries, numbers_seen = zip(*(batch.split("/") for (batch,) in batches), strict=True)
    assert len(set(queries)) == 1
    assert len(queries[0]) == 36
    assert numbers_seen == ("0", "1", "2", "3", "4")
    drivers.run(**document)
    numbers.verify()


def test_no_secret_shows_in_any_log_or_error(spark, numbers, drivers, dualwrite_postgres):
    """A job that fails in a task, with everything logged: neither the driver's log nor the workers' hold a password."""
    canary = "canary41f7"
    role = f"canary_{numbers.sink.replace('-', '_')}"
    numbers.execute(f"CREATE ROLE {role} LOGIN SUPERUSER PASSWORD '{canary}'")
    try:
        before, _, after = numbers.url.partition("://")
        url = f"{before}://{role}:{canary}@{after.rpartition('@')[2]}"
        settings = {**numbers.settings, "url": url, "kafka": {**numbers.kafka, "client.id": "canaries"}}
        numbers.execute("ALTER TABLE numbers ADD CHECK (id < 900)")
        process = drivers.start(do="batch", settings=settings)
        assert process.wait(PATIENCE_S) != 0
        kill_group(process)
        log = drivers.log.read_text()
        assert "numbers_id_check" in log  # the failure itself is reported
        assert canary not in log
    finally:
        numbers.execute(f"DROP ROLE {role}")
    assert len(numbers.rows()) == len(read_committed(numbers.kafka, numbers.topic))
