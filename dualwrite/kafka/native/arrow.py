"""Records joined from the parts of their rows: keys, values and headers as columns, and the varints between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualwrite.kafka.native import arrow__kafka_producer_native_records_column_varints
from dualwrite.kafka.native.arrow__kafka_producer_native_records_column_varints import Bytes, Numbers
from dualwrite.kafka.native.records__kafka_producer_native_records_varints import MINUS_ONE, varint

Column: TypeAlias = pa.Array | pa.ChunkedArray

_BINARY: Final = pa.large_binary()  # 64-bit offsets: a column may be larger than 2 GiB, though no batch is
_HEADERS: Final = pa.large_list(pa.struct([("key", _BINARY), ("value", _BINARY)]))
_NULL: Final = -1
_NO_HEADERS: Final = pa.scalar(b"\0", _BINARY)


class NamelessHeader(ValueError):
    """A header of a row has no name, or is null itself.

    Attributes:
        row: The number of the row.
    """

    def __init__(self, row: int) -> None:
        super().__init__(f"a header of row {row} has no name")
        self.row = row


@dataclass(frozen=True)
class _Part:
    """One part of every row: the bytes, none of them null, and their lengths, -1 for a null."""

    content: pa.Array
    lengths: Numbers

    @classmethod
    def of(cls, column: Column | None, name: str) -> _Part | None:
        content = None if column is None else contiguous(column, name)
        if content is None or content.null_count == len(content):
            return None
        # A null's place may hold bytes, which are no part of the record.
        return cls(content.fill_null(b"") if content.null_count else content, byte_lengths(content))

    @property
    def sizes(self) -> Numbers:
        """The bytes of each row, its length before them."""
        return np.maximum(self.lengths, 0) + arrow__kafka_producer_native_records_column_varints.sizes(self.lengths)


@dataclass(frozen=True)
class Rows:
    """The rows as columns ready for joining.

    Attributes:
        count: The number of rows.
        keys, values: None where all are null.
        headers: The headers of each row, already encoded behind their number; None where no row has any.
        header_counts: Their number in each row.
        timestamp_ms: The timestamp of every row (ms since 1970), if they have no timestamps of their own.
        timestamps: The timestamp of each row (ms since 1970).
        lengths: The bytes of each record, without what depends on its batch: its own length, its time and its offset.
    """

    count: int
    keys: _Part | None
    values: _Part | None
    headers: _Part | None
    header_counts: Numbers | None
    timestamp_ms: int
    timestamps: Numbers | None
    lengths: Numbers

    @classmethod
    def of(
        cls,
        values: Column,
        keys: Column | None,
        headers: Column | None,
        timestamps: Column | None,
        timestamp_ms: int,
    ) -> Rows:
        """Look at every part of every row once.

        Raises:
            TypeError: A column is of another type.
            ValueError: The columns differ in length, or a timestamp does not exist.
            NamelessHeader: A header has no name.
        """
        count = len(values)
        for column in (keys, headers, timestamps):
            if column is not None and len(column) != count:
                raise ValueError(f"{count} values, but {len(column)} keys, headers or timestamps")
        if not 0 <= timestamp_ms < 2**63:
            raise _impossible(timestamp_ms)
        parts = _Part.of(keys, "keys"), _Part.of(values, "values")
        encoded, header_counts = _headers(headers)
        lengths = np.ones(count, np.int64)  # the attributes
        for part in parts:
            lengths += 1 if part is None else part.sizes
        lengths += 1 if encoded is None else encoded.lengths
        return cls(count, *parts, encoded, header_counts, timestamp_ms, _times(timestamps, timestamp_ms), lengths)

    def part(self, start: int, end: int) -> Rows:
        """The lengths and timestamps of some of the rows, without what is in them."""
        times = None if self.timestamps is None else self.timestamps[start:end]
        return Rows(end - start, None, None, None, None, self.timestamp_ms, times, self.lengths[start:end])

    def content_bytes(self, row: int) -> int:
        """The bytes of a row's key, value and headers with their lengths, without their number."""
        count = 0 if self.header_counts is None else int(self.header_counts[row])
        around = 1 + sum(
            1 if part is None else len(varint(int(part.lengths[row]))) for part in (self.keys, self.values)
        )
        return int(self.lengths[row]) - around - len(varint(count))

    def delays(self, firsts: Numbers, counts: Numbers) -> Numbers | bytes:
        """How long after the first record of its batch each was created, in ms; as bytes if all are the same."""
        return b"\0" if self.timestamps is None else self.timestamps - np.repeat(self.timestamps[firsts], counts)

    def times(self, firsts: Numbers) -> tuple[list[int], list[int]]:
        """The first and the highest timestamp (ms since 1970) of each batch."""
        if self.timestamps is None:
            return [self.timestamp_ms] * len(firsts), [self.timestamp_ms] * len(firsts)
        return self.timestamps[firsts].tolist(), np.maximum.reduceat(self.timestamps, firsts).tolist()

    def records(self, lengths: Numbers, delays: Numbers | bytes, offsets: Numbers) -> tuple[memoryview, Numbers]:
        """All records, with these lengths, delays and offsets in their batches; and where each begins and the last ends."""
        fields: list[Numbers | bytes] = [lengths, b"\0", delays, offsets]
        columns = []
        for part in (self.keys, self.values):
            if part is None:
                fields.append(MINUS_ONE)
            else:
                fields.append(part.lengths)
                columns += [
                    _array(*arrow__kafka_producer_native_records_column_varints.rows(fields, self.count)),
                    part.content,
                ]
                fields = []
        if fields:
            columns.append(_array(*arrow__kafka_producer_native_records_column_varints.rows(fields, self.count)))
        columns.append(_NO_HEADERS if self.headers is None else self.headers.content)
        joined = _joined(columns)
        return memoryview(joined.buffers()[2]), np.frombuffer(joined.buffers()[1], np.int64)[: self.count + 1]


def contiguous(column: Column, name: str) -> pa.Array:
    """A column of binary or text as one array of large binary.

    Raises:
        TypeError: It is of another type.
    """
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not _holds_bytes(kind):
        raise TypeError(f"{name} are binary or text, not {column.type}")
    cast = column.cast(_BINARY)
    return cast.combine_chunks() if isinstance(cast, pa.ChunkedArray) else cast


def widened(column: Column, name: str) -> Column:
    """A column of bytes or headers with 64-bit offsets: Arrow cannot take rows from more than 2 GiB of chunks with others.

    Raises:
        TypeError: It is none of a message's columns.
    """
    if pa.types.is_nested(column.type):
        return _lists(column)
    return column if pa.types.is_integer(column.type) else contiguous(column, name)


def _holds_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_null(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
    )


def _headers(column: Column | None) -> tuple[_Part | None, Numbers | None]:
    """The headers of each row, encoded behind their number; and their number."""
    if column is None:
        return None, None
    lists = _lists(column)
    if lists.null_count == len(lists):
        return None, None
    names, values = lists.flatten().flatten()
    if names.null_count:
        nameless = int(np.flatnonzero(np.asarray(names.is_null()))[0])
        raise NamelessHeader(int(pc.list_parent_indices(lists)[nameless].as_py()))
    entries = _joined([_numbers(byte_lengths(names)), names, _numbers(byte_lengths(values)), values.fill_null(b"")])
    counts = np.asarray(pc.fill_null(pc.list_value_length(lists), 0), np.int64)
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    # The entries lie row by row: a row's are those between two of their ends.
    _, entry_offsets, content = entries.buffers()
    of_rows = _array(content, np.frombuffer(entry_offsets, np.int64)[ends])
    return _Part.of(_joined([_numbers(counts), of_rows]), "headers"), counts


def _lists(column: Column) -> pa.Array:
    kind = column.type
    types = pa.types
    if types.is_map(kind):
        fits = _holds_bytes(kind.key_type) and _holds_bytes(kind.item_type)
    else:
        fits = (types.is_list(kind) or types.is_large_list(kind)) and types.is_struct(kind.value_type)
        fields = kind.value_type.fields if fits else []
        fits = [one.name for one in fields] == ["key", "value"] and all(_holds_bytes(one.type) for one in fields)
    if not fits:
        raise TypeError(f"headers are lists of structs of key and value, or maps, not {kind}")
    cast = column.cast(_HEADERS)
    return cast.combine_chunks() if isinstance(cast, pa.ChunkedArray) else cast


def _times(column: Column | None, timestamp_ms: int) -> Numbers | None:
    if column is None or column.null_count == len(column):
        return None
    if not pa.types.is_integer(column.type):
        raise TypeError(f"timestamps are integers, ms since 1970, not {column.type}")
    found = np.asarray(pc.fill_null(column.cast(pa.int64()), timestamp_ms), np.int64)
    if (least := int(found.min())) < 0:
        raise _impossible(least)
    return found


def _impossible(timestamp_ms: int) -> ValueError:
    return ValueError(f"a timestamp is from 0 to {2**63 - 1} ms: {timestamp_ms}")


def byte_lengths(column: pa.Array) -> Numbers:
    """The bytes of every row, -1 for a null."""
    return np.asarray(pc.fill_null(pc.binary_length(column), _NULL), np.int64)


def _numbers(numbers: Numbers) -> pa.Array:
    return _array(*arrow__kafka_producer_native_records_column_varints.rows([numbers], len(numbers)))


def _array(content: Bytes | pa.Buffer, offsets: Numbers) -> pa.Array:
    return pa.Array.from_buffers(_BINARY, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(content)])


def _joined(columns: list[pa.Array]) -> pa.Array:
    """Each row of the columns behind each other."""
    return pc.binary_join_element_wise(*columns, pa.scalar(b"", _BINARY))
