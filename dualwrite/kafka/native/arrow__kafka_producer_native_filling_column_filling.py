"""Columns on their way into a transaction: the partition of each row, and batches made one after another.

Import this module where columns are sent: it imports pyarrow and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualwrite.kafka.native.arrow import Column, NamelessHeader
from dualwrite.kafka.native.arrow__kafka_producer_native_records_column_varints import Numbers
from dualwrite.kafka.native.arrow__kafka_producer_native_records_columns import (
    ANYWHERE,
    Partitions,
    RowTooLarge,
    batches,
    partition_rows,
)
from dualwrite.kafka.native.records__kafka_producer_native_records_body import RecordsBody
from dualwrite.kafka.native.records__kafka_producer_native_records_compression import Codec
from dualwrite.kafka.native.records__kafka_producer_native_records_partitioners import Partitioner
from dualwrite.protocol.message import (
    OVERHEAD,
    Content,
    MessageColumns,
    as_bytes,
    as_timestamp,
    nameless_header,
    no_partition,
    too_large,
)

_CONTENTS: Final = {bytes, str, type(None)}
_PIECE_BYTES: Final = 8_000_000
"""The bytes of columns in work at a time, twice or three times over."""


class Columns:
    """The columns of messages for one topic, divided into pieces.

    Args:
        given: The messages.
        first_row: The number of the first row in errors.

    Raises:
        ValueError: The columns differ in length.
        TypeError: The partitions or the timestamps are no integers.
    """

    def __init__(self, given: MessageColumns, *, first_row: int = 0) -> None:
        self._topic, values, keys, headers, partitions, timestamps = given
        self._first_row = first_row
        self._columns: dict[str, Column | None] = {
            "values": values, "keys": keys, "headers": headers, "partitions": partitions, "timestamps": timestamps
        }  # fmt: skip
        self._count = len(values)
        for name, column in self._columns.items():
            if column is not None and len(column) != self._count:
                raise ValueError(f"{self._count} values, {len(column)} {name}")
        for name in ("partitions", "timestamps"):
            column = self._columns[name]
            if column is not None and not (pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
                raise TypeError(f"{name} are integers, not {column.type}")

    @property
    def highest_partition(self) -> int:
        """The highest partition that a row names; `ANYWHERE` if none does."""
        partitions = self._columns["partitions"]
        highest = None if partitions is None else pc.max(partitions).as_py()
        return ANYWHERE if highest is None else int(highest)

    def bodies(
        self,
        partition_count: int,
        partitioner: Partitioner,
        codec: Codec,
        *,
        batch_bytes: int,
        batch_messages: int,
        max_message_bytes: int,
        timestamp_ms: int,
    ) -> Iterator[tuple[int, RecordsBody]]:
        """The rows as batches, each made when it is asked for.

        Args:
            partition_count: The topic's partitions.
            partitioner: The partition of a key.
            codec: How batches are compressed.
            batch_bytes: The greatest size of a batch.
            batch_messages: The most messages in a batch.
            max_message_bytes: The greatest size of a message.
            timestamp_ms: Now.

        Yields:
            A partition, or `ANYWHERE`, and a batch.

        Raises:
            Unsendable: A row cannot be sent. Rows more than 8 MB before it may have been yielded.
            TypeError: A column is of another type.
        """
        for first, count in self._pieces():
            values, keys, headers, partitions, timestamps = (
                None if column is None else column.slice(first, count) for column in self._columns.values()
            )
            try:
                yield from batches(
                    values,
                    keys,
                    headers,
                    self._times(timestamps, timestamp_ms, first),
                    partitions=self._partitions(keys, partitions, count, (partition_count, partitioner), first),
                    timestamp_ms=timestamp_ms,
                    codec=codec,
                    limit_bytes=batch_bytes,
                    limit_records=batch_messages,
                    max_message_bytes=max_message_bytes - OVERHEAD,
                )
            except RowTooLarge as error:
                raise too_large(OVERHEAD + error.size, max_message_bytes, self._named(first + error.row)) from None
            except NamelessHeader as error:
                raise nameless_header(self._named(first + error.row)) from None

    def _named(self, row: int) -> str:
        return f"row {self._first_row + row}"

    def _pieces(self) -> Iterator[tuple[int, int]]:
        size = sum(column.nbytes for column in self._columns.values() if column is not None)
        count = max(1, self._count * _PIECE_BYTES // max(size, 1))
        for first in range(0, self._count, count):
            yield first, min(count, self._count - first)

    def _times(self, timestamps: Column | None, timestamp_ms: int, first: int) -> Column | None:
        if timestamps is None:
            return None
        found = _integers(timestamps, timestamp_ms)
        if len(impossible := np.flatnonzero(found < 1)):
            row = int(impossible[0])
            as_timestamp(timestamps[row].as_py(), self._named(first + row))  # raises
        return pa.array(found)

    def _partitions(
        self, keys: Column | None, partitions: Column | None, rows: int, homes: tuple[int, Partitioner], first: int
    ) -> Partitions:
        count, partitioner = homes
        if partitions is None:
            return _of_keys(keys, rows, count, partitioner)
        explicit = _integers(partitions, ANYWHERE)
        if len(missing := np.flatnonzero((explicit < ANYWHERE) | (explicit >= count))):
            row = int(missing[0])
            raise no_partition(self._topic, int(explicit[row]), count, f"{self._named(first + row)}: ")
        given = explicit != ANYWHERE
        found = explicit if given.all() else np.where(given, explicit, _of_keys(keys, rows, count, partitioner))
        return found.astype(np.int32)


def _of_keys(keys: Column | None, rows: int, count: int, partitioner: Partitioner) -> Partitions:
    if keys is not None:
        return partition_rows(keys, count, partitioner)
    home = partitioner.partition(None, count)
    return np.full(rows, ANYWHERE if home is None else home, np.int32)


def _integers(column: Column, instead_of_null: int) -> Numbers:
    # What needs more than 63 bits becomes negative, which is refused.
    return np.asarray(pc.fill_null(column.cast(pa.int64(), safe=False), instead_of_null), np.int64)


def column_of(contents: Sequence[Content]) -> pa.Array:
    """Keys or values as a column; text as UTF-8.

    Raises:
        TypeError: One is neither bytes nor text nor None.
    """
    if not set(map(type, contents)) <= _CONTENTS:  # Arrow would take a bytearray
        contents = [as_bytes(content, "key or value") for content in contents]
    return pa.array(contents, pa.large_binary())
