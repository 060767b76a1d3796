"""Finds what holds back a consumer: open transactions in its topics, and in the offsets of its group."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from typing import Final

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.cluster import internal_partition
from dualwrite.kafka.config__kafka_config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.log__kafka_coordinator_blocking import HELD_BACK_S, BlockingTransaction
from dualwrite.protocol.values__protocol_allowed import check_seconds

_OFFSETS: Final = "__consumer_offsets"


def blocking_transactions(
    kafka: Mapping[str, object],
    *,
    topics: Collection[str] = (),
    group: str | None = None,
    open_for_s: float = HELD_BACK_S,
    timeout_s: float = 30.0,
) -> Sequence[BlockingTransaction]:
    """Find the open transactions that hold back ``read_committed`` consumers: Kafka does not tell consumers why they wait.

    May be called at any time; it changes nothing.

    Args:
        kafka: librdkafka configuration.
        topics: The topics that the consumer reads.
        group: The consumer's group. Its committed offsets are held back by transactions that contain offsets. A transaction
            found this way may hold offsets of another group in the same partition of ``__consumer_offsets``.
        open_for_s: Leave out transactions that began less than this many seconds ago: their owners are at work.
        timeout_s: Time limit, in seconds.

    Returns:
        One entry for each transaction and partition. As text, each says whose it is, since when it is open, and what to do.

    Raises:
        ConfigurationError: A topic does not exist, or a right is missing: Read on the topics, and with ``group`` on
            ``__consumer_offsets``.
        Unavailable: The brokers did not answer in time.

    Source: KIP-664, ``DescribeProducers``, ``ListTransactions``, ``DescribeTransactions``.
    """
    check_seconds("open_for_s", open_for_s, zero=True)
    check_seconds("timeout_s", timeout_s)
    deadline = Deadline(timeout_s)
    with closing(KafkaCoordinator(KafkaConfig.parse(kafka))) as coordinator:
        asked = {*topics, _OFFSETS} if group is not None else set(topics)
        counts = coordinator.partitions_of(asked, deadline)
        if missing := sorted(set(topics) - counts.keys()):
            raise ConfigurationError(f"there is no topic {', '.join(map(repr, missing))}")
        places = [(topic, partition) for topic in topics for partition in range(counts[topic])]
        if group is not None and _OFFSETS in counts:  # Kafka creates the topic with the first offset of any group
            places.append((_OFFSETS, internal_partition(group, counts[_OFFSETS])))
        return coordinator.blocking(places, deadline, open_for_s=open_for_s)
