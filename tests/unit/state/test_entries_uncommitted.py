"""Uncommitted writes in memory against a dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from dualwrite.state.entries import UNCHANGED, Uncommitted

KEYS = st.binary(max_size=2)
WRITES = st.lists(st.tuples(KEYS, st.none() | st.binary(max_size=3)))


def filled(writes):
    uncommitted = Uncommitted()
    for key, value in writes:
        uncommitted.write(key, value)
    return uncommitted


@given(writes=WRITES, key=KEYS)
def test_the_newest_write_of_each_key_is_read(writes, key):
    assert filled(writes).get(key) == dict(writes).get(key, UNCHANGED)
    assert len(filled(writes)) == len(dict(writes))


@given(writes=WRITES, lower=st.none() | KEYS, upper=st.none() | KEYS, reverse=st.booleans())
def test_changes_of_a_range_are_in_order(writes, lower, upper, reverse):
    inside = [
        (key, value)
        for key, value in sorted(dict(writes).items(), key=lambda entry: entry[0], reverse=reverse)
        if (lower is None or lower <= key) and (upper is None or key < upper)
    ]
    assert filled(writes).changes(lower, upper, reverse=reverse) == inside


@given(writes=WRITES)
def test_the_size_is_that_of_the_newest_writes_alone(writes):
    uncommitted = filled(writes)
    assert uncommitted.size_bytes == filled(dict(writes).items()).size_bytes
    assert (uncommitted.size_bytes > 0) == bool(writes)
    uncommitted.clear()
    assert (uncommitted.size_bytes, len(uncommitted), uncommitted.changes()) == (0, 0, [])


def test_changes_are_a_copy_that_later_writes_leave_alone():
    uncommitted = filled([(b"a", b"1"), (b"c", b"3")])
    changes = uncommitted.changes()
    uncommitted.write(b"b", b"2")
    uncommitted.write(b"a", None)
    assert changes == [(b"a", b"1"), (b"c", b"3")]
