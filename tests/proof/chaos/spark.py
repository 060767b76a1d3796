"""The Spark part of the run: Python workers that die at every fail point of a task, drivers at every one of theirs.

Slower than the rest, since a driver starts a JVM; so each point dies a few times instead of hundreds. The session of the
tasks runs all the time, a driver that dies is a process of its own.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

from harness.drivers import Drivers, kill_group, paused_below
from harness.spark import ROWS, ArmedTask, SparkCase, numbers, session
from sqlalchemy import create_engine

from chaos.results import Results
from chaos.servers import Servers
from dualwrite.failpoints import FAILPOINTS
from dualwrite.migrations import upgrade
from dualwrite.sinks.spark import per_partition, write_batch

DRIVER = ["spark.driver_started", "spark.driver_done", "ledger.begun"]
NOT_IN_A_TASK = {"ledger.begun", "write.before_abort", "write.rolled_back", "spark.driver_started", "spark.driver_done"}
TASK = [
    name
    for name in FAILPOINTS
    if name.startswith(("write.", "slot.", "ledger.", "spark.", "claim.")) and name not in NOT_IN_A_TASK
]
RECOVERING = ["settle.looked", "settle.before_commit", "settle.committed", "settle.before_retire", "settle.retired"]
"""Points that a task or a driver passes only where it finds what another has left."""
BOUND_S = 300
FAULT_EVERY = 5
"""In one of so many batches the broker dies as well, in another PostgreSQL is stopped."""


class SparkPart:
    """Runs batches in which something dies, each until it is written, and compares both sides.

    Args:
        servers: Where it happens.
        directory: For the logs of the drivers.
        results: Where it counts.
    """

    def __init__(self, servers: Servers, directory: Path, results: Results) -> None:
        self._servers = servers
        self._directory = directory
        self._drivers = Drivers(directory)
        self._results = results
        self._number = 0
        for who in ("task", "driver"):
            results.spark.setdefault(who, Counter())

    def run(self, tasks: int, drivers: int) -> None:
        """So many times through the points of a task, and of a driver."""
        spark = session()
        try:
            for _ in range(tasks):
                for point in TASK:
                    self._tried(point, partial(self._task, spark))
            for _ in range(drivers):
                for point in [*DRIVER, *RECOVERING]:
                    self._tried(point, partial(self._driver, spark))
        finally:
            spark.stop()

    def _tried(self, point: str, play) -> None:
        began = time.monotonic()
        try:
            play(point, self._case())
        except Exception as error:  # noqa: BLE001 - whatever a batch ends with is a finding
            finding = {"kind": "error", "subject": f"spark {point}", "detail": f"{error}\n{traceback.format_exc()}"}
            self._results.findings.append(finding)
        sys.stdout.write(f"spark {point}: {time.monotonic() - began:.1f} s, {len(self._results.findings)} findings\n")
        sys.stdout.flush()

    def _case(self) -> SparkCase:
        self._number += 1
        name = f"spark_{self._number}_{secrets.token_hex(3)}"
        url = self._servers.postgres.create_database(name)
        engine = create_engine(url)
        with engine.connect() as connection:
            upgrade(connection)
        engine.dispose()
        topic = self._servers.kafka.create_topic(name, 2, timeout_s=120)
        return SparkCase(self._servers.kafka.client_config(), url, topic)

    def _task(self, spark, point: str, case: SparkCase) -> None:
        """The first attempt at a partition dies; perhaps a server dies as well, and then the whole batch runs again."""
        original = per_partition.PartitionTask
        per_partition.PartitionTask = partial(ArmedTask, point=point)
        fault = self._fault()
        try:
            for _ in range(5):
                try:
                    write_batch(numbers(spark), batch_id="1", **case.settings)
                    break
                except Exception:  # a server died under it: the caller runs the batch again
                    if fault is None:
                        raise
                    fault.join(BOUND_S)
            else:
                raise AssertionError("the batch was not written in five runs")
        finally:
            per_partition.PartitionTask = original
            if fault is not None:
                fault.join(BOUND_S)
        self._results.spark["task"][point] += 1
        self._written(spark, case)

    def _fault(self) -> threading.Thread | None:
        faults = {0: ("broker_kills", self._servers.kill_broker), 1: ("database_stops", self._servers.stop_database)}
        if (found := faults.get(self._number % FAULT_EVERY)) is None:
            return None
        name, disturb = found
        setattr(self._results, name, getattr(self._results, name) + 1)
        thread = threading.Thread(target=disturb)
        thread.start()
        return thread

    def _driver(self, spark, point: str, case: SparkCase) -> None:
        """A driver dies with its JVM; where the point is one of settling, another has left something before."""
        if point in RECOVERING:
            self._kill(case, "", worker_point="write.decided:1:stop")
            self._results.spark["driver"]["any moment"] += 1
        code = self._kill(case, point)
        if code == -signal.SIGKILL:
            self._results.spark["driver"][point] += 1
        else:
            self._results.spark["driver"][f"missed: {point}"] += 1
        self._written(spark, case)

    def _kill(self, case: SparkCase, failpoint: str, worker_point: str = "") -> int:
        """One driver in a process group of its own; killed as a whole once a worker of it is paused, or when it is over."""
        self._number += 1
        pid_file = self._directory / f"spark-{self._number}.pid"
        document = {"point": worker_point, "pid_file": str(pid_file)} if worker_point else {}
        driver = self._drivers.start(failpoint=failpoint, do="batch", settings=case.settings, **document)

        def runs() -> None:
            assert driver.poll() is None, "the driver has ended, and no worker was paused"

        try:
            if worker_point:
                paused_below(driver.pid, check=runs)
            else:
                driver.wait(BOUND_S)
        finally:
            kill_group(driver)
            if pid_file.exists():  # the worker to pause is in a process group of its own
                with suppress(ProcessLookupError):
                    os.kill(int(pid_file.read_text()), signal.SIGKILL)
        return driver.returncode

    def _written(self, spark, case: SparkCase) -> None:
        """The batch is run to its end, and once more; both sides have every row once."""
        for _ in range(2):
            report = write_batch(numbers(spark), batch_id="1", **case.settings)
        assert (report.rows, report.written_rows) == (ROWS, 0)
        case.verify()
        self._results.spark.setdefault("batches", Counter())["verified"] += 1
