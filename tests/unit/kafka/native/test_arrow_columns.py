"""Batches from Arrow's columns are those that the builder makes of the same rows; rows go where their keys belong."""

import random

import numpy as np
import pyarrow as pa
import pytest
from harness.records import NOW_MS, PRODUCER, contents, headers, read, timestamps
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.kafka.native.arrow import ANYWHERE, RowTooLarge, batches, partition_rows
from dualwrite.kafka.native.records import NAMES, Codec, RecordsBuilder, partitioner
from dualwrite.protocol.message import OVERHEAD, size_of

NO_LIMIT = 2**31 - 1
NONE = Codec()
ENTRY = pa.struct([("key", pa.string()), ("value", pa.binary())])
HEADER_TYPES = [pa.list_(ENTRY), pa.large_list(ENTRY), pa.map_(pa.string(), pa.binary())]
BINARY_TYPES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]
TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
FEW_ROWS = st.lists(st.tuples(contents, contents, headers, st.just(NOW_MS) | timestamps), max_size=70)


def by_builder(rows, codec=NONE, **limits):
    """The batches of value, key, headers and perhaps a timestamp, sealed."""
    limits = {"limit_bytes": NO_LIMIT, **limits}
    batches, builder = [], RecordsBuilder(codec, **limits)
    for row in rows:
        *record, timestamp_ms = (*row, NOW_MS)[:4]
        if not builder.append(*record, timestamp_ms):
            batches.append(builder.build())
            builder = RecordsBuilder(codec, **limits)
            assert builder.append(*record, timestamp_ms)
    return [body.sealed(*PRODUCER) for body in [*batches, *([builder.build()] if builder.count else [])]]


def by_columns(*columns, codec=NONE, **limits):
    made = batches(*columns, timestamp_ms=NOW_MS, codec=codec, **{"limit_bytes": NO_LIMIT, **limits})
    return [body.sealed(*PRODUCER) for _, body in made]


def by_partition(columns, partitions, limit_bytes=NO_LIMIT):
    """By partition, its batches; partitions ascend."""
    made = batches(*columns, partitions=partitions, timestamp_ms=NOW_MS, codec=NONE, limit_bytes=limit_bytes)
    found = [(partition, body.sealed(*PRODUCER)) for partition, body in made]
    numbers = [partition for partition, _ in found]
    assert numbers == sorted(numbers)
    return {number: [batch for partition, batch in found if partition == number] for number in numbers}


def column(draw, items, kind):
    """The items as an array, perhaps a slice of a longer one, perhaps in chunks."""
    form = draw(st.sampled_from(["array", "slice", "chunks"]))
    if form == "array":
        return pa.array(items, kind)
    if form == "slice":
        return pa.array([*items[:2], None, *items, *items[-1:]], kind).slice(len(items[:2]) + 1, len(items))
    cut = draw(st.integers(0, len(items)))
    return pa.chunked_array([pa.array(items[:cut], kind), pa.array(items[cut:], kind)], kind)


@given(
    st.data(),
    FEW_ROWS,
    st.integers(61, 20_000) | st.just(NO_LIMIT),
    st.integers(1, 20) | st.just(NO_LIMIT),
    st.sampled_from(["none", "lz4"]),
)
def test_the_batches_are_those_of_the_builder(data, rows, limit_bytes, limit_records, codec):
    limits = {"limit_bytes": limit_bytes, "limit_records": limit_records}
    kinds = st.sampled_from(BINARY_TYPES)
    columns = [
        column(data.draw, [value for value, _, _, _ in rows], data.draw(kinds)),
        column(data.draw, [key for _, key, _, _ in rows], data.draw(kinds)),
        column(data.draw, [found for _, _, found, _ in rows], HEADER_TYPES[2]),
        column(data.draw, [None if time == NOW_MS else time for _, _, _, time in rows], pa.int64()),
    ]
    assert by_columns(*columns, codec=Codec(codec), **limits) == by_builder(rows, Codec(codec), **limits)


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
    assert batches == by_builder([row[:3] for row in rows], Codec(name), limit_bytes=100_000)


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
        batches(pa.array([b"v"]), timestamp_ms=timestamp_ms, codec=NONE, limit_bytes=1000)


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


@given(
    st.data(),
    st.lists(st.tuples(st.integers(-1, 5) | st.just(40_000), contents, headers, timestamps), max_size=40),
    st.integers(61, 5000) | st.just(NO_LIMIT),
)
def test_the_rows_of_each_partition_are_the_batches_of_the_builder(data, rows, limit_bytes):
    partitions = np.array([row[0] for row in rows], np.int32)
    values = column(data.draw, [value for _, value, _, _ in rows], pa.binary())
    keys = column(data.draw, [value for _, value, _, _ in rows], pa.string() if not rows else pa.binary())
    entries = pa.array([found for _, _, found, _ in rows], HEADER_TYPES[2])
    times = column(data.draw, [time for _, _, _, time in rows], pa.int64())
    expected = {
        number: by_builder([(row[1], row[1], *row[2:]) for row in rows if row[0] == number], limit_bytes=limit_bytes)
        for number in {row[0] for row in rows}
    }
    assert by_partition((values, keys, entries, times), partitions, limit_bytes) == expected


def test_columns_of_every_type_are_brought_together_by_partition():
    values = pa.chunked_array([pa.array(["a", "b"]).dictionary_encode(), pa.array(["c"]).dictionary_encode()])
    columns = (values, pa.array(["k", None, ""]), None, pa.array([3, None, 1]))
    assert by_partition(columns, np.array([5, 0, 5], np.int32)) == {
        0: by_builder([(b"b", None, [], NOW_MS)]),
        5: by_builder([(b"a", b"k", [], 3), (b"c", b"", [], 1)]),
    }
    with pytest.raises(TypeError):
        by_partition((pa.array([1.5, 2.5]),), np.array([0, 1], np.int32))


def test_batches_hold_so_many_rows_at_most():
    values = pa.array([b"v"] * 10)
    made = batches(
        values,
        partitions=np.array([0, 1] * 5, np.int32),
        timestamp_ms=NOW_MS,
        codec=NONE,
        limit_bytes=NO_LIMIT,
        limit_records=2,
    )
    assert [(partition, body.count) for partition, body in made] == [(0, 2), (0, 2), (0, 1), (1, 2), (1, 2), (1, 1)]


@given(st.lists(st.tuples(contents, contents, headers), min_size=1, max_size=10), st.data())
def test_a_row_that_is_too_large_is_named(rows, data):
    columns = [
        pa.array([row[place] for row in rows], kind) for place, kind in enumerate([pa.binary()] * 2 + HEADER_TYPES[2:])
    ]
    measured = [size_of(*row) - OVERHEAD for row in rows]
    partitions = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))), np.int32)
    largest = max(measured)

    def made(limit):
        return list(
            batches(
                *columns, partitions=partitions, timestamp_ms=1, codec=NONE, limit_bytes=99, max_message_bytes=limit
            )
        )

    assert sum(body.count for _, body in made(largest)) == len(rows)
    if largest:
        with pytest.raises(RowTooLarge) as refused:
            made(largest - 1)
        assert refused.value.size == measured[refused.value.row] == largest
