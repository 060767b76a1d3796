"""A batch's records, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dualwrite.kafka.native.records__kafka_producer_native_records_body import HEADER_SIZE, MAX_RECORDS, RecordsBody
from dualwrite.kafka.native.records__kafka_producer_native_records_compression import Buffer, Codec
from dualwrite.kafka.native.records__kafka_producer_native_records_varints import MINUS_ONE, SHORT, varint

Header = tuple[str, bytes | None]

_SHORT: Final = len(SHORT)
_MAX_TIMESTAMP_MS: Final = 2**63 - 1


class RecordsBuilder:
    """Collects the records of one batch.

    It keeps nothing of what it is given: a value that changes after :meth:`append` changes no record. Not thread-safe.

    Args:
        codec: How :meth:`build` compresses the records.
        limit_bytes: The greatest size of the sealed batch, counted before compression: what is full does not depend on
            how well the records compress. A single record may be larger, and is then alone in its batch.
        limit_records: The most records, at least 1.
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

    @property
    def size_estimate(self) -> int:
        """The bytes of the sealed batch, if the records are not compressed: compression never adds to them."""
        return HEADER_SIZE + len(self._records)

    def append(self, value: bytes | None, key: bytes | None, headers: Sequence[Header], timestamp_ms: int) -> bool:
        """Add one record.

        Args:
            value: The message's value; None is a tombstone.
            key: The message's key; an empty key is not the same as None.
            headers: Names and values, in this order; a name may repeat.
            timestamp_ms: When the message was created (ms since 1970), not negative.

        Returns:
            False if the batch has no room for it: nothing was added, and it belongs into the next batch. The first record
            always has room.

        Raises:
            TypeError: A key or a value is not bytes.
            ValueError: The timestamp is negative, or does not fit into 64 bits.
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
        """The records so far as one body, compressed.

        Raises:
            ValueError: There is no record.
        """
        if not self._count:
            raise ValueError("a batch without records")
        number, records = self._codec.compress(self._records)
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
