"""Finds and aborts hanging transactions (docs/limits.md), as an operator does with ``kafka-transactions.sh``."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import AbortTransactionSpec, TransactionState

_ENDED = {TransactionState.EMPTY, TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT}


def abort_hanging(kafka: Mapping[str, str], topic: str, partitions: int) -> list[str]:
    """Abort transactions that are open in a topic although their coordinator calls them ended. Call it after a recovery.

    A recovery leaves an undecided transaction open if the markers of its abort were skipped unnoticed. If it were decided,
    the comparison of both sides afterwards would find it lost.

    Returns:
        Each with its partition, for people.
    """
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    admin = KafkaAdminClient(bootstrap_servers=kafka["bootstrap.servers"].split(","))
    try:
        producers = admin.describe_producers([TopicPartition(topic, number) for number in range(partitions)])
        listed = [one for listing in admin.list_transactions().values() for one in listing]
        under_way = {one.producer_id for one in listed if one.state not in _ENDED}
        names = {one.producer_id: one.transactional_id for one in listed}
        hanging = [
            AbortTransactionSpec(partition, one.producer_id, one.producer_epoch, max(0, one.coordinator_epoch))
            for partition, found in producers.items()
            for one in found.active_producers
            if one.current_transaction_start_offset >= 0 and one.producer_id not in under_way
        ]
        for spec in hanging:
            admin.abort_transaction(spec)
    finally:
        admin.close()
    return [f"{names.get(one.producer_id)} in {one.topic_partition.partition}" for one in hanging]
