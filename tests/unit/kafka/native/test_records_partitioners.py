"""A key lands where librdkafka puts it, and where Java puts it."""

import random
import struct

import pytest
from harness import librdkafka
from kafka.partitioner.default import murmur2 as kafka_pythons_murmur2

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.native.records import DEFAULT, NAMES, murmur2, partitioner

COUNTS = (1, 3, 7, 12, 100)
DRAW = random.Random(1)
KEYS = [
    *(b"customer %d" % number for number in range(30_000)),
    *(struct.pack(">q", number) for number in range(30_000)),
    *(DRAW.randbytes(DRAW.randrange(1, 40)) for _ in range(39_900)),
    *(DRAW.randbytes(size) for size in range(1, 101)),
]
ANYWHERE = {  # a message without a key, and one with an empty key
    "random": (True, True), "consistent": (False, False), "consistent_random": (True, True), "murmur2": (False, False),
    "murmur2_random": (True, False), "fnv1a": (False, False), "fnv1a_random": (True, False),
}  # fmt: skip
assert len(KEYS) == 100_000


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("random")])
def test_a_hundred_thousand_keys_land_where_librdkafkas_own_function_puts_them(name):
    ours, theirs = partitioner(name).partition, librdkafka.partitioner(name)
    for number, key in enumerate(KEYS):
        count = COUNTS[number % len(COUNTS)]
        assert ours(key, count) == theirs(key, count), (key, count)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in NAMES if name != "random"])
@pytest.mark.parametrize("count", [*COUNTS, 2**31 - 1])
def test_a_hundred_thousand_keys_land_there_with_any_number_of_partitions(name, count):
    ours, theirs = partitioner(name).partition, librdkafka.partitioner(name)
    assert [ours(key, count) for key in KEYS] == [theirs(key, count) for key in KEYS]


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_producer_of_librdkafka_sends_them_there(name):
    keys = [None, b"", *KEYS[::50]]
    ours = [partitioner(name).partition(key, librdkafka.MOCK_PARTITIONS) for key in keys]
    with librdkafka.producer(name) as produce:
        landed = produce(keys)
    assert [theirs for mine, theirs in zip(ours, landed, strict=True) if mine is not None] == [
        mine for mine in ours if mine is not None
    ]


@pytest.mark.parametrize(("name", "expected"), ANYWHERE.items())
def test_messages_without_a_home_are_those_that_librdkafka_sends_anywhere(name, expected):
    found = tuple(partitioner(name).partition(key, librdkafka.MOCK_PARTITIONS) is None for key in (None, b""))
    assert found == expected
    with librdkafka.producer(name, **{"sticky.partitioning.linger.ms": 0}) as produce:
        for key, is_anywhere in zip((None, b""), expected, strict=True):
            assert (len(set(produce([key] * 200))) > 1) is is_anywhere


def test_murmur2_is_javas():
    assert [murmur2(key) for key in KEYS[::20]] == [kafka_pythons_murmur2(key) & 0x7FFFFFFF for key in KEYS[::20]]


def test_the_default_is_librdkafkas_own():
    assert partitioner().name == DEFAULT == "consistent_random"


@pytest.mark.parametrize("name", ["", "murmur3", "RANDOM"])
def test_names_that_librdkafka_refuses_are_refused(name):
    with pytest.raises(ConfigurationError, match="partitioner"):
        partitioner(name)
