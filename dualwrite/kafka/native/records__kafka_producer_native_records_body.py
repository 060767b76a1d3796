"""A record batch in two steps: its records, compressed once; then its header, under the identity of a transaction.

A batch waits while its producer learns its id and epoch, or while the batches before it are sent. So the identity comes
last: sealing costs one copy and one checksum, and neither compresses nor encodes again.

The layout (all numbers big-endian)::

    base offset            int64   0: the broker sets it
    batch length           int32   of everything behind it
    partition leader epoch int32   -1: the broker sets it
    magic                  int8    2
    crc                    uint32  CRC-32C of everything behind it
    attributes             int16   bits 0-2 codec, bit 4 transactional
    last offset delta      int32   the number of records less one
    base timestamp         int64   ms since 1970
    max timestamp          int64   ms since 1970
    producer id            int64
    producer epoch         int16
    base sequence          int32
    records                int32   their number
    the records, compressed

Source: Kafka's documentation, "Message Format"; KIP-98.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from dualwrite.kafka.native.records__kafka_producer_native_records_compression import Buffer

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
    """The records of one batch, before it has a producer id, an epoch and sequence numbers.

    Attributes:
        count: The number of records, at least 1.
        attributes_codec: The codec's number in the batch's attributes, 0 to 4.
        base_timestamp_ms: The first record's timestamp (ms since 1970): the others are relative to it.
        max_timestamp_ms: The highest timestamp (ms since 1970).
        records: The records as the batch carries them, compressed.
        raw_size: The bytes of the records before compression.
    """

    count: int
    attributes_codec: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    records: Buffer
    raw_size: int

    @property
    def size(self) -> int:
        """The bytes of the sealed batch."""
        return HEADER_SIZE + len(self.records)

    def sealed(self, producer_id: int, epoch: int, base_sequence: int, *, transactional: bool = True) -> bytes:
        """The whole batch. Equal arguments give equal bytes: a retry repeats what the broker may have already.

        Args:
            producer_id: The producer's id, from ``InitProducerId``.
            epoch: The transaction's epoch.
            base_sequence: The first record's sequence number in its partition; the others follow one by one.
            transactional: False outside a transaction.
        """
        checked = _CHECKED.pack(
            self.attributes_codec | (_TRANSACTIONAL if transactional else 0),
            self.count - 1,
            self.base_timestamp_ms,
            self.max_timestamp_ms,
            producer_id,
            epoch,
            base_sequence,
            self.count,
        )
        prefix = _PREFIX.pack(0, self.size - _LENGTH_ENDS_AT, -1, _MAGIC, crc32c(self.records, crc32c(checked)))
        return b"".join((prefix, checked, self.records))
