"""Reads a topic to its end, as a ``read_committed`` consumer sees it."""

from __future__ import annotations

import secrets
import time
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.kafka.listed_offsets import PASSING, list_offsets

if TYPE_CHECKING:
    from collections.abc import Mapping

AT_ONCE = 10_000
# The least time for a broker to answer one request, even at the deadline: a shorter wait would prove nothing.
_ANSWER_S = 10.0


class Record(NamedTuple):
    """One message.

    Attributes:
        partition: Its partition.
        offset: Its offset there.
        key: Its key; None if it has none.
        value: Its value; None for a tombstone.
        headers: Its headers, in their order.
    """

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def read_committed(config: Mapping[str, str], topic: str, *, timeout_s: float = 120.0) -> list[Record]:
    """All committed messages of a topic, in order of partition and offset.

    Waits first until no transaction is open on the topic (every partition's last stable offset is its high watermark),
    so that the result is final for everything produced before the call.

    Args:
        config: Bootstrap servers and security settings for confluent-kafka, as from `EmbeddedKafka.client_config`.
        topic: The topic.
        timeout_s: Seconds that the whole call may take.

    Raises:
        Unavailable: A transaction stayed open, or the end was not reached in time.
        confluent_kafka.KafkaException: The brokers refused, with their reason.
    """
    deadline = Deadline(timeout_s)
    ends = _wait_for_stable_ends(AdminClient(dict(config)), topic, deadline)
    consumer = Consumer(
        {
            **config,
            "group.id": f"dualwrite-reading-{secrets.token_hex(8)}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            # The end of a partition shows in an empty answer, with which the broker waits for half a second otherwise.
            "fetch.wait.max.ms": 10,
            "auto.offset.reset": "earliest",
        }
    )
    with closing(consumer):
        # Assign instead of subscribing: this forms no group, which would take time and need an ACL.
        consumer.assign([TopicPartition(topic, partition, 0) for partition in ends])
        records = _read_to(ends, consumer, topic, deadline)
    return sorted(records)


def _read_to(ends: Mapping[int, int], consumer: Consumer, topic: str, deadline: Deadline) -> list[Record]:
    missing = {partition for partition, end in ends.items() if end > 0}
    records: list[Record] = []
    while missing:
        if deadline.expired:
            raise Unavailable(f"partitions {sorted(missing)} of {topic} were not read to their end in time")
        first = consumer.poll(min(0.2, deadline.remaining_s()))
        if first is None:
            continue
        for message in [first, *consumer.consume(AT_ONCE, timeout=0)]:  # with a timeout it would wait for as many
            partition, offset, error = message.partition(), message.offset(), message.error()
            assert partition is not None
            assert offset is not None
            if error is None:
                if offset < ends[partition]:
                    records.append(Record(partition, offset, message.key(), message.value(), _headers(message)))
            elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - the constant's public name
                raise KafkaException(error)
            elif offset >= ends[partition]:
                # Only the end-of-partition event counts: aborted messages and markers, which are never delivered, may
                # follow the last message.
                missing.discard(partition)
    return records


def _headers(message: Message) -> tuple[tuple[str, bytes | None], ...]:
    found = message.headers() or ()
    pairs = found.items() if isinstance(found, dict) else found
    return tuple((key, value.encode() if isinstance(value, str) else value) for key, value in pairs)


def stable_ends(config: Mapping[str, str], topic: str, *, timeout_s: float = 120.0) -> dict[int, int]:
    """The end of each partition, once no transaction is open on the topic; `Unavailable` if one stays open."""
    return _wait_for_stable_ends(AdminClient(dict(config)), topic, Deadline(timeout_s))


def _wait_for_stable_ends(admin: AdminClient, topic: str, deadline: Deadline) -> dict[int, int]:
    metadata = admin.list_topics(topic, timeout=max(_ANSWER_S, deadline.remaining_s())).topics[topic]
    if metadata.error is not None:
        raise KafkaException(metadata.error)
    partitions = sorted(metadata.partitions)
    while True:
        try:
            # Ask for the stable ends first: messages produced in between can only make the two differ.
            stable = _ends(admin, topic, partitions, IsolationLevel.READ_COMMITTED, deadline)
            high = _ends(admin, topic, partitions, IsolationLevel.READ_UNCOMMITTED, deadline)
        except KafkaException as refused:
            if refused.args[0].code() not in PASSING or deadline.expired:
                raise
            time.sleep(0.01)
            continue
        if stable == high:
            return high
        if deadline.expired:
            opened = {partition: stable[partition] for partition in partitions if stable[partition] != high[partition]}
            raise Unavailable(f"a transaction stays open on {topic}: last stable offset by partition {opened}")
        time.sleep(0.01)


def _ends(
    admin: AdminClient, topic: str, partitions: list[int], isolation: IsolationLevel, deadline: Deadline
) -> dict[int, int]:
    asked = {TopicPartition(topic, partition): OffsetSpec.latest() for partition in partitions}
    timeout_s = max(_ANSWER_S, deadline.remaining_s())
    found = list_offsets(admin, asked, isolation, timeout_s=timeout_s)
    return {where.partition: offset for where, offset in found.items()}
