"""A process that has imported everything and runs no thread: it forks the processes that will be killed.

Reads one JSON object a line and writes one for each thing that happened. When its standard input ends, it kills every child.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import select
import signal
import sys
import threading
import time
import traceback

import harness.async_worker  # noqa: F401 - as psycopg
import psycopg  # noqa: F401 - what the children need is imported once, here
from harness.planting import plant_from_environment

import chaos.jobs
from dualwrite import failpoints

PR_SET_PDEATHSIG = 1


class Parent:
    """Forks, signals and reaps."""

    def __init__(self) -> None:
        self._engines = {}
        self._children: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._pipes: dict[int, int] = {}
        self._prctl = ctypes.CDLL(None).prctl
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_out, False)
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        pending = b""
        while True:
            ready, _, _ = select.select([0, self._wake_in, *self._pipes], [], [])
            for pipe in ready:
                if pipe not in {0, self._wake_in}:
                    self._told(pipe)
            if self._wake_in in ready:
                os.read(self._wake_in, 4096)
            self._reap()
            if 0 in ready:
                data = os.read(0, 65536)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))

    def _obey(self, order: dict) -> None:
        if order["do"] == "prepare":
            self._engines = {order["url"]: chaos.jobs.prepare(order["url"])}
            gc.collect()
            gc.freeze()
            _say(number=order["number"], event="prepared")
        elif order["do"] == "start":
            self._start(order)
        elif order["number"] in self._pids:
            # Not reaped yet, so the id is still that child's.
            os.kill(self._pids[order["number"]], order["signal"])

    def _start(self, order: dict) -> None:
        assert threading.active_count() == 1, "a thread would not survive the fork"
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            self._become(order, write)
        os.close(write)
        self._pipes[read] = order["number"]
        self._children[pid], self._pids[order["number"]] = order["number"], pid
        _say(number=order["number"], event="started", pid=pid)

    def _become(self, order: dict, told_to: int) -> None:
        code = 1
        try:
            self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for pipe in (*self._pipes, self._wake_in, self._wake_out):
                os.close(pipe)
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            failpoints.arm(order["failpoint"])
            job = order["job"]
            code = chaos.jobs.run(job, self._engines[job["url"]], told_to)
        except BaseException:  # noqa: BLE001 - any error goes to the log, and the exit code shows it
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _told(self, pipe: int) -> None:
        data = os.read(pipe, 4096)
        if not data:
            os.close(pipe)
            del self._pipes[pipe]
            return
        for line in data.decode().splitlines():
            _say(number=self._pipes[pipe], event="told", line=line, at=time.monotonic())

    def _reap(self) -> None:
        while self._children:
            pid, status, used = os.wait4(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            number = self._children[pid]
            if os.WIFSTOPPED(status):
                _say(number=number, event="stopped")
                continue
            del self._children[pid], self._pids[number]
            # Pass on first what it wrote before it died.
            for pipe in [pipe for pipe, whose in self._pipes.items() if whose == number]:
                self._told(pipe)
            _say(
                number=number,
                event="ended",
                code=os.waitstatus_to_exitcode(status),
                cpu_s=used.ru_utime + used.ru_stime,
            )

    def kill_all(self) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


def _say(**event: object) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def main() -> None:
    plant_from_environment()
    parent = Parent()
    try:
        parent.serve()
    finally:
        parent.kill_all()


if __name__ == "__main__":
    main()
