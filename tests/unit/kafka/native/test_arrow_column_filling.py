"""Columns come out of the batches as if their rows had been appended one by one."""

import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pytest
from harness.filling import LEADER, NOW_MS, TOPICS, Settings, append, filling, flushed
from harness.records import contents, headers
from hypothesis import given, settings
from hypothesis import strategies as st

from dualwrite.kafka.cluster import Topic
from dualwrite.kafka.native import arrow
from dualwrite.kafka.native.accumulator import _COLUMNS_FROM
from dualwrite.kafka.native.records import NAMES
from dualwrite.protocol.message import MessageBatch, MessageColumns, Unsendable

HEADERS = pa.map_(pa.string(), pa.binary())
PAIRS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
PLACES = st.none() | st.integers(-1, 5)
ROWS = st.lists(st.tuples(contents, contents, headers, PLACES), max_size=40)


def exhaust(yielding):
    return sum(1 for _ in yielding)


def homes(found):
    """By partition, the rows; those of every partition where the sender chose."""
    return {where: sorted(rows, key=repr) for where, rows in found.items()}


@settings(deadline=None)
@given(ROWS, st.sampled_from([name for name in NAMES if name.startswith(("consistent", "murmur2"))]), st.booleans())
def test_rows_go_where_appended_messages_go(rows, name, is_explicit):
    # Every message has a home: a key, a partition, or a partitioner that sends messages without a key to one.
    rows = [
        (value, key or b"k", found, place if is_explicit else None, number + 1)
        for number, (value, key, found, place) in enumerate(rows)
    ]
    settings = Settings(partitioner=name, batch_bytes=3000)
    one, ones = filling(settings)
    for value, key, found, place, time in rows:
        append(one, "t", value, key, headers=found, partition=place, timestamp_ms=time)
    to, made = filling(settings)
    exhaust(
        to.append_columns(
            MessageColumns(
                "t",
                pa.array([row[0] for row in rows], pa.binary()),
                pa.array([row[1] for row in rows], pa.binary()),
                pa.array([row[2] for row in rows], HEADERS),
                pa.array([row[3] for row in rows], pa.int32()) if is_explicit else None,
                timestamps=pa.array([row[4] for row in rows], pa.int64()),
            )
        )
    )
    assert made.queued_messages == len(rows)
    assert flushed(made) == flushed(ones)


def test_rows_without_a_home_are_spread_in_whole_batches():
    to, made = filling(Settings(batch_bytes=2000))
    values = [b"%04d" % number + b"x" * 90 for number in range(1000)]
    batches = exhaust(to.append_columns(MessageColumns("t", pa.array(values))))
    assert batches > 50
    found = flushed(made)
    assert sorted(row[0] for rows in found.values() for row in rows) == values
    assert all(rows == sorted(rows) for rows in found.values())
    load = Counter({where: len(rows) for where, rows in found.items()})
    assert len(load) == 6
    assert max(load.values()) - min(load.values()) <= 40


def test_rows_without_a_key_go_home_where_the_partitioner_has_one():
    to, made = filling(Settings(partitioner="murmur2"))
    append(to, "t", b"v")
    [home] = flushed(made)
    exhaust(to.append_columns(MessageColumns("t", pa.array([b"v"] * 5))))
    exhaust(
        to.append_columns(MessageColumns("t", pa.array([b"v"] * 5), partitions=pa.array([None, -1, home[1], None, -1])))
    )
    assert {where: len(rows) for where, rows in flushed(made).items()} == {home: 10}


def test_partitions_that_the_topic_has_got_meanwhile_are_found():
    grown = Topic("an-id", dict.fromkeys(range(8), LEADER))
    to, made = filling(look_up=lambda name, fresh: grown if fresh else TOPICS[name])
    made.learn("t", dict.fromkeys(grown.leaders, 1))
    exhaust(to.append_columns(MessageColumns("t", pa.array([b"v"] * 3), partitions=pa.array([5, 7, None]))))
    assert {("t", 5), ("t", 7)} <= flushed(made).keys()


def test_timestamps_that_are_not_given_are_now():
    to, made = filling()
    exhaust(to.append_columns(MessageColumns("t", pa.array([b"v"] * 3), timestamps=pa.array([None, None, 7]))))
    [rows] = flushed(made).values()
    assert [row[3] for row in rows] == [NOW_MS, NOW_MS, 7]


def test_batches_are_made_one_by_one():
    to, made = filling(Settings(batch_bytes=1000))
    columns = to.append_columns(MessageColumns("t", pa.array([b"x" * 90] * 100)))
    next(columns)
    assert 0 < made.queued_messages <= 10


def test_large_columns_are_worked_on_in_pieces(monkeypatch):
    monkeypatch.setattr(arrow, "_PIECE_BYTES", 1000)
    to, made = filling()
    values = [b"%04d" % number + b"x" * 90 for number in range(1000)]
    keys = [b"%d" % (number % 17) for number in range(1000)]
    assert exhaust(to.append_columns(MessageColumns("t", pa.array(values), pa.array(keys)))) > 100
    found = flushed(made)
    assert sorted(row[0] for rows in found.values() for row in rows) == values
    assert all([row[0] for row in rows] == sorted(row[0] for row in rows) for rows in found.values())


@pytest.mark.parametrize(
    ("column", "code", "detail"),
    [
        ({"values": pa.array([b"v"] * 29 + [b"x" * 963])}, "MESSAGE_TOO_LARGE", "row 29 has 1001 bytes, message.max.bytes is 1000"),
        ({"partitions": pa.array([0] * 29 + [6])}, "UNKNOWN_TOPIC_OR_PARTITION", "row 29: topic 't' has no partition 6, but 6 from 0"),
        ({"partitions": pa.array([0] * 29 + [-2])}, "UNKNOWN_TOPIC_OR_PARTITION", "row 29: topic 't' has no partition -2, but 6 from 0"),
        ({"timestamps": pa.array([1] * 29 + [-1])}, "INVALID_TIMESTAMP", "row 29 has the timestamp -1 ms"),
        ({"timestamps": pa.array([1] * 29 + [0])}, "INVALID_TIMESTAMP", "row 29 has the timestamp 0 ms"),
        ({"timestamps": pa.array([1] * 29 + [2**63], pa.uint64())}, "INVALID_TIMESTAMP", f"row 29 has the timestamp {2**63} ms"),
        ({"headers": pa.array([[("h", b"")]] * 28 + [[], [("h", b""), (None, b"")]], PAIRS)}, "INVALID_RECORD", "row 29 has a header without a name"),
        ({"headers": pa.array([[("h", b"")]] * 29 + [[None]], PAIRS)}, "INVALID_RECORD", "row 29 has a header without a name"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("piece_bytes", [100, 1_000_000])
def test_a_row_that_cannot_be_sent_is_named(monkeypatch, column, code, detail, piece_bytes):
    monkeypatch.setattr(arrow, "_PIECE_BYTES", piece_bytes)
    to, made = filling(Settings(max_message_bytes=1000))
    keys = pa.array([b"%d" % number for number in range(30)])
    columns = {"values": pa.array([b"v"] * 30), "keys": keys, **column}
    with pytest.raises(Unsendable) as refused:
        exhaust(to.append_columns(MessageColumns("t", **columns)))
    assert (refused.value.code, refused.value.detail) == (code, detail)
    if piece_bytes > 100:
        assert made.is_flushed


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"values": pa.array([1])}, TypeError),
        ({"values": pa.array([b"v"]), "keys": pa.array([b"k", b"k"])}, ValueError),
        ({"values": pa.array([b"v"]), "partitions": pa.array([0, 0])}, ValueError),
        ({"values": pa.array([b"v"]), "partitions": pa.array(["0"])}, TypeError),
        ({"values": pa.array([b"v"]), "timestamps": pa.array([0.5])}, TypeError),
    ],
)
def test_columns_that_are_no_messages_are_refused(columns, error):
    to, made = filling()
    with pytest.raises(error):
        exhaust(to.append_columns(MessageColumns("t", **columns)))
    assert made.is_flushed


def test_columns_for_a_topic_that_does_not_exist_are_refused():
    to, _ = filling()
    with pytest.raises(Unsendable, match="there is no topic 'nowhere'"):
        exhaust(to.append_columns(MessageColumns("nowhere", pa.array([b"v"]))))


@pytest.mark.parametrize("count", [0, 1, 300, _COLUMNS_FROM * 6, 25_000])
@pytest.mark.parametrize("has_keys", [False, True])
def test_many_messages_come_out_as_if_appended(count, has_keys):
    values = [
        None if number % 11 == 0 else f"wért {number}" if number % 2 else b"%d" % number for number in range(count)
    ]
    keys = [None if number % 7 == 0 else str(number % 13) for number in range(count)] if has_keys else None
    to, made = filling(Settings(partitioner="murmur2"))
    exhaust(to.append_many(MessageBatch("t", values, keys)))
    one, ones = filling(Settings(partitioner="murmur2"))
    for value, key in zip(values, keys or [None] * count, strict=True):
        append(one, "t", value, key)
    assert flushed(made) == flushed(ones)


@pytest.mark.parametrize(("queue_messages", "pauses"), [(100_000, 0), (300, 2)])
def test_hundreds_of_messages_go_together_unless_there_is_no_room(queue_messages, pauses):
    to, _ = filling(Settings(queue_messages=queue_messages))
    assert len(list(to.append_many(MessageBatch("t", [b"v"] * 1000, [b"k"] * 1000)))) == pauses


@pytest.mark.parametrize("count", [10, 20_000])
def test_many_messages_are_refused_as_one_is(count):
    to, _ = filling(Settings(max_message_bytes=1000))
    with pytest.raises(TypeError):
        exhaust(to.append_many(MessageBatch("t", [b"v"] * (count - 1) + [7], None)))
    with pytest.raises(Unsendable, match=f"row {count - 1} has 1001 bytes"):
        exhaust(to.append_many(MessageBatch("t", [b"v"] * (count - 1) + [b"x" * 965], None)))


def test_few_messages_import_no_arrow():
    script = """
import sys
from dualwrite.protocol.message import MessageBatch
from harness.filling import append, filling
to, made = filling()
list(to.append_many(MessageBatch("t", [b"v"] * 10_000, [b"k"] * 10_000)))
assert made.queued_messages == 10_000
assert "pyarrow" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=60)
