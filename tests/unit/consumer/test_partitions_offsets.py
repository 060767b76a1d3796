"""Offsets as rows, on a consumer that knows a log: an offset that the log does not hold stops the member."""

import struct
from types import SimpleNamespace

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException

from dualwrite.consumer.partitions import KafkaOffsets, Partition, PartitionLost, RowOffsets, Unit
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.kafka.native.coordination import Group, group_of
from dualwrite.stores.sql.consumed import NOTHING_YET, ClaimedOffset

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


def test_rows_move_in_the_transaction_that_writes_what_was_read():
    row, moves, ours = ClaimedOffset(1, 3), [], [True, False]
    rows = SimpleNamespace(move=lambda *given: moves.append(given) or ours.pop(0))
    offsets, unit = RowOffsets(rows, None), Unit([Partition(AT, claimed=row)], [])
    transaction = SimpleNamespace(connection="the transaction's")
    offsets.move(transaction, unit, {AT: 5})
    assert moves == [("the transaction's", AT, row, 5)]
    with pytest.raises(PartitionLost):
        offsets.move(transaction, unit, {AT: 5})


def test_offsets_in_kafka_name_the_member_and_its_generation():
    sent, offsets, unit = [], KafkaOffsets(), Unit([Partition(AT)], [])
    transaction = SimpleNamespace(send_offsets_to_transaction=lambda *given: sent.append(given))
    with pytest.raises(PartitionLost):
        offsets.move(transaction, unit, {AT: 5})
    for member, generation in (("member-1", 7), ("", -1)):  # then it was expelled, and has not joined again
        metadata = b"CGMDv2:" + struct.pack("=i", generation) + b"group\0" + member.encode() + b"\0\1"
        offsets.membership(SimpleNamespace(consumer_group_metadata=lambda metadata=metadata: metadata))
    offsets.move(transaction, unit, {AT: 5})
    [([moved], membership)] = sent
    assert (moved.topic, moved.partition, moved.offset) == (*AT, 5)
    assert group_of(membership) == Group("group", 7, "member-1")
