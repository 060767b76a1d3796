"""The state of the simulated broker, and how to find one's way in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from dualwrite.testing.simulator.coordinator import TransactionMetadata
from dualwrite.testing.simulator.partition import Partition
from dualwrite.testing.simulator.requests import TopicPartition

OFFSETS_TOPIC: Final = "__consumer_offsets"


class Broker(NamedTuple):
    """The state of the whole broker.

    Attributes:
        transactions: What the coordinator knows of each transactional id, in order of the id.
        partitions: The partitions with their logs, in order of topic and number.
        next_producer_id: The next producer id to give away.
        topics_made: How many topics there ever were; makes their ids.
        coordinator_epoch: Raised by every restart; stands in the markers.
        clock_ms: The broker's clock.
        max_timeout_ms: ``transaction.max.timeout.ms``.
        cluster_id: The cluster's id.
        suspended: The partitions whose leader is suspended: no connection breaks, and nothing is answered.
        leaderless: Those of them that have no leader any more, since its session has ended. Markers for them are skipped.
    """

    transactions: tuple[TransactionMetadata, ...] = ()
    partitions: tuple[Partition, ...] = ()
    next_producer_id: int = 0
    topics_made: int = 0
    coordinator_epoch: int = 0
    clock_ms: int = 0
    max_timeout_ms: int = 900_000
    cluster_id: str = "simulated"
    suspended: tuple[TopicPartition, ...] = ()
    leaderless: tuple[TopicPartition, ...] = ()


def new_broker(
    topics: Mapping[str, int],
    *,
    offsets_partitions: int = 2,
    max_timeout_ms: int = 900_000,
    cluster_id: str = "simulated",
) -> Broker:
    """A broker with these topics and nothing in them.

    Args:
        topics: Names, with the number of partitions.
        offsets_partitions: How many partitions ``__consumer_offsets`` has.
        max_timeout_ms: ``transaction.max.timeout.ms``.
        cluster_id: The cluster's id.
    """
    broker = Broker(max_timeout_ms=max_timeout_ms, cluster_id=cluster_id)
    for name, count in {OFFSETS_TOPIC: offsets_partitions, **topics}.items():
        broker = create_topic(broker, name, count)
    return broker


def transaction(broker: Broker, transactional_id: str) -> TransactionMetadata | None:
    """What the coordinator knows of the id, None if nothing."""
    for known in broker.transactions:
        if known.transactional_id == transactional_id:
            return known
    return None


def partition(broker: Broker, topic_partition: TopicPartition) -> Partition | None:
    """The partition, None if there is none."""
    for found in broker.partitions:
        if found.topic_partition == topic_partition:
            return found
    return None


def topic_id(broker: Broker, topic: str) -> str | None:
    """The id of a topic, None if there is none of that name."""
    found = partition(broker, (topic, 0))
    return found.topic_id if found else None


def offsets_partition(broker: Broker, group_id: str) -> TopicPartition:
    """The partition of ``__consumer_offsets`` that holds the offsets of a group."""
    count = sum(1 for found in broker.partitions if found.topic_partition[0] == OFFSETS_TOPIC)
    hashed = 0
    for char in group_id:  # Java's String.hashCode, without its sign
        hashed = (31 * hashed + ord(char)) & 0xFFFFFFFF
    return OFFSETS_TOPIC, (hashed & 0x7FFFFFFF) % count


def with_transaction(broker: Broker, known: TransactionMetadata) -> Broker:
    """The broker that knows this of a transactional id, and of the others what it knew."""
    transactions = broker.transactions
    for index, other in enumerate(transactions):
        if other.transactional_id == known.transactional_id:
            return broker._replace(transactions=(*transactions[:index], known, *transactions[index + 1 :]))
    return broker._replace(transactions=tuple(sorted([*transactions, known])))


def with_partition(broker: Broker, written: Partition) -> Broker:
    """The broker with this partition in the place of the one of that name."""
    partitions = broker.partitions
    for index, other in enumerate(partitions):
        if other.topic_partition == written.topic_partition:
            return broker._replace(partitions=(*partitions[:index], written, *partitions[index + 1 :]))
    return broker


def create_topic(broker: Broker, name: str, partitions: int) -> Broker:
    """Create a topic, with an id that no topic had before."""
    made = broker.topics_made + 1
    new = [Partition((name, number), f"topic-{made}") for number in range(partitions)]
    return broker._replace(topics_made=made, partitions=tuple(sorted([*broker.partitions, *new])))
