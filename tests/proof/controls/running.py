"""Runs one test in a forked process, with a mistake planted in it or none, on servers that are there already.

The fork keeps what a mistaken product leaves behind (threads, sessions, patched functions) from whatever comes next, and
costs no imports and no servers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import select
import signal
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from harness import class_archive
from harness.mistakes import MISTAKES, Check
from harness.places import ROOT, TESTS
from harness.planting import ENGINE, ENVIRONMENT
from harness.shared_servers import BorrowedKafka, place_of, plugin_of
from harness.temporary import use_memory

from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Servers:
    """The servers that all tests of a run share.

    Attributes:
        kafka: The broker, as a fork finds it.
        postgres: The URL of the database server.
    """

    kafka: tuple[Any, ...]
    postgres: str


@dataclass(frozen=True)
class Run:
    """How one run of a test ended.

    Attributes:
        word: ``passed``, ``failed``, ``hung``, or ``broken``: it could not even be run.
        symptom: What it failed with; empty where it passed.
        seconds: How long it took.
    """

    word: str
    symptom: str
    seconds: float


def is_caught(ended: Run, check: Check) -> bool:
    """Whether the test has failed, and with what it should: a test that fails with anything else has caught nothing."""
    return ended.word in {"failed", "hung"} and re.search(check.shows, ended.symptom) is not None


@contextlib.contextmanager
def servers() -> Iterator[Servers]:
    """Start both servers, and keep this process free of threads, so that it can be forked."""
    class_archive.use()
    use_memory()  # what it makes goes when this process exits: the forked ones are killed
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        gc.collect()  # the clients that waited for the servers
        yield Servers(place_of(kafka), postgres.url)


def run(test: str, given: Servers, mistake: str | None = None, timeout_s: float = TIMEOUT_S) -> Run:
    """Run one test.

    Args:
        test: Its node id, from the directory of the tests on.
        given: The servers.
        mistake: What to plant.
        timeout_s: How long it may take, in seconds.
    """
    began = time.monotonic()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        os.close(read_end)
        _run_and_exit(test, given, mistake, write_end)
    os.close(write_end)
    try:
        answer = _read(read_end, began + timeout_s)
    finally:
        os.close(read_end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also the workers that a failed test has left
        os.waitpid(child, 0)
    seconds = time.monotonic() - began
    if answer is None:
        return Run("hung", f"no end after {timeout_s:.0f} s", seconds)
    return Run(answer["word"], answer["symptom"], seconds)


def _read(read_end: int, until: float) -> dict[str, Any] | None:
    text = b""
    while True:
        readable, _, _ = select.select([read_end], [], [], max(0.0, until - time.monotonic()))
        if not readable:
            return None
        data = os.read(read_end, 65536)
        if not data:
            return json.loads(text) if text else {"word": "broken", "symptom": "the process of the test died"}
        text += data


def _run_and_exit(test: str, given: Servers, mistake: str | None, write_end: int) -> None:
    try:
        os.setsid()
        os.chdir(ROOT)
        if mistake is not None:
            os.environ[ENVIRONMENT] = mistake
            os.environ[ENGINE] = MISTAKES[mistake].engine  # some tests read it as they are imported
        silence = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(silence, number)
        os.environ["DUALWRITE_TEST_POSTGRES"] = given.postgres
        watch = _Watch(given)
        arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0"]
        code = pytest.main([*arguments, "--thorough", str(TESTS / test)], plugins=[watch])
        os.write(write_end, json.dumps(watch.verdict(code)).encode())
    finally:
        os._exit(0)


class _Watch:
    """A plugin of pytest that hands the servers to the test and keeps what it failed with."""

    def __init__(self, given: Servers) -> None:
        self._given = given
        self._passed = 0
        self._failure: str | None = None

    def pytest_configure(self, config: pytest.Config) -> None:
        # Registered after the library's own plugin, so that these fixtures take the place of its.
        config.pluginmanager.register(_fixtures(self._given), "servers that run already")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self._failure is None:
            self._failure = f"{report.when}: {_told(report)}" if report.when != "call" else _told(report)
        elif report.passed and report.when == "call":
            self._passed += 1

    def verdict(self, code: int) -> dict[str, str]:
        if self._failure is not None:
            return {"word": "failed", "symptom": self._failure}
        if code == 0 and self._passed:
            return {"word": "passed", "symptom": ""}
        return {"word": "broken", "symptom": f"pytest ended with {code} and ran {self._passed} tests"}


def _told(report: pytest.TestReport) -> str:
    lines = [line[2:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return "\n".join(lines) or report.longreprtext[-2000:]


def _fixtures(given: Servers) -> types.ModuleType:
    @pytest.fixture(scope="session")
    def dualwrite_kafka() -> EmbeddedKafka:
        return BorrowedKafka(*given.kafka)

    return plugin_of({"dualwrite_kafka": dualwrite_kafka})
