"""kafka-python's messages for what a producer asks its coordinators: built from values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from kafka.protocol.producer.transaction import EndTxnRequest, InitProducerIdRequest, TxnOffsetCommitRequest

from dualwrite.kafka.native.coordination__kafka_producer_native_coordinating_offsets import Group, Offset

Message: TypeAlias = Any  # kafka-python's requests and responses have no types

_TWO_PHASE: Final = {"min_version": 6, "max_version": 6, "enable2_pc": True}
"""KIP-939's version, which brokers offer only if they have unstable versions enabled."""
_ONE_PHASE: Final = {"max_version": 5}
_NAMED: Final = {"min_version": 5, "max_version": 5}
"""The version that ends one transaction: it raises the epoch, and answers with the next transaction's."""
_WITH_ITS_PARTITION: Final = {"min_version": 5, "max_version": 5}
"""The version that adds the group's partition to the transaction by itself."""


def init_producer_id(kafka_id: str, timeout_ms: int, *, two_phase: bool) -> Message:
    """The InitProducerId request for a new producer."""
    return InitProducerIdRequest(
        transactional_id=kafka_id,
        transaction_timeout_ms=timeout_ms,
        producer_id=-1,
        producer_epoch=-1,
        **(_TWO_PHASE if two_phase else _ONE_PHASE),
    )


def end_txn(kafka_id: str, ids: tuple[int, int], *, committed: bool) -> Message:
    """The EndTxn request for the one transaction of this producer id and epoch."""
    producer_id, epoch = ids
    return EndTxnRequest(
        transactional_id=kafka_id, producer_id=producer_id, producer_epoch=epoch, committed=committed, **_NAMED
    )


def txn_offset_commit(
    kafka_id: str, ids: tuple[int, int], group: Group, offsets: Mapping[tuple[str, int], Offset]
) -> Message:
    """The TxnOffsetCommit request for the offsets of a group."""
    data = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
    topics: dict[str, list[Message]] = {}
    for (topic, partition), offset in offsets.items():
        topics.setdefault(topic, []).append(
            data.TxnOffsetCommitRequestPartition(
                partition_index=partition,
                committed_offset=offset.offset,
                committed_leader_epoch=offset.leader_epoch,
                committed_metadata=offset.metadata,
            )
        )
    producer_id, epoch = ids
    return TxnOffsetCommitRequest(
        transactional_id=kafka_id,
        group_id=group.group_id,
        producer_id=producer_id,
        producer_epoch=epoch,
        generation_id=group.generation,
        member_id=group.member_id,
        group_instance_id=group.instance_id,
        topics=[data(name=topic, partitions=partitions) for topic, partitions in topics.items()],
        **_WITH_ITS_PARTITION,
    )
