"""A process that dual-writes operations with unique names over all partitions, and journals the answers it got.

Run as ``python -m harness.worker JOB.json``, or forked; killed by fail points and from outside.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sqlalchemy import Column, Engine, MetaData, Table, Text, create_engine, event, exc
from sqlalchemy.orm import sessionmaker

from dualwrite import (
    CompletionPending,
    DecidedTransactionLost,
    DualWriter,
    Fenced,
    OutcomeUnverifiable,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.runtime import failpoints
from dualwrite.testing import Journal
from harness.planting import plant, plant_from_environment

METADATA = MetaData()
OPERATIONS = Table("operations", METADATA, Column("id", Text, primary_key=True))
QUERY = "SELECT id FROM operations"

UNAVAILABLE, FENCED, LOST = 3, 4, 5
"""Exit codes of a worker that ended as it may: a server did not answer; another owner; and, never, a loss."""


class OnPurpose(Exception):
    """Leaves a dual write, which then aborts."""


def make_engine(url: str) -> Engine:
    """An engine for the worker's database."""
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def _durable(connection, _record):
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")

    return engine


def write(job: dict, engine: Engine, tell: Callable[[str], None]) -> int:
    """Open the writer, write the operations, close it. The exit code."""
    started = time.monotonic()
    try:
        with DualWriter(
            job["transactional_id"],
            kafka=job["kafka"],
            engine=engine,
            max_lanes=job.get("max_lanes", 1),
            paused_owner_timeout_s=job.get("paused_owner_timeout_s", 60),
            timeout_s=job.get("timeout_s", 60),
            producer_engine=job.get("producer_engine", "auto"),
        ) as writer:
            tell(f"open {time.monotonic() - started:.3f}")
            threads = job.get("threads", 1)
            with Journal(job["journal"]) as journal, ThreadPoolExecutor(threads) as pool:
                writing = _Writing(job, engine, writer, journal)
                for future in [pool.submit(writing.run, number) for number in range(threads)]:
                    future.result()
    except Fenced:
        return FENCED
    except Unavailable:
        return UNAVAILABLE
    except (DecidedTransactionLost, OutcomeUnverifiable):
        return LOST
    return 0


class _Writing:
    """The operations of one worker; ``run`` is one thread's share."""

    def __init__(self, job: dict, engine: Engine, writer: DualWriter, journal: Journal) -> None:
        self._job = job
        self._writer = writer
        self._journal = journal
        self._over = threading.Event()
        if job.get("session"):
            self._sessions = sessionmaker(engine)
            self._bound = writer.bind(self._sessions)

    def run(self, thread: int) -> None:
        stream = f"{self._job['transactional_id']}/{thread}"
        for position in range(self._job["operations"]):
            if self._over.is_set():
                return
            # The first thread's names are plain: most tests have one.
            operation = f"{self._job['name']}-{position}" + (f"-{thread}" if thread else "")
            try:
                with self._journal.operation(operation, stream=stream):
                    self._one(operation, abort=position in self._job.get("abort", []))
            except (OnPurpose, exc.DBAPIError):
                # Raised by the block itself, the second by its INSERT: the dual write has aborted.
                self._journal.aborted(operation)
            except Fenced:
                self._over.set()
                raise
            except (TransactionAborted, CompletionPending, TransactionInDoubt, Unavailable):
                continue  # the journal has it; the next operation is another one

    def _one(self, operation: str, *, abort: bool) -> None:
        if self._job.get("session"):
            self._one_in_session(operation, abort=abort)
            return
        with self._writer.transaction() as tx:
            for partition in range(self._job.get("partitions", 2)):
                tx.produce(self._job["topic"], value=operation, key=str(partition), partition=partition)
            tx.connection.execute(OPERATIONS.insert().values(id=operation))
            if abort:
                raise OnPurpose(operation)

    def _one_in_session(self, operation: str, *, abort: bool) -> None:
        with self._sessions.begin() as session:
            session.execute(OPERATIONS.insert().values(id=operation))
            for partition in range(self._job.get("partitions", 2)):
                with session.begin_nested():
                    self._bound.produce(
                        session, self._job["topic"], value=operation, key=str(partition), partition=partition
                    )
            if abort:
                raise OnPurpose(operation)


def work(path: Path, failpoint: str, mistake: str | None, log: Path) -> None:
    """A forked process's: do what the file says, and end with the exit code."""
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(said, number)
    failpoints.arm(failpoint)
    plant(mistake)
    sys.exit(_work(path))


def main() -> int:
    plant_from_environment()
    return _work(Path(sys.argv[1]))


def _work(path: Path) -> int:
    job = json.loads(path.read_text(encoding="utf-8"))
    engine = make_engine(job["url"])
    METADATA.create_all(engine)
    return write(job, engine, lambda line: print(line, flush=True))  # noqa: T201 - the parent waits for it


if __name__ == "__main__":
    sys.exit(main())
