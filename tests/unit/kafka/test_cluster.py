"""Which broker to ask."""

import pytest

from dualwrite.kafka.cluster import internal_partition, rights_of


@pytest.mark.parametrize(
    ("key", "hashed"),
    [("", 0), ("a", 97), ("group", 98629247), ("polygenelubricants", 0), ("\N{GRINNING FACE}", 1772899)],
)
def test_a_key_belongs_to_the_partition_that_java_hashes_it_to(key, hashed):
    assert internal_partition(key, 2**31) == hashed


@pytest.mark.parametrize(("key", "partition"), [("polygenelubricants", 0), ("polygenelubricantt", (2**31 - 1) % 50)])
def test_a_negative_hash_counts_by_its_absolute_value_and_the_least_one_as_zero(key, partition):
    assert internal_partition(key, 50) == partition


def test_a_broker_tells_rights_by_bits_or_none():
    assert rights_of(1 << 4 | 1 << 8) == {"Write", "Describe"}
    assert rights_of(-(2**31)) is rights_of(0) is None
