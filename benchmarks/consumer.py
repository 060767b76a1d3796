"""Consuming: messages per second, and the time from an input message to its visible output, against a loop by hand.

Each input message becomes one row and one message. The loop by hand has no protocol: after a crash or a rebalance it writes
again what it had not yet committed to the group. ``PYTHONPATH=tests/proof python -m benchmarks --only consumer``
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Literal

from confluent_kafka import Consumer, Message, Producer
from sqlalchemy import Engine, create_engine, func, insert, select

from benchmarks.servers import Ground, p50
from benchmarks.ways import METADATA, ROWS, idempotent
from dualwrite import AsyncExactlyOnceConsumer, AsyncTransaction, ExactlyOnceConsumer, Transaction

BY_HAND = "by hand, at least once"
IN_KAFKA = "ExactlyOnceConsumer, offsets in Kafka"
AS_ROWS = "ExactlyOnceConsumer, offsets as rows"
IN_TASKS = "AsyncExactlyOnceConsumer, offsets in Kafka"
OFFSETS: Mapping[str, Literal["kafka", "database"]] = {IN_KAFKA: "kafka", AS_ROWS: "database"}
OURS = (*OFFSETS, IN_TASKS)
WAYS = (BY_HAND, *OURS)
PARTITIONS = 4
BATCH = 500


def _texts(messages: Sequence[Message]) -> list[str]:
    return [(message.value() or b"").decode() for message in messages]


@contextmanager
def by_hand(kafka: Mapping[str, str], engine: Engine, source: str, target: str, group: str) -> Iterator[None]:
    """Commit rows, flush messages, then commit offsets; read as this library reads."""
    stop = threading.Event()
    settings = {"group.id": group, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
    producer = idempotent(kafka)

    def loop() -> None:
        with closing(Consumer({**kafka, **settings})) as consumer:
            consumer.subscribe([source])
            while not stop.is_set():
                first = consumer.poll(0.1)
                if first is None:
                    continue
                texts = _texts([first, *consumer.consume(BATCH - 1, 0)])
                with engine.begin() as connection:
                    connection.execute(insert(ROWS), [{"note": text} for text in texts])
                for text in texts:
                    producer.produce(target, value=text)
                if producer.flush(30):
                    raise RuntimeError("not delivered")
                consumer.commit(asynchronous=False)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def ours(
    kafka: Mapping[str, str],
    engine: Engine,
    source: str,
    target: str,
    group: str,
    *,
    offsets: Literal["kafka", "database"],
) -> Iterator[None]:
    """This library's loop."""

    def handle(tx: Transaction, messages: Sequence[Message]) -> None:
        texts = _texts(messages)
        tx.produce_many(target, texts)
        tx.connection.execute(insert(ROWS), [{"note": text} for text in texts])

    consumer = ExactlyOnceConsumer(
        group, "0", topics=[source], handler=handle, kafka=kafka, database=engine, offsets=offsets, max_messages=BATCH
    )
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        yield
    finally:
        consumer.stop()
        thread.join()


@contextmanager
def in_tasks(kafka: Mapping[str, str], engine: Engine, source: str, target: str, group: str) -> Iterator[None]:
    """This library's loop, in an event loop of its own."""

    async def handle(tx: AsyncTransaction, messages: Sequence[Message]) -> None:
        texts = _texts(messages)
        await tx.produce_many(target, texts)
        await tx.connection.execute(insert(ROWS), [{"note": text} for text in texts])

    loop = asyncio.new_event_loop()
    url = engine.url.render_as_string(hide_password=False)
    consumer = AsyncExactlyOnceConsumer(
        group, "0", topics=[source], handler=handle, kafka=kafka, database=url, max_messages=BATCH
    )

    def run_loop() -> None:
        loop.run_until_complete(consumer.run())
        loop.close()

    thread = threading.Thread(target=run_loop)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(consumer.stop)
        thread.join()


_MEMBERS = {
    BY_HAND: by_hand,
    **{name: partial(ours, offsets=offsets) for name, offsets in OFFSETS.items()},
    IN_TASKS: in_tasks,
}


def run(
    ground: Ground, *, messages: int = 50_000, rounds: int = 3, seconds: float = 20.0, per_second: int = 100
) -> dict[str, dict[str, float]]:
    """Measure the ways in turn; by way: messages per second of a backlog, and milliseconds until an output is visible."""
    engine = create_engine(ground.url, pool_size=10)
    METADATA.create_all(engine)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            rates[way].append(_backlog(ground, engine, way, messages))
            times[way] += _delays(ground, engine, way, seconds / rounds, per_second)
    engine.dispose()
    return {
        way: {
            "per second": p50(rates[way]),
            "p50": p50(times[way]),
            "p99": statistics.quantiles(times[way], n=100, method="inclusive")[98],
        }
        for way in WAYS
    }


def _backlog(ground: Ground, engine: Engine, way: str, messages: int) -> float:
    """Messages per second, from the first row to the last."""
    source, target = ground.topic(PARTITIONS), ground.topic(PARTITIONS)
    producer = Producer(ground.kafka)
    for number in range(messages):
        producer.produce(
            source, value=f"message {number} of a backlog, of about as many bytes as an order has: {'x' * 50}"
        )
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()
    before = _rows(engine)
    with _MEMBERS[way](ground.kafka, engine, source, target, f"group-{source}"):
        begun, first = 0.0, 0
        while (written := _rows(engine) - before) < messages:
            if written and not begun:
                begun, first = time.perf_counter(), written
            time.sleep(0.02)
        if not begun:
            raise RuntimeError("all were written at once: a larger backlog is needed")
        return (written - first) / (time.perf_counter() - begun)


def _rows(engine: Engine) -> int:
    with engine.connect() as connection:
        found: Any = connection.scalar(select(func.max(ROWS.c.id)))
    return found or 0


def _delays(ground: Ground, engine: Engine, way: str, seconds: float, per_second: int) -> list[float]:
    """Milliseconds from producing an input to reading its output, at a steady rate; the first second warms up."""
    source, target = ground.topic(PARTITIONS), ground.topic(PARTITIONS)
    settings = {"group.id": f"reader-{source}", "auto.offset.reset": "earliest", "isolation.level": "read_committed"}
    producer = Producer({**ground.kafka, "linger.ms": 0})
    sent = int((seconds + 1) * per_second)
    found: list[float] = []
    with (
        closing(Consumer({**ground.kafka, **settings})) as reader,
        _MEMBERS[way](ground.kafka, engine, source, target, f"group-{source}"),
    ):
        reader.subscribe([target])
        _meet(producer, source, reader)

        def feed() -> None:
            begin = time.perf_counter()
            for number in range(sent):
                time.sleep(max(0.0, begin + number / per_second - time.perf_counter()))
                producer.produce(source, value=f"{number} {time.perf_counter()}")
                producer.poll(0)
            producer.flush()

        feeding = threading.Thread(target=feed)
        feeding.start()
        read = 0
        while read < sent:
            message = reader.poll(1.0)
            if message is None or message.error() is not None:
                continue
            number, at = (message.value() or b"").split()
            if number == b"meet":
                continue
            read += 1
            if int(number) >= per_second:
                found.append(1000 * (time.perf_counter() - float(at)))
        feeding.join()
    return found


def _meet(producer: Producer, source: str, reader: Consumer) -> None:
    """Wait until the member and the reader have their partitions: a message has come through."""
    while True:
        producer.produce(source, value="meet 0")
        producer.flush()
        message = reader.poll(1.0)
        if message is not None and message.error() is None:
            return
