"""``dualwrite serve`` as a process, for tests that look at what it says and shows. It is forked: a new Python takes a second."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import urllib.error
import urllib.request

from dualwrite import failpoints
from dualwrite.cli import main
from harness.forking import processes
from harness.patience import PATIENCE_S, wait_until


def serve(config, failpoint, stderr):
    """Be the command, in a process of its own."""
    os.dup2(stderr.fileno(), sys.stderr.fileno())
    stderr.close()
    failpoints.arm(failpoint)
    sys.argv = ["dualwrite", "serve", "--config", str(config)]
    main()


class Replica:
    """One process of the service, and what it says."""

    def __init__(self, config, failpoint=""):
        context = processes()
        self._said, stderr = context.Pipe(duplex=False)
        with stderr:
            self.process = context.Process(target=serve, args=(config, failpoint, stderr))
            self.process.start()
        self.log = ""
        self.address = None
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        with self._said, open(self._said.fileno(), encoding="utf-8", closefd=False) as said:
            for line in said:
                self.log += line
                if found := re.search(r"listening on (http://\S+)", line):
                    self.address = found[1]

    def get(self, path):
        """The status and the body of a page."""
        wait_until(lambda: self.address or self.process.exitcode is not None, otherwise=lambda: self.log)
        assert self.address, self.log
        try:
            with urllib.request.urlopen(f"{self.address}{path}", timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def target(self):
        return json.loads(self.get("/api/status")[1])["targets"]["shop"]

    def looks_again(self):
        """Wait until another look has ended."""
        before = self.target()["at"] or ""
        wait_until(lambda: (self.target()["at"] or "") > before, otherwise=lambda: self.log)

    def says(self, words):
        wait_until(lambda: words in self.log or self.process.exitcode is not None)
        wait_until(lambda: words in self.log, 1.0, otherwise=lambda: f"{words!r} is not in:\n{self.log}")

    def end(self, number=signal.SIGTERM):
        """Stop it by a signal, and return its exit code."""
        os.kill(self.process.pid, number)
        return self.wait()

    def wait(self):
        self.process.join(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return self.process.exitcode


def serve_file(directory, kafka, url, more="", *, settle_after_s=2.0, timeout_s=20, interval_s=0.2):
    """Write the file of a service with one target, shop."""
    path = directory / "serve.toml"
    path.write_text(
        f"""
        listen = "127.0.0.1:0"
        interval_s = {interval_s}
        lease_timeout_s = 3
        settle_after_s = {settle_after_s}
        {more}
        [target.shop]
        url = "{url}"
        timeout_s = {timeout_s}
        kafka.bootstrap.servers = "{kafka["bootstrap.servers"]}"
        """
    )
    return path


def replicas(later):
    """A function that starts replicas; those still alive are killed when ``later`` ends."""

    def run(config, failpoint=""):
        replica = Replica(config, failpoint)
        later.callback(replica.wait)
        later.callback(replica.process.kill)
        return replica

    return run
