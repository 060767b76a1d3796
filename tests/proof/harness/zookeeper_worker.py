"""A process that writes operations to ZooKeeper and Kafka and dies where it is told, and the verdict on both sides."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from dualwrite import DualWriter, WriterLimits, failpoints
from dualwrite.databases import ZooKeeperDatabase
from dualwrite.testing import Journal
from harness.checker import Case
from harness.planting import plant
from harness.worker import FENCED, UNAVAILABLE, OnPurpose, Operations

SESSION_TIMEOUT_S = 4.0


def database_of(url: str) -> ZooKeeperDatabase:
    """The job's database: hosts and root."""
    hosts, _, root = url.partition("/")
    return ZooKeeperDatabase(hosts, root=f"/{root}", session_timeout_s=SESSION_TIMEOUT_S)


def work(path: Path, failpoint: str, mistake: str | None, log: Path) -> None:
    """A forked process's: do what the file says, and end with the exit code."""
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(said, number)
    failpoints.arm(failpoint)
    plant(mistake)
    sys.exit(_write(json.loads(path.read_text(encoding="utf-8"))))


def _write(job: dict) -> int:
    from dualwrite import Fenced, Unavailable

    try:
        with (
            database_of(job["url"]) as database,
            DualWriter(
                job["transactional_id"], kafka=job["kafka"], database=database, limits=WriterLimits(max_lanes=1)
            ) as writer,
            Journal(job["journal"]) as journal,
        ):
            operations = Operations(job, journal)
            for operation, abort in operations.of(0):
                with operations.noted(operation, 0), writer.transaction() as tx:
                    for partition in range(2):
                        tx.produce(job["topic"], value=operation, key=str(partition), partition=partition)
                    tx.multi.create(f"/{job['place']}/{operation}")
                    if abort:
                        raise OnPurpose(operation)
    except Fenced:
        return FENCED
    except Unavailable:
        return UNAVAILABLE
    return 0


class ZooKeeperCase(Case):
    """A :class:`Case` whose rows are znodes below one of their own. Its url is hosts and root."""

    work = staticmethod(work)

    @property
    def place(self) -> str:
        return f"{self.url.partition('/')[2]}-user"

    def _order(self, operations: int, job: dict) -> tuple[Path, Path]:
        return super()._order(operations, {"place": self.place, **job})

    def in_database(self) -> list[str]:
        with database_of(self.url) as database:
            database.check()
            return sorted(database.keys._session.children(f"/{self.place}"))
