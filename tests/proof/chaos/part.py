"""A part of the run that has processes and counts of its own, beside the rounds of writers: how its processes end, and what is counted."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from harness.worker import FENCED, LOST, UNAVAILABLE

from chaos.conductor import BOUND_S, TAIL
from chaos.processes import Forks, Process
from chaos.results import Results
from chaos.servers import Servers

MAY_END = {0, FENCED, UNAVAILABLE}


class Named(Protocol):
    """The object that a process works on."""

    name: str


SubjectT = TypeVar("SubjectT", bound=Named)


class Part(ABC, Generic[SubjectT]):
    """Starts processes, waits for their ends and counts them.

    Args:
        servers: Where it happens.
        forks: Makes the processes.
        directory: For the logs of the processes.
        results: Where it counts.
    """

    COUNTS: ClassVar[str]
    """The field of the results that holds its counts."""
    KILLED: ClassVar[tuple[str, ...]]
    """The counts that are of killed processes, by fail point."""
    LOSS: ClassVar[str]
    """The kind of finding that a process reports which ends with LOST."""

    def __init__(self, servers: Servers, forks: Forks, directory: Path, results: Results) -> None:
        self._servers = servers
        self._forks = forks
        self._directory = directory
        self._results = results
        self._counting = threading.Lock()

    @abstractmethod
    def _count_kill(self, subject: SubjectT, point: str) -> None:
        """Count a process that was killed there."""

    def _story(self, subject: SubjectT, point: str) -> str:
        """How findings name a process."""
        del subject
        return point

    def _end(self, subject: SubjectT, process: Process, point: str) -> bool:
        """Wait for its end and count it. Whether it was killed."""
        story = self._story(subject, point)
        if not process.end(BOUND_S):
            self._find("hanging", subject.name, f"{story} did not end in {BOUND_S} s: see the stacks in its log")
            return False
        if process.killed:
            self._count_kill(subject, point)
            return True
        if point:
            self._add("missed", point)
        if process.code == LOST:
            self._find(self.LOSS, subject.name, f"{story} ended with a loss: {' '.join(process.told)}")
        elif process.code not in MAY_END:
            log = self._log(subject).read_text(encoding="utf-8", errors="replace")
            self._find("error", subject.name, f"{story} ended with {process.code}: {log[-TAIL:]}")
        return False

    def _log(self, subject: SubjectT) -> Path:
        return self._directory / f"{subject.name}.log"

    @property
    def _counts(self) -> dict[str, Counter[str]]:
        return getattr(self._results, self.COUNTS)

    @property
    def _killed(self) -> int:
        return sum(self._counts.get(of, Counter()).total() for of in self.KILLED)

    def _count(self, of: str, what: str) -> int:
        return self._counts.get(of, Counter())[what]

    def _add(self, of: str, what: str, count: int = 1) -> None:
        with self._counting:
            self._counts.setdefault(of, Counter())[what] += count

    def _find(self, kind: str, subject: str, detail: str) -> None:
        with self._counting:
            self._results.findings.append({"kind": kind, "subject": subject, "detail": detail})
        sys.stdout.write(f"  FOUND {kind}: {subject}: {detail[:1500]}\n")
