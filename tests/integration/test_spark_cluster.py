"""On a cluster, whose executors are processes that die: a batch ends whole, once, and nothing of it is left behind."""

import psutil
import pytest
from harness.driver_process import Failed
from harness.patience import PATIENCE_S
from harness.spark_cluster import write
from harness.spark_source import nothing_is_left

pytestmark = [pytest.mark.spark, pytest.mark.slow]

WAYS = ["write_batch", "staging", "prepared"]


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("way", "point"),
    [
        ("write_batch", "spark.rows_copied"),
        thorough("write_batch", "write.recorded"),
        thorough("staging", "spark.rows_copied"),
        thorough("staging", "batch.handed_over"),
        thorough("prepared", "spark.rows_copied"),
        thorough("prepared", "batch.handed_over"),
    ],
)
def test_an_executor_dies_and_its_worker_wakes_up_too_late(cluster, numbers, tmp_path, way, point):
    """The worker is an orphan, and stands still until the batch is done."""
    # The database ends the session of a paused owner that holds locks; the test does not wait a minute for it.
    numbers.execute(f"ALTER DATABASE {numbers.url.rpartition('/')[2]} SET idle_in_transaction_session_timeout = '3s'")
    files = {name: str(tmp_path / name) for name in ("counter", "pid_file")}
    running = cluster.start(write, way, numbers, point=f"{point}:1:stop", **files)
    [worker] = cluster.paused(running)
    try:
        cluster.executor_of(worker).kill()
        running.result(PATIENCE_S)
        numbers.verify()
        assert worker.status() == psutil.STATUS_STOPPED
        worker.resume()
        _, alive = psutil.wait_procs([worker], timeout=PATIENCE_S)
        assert not alive
    finally:
        if worker.is_running():
            worker.kill()
    numbers.verify()
    cluster.run(write, way, numbers)
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["write_batch", "staging", "prepared"])
def test_an_executor_dies_with_shuffle_files_that_others_need(cluster, numbers, tmp_path, way):
    """Spark computes them again, and restarts the writing stage: its partitions are written by another run of it."""
    running = cluster.start(
        write, way, numbers, "shuffled", point="spark.rows_copied:1:stop", counter=str(tmp_path / "counter")
    )
    [worker] = cluster.paused(running)
    cluster.executor_of(worker).kill()
    assert running.result(PATIENCE_S)["failed_stages"] >= 1
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thorough
def test_a_task_that_dies_as_often_as_spark_runs_it_leaves_nothing(cluster, numbers, way):
    with pytest.raises(Failed, match="failed 4 times"):
        cluster.run(write, way, numbers, point="spark.rows_copied", attempts=4)
    if way != "write_batch":
        assert numbers.rows() == numbers.messages() == []
    cluster.run(write, way, numbers)
    numbers.verify()
    nothing_is_left(numbers)
