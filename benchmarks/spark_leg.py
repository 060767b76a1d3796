"""Where a Spark worker's processor time goes in our Kafka leg: each step alone, over rows of about 100 bytes. No server runs.

The rows are those of ``make bench-spark``: a number, which is the key, and a text of digits. What the steps leave of the leg's
processor time on the benchmarks page is the producer's requests, and Spark's own part of the worker. Medians.
``PYTHONPATH=tests/proof python -m benchmarks.spark_leg`` (half a minute)
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from pyspark.sql import types as spark

from benchmarks.servers import machine, p50
from dualwrite.kafka.native.arrow import batches, partition_rows
from dualwrite.kafka.native.records import Codec, partitioner
from dualwrite.sinks.spark.digests import row_hashes
from dualwrite.sinks.spark.sendable import json_rows

PARTITIONS = 4
ROWS_AT_ONCE = 10_000  # what Spark hands to a worker at a time
LIMIT = 1_000_000
PARTITIONER = partitioner("murmur2_random")  # the default of Spark's tasks
READ, TEXTS, PLACES = "Arrow read from Spark", "JSON texts and keys", "partitions of the keys"
RECORDS, COMPRESSED = "records joined", "lz4 tried"
STEPS = (READ, TEXTS, PLACES, RECORDS, COMPRESSED)
DIGEST = "digest of write_batch"
"""Of the messages' bytes; no part of the leg, which all ways share."""


class _Kept(Codec):
    """Keeps the records of each batch, uncompressed."""

    def __init__(self) -> None:
        super().__init__("none")
        self.contents: list[bytes] = []

    def compress(self, content: bytes | memoryview) -> tuple[int, bytes]:
        self.contents.append(bytes(content))
        return super().compress(b"")


def made(rows: int) -> bytes:
    """The rows as Spark sends them to a worker."""
    random = np.random.default_rng(1)
    schema = pa.schema([("id", pa.int64()), ("body", pa.string())])
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, schema) as writer:
        for first in range(0, rows, ROWS_AT_ONCE):
            ids = np.arange(first, min(rows, first + ROWS_AT_ONCE))
            hashes = random.integers(-(2**63), 2**63 - 1, (len(ids), 4))
            bodies = [f"{number:012d}" + "".join(map(str, row)) for number, row in zip(ids, hashes, strict=True)]
            writer.write_batch(pa.record_batch([pa.array(ids), pa.array(bodies)], schema=schema))
    return stream.getvalue()


def measure(stream: bytes) -> dict[str, float]:
    """Seconds of processor time by step."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], list[object]]) -> list[object]:
        started = time.process_time()
        found = work()
        seconds[name] = time.process_time() - started
        return found

    read = timed(READ, lambda: list(pa.ipc.open_stream(io.BytesIO(stream))))
    texts = timed(TEXTS, lambda: [_texts(one) for one in read])
    timed(DIGEST, lambda: [row_hashes([values], len(values)).sum() for values, _ in texts])
    keys = [key for _, key in texts]
    places = timed(PLACES, lambda: [partition_rows(one, PARTITIONS, PARTITIONER) for one in keys])
    kept = _Kept()
    timed(RECORDS, lambda: [_joined(*text, place, kept) for text, place in zip(texts, places, strict=True)])
    codec = Codec("lz4", must_halve=True)  # as bulk mode has it
    timed(COMPRESSED, lambda: [codec.compress(one) for one in kept.contents])
    return seconds


def _texts(batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
    ids, bodies = batch.columns
    members = [("id", ids, spark.LongType()), ("body", bodies, spark.StringType())]
    return json_rows(members, batch.num_rows), ids.cast(pa.string())


def _joined(values: pa.Array, keys: pa.Array, places: np.ndarray, codec: Codec) -> int:
    found = batches(values, keys, partitions=places, timestamp_ms=0, codec=codec, limit_bytes=LIMIT)
    return sum(body.count for _, body in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    stream = made(arguments.rows)
    samples = [measure(stream) for _ in range(arguments.rounds)]
    print(f"{machine()}; {arguments.rows:,} rows, {len(stream) / arguments.rows:.0f} bytes each")
    medians = {name: p50([one[name] for one in samples]) for name in STEPS}
    for name, median in medians.items():
        print(f"{name:25} {median:.3f} s of processor time, {median / sum(medians.values()):.0%}")
    print(f"{'together':25} {sum(medians.values()):.3f} s")
    print(f"{DIGEST:25} {p50([one[DIGEST] for one in samples]):.3f} s besides")


if __name__ == "__main__":
    main()
