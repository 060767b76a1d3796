"""Spark drivers that are killed, each with all that it has started; and Python workers that stand still until they are."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pyspark_dualwrite

from dualwrite.failpoints import ENVIRONMENT
from harness.patience import PATIENCE_S, wait_until
from harness.places import PROOF


class Drivers:
    """Driver processes, each in a process group of its own that can be killed as a whole.

    Args:
        directory: For their documents and logs.
        path: A folder from which they import besides.
    """

    def __init__(self, directory: Path, path: str = ""):
        self._directory = directory
        self._path = {"PYTHONPATH": path} if path else {}
        self._number = 0

    def start(self, *, failpoint: str = "", **document) -> subprocess.Popen:
        self._number += 1
        path = self._directory / f"driver-{self._number}.json"
        path.write_text(json.dumps(document))
        with self.log.open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "harness.spark_job", str(path)],
                cwd=PROOF,
                env={**os.environ, ENVIRONMENT: failpoint, **self._path},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        return self._directory / f"driver-{self._number}.log"

    def run(self, *, ends_with: int = 0, **document) -> None:
        process = self.start(**document)
        code = process.wait(PATIENCE_S)
        kill_group(process)
        assert code == ends_with, self.log.read_text()[-3000:]


def as_installed(directory: Path) -> str:
    """A folder in which Spark finds the format by itself.

    It looks into every package on the path whose name begins with ``pyspark_``; an editable install has none there.
    """
    (directory / "pyspark_dualwrite").symlink_to(Path(pyspark_dualwrite.__file__).parent)
    return str(directory)


def phases_of(batch_id: str, log: str) -> list[str]:
    """Where the batch was, by a driver's log."""
    told = rf"INFO dualwrite\S*: sink '\S+' batch '{batch_id}': (settling|writing|decided|completed)"
    return re.findall(told, log)


def kill_group(process: subprocess.Popen) -> None:
    """SIGKILL the driver and its JVM; the JVM outlives a driver that was killed alone until it notices."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(PATIENCE_S)


def paused_below(pid: int, count: int = 1, *, check: Callable[[], None] = lambda: None) -> list[psutil.Process]:
    """Wait until so many processes below that one have stopped at a fail point; ``check`` raises where that is in vain."""
    found: list[psutil.Process] = []

    def all_paused():
        check()
        below = psutil.Process(pid).children(recursive=True)
        found[:] = [process for process in below if _is(process, psutil.STATUS_STOPPED)]
        return len(found) >= count

    wait_until(all_paused, pause_s=0.5)  # it looks at every process of the machine
    return found


def _is(process: psutil.Process, status: str) -> bool:
    try:
        return process.status() == status
    except psutil.NoSuchProcess:
        return False
