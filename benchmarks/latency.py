"""One caller, one message and one row: how long a dual write takes, and when a ``read_committed`` consumer sees it.

The ways are interleaved, one operation of each in turn, so that the machine's noise falls on all alike.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event

from confluent_kafka import OFFSET_END, Consumer, Producer, TopicPartition
from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, create_engine, delete, insert, select

from benchmarks.servers import Ground, p50, p95
from dualwrite import DualWriter

METADATA = MetaData()
ROWS = Table(
    "latency_rows", METADATA, Column("id", Integer, primary_key=True, autoincrement=True), Column("note", Text)
)
OUTBOX = Table("outbox", METADATA, Column("id", Integer, primary_key=True, autoincrement=True), Column("note", Text))
POLL_S = 0.010
_SPAWN = multiprocessing.get_context("spawn")

Write = Callable[[str], None]


@contextmanager
def ours(ground: Ground, engine: Engine, topic: str) -> Iterator[Write]:
    """This library."""
    with DualWriter("latency", kafka=ground.kafka, engine=engine) as writer:

        def write(note: str) -> None:
            with writer.transaction() as tx:
                tx.produce(topic, value=note)
                tx.connection.execute(insert(ROWS).values(note=note))

        yield write


@contextmanager
def without_a_protocol(ground: Ground, engine: Engine, topic: str, *, overlapped: bool) -> Iterator[Write]:
    """The same Kafka transaction and the same database transaction: torn by a crash between them.

    With two producers in turn, as this library uses two lanes in turn. ``overlapped``: the database transaction runs while
    librdkafka sends; else one after the other.
    """
    made = [Producer({**ground.kafka, "transactional.id": f"{overlapped}-{n}", "linger.ms": 0}) for n in range(2)]
    for producer in made:
        producer.init_transactions(30)
    turn = 0

    def write(note: str) -> None:
        nonlocal turn
        producer = made[turn % 2]
        turn += 1
        producer.begin_transaction()
        producer.produce(topic, value=note)
        if not overlapped:
            producer.commit_transaction(30)
        with engine.begin() as connection:
            connection.execute(insert(ROWS).values(note=note))
        if overlapped:
            producer.commit_transaction(30)

    yield write


@contextmanager
def unsafe(ground: Ground, engine: Engine, topic: str) -> Iterator[Write]:
    """Database commit, then produce and flush: a crash in between loses the message."""
    producer = Producer({**ground.kafka, "acks": "all", "enable.idempotence": True, "linger.ms": 0})

    def write(note: str) -> None:
        with engine.begin() as connection:
            connection.execute(insert(ROWS).values(note=note))
        producer.produce(topic, value=note)
        producer.flush(30)

    yield write


def relay(kafka: dict[str, str], url: str, topic: str, ready: Event, stop: Event) -> None:
    """The outbox's relay, a process of its own: polls every 10 ms, publishes what is there, deletes it."""
    producer = Producer({**kafka, "acks": "all", "enable.idempotence": True, "linger.ms": 0})
    engine = create_engine(url)
    ready.set()
    while not stop.wait(POLL_S):
        with engine.begin() as connection:
            due = connection.execute(select(OUTBOX).order_by(OUTBOX.c.id).with_for_update()).all()
            for row in due:
                producer.produce(topic, value=row.note)
            if due:
                producer.flush(30)
                connection.execute(delete(OUTBOX).where(OUTBOX.c.id.in_([row.id for row in due])))
    engine.dispose()


@contextmanager
def outbox(ground: Ground, engine: Engine, topic: str) -> Iterator[Write]:
    """Row and outbox row in one transaction; a relay polls every 10 ms and publishes."""
    with _process(relay, ground.kafka, ground.url, topic):

        def write(note: str) -> None:
            with engine.begin() as connection:
                connection.execute(insert(ROWS).values(note=note))
                connection.execute(insert(OUTBOX).values(note=note))

        yield write


def watch(kafka: dict[str, str], topic: str, seen: SimpleQueue[tuple[str, float]], ready: Event, stop: Event) -> None:
    """A ``read_committed`` consumer, a process of its own, that tells when each message arrives (monotonic clock)."""
    consumer = Consumer(
        {**kafka, "group.id": "watcher", "isolation.level": "read_committed", "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, 0, OFFSET_END)])
    consumer.poll(1.0)
    ready.set()
    while not stop.is_set():
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            seen.put((message.value().decode(), time.perf_counter()))
    consumer.close()


@contextmanager
def _process(target: Callable[..., None], *arguments: object) -> Iterator[None]:
    ready, stop = _SPAWN.Event(), _SPAWN.Event()
    process = _SPAWN.Process(target=target, args=(*arguments, ready, stop), daemon=True)
    process.start()
    try:
        if not ready.wait(60):
            raise TimeoutError(target.__name__)
        yield
    finally:
        stop.set()
        process.join(30)


def _visibility(ways: dict[str, Write], ground: Ground, topic: str, operations: int) -> dict[str, list[float]]:
    """Milliseconds from the start of each call until the watcher has its message."""
    seen: SimpleQueue[tuple[str, float]] = _SPAWN.SimpleQueue()
    samples: dict[str, list[float]] = {name: [] for name in ways}
    with _process(watch, ground.kafka, topic, seen):
        for number in range(operations):
            for name, write in ways.items():
                note = f"{name} {number} seen"
                started = time.perf_counter()
                write(note)
                arrived, at = seen.get()
                while arrived != note:
                    arrived, at = seen.get()
                if number >= operations // 10:
                    samples[name].append((at - started) * 1000)
    return samples


def run(
    ground: Ground, *, operations: int = 1500, visible: int = 200, warm_up: int = 100
) -> dict[str, dict[str, float]]:
    """Measure; milliseconds by way and figure."""
    engine = create_engine(ground.url)
    METADATA.create_all(engine)
    with ExitStack() as stack:
        topic = ground.topic(1)
        ways: dict[str, Write] = {
            "dual write": stack.enter_context(ours(ground, engine, topic)),
            "one after the other, no protocol": stack.enter_context(
                without_a_protocol(ground, engine, topic, overlapped=False)
            ),
            "overlapped, no protocol": stack.enter_context(without_a_protocol(ground, engine, topic, overlapped=True)),
            "unsafe: commit, then produce and flush": stack.enter_context(unsafe(ground, engine, topic)),
            "outbox, 10 ms poll": stack.enter_context(outbox(ground, engine, topic)),
        }
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(warm_up + operations):
            for name, write in ways.items():
                started = time.perf_counter()
                write(f"{name} {number}")
                if number >= warm_up:
                    samples[name].append((time.perf_counter() - started) * 1000)
        watched = _visibility(ways, ground, topic, visible)
    engine.dispose()
    return {
        name: {
            "call p50": p50(samples[name]),
            "call p95": p95(samples[name]),
            "visible p50": p50(watched[name]),
            "visible p95": p95(watched[name]),
        }
        for name in samples
    }
