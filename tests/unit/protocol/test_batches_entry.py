"""May a run of a batch go on with what former runs have recorded: the whole space of what can be recorded."""

from dataclasses import replace
from itertools import product

import pytest

from dualwrite.protocol.batches import Destination, Entry, Recorded, Way, mismatch_of, next_entry

ORDERS = Destination(Way.WHOLE, '"public"."orders"', "orders", "cluster")
OTHERS = [
    replace(ORDERS, table='"public"."items"'),
    replace(ORDERS, topic="items"),
    replace(ORDERS, topic=Destination.topics_of_column("orders")),
    replace(ORDERS, cluster_id="another"),
]
EVERY = [replace(one, way=way) for one, way in product([ORDERS, *OTHERS], Way)]


@pytest.mark.parametrize("destination", EVERY)
def test_the_text_form_is_the_destination(destination):
    assert Destination.parse(destination.text()) == destination


@pytest.mark.parametrize("topic", ["orders", "items", "column:orders"])
@pytest.mark.parametrize("destination", [*EVERY, replace(ORDERS, table='"topic": "items"')])
def test_the_text_form_shows_the_topic(destination, topic):
    assert (Destination.text_of(topic) in destination.text()) is (destination.topic == topic)


@pytest.mark.parametrize(("present", "whole_written"), list(product(EVERY, [True, False])))
def test_a_batch_goes_on_where_it_was_begun(present, whole_written):
    assert next_entry(Recorded(True, present, whole_written), present) is Entry.GO_ON


@pytest.mark.parametrize(("former", "present", "whole_written"), list(product(EVERY, EVERY, [True, False])))
def test_it_goes_elsewhere_only_where_it_has_left_nothing(former, present, whole_written):
    if former == present:
        return
    left_nothing = former.way is Way.WHOLE and not whole_written
    expected = Entry.INSTEAD if left_nothing else Entry.REFUSED
    assert next_entry(Recorded(True, former, whole_written), present) is expected


@pytest.mark.parametrize("way", Way)
def test_the_rows_of_an_older_library_tell_the_way(way):
    present = replace(ORDERS, way=way)
    assert next_entry(Recorded(False, None, whole_written=False), present) is Entry.FIRST
    as_one = next_entry(Recorded(False, None, whole_written=True), present)
    assert as_one is (Entry.GO_ON if way is Way.WHOLE else Entry.REFUSED)
    by_partitions = next_entry(Recorded(True, None, whole_written=False), present)
    assert by_partitions is (Entry.GO_ON if way is Way.PARTITIONS else Entry.REFUSED)


@pytest.mark.parametrize("other", OTHERS)
def test_the_error_names_both(other):
    words = mismatch_of(Recorded(True, other, whole_written=True), ORDERS)
    assert 'table "public"."orders" and topic \'orders\'' in words
    for part in ("items", "column 'orders'", "another"):
        assert (part in words) == (part in other.shown(cluster=True))


def test_the_error_names_the_ways():
    former = replace(ORDERS, way=Way.PARTITIONS)
    assert "partition by partition; and is now for" in mismatch_of(Recorded(True, former, False), ORDERS)
    assert "was written as one and is now" in mismatch_of(Recorded(False, None, True), former)
