"""Delivery reports: counted, and the first offset kept by partition."""

import pytest
from confluent_kafka import KafkaError, Message

from dualwrite.kafka.librdkafka.evidence import Deliveries


def message(partition=0, offset=0, topic="orders"):
    return Message(topic=topic, partition=partition, offset=offset)


def test_the_first_offset_of_each_partition_is_kept():
    deliveries = Deliveries()
    for partition, offset in [(0, 7), (1, 3), (0, 8), (1, 2), (0, 6)]:
        deliveries.report(None, message(partition, offset))
    assert deliveries.first_offsets == {("orders", 0): 6, ("orders", 1): 2}
    assert (deliveries.delivered, deliveries.failed) == (5, 0)


def test_a_message_that_is_there_without_an_offset_marks_its_partition():
    deliveries = Deliveries()
    deliveries.report(None, message(0, 7))
    deliveries.report(None, message(1, -1001))
    assert deliveries.without_offset == {("orders", 1)}
    assert deliveries.first_offsets == {("orders", 0): 7}
    assert deliveries.delivered == 2


FAILURE_AND_PURGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError._PURGE_QUEUE)


@pytest.mark.parametrize("order", [FAILURE_AND_PURGE, FAILURE_AND_PURGE[::-1]])
def test_what_failed_counts_before_what_was_purged_for_it(order):
    deliveries = Deliveries()
    for code in order:
        deliveries.report(KafkaError(code), message())
    error, topic = deliveries.first_failure
    assert error.code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert topic == "orders"
    assert (deliveries.delivered, deliveries.failed) == (0, 2)


def test_a_callback_of_the_users_is_called_after_the_report_is_taken():
    deliveries, seen = Deliveries(), []
    report = deliveries.reporting_to(lambda error, sent: seen.append((error, sent.offset(), deliveries.delivered)))
    report(None, message(0, 7))
    assert seen == [(None, 7, 1)]


def test_what_a_callback_raises_is_raised_once_later_and_the_report_counts(caplog):
    deliveries = Deliveries()
    mistake = ValueError("the user's mistake")

    def callback(error, sent):
        raise mistake

    report = deliveries.reporting_to(callback)
    report(None, message(0, 7))
    report(None, message(0, 8))
    assert deliveries.delivered == 2
    assert "a delivery callback raised" in caplog.text
    with pytest.raises(ValueError, match="the user's mistake") as raised:
        deliveries.raise_callback_error()
    assert raised.value is mistake
    deliveries.raise_callback_error()
