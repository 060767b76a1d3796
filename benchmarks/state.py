"""State stores: what transactions cost, and how long a store takes to come back after a kill.

``PYTHONPATH=tests/proof python -m benchmarks --only state`` (ten minutes).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rocksdict
from confluent_kafka import Producer

from benchmarks.servers import Ground
from dualwrite import TransactionalProducer, failpoints
from dualwrite.state import KeyValueStore, ProducerBlocks, StateTask

MIB = 1 << 20
BOUNDS = (0, 4 * MIB, 16 * MIB, 64 * MIB)
PLAIN = "RocksDB alone"
SIZES = (1_000, 100_000)
ENTRIES = (100_000, 1_000_000, 10_000_000)
LAST = 1_000
"""The writes of the transaction that a task dies in, between Kafka's commit and the store's."""
SYNCED, UNSYNCED = "synced", "not synced"
READERS = (0, 1, 2, 4)
KILLED, WIPED = "rolled forward after a kill", "wiped, and replayed"
_RANDOM = os.urandom(MIB)


def key_of(number: int) -> bytes:
    """A key of 12 bytes."""
    return b"%012d" % number


def value_of(number: int) -> bytes:
    """A value of 100 bytes, which no codec makes smaller."""
    return _RANDOM[(at := number * 97 % (MIB - 100)) : at + 100]


def run(
    ground: Ground,
    *,
    writes: int = 100_000,
    sizes: Sequence[int] = SIZES,
    rounds: int = 3,
    entries: Sequence[int] = ENTRIES,
    kills: int = 3,
) -> dict[str, Any]:
    """Measure costs and recovery.

    Args:
        ground: The servers.
        writes: How many keys are read and written in a round.
        sizes: How many of them in a transaction.
        rounds: How often each cost is measured; the median counts.
        entries: The numbers of entries of the stores that come back.
        kills: How often each of these is killed; the median counts.
    """
    found = {str(count): recovery(ground, count, kills) for count in entries}
    return {
        "costs": {str(size): costs(writes, size, rounds) for size in sizes},
        "recovery": found,
        "commits": commits(writes // 100, rounds),
        "reads": reads(writes, rounds),
        "load": os.getloadavg()[1],
    }


def commits(count: int, rounds: int) -> dict[str, float]:
    """Microseconds of a commit of one write, synced and not: medians of the rounds, the two in turn."""
    spent: dict[str, list[float]] = {SYNCED: [], UNSYNCED: []}
    for _ in range(rounds):
        for way, found in spent.items():
            with _directory() as directory, KeyValueStore(directory / "store", sync=way == SYNCED) as store:
                began = time.perf_counter()
                for number in range(count):
                    store.put(key_of(number), value_of(number))
                    store.commit(number)
                found.append((time.perf_counter() - began) * 1e6 / count)
    return {way: round(statistics.median(found), 1) for way, found in spent.items()}


def reads(entries: int, rounds: int, seconds: float = 2.0) -> dict[str, dict[str, float]]:
    """What a writer does in a second, in transactions of ten, and what other threads read beside it: medians of the rounds."""
    found: dict[int, list[dict[str, float]]] = {readers: [] for readers in READERS}
    with _directory() as directory, KeyValueStore(directory / "store") as store:
        store.put_all((key_of(number), value_of(number)) for number in range(entries))
        store.commit(0)
        for _ in range(rounds):
            for readers, measured in found.items():
                measured.append(_beside(store, readers, entries, seconds))
    return {
        str(readers): {what: round(statistics.median(one[what] for one in measured)) for what in measured[0]}
        for readers, measured in found.items()
    }


def _beside(store: KeyValueStore, readers: int, entries: int, seconds: float) -> dict[str, float]:
    reader, ended = store.reader(), threading.Event()

    def read(seed: int) -> int:
        draw, count = random.Random(seed), 0
        while not ended.is_set():
            reader.get(key_of(draw.randrange(entries)))
            count += 1
        return count

    draw, written = random.Random(readers), 0
    with ThreadPoolExecutor(max(1, readers)) as threads:
        reading = [threads.submit(read, seed) for seed in range(readers)]
        began = time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            for _ in range(10):
                store.put(key_of(draw.randrange(entries)), value_of(written))
            store.commit((store.committed.offset or 0) + 10)
            written += 1
        ended.set()
        return {"commits": written / spent, "reads": sum(one.result() for one in reading) / spent}


def costs(writes: int, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of a get, of a put, and of its share in the commit: medians of the rounds, the ways in turn."""
    draw = random.Random(1)
    keys = [key_of(draw.randrange(10 * writes)) for _ in range(writes)]
    ways: dict[str, Callable[[Path], dict[str, float]]] = {PLAIN: lambda path: _plain(path, keys, size)}
    for bound in BOUNDS:
        ways[f"{bound // MIB} MiB"] = lambda path, bound=bound: _transactional(path, keys, size, bound)  # type: ignore[misc]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            with _directory() as directory:
                found[name].append(way(directory / "store"))
    return {
        name: {what: round(statistics.median(one[what] for one in measured), 2) for what in measured[0]}
        for name, measured in found.items()
    }


def _plain(directory: Path, keys: Sequence[bytes], size: int) -> dict[str, float]:
    """RocksDB itself: each write goes to it at once; it is synced where a transaction would commit."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    database = rocksdict.Rdict(str(directory), options)
    try:
        return _timed(keys, size, database.get, database.put, lambda: database.flush_wal(True))
    finally:
        database.close()


def _transactional(directory: Path, keys: Sequence[bytes], size: int, bound: int) -> dict[str, float]:
    with KeyValueStore(directory, max_memory_bytes=bound) as store:
        return _timed(keys, size, store.get, store.put, lambda: store.commit(None))


def _timed(
    keys: Sequence[bytes],
    size: int,
    get: Callable[[bytes], object],
    put: Callable[[bytes, bytes], object],
    commit: Callable[[], object],
) -> dict[str, float]:
    spent = {"get": 0.0, "put": 0.0, "commit": 0.0}
    for begin in range(0, len(keys), size):
        part = [(key, value_of(number)) for number, key in enumerate(keys[begin : begin + size])]
        at = time.perf_counter()
        for key, _ in part:
            get(key)
        spent["get"] += (then := time.perf_counter()) - at
        for key, value in part:
            put(key, value)
        spent["put"] += (at := time.perf_counter()) - then
        commit()
        spent["commit"] += time.perf_counter() - at
    spent["together"] = sum(spent.values())
    return {what: seconds * 1e6 / len(keys) for what, seconds in spent.items()}


@contextmanager
def _directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="state-", dir="."))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def recovery(ground: Ground, entries: int, kills: int) -> dict[str, float]:
    """Seconds until a store of that many entries is usable: built from the whole changelog, and after kills."""
    topic = ground.kafka_server.create_topic(
        f"bench-{secrets.token_hex(4)}", 1, config={"cleanup.policy": "compact"}, timeout_s=60
    )
    _fill(ground.kafka, topic, entries)
    with _directory() as directory:
        wiped = _restored_s(ground.kafka, topic, directory / "store", entries)
        killed = []
        for _ in range(kills):
            _die(ground.kafka, topic, directory / "store")
            killed.append(_restored_s(ground.kafka, topic, directory / "store", LAST))
    ground.kafka_server.delete_topic(topic)
    return {WIPED: round(wiped, 3), KILLED: round(statistics.median(killed), 3)}


def _fill(kafka: Mapping[str, str], topic: str, entries: int) -> None:
    producer = Producer({**kafka, "linger.ms": 20, "queue.buffering.max.messages": 200_000})
    for number in range(entries):
        while True:
            try:
                producer.produce(topic, value_of(number), key_of(number), partition=0)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    producer.flush()


def _restored_s(kafka: Mapping[str, str], topic: str, directory: Path, missing: int) -> float:
    """From opening the store until a block can begin. A producer is not in it: both ways need one."""
    with TransactionalProducer(kafka, topic) as producer:
        producer.init_transactions()
        began = time.perf_counter()
        with KeyValueStore(directory) as store:
            applied = StateTask(ProducerBlocks(producer), store, kafka=kafka, changelog=topic, partition=0).restore()
            seconds = time.perf_counter() - began
    if applied != missing:
        raise RuntimeError(f"{applied} records were missing in the store, not {missing}")
    return seconds


def _die(kafka: Mapping[str, str], topic: str, directory: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_write_and_die, args=(kafka, topic, directory))
    process.start()
    process.join()


def _write_and_die(kafka: Mapping[str, str], topic: str, directory: Path) -> None:
    with TransactionalProducer(kafka, topic) as producer, KeyValueStore(directory) as store:
        producer.init_transactions()
        task = StateTask(ProducerBlocks(producer), store, kafka=kafka, changelog=topic, partition=0)
        task.restore()
        failpoints.arm("state.before_commit")
        with task.transaction():
            for number in range(LAST):
                store.put(key_of(number), value_of(number + 1))
