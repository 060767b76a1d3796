"""The state of the simulated broker, with functions to read and replace its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from simulator.coordinator import TransactionMetadata
from simulator.groups import ConsumerGroup
from simulator.partition import Partition
from simulator.requests import TopicPartition

OFFSETS_TOPIC: Final = "__consumer_offsets"
_ID_LENGTH: Final = 22  # 16 bytes in base64


class Broker(NamedTuple):
    """The state of the whole broker.

    Attributes:
        transactions: The coordinator's metadata of each transactional id, in order of the id.
        partitions: The partitions with their logs, in order of topic and number.
        next_producer_id: The next producer id to assign.
        topics_made: Number of topics ever created, from which their ids are made.
        coordinator_epoch: Raised by every restart, and written into the markers.
        clock_ms: The broker's clock.
        max_timeout_ms: ``transaction.max.timeout.ms``.
        cluster_id: The cluster's id.
        suspended: The partitions whose leader is suspended: connections stay, and requests get no answer.
        leaderless: Those of them whose leader's session has ended, so that they have no leader. Their markers are
            skipped.
        transaction_version: The version of transactions that the cluster has finalized, which its clients look up. The
            broker answers requests of both versions, even after it was lowered.
        two_phase_commit: ``transaction.two.phase.commit.enable``; None where ``InitProducerId`` 6 is not offered.
        groups: The consumer groups that have had members.
        group_topic: The topic that all of them read.
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
    transaction_version: int = 1
    two_phase_commit: bool | None = None
    groups: tuple[ConsumerGroup, ...] = ()
    group_topic: str = ""


def new_broker(
    topics: Mapping[str, int],
    *,
    offsets_partitions: int = 2,
    max_timeout_ms: int = 900_000,
    cluster_id: str = "simulated",
    transaction_version: int = 1,
    two_phase_commit: bool | None = None,
) -> Broker:
    """A broker with these topics, all empty.

    Args:
        topics: Names, with the number of partitions.
        offsets_partitions: Number of partitions of ``__consumer_offsets``.
        max_timeout_ms: ``transaction.max.timeout.ms``.
        cluster_id: The cluster's id.
        transaction_version: The version of transactions that is finalized, 1 or 2.
        two_phase_commit: ``transaction.two.phase.commit.enable``; None where ``InitProducerId`` 6 is not offered.
    """
    broker = Broker(
        max_timeout_ms=max_timeout_ms,
        cluster_id=cluster_id,
        transaction_version=transaction_version,
        two_phase_commit=two_phase_commit,
    )
    for name, count in {OFFSETS_TOPIC: offsets_partitions, **topics}.items():
        broker = create_topic(broker, name, count)
    return broker


def transaction(broker: Broker, transactional_id: str) -> TransactionMetadata | None:
    """The coordinator's metadata of the id; None if the id is unknown."""
    for known in broker.transactions:
        if known.transactional_id == transactional_id:
            return known
    return None


def partition(broker: Broker, topic_partition: TopicPartition) -> Partition | None:
    """The partition; None if it does not exist."""
    for found in broker.partitions:
        if found.topic_partition == topic_partition:
            return found
    return None


def topic_id(broker: Broker, topic: str) -> str | None:
    """The id of a topic; None if it does not exist."""
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
    """The broker with this metadata for its transactional id, and otherwise unchanged."""
    transactions = broker.transactions
    for index, other in enumerate(transactions):
        if other.transactional_id == known.transactional_id:
            return broker._replace(transactions=(*transactions[:index], known, *transactions[index + 1 :]))
    return broker._replace(transactions=tuple(sorted([*transactions, known])))


def with_partition(broker: Broker, written: Partition) -> Broker:
    """The broker with this partition in place of the one with the same name."""
    partitions = broker.partitions
    for index, other in enumerate(partitions):
        if other.topic_partition == written.topic_partition:
            return broker._replace(partitions=(*partitions[:index], written, *partitions[index + 1 :]))
    return broker


def create_topic(broker: Broker, name: str, partitions: int) -> Broker:
    """Create a topic with a new, unique id, of the form in which Kafka prints them."""
    made = broker.topics_made + 1
    made_id = f"topic-{made}-".ljust(_ID_LENGTH, "A")
    new = [Partition((name, number), made_id) for number in range(partitions)]
    return broker._replace(topics_made=made, partitions=tuple(sorted([*broker.partitions, *new])))
