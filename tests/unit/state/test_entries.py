"""Merged scans against a dictionary into which the sources are written, the oldest first."""

from hypothesis import given
from hypothesis import strategies as st

from dualwrite.state.entries import end_of_prefix, merged, merged_changes

KEYS = st.binary(max_size=2)
SOURCE = st.dictionaries(KEYS, st.none() | st.binary(max_size=1), max_size=8)


@given(sources=st.lists(SOURCE, max_size=4), reverse=st.booleans())
def test_a_merged_scan_equals_the_sources_written_over_each_other(sources, reverse):
    written = {}
    for source in reversed(sources):
        written |= source
    ordered = [sorted(source.items(), reverse=reverse, key=lambda entry: entry[0]) for source in sources]
    expected = sorted(written.items(), reverse=reverse, key=lambda entry: entry[0])
    assert list(merged_changes(ordered, reverse=reverse)) == expected
    assert list(merged(ordered, reverse=reverse)) == [entry for entry in expected if entry[1] is not None]


@given(prefix=st.binary(max_size=3), key=st.binary(max_size=4))
def test_the_end_of_a_prefix_separates_its_keys_from_those_above(prefix, key):
    end = end_of_prefix(prefix)
    assert (prefix <= key and (end is None or key < end)) == key.startswith(prefix)
