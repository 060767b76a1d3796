"""The ranges of batches: each goes on where the last one ended, and values that are none are refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dualwrite import ConfigurationError
from dualwrite.units import BatchRange
from dualwrite.units.records import Offsets, following

names = some.tuples(some.sampled_from(["t", "u"]), some.integers(0, 2))


@given(some.text(max_size=20), some.text(max_size=5), *[some.integers(0, 2**62)] * 3)
def test_a_range_is_read_as_it_was_written(batch, topic, partition, begin, more):
    one = BatchRange(batch, topic, partition, begin, begin + more)
    assert BatchRange.decoded(one.encoded()) == one


GOOD = {"batch": "b", "topic": "t", "partition": 0, "begin": 1, "end": 2}


def test_a_field_of_a_later_version_is_passed_over():
    assert BatchRange.decoded(json.dumps({**GOOD, "rows": 7}).encode()) == BatchRange("b", "t", 0, 1, 2)


@pytest.mark.parametrize(
    "changed",
    [{"end": 0}, {"partition": -1}, {"begin": -1}, {"end": "2"}, {"partition": True}, {"batch": None}, {"topic": 1}],
)
def test_a_range_that_cannot_be_is_refused(changed):
    with pytest.raises(ConfigurationError, match="let nothing but the sink write"):
        BatchRange.decoded(json.dumps({**GOOD, **changed}).encode())


@pytest.mark.parametrize("value", [None, b"", b"{}", b"[]", b"1", b"\xff"])
def test_a_value_that_is_no_range_is_refused(value):
    with pytest.raises(ConfigurationError, match="not a record of a unit topic"):
        BatchRange.decoded(value)


def test_the_first_batch_takes_all_that_the_topic_holds():
    found = {("t", 1): Offsets(0, 0), ("t", 0): Offsets(3, 9)}
    assert following("b", None, found) == [BatchRange("b", "t", 0, 3, 9), BatchRange("b", "t", 1, 0, 0)]


def test_a_batch_goes_on_where_the_last_one_ended_even_if_retention_has_gone_further():
    last = [BatchRange("a", "t", 0, 0, 5)]
    assert following("b", last, {("t", 0): Offsets(7, 9)}) == [BatchRange("b", "t", 0, 5, 9)]


def test_a_partition_that_was_added_counts_from_its_beginning():
    last = [BatchRange("a", "t", 0, 0, 5)]
    found = {("t", 0): Offsets(0, 5), ("t", 1): Offsets(0, 2)}
    assert following("b", last, found) == [BatchRange("b", "t", 0, 5, 5), BatchRange("b", "t", 1, 0, 2)]


def test_nothing_added_is_no_batch():
    assert following("b", [BatchRange("a", "t", 0, 0, 5)], {("t", 0): Offsets(0, 5)}) == []
    assert following("b", None, {("t", 0): Offsets(0, 0)}) == []


def test_a_topic_that_was_created_again_is_refused():
    with pytest.raises(ConfigurationError, match="created again"):
        following("b", [BatchRange("a", "t", 0, 0, 5)], {("t", 0): Offsets(0, 4)})


@given(some.lists(some.dictionaries(names, some.integers(0, 5), min_size=1), max_size=5))
def test_batches_follow_each_other_without_gaps_and_without_overlaps(grown):
    ends, last, covered = {}, None, {}
    for number, growth in enumerate(grown):
        for name, more in growth.items():
            ends[name] = ends.get(name, 0) + more
        made = following(str(number), last, {name: Offsets(0, end) for name, end in ends.items()})
        for one in made:
            assert one.begin == covered.get(one.name, 0)
            covered[one.name] = one.end
        last = made or last
    assert {name: end for name, end in covered.items() if end} == {name: end for name, end in ends.items() if end}
