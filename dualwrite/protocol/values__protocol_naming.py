"""Names of a writer, its lanes and their incarnations, and of a batch's tasks, in the database and in Kafka."""

from __future__ import annotations

import json
import re
from typing import Final

_KAFKA_ID: Final = re.compile(r"(.+)\.([^.]+)\.(0|[1-9][0-9]*)", re.DOTALL)
_STREAM: Final = "stream "
_NAMESPACE: Final = re.compile(r"[0-9a-f]{12}")


def lane_id(name: str, number: int) -> str:
    """The transactional id of a lane: the name itself for the first, ``name#number`` for the others."""
    return name if number == 0 else f"{name}#{number}"


def writer_of(transactional_id: str) -> str:
    """The name of the writer, or of the pool, that an id belongs to: lanes and slots are ``name#number``."""
    return transactional_id.partition("#")[0]


def is_of_writer(writer: str, name: str) -> bool:
    """Whether a transactional id, or the Kafka id of one of its incarnations, belongs to that writer."""
    incarnation = parsed(name)
    return writer in {writer_of(name), writer_of(incarnation[0]) if incarnation is not None else None}


def member_id(fleet: str, number: int) -> str:
    """The transactional id of one member of a fleet."""
    return f"{fleet}-{number}"


def kafka_id(transactional_id: str, namespace: str, incarnation: int) -> str:
    """The Kafka ``transactional.id`` of an incarnation: it has exactly one writer, ever."""
    return f"{transactional_id}.{namespace}.{incarnation}"


def parsed(name: str) -> tuple[str, str, int] | None:
    """The transactional id, namespace and incarnation of a Kafka ``transactional.id``; None if it has another form."""
    match = _KAFKA_ID.fullmatch(name)
    return None if match is None else (match[1], match[2], int(match[3]))


def is_drawn(namespace: str) -> bool:
    """Whether a namespace looks like one that this library has drawn. Other programs' transactional ids have none."""
    return _NAMESPACE.fullmatch(namespace) is not None


def pool_of_sink(sink: str) -> str:
    """The name of a sink's pool of slots, which no `DualWriter` uses for its lanes by accident."""
    return f"{sink}.spark"


def owner_prefix(name: str, partition: int | None = None) -> str:
    """The prefix of the names of a batch's or a stream's lease owners, or of those of one partition, and of no others."""
    prefix = f"{json.dumps(name)} "
    return prefix if partition is None else f"{prefix}partition {partition} "


def stream_name(checkpoint_digest: str) -> str:
    """The run name of a stream whose micro-batches are decided as one, made of the digest of its checkpoint location."""
    return f"{_STREAM}{checkpoint_digest}"


def may_own(lease_owner: str, batch_id: str) -> bool:
    """Whether the lease owner may be a task of that batch. The names of a stream's lease owners do not show the batch."""
    return lease_owner.startswith((owner_prefix(batch_id), f'"{_STREAM}'))
