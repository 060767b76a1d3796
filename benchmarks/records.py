"""Processor time for a million records of about 100 bytes, from Arrow's columns to a committed transaction, lz4.

Both engines, by `produce_arrow`, as Spark's tasks do, and by `produce_many`; and the native engine's batches alone, from
columns and record by record. The broker is another process, whose time does not count. The ways take turns; medians.

Beside that, what one record costs that is appended in Python, here and in kafka-python.

``PYTHONPATH=tests/proof python -m benchmarks.records``, or for the page ``python -m benchmarks --only records``; with ``--rows 0`` the appended records alone, without a broker.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
from kafka.record.default_records import DefaultRecordBatchBuilder

from benchmarks.servers import Ground, machine, p50
from dualwrite.kafka.config import EngineName
from dualwrite.kafka.native.arrow import batches, partition_rows
from dualwrite.kafka.native.records import Codec, RecordsBody, RecordsBuilder, partitioner
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.testing import EmbeddedKafka, read_committed

PARTITIONS = 4
ROWS_AT_ONCE = 10_000  # what a task of Spark sends at a time
LIMIT = 1_000_000
LZ4 = Codec("lz4")
MURMUR2 = partitioner("murmur2_random")
Piece = tuple[pa.Array, pa.Array]
"""Values and keys."""
Way = Callable[[EmbeddedKafka, str, list[Piece]], float]
"""Writes the rows to a topic in one transaction; seconds of processor time."""


def by_arrow(engine: EngineName) -> Way:
    def way(kafka: EmbeddedKafka, topic: str, rows: list[Piece]) -> float:
        return _committed(kafka, engine, lambda producer, piece: producer.produce_arrow(topic, *piece), rows)

    return way


def by_lists(engine: EngineName) -> Way:
    def way(kafka: EmbeddedKafka, topic: str, rows: list[Piece]) -> float:
        return _committed(
            kafka, engine, lambda producer, piece: producer.produce_many(topic, *map(_listed, piece)), rows
        )

    return way


def _committed(
    kafka: EmbeddedKafka, engine: EngineName, send: Callable[[TransactionalProducer, Piece], None], rows: list[Piece]
) -> float:
    config = {**kafka.client_config(), "partitioner": MURMUR2.name}
    name = f"bench-{secrets.token_hex(4)}"
    with closing(
        TransactionalProducer({**config, "dualwrite.bulk": True, "dualwrite.engine": engine}, name)
    ) as producer:
        producer.init_transactions()
        started = time.process_time()
        producer.begin_transaction()
        for piece in rows:
            send(producer, piece)
        producer.commit_transaction()
        return time.process_time() - started


def columns_sealed(_: EmbeddedKafka, __: str, rows: list[Piece]) -> float:
    return _sealed(_from_columns(rows))


def records_sealed(_: EmbeddedKafka, __: str, rows: list[Piece]) -> float:
    return _sealed(_from_records(rows))


def _sealed(found: Iterator[tuple[int, RecordsBody]]) -> float:
    started = time.process_time()
    for partition, body in found:
        body.sealed(1, 1, partition)
    return time.process_time() - started


FIRST, NATIVE_ARROW = "librdkafka, produce_arrow", "native, produce_arrow"
WAYS: dict[str, Way] = {
    FIRST: by_arrow("librdkafka"),
    "librdkafka, produce_many": by_lists("librdkafka"),
    NATIVE_ARROW: by_arrow("native"),
    "native, produce_many": by_lists("native"),
    "batches from columns, not sent": columns_sealed,
    "batches record by record, not sent": records_sealed,
}
NOT_SENT = {"batches from columns, not sent", "batches record by record, not sent"}


def _from_columns(rows: list[Piece]) -> Iterator[tuple[int, RecordsBody]]:
    for values, keys in rows:
        partitions = partition_rows(keys, PARTITIONS, MURMUR2)
        yield from batches(values, keys, partitions=partitions, timestamp_ms=_now_ms(), codec=LZ4, limit_bytes=LIMIT)


def _from_records(rows: list[Piece]) -> Iterator[tuple[int, RecordsBody]]:
    builders = [RecordsBuilder(LZ4, limit_bytes=LIMIT) for _ in range(PARTITIONS)]
    for values, keys in rows:
        now_ms = _now_ms()
        for value, key in zip(_listed(values), _listed(keys), strict=True):
            partition = MURMUR2.partition(key, PARTITIONS) or 0
            if not builders[partition].append(value, key, (), now_ms):
                yield partition, builders[partition].build()
                builders[partition] = RecordsBuilder(LZ4, limit_bytes=LIMIT)
                builders[partition].append(value, key, (), now_ms)
    yield from ((partition, builder.build()) for partition, builder in enumerate(builders) if builder.count)


def _listed(column: pa.Array) -> list[Any]:
    return column.to_numpy(zero_copy_only=False).tolist()


def _now_ms() -> int:
    return int(time.time() * 1000)


def _ours(rows: list[tuple[bytes, bytes]]) -> None:
    builder = RecordsBuilder(Codec(), limit_bytes=2**30)
    for value, key in rows:
        builder.append(value, key, (), 1_767_225_600_000)


def _kafka_pythons(rows: list[tuple[bytes, bytes]]) -> None:
    builder = DefaultRecordBatchBuilder(2, 0, True, 1, 1, 0, 2**30)
    for offset, (value, key) in enumerate(rows):
        builder.append(offset, 1_767_225_600_000, key, value, [])


def _print_appended(rounds: int) -> None:
    """Nanoseconds of processor time for each record of about 100 bytes."""
    [(values, keys)] = _rows(ROWS_AT_ONCE)
    rows = list(zip(_listed(values), _listed(keys), strict=True))
    samples: dict[str, list[float]] = {"ours": [], "kafka-python's": []}
    for _ in range(rounds):
        for name, append in zip(samples, (_ours, _kafka_pythons), strict=True):
            started = time.process_time()
            append(rows)
            samples[name].append((time.process_time() - started) / len(rows) * 1e9)
    print(
        "one record appended: " + ", ".join(f"{name} {statistics.median(one):,.0f} ns" for name, one in samples.items())
    )


def _rows(count: int) -> list[Piece]:
    """Values of 85 to 95 bytes, and 5,000 keys."""
    found = []
    for first in range(0, count, ROWS_AT_ONCE):
        part = range(first, min(count, first + ROWS_AT_ONCE))
        payloads = (secrets.token_hex(30).encode() for _ in part)
        values = [b'{"id":%d,"payload":"%s"}' % (row, payload) for row, payload in zip(part, payloads, strict=False)]
        found.append((pa.array(values, pa.binary()), pa.array([b"key-%d" % (row % 5000) for row in part], pa.binary())))
    return found


def measure(kafka: EmbeddedKafka, count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of processor time of each way, in turn."""
    rows = _rows(count)
    samples: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name, way in WAYS.items():
            topic = kafka.create_topic(f"bench-{secrets.token_hex(4)}", PARTITIONS)
            samples[name].append(way(kafka, topic, rows))
            if number == 0 and name not in NOT_SENT:  # once: it takes longer than writing
                found = len(read_committed(kafka.client_config(), topic))
                if found != count:
                    raise RuntimeError(f"{name}: {found} of {count} messages")
            kafka.delete_topic(topic)
    return samples


def run(ground: Ground, *, rows: int = 1_000_000, rounds: int = 3) -> dict[str, Any]:
    """Measure for the page."""
    return {"rows": rows, "seconds": measure(ground.kafka_server, rows, rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    _print_appended(5 * arguments.rounds)
    if not arguments.rows:
        return
    with EmbeddedKafka() as kafka:
        samples = measure(kafka, arguments.rows, arguments.rounds)
    print(f"{machine()}; {arguments.rows:,} records, medians of {arguments.rounds}")
    first = p50(samples[FIRST])
    for name, found in samples.items():
        median = p50(found)
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(f"{name:35} {median:5.2f} s of processor time ({spread}), {median / first:.2f} of librdkafka's")


if __name__ == "__main__":
    main()
