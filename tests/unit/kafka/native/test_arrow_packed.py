"""Byte strings that a database gives in one piece: one by one, and as a column of Arrow's."""

import pytest

from dualwrite.kafka.native.arrow import column_of
from dualwrite.protocol.values import PackedColumn


@pytest.mark.parametrize(
    "contents",
    [[], [b""], [None], [b"one", None, b"", b"three"], [None, b"x" * 300, None]],
    ids=["none", "an empty one", "a null", "nulls and empty ones", "a long one"],
)
def test_a_packed_column_has_what_was_packed(contents):
    packed = PackedColumn(b"".join(filter(None, contents)), [-1 if one is None else len(one) for one in contents])
    assert list(packed) == contents
    assert [packed[at] for at in range(len(packed))] == contents
    assert packed[1:] == contents[1:]
    assert column_of(packed).to_pylist() == contents
