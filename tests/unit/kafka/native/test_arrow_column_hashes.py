"""The hashes of a column of keys are those of each key."""

import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.kafka.native.arrow import hashes
from dualwrite.kafka.native.records import fnv1a, murmur2, partitioner

DRAW = random.Random(1)
KEYS = [DRAW.randbytes(size) for size in [*range(300)] * 3]
ONES = [murmur2, fnv1a, partitioner("consistent").hash]


@given(st.lists(st.binary(max_size=70)), st.sampled_from(ONES), st.integers(0, 3))
def test_every_hash_is_that_of_its_key(keys, one, before):
    column = pa.array([b"other"] * before + keys, pa.large_binary())[before:]
    assert hashes(column, one).tolist() == [one(key) for key in keys]


@pytest.mark.parametrize("one", ONES)
def test_keys_of_every_length_are_hashed(one):
    assert hashes(pa.array(KEYS, pa.large_binary()), one).tolist() == [one(key) for key in KEYS]
