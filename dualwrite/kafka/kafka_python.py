"""What kafka-python does for this library: it packs and reads rare messages, reads batches of records, and logs in.

Only its messages, its records and its login mechanisms are used, never its connections. It takes a tenth of a second to import,
so whatever uses this module imports it where it uses it: a writer whose brokers are well opens and writes without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

with warnings.catch_warnings():
    # On import, kafka-python reads its schemas with a function that Python 3.11 and 3.12 deprecate. Users' tests may
    # turn warnings into errors, so import every module that warns here, with the warning silenced.
    warnings.filterwarnings("ignore", r"(read|open)_text is deprecated", DeprecationWarning)
    from kafka.net.sasl import get_sasl_mechanism
    from kafka.net.sasl.oauth import AbstractTokenProvider
    from kafka.protocol.admin.groups import ListGroupsRequest
    from kafka.protocol.admin.transactions import ListTransactionsRequest
    from kafka.protocol.consumer.fetch import FetchRequest
    from kafka.protocol.consumer.group import OffsetFetchRequest
    from kafka.protocol.consumer.offsets import ListOffsetsRequest
    from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest, EndTxnRequest
    from kafka.record.memory_records import MemoryRecords

from dualwrite.kafka.messages import Message, Partition, by_topic

if TYPE_CHECKING:
    from kafka.record.default_records import DefaultRecordBatch

    from dualwrite.kafka.connection import Login

SHARED_EPOCH: Final = 4
"""Version 5 of EndTxn raises the producer's epoch, so it names one transaction. For a producer of librdkafka's engine the
broker would refuse every repetition of it, and fence the owner."""
_NEWEST_ADD_VERSION: Final = 3
"""Later versions are for brokers only."""
_NEWEST_VERSION_BY_NAME: Final = 12
"""Later versions of Fetch name topics by id, which some states lack."""
_READ_UNCOMMITTED, _READ_COMMITTED = 0, 1
_LATEST: Final = -1
_NEWEST_LIST_OFFSETS: Final = 7
"""Later versions have kinds of offsets that nothing here asks for."""
_MANY_GROUPS: Final = {"min_version": 8, "max_version": 9}
"""The versions of OffsetFetch that take many groups, and topics by name."""


def list_transactions(*, states: Sequence[str] = (), producer_ids: Collection[int] = ()) -> Message:
    """A request for the transactions that a broker coordinates, in one of these states, of one of these producers, or all."""
    return ListTransactionsRequest(state_filters=list(states), producer_id_filters=list(producer_ids))


def end_shared(kafka_id: str, ids: tuple[int, int], *, committed: bool) -> Message:
    """An EndTxn for a producer whose transactions share one epoch, which stays valid."""
    producer_id, epoch = ids
    return EndTxnRequest(
        transactional_id=kafka_id,
        producer_id=producer_id,
        producer_epoch=epoch,
        committed=committed,
        max_version=SHARED_EPOCH,
    )


def add_partitions(kafka_id: str, ids: tuple[int, int], partitions: Collection[Partition]) -> Message:
    """An AddPartitionsToTxn: begins a transaction, or adds to the open one."""
    producer_id, epoch = ids
    topic_type = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
    return AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=kafka_id,
        v3_and_below_producer_id=producer_id,
        v3_and_below_producer_epoch=epoch,
        v3_and_below_topics=[
            topic_type(name=name, partitions=numbers) for name, numbers in by_topic(partitions).items()
        ],
        max_version=_NEWEST_ADD_VERSION,
    )


def fetch(partition: Partition, leader_epoch: int, offset: int, *, max_bytes: int, read_committed: bool) -> Message:
    """A Fetch: the batches of one partition from an offset on, or those of them that are committed."""
    topic, number = partition
    wanted = FetchRequest.FetchTopic.FetchPartition(
        partition=number,
        current_leader_epoch=leader_epoch,
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
        topics=[FetchRequest.FetchTopic(topic=topic, partitions=[wanted])],
        forgotten_topics_data=[],
        rack_id="",
        max_version=_NEWEST_VERSION_BY_NAME,
    )


def list_offsets(leader_epochs: Mapping[Partition, int], *, read_committed: bool) -> Message:
    """A ListOffsets: where partitions of one leader end, or, for ``read_committed``, their last stable offsets."""
    data = ListOffsetsRequest.ListOffsetsTopic
    topics = [
        data(
            name=name,
            partitions=[
                data.ListOffsetsPartition(
                    partition_index=number, current_leader_epoch=leader_epochs[name, number], timestamp=_LATEST
                )
                for number in numbers
            ],
        )
        for name, numbers in by_topic(leader_epochs).items()
    ]
    return ListOffsetsRequest(
        replica_id=-1,
        isolation_level=_READ_COMMITTED if read_committed else _READ_UNCOMMITTED,
        topics=topics,
        max_version=_NEWEST_LIST_OFFSETS,
    )


def list_groups() -> Message:
    """A request for the groups that a broker coordinates."""
    return ListGroupsRequest()


def committed_offsets(groups: Collection[str]) -> Message:
    """An OffsetFetch: all offsets that groups of one coordinator have committed. Source: KIP-709."""
    data = OffsetFetchRequest.OffsetFetchRequestGroup
    return OffsetFetchRequest(groups=[data(group_id=group, topics=None) for group in groups], **_MANY_GROUPS)


def batches(data: bytes | None) -> Iterable[DefaultRecordBatch]:
    """The batches of a fetched partition. Only their heads are read, and the records of control batches."""
    return cast("Iterable[DefaultRecordBatch]", MemoryRecords(data or b""))


def begin_login(mechanism: str, host: str, settings: Mapping[str, object]) -> Login:
    """The login of one connection, by kafka-python's mechanism of that name and its settings."""
    return cast("Login", get_sasl_mechanism(mechanism)(host=host, sasl_mechanism=mechanism, **settings))


def take_tokens(kind: type) -> None:
    """Let the mechanism OAUTHBEARER take its tokens from objects of this class."""
    AbstractTokenProvider.register(kind)
