"""A process that dual-writes operations with unique names over all partitions, and journals the answers it got.

Run as ``python -m harness.worker JOB.json``, or forked; killed by fail points and from outside.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    exc,
    select,
    text,
)
from sqlalchemy.orm import sessionmaker

from dualwrite import (
    CompletionPending,
    DecidedTransactionLost,
    DualWriter,
    Fenced,
    ProducerRecord,
    RowUnit,
    Transaction,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
    WriterLimits,
    failpoints,
)
from dualwrite.errors import OutcomeUnverifiable
from dualwrite.stores.keyed.rocksdb import RocksDatabase
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.testing import Journal
from harness.planting import plant, plant_from_environment

METADATA = MetaData()
_NAME = Text().with_variant(String(255), "mysql")  # no key may be a TEXT there
OPERATIONS = Table("operations", METADATA, Column("id", _NAME, primary_key=True))
QUERY = "SELECT id FROM operations"
INSERT = OPERATIONS.insert()
DECISIONS = Table(
    "decisions",
    METADATA,
    Column("operation", _NAME, primary_key=True),
    Column("transactional_id", Text),
    Column("incarnation", BigInteger),
    Column("member", Text),
)
"""Of the members of a fleet: under which id each operation was written, and the incarnation that its row had then."""
_STATE = declare_tables(None).state
LOSE_CONNECTION = text("SELECT pg_terminate_backend(pg_backend_pid())")
"""As a statement of a unit: it ends its group."""

UNAVAILABLE, FENCED, LOST = 3, 4, 5
"""Exit codes of a worker that ended as it may: a server did not answer; another owner; and, never, a loss."""


_LOOKS_EVERY_S = 0.2


class OnPurpose(Exception):
    """Leaves a dual write, which then aborts."""


def make_engine(url: str) -> Engine:
    """An engine for the worker's database."""
    engine = create_engine(url)
    make_durable(engine)
    return engine


def make_durable(engine: Engine) -> None:
    """Let SQLite's commits survive."""
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def _durable(connection, _record):
            cursor = connection.cursor()
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute("PRAGMA synchronous=FULL")
            cursor.close()


def insert(tx: Transaction, url: str, operation: str) -> None:
    """Write an operation's row, in a database of any kind."""
    if url.startswith("rocksdb:"):
        tx.batch.put(operation, value=True)
    else:
        tx.connection.execute(OPERATIONS.insert().values(id=operation))


def write(job: dict, engine: Engine | RocksDatabase, tell: Callable[[str], None]) -> int:
    """Open the writer, write the operations, close it. The exit code."""
    started = time.monotonic()

    def opened() -> None:
        tell(f"open {time.monotonic() - started:.3f}")

    try:
        if job.get("tasks"):
            from harness.async_worker import write_in_tasks

            write_in_tasks(job, engine, opened)
        else:
            _write_in_threads(job, engine, opened)
    except Fenced:
        return FENCED
    except Unavailable:
        return UNAVAILABLE
    except (DecidedTransactionLost, OutcomeUnverifiable):
        return LOST
    return 0


def settings_of(job: dict) -> dict[str, Any]:
    """The writer's settings."""
    more = {"outbox": job["outbox"]} if "outbox" in job else {}
    return {
        **more,
        "kafka": {**job["kafka"], "dualwrite.engine": job.get("producer_engine", "auto")},
        "limits": WriterLimits(
            max_lanes=job.get("max_lanes", 1),
            paused_owner_timeout_s=job.get("paused_owner_timeout_s", 60),
            timeout_s=job.get("timeout_s", 60),
            fallback_after_s=job.get("fallback_after_s", 1.0),
        ),
    }


def _make_writer(job: dict, engine: Engine | RocksDatabase) -> DualWriter:
    if job.get("leased"):
        return DualWriter.leased(
            job["transactional_id"], database=engine, lease_timeout_s=job["lease_timeout_s"], **settings_of(job)
        )
    return DualWriter(job["transactional_id"], database=engine, **settings_of(job))


def _write_in_threads(job: dict, engine: Engine | RocksDatabase, opened: Callable[[], None]) -> None:
    with _make_writer(job, engine) as writer:
        opened()
        threads = job.get("threads", 1)
        with Journal(job["journal"]) as journal, ThreadPoolExecutor(threads) as pool:
            writing = _Writing(job, engine, writer, journal)
            for future in [pool.submit(writing.run, number) for number in range(threads)]:
                future.result()
        while "until" in job and not job["until"]():
            time.sleep(_LOOKS_EVERY_S)


class Operations:
    """The operations of a worker: their names, and what the journal notes of them.

    Attributes:
        over: Whether another owner has taken over.
    """

    def __init__(self, job: dict, journal: Journal) -> None:
        self._job = job
        self._journal = journal
        # The members of a fleet share its name, not a writer.
        self._writer = "" if job.get("leased") else job["transactional_id"]
        self.over = False

    def begun(self, operation: str, thread: int) -> None:
        """Note that an operation begins whose outcome :meth:`noted` waits for."""
        self._journal.begun(operation, stream=self._stream(thread), writer=self._writer)

    def _stream(self, thread: int) -> str:
        return f"{self._job.get('stream', self._job['transactional_id'])}/{thread}"

    @contextmanager
    def noted(self, operation: str, thread: int) -> Generator[None]:
        """Note the outcome of the block, in which the operation is written."""
        try:
            with self._journal.operation(operation, stream=self._stream(thread), writer=self._writer):
                yield
        except (OnPurpose, exc.SQLAlchemyError):
            # Raised by the block itself, the second by its INSERT: the dual write has aborted.
            self._journal.aborted(operation)
        except Fenced:
            self.over = True
            raise
        except (TransactionAborted, CompletionPending, TransactionInDoubt, Unavailable):
            pass  # the journal has it; the next operation is another one

    def of(self, thread: int) -> Iterator[tuple[str, bool]]:
        """One thread's, or task's, share: each with whether it is aborted on purpose."""
        for position in range(self._job["operations"]):
            if self.over:
                return
            # The first thread's names are plain: most tests have one.
            operation = f"{self._job['name']}-{position}" + (f"-{thread}" if thread else "")
            yield operation, position in self._job.get("abort", [])
            time.sleep(self._job.get("between_s", 0))

    def spoils(self, thread: int, operation: str) -> bool:
        """Whether this unit ends its group. The process meets its end once that has happened."""
        is_it = not thread and operation == f"{self._job['name']}-{self._job.get('spoils')}"
        if is_it:
            failpoints.arm(self._job["armed_when_spoiled"])
        return is_it


class _Writing:
    """``run`` writes one thread's share."""

    def __init__(self, job: dict, engine: Engine | RocksDatabase, writer: DualWriter, journal: Journal) -> None:
        self._job = job
        self._writer = writer
        self._operations = Operations(job, journal)
        if job.get("session"):
            self._sessions = sessionmaker(engine)
            self._bound = writer.bind(self._sessions, outbox=job.get("outbox_of_blocks"))

    def run(self, thread: int) -> None:
        if self._job.get("units_at_once"):
            self._run_units(thread)
            return
        for operation, abort in self._operations.of(thread):
            with self._operations.noted(operation, thread):
                self._one(operation, abort=abort)

    def _run_units(self, thread: int) -> None:
        """All units of this thread are under way at once."""
        waiting = []
        for operation, abort in self._operations.of(thread):
            self._operations.begun(operation, thread)
            waiting.append((operation, self._writer.submit(self._unit(operation, thread, abort=abort))))
        for operation, future in waiting:
            with self._operations.noted(operation, thread):
                future.result()

    def _unit(self, operation: str, thread: int, *, abort: bool) -> Callable[[Transaction], None]:
        def unit(tx: Transaction) -> None:
            self._both(tx, operation, abort=abort)
            if self._operations.spoils(thread, operation):
                tx.connection.execute(LOSE_CONNECTION)

        return unit

    def _one(self, operation: str, *, abort: bool) -> None:
        if self._job.get("session"):
            self._one_in_session(operation, abort=abort)
            return
        if self._job.get("group"):
            self._writer.submit(lambda tx: self._both(tx, operation, abort=abort)).result()
            return
        if self._job.get("rows"):
            self._writer.submit(self._row_unit(operation, abort=abort)).result()
            return
        with self._writer.transaction(outbox=self._job.get("outbox_of_blocks")) as tx:
            self._both(tx, operation, abort=abort)

    def _row_unit(self, operation: str, *, abort: bool) -> RowUnit:
        """The same as data. To abort it, its row comes twice."""
        partitions = range(self._job.get("partitions", 2))
        return RowUnit(
            INSERT,
            [{"id": operation}] * (2 if abort else 1),
            messages=[ProducerRecord(self._job["topic"], operation, str(n), partition=n) for n in partitions],
        )

    def _both(self, tx: Transaction, operation: str, *, abort: bool) -> None:
        for partition in range(self._job.get("partitions", 2)):
            tx.produce(self._job["topic"], value=operation, key=str(partition), partition=partition)
        insert(tx, self._job["url"], operation)
        if self._job.get("leased"):
            self._note_decision(tx, operation)
        if abort:
            raise OnPurpose(operation)

    def _note_decision(self, tx: Transaction, operation: str) -> None:
        found = {"operation": operation, "transactional_id": tx.transactional_id, "member": self._job["name"]}
        own = select(_STATE.c.incarnation).where(_STATE.c.transactional_id == tx.transactional_id)
        incarnation = tx.connection.scalar(own)
        tx.connection.execute(DECISIONS.insert().values(incarnation=incarnation, **found))

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

    def tell(line: str) -> None:
        print(line, flush=True)  # noqa: T201 - the parent waits for it

    if job["url"].startswith("rocksdb:"):
        with RocksDatabase.from_url(job["url"]) as database:
            return write(job, database, tell)
    engine = make_engine(job["url"])
    METADATA.create_all(engine)
    return write(job, engine, tell)


if __name__ == "__main__":
    sys.exit(main())
