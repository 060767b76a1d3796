"""Batches from Arrow's columns are those that the builder makes of the same rows; rows go where their keys belong."""

import random

import numpy as np
import pyarrow as pa
import pytest
from harness.records import NOW_MS, PRODUCER, contents, headers, read, timestamps
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.kafka.producer.native.records.builder import RecordsBuilder
from dualwrite.kafka.producer.native.records.columns import ANYWHERE, bodies, partition_rows, split
from dualwrite.kafka.producer.native.records.compression import Codec
from dualwrite.kafka.producer.native.records.partitioners import NAMES, partitioner

NO_LIMIT = 2**31 - 1
NONE = Codec()
ENTRY = pa.struct([("key", pa.string()), ("value", pa.binary())])
HEADER_TYPES = [pa.list_(ENTRY), pa.large_list(ENTRY), pa.map_(pa.string(), pa.binary())]
BINARY_TYPES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]
TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
FEW_ROWS = st.lists(st.tuples(contents, contents, headers, st.just(NOW_MS) | timestamps), max_size=70)


def by_builder(rows, codec=NONE, limit_bytes=NO_LIMIT):
    """The batches of value, key, headers and perhaps a timestamp, sealed."""
    batches, builder = [], RecordsBuilder(codec, limit_bytes=limit_bytes)
    for row in rows:
        *record, timestamp_ms = (*row, NOW_MS)[:4]
        if not builder.append(*record, timestamp_ms):
            batches.append(builder.build())
            builder = RecordsBuilder(codec, limit_bytes=limit_bytes)
            assert builder.append(*record, timestamp_ms)
    return [body.sealed(*PRODUCER) for body in [*batches, *([builder.build()] if builder.count else [])]]


def by_columns(*columns, codec=NONE, limit_bytes=NO_LIMIT):
    made = bodies(*columns, timestamp_ms=NOW_MS, codec=codec, limit_bytes=limit_bytes)
    return [body.sealed(*PRODUCER) for body in made]


def column(draw, items, kind):
    """The items as an array, perhaps a slice of a longer one, perhaps in chunks."""
    form = draw(st.sampled_from(["array", "slice", "chunks"]))
    if form == "array":
        return pa.array(items, kind)
    if form == "slice":
        return pa.array([*items[:2], None, *items, *items[-1:]], kind).slice(len(items[:2]) + 1, len(items))
    cut = draw(st.integers(0, len(items)))
    return pa.chunked_array([pa.array(items[:cut], kind), pa.array(items[cut:], kind)], kind)


@given(st.data(), FEW_ROWS, st.integers(61, 20_000) | st.just(NO_LIMIT), st.sampled_from(["none", "lz4"]))
def test_the_batches_are_those_of_the_builder(data, rows, limit_bytes, codec):
    kinds = st.sampled_from(BINARY_TYPES)
    columns = [
        column(data.draw, [value for value, _, _, _ in rows], data.draw(kinds)),
        column(data.draw, [key for _, key, _, _ in rows], data.draw(kinds)),
        column(data.draw, [found for _, _, found, _ in rows], HEADER_TYPES[2]),
        column(data.draw, [None if time == NOW_MS else time for _, _, _, time in rows], pa.int64()),
    ]
    assert by_columns(*columns, codec=Codec(codec), limit_bytes=limit_bytes) == by_builder(
        rows, Codec(codec), limit_bytes
    )


@pytest.mark.parametrize("kind", HEADER_TYPES, ids=str)
def test_headers_of_every_type_are_taken(kind):
    found = [[("a", b"1"), ("ключ", None), ("a", b"")], [], None, [("b", b"x" * 200)] * 70, None]
    entries = [
        one and [entry if pa.types.is_map(kind) else {"key": entry[0], "value": entry[1]} for entry in one]
        for one in found
    ]
    rows = [(b"v", None, one or []) for one in found]
    values, given_headers = pa.array([b"v"] * 5), pa.array(entries, kind)
    assert by_columns(values, None, given_headers) == by_builder(rows)
    assert by_columns(values[1:4], None, given_headers[1:4]) == by_builder(rows[1:4])


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_text_is_taken_as_its_utf_8(kind):
    rows = [("wert", "ключ"), ("", None), (None, ""), ("😀" * 100, "k")]
    values, keys = ([row[place] for row in rows] for place in (0, 1))
    expected = [(value and value.encode(), key and key.encode(), []) for value, key in rows]
    expected[1] = (b"", None, [])
    expected[2] = (None, b"", [])
    assert by_columns(pa.array(values, kind), pa.array(keys, kind)) == by_builder(expected)


def test_what_lies_hidden_at_the_place_of_a_null_is_no_part_of_a_record():
    hidden = pa.Array.from_buffers(
        pa.binary(),
        3,
        [pa.py_buffer(b"\x05"), pa.py_buffer(np.array([0, 1, 7, 8], np.int32)), pa.py_buffer(b"ahiddenb")],
    )
    assert hidden.to_pylist() == [b"a", None, b"b"]
    rows = [(one, one, []) for one in hidden.to_pylist()]
    assert by_columns(hidden, hidden) == by_builder(rows)
    ends = np.arange(4, dtype=np.int32)
    entries = pa.array([{"key": name, "value": b""} for name in "abc"], ENTRY)
    lists = pa.Array.from_buffers(HEADER_TYPES[0], 3, [pa.py_buffer(b"\x05"), pa.py_buffer(ends)], children=[entries])
    rows = [(b"v", None, one) for one in ([("a", b"")], [], [("c", b"")])]
    assert by_columns(pa.array([b"v"] * 3), None, lists) == by_builder(rows)


@pytest.mark.parametrize("values", [[None, None], [b"a", b"b"]])
@pytest.mark.parametrize("keys", [None, [None, None], [b"", b"k"]])
@pytest.mark.parametrize("found", [None, [None, None], [[], []], [[], [("h", None)]]])
def test_columns_may_be_missing_or_hold_nothing_but_nulls(values, keys, found):
    rows = list(zip(values, keys or [None] * 2, [one or [] for one in found or [[]] * 2], strict=True))
    assert by_columns(
        pa.array(values), keys and pa.array(keys), found and pa.array(found, HEADER_TYPES[2])
    ) == by_builder(rows)


def test_no_rows_are_no_batch():
    assert by_columns(pa.array([], pa.binary()), pa.array([], pa.string()), pa.array([], HEADER_TYPES[0])) == []
    assert by_columns(pa.chunked_array([], pa.binary())) == []


@pytest.mark.parametrize("name", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_many_rows_are_read_back_from_every_codec(name):
    rows = [(b"value %d" % number * 10, b"%d" % (number % 7), [], NOW_MS) for number in range(20_000)]
    values, keys = (pa.array([row[place] for row in rows]) for place in (0, 1))
    batches = by_columns(values, keys, codec=Codec(name), limit_bytes=100_000)
    assert len(batches) > 10
    assert [row for batch in batches for row in read(batch)] == rows
    assert batches == by_builder([row[:3] for row in rows], Codec(name), 100_000)


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ((pa.array([1]),), TypeError),
        ((pa.array([b"v"]), pa.array([1.5])), TypeError),
        ((pa.array([b"v"]), None, pa.array(["text"])), TypeError),
        ((pa.array([b"v"]), None, pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))), TypeError),
        ((pa.array([b"v"]), None, pa.array([[None]], pa.list_(pa.struct(list(ENTRY)[::-1])))), TypeError),
        ((pa.array([b"v"]), pa.array([b"k", b"k"])), ValueError),
        ((pa.array([b"v"]), None, pa.array([[{"key": None, "value": b""}]], HEADER_TYPES[0])), ValueError),
        ((pa.array([b"v"]), None, pa.array([[None]], HEADER_TYPES[0])), ValueError),
        ((pa.array([b"v"]), None, None, pa.array([1.5])), TypeError),
        ((pa.array([b"v"]), None, None, pa.array([-1])), ValueError),
        ((pa.array([b"v"]), None, None, pa.array([1, 2])), ValueError),
    ],
)
def test_columns_that_are_no_messages_are_refused(columns, error):
    with pytest.raises(error):
        by_columns(*columns)


@pytest.mark.parametrize("timestamp_ms", [-1, 2**63])
def test_timestamps_that_do_not_exist_are_refused_at_once(timestamp_ms):
    with pytest.raises(ValueError, match="timestamp"):
        bodies(pa.array([b"v"]), timestamp_ms=timestamp_ms, codec=NONE, limit_bytes=1000)


@given(
    st.data(),
    st.lists(st.none() | st.binary(max_size=20) | st.binary(min_size=250, max_size=300), max_size=40),
    st.sampled_from(NAMES),
    st.integers(1, 100),
)
def test_a_row_goes_where_its_key_belongs(data, keys, name, count):
    one = partitioner(name)
    expected = [one.partition(key, count) for key in keys]
    found = partition_rows(column(data.draw, keys, data.draw(st.sampled_from(BINARY_TYPES))), count, one)
    assert found.tolist() == [ANYWHERE if partition is None else partition for partition in expected]


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_thousand_rows_go_where_their_keys_belong(name):
    draw = random.Random(1)
    keys = [draw.randbytes(draw.randrange(40)) for _ in range(100_000)]
    one = partitioner(name)
    expected = [ANYWHERE if (found := one.partition(key, 12)) is None else found for key in keys]
    assert partition_rows(pa.array(keys), 12, one).tolist() == expected


@given(st.data(), st.lists(st.tuples(st.integers(-1, 5) | st.just(40_000), contents), max_size=40))
def test_rows_are_split_by_partition_in_their_order(data, rows):
    partitions = np.array([partition for partition, _ in rows], np.int32)
    values = column(data.draw, [value for _, value in rows], pa.binary())
    entries = pa.array([[("k", value)] for _, value in rows], HEADER_TYPES[2])
    found = list(split((values, None, entries), partitions))
    assert [partition for partition, _ in found] == sorted({partition for partition, _ in rows})
    for partition, (its_values, keys, its_headers) in found:
        expected = [value for other, value in rows if other == partition]
        assert its_values.to_pylist() == expected
        assert keys is None
        assert by_columns(its_values, None, its_headers) == by_builder(
            [(value, None, [("k", value)]) for value in expected]
        )


def test_columns_of_every_type_are_split():
    values = pa.chunked_array([pa.array(["a", "b"]).dictionary_encode(), pa.array(["c"]).dictionary_encode()])
    columns = (values, pa.array(["k", None, ""]), None, pa.array([3, None, 1]))
    (_, first), (_, second) = split(columns, np.array([5, 0, 5], np.int32))
    assert by_columns(*first) == by_builder([(b"b", None, [], NOW_MS)])
    assert by_columns(*second) == by_builder([(b"a", b"k", [], 3), (b"c", b"", [], 1)])
    with pytest.raises(TypeError):
        next(split((pa.array([1.5, 2.5]),), np.array([0, 1], np.int32)))
