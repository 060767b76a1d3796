"""The parts of a message: taken as confluent-kafka takes them, and measured as librdkafka measures them."""

import pytest
from confluent_kafka import KafkaException, Producer
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.kafka.producer.native.filling.contents import Unsendable, as_bytes, as_headers, check_timestamp, size_of
from dualwrite.kafka.producer.native.wire.answers import Code


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
    assert not as_headers(given)


@pytest.mark.parametrize("given", ["ab", [("a",)], [("a", b"1", b"2")], {1: b"x"}, [(b"a", b"")], {"a": 1}, [1]])
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


@pytest.mark.parametrize("timestamp_ms", [-1, -(2**40), 2**63])
def test_impossible_timestamps_are_refused(timestamp_ms):
    with pytest.raises(Unsendable, match="row 7") as refused:
        check_timestamp(timestamp_ms, "row 7")
    assert refused.value.code is Code.INVALID_TIMESTAMP
