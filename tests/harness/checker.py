"""Compares what the workers were told, what the database has and what a ``read_committed`` consumer sees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import create_engine, inspect, select

from dualwrite.failpoints import ENVIRONMENT
from dualwrite.testing.reading import read_committed
from harness.worker import OPERATIONS

TESTS = Path(__file__).parents[1]


@dataclass
class Case:
    """One id, one topic, one database: the workers that write there, and the verdict on them."""

    directory: Path
    kafka: dict
    url: str
    topic: str
    transactional_id: str = "case"
    workers: int = field(default=0)

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    def start(self, *, operations: int = 4, failpoint: str = "", **job) -> subprocess.Popen:
        """Start one worker; its standard output is a pipe."""
        self.workers += 1
        name = f"w{self.workers}"
        document = {
            "name": name,
            "kafka": self.kafka,
            "url": self.url,
            "topic": self.topic,
            "transactional_id": self.transactional_id,
            "operations": operations,
            "journal": str(self.journal),
            **job,
        }
        path = self.directory / f"{name}.json"
        path.write_text(json.dumps(document))
        with (self.directory / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "harness.worker", str(path)],
                cwd=TESTS,
                env={**os.environ, ENVIRONMENT: failpoint},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(self, *, killed: bool = False, timeout_s: float = 90, **job) -> None:
        """Run one worker to its end, and hold how it ended against what was expected."""
        process = self.start(**job)
        process.communicate(timeout=timeout_s)
        log = (self.directory / f"w{self.workers}.log").read_text()
        expected = -signal.SIGKILL if killed else 0
        assert process.returncode == expected, f"worker ended with {process.returncode}, not {expected}:\n{log}"

    def told(self, word: str) -> set[str]:
        """The operations of which the journal says so."""
        if not self.journal.exists():
            return set()
        return {line.split()[1] for line in self.journal.read_text().splitlines() if line.startswith(word)}

    def in_database(self) -> list[str]:
        engine = create_engine(self.url)
        try:
            if not inspect(engine).has_table("operations"):
                return []
            with engine.connect() as connection:
                return sorted(connection.execute(select(OPERATIONS.c.id)).scalars())
        finally:
            engine.dispose()

    def in_kafka(self) -> list[str]:
        """Every message that a ``read_committed`` consumer sees, by partition in order; waits for the end of the log."""
        return [(message.partition, message.value.decode()) for message in read_committed(self.kafka, self.topic)]

    def verify(self, owners: list[str] | None = None) -> set[str]:
        """Both sides are equal, whole, in order, once; what was acknowledged is there, what was aborted is not.

        Args:
            owners: The workers in the order in which they owned the id; by number if not given.
        """
        owners = owners or [f"w{number + 1}" for number in range(self.workers)]
        rows = self.in_database()
        messages = self.in_kafka()
        assert Counter(rows).keys() == set(rows)
        for partition in (0, 1):
            seen = [value for where, value in messages if where == partition]
            assert sorted(seen) == rows, f"partition {partition} has {seen}, the database {rows}"
            assert seen == sorted(seen, key=lambda operation: _position(operation, owners)), (
                f"partition {partition} is out of order: {seen}"
            )
        told, aborted = self.told("acknowledged"), self.told("aborted")
        assert told <= set(rows), f"acknowledged but missing: {told - set(rows)}"
        assert not aborted & set(rows), f"aborted but there: {aborted & set(rows)}"
        assert set(rows) <= self.told("begin")
        return set(rows)


def _position(operation: str, owners: list[str]) -> tuple[int, int]:
    worker, position = operation.split("-")
    return owners.index(worker), int(position)
