"""The parts of a message: taken as confluent-kafka takes them, and measured as librdkafka measures them."""

import pytest
from confluent_kafka import KafkaException, Producer
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import TransactionAborted
from dualwrite.kafka.error_codes import Code
from dualwrite.protocol.message import STEPS, Message, MessageBatch, Unsendable, as_bytes, as_headers, size_of


def check(topic="orders", value=b"v", **parts):
    return Message.checked(topic, value, **{"max_bytes": 1000, **parts})


@pytest.mark.parametrize(("given", "expected"), [(None, None), (b"", b""), ("", b""), ("ключ", "ключ".encode())])
def test_text_is_its_utf_8(given, expected):
    assert as_bytes(given, "key") == expected


@pytest.mark.parametrize("given", [1, bytearray(b"x"), memoryview(b"x"), ["x"]])
def test_other_types_are_refused_by_name(given):
    with pytest.raises(TypeError, match=f"a value is .* not {type(given).__name__}"):
        as_bytes(given, "value")


@pytest.mark.parametrize("given", [{"a": "1", "b": b"2", "ключ": None}, [("a", "1"), ("b", b"2"), ("ключ", None)]])
def test_headers_are_a_mapping_or_pairs(given):
    assert list(as_headers(given)) == [("a", b"1"), ("b", b"2"), ("ключ", None)]


def test_names_of_headers_may_repeat():
    assert list(as_headers([("a", b"1"), ("a", b"")])) == [("a", b"1"), ("a", b"")]


@pytest.mark.parametrize("given", [None, {}, []])
def test_there_may_be_no_headers(given):
    assert not check(headers=given).headers


@pytest.mark.parametrize(
    "given", ["ab", [("a",)], [("a", b"1", b"2")], {1: b"x"}, [(b"a", b"")], {"a": 1}, [1], [None], [(None, b"")]]
)
def test_headers_that_are_none_are_refused(given):
    with pytest.raises(TypeError):
        as_headers(given)


@pytest.mark.parametrize("given", [{"\ud800": b""}, {"a": "\ud800"}])
def test_surrogates_in_headers_are_refused(given):
    with pytest.raises(UnicodeEncodeError):
        as_headers(given)


@pytest.fixture(scope="module")
def librdkafka():
    """Whether librdkafka takes a message under a ``message.max.bytes`` of 1000."""
    producer = Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "", "log_level": 0, "message.max.bytes": 1000}
    )

    def takes(value, key, headers):
        try:
            producer.produce("t", value, key, headers=list(headers))
        except KafkaException as error:
            if error.args[0].name() != "MSG_SIZE_TOO_LARGE":
                raise
            return False
        producer.purge()
        producer.poll(0)
        return True

    yield takes
    producer.purge()
    producer.flush(0)


@given(
    st.none() | st.binary(max_size=400),
    st.lists(st.tuples(st.text(max_size=80, alphabet="aяЖ😀"), st.none() | st.binary(max_size=90)), max_size=3),
)
def test_a_message_is_as_large_as_librdkafka_counts(librdkafka, key, headers):
    rest = size_of(b"", key, headers)
    if rest <= 1000:
        assert librdkafka(b"x" * (1000 - rest), key, headers)
    assert not librdkafka(b"x" * max(1001 - rest, 0), key, headers)


def test_a_message_is_taken_whole_and_shares_nothing_with_its_caller():
    headers = [("h", "1")]
    found = check("a.b_c-9", "wért", headers=headers, partition=3, timestamp_ms=7, on_delivery=print)
    headers.append(("late", b""))
    assert found == Message("a.b_c-9", "wért".encode(), None, 3, [("h", b"1")], 7, print, found.size)
    assert found.size == size_of(found.value, None, found.headers)


def test_what_is_not_given_is_left_to_kafka():
    assert check() == Message("orders", b"v", None, None, (), None, None, size_of(b"v", None, ()))
    assert check(partition=-1).partition is None


@pytest.mark.parametrize("headers", [[("n", "1")], [["n", "1"]], {"n": "1"}])
def test_headers_that_change_later_stay_those_of_the_call(headers):
    found = check(headers=headers)
    if isinstance(headers, dict):
        headers["n"] = "2"
    elif isinstance(headers[0], list):
        headers[0][1] = "2"
    else:
        headers[:] = [("n", "2")]
    assert list(found.headers) == [("n", b"1")]


def test_many_messages_are_copied_and_checked_once():
    values, keys = ["1", b"22", None], ["k", None, b"kk"]
    batch = MessageBatch.of("sold", values, keys).checked(60)
    values.clear()
    keys.clear()
    assert batch[:3] == ("sold", [b"1", b"22", None], [b"k", None, b"kk"])
    assert batch.size == sum(size_of(value, key, ()) for value, key in zip(*batch[1:3], strict=True))
    assert batch.checked(1) is batch
    assert batch.messages == 3


@pytest.mark.parametrize(("wrong", "error"), [("x" * 30, Unsendable), (7, TypeError), ("\ud800", UnicodeEncodeError)])
def test_of_many_messages_the_one_that_cannot_be_sent_is_named(wrong, error):
    with pytest.raises(error) as raised:
        MessageBatch.of("sold", ["1", wrong], None).checked(60)
    assert error is not Unsendable or raised.value.detail.startswith("row 1 has")


def test_as_many_keys_as_values():
    with pytest.raises(ValueError, match="2 values, 1 keys"):
        MessageBatch.of("sold", ["1", "2"], ["k"])


IMPOSSIBLE = [
    *[({"topic": name}, "INVALID_TOPIC_EXCEPTION") for name in ("", "a b", "ä", "a/b", "a\n", "x" * 250, ".", "..")],
    *[({"partition": number}, "UNKNOWN_TOPIC_OR_PARTITION") for number in (-2, -(2**40), 2**31)],
    *[({"timestamp_ms": time}, "INVALID_TIMESTAMP") for time in (0, -1, -(2**70), 2**63)],
    ({"value": b"x" * 965}, "MESSAGE_TOO_LARGE"),
    ({"headers": {"h": b"x" * 960}}, "MESSAGE_TOO_LARGE"),
]


@pytest.mark.parametrize(("parts", "code"), IMPOSSIBLE)
def test_what_kafka_cannot_have_is_refused_for_good(parts, code):
    with pytest.raises(Unsendable) as refused:
        check(**parts)
    assert refused.value.code == code
    error = refused.value.refusal("orders", "tx-1")
    assert type(error) is TransactionAborted
    assert not error.retryable
    assert str(error) == f"tx-1: produce (orders): {refused.value.detail} ({code}) ({refused.value.step})"
    assert refused.value.step


@pytest.mark.parametrize("parts", [{"topic": "x" * 249}, {"value": b"x" * 964}, {"timestamp_ms": 1}])
def test_what_is_just_possible_is_taken(parts):
    assert check(**parts)


@pytest.mark.parametrize(
    "parts",
    [
        *[{"topic": topic} for topic in (None, b"orders", 7, ["orders"])],
        *[{"value": value} for value in (7, {"id": 1}, bytearray(b"x"), memoryview(b"x"))],
        *[{"key": key} for key in (7, (1, 2))],
        *[{"partition": partition} for partition in ("0", 0.0)],
        *[{"timestamp_ms": time} for time in ("now", 1.5)],
        *[{"headers": headers} for headers in (7, "ab", {"n": 1}, [None], [(None, b"")])],
        {"on_delivery": "no callable"},
    ],
)
def test_a_part_of_another_type_is_a_mistake_of_the_code(parts):
    with pytest.raises(TypeError):
        check(**parts)


@pytest.mark.parametrize("parts", [{"value": "\ud800"}, {"key": "\ud800"}, {"headers": {"\ud800": b""}}])
def test_a_surrogate_is_no_text(parts):
    with pytest.raises(UnicodeEncodeError):
        check(**parts)


def test_the_errors_are_named_as_the_protocol_does():
    assert {*STEPS, *(code for _, code in IMPOSSIBLE), "INVALID_RECORD"} <= set(Code.__members__)
