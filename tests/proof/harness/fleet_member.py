"""A member of a fleet that dual-writes operations until it may go, and journals the answers it got. Forked; killed or paused."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from dualwrite import (
    CompletionPending,
    DualWriter,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
    WriterLimits,
    failpoints,
)
from dualwrite.testing import Journal
from harness.planting import plant
from harness.worker import OPERATIONS, make_engine


def member(path: Path, failpoint: str, mistake: str | None, log: Path) -> None:
    """A forked process's: do what the file says until the file ``until`` is there, and end with the exit code."""
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(said, number)
    failpoints.arm(failpoint)
    plant(mistake)
    _write(json.loads(path.read_text(encoding="utf-8")))
    sys.exit(0)


def _write(job: dict) -> None:
    engine = make_engine(job["url"])
    writer = DualWriter.leased(
        job["transactional_id"],
        kafka=job["kafka"],
        database=engine,
        limits=WriterLimits(max_lanes=2, paused_owner_timeout_s=job["lease_timeout_s"]),
        lease_timeout_s=job["lease_timeout_s"],
        heartbeat_s=job["heartbeat_s"],
        outbox=job["outbox"],
    )
    until, number = Path(job["until"]), 0
    with writer, Journal(job["journal"]) as journal:
        while not until.exists():
            operation = f"{job['name']}-{number}"
            number += 1
            try:
                with journal.operation(operation, stream=job["name"]), writer.transaction() as tx:
                    for partition in range(2):
                        tx.produce(job["topic"], value=operation, key=str(partition), partition=partition)
                    tx.connection.execute(OPERATIONS.insert().values(id=operation))
            except (TransactionAborted, CompletionPending, TransactionInDoubt, Unavailable) as error:
                print(f"{operation}: {type(error).__name__} {error.outcome}: {error}", flush=True)  # noqa: T201 - its log
            time.sleep(0.02)
    print(f"ended as {writer.transactional_id}", flush=True)  # noqa: T201 - as above
