"""Consumed offsets, and the consumer group that commits them as a part of a transaction."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

_MAGIC: Final = b"CGMDv2:"
"""How librdkafka marks its serialised group metadata: generation, group id, member id, and the instance id if there is one."""
_GENERATION: Final = struct.Struct("=i")
_NO_INSTANCE: Final = b"\1"
_NO_EPOCH: Final = -1


@dataclass(frozen=True)
class Group:
    """A consumer's membership in its group, as it stood when the offsets were consumed. Source: KIP-447.

    Attributes:
        group_id: The group's id.
        generation: The group's generation, or the member's epoch (KIP-848); -1 for a consumer without a subscription.
        member_id: The member's id; empty for a consumer without a subscription.
        instance_id: The static member's ``group.instance.id``.
    """

    group_id: str
    generation: int = -1
    member_id: str = ""
    instance_id: str | None = None


@dataclass(frozen=True)
class Offset:
    """An offset to commit for a partition.

    Attributes:
        offset: The next offset to consume.
        leader_epoch: The leader epoch of the last record consumed; -1 if it is not known.
        metadata: The application's own text.
    """

    offset: int
    leader_epoch: int = _NO_EPOCH
    metadata: str = ""


class ConsumedOffset(Protocol):
    """The attributes of ``confluent_kafka.TopicPartition`` that matter here."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int | None
    metadata: str | None


def group_of(metadata: object) -> Group:
    """The group of a consumer.

    Args:
        metadata: ``consumer_group_metadata()`` of confluent-kafka's consumer, or ``group_metadata()`` of kafka-python's.

    Raises:
        TypeError: It is neither, or that of a consumer without a group.
    """
    if isinstance(metadata, bytes) and metadata.startswith(_MAGIC):
        return _of_librdkafka(metadata[len(_MAGIC) :])
    group_id = getattr(metadata, "group_id", None)
    if not isinstance(group_id, str):
        raise TypeError(f"group_metadata must be what Consumer.consumer_group_metadata() returns, not {metadata!r}")
    return Group(
        group_id,
        getattr(metadata, "generation_id", -1),
        getattr(metadata, "member_id", "") or "",
        getattr(metadata, "group_instance_id", None),
    )


def offsets_of(consumed: Iterable[ConsumedOffset]) -> dict[tuple[str, int], Offset]:
    """By partition, the offset to commit. Leaves out what has no offset, as librdkafka does."""
    return {
        (one.topic, one.partition): Offset(
            one.offset,
            _NO_EPOCH if one.leader_epoch is None else one.leader_epoch,
            one.metadata or "",
        )
        for one in consumed
        if one.offset >= 0
    }


def _of_librdkafka(serialised: bytes) -> Group:
    try:
        (generation,) = _GENERATION.unpack_from(serialised)
        group_id, member_id, instance = serialised[_GENERATION.size :].split(b"\0", 2)
        if instance == _NO_INSTANCE:
            return Group(group_id.decode(), generation, member_id.decode())
        present, instance_id, end = instance.split(b"\0")
        if present or end:
            raise ValueError(instance)
        return Group(group_id.decode(), generation, member_id.decode(), instance_id.decode())
    except (ValueError, struct.error) as error:
        raise TypeError("the consumer's group metadata is not as librdkafka 2 serialises it") from error
