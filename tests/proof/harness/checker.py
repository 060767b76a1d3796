"""Compares the answers that the workers got, the database's rows and what a ``read_committed`` consumer sees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from sqlalchemy import create_engine, inspect, select

from dualwrite.failpoints import ENVIRONMENT
from dualwrite.stores.keyed.rocksdb import RocksDatabase
from dualwrite.testing import History, Journal, read_committed
from dualwrite.testing.checker import Place, compare
from harness.forking import processes
from harness.patience import PATIENCE_S, wait_until
from harness.places import PROOF
from harness.planting import ENVIRONMENT as MISTAKE
from harness.worker import OPERATIONS, work

FALLS_BACK = ["write.falls_back", "write.turns", "write.waits"]
"""The fail points that only blocks pass whose messages wait in the database."""


@dataclass
class Forked:
    """A worker that was forked."""

    process: BaseProcess
    log: Path

    def stops(self) -> bool:
        """Wait until it stops (SIGSTOP) or ends. Whether it stopped."""
        wait_until(
            lambda: self.process.exitcode is not None or self._is_stopped(),
            otherwise=lambda: f"worker neither stopped nor ended:\n{self.log.read_text()}",
            pause_s=0.02,
        )
        return self.process.exitcode is None

    def _is_stopped(self) -> bool:
        with suppress(FileNotFoundError):  # it has ended since
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def end(self, expected: Collection[int]) -> int:
        """Wait for its end, and hold the exit code against those that may be."""
        self.process.join(PATIENCE_S)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        self.process.close()
        assert code in expected, f"worker ended with {code}, not {expected}:\n{self.log.read_text()}"
        return code


@dataclass
class Case:
    """One id, one topic, one database: the workers that write there, and the verdict on them."""

    directory: Path
    kafka: dict
    url: str
    topic: str
    transactional_id: str = "case"
    workers: int = field(default=0)
    for_all: dict = field(default_factory=dict)
    """What every worker is told."""

    work = staticmethod(work)

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    def start(self, *, operations: int = 4, failpoint: str = "", **job) -> subprocess.Popen:
        """Start one worker; its standard output is a pipe."""
        path, log = self._order(operations, job)
        with log.open("w") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "harness.worker", str(path)],
                cwd=PROOF,
                env={**os.environ, ENVIRONMENT: failpoint},
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )

    def run(
        self,
        *,
        killed: bool | None = False,
        operations: int = 4,
        failpoint: str = "",
        after_s: float | None = None,
        **job,
    ) -> int:
        """Run one worker to its end, and hold how it ended against what was expected. The exit code.

        Args:
            killed: Whether it dies by SIGKILL; None for either.
            operations: How many it writes.
            failpoint: What is armed.
            after_s: When it is killed at no particular point.
            job: More for the worker.
        """
        worker = self.fork(operations=operations, failpoint=failpoint, **job)
        if after_s is not None:
            worker.process.join(after_s)
            worker.process.kill()
        return worker.end({None: {0, -signal.SIGKILL}, True: {-signal.SIGKILL}, False: {0}}[killed])

    def fork(self, *, operations: int = 4, failpoint: str = "", **job) -> Forked:
        """Start one worker as :meth:`run` does, and do not wait for it."""
        path, log = self._order(operations, job)
        worker = processes().Process(target=self.work, args=(path, failpoint, os.environ.get(MISTAKE), log))
        worker.start()
        return Forked(worker, log)

    def _order(self, operations: int, job: dict) -> tuple[Path, Path]:
        """Where its job stands, and where it may log."""
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
            **self.for_all,
            **job,
        }
        path = self.directory / f"{name}.json"
        path.write_text(json.dumps(document))
        return path, self.directory / f"{name}.log"

    @property
    def history(self) -> History:
        """The answers that the workers got."""
        return Journal.read(self.journal) if self.journal.exists() else History()

    def in_database(self) -> list[str]:
        if self.url.startswith("rocksdb:"):
            with RocksDatabase.from_url(self.url) as database:
                return sorted(str(key) for key in database.rdict.keys())  # noqa: SIM118 - it is no dictionary
        engine = create_engine(self.url)
        try:
            if not inspect(engine).has_table("operations"):
                return []
            with engine.connect() as connection:
                return sorted(connection.execute(select(OPERATIONS.c.id)).scalars())
        finally:
            engine.dispose()

    def in_kafka(self) -> list[Place]:
        """Every message that a ``read_committed`` consumer sees; waits until no transaction is open."""
        return [
            Place(self.topic, record.partition, record.offset, record.value.decode())
            for record in read_committed(self.kafka, self.topic)
        ]

    def verify(self) -> set[str]:
        """Both sides are equal, whole, in order, once; what was acknowledged is there, what was aborted is not.

        Nothing is settled here: that is what the tests are about.
        """
        rows = self.in_database()
        findings = compare(self.history, rows, self.in_kafka(), messages_per_operation=2)
        assert not findings, "\n".join(map(str, findings))
        return set(rows)
