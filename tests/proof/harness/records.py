"""Record batches as kafka-python writes and reads them: the other opinion on what a batch's bytes are."""

import gzip
import struct

import cramjam
import lz4.frame
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

PRODUCER = (4_711, 12, 2**31 - 3)
"""A producer's id and epoch, and a sequence number before the numbers begin again."""
NOW_MS = 1_767_225_600_000
UNCOMPRESS = {
    0: bytes,
    1: gzip.decompress,
    2: lambda raw: bytes(cramjam.snappy.decompress_raw(raw)),
    3: lz4.frame.decompress,
    4: lambda raw: bytes(cramjam.zstd.decompress(raw)),
}
_HEADER = DefaultRecordBatch.HEADER_STRUCT

contents = st.none() | st.binary(max_size=80) | st.binary(min_size=60, max_size=70) | st.binary(max_size=9000)
names = st.text(max_size=8) | st.sampled_from(["trace", "ключ", "😀"])
headers = st.lists(st.tuples(names, st.none() | st.binary(max_size=70)), max_size=3) | st.just([("many", b"")] * 70)
timestamps = st.integers(NOW_MS - 5000, NOW_MS + 5000) | st.integers(0, 2**63 - 1)
rows = st.lists(st.tuples(contents, contents, headers, timestamps), min_size=1, max_size=70)
"""Rows of a batch: value, key, headers, timestamp in ms."""


def by_kafka_python(records):
    """The uncompressed batch of the rows, sealed for `PRODUCER`."""
    made = DefaultRecordBatchBuilder(2, 0, True, *PRODUCER, 2**31 - 1)
    for offset, (value, key, record_headers, timestamp_ms) in enumerate(records):
        made.append(offset, timestamp_ms, key, value, record_headers)
    batch = made.build()
    # Java and the protocol's description leave the leader's epoch to the broker with -1, kafka-python with 0; no checksum
    # covers it.
    struct.pack_into(">i", batch, 12, -1)
    return bytes(batch)


def read(batch):
    """The rows of one batch, by kafka-python; snappy and zstd by their own libraries, which kafka-python may lack."""
    header = list(_HEADER.unpack_from(batch))
    assert header[1] == len(batch) - 12
    assert DefaultRecordBatch(batch).validate_crc()
    raw = UNCOMPRESS[header[5] & 7](batch[_HEADER.size :])
    header[5] &= ~7
    read = DefaultRecordBatch(_HEADER.pack(*header) + raw)
    return [(one.value, one.key, one.headers, one.timestamp) for one in read]


def crc32c_bit_by_bit(content):
    """The checksum by its definition."""
    found = 0xFFFFFFFF
    for byte in content:
        found ^= byte
        for _ in range(8):
            found = found >> 1 ^ (0x82F63B78 if found & 1 else 0)
    return found ^ 0xFFFFFFFF
