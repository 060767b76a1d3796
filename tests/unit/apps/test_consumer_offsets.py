"""Offsets as rows, on a consumer that knows a log: an offset that the log does not hold stops the member."""

from types import SimpleNamespace

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException

from dualwrite.apps.consumer.offsets import RowOffsets
from dualwrite.apps.consumer.partitions import Partition
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.stores.consumed import NOTHING_YET, ClaimedOffset

AT = ("input", 0)


@pytest.fixture
def start():
    """Takes over the partition with this row, of this log."""

    def start(offset, log):
        def watermarks(_, **_options):
            if isinstance(log, Exception):
                raise log
            return log

        rows = SimpleNamespace(claim=lambda _: {AT: ClaimedOffset(1, offset)})
        coordinator = SimpleNamespace(topic_ids=lambda *_: {})
        consumer = SimpleNamespace(get_watermark_offsets=watermarks)
        return RowOffsets(rows, coordinator).start(consumer, [Partition(AT)])[AT]

    return start


@pytest.mark.parametrize("offset", [5, 7, 10])
def test_an_offset_that_the_log_holds_or_ends_with_is_read_from(start, offset):
    assert start(offset, (5, 10)) == offset


@pytest.mark.parametrize(
    ("offset", "words"), [(4, "deleted before they were consumed"), (11, "lost messages at its end")]
)
def test_an_offset_outside_the_log_stops_the_member_with_what_to_do(start, offset, words):
    with pytest.raises(ConfigurationError, match=words) as raised:
        start(offset, (5, 10))
    assert "dualwrite_consumed" in raised.value.next_step


def test_a_group_that_has_consumed_nothing_asks_for_no_log(start):
    assert start(NOTHING_YET, AssertionError()) == OFFSET_INVALID


@pytest.mark.parametrize("log", [None, KafkaException(KafkaError(KafkaError._TIMED_OUT))])
def test_a_log_that_is_not_known_is_asked_for_again(start, log):
    with pytest.raises(Unavailable, match="are not known"):
        start(5, log)
