"""Where messages without a key go: together while a batch collects, then on to another partition."""

import itertools
import random
from collections import Counter

from dualwrite.kafka.native.accumulator import StickyPartitions
from dualwrite.protocol.message import OVERHEAD

ALL = (0, 1, 2, 3)


def sticky(sticky_s=10.0, batch_bytes=1_000_000):
    return StickyPartitions(sticky_s, batch_bytes, random.Random(1).choice)


def collecting(_):
    return True


def test_messages_stay_together_while_the_batch_collects():
    to = sticky()
    assert len({to.one_message("t", ALL, 10, 0.0, collecting) for _ in range(100)}) == 1


def test_they_go_on_when_the_batch_was_sent():
    to = sticky()
    found = [to.one_message("t", ALL, 10, 0.0, lambda _: False) for _ in range(2000)]
    assert all(one != other for one, other in itertools.pairwise(found))
    assert all(400 < times < 600 for times in Counter(found).values())


def test_they_go_on_before_the_batch_would_overflow():
    to = sticky(batch_bytes=10 * (90 + OVERHEAD))
    found = [to.one_message("t", ALL, 90, 0.0, collecting) for _ in range(100)]
    runs = [found[first : first + 10] for first in range(0, 100, 10)]
    assert all(len(set(run)) == 1 for run in runs)
    assert all(one[0] != other[0] for one, other in itertools.pairwise(runs))


def test_a_message_larger_than_a_batch_has_a_partition_too():
    assert sticky(batch_bytes=100).one_message("t", ALL, 1000, 0.0, collecting) in ALL


def test_they_go_on_after_the_sticky_linger():
    to = sticky(sticky_s=0.01)
    first = to.one_message("t", ALL, 10, 1.0, collecting)
    assert to.one_message("t", ALL, 10, 1.009, collecting) == first
    assert to.one_message("t", ALL, 10, 1.011, collecting) != first


def test_without_a_sticky_linger_each_message_goes_anywhere():
    to = sticky(sticky_s=0.0)
    found = [to.one_message("t", ALL, 10, 0.0, collecting) for _ in range(4000)]
    assert all(800 < times < 1200 for times in Counter(found).values())
    assert any(one == other for one, other in itertools.pairwise(found))


def test_the_only_partition_is_kept():
    to = sticky()
    assert {to.one_message("t", (3,), 10, 0.0, lambda _: False) for _ in range(10)} == {3}


def test_topics_have_partitions_of_their_own():
    to = sticky()
    first = to.one_message("t", ALL, 10, 0.0, collecting)
    assert to.one_message("u", (9,), 10, 0.0, collecting) == 9
    assert to.one_message("t", ALL, 10, 0.0, collecting) == first


def test_whole_batches_go_where_the_fewest_bytes_went():
    to = sticky()
    load = Counter()
    for size in [1000, 10] * 200:
        load[to.whole_batch("t", ALL, size)] += size
    assert max(load.values()) - min(load.values()) <= 1000


def test_a_transaction_spreads_its_batches_without_regard_to_the_last_one():
    to = sticky()
    found = Counter()
    for _ in range(400):
        to.begin()
        found[to.whole_batch("t", ALL, 5)] += 1
        to.whole_batch("t", (0,), 1_000_000)
    assert all(50 < found[one] < 150 for one in ALL)
