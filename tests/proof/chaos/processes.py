"""The other end of the forking process: start, signal and await the processes that it forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

from harness.places import PROOF
from harness.planting import ENVIRONMENT as MISTAKE


@dataclass
class Process:
    """One forked process, as far as is known."""

    number: int
    forks: Forks
    started_at: float
    code: int | None = None
    stops: int = 0
    told: list[str] = field(default_factory=list)
    opened_at: float | None = None
    ended_at: float | None = None

    def signal(self, number: int) -> None:
        """Send a signal; a process that has ended gets none."""
        self.forks.order(do="signal", number=self.number, signal=int(number))

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in that time."""
        return self.forks.wait(lambda: self.code is not None, timeout_s)

    def end(self, timeout_s: float) -> bool:
        """Whether it ended in that time; otherwise every thread's stack goes to its log, and it is killed."""
        if self.wait(timeout_s):
            return True
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGUSR1)
        self.wait(2)
        self.signal(signal.SIGKILL)
        self.wait(30)
        return False

    def wait_stopped(self, timeout_s: float) -> bool:
        """Whether it stopped (SIGSTOP) or ended in that time."""
        return self.forks.wait(lambda: self.code is not None or self.stops > 0, timeout_s)

    def wait_opened(self, timeout_s: float) -> bool:
        """Whether it opened its writer, or ended, in that time."""
        return self.forks.wait(lambda: self.code is not None or self.opened_at is not None, timeout_s)

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def open_s(self) -> float | None:
        """How long it says that opening took."""
        return float(self.told[0].split()[1]) if self.told else None


class Forks:
    """The forking process. A context manager."""

    def __init__(self, directory: Path, mistake: str = "") -> None:
        self._processes: dict[int, Process] = {}
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._prepared = -1
        self._numbers = 0
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.ended = False
        with (directory / "forks.log").open("a") as log:
            self._parent = subprocess.Popen(
                [sys.executable, "-m", "chaos.forks"],
                cwd=PROOF,
                env={**os.environ, **({MISTAKE: mistake} if mistake else {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._sending:
            self._parent.stdin.close()
        self._parent.wait(60)
        self._reader.join()
        self._parent.stdout.close()

    def order(self, **order: object) -> None:
        with self._sending:
            self._parent.stdin.write(json.dumps(order).encode() + b"\n")
            self._parent.stdin.flush()

    def prepare(self, url: str) -> None:
        """Make the tables there, and get ready to fork processes that use them."""
        self._numbers += 1
        number = self._numbers
        self.order(do="prepare", url=url, number=number)
        assert self.wait(lambda: self._prepared == number, 120), "the forking process did not get ready"

    def start(self, job: dict, log: Path, failpoint: str = "") -> Process:
        with self._changed:
            self._numbers += 1
            process = Process(self._numbers, self, time.monotonic())
            self._processes[process.number] = process
        self.order(do="start", number=process.number, job=job, failpoint=failpoint, log=str(log))
        return process

    def wait(self, condition, timeout_s: float) -> bool:
        with self._changed:
            done = self._changed.wait_for(lambda: self.ended or condition(), timeout_s)
            if self.ended and not condition():
                raise RuntimeError("the forking process has ended")
            return bool(done)

    def _read(self) -> None:
        for line in self._parent.stdout:
            event = json.loads(line)
            with self._changed:
                self._apply(event)
                self._changed.notify_all()
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def _apply(self, event: dict) -> None:
        kind, number = event["event"], event["number"]
        if kind == "prepared":
            self._prepared = number
        elif kind == "stopped":
            self._processes[number].stops += 1
        elif kind == "told":
            self._processes[number].told.append(event["line"])
            self._processes[number].opened_at = event["at"]
        elif kind == "ended":
            process = self._processes.pop(number)
            process.code = event["code"]
            process.ended_at = time.monotonic()
            self.cpu_s["processes"] += event["cpu_s"]
