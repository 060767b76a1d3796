"""``dualwrite serve`` and Spark: what a killed driver's tasks have decided is completed, and the batch stays on the page."""

from contextlib import ExitStack

import psutil
import pytest
from harness.drivers import Drivers, kill_group
from harness.patience import wait_until
from harness.service import replicas, serve_file
from harness.spark import numbers as numbered

from dualwrite.recovery.recover import status
from dualwrite.sinks.spark import write_batch

pytestmark = pytest.mark.slow


def test_what_the_tasks_of_a_killed_driver_have_decided_is_completed_and_its_batch_is_shown(spark, numbers, tmp_path):
    drivers, pid_file = Drivers(tmp_path), tmp_path / "pid"
    settings = numbers.settings
    driver = drivers.start(
        do="batch", settings=settings, point="write.decided:1:stop", pid_file=str(pid_file), master="local[2]"
    )
    try:
        wait_until(lambda: driver.poll() is not None or (pid_file.exists() and pid_file.read_text()))
        assert driver.poll() is None, drivers.log.read_text()[-3000:]
        worker = psutil.Process(int(pid_file.read_text()))
        wait_until(lambda: worker.status() == psutil.STATUS_STOPPED)
    finally:
        kill_group(driver)
    worker.kill()
    kafka = {"bootstrap.servers": settings["kafka"]["bootstrap.servers"]}
    [left] = [one for one in status(kafka=kafka, database=numbers.url) if one.decided_is_open]
    assert left.row.transactional_id.startswith(f"{settings['sink']}.spark#")
    with ExitStack() as later:
        replica = replicas(later)(serve_file(tmp_path, kafka, numbers.url, timeout_s=60))
        replica.says(f"{left.row.transactional_id}: 1 id settled, 1 rolled forward")
        replica.looks_again()
        [batch] = replica.target()["batches"]
        assert (batch["sink"], batch["batch_id"], batch["phase"]) == (settings["sink"], "1", "writing")
        assert batch["outlook"].startswith("its job may be at work")
        page = replica.get("/")[1].partition("<h3>Spark batches</h3>")[2]
        assert f'data-label="sink">{settings["sink"]}<' in page
        assert not [one for one in status(kafka=kafka, database=numbers.url) if one.decided_is_open]
        write_batch(numbered(spark), batch_id="1", **settings)
        numbers.verify()
        wait_until(lambda: replica.target()["batches"] == [], otherwise=lambda: replica.log)
        assert replica.end() == 0, replica.log
