"""Sets of partition numbers as text: every set survives, has one text, and a short text cannot fill the memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.protocol.prepared_state import MAX_PARTITION, parsed, written

SMALL = st.sets(st.integers(0, 200), min_size=1)
ANY = SMALL | st.sets(st.integers(0, MAX_PARTITION), min_size=1, max_size=5)


@given(ANY)
def test_every_set_is_read_back(numbers):
    in_order = sorted(numbers)
    assert parsed(written(in_order), len(in_order)) == in_order


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0], "0"),
        ([0, 1], "0-1"),
        ([0, *range(40, 47)], "0,40-46"),
        ([*range(2, 10_000)], "2-9999"),
        ([0, 2, 4, 6, 8, 10, 12, 14], "~VVU"),
        ([0, MAX_PARTITION], "0,2147483647"),
    ],
)
def test_the_shorter_form_is_written(numbers, text):
    assert written(numbers) == text


def test_ranges_are_written_where_both_forms_are_equally_long():
    assert written([1, 3]) == "1,3"
    assert len("1,3") == len("~Cg")
    assert parsed("~Cg", 2) == [1, 3]


@pytest.mark.parametrize("text", ["0-9", "0,1,2,3,4,5,6,7,8,9", "~_wM"])
def test_more_partitions_than_are_accepted_are_refused_before_they_are_listed(text):
    assert parsed(text, 10) == [*range(10)]
    with pytest.raises(ValueError, match="too many"):
        parsed(text, 9)


def test_billions_of_partitions_in_a_short_text_are_refused():
    with pytest.raises(ValueError, match="too many"):
        parsed(f"0-{MAX_PARTITION}", 1_000_000)


@pytest.mark.parametrize(
    "text",
    ["", ",", "1,", "-1", "1-", "1-1", "2-1", "01", "1-02", "1 ", "+1", "٣", "1--2", str(MAX_PARTITION + 1), "~", "~A", "~A=", "~é"],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="not a range|not base64"):
        parsed(text, 100)
