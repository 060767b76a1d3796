"""Record batches built from whole columns, with numpy and pyarrow: keys, values and headers at once.

The bytes equal those that `dualwrite.kafka.native.records` builds one by one, hashes of keys and varints included;
tests compare them. Only callers that have columns import this chapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dualwrite.kafka.native.records import (
    HEADER_SIZE,
    MAX_RECORDS,
    MINUS_ONE,
    Codec,
    Partitioner,
    RecordsBody,
    fnv1a,
    murmur2,
    varint,
)
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
from dualwrite.protocol.values import PackedColumn

if TYPE_CHECKING:
    from dualwrite.protocol.values import WaitingMessages

T = TypeVar("T")
Column: TypeAlias = pa.Array | pa.ChunkedArray

_BINARY: Final = pa.large_binary()  # 64-bit offsets: a column may be larger than 2 GiB, though no batch is
_HEADERS: Final = pa.large_list(pa.struct([("key", _BINARY), ("value", _BINARY)]))
_NULL: Final = -1
_NO_HEADERS: Final = pa.scalar(b"\0", _BINARY)


class NamelessHeader(ValueError):
    """A header of a row has no name, or is null itself."""

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
        return np.maximum(self.lengths, 0) + sizes(self.lengths)


@dataclass(frozen=True)
class Rows:
    """The rows as columns ready for joining."""

    count: int
    keys: _Part | None  # None where no row has any, as values and headers
    values: _Part | None
    headers: _Part | None  # already encoded behind their number
    header_counts: Numbers | None
    timestamp_ms: int  # of every row, where they have no timestamps of their own
    timestamps: Numbers | None
    lengths: Numbers  # of each record, without what depends on its batch: its own length, its time, its offset

    @classmethod
    def of(
        cls,
        values: Column,
        keys: Column | None,
        headers: Column | None,
        timestamps: Column | None,
        timestamp_ms: int,
    ) -> Rows:
        """Look at every part of every row once."""
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
                columns += [_array(*rows(fields, self.count)), part.content]
                fields = []
        if fields:
            columns.append(_array(*rows(fields, self.count)))
        columns.append(_NO_HEADERS if self.headers is None else self.headers.content)
        joined = _joined(columns)
        return memoryview(joined.buffers()[2]), np.frombuffer(joined.buffers()[1], np.int64)[: self.count + 1]


def contiguous(column: Column, name: str) -> pa.Array:
    """A column of binary or text as one array of large binary."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not _holds_bytes(kind):
        raise TypeError(f"{name} are binary or text, not {column.type}")
    cast = column.cast(_BINARY)
    return cast.combine_chunks() if isinstance(cast, pa.ChunkedArray) else cast


def widened(column: Column, name: str) -> Column:
    """A column of bytes or headers with 64-bit offsets: Arrow cannot take rows from more than 2 GiB of chunks with others."""
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
    return _array(*rows([numbers], len(numbers)))


def _array(content: Bytes | pa.Buffer, offsets: Numbers) -> pa.Array:
    return pa.Array.from_buffers(_BINARY, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(content)])


def _joined(columns: list[pa.Array]) -> pa.Array:
    """Each row of the columns behind each other."""
    return pc.binary_join_element_wise(*columns, pa.scalar(b"", _BINARY))


# Columns on their way into a transaction: the partition of each row, and batches made one after another.
#
# Import this module where columns are sent: it imports pyarrow and numpy.

_CONTENTS: Final = {bytes, str, type(None)}
_PIECE_BYTES: Final = 8_000_000
"""The bytes of columns in work at a time, twice or three times over."""


class Columns:
    """The columns of messages for one topic, divided into pieces. Errors count rows from ``first_row`` on."""

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
        """The rows as batches, each made when it is asked for; yields a partition, or `ANYWHERE`, and a batch.

        At `Unsendable`, rows more than 8 MB before the one that cannot be sent may have been yielded.
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
    """Keys or values as a column; text as UTF-8."""
    if isinstance(contents, PackedColumn):
        return _unpacked(contents)
    if not set(map(type, contents)) <= _CONTENTS:  # Arrow would take a bytearray
        contents = [as_bytes(content, "key or value") for content in contents]
    return pa.array(contents, pa.large_binary())


def _unpacked(contents: PackedColumn) -> pa.Array:
    lengths = np.asarray(contents.lengths, np.int64)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.maximum(lengths, 0), out=offsets[1:])
    valid = None if (lengths >= 0).all() else pa.array(lengths >= 0).buffers()[1]
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(contents.data)]
    return pa.Array.from_buffers(_BINARY, len(lengths), buffers)


# Batches from Arrow's columns: no Python object is made for a record.
#
# A record is a few varints between its key, its value and its headers. numpy makes the varints of all rows, Arrow joins
# them with the columns. Import this module where columns are sent: pyarrow and numpy come with the extra `spark`.

Partitions: TypeAlias = npt.NDArray[np.int32]

ANYWHERE: Final = -1
"""The partition of a row that may go anywhere."""
_NO_LIMIT: Final = 2**62
_LEAST_MORE: Final = 3
"""The fewest bytes that a batch adds to a record: its length, its time and its offset."""


def columns_of_waiting(
    topic: str, waiting: WaitingMessages, chosen: Sequence[int] | None, time_header: str
) -> MessageColumns:
    """Messages that have waited in the database, all or the chosen ones, with the header that says since when."""

    def taken(contents: Sequence[T]) -> Sequence[T]:
        return contents if chosen is None else [contents[at] for at in chosen]

    keys = column_of(taken(waiting.keys))
    times = pc.cast(pc.cast(pa.array(taken(waiting.produced_ms), pa.int64()), pa.string()), _BINARY)
    count = len(times)
    if waiting.headers is None:
        ends = pa.array(np.arange(count + 1, dtype=np.int64))
        names = pa.repeat(pa.scalar(time_header.encode(), _BINARY), count)
    else:
        own = taken(waiting.headers)
        behind = [[*headers, (time_header, time)] for headers, time in zip(own, times.to_pylist(), strict=True)]
        ends = pa.array(np.cumsum([0, *map(len, behind)], dtype=np.int64))
        names = pa.array([name.encode() for headers in behind for name, _ in headers], _BINARY)
        times = pa.array([value for headers in behind for _, value in headers], _BINARY)
    return MessageColumns(
        topic,
        column_of(taken(waiting.values)),
        None if keys.null_count == count else keys,
        pa.LargeListArray.from_arrays(ends, pa.StructArray.from_arrays([names, times], ["key", "value"])),
        None if waiting.partitions is None else pa.array(taken(waiting.partitions), pa.int32()),
        None if waiting.timestamps_ms is None else pa.array(taken(waiting.timestamps_ms), pa.int64()),
    )


class RowTooLarge(Exception):
    """A row is larger than a message may be: ``size`` counts its key, value and headers."""

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
    Partitions ascend, :data:`ANYWHERE` first; each keeps the order of its rows. ``limit_bytes`` counts before compression:
    a larger row is alone in its batch. ``timestamp_ms`` stands in for a timestamp that is null or not given.

    `RowTooLarge` and `NamelessHeader` come before the first batch.
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
    whole = np.add.reduceat(lengths + sizes(lengths), firsts)
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
    lengths = rows.lengths + sizes(offsets)
    lengths += len(delays) if isinstance(delays, bytes) else sizes(delays)
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
        ends = np.cumsum(lengths + sizes(lengths))
        start += max(1, int(np.searchsorted(ends, limit, side="right")))


def partition_rows(keys: Column, partition_count: int, partitioner: Partitioner) -> Partitions:
    """The partition of every row; :data:`ANYWHERE` where the partitioner leaves it to the sender."""
    content = contiguous(keys, "keys")
    if partitioner.hash is None:
        return np.full(len(keys), ANYWHERE, np.int32)
    lengths = byte_lengths(content)
    found: Partitions = (hashes(content.fill_null(b""), partitioner.hash) % partition_count).astype(np.int32)
    for length, key in ((0, b""), (-1, None)):
        partition = partitioner.partition(key, partition_count)
        found[lengths == length] = ANYWHERE if partition is None else partition
    return found


# The hashes of whole columns of keys, equal to those of `partitioners`.

Hashes = npt.NDArray[np.int64]
_Hash = Callable[[bytes], int]
_HashWords = npt.NDArray[np.uint32]
_LONG: Final = 256  # each step of the loop over bytes costs as much as the hash of a short key in Python
_MURMUR2_FACTOR: Final = np.uint32(0x5BD1E995)
_FNV_PRIME: Final = np.uint32(0x01000193)


def hashes(keys: pa.Array, one: _Hash) -> Hashes:
    """The hash of every key: large binary, without nulls."""
    together = _TOGETHER.get(one)
    if together is None:
        return np.fromiter(map(one, keys.to_numpy(zero_copy_only=False)), np.int64, len(keys))
    _, offset_buffer, content_buffer = keys.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[keys.offset : keys.offset + len(keys) + 1]
    content = np.frombuffer(content_buffer or b"", np.uint8)
    starts, sizes = offsets[:-1], np.diff(offsets)
    short = np.flatnonzero(sizes <= _LONG)
    found = np.empty(len(keys), np.int64)
    found[short] = together(content, starts[short], sizes[short])
    for row in np.flatnonzero(sizes > _LONG):
        found[row] = one(content[offsets[row] : offsets[row + 1]].tobytes())
    return found


def _murmur2(content: npt.NDArray[np.uint8], starts: Hashes, sizes: Hashes) -> Hashes:
    found = np.uint32(0x9747B28C) ^ sizes.astype(np.uint32)
    words = sizes >> 2
    rows = np.flatnonzero(words)
    done = 0
    while len(rows):
        at = starts[rows] + (done << 2)
        word = _byte(content, at)
        for place in (1, 2, 3):
            word |= _byte(content, at + place) << np.uint32(8 * place)
        word *= _MURMUR2_FACTOR
        word ^= word >> np.uint32(24)
        word *= _MURMUR2_FACTOR
        found[rows] = found[rows] * _MURMUR2_FACTOR ^ word
        done += 1
        rows = rows[words[rows] > done]
    rest = sizes & 3
    ends = starts + (words << 2)
    for place in (2, 1, 0):
        rows = np.flatnonzero(rest > place)
        found[rows] ^= _byte(content, ends[rows] + place) << np.uint32(8 * place)
    found[rest > 0] *= _MURMUR2_FACTOR
    found ^= found >> np.uint32(13)
    found *= _MURMUR2_FACTOR
    found ^= found >> np.uint32(15)
    positive: Hashes = (found & np.uint32(0x7FFFFFFF)).astype(np.int64)
    return positive


def _fnv1a(content: npt.NDArray[np.uint8], starts: Hashes, sizes: Hashes) -> Hashes:
    found = np.full(len(sizes), 0x811C9DC5, np.uint32)
    rows = np.flatnonzero(sizes)
    done = 0
    while len(rows):
        found[rows] = (found[rows] ^ _byte(content, starts[rows] + done)) * _FNV_PRIME
        done += 1
        rows = rows[sizes[rows] > done]
    signed: Hashes = found.astype(np.int32).astype(np.int64)
    np.abs(signed, out=signed)
    return signed


def _byte(content: npt.NDArray[np.uint8], at: Hashes) -> _HashWords:
    return content[at].astype(np.uint32)


_TOGETHER: Final[dict[_Hash, Callable[[npt.NDArray[np.uint8], Hashes, Hashes], Hashes]]] = {
    murmur2: _murmur2,
    fnv1a: _fnv1a,
}
"""zlib's CRC-32 is missing: it takes less time for one key than numpy for its bytes."""


# Zigzag varints of whole columns, with numpy.

Numbers: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
_Words: TypeAlias = npt.NDArray[np.uint64]

_WORD: Final = 8
_ZERO: Final = np.uint64(0)
_LOW: Final = np.uint64(0x7F)
_LITTLE: Final = np.dtype("<u8")
_MORE: Final = np.array(
    [sum(0x80 << 8 * place for place in range(width - 1)) for width in range(_WORD + 1)] + [0x8080808080808080] * 2,
    np.uint64,
)
"""By the width of a varint, the bits in its first eight bytes that announce another byte."""


def sizes(numbers: Numbers) -> Numbers:
    """How many bytes the varint of each number has."""
    zigzag = _zigzag(numbers)
    return _widths(zigzag, int(zigzag.max(initial=0)))


def _widths(zigzag: _Words, highest: int) -> Numbers:
    found = np.ones(len(zigzag), np.int64)
    for bits in range(7, highest.bit_length(), 7):
        found += zigzag >= np.uint64(1 << bits)
    return found


def rows(fields: Sequence[Numbers | bytes], count: int) -> tuple[Bytes, Numbers]:
    """Encode some fields of every row, one after another.

    Numbers become varints; bytes are the same in every row. Returns the bytes of all rows, and where each row begins: one
    offset more than there are rows.
    """
    words = list(_in_words(fields))
    offsets = np.zeros(count + 1, np.int64)
    ends = words[0].widths
    for word in words[1:]:
        ends = ends + word.widths
    offsets[1:] = ends
    np.cumsum(offsets, out=offsets)
    size = int(offsets[-1])
    made = np.empty(size + _WORD, np.uint8)
    # Any eight bytes as one number. Each write spoils bytes behind its own, which the next one sets: numpy writes in the
    # order of the indices.
    anywhere = np.ndarray((size + 1,), _LITTLE, made, 0, (1,))
    if len(words) == 1:
        anywhere[offsets[:-1]] = words[0].content
    else:
        at = np.empty((count, len(words)), np.int64)
        content = np.empty((count, len(words)), np.uint64)
        begin = offsets[:-1]
        for place, word in enumerate(words):
            at[:, place], content[:, place] = begin, word.content
            begin = begin + word.widths
        anywhere[at.ravel()] = content.ravel()
    return made[:size], offsets


@dataclass
class _Word:
    """Up to eight bytes of every row: the lowest ones of a number; ``widths`` says how many of them count."""

    content: _Words | np.uint64 = _ZERO
    widths: Numbers | int = 0
    widest: int = 0

    def add(self, content: _Words | np.uint64, widths: Numbers | int, widest: int) -> None:
        """Put further bytes behind these."""
        if self.widest:
            content = self.content | content << (np.uint64(8) * np.asarray(self.widths, np.uint64))
        self.content, self.widths, self.widest = content, self.widths + widths, self.widest + widest


def _in_words(fields: Sequence[Numbers | bytes]) -> Iterator[_Word]:
    word = _Word()
    for field in fields:
        for content, widths, widest in _of_bytes(field) if isinstance(field, bytes) else _of_numbers(field):
            if word.widest + widest > _WORD:
                yield word
                word = _Word()
            word.add(content, widths, widest)
    yield word


def _of_bytes(field: bytes) -> Iterator[tuple[np.uint64, int, int]]:
    for first in range(0, len(field), _WORD):
        part = field[first : first + _WORD]
        yield np.uint64(int.from_bytes(part, "little")), len(part), len(part)


def _of_numbers(numbers: Numbers) -> Iterator[tuple[_Words, Numbers, int]]:
    zigzag = _zigzag(numbers)
    highest = int(zigzag.max(initial=0))
    widest = max(1, -(-highest.bit_length() // 7))
    if widest == 1:
        yield zigzag, np.ones(len(numbers), np.int64), 1
        return
    widths = _widths(zigzag, highest)
    content = _MORE.take(widths)
    for place in range(min(widest, _WORD)):
        content |= (zigzag >> np.uint64(7 * place) & _LOW) << np.uint64(8 * place)
    yield content, np.minimum(widths, _WORD) if widest > _WORD else widths, min(widest, _WORD)
    if widest > _WORD:
        rest = zigzag >> np.uint64(7 * _WORD)
        last = rest >> np.uint64(7)
        content = rest & _LOW | (last != 0).astype(np.uint64) << np.uint64(7) | last << np.uint64(8)
        yield content, np.maximum(widths - _WORD, 0), widest - _WORD


def _zigzag(numbers: Numbers) -> _Words:
    # The shift to the left may lose the sign, which the other one brings back.
    return ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
