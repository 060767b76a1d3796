"""Varints of one value, held against kafka-python's."""

from hypothesis import given
from hypothesis import strategies as st
from kafka.record.util import decode_varint, encode_varint

from dualwrite.kafka.native.records import MINUS_ONE, SHORT, varint


@given(st.integers(-(2**63), 2**63 - 1) | st.integers(-70, 20_000))
def test_a_varint_is_the_one_that_kafka_python_writes_and_reads(value):
    encoded = bytearray()
    encode_varint(value, encoded.append)
    assert varint(value) == encoded
    assert decode_varint(encoded, 0) == (value, len(encoded))


def test_those_that_are_looked_up_are_those_that_are_made():
    assert list(SHORT) == [varint(value) for value in range(len(SHORT))]
    assert varint(-1) == MINUS_ONE
