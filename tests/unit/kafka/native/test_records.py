"""Batches built record by record: kafka-python's bytes, within a limit."""

import pytest
from harness.records import NOW_MS, PRODUCER, by_kafka_python, read, rows
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.kafka.native.records import HEADER_SIZE, Codec, RecordsBuilder

NONE = Codec()
NO_LIMIT = 2**31 - 1


def built(records, codec=NONE, limit_bytes=NO_LIMIT):
    builder = RecordsBuilder(codec, limit_bytes=limit_bytes)
    assert all(builder.append(*record) for record in records)
    return builder


def size_of(builder):
    return HEADER_SIZE + len(builder._records)


@given(rows)
def test_the_bytes_are_those_that_kafka_python_writes(records):
    builder = built(records)
    body = builder.build()
    batch = body.sealed(*PRODUCER)
    assert batch == by_kafka_python(records)
    assert body.size == size_of(builder) == len(batch)
    assert body.count == builder.count == len(records)


def test_more_records_than_lengths_that_are_looked_up():
    records = [(b"v", None, [], NOW_MS + number) for number in range(10_000)]
    assert built(records).build().sealed(*PRODUCER) == by_kafka_python(records)


@pytest.mark.parametrize("name", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_records_are_read_back_from_every_codec(name):
    records = [(b"value %d" % number * 10, b"%d" % (number % 7), [("n", None)], NOW_MS) for number in range(5000)]
    body = built(records, Codec(name)).build()
    assert body.attributes_codec == ["none", "gzip", "snappy", "lz4", "zstd"].index(name)
    assert body.size <= size_of(built(records))
    assert body.raw_size == built(records).build().raw_size
    assert read(body.sealed(*PRODUCER)) == records


@given(rows, st.integers(0, 20_000), st.sampled_from(["none", "lz4"]))
def test_a_full_batch_takes_nothing_more_and_stays_below_its_limit(records, limit_bytes, codec):
    builder = RecordsBuilder(Codec(codec), limit_bytes=limit_bytes)
    assert builder.append(*records[0]), "or a large message could never be sent"
    for number, record in enumerate(records[1:], 1):
        if not builder.append(*record):
            assert builder.count == number
            assert size_of(built(records[: number + 1])) > limit_bytes
            break
        assert size_of(builder) <= limit_bytes
    kept = records[: builder.count]
    assert read(builder.build().sealed(*PRODUCER)) == kept
    assert size_of(builder) == size_of(built(kept))


@pytest.mark.parametrize("size", [0, 1, 49, 50, 200])
def test_a_record_that_ends_at_the_limit_has_room_and_one_byte_less_has_none(size):
    first, second = (b"first", None, [], NOW_MS), (b"v" * size, None, [], NOW_MS)
    exact = size_of(built([first, second]))
    assert built([first], limit_bytes=exact).append(*second)
    assert not built([first], limit_bytes=exact - 1).append(*second)


def test_a_value_that_changes_later_changes_no_record():
    value = bytearray(b"before")
    builder = built([(value, memoryview(value), [("h", value)], NOW_MS)])
    value[:] = b"behind"
    assert read(builder.build().sealed(*PRODUCER)) == [(b"before", b"before", [("h", b"before")], NOW_MS)]


def test_a_view_of_wider_items_is_taken_as_its_bytes():
    wide = memoryview(b"12345678").cast("I")
    assert read(built([(wide, wide, [("h", wide)], 0)]).build().sealed(*PRODUCER)) == [
        (b"12345678", b"12345678", [("h", b"12345678")], 0)
    ]


@pytest.mark.parametrize(
    "record", [("text", None, []), (None, "text", []), (5, None, []), (None, None, [("h", "text")])]
)
def test_text_and_numbers_are_refused_and_add_nothing(record):
    builder = built([(b"first", None, [], NOW_MS)])
    with pytest.raises(TypeError):
        builder.append(*record, NOW_MS)
    assert read(builder.build().sealed(*PRODUCER)) == [(b"first", None, [], NOW_MS)]


@pytest.mark.parametrize("timestamp_ms", [-1, 2**63])
@pytest.mark.parametrize("before", [[], [(b"first", None, [], 0)]])
def test_timestamps_that_do_not_exist_are_refused_and_add_nothing(timestamp_ms, before):
    builder = built(before)
    with pytest.raises(ValueError, match="timestamp"):
        builder.append(b"second", None, [], timestamp_ms)
    assert builder.count == len(before)


def test_a_batch_without_records_is_not_built():
    with pytest.raises(ValueError, match="without records"):
        built([]).build()
