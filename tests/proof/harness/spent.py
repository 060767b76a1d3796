"""Where the processor time of a run of the tests goes: on two cores it is what a run's length depends on, since most tests wait.

``pytest --spent=FILE`` keeps it, by test, for all workers; ``python -m harness.spent FILE`` shows the files and tests that
take most. The time of a process that a test has started counts once it has ended and been waited for; the servers that
several tests share are in the total alone.
"""

from __future__ import annotations

import json
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

COLLECTING: Final = "collecting"
"""Imports and collection, of all workers."""
TOTAL: Final = "total"
"""All processes of the run, with those of the servers that have ended."""


class Spent:
    """A plugin of pytest, in each worker and in the process that starts them.

    Args:
        file: Where the result is written to.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        before = _used_s()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] += _used_s() - before

    def pytest_collection_finish(self) -> None:
        self._seconds[COLLECTING] += _used_s()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["spent"] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds.update(getattr(node, "workeroutput", {}).get("spent", {}))

    @pytest.hookimpl(trylast=True)  # the servers that all workers share have ended
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if not hasattr(config, "workerinput"):
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text(json.dumps({TOTAL: _used_s(), **self._seconds}), encoding="utf-8")


def _used_s() -> float:
    """The seconds of this process, and of those that it has started and waited for."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def shown(seconds: Mapping[str, float], most: int = 25) -> str:
    """The files and the tests that take most, as text."""
    tests = {name: spent for name, spent in seconds.items() if name not in {COLLECTING, TOTAL}}
    files: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for name, spent in tests.items():
        files[name.partition("::")[0]] += spent
        count[name.partition("::")[0]] += 1
    lines = [
        f"{seconds[TOTAL]:.0f} s of the processor: {sum(tests.values()):.0f} in {len(tests)} tests, {seconds[COLLECTING]:.0f} in collecting.",
        *(f"{spent:7.1f} s  {count[name]:5} tests  {name}" for name, spent in files.most_common(most)),
        "",
        *(f"{spent:7.1f} s  {name}" for name, spent in Counter(tests).most_common(most)),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(shown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))) + "\n")
