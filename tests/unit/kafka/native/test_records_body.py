"""A batch sealed with a producer's identity."""

import struct

from harness.records import NOW_MS, PRODUCER, crc32c_bit_by_bit
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.kafka.native.records import HEADER_SIZE, RecordsBody

BODY = RecordsBody(3, 4, NOW_MS, NOW_MS + 9, b"compressed records", 77)


def test_the_header_holds_every_field_where_kafka_reads_it():
    batch = BODY.sealed(*PRODUCER)
    assert struct.unpack(">qiibIhiqqqhii", batch[:HEADER_SIZE]) == (
        0, len(batch) - 12, -1, 2, crc32c_bit_by_bit(batch[21:]), 0x14, 2, NOW_MS, NOW_MS + 9, *PRODUCER, 3,
    )  # fmt: skip
    assert batch[HEADER_SIZE:] == b"compressed records"
    assert BODY.size == len(batch)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**15 - 1), st.integers(0, 2**31 - 1))
def test_a_batch_sealed_twice_has_the_same_bytes_and_another_identity_only_its_own(producer_id, epoch, sequence):
    batch = BODY.sealed(producer_id, epoch, sequence)
    assert batch == BODY.sealed(producer_id, epoch, sequence)
    other = BODY.sealed(*PRODUCER)
    assert (batch[:17], batch[21:43], batch[57:]) == (other[:17], other[21:43], other[57:])
    assert struct.unpack(">qhi", batch[43:57]) == (producer_id, epoch, sequence)


def test_records_may_be_a_view_of_a_larger_buffer():
    view = memoryview(b"[compressed records]")[1:-1]
    assert RecordsBody(3, 4, NOW_MS, NOW_MS + 9, view, 77).sealed(*PRODUCER) == BODY.sealed(*PRODUCER)
