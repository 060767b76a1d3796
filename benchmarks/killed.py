"""The time for which a killed worker holds back the readers of its partition: until another process has settled what it left.

A worker is killed with a message in Kafka and nothing decided. A survivor writes to the same partition at once; what is measured
is the time from the death until a ``read_committed`` consumer gets that message.

``PYTHONPATH=tests/proof python -m benchmarks --only killed``
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
from confluent_kafka import Consumer
from harness.forking import processes
from harness.patience import wait_until

from benchmarks.servers import Ground, p50
from dualwrite import DualWriter, WriterLimits, failpoints

SEEN, LEASE, OPENED = "a member beside it", "its lease alone", "opened again"
"""The settler: a member that sees the process end, one that waits for the lease, or the writer that its supervisor starts again."""


def _make(way: str, name: str, kafka: Mapping[str, str], url: str) -> DualWriter:
    settings = {"kafka": kafka, "database": url, "limits": WriterLimits(max_lanes=2)}
    return DualWriter(name, **settings) if way == OPENED else DualWriter.leased(name, **settings)  # type: ignore[arg-type]


def _victim(way: str, name: str, kafka: Mapping[str, str], url: str, topic: str, told: Connection) -> None:
    """A process of its own: opens, waits for a word, and dies by SIGKILL with a transaction prepared."""
    with _make(way, name, kafka, url) as writer:
        told.send("open")
        told.recv()
        failpoints.arm("write.prepared:1:kill")
        with writer.transaction() as tx:
            tx.produce(topic, "of the victim")


@contextmanager
def _reader(kafka: Mapping[str, str], topic: str) -> Iterator[Callable[[str], float]]:
    """Returns the time at which a reader has got this message."""
    got: dict[str, float] = {}
    arrived, stopped = threading.Condition(), threading.Event()

    def read() -> None:
        consumer = Consumer({**kafka, "group.id": topic, "auto.offset.reset": "earliest"})
        consumer.subscribe([topic])
        while not stopped.is_set():
            message = consumer.poll(0.1)
            if message is not None and not message.error():
                with arrived:
                    got[(message.value() or b"").decode()] = time.perf_counter()
                    arrived.notify_all()
        consumer.close()

    def when(value: str) -> float:
        with arrived:
            if not arrived.wait_for(lambda: value in got, 120):
                raise RuntimeError(f"{value} was not read")
            return got[value]

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield when
    finally:
        stopped.set()
        thread.join()


def _held_back_s(ground: Ground, way: str, name: str) -> float:
    topic = ground.topic(1)
    here, there = processes().Pipe()
    victim = processes().Process(target=_victim, args=(way, name, ground.kafka, ground.url, topic, there))
    victim.start()
    here.recv()
    survivor = _make(way, name, ground.kafka, ground.url)

    def put(value: str) -> None:
        with survivor.transaction() as tx:
            tx.produce(topic, value)

    with pytest.MonkeyPatch.context() as patch, _reader(ground.kafka, topic) as when:
        if way == LEASE:
            patch.setattr("dualwrite.writing.leased.has_ended", lambda _: False)
        if way != OPENED:
            survivor.open()
            put("before")
            when("before")
            wait_until(lambda: survivor._keeper._beside)  # type: ignore[attr-defined] # both have lived for a while
        here.send("go")
        victim.join()
        died = time.perf_counter()
        if way == OPENED:
            survivor.open()
        put("after")
        held_back_s = when("after") - died
        survivor.close()
    return held_back_s


def run(ground: Ground, *, rounds: int = 5) -> dict[str, dict[str, float]]:
    """Measure, in turns; seconds."""
    samples: dict[str, list[float]] = {way: [] for way in (SEEN, LEASE, OPENED)}
    for number in range(rounds):
        for index, (way, found) in enumerate(samples.items()):
            found.append(_held_back_s(ground, way, f"killed-{number}-{index}"))
    return {way: {"p50": p50(found), "max": max(found)} for way, found in samples.items()}
