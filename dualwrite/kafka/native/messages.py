"""kafka-python's messages for the requests of native transactions: built from values, and read into values."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from kafka.protocol.producer import ProduceRequest

from dualwrite.kafka.native.produce_state import Partition, ToSend

Message: TypeAlias = Any  # kafka-python's requests and responses have no types

_FIRST_OF_NATIVE: Final = 12
"""From this version on a Produce request adds its partitions to the transaction by itself."""
_ALL: Final = -1


def produce(
    kafka_id: str, ids: tuple[int, int], request: ToSend, topic_ids: Mapping[str, str], replicas_s: float
) -> Message:
    """The Produce request for some batches.

    Args:
        kafka_id: The transactional id.
        ids: The transaction's producer id and epoch.
        request: The batches.
        topic_ids: The id of each topic, as Kafka prints it. Brokers that take ids refuse a topic that was made again.
        replicas_s: How long the broker may wait for its replicas before it answers.
    """
    data = ProduceRequest.TopicProduceData
    partitions: dict[str, list[Message]] = {}
    for (topic, number), batch in request.batches.items():
        sealed = batch.body.sealed(*ids, batch.sequence)
        partitions.setdefault(topic, []).append(data.PartitionProduceData(index=number, records=sealed))
    return ProduceRequest(
        transactional_id=kafka_id,
        acks=_ALL,
        timeout_ms=round(replicas_s * 1000),
        topic_data=[
            data(name=topic, topic_id=_uuid(topic_ids[topic]), partition_data=of_topic)
            for topic, of_topic in partitions.items()
        ],
        min_version=_FIRST_OF_NATIVE,
    )


def produced(response: Message, topic_ids: Mapping[str, str]) -> dict[Partition, tuple[int, int]]:
    """By partition, the error code and the base offset of the answer to a Produce request."""
    names = {_uuid(topic_id): topic for topic, topic_id in topic_ids.items()}
    return {
        (topic.name or names[topic.topic_id], partition.index): (partition.error_code, partition.base_offset)
        for topic in response.responses
        for partition in topic.partition_responses
    }


def _uuid(topic_id: str) -> uuid.UUID:
    return uuid.UUID(bytes=base64.urlsafe_b64decode(topic_id + "=="))
