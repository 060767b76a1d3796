"""Varints of columns, held against those of single values."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.kafka.native.arrow import rows, sizes
from dualwrite.kafka.native.records import varint

LENGTHS = st.integers(-1, 300) | st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(LENGTHS, LENGTHS)))
def test_the_fields_of_each_row_lie_behind_each_other(numbers):
    firsts, seconds = (np.array([pair[place] for pair in numbers], np.int64) for place in (0, 1))
    content, offsets = rows([firsts, b"\0ab", seconds, b"\x01"], len(numbers))
    expected = [varint(first) + b"\0ab" + varint(second) + b"\x01" for first, second in numbers]
    assert content.tobytes() == b"".join(expected)
    assert np.diff(offsets).tolist() == [len(one) for one in expected]
    assert sizes(firsts).tolist() == [len(varint(first)) for first, _ in numbers]


def test_fields_that_are_the_same_in_every_row_need_no_column():
    content, offsets = rows([b"\0", b"ab"], 3)
    assert (content.tobytes(), offsets.tolist()) == (b"\0ab\0ab\0ab", [0, 3, 6, 9])
