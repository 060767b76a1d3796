"""Ways to bring one row and some messages into a table and a topic: those of this library, and those that it is compared with."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import TypeVar

from confluent_kafka import Producer
from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, create_engine, delete, insert, select

from dualwrite import DualWriter, WriterLimits
from dualwrite.kafka.config import EngineName
from dualwrite.protocol.outbox import Outbox

NATIVE = "dual write"
LIBRDKAFKA = "dual write through librdkafka"
SEQUENTIAL = "one after the other, no protocol"
OVERLAPPED = "overlapped, no protocol"
UNSAFE = "unsafe: commit, then produce and flush"
OUTBOX = "outbox, 10 ms poll"
ENGINES: Mapping[str, EngineName] = {NATIVE: "native", LIBRDKAFKA: "librdkafka"}

METADATA = MetaData()
ROWS = Table("bench_rows", METADATA, Column("id", Integer, primary_key=True, autoincrement=True), Column("note", Text))
OUTBOX_TABLE = Table(
    "outbox", METADATA, Column("id", Integer, primary_key=True, autoincrement=True), Column("note", Text)
)
POLL_S = 0.010
QUIET = {"log_level": 0}
"""librdkafka's producers live as long as a reference to them, and log that the proxies in front of their broker have gone."""
SPAWN = multiprocessing.get_context("spawn")

Write = Callable[[Sequence[str]], None]
"""Writes these messages, and one row."""
KeyT = TypeVar("KeyT")


@contextmanager
def ours(
    kafka: Mapping[str, str],
    engine: Engine,
    topic: str,
    way: str,
    *,
    lanes: int = 8,
    lane_timeout_s: float = 30.0,
    outbox: Outbox = "never",
) -> Iterator[Write]:
    """This library, by one of its producer engines."""
    name = f"{outbox} {way} {topic}".replace(" ", "-")
    limits = WriterLimits(max_lanes=lanes, lane_timeout_s=lane_timeout_s)
    with DualWriter(
        name, kafka={**kafka, "dualwrite.engine": ENGINES[way]}, database=engine, limits=limits, outbox=outbox
    ) as writer:
        yield writing(writer, topic)


def writing(writer: DualWriter, topic: str) -> Write:
    """Dual writes by an open writer."""

    def write(notes: Sequence[str]) -> None:
        with writer.transaction() as tx:
            for note in notes:
                tx.produce(topic, value=note)
            tx.connection.execute(insert(ROWS).values(note=notes[0]))

    return write


@contextmanager
def without_a_protocol(
    kafka: Mapping[str, str], engine: Engine, topic: str, *, overlapped: bool = False
) -> Iterator[Write]:
    """The same Kafka transaction and the same database transaction: torn by a crash between them.

    With two producers in turn, as this library uses two lanes in turn. ``overlapped``: the database transaction runs while
    librdkafka sends; else one after the other.
    """
    made = [
        Producer({**kafka, **QUIET, "transactional.id": f"{topic}-{overlapped}-{n}", "linger.ms": 0}) for n in range(2)
    ]
    for producer in made:
        producer.init_transactions(30)
    turn = 0

    def write(notes: Sequence[str]) -> None:
        nonlocal turn
        producer = made[turn % 2]
        turn += 1
        producer.begin_transaction()
        for note in notes:
            producer.produce(topic, value=note)
        if not overlapped:
            producer.commit_transaction(30)
        with engine.begin() as connection:
            connection.execute(insert(ROWS).values(note=notes[0]))
        if overlapped:
            producer.commit_transaction(30)

    yield write


def idempotent(kafka: Mapping[str, str]) -> Producer:
    """A producer without transactions that sends at once."""
    return Producer({**kafka, **QUIET, "acks": "all", "enable.idempotence": True, "linger.ms": 0})


@contextmanager
def unsafe(kafka: Mapping[str, str], engine: Engine, topic: str) -> Iterator[Write]:
    """Database commit, then produce and flush: a crash in between loses the message."""
    producer = idempotent(kafka)

    def write(notes: Sequence[str]) -> None:
        with engine.begin() as connection:
            connection.execute(insert(ROWS).values(note=notes[0]))
        for note in notes:
            producer.produce(topic, value=note)
        producer.flush(30)

    yield write


@contextmanager
def outbox(kafka: Mapping[str, str], engine: Engine, topic: str) -> Iterator[Write]:
    """Row and outbox row in one transaction; a relay polls every 10 ms and publishes."""
    with process(relay, dict(kafka), engine.url.render_as_string(hide_password=False), topic):

        def write(notes: Sequence[str]) -> None:
            with engine.begin() as connection:
                connection.execute(insert(ROWS).values(note=notes[0]))
                connection.execute(insert(OUTBOX_TABLE), [{"note": note} for note in notes])

        yield write


def relay(kafka: dict[str, str], url: str, topic: str, ready: Event, stop: Event) -> None:
    """The outbox's relay, a process of its own: polls every 10 ms, publishes what is there, deletes it."""
    producer = idempotent(kafka)
    engine = create_engine(url)
    ready.set()
    while not stop.wait(POLL_S):
        with engine.begin() as connection:
            due = connection.execute(select(OUTBOX_TABLE).order_by(OUTBOX_TABLE.c.id).with_for_update()).all()
            for row in due:
                producer.produce(topic, value=row.note)
            if due:
                producer.flush(30)
                connection.execute(delete(OUTBOX_TABLE).where(OUTBOX_TABLE.c.id.in_([row.id for row in due])))
    engine.dispose()


@contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[None]:
    """A process of its own, called with the arguments and two events: it sets the first, and ends at the second."""
    ready, stop = SPAWN.Event(), SPAWN.Event()
    started = SPAWN.Process(target=target, args=(*arguments, ready, stop), daemon=True)
    started.start()
    try:
        if not ready.wait(60):
            raise TimeoutError(target.__name__)
        yield
    finally:
        stop.set()
        started.join(30)


def in_turn(
    ways: Mapping[KeyT, Callable[[str], object]], operations: int, *, warm_up: int = 0
) -> dict[KeyT, list[float]]:
    """Milliseconds of each call, one of each way in turn, so that the machine's noise falls on all alike."""
    samples: dict[KeyT, list[float]] = {name: [] for name in ways}
    for number in range(warm_up + operations):
        for name, call in ways.items():
            started = time.perf_counter()
            call(f"{name} {number}")
            if number >= warm_up:
                samples[name].append((time.perf_counter() - started) * 1000)
    return samples
