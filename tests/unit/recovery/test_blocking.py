"""What holds back a consumer: open transactions in its topics, and in the offsets of its group."""

import pytest

from dualwrite.recovery.blocking import offsets_partition


@pytest.mark.parametrize(
    ("group", "hashed"),
    [("", 0), ("a", 97), ("group", 98629247), ("polygenelubricants", 0), ("\N{GRINNING FACE}", 1772899)],
)
def test_offsets_lie_where_java_hashes_the_group_to(group, hashed):
    assert offsets_partition(group, 2**31) == hashed
