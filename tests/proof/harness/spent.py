"""Where the processor time of a run of the tests goes: on two cores it is what a run's length depends on, since most tests wait.

``pytest --spent=FILE`` keeps it, by test and by server, for all workers; ``python -m harness.spent FILE`` shows the servers, files
and tests that take most. The time of a process that a test has started counts once it has ended and been waited for. A server
that lasts for a whole session counts by its fixture's name, all workers' together.
"""

from __future__ import annotations

import json
import resource
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

COLLECTING: Final = "collecting"
"""Imports and collection, of all workers."""
TOTAL: Final = "total"
"""Tests, servers and collecting."""
SERVER: Final = "server "
"""Before the name of the session's fixture that has started it."""
STARTS: Final = "starts of "
"""Before the same name: how many were started."""


class Spent:
    """A plugin of pytest, in each worker and in the process that starts them.

    Args:
        file: Where the result is written to.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: Counter[str] = Counter()
        self._servers: list[tuple[str, psutil.Process]] = []
        self._at_end_s: float | None = None
        self._apart_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        before, self._at_end_s, self._apart_s = _used_s(), None, 0.0
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] += (self._at_end_s or _used_s()) - before - self._apart_s

    def pytest_collection_finish(self) -> None:
        self._seconds[COLLECTING] += _used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
        if fixturedef.scope != "session":
            return (yield)
        before = set(psutil.Process().children())
        try:
            return (yield)
        finally:
            started = set(psutil.Process().children()) - before
            self._servers += [(fixturedef.argname, process) for process in started]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> None:
        if nextitem is None:  # the session's fixtures end now, and their time would seem to be this test's
            self._at_end_s = _used_s()
            self._count_servers("started by tests")

    @contextmanager
    def apart(self, fixture: str) -> Iterator[None]:
        """Count servers of the session that are stopped before its end by their fixture's name, not in the test that runs."""
        self._count([server for server in self._servers if server[0] == fixture])
        self._servers = [server for server in self._servers if server[0] != fixture]
        before = _used_s()
        yield
        self._apart_s += _used_s() - before

    def _count_servers(self, unnamed: str) -> None:
        """Count those that run, whoever started them."""
        known = {process for _, process in self._servers}
        others = [(unnamed, process) for process in psutil.Process().children() if process not in known]
        self._count([*self._servers, *others])

    def _count(self, servers: Iterable[tuple[str, psutil.Process]]) -> None:
        for name, process in servers:
            self._seconds[SERVER + name] += _lasted_s(process)
            self._seconds[STARTS + name] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.pluginmanager.has_plugin("dsession"):  # this process has started the workers
            self._count_servers("of all workers")
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["spent"] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds.update(getattr(node, "workeroutput", {}).get("spent", {}))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if not hasattr(config, "workerinput"):
            # A JVM of Spark's is never waited for, and so not in what the system counts for this process.
            total = sum(spent for name, spent in self._seconds.items() if not name.startswith(STARTS))
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text(json.dumps({TOTAL: total, **self._seconds}), encoding="utf-8")


def _used_s() -> float:
    """The seconds of this process, and of those that it has started and waited for."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _lasted_s(process: psutil.Process) -> float:
    """The seconds of a server that still runs, with what it has started; 0 if it has ended."""
    total = 0.0
    try:
        for one in (process, *process.children(recursive=True)):
            total += sum(one.cpu_times()[:4])  # its own, and its ended children's, in user and in system mode
    except psutil.NoSuchProcess:
        pass
    return total


def shown(seconds: Mapping[str, float], most: int = 25) -> str:
    """The files and the tests that take most, as text."""
    servers = {name.removeprefix(SERVER): spent for name, spent in seconds.items() if name.startswith(SERVER)}
    tests = {name: spent for name, spent in seconds.items() if "::" in name}
    files: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for name, spent in tests.items():
        files[name.partition("::")[0]] += spent
        count[name.partition("::")[0]] += 1
    lines = [
        (
            f"{seconds[TOTAL]:.0f} s of the processor: {sum(tests.values()):.0f} in {len(tests)} tests, "
            f"{sum(servers.values()):.0f} in servers that lasted, {seconds[COLLECTING]:.0f} in collecting."
        ),
        *(
            f"{spent:7.1f} s  {seconds[STARTS + name]:5.0f} starts  {name}"
            for name, spent in Counter(servers).most_common()
        ),
        "",
        *(f"{spent:7.1f} s  {count[name]:5} tests  {name}" for name, spent in files.most_common(most)),
        "",
        *(f"{spent:7.1f} s  {name}" for name, spent in Counter(tests).most_common(most)),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(shown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))) + "\n")
