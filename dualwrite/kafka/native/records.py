"""The bytes of record batches (Kafka's message format v2), one record after another, and the partition of a key.

Records are collected and compressed once; the header follows under the identity of the transaction that sends them. No
connection, no thread, no clock.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import unpack_from
from typing import Final, TypeAlias

from crc32c import crc32c

from dualwrite.errors import ConfigurationError

# A record batch in two steps: its records, compressed once; then its header, under the identity of a transaction.
#
# A batch waits while its producer learns its id and epoch, or while the batches before it are sent. So the identity
# comes last: sealing costs one copy and one checksum, and neither compresses nor encodes again.
#
# The layout (all numbers big-endian)::
#
#     base offset            int64   0: the broker sets it
#     batch length           int32   of everything behind it
#     partition leader epoch int32   -1: the broker sets it
#     magic                  int8    2
#     crc                    uint32  CRC-32C of everything behind it
#     attributes             int16   bits 0-2 codec, bit 4 transactional
#     last offset delta      int32   the number of records less one
#     base timestamp         int64   ms since 1970
#     max timestamp          int64   ms since 1970
#     producer id            int64
#     producer epoch         int16
#     base sequence          int32
#     records                int32   their number
#     the records, compressed
#
# Source: Kafka's documentation, "Message Format"; KIP-98.

_PREFIX: Final = struct.Struct(">qiibI")
_CHECKED: Final = struct.Struct(">hiqqqhii")
_LENGTH_ENDS_AT: Final = 12  # the batch length counts what is behind it
HEADER_SIZE: Final = _PREFIX.size + _CHECKED.size
"""The bytes of a batch before its records."""
MAX_RECORDS: Final = 2**31 - 1
"""The most records in a batch: its header counts them in 32 bits."""
_MAGIC: Final = 2
_TRANSACTIONAL: Final = 0x10


@dataclass(frozen=True)
class RecordsBody:
    """The records of one batch, before it has a producer id, an epoch and sequence numbers."""

    count: int
    attributes_codec: int  # its number in the batch's attributes, 0 to 4
    base_timestamp_ms: int  # the first record's: the others are relative to it
    max_timestamp_ms: int
    records: Buffer  # compressed
    raw_size: int  # before compression

    @property
    def size(self) -> int:
        """The bytes of the sealed batch."""
        return HEADER_SIZE + len(self.records)

    def sealed(self, producer_id: int, epoch: int, base_sequence: int) -> bytes:
        """The whole batch. Equal arguments give equal bytes: a retry repeats what the broker may have already."""
        checked = _CHECKED.pack(
            self.attributes_codec | _TRANSACTIONAL,
            self.count - 1,
            self.base_timestamp_ms,
            self.max_timestamp_ms,
            producer_id,
            epoch,
            base_sequence,
            self.count,
        )
        size = HEADER_SIZE + len(self.records)
        prefix = _PREFIX.pack(0, size - _LENGTH_ENDS_AT, -1, _MAGIC, crc32c(self.records, crc32c(checked)))
        return b"".join((prefix, checked, self.records))


# Zigzag varints, one value at a time: the lengths and differences in a record (Kafka's `varint` and `varlong`).

MINUS_ONE: Final = b"\x01"
"""The length of what is null."""


def varint(value: int) -> bytes:
    """The varint of a value that fits into 64 bits with its sign."""
    rest = (value << 1) ^ (value >> 63)
    encoded = bytearray()
    while rest >> 7:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


SHORT: Final = (
    *(bytes((value << 1,)) for value in range(64)),
    *(bytes((value << 1 & 0x7F | 0x80, value >> 6)) for value in range(64, 2**12)),
)
"""The varints of the numbers from 0: looked up, they cost a fraction of being made."""


Header = tuple[str, bytes | None]

_SHORT: Final = len(SHORT)
_MAX_TIMESTAMP_MS: Final = 2**63 - 1


class RecordsBuilder:
    """Collects the records of one batch. Not thread-safe.

    It keeps nothing of what it is given: a value that changes after :meth:`append` changes no record. ``limit_bytes``
    counts before compression: what is full does not depend on how well the records compress. A single larger record is
    alone in its batch.
    """

    __slots__ = ("_base_ms", "_codec", "_count", "_limit", "_max_ms", "_most", "_records")

    def __init__(self, codec: Codec, *, limit_bytes: int, limit_records: int = MAX_RECORDS) -> None:
        self._codec = codec
        self._limit = limit_bytes - HEADER_SIZE
        self._most = limit_records
        self._records = bytearray()
        self._count = 0
        self._base_ms = 0
        self._max_ms = 0

    @property
    def count(self) -> int:
        """The number of records so far."""
        return self._count

    def append(self, value: bytes | None, key: bytes | None, headers: Sequence[Header], timestamp_ms: int) -> bool:
        """Add one record; False if the batch has no room for it. The first record always has room.

        An empty key is not the same as None. A name of a header may repeat. The timestamp is in ms since 1970, not
        negative.
        """
        count = self._count
        delta = timestamp_ms - self._base_ms if count else 0
        if key is None:
            key_length, key = MINUS_ONE, b""
        else:
            if type(key) is not bytes:
                key = _copied(key)
            key_length = SHORT[size] if (size := len(key)) < _SHORT else varint(size)
        if value is None:
            value_length, value = MINUS_ONE, b""
        else:
            if type(value) is not bytes:
                value = _copied(value)
            value_length = SHORT[size] if (size := len(value)) < _SHORT else varint(size)
        record = b"".join(
            (
                b"\0",  # attributes: a record has none
                SHORT[delta] if 0 <= delta < _SHORT else varint(delta),
                SHORT[count] if count < _SHORT else varint(count),
                key_length,
                key,
                value_length,
                value,
                _encoded(headers) if headers else b"\0",
            )
        )
        length = SHORT[size] if (size := len(record)) < _SHORT else varint(size)
        records = self._records
        if count and (len(records) + len(length) + size > self._limit or count >= self._most):
            return False
        if timestamp_ms > self._max_ms or not count:
            if not 0 <= timestamp_ms <= _MAX_TIMESTAMP_MS:
                raise _impossible(timestamp_ms)
            self._max_ms = timestamp_ms
            if not count:
                self._base_ms = timestamp_ms
        elif timestamp_ms < 0:
            raise _impossible(timestamp_ms)
        records += length
        records += record
        self._count = count + 1
        return True

    def build(self) -> RecordsBody:
        """The records so far, at least one, as one body, compressed."""
        if not self._count:
            raise ValueError("a batch without records")
        number, records = self._codec.compress(self._records) if self._codec.number else (0, bytes(self._records))
        return RecordsBody(self._count, number, self._base_ms, self._max_ms, records, len(self._records))


def _copied(content: Buffer) -> bytes:
    # Also where a view's items are larger than a byte: its len() would count items, and the record would be garbage.
    return memoryview(content).tobytes()


def _encoded(headers: Sequence[Header]) -> bytes:
    parts = [_length(len(headers))]
    for name, value in headers:
        encoded = name.encode()
        parts += (_length(len(encoded)), encoded)
        if value is None:
            parts.append(MINUS_ONE)
        else:
            if type(value) is not bytes:
                value = _copied(value)  # noqa: PLW2901 - as in append
            parts += (_length(len(value)), value)
    return b"".join(parts)


def _length(size: int) -> bytes:
    return SHORT[size] if size < _SHORT else varint(size)


def _impossible(timestamp_ms: int) -> ValueError:
    return ValueError(f"a timestamp is from 0 to {_MAX_TIMESTAMP_MS} ms: {timestamp_ms}")


# The codecs of record batches, with the levels that librdkafka's `compression.level` has.
#
# Brokers and consumers of every client read what these write: lz4 as a frame of independent blocks of at most 64 KiB
# (Kafka refuses linked ones), snappy as one raw block, as librdkafka writes it.

Buffer: TypeAlias = bytes | bytearray | memoryview
DEFAULT_LEVEL: Final = -1
_LEVELS: Final = range(-1, 13)
_SAMPLE: Final = 16_384
_SAMPLED_FROM: Final = 4 * _SAMPLE
"""Of fewer bytes than this the sample would cost too large a part of what it may save."""
_FITS: Final = 1_000_000
"""Bytes of a batch that brokers and topics take by default, whether it is compressed or not."""
_GZIP_WINDOW: Final = 15 + 16  # zlib's largest window; the 16 asks for gzip's header


def _none(raw: Buffer, _: int) -> bytes:
    return bytes(raw)


def _gzip(raw: Buffer, level: int) -> bytes:
    made = zlib.compressobj(level, zlib.DEFLATED, _GZIP_WINDOW)
    return made.compress(raw) + made.flush()


def _snappy(raw: Buffer, _: int) -> bytes:
    import cramjam  # noqa: PLC0415 - each codec's package is loaded with the first batch that it compresses

    return bytes(cramjam.snappy.compress_raw(raw))


def _lz4(raw: Buffer, level: int) -> bytes:
    from lz4 import frame  # noqa: PLC0415 - as above

    return bytes(
        frame.compress(
            raw,
            compression_level=level,
            block_size=frame.BLOCKSIZE_MAX64KB,
            block_linked=False,
            store_size=False,
        )
    )


def _zstd(raw: Buffer, level: int) -> bytes:
    import cramjam  # noqa: PLC0415 - as above

    return bytes(cramjam.zstd.compress(raw, level))


_CODECS: Final[dict[str, tuple[int, Callable[[Buffer, int], bytes], int, int]]] = {
    "none": (0, _none, 0, 0),
    "gzip": (1, _gzip, -1, 9),
    "snappy": (2, _snappy, 0, 0),
    "lz4": (3, _lz4, 0, 12),
    "zstd": (4, _zstd, 3, 22),
}
"""By librdkafka's name: the number in a batch's attributes, the function, the default level and the highest."""


@dataclass(frozen=True)
class Codec:
    """A codec at a level, as librdkafka's ``compression.type`` and ``compression.level`` name it.

    Level -1 is the codec's own default. A level above the codec's highest means the highest; ``none`` and ``snappy`` have
    no levels, and ignore it. With ``must_halve``, records that it does not make half as long stay as they are: client,
    broker and consumers would need more processor time for the codec than the missing bytes save them. More than a broker
    takes by default are compressed in any case.
    """

    name: str = "none"
    level: int = DEFAULT_LEVEL
    must_halve: bool = False
    number: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.name not in _CODECS:
            raise ConfigurationError(f"compression.type {self.name!r} is none of {', '.join(_CODECS)}")
        if self.level not in _LEVELS:
            raise ConfigurationError(f"compression.level {self.level} is not from {_LEVELS[0]} to {_LEVELS[-1]}")
        object.__setattr__(self, "number", _CODECS[self.name][0])

    def compress(self, raw: Buffer) -> tuple[int, bytes]:
        """Compress the records of a batch; the same input gives the same bytes.

        Returns the number for the batch's attributes, too. Records that would become larger, or not small enough, stay as
        they are, under the number 0.
        """
        number, function, default, highest = _CODECS[self.name]
        level = default if self.level == DEFAULT_LEVEL else min(self.level, highest)
        must_halve = self.must_halve and len(raw) <= _FITS
        most = len(raw) // 2 if must_halve else len(raw)
        # Of many records a part in their middle tells enough. What earlier batches have saved is not asked for: a batch's
        # bytes would depend on those before it.
        if must_halve and len(raw) >= _SAMPLED_FROM:
            first = len(raw) // 2
            if len(function(raw[first : first + _SAMPLE], level)) > _SAMPLE // 2:
                return 0, bytes(raw)
        made = function(raw, level)
        return (number, made) if number == 0 or len(made) <= most else (0, bytes(raw))


# The partition of a key: librdkafka's partitioners, by its names and with its results.
#
# A key must land where librdkafka put it, or the messages of one key lose their order when a producer changes its
# engine. `murmur2_random` is what Java's producers do with keys.

DEFAULT: Final = "consistent_random"
"""librdkafka's own."""
_WORD: Final = 0xFFFFFFFF
_MURMUR2_SEED: Final = 0x9747B28C
_MURMUR2_FACTOR: Final = 0x5BD1E995
_FNV_BASIS: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193


def murmur2(key: bytes) -> int:
    """Java's ``toPositive(murmur2(key))``: 0 to 2**31 - 1."""
    size = len(key)
    words = size >> 2
    found = _MURMUR2_SEED ^ size
    for word in unpack_from(f"<{words}I", key):
        mixed = word * _MURMUR2_FACTOR & _WORD
        mixed = (mixed ^ mixed >> 24) * _MURMUR2_FACTOR & _WORD
        found = found * _MURMUR2_FACTOR & _WORD ^ mixed
    if size & 3:
        found = (found ^ int.from_bytes(key[words << 2 :], "little")) * _MURMUR2_FACTOR & _WORD
    found = (found ^ found >> 13) * _MURMUR2_FACTOR & _WORD
    return (found ^ found >> 15) & 0x7FFFFFFF


def fnv1a(key: bytes) -> int:
    """The absolute value of the signed FNV-1a hash, as Sarama takes it: 0 to 2**31."""
    found = _FNV_BASIS
    for byte in key:
        found = (found ^ byte) * _FNV_PRIME & _WORD
    return found if found >> 31 == 0 else _WORD + 1 - found


@dataclass(frozen=True)
class Partitioner:
    """One of librdkafka's ``partitioner`` settings."""

    name: str
    hash: Callable[[bytes], int] | None  # None if no key decides
    null_is_any: bool  # a message without a key may go anywhere, not where an empty key goes
    empty_is_any: bool = False  # the same for an empty key

    def partition(self, key: bytes | None, partition_count: int) -> int | None:
        """The partition of a key; None if the message may go anywhere, and its sender chooses."""
        if self.hash is None or (self.empty_is_any and not key) or (self.null_is_any and key is None):
            return None
        return self.hash(key or b"") % partition_count


_PARTITIONERS: Final = {
    one.name: one
    for one in (
        Partitioner("random", None, null_is_any=True, empty_is_any=True),
        Partitioner("consistent", zlib.crc32, null_is_any=False),
        Partitioner("consistent_random", zlib.crc32, null_is_any=True, empty_is_any=True),
        Partitioner("murmur2", murmur2, null_is_any=False),
        Partitioner("murmur2_random", murmur2, null_is_any=True),
        Partitioner("fnv1a", fnv1a, null_is_any=False),
        Partitioner("fnv1a_random", fnv1a, null_is_any=True),
    )
}
NAMES: Final = tuple(_PARTITIONERS)


def partitioner(name: str = DEFAULT) -> Partitioner:
    """The partitioner that librdkafka calls so."""
    found = _PARTITIONERS.get(name)
    if found is None:
        raise ConfigurationError(f"partitioner {name!r} is none of {', '.join(NAMES)}")
    return found
