"""Every mistake of a message, by every way to produce it: both engines raise the same class, and none says "try again"."""

import re

import pyarrow as pa
import pytest
from harness.engines import answered, quick

from dualwrite.errors import TransactionAborted
from dualwrite.protocol.lives import ProducerState

BINARY, LARGE = pa.binary(), b"x" * 1_000_001
PAIRS = pa.list_(pa.struct([("key", pa.string()), ("value", BINARY)]))
NAMES = ["a b", "", ".", "..", "ä", "a/b", "x" * 250]

REFUSED = [
    *[({"topic": name}, "INVALID_TOPIC_EXCEPTION") for name in NAMES],
    ({"topic": "missing"}, "UNKNOWN_TOPIC_OR_PART"),
    ({"value": LARGE}, "MESSAGE_TOO_LARGE"),
    ({"key": LARGE}, "MESSAGE_TOO_LARGE"),
    ({"headers": {"h": LARGE}}, "MESSAGE_TOO_LARGE"),
    *[({"partition": number}, "partition") for number in (-2, 99, 2**31)],
    *[({"timestamp_ms": time}, "INVALID_TIMESTAMP") for time in (0, -1, -(10**12), 2**63)],
]
"""Parts that Kafka cannot have: the work would fail again as it is, and the transaction must abort."""
MISTYPED = [
    *[{"topic": topic} for topic in (None, b"orders", 7)],
    *[{"value": value} for value in (7, 1.5, {"id": 1}, ["x"], bytearray(b"x"), memoryview(b"x"))],
    *[{"key": key} for key in (7, (1, 2), bytearray(b"x"))],
    *[{"partition": partition} for partition in ("0", 0.0)],
    *[{"timestamp_ms": time} for time in ("now", 1.5)],
    *[{"headers": headers} for headers in (7, "ab", {"n": 1}, {None: b""}, [None], [("n",)], [(None, b"")])],
    {"on_delivery": "no callable"},
]
"""Parts of a wrong type: nothing is taken, and the transaction continues."""
SURROGATES = [{"value": "\ud800"}, {"key": "\ud800"}, {"headers": {"\ud800": b""}}, {"headers": {"h": "\ud800"}}]


COLUMNS = [
    *[({"topic": name}, "INVALID_TOPIC_EXCEPTION") for name in NAMES],
    ({"values": pa.array([b"v", LARGE])}, "row 1 .*MESSAGE_TOO_LARGE"),
    *[({"partitions": pa.array([0, number])}, "partition") for number in (-2, 99, 2**31)],
    *[({"timestamps": pa.array([1, time])}, f"row 1 .* {time} ms .*INVALID_TIMESTAMP") for time in (0, -1, -(10**12))],
    ({"timestamps": pa.array([1, 2**63], pa.uint64())}, f"row 1 .* {2**63} ms .*INVALID_TIMESTAMP"),
    *[
        ({"headers": pa.array([[("h", b"")], entries], PAIRS)}, "row 1 has a header without a name")
        for entries in ([None], [("h", b""), (None, b"")])
    ],
]
"""The same in columns, where a row can also have a header without a name."""


def many(parts):
    """Whether `produce_many` can make the mistake."""
    return parts.keys() <= {"topic", "value", "key"}


def described(parts):
    return ", ".join(f"{name}={repr(part)[:40]}" for name, part in parts.items())


@pytest.fixture
def producer(ready, producer_engine):
    return ready(quick(producer_engine))


def hold_refused(producer, topic, mistakes, produce):
    """Each mistake aborts its transaction, says that it would fail again, and leaves a producer that continues."""
    for parts, said in mistakes:
        producer.begin_transaction()
        with pytest.raises(TransactionAborted) as raised:
            produce(parts)
            producer.prepare_transaction()  # what only a broker can know librdkafka finds at the end
        told = str(raised.value).replace("MSG_SIZE", "MESSAGE")
        assert re.search(said, told), (described(parts), told[:300])
        assert not raised.value.retryable, described(parts)
        assert raised.value.transactional_id == producer.transactional_id
        assert producer.state is ProducerState.FAILED, described(parts)
        answered(producer)
        producer.abort_transaction()
        assert producer.state is ProducerState.READY
    producer.begin_transaction()
    producer.produce(topic, b"next", partition=0)
    producer.commit_transaction()


def hold_mistyped(producer, topic, mistakes, produce):
    """Each mistake is one of the code: nothing is taken, and the same transaction continues."""
    producer.begin_transaction()
    for parts, error in mistakes:
        with pytest.raises(error):
            produce(parts)
            pytest.fail(f"taken: {described(parts)}")
        assert producer.state is ProducerState.BEGUN, described(parts)
    producer.produce(topic, b"next", partition=0)
    producer.commit_transaction()


def test_a_message_that_kafka_cannot_have_is_refused_for_good(producer, dualwrite_topic, values):
    message = {"topic": dualwrite_topic, "value": b"v"}
    hold_refused(producer, dualwrite_topic, REFUSED, lambda parts: producer.produce(**{**message, **parts}))
    assert values() == [b"next"]


@pytest.mark.parametrize("count", [3, 2_000], ids=["few", "as-columns"])
def test_so_is_one_of_many_messages(producer, dualwrite_topic, values, count):
    def produce(parts):
        rows = [[b"v"] * (count - 1) + [parts.get(part, b"v")] for part in ("value", "key")]
        producer.produce_many(parts.get("topic", dualwrite_topic), *rows)

    hold_refused(producer, dualwrite_topic, [row for row in REFUSED if many(row[0])], produce)
    assert values() == [b"next"]


def test_so_is_a_row_of_columns_and_it_is_named(producer, dualwrite_topic, values):
    columns = {"topic": dualwrite_topic, "values": pa.array([b"v", b"v"])}
    hold_refused(producer, dualwrite_topic, COLUMNS, lambda parts: producer.produce_arrow(**{**columns, **parts}))
    assert values() == [b"next"]


def test_a_part_of_another_type_is_a_mistake_of_the_code_and_the_transaction_continues(
    producer, dualwrite_topic, values
):
    message = {"topic": dualwrite_topic, "value": b"v"}
    mistakes = [*((parts, TypeError) for parts in MISTYPED), *((parts, UnicodeEncodeError) for parts in SURROGATES)]
    hold_mistyped(producer, dualwrite_topic, mistakes, lambda parts: producer.produce(**{**message, **parts}))
    assert values() == [b"next"]


@pytest.mark.parametrize("count", [1, 2_000], ids=["one", "as-columns"])
def test_so_is_one_of_many_messages_of_another_type(producer, dualwrite_topic, values, count):
    def produce(parts):
        rows = [[parts.get(part, b"v")] * count for part in ("value", "key")]
        producer.produce_many(parts.get("topic", dualwrite_topic), *rows)

    mistakes = [(parts, TypeError) for parts in MISTYPED if many(parts)]
    hold_mistyped(producer, dualwrite_topic, mistakes, produce)
    assert values() == [b"next"]


def test_so_is_a_column_of_another_type(producer, dualwrite_topic, values):
    columns = {"topic": dualwrite_topic, "values": pa.array([b"v"])}
    mistakes = [
        *[{"topic": topic} for topic in (None, b"orders", 7)],
        *[{name: pa.array([1])} for name in ("values", "keys", "headers")],
        {"partitions": pa.array(["0"])},
        {"timestamps": pa.array([0.5])},
    ]
    hold_mistyped(
        producer,
        dualwrite_topic,
        [(parts, TypeError) for parts in mistakes],
        lambda parts: producer.produce_arrow(**{**columns, **parts}),
    )
    assert values() == [b"next"]
