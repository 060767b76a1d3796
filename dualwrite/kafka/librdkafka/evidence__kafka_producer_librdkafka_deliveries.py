"""The delivery reports of one transaction: every message is known to be delivered, or the transaction must abort."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaError, Message

from dualwrite.kafka.engine import Callbacks

if TYPE_CHECKING:
    from dualwrite.protocol.message import DeliveryCallback

_NEVER_SENT: Final = frozenset({KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError._PURGE_QUEUE})


class Deliveries(Callbacks):
    """Counts the messages of one transaction and keeps the first offset by partition.

    Each transaction has its own instance, so a late report cannot count towards the next one.

    Attributes:
        produced: How many messages librdkafka took.
        delivered: How many of them the broker confirmed; stays 0 where only failures are reported.
        failed: How many were reported as failed.
        first_failure: The first failure's error and topic.
        first_offsets: By (topic, partition), the smallest offset reported.
        without_offset: Partitions with a confirmed message whose offset librdkafka did not know.
        failed_in: Partitions of failed messages, which may be in the log nevertheless.
    """

    def __init__(self) -> None:
        super().__init__()
        self.produced = 0
        self.delivered = 0
        self.failed = 0
        self.first_failure: tuple[KafkaError, str | None] | None = None
        self.first_offsets: dict[tuple[str, int], int] = {}
        self.without_offset: set[tuple[str, int]] = set()
        self.failed_in: set[tuple[str, int]] = set()

    def report(self, error: KafkaError | None, message: Message) -> None:
        """Take one delivery report; librdkafka calls it from ``poll`` and ``flush``."""
        if error is not None:
            self.failed += 1
            if error.code() in _NEVER_SENT:
                pass
            elif (failed_topic := message.topic()) is not None and (failed_partition := message.partition() or 0) >= 0:
                self.failed_in.add((failed_topic, failed_partition))
            if self.first_failure is None or _is_purge(self.first_failure[0]):
                self.first_failure = (error, message.topic())
            return
        self.delivered += 1
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        if offset is None or offset < 0:
            # A retried batch that the broker already had: it is in the log, but the answer carried no offset.
            self.without_offset.add((topic, partition))
            return
        known = self.first_offsets.get((topic, partition))
        if known is None or offset < known:
            self.first_offsets[(topic, partition)] = offset

    def reporting_to(self, callback: DeliveryCallback) -> DeliveryCallback:
        """A callback that takes the report and then calls the user's callback."""

        def report(error: KafkaError | None, message: Message) -> None:
            self.report(error, message)
            self.call(callback, error, message)

        return report

    @property
    def partitions(self) -> frozenset[tuple[str, int]]:
        """The partitions reported, for delivered and failed messages alike."""
        return frozenset({*self.first_offsets, *self.without_offset, *self.failed_in})


def _is_purge(error: KafkaError) -> bool:
    # librdkafka purges the rest after the failure that matters, and may report the purged messages first.
    return error.code() in {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}
