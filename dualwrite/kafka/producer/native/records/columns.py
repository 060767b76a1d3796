"""Batches from Arrow's columns: no Python object is made for a record.

A record is a few varints between its key, its value and its headers. numpy makes the varints of all rows, Arrow joins them
with the columns. Import this module where columns are sent: pyarrow and numpy come with the extra ``spark``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualwrite.kafka.producer.native.records import column_varints
from dualwrite.kafka.producer.native.records.body import HEADER_SIZE, RecordsBody
from dualwrite.kafka.producer.native.records.column_hashes import hashes
from dualwrite.kafka.producer.native.records.column_rows import (
    LEAST_MORE,
    Column,
    Rows,
    byte_lengths,
    contiguous,
    widened,
)
from dualwrite.kafka.producer.native.records.compression import Codec
from dualwrite.kafka.producer.native.records.partitioners import Partitioner

Partitions: TypeAlias = npt.NDArray[np.int32]

ANYWHERE: Final = -1
"""The partition of a row that may go anywhere."""


def bodies(
    values: Column,
    keys: Column | None = None,
    headers: Column | None = None,
    timestamps: Column | None = None,
    *,
    timestamp_ms: int,
    codec: Codec,
    limit_bytes: int,
) -> Iterator[RecordsBody]:
    """The rows of some columns as batches: the batches that ``RecordsBuilder`` makes of the same rows.

    Args:
        values: The values: binary or text of any Arrow type, in one array or in chunks; a null is a tombstone.
        keys: As many keys, likewise; None if no row has one.
        headers: As many lists of headers, each a struct of ``key`` (text) and ``value`` (binary), or maps from key to
            value; None if no row has one. A null list is an empty one; the value of a header may be null.
        timestamps: When each message was created: integers, ms since 1970, none of them negative; None if none is known.
        timestamp_ms: When those messages were created whose own timestamp is null or not given.
        codec: How each batch is compressed.
        limit_bytes: The greatest size of a sealed batch, counted before compression. A single row may be larger, and is
            then alone in its batch.

    Yields:
        The bodies, in the order of the rows. A body is made when it is asked for.

    Raises:
        TypeError: A column is of another type.
        ValueError: The columns differ in length, a header has no name, or a timestamp does not exist.
    """
    rows = Rows.of(values, keys, headers, timestamps, timestamp_ms)
    return _bodies(rows, codec, limit_bytes - HEADER_SIZE)


def _bodies(rows: Rows, codec: Codec, limit: int) -> Iterator[RecordsBody]:
    # The records of so many rows are at least as large as this, wherever they stand in a batch.
    least = np.zeros(rows.count + 1, np.int64)
    np.cumsum(rows.lengths + LEAST_MORE, out=least[1:])
    start = 0
    while start < rows.count:
        most = max(start + 1, int(np.searchsorted(least, least[start] + limit, side="right")) - 1)
        lengths = rows.lengths_in_batch(start, most)
        ends = np.cumsum(lengths + column_varints.sizes(lengths))
        count = max(1, int(np.searchsorted(ends, limit, side="right")))
        records = memoryview(rows.records(start, lengths[:count]))
        base_ms, max_ms = rows.times(start, count)
        number, compressed = codec.compress(records)
        yield RecordsBody(count, number, base_ms, max_ms, compressed, len(records))
        start += count


def partition_rows(keys: Column, partition_count: int, partitioner: Partitioner) -> Partitions:
    """The partition of every row.

    Args:
        keys: The keys: binary or text of any Arrow type, in one array or in chunks.
        partition_count: The topic's partitions, at least 1.
        partitioner: Which partition a key has.

    Returns:
        A partition for each row; :data:`ANYWHERE` where the partitioner leaves it to the sender.

    Raises:
        TypeError: The keys are of another type.
    """
    content = contiguous(keys, "keys")
    if partitioner.hash is None:
        return np.full(len(keys), ANYWHERE, np.int32)
    lengths = byte_lengths(content)
    found: Partitions = (hashes(content.fill_null(b""), partitioner.hash) % partition_count).astype(np.int32)
    for length, key in ((0, b""), (-1, None)):
        partition = partitioner.partition(key, partition_count)
        found[lengths == length] = ANYWHERE if partition is None else partition
    return found


def split(
    columns: Sequence[Column | None], partitions: Partitions
) -> Iterator[tuple[int, tuple[pa.Array | None, ...]]]:
    """The rows of each partition, in their order.

    Args:
        columns: Columns of the same rows, as `bodies` takes them; None stands for a column that is not there.
        partitions: The partition of each row.

    Yields:
        Each partition that has rows, and its rows of every column, for `bodies`; ascending, :data:`ANYWHERE` first.

    Raises:
        TypeError: A column is of a type that `bodies` does not take.
    """
    if not len(partitions):
        return
    # numpy sorts numbers of 16 bits by their digits, in a fraction of the time.
    small = partitions.astype(np.int16) if partitions.max() <= np.iinfo(np.int16).max else partitions
    order = np.argsort(small, kind="stable")
    in_order = partitions[order]
    firsts = [0, *(np.flatnonzero(np.diff(in_order)) + 1).tolist()]
    if len(firsts) > 1:
        columns = [None if column is None else widened(column, "columns").take(order) for column in columns]
    for first, end in zip(firsts, [*firsts[1:], len(order)], strict=True):
        rows = tuple(None if column is None else column.slice(first, end - first) for column in columns)
        yield int(in_order[first]), rows
