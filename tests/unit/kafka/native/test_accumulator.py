"""Messages that are appended come out of the batches: each once, in its order, in the right partition."""

import random

import pytest
from harness.filling import LEADER, NOW_MS, TOPICS, Settings, append, core, filling, flushed
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.cluster import Topic
from dualwrite.kafka.native.records import NAMES, partitioner
from dualwrite.protocol.message import Unsendable


def one_row(to, made, *args, **kwargs):
    append(to, *args, **kwargs)
    [(where, [row])] = flushed(made).items()
    return where, row


def test_a_message_comes_out_as_bytes():
    to, made = filling()
    where, row = one_row(to, made, "t", "wert", "ключ", partition=3, headers={"h": "1", "n": None}, timestamp_ms=5)
    assert where == ("t", 3)
    assert row == (b"wert", "ключ".encode(), [("h", b"1"), ("n", None)], 5)


def test_the_time_is_now_unless_it_is_given():
    to, made = filling()
    assert one_row(to, made, "t", b"v")[1] == (b"v", None, [], NOW_MS)


parts = st.none() | st.binary(max_size=60) | st.text(max_size=20)


@given(
    st.lists(st.tuples(parts, parts, st.none() | st.integers(-1, 5)), max_size=60),
    st.sampled_from(NAMES),
    st.sampled_from([100, 1000, 1_000_000]),
)
def test_every_message_comes_out_once_and_in_its_order(rows, name, batch_bytes):
    to, made = filling(Settings(partitioner=name, batch_bytes=batch_bytes))
    homes = partitioner(name)
    for number, (value, key, partition) in enumerate(rows):
        append(to, "t", value, key, partition=partition, timestamp_ms=number + 1, now=number / 1000)
    assert made.queued_messages == len(rows)
    found = flushed(made)
    assert made.queued_messages == made.queued_bytes == 0
    placed = {row[3]: (where, row) for where, its_rows in found.items() for row in its_rows}
    assert len(placed) == sum(map(len, found.values())) == len(rows)
    assert all(its_rows == sorted(its_rows, key=lambda row: row[3]) for its_rows in found.values())
    for number, (value, key, partition) in enumerate(rows):
        (topic, landed), row = placed[number + 1]
        expected = [one.encode() if isinstance(one, str) else one for one in (value, key)]
        assert topic == "t"
        assert row == (*expected, [], number + 1)
        home = homes.partition(expected[1], 6) if partition in {None, -1} else partition
        assert home is None or landed == home


def test_messages_without_a_key_stay_together_and_then_go_on():
    to, made = filling()
    for _ in range(50):
        append(to, "t", b"v")
    [first] = flushed(made)
    append(to, "t", b"v")
    [second] = flushed(made)
    assert first != second


def test_messages_without_a_key_go_where_a_leader_is():
    to, made = filling()
    for _ in range(20):
        append(to, "one-led", b"v")
        assert list(flushed(made)) == [("one-led", 1)]
    append(to, "none-led", b"v")
    [(topic, number)] = flushed(made)
    assert topic == "none-led"
    assert number in {0, 1}


def test_a_key_goes_home_though_its_partition_has_no_leader():
    to, made = filling(Settings(partitioner="murmur2"))
    key = next(key for key in map(str, range(100)) if partitioner("murmur2").partition(key.encode(), 3) == 2)
    assert one_row(to, made, "one-led", b"v", key)[0] == ("one-led", 2)


def test_a_partition_that_the_topic_has_got_meanwhile_is_found():
    grown = Topic("an-id", dict.fromkeys(range(7), LEADER))
    to, made = filling(look_up=lambda name, fresh: grown if fresh else TOPICS[name])
    made.learn("t", dict.fromkeys(grown.leaders, 1))
    append(to, "t", b"v", partition=5)
    append(to, "t", b"v", partition=6)
    with pytest.raises(Unsendable, match="has no partition 7, but 7 from 0"):
        append(to, "t", b"v", partition=7)
    assert flushed(made).keys() == {("t", 5), ("t", 6)}


@pytest.mark.parametrize(
    ("message", "code", "detail"),
    [
        ({"topic": "nowhere"}, "UNKNOWN_TOPIC_OR_PARTITION", "there is no topic 'nowhere'"),
        ({"partition": 6}, "UNKNOWN_TOPIC_OR_PARTITION", "topic 't' has no partition 6, but 6 from 0"),
        ({"partition": -2}, "UNKNOWN_TOPIC_OR_PARTITION", "the message names the partition -2"),
        ({"value": b"x" * 965}, "MESSAGE_TOO_LARGE", "the message has 1001 bytes, message.max.bytes is 1000"),
        ({"timestamp_ms": -1}, "INVALID_TIMESTAMP", "the message has the timestamp -1 ms"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_nothing_of_it_taken(message, code, detail):
    to, made = filling(Settings(max_message_bytes=1000))
    with pytest.raises(Unsendable) as refused:
        append(to, **{"topic": "t", "value": b"v", **message})
    assert (refused.value.code, refused.value.detail) == (code, detail)
    assert made.is_flushed
    append(to, "t", b"x" * 964)
    assert len(flushed(made)) == 1


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"value": 1}, TypeError),
        ({"key": 1}, TypeError),
        ({"headers": "x"}, TypeError),
        ({"headers": [("\ud800", b"")]}, UnicodeEncodeError),
        ({"value": "\ud800"}, UnicodeEncodeError),
    ],
)
def test_what_is_no_message_leaves_no_batch_open(message, error):
    to, made = filling()
    with pytest.raises(error):
        append(to, **{"topic": "t", "value": b"v", **message})
    assert made.is_flushed


def test_a_topic_is_looked_up_once_in_a_transaction():
    asked = []
    to, made = filling(look_up=lambda name, _fresh: asked.append(name) or TOPICS[name])
    for _ in range(3):
        append(to, "t", b"v", b"k")
    assert asked == ["t"]
    again = core(Settings())
    to.begin(again)
    assert one_row(to, again, "t", b"v", b"k")[1][0] == b"v"
    assert asked == ["t", "t"]
    assert len(flushed(made)) == 1


@pytest.mark.parametrize("settings", [Settings(queue_bytes=20), Settings(queue_messages=2)])
def test_it_is_full_until_something_is_acknowledged(settings):
    to, made = filling(settings)
    append(to, "t", b"x" * 15)
    assert not to.is_full
    append(to, "t", b"x" * 5)
    assert to.is_full
    flushed(made)
    assert not to.is_full


def test_a_partitioner_that_does_not_exist_is_refused():
    with pytest.raises(ConfigurationError, match="partitioner"):
        filling(Settings(partitioner="murmur3"))


def test_callbacks_stay_with_their_messages():
    to, made = filling()
    for number in range(3):
        append(to, "t", b"%d" % number, b"k", on_delivery=print if number != 1 else None)
    [request] = made.requests(60.0, flush=True)
    [batch] = request.batches.values()
    assert [(index, message.value) for index, message in batch.callbacks] == [(0, b"0"), (2, b"2")]


def test_keys_are_spread_over_all_partitions():
    to, made = filling(Settings(partitioner="murmur2_random"))
    draw = random.Random(1)
    for _ in range(200):
        append(to, "t", b"v", draw.randbytes(8))
    assert len(flushed(made)) == 6
