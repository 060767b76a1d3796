"""One raw fetch from a partition's leader. Consumers never see control records, so the library reads the log itself."""

from __future__ import annotations

from typing import Final

import kafka.errors as kafka_errors
from kafka.protocol.consumer.fetch import FetchRequest

from dualwrite.kafka.brokers import verdict
from dualwrite.kafka.cluster import Leader
from dualwrite.kafka.cluster__kafka_coordinator_partitions import Place
from dualwrite.kafka.network import Message, NotYet

CHUNK_BYTES: Final = 1_048_576
AT_ONCE: Final = 16  # partitions: limits the memory
_READ_UNCOMMITTED: Final = 0
_READ_COMMITTED: Final = 1
_NEWEST_VERSION_BY_NAME: Final = 12  # later versions name topics by id, which some states lack


def fetch(
    place: Place, leader: Leader, offset: int, *, max_bytes: int = CHUNK_BYTES, read_committed: bool = False
) -> Message:
    """Build the request for the batches from an offset on.

    Args:
        place: The partition.
        leader: Its leader.
        offset: The first offset; the broker sends the whole batch that holds it.
        max_bytes: Roughly how much to send; the broker sends at least one batch, however large.
        read_committed: Whether to stop at the last stable offset and list the aborted transactions.
    """
    partition = FetchRequest.FetchTopic.FetchPartition(
        partition=place.partition,
        current_leader_epoch=leader.epoch,
        fetch_offset=offset,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=max_bytes,
    )
    return FetchRequest(
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=max_bytes,
        isolation_level=_READ_COMMITTED if read_committed else _READ_UNCOMMITTED,
        session_id=0,
        session_epoch=-1,
        topics=[FetchRequest.FetchTopic(topic=place.topic, partitions=[partition])],
        forgotten_topics_data=[],
        rack_id="",
        max_version=_NEWEST_VERSION_BY_NAME,
    )


def fetched(place: Place, response: Message | NotYet) -> Message | NotYet | None:
    """The partition's part of the answer to :func:`fetch`; None where its log has no such offset.

    Raises:
        ConfigurationError: We may not read the topic.
    """
    if isinstance(response, NotYet):
        return response
    [partition] = response.responses[0].partitions
    if kafka_errors.for_code(partition.error_code) is kafka_errors.OffsetOutOfRangeError:
        return None
    return verdict(partition.error_code, str(place), f"Read on the topic {place.topic!r}") or partition
