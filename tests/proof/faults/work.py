"""The process that dual-writes in a case: reports the answers it got, pauses where the case wants to act, may be killed."""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import psycopg  # noqa: F401 - imported once, before the forks
from confluent_kafka import Consumer, TopicPartition
from harness.engines import send
from harness.planting import plant
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine

import dualwrite.kafka.coordinator
import dualwrite.kafka.librdkafka.producer  # noqa: F401 - imported once, before the forks
from dualwrite import (
    CompletionPending,
    ConfigurationError,
    DualWriteError,
    DualWriter,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    WriterLimits,
    failpoints,
)
from dualwrite.errors import Unavailable
from dualwrite.kafka.config import EngineName
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.protocol.lives import ProducerState

OPERATIONS = Table(
    "operations",
    MetaData(),
    Column("transactional_id", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("incarnation", Integer, nullable=False),
)
PARTITIONS = 2
MESSAGES, OFFSETS, BOTH = "messages", "offsets", "both"
OPENINGS = 3
SENT_S = 2.0
"""How long an owner that pauses after its first message waits until that has reached the broker."""


@dataclass(frozen=True)
class Operation:
    """One dual write.

    Attributes:
        kind: What it sends to Kafka, next to its row in the database.
        abort: Whether its block raises.
    """

    kind: str = MESSAGES
    abort: bool = False


@dataclass(frozen=True)
class Job:
    """The work of one owner of the case's id.

    Attributes:
        name: Begins the ids of its operations.
        pauses: Points, as ``operation:failpoint``, where it waits for a command to continue; while it opens, the operation is -1.
        patience_s: Bounds each call.
        engine: The producers' engine.
        mistake: A planted mistake of ``harness.mistakes``, to see that this catches it.
        outbox: The writer's setting.
    """

    name: str
    kafka: dict[str, object]
    direct: dict[str, str]
    url: str
    transactional_id: str
    topic: str
    group: str
    operations: tuple[Operation, ...]
    pauses: frozenset[str] = field(default_factory=frozenset)
    patience_s: float = 20.0
    engine: EngineName = "native"
    mistake: str = ""
    outbox: str = "never"


@dataclass
class _Now:
    """The operation that an owner does, and its producer."""

    number: int = -1
    producer: TransactionalProducer | None = None


def serve(told: Connection) -> None:
    """The life of the process: jobs, until the pipe ends. One that was used before is warm, which is all that it keeps."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # librdkafka reports every fault there
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            _do(told.recv(), told)
    os._exit(0)  # not the time for the interpreter's and librdkafka's shut-down


def _do(job: Job, told: Connection) -> None:
    plant(job.mistake)
    now = _Now()
    passed: set[str] = set()

    def hit(name: str) -> None:
        point = f"{now.number}:{name}"
        if point in job.pauses and point not in passed:
            passed.add(point)
            if name == "write.produced" and now.producer is not None and now.producer.state is ProducerState.BEGUN:
                send(now.producer, SENT_S)
            told.send(("at", point))
            told.recv()

    failpoints.hit = hit
    try:
        _write_all(job, told, now)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except BaseException as error:  # noqa: BLE001 - reported, and the case decides what it means
        told.send(("unexpected", f"{type(error).__name__}: {error}"))
    told.send(("end", ""))


def _write_all(job: Job, told: Connection, now: _Now) -> None:
    engine = create_engine(job.url)
    consumer = None
    if any(operation.kind != MESSAGES for operation in job.operations):
        consumer = Consumer({**job.direct, "group.id": job.group, "log_level": 0})
    writer = None
    for opening in itertools.count(1):
        writer = DualWriter(
            job.transactional_id,
            kafka={**job.kafka, "dualwrite.engine": job.engine},
            database=engine,
            limits=WriterLimits(max_lanes=1, timeout_s=job.patience_s, paused_owner_timeout_s=None),
            outbox=job.outbox,
        )
        try:
            writer.open()
            break
        except Fenced:
            told.send(("fenced", "opening"))
            return
        except Unavailable as error:
            told.send(("not opened", str(error)))
            if opening == OPENINGS:
                return
    told.send(("opened", ""))
    for number, operation in enumerate(job.operations):
        now.number = number
        name = f"{job.name}-{number}"
        told.send(("begin", name))
        if not _write(writer, job, operation, name, consumer, told, now):
            break
    now.number = len(job.operations)
    with contextlib.suppress(DualWriteError):
        writer.close()
    if consumer is not None:
        consumer.close()
    engine.dispose()


def _write(writer, job: Job, operation: Operation, name: str, consumer, told: Connection, now: _Now) -> bool:
    """One operation; whether the owner may go on."""
    try:
        with writer.transaction() as tx:
            lane = tx._dual_write._lane
            now.producer = lane.producer if lane.usable else None  # there may be none while messages wait
            _fill(tx, job, operation, name, consumer)
    except KeyError:
        told.send(("aborted", name))
    except (TransactionAborted, Unavailable) as error:
        told.send(("aborted", name))
        told.send(("why", f"{name}: {error}"))
    except CompletionPending:
        told.send(("pending", name))
    except Fenced:
        told.send(("fenced", name))
        return False
    except TransactionInDoubt as error:
        told.send(("doubt", name))
        told.send(("why", f"{name}: {error}"))
    except (ConfigurationError, DualWriteError) as error:
        told.send(("unexpected", f"{name}: {type(error).__name__}: {error}"))
        return False
    else:
        told.send(("acknowledged", name))
    return True


def _fill(tx, job: Job, operation: Operation, name: str, consumer) -> None:
    if operation.kind != OFFSETS:
        for partition in range(PARTITIONS):
            tx.produce(job.topic, value=name, key=job.transactional_id, partition=partition)
    if operation.kind != MESSAGES:
        offset = TopicPartition(job.topic, 0, offset_of(name))
        tx.send_offsets_to_transaction([offset], consumer.consumer_group_metadata())
    row = {"transactional_id": job.transactional_id, "name": name, "kind": operation.kind}
    tx.connection.execute(OPERATIONS.insert().values(**row, incarnation=tx._dual_write._lane.row.incarnation))
    if operation.abort:
        raise KeyError(name)


def offset_of(name: str) -> int:
    """The group's offset that an operation commits: no two of a case have the same."""
    owner, number = name.split("-")
    return 1000 * int(owner[1:]) + int(number) + 1
