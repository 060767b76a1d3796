"""Batches from Arrow's columns: no Python object is made for a record.

A record is a few varints between its key, its value and its headers. numpy makes the varints of all rows, Arrow joins them
with the columns. Import this module where columns are sent: pyarrow and numpy come with the extra ``spark``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dualwrite.kafka.native import arrow__kafka_producer_native_records_column_varints
from dualwrite.kafka.native.arrow import Column, NamelessHeader, Rows, byte_lengths, contiguous, widened
from dualwrite.kafka.native.arrow__kafka_producer_native_records_column_hashes import hashes
from dualwrite.kafka.native.arrow__kafka_producer_native_records_column_varints import Numbers
from dualwrite.kafka.native.records__kafka_producer_native_records_body import HEADER_SIZE, MAX_RECORDS, RecordsBody
from dualwrite.kafka.native.records__kafka_producer_native_records_compression import Codec
from dualwrite.kafka.native.records__kafka_producer_native_records_partitioners import Partitioner

Partitions: TypeAlias = npt.NDArray[np.int32]

ANYWHERE: Final = -1
"""The partition of a row that may go anywhere."""
_NO_LIMIT: Final = 2**62
_LEAST_MORE: Final = 3
"""The fewest bytes that a batch adds to a record: its length, its time and its offset."""


class RowTooLarge(Exception):
    """A row is larger than a message may be.

    Attributes:
        row: Its number.
        size: The bytes of its key, value and headers.
    """

    def __init__(self, row: int, size: int) -> None:
        super().__init__(f"row {row} has {size} bytes")
        self.row = row
        self.size = size


def batches(
    values: Column,
    keys: Column | None = None,
    headers: Column | None = None,
    timestamps: Column | None = None,
    *,
    partitions: Partitions | None = None,
    timestamp_ms: int,
    codec: Codec,
    limit_bytes: int,
    limit_records: int = MAX_RECORDS,
    max_message_bytes: int = _NO_LIMIT,
) -> Iterator[tuple[int, RecordsBody]]:
    """The rows of some columns as batches: in each partition, those that ``RecordsBuilder`` makes of the same rows.

    A batch is compressed when it is asked for; its records are joined together with those of the other partitions.

    Args:
        values: The values: binary or text of any Arrow type, in one array or in chunks; a null is a tombstone.
        keys: As many keys, likewise; None if no row has one.
        headers: As many lists of headers, each a struct of ``key`` (text) and ``value`` (binary), or maps from key to
            value; None if no row has one. A null list is an empty one; the value of a header may be null.
        timestamps: When each message was created: integers, ms since 1970, none of them negative; None if none is known.
        partitions: The partition of each row; :data:`ANYWHERE` for all if not given.
        timestamp_ms: When those messages were created whose own timestamp is null or not given.
        codec: How each batch is compressed.
        limit_bytes: The greatest size of a sealed batch, counted before compression. A single row may be larger, and is
            then alone in its batch.
        limit_records: The most rows in a batch.
        max_message_bytes: The greatest size of a row's key, value and headers.

    Yields:
        A partition, and a batch for it: partitions ascending, :data:`ANYWHERE` first, the rows of each in their order.

    Raises:
        TypeError: A column is of another type.
        ValueError: The columns differ in length, or a timestamp does not exist.
        RowTooLarge, NamelessHeader: A row is, or has one; no batch was yielded.
    """
    order, found, firsts = _runs(len(values), partitions)

    def sorted_(column: Column | None) -> Column | None:
        return column if column is None or order is None else widened(column, "columns").take(order)

    try:
        rows = Rows.of(sorted_(values), sorted_(keys), sorted_(headers), sorted_(timestamps), timestamp_ms)
    except NamelessHeader as error:
        raise error if order is None else NamelessHeader(int(order[error.row])) from None
    for row in np.flatnonzero(rows.lengths > max_message_bytes).tolist():
        if (size := rows.content_bytes(row)) > max_message_bytes:
            raise RowTooLarge(row if order is None else int(order[row]), size)
    return _batches(rows, found, firsts, codec, (limit_bytes - HEADER_SIZE, limit_records))


def _runs(count: int, partitions: Partitions | None) -> tuple[Numbers | None, list[int], Numbers]:
    """The order that brings the rows of each partition together, if it is another; the partitions, and their first rows."""
    if not count or partitions is None:
        return None, [ANYWHERE][:count], np.zeros(min(count, 1), np.int64)
    # numpy sorts numbers of 16 bits by their digits, in a fraction of the time.
    small = partitions.astype(np.int16) if partitions.max() <= np.iinfo(np.int16).max else partitions
    order = np.argsort(small, kind="stable")
    in_order = partitions[order]
    firsts = np.append(0, np.flatnonzero(np.diff(in_order)) + 1)
    return (order if len(firsts) > 1 else None), in_order[firsts].tolist(), firsts


def _batches(
    rows: Rows, partitions: list[int], firsts: Numbers, codec: Codec, limits: tuple[int, int]
) -> Iterator[tuple[int, RecordsBody]]:
    if not rows.count:
        return
    counts = np.diff(firsts, append=rows.count)
    lengths, delays, offsets = _laid_out(rows, firsts, counts)
    limit_bytes, limit_records = limits
    whole = np.add.reduceat(lengths + arrow__kafka_producer_native_records_column_varints.sizes(lengths), firsts)
    if counts.max() > limit_records or whole.max() > limit_bytes:
        cuts = [list(_cuts(rows, *part, limits)) for part in zip(firsts, firsts + counts, strict=True)]
        partitions = [partition for partition, found in zip(partitions, cuts, strict=True) for _ in found]
        firsts = np.concatenate(cuts)
        counts = np.diff(firsts, append=rows.count)
        lengths, delays, offsets = _laid_out(rows, firsts, counts)
    content, ends = rows.records(lengths, delays, offsets)
    bounds = [*ends[firsts].tolist(), int(ends[-1])]
    for partition, count, base_ms, max_ms, (begin, end) in zip(
        partitions, counts.tolist(), *rows.times(firsts), pairwise(bounds), strict=True
    ):
        number, compressed = codec.compress(content[begin:end])
        yield partition, RecordsBody(count, number, base_ms, max_ms, compressed, end - begin)


def _laid_out(rows: Rows, firsts: Numbers, counts: Numbers) -> tuple[Numbers, Numbers | bytes, Numbers]:
    """The length, the delay and the offset of each row in batches that begin at these rows."""
    offsets = np.arange(rows.count) - np.repeat(firsts, counts)
    delays = rows.delays(firsts, counts)
    lengths = rows.lengths + arrow__kafka_producer_native_records_column_varints.sizes(offsets)
    lengths += (
        len(delays) if isinstance(delays, bytes) else arrow__kafka_producer_native_records_column_varints.sizes(delays)
    )
    return lengths, delays, offsets


def _cuts(rows: Rows, first: int, end: int, limits: tuple[int, int]) -> Iterator[int]:
    """The first row of each batch of a partition whose rows are too many for one."""
    limit, limit_records = limits
    # The records of this many rows are at least as large as this, wherever they stand in a batch.
    least = np.cumsum(rows.lengths[first:end] + _LEAST_MORE)
    start = first
    while start < end:
        yield start
        before = int(least[start - first - 1]) if start > first else 0
        most = first + int(np.searchsorted(least, before + limit, side="right"))
        most = min(max(most, start + 1), start + limit_records)
        part = rows.part(start, most)
        lengths, _, _ = _laid_out(part, np.zeros(1, np.int64), np.array([most - start]))
        ends = np.cumsum(lengths + arrow__kafka_producer_native_records_column_varints.sizes(lengths))
        start += max(1, int(np.searchsorted(ends, limit, side="right")))


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
