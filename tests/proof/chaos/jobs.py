"""The jobs of the forked processes: write, settle from outside, work as tasks on leased slots, count in a store, check."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from harness.hanging import abort_hanging
from harness.members import METADATA as COPIES
from harness.members import make_member
from harness.unit_worker import write_units
from harness.worker import FENCED, LOST, METADATA, OPERATIONS, QUERY, UNAVAILABLE, make_engine, write
from sqlalchemy import Engine, exc

import chaos.fleets
import dualwrite.asyncio.consumer  # noqa: F401 - imported once, before the processes are forked
from chaos.tally import tally
from dualwrite import (
    CompletionPending,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
    recover,
)
from dualwrite.clock import Deadline
from dualwrite.errors import OutcomeUnverifiable
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import LaneProducer
from dualwrite.migrations import upgrade
from dualwrite.protocol.members import LeaseState
from dualwrite.protocol.outbox import PRODUCED_AT
from dualwrite.recovery.claim import OwnerContext, default_owner
from dualwrite.stores.sql.leases import SlotPool, read_leases
from dualwrite.stores.sql.ledger import Ledger
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.testing import Checker, Follower, Journal
from dualwrite.testing.checker import Record, value_as_text
from dualwrite.writing.dual_write import DualWrite
from dualwrite.writing.lane import Lane

Tell = Callable[[str], None]

logger = logging.getLogger(__name__)


def prepare(url: str) -> Engine:
    """Make the tables, and an engine that has no connection but knows its statements: forks start warm."""
    engine = make_engine(url)
    with engine.connect() as connection:
        upgrade(connection)
    METADATA.create_all(engine)
    COPIES.create_all(engine)
    chaos.fleets.watch(engine)
    store = SqlStateStore(engine)
    store.claim(["warm"], owner="warm", cluster_id="warm")
    store.find("warm")
    store.incidents("warm")
    with engine.begin() as connection:
        connection.execute(declare_tables(None).state.delete())
        connection.execute(OPERATIONS.select())
    "localhost".encode("idna")  # what the first connection would import
    engine.dispose()
    return engine


def settle(job: dict, engine: Engine, tell: Tell) -> int:
    """Recover one id from outside, as an operator's command does."""
    started = time.monotonic()
    try:
        report = recover(job["transactional_id"], kafka=job["kafka"], database=engine, timeout_s=job["timeout_s"])
    except Fenced:
        return FENCED
    except Unavailable:
        return UNAVAILABLE
    except (DecidedTransactionLost, OutcomeUnverifiable):
        return LOST
    tell(f"open {time.monotonic() - started:.3f}")
    return LOST if report.losses else 0


def last_member(job: dict, engine: Engine, tell: Tell) -> int:
    """The last member of a fleet: it writes, and lives until nothing of the others is left to settle."""

    def is_alone() -> bool:
        leases = read_leases(engine, prefix=job["transactional_id"])
        return sum(lease.state is not LeaseState.FREE for lease in leases) <= 1

    return write({**job, "until": is_alone}, engine, tell)


def task(job: dict, engine: Engine, tell: Tell) -> int:
    """Write the partitions of a batch that the ledger does not have yet, as a Spark task does it."""
    started = time.monotonic()
    pool = SlotPool(engine, job["pool"])
    store = SqlStateStore(engine, paused_owner_timeout_s=job["paused_owner_timeout_s"])
    try:
        with closing(KafkaCoordinator(KafkaConfig.parse(job["kafka"]))) as coordinator:
            context = OwnerContext(coordinator, store, default_owner())
            lease = pool.lease(job["name"], job["lease_s"])
            lane = Lane(lease.transactional_id, context, _producer_maker(job, context))
            try:
                lane.ready(Deadline(job["timeout_s"]))
                tell(f"open {time.monotonic() - started:.3f}")
                with Journal(job["journal"]) as journal:
                    for partition in range(job["operations"]):
                        _write_partition(job, engine, context, lane, journal, partition)
                lane.record_completed()
            finally:
                lane.discard()
            pool.release({lease.transactional_id: lease.owner})
    except Fenced:
        return FENCED
    except (Unavailable, TransactionAborted, TransactionInDoubt, CompletionPending, exc.DBAPIError):
        return UNAVAILABLE
    except (DecidedTransactionLost, OutcomeUnverifiable):
        return LOST
    return 0


class _WrittenByOther(Exception):
    """The ledger has the partition: another attempt was faster."""


def _write_partition(
    job: dict, engine: Engine, context: OwnerContext, lane: Lane, journal: Journal, partition: int
) -> None:
    sink, batch = job["pool"], job["batch"]
    ledger = Ledger()
    with engine.connect() as connection:
        if ledger.seen(connection, sink, batch, partition):
            return
    lane.ready(Deadline(job["timeout_s"]))
    operation = f"{batch}-{partition}"
    # Attempts of one partition run at once: the answer to one says nothing about the others. So only success, which
    # the ledger grants to one of them, is journaled as certain.
    journal.begun(operation)
    try:
        with (
            engine.connect() as connection,
            DualWrite(lane, context, connection, margin_s=10, timeout_s=job["timeout_s"]) as tx,
        ):
            for number in range(job["partitions"]):
                tx.produce(job["topic"], value=operation, key=str(number), partition=number)
            if not ledger.insert(
                tx.connection, sink, batch, partition, row_count=1, message_count=1, partition_count=job["operations"]
            ):
                raise _WrittenByOther
            tx.connection.execute(OPERATIONS.insert().values(id=operation))
    except _WrittenByOther:
        return
    except CompletionPending:
        journal.acknowledged(operation)
        raise
    journal.acknowledged(operation)


def _producer_maker(job: dict, context: OwnerContext):
    config = KafkaConfig.parse(job["kafka"])

    def make_producer(row):
        return LaneProducer(
            config,
            row.kafka_id(row.incarnation),
            coordinator=context.coordinator,
            incarnation=row.incarnation,
            call_timeout_s=job["timeout_s"],
            bulk=True,
        )

    return make_producer


def check(job: dict, engine: Engine, tell: Tell) -> int:
    """Follow the topic from now on; check on command; leave the verdict in a file."""
    waited = set()

    def operation_of(record: Record) -> str:
        if any(name == PRODUCED_AT for name, _ in record.headers):
            waited.add((record.partition, record.offset))
        return value_as_text(record)

    checker = Checker(
        journal=job["journal"],
        kafka=job["kafka"],
        topics=[job["topic"]],
        database=engine,
        query=QUERY,
        operation_of=operation_of,
        messages_per_operation=job["partitions"],
        prefix=job["prefix"],
        timeout_s=job["timeout_s"],
    )
    with Follower(job["kafka"], [job["topic"]]) as follower:
        tell("open 0")
        Path(job["go"]).read_text(encoding="utf-8")  # a pipe with a name: it opens when the round is over
        hanging = 0
        if job["aborts_hanging"]:
            with suppress(Unavailable):  # the checker settles, too, and says so
                recover(kafka=job["kafka"], database=engine, prefix=job["prefix"], timeout_s=job["timeout_s"])
            hanging = len(abort_hanging(job["kafka"], job["topic"], job["partitions"]))
        verdict = checker.check(follower)
    document = {
        "operations": verdict.operations,
        "acknowledged": verdict.acknowledged,
        "aborted": verdict.aborted,
        "present": verdict.present,
        "waited": len(waited),
        "hanging": hanging,
        "decided_by_members": chaos.fleets.decided(engine),
        "findings": [
            {"kind": finding.kind.value, "subject": finding.subject, "detail": finding.detail}
            for finding in verdict.findings
        ]
        + chaos.fleets.find(engine),
    }
    Path(job["verdict"]).write_text(json.dumps(document), encoding="utf-8")
    return 0


def consume(job: dict, engine: Engine, tell: Tell) -> int:
    """Copy as a member of a group, until nothing comes for a while."""
    del engine, tell  # the member makes its own from the URL
    try:
        make_member(**job["member"]).run(idle_s=job["idle_s"])
    except Fenced:
        return FENCED
    except Unavailable:
        return UNAVAILABLE
    except (DecidedTransactionLost, OutcomeUnverifiable):
        return LOST
    return 0


JOBS: dict[str, Callable[[dict, Engine, Tell], int]] = {
    "write": write,
    "member": write,
    "last member": last_member,
    "settle": settle,
    "task": task,
    "check": check,
    "consume": consume,
    "tally": tally,
    "units": write_units,
}


def run(job: dict, engine: Engine, told_to: int) -> int:
    """Do one job in a process of its own; the exit code."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {job['name']} %(levelname)s %(name)s: %(message)s")
    for noisy in ("kafka", "alembic"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)

    def tell(line: str) -> None:
        os.write(told_to, line.encode() + b"\n")

    try:
        return JOBS[job["do"]](job, engine, tell)
    except DualWriteError:
        logger.exception("ended by an error that a worker should not meet")
        return 1
