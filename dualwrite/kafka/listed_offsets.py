"""Where partitions begin and end, by a client of librdkafka; and which of its errors pass."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

_LEADERS_S: Final = 10.0
PASSING: Final = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError._NOENT,  # noqa: SLF001 - the constants' public names; no partition has a leader just now
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError._TRANSPORT,  # noqa: SLF001
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError._RESOLVE,  # noqa: SLF001
    }
)
"""Transient errors: a broker is starting, moving partitions or not answering. Ask again, until a deadline."""


def list_offsets(
    admin: AdminClient, wanted: Mapping[TopicPartition, OffsetSpec], isolation: IsolationLevel, *, timeout_s: float
) -> dict[TopicPartition, int]:
    """Ask once. After an error that passes, the client's metadata is refreshed, so that it may be asked again.

    librdkafka does not refresh it by itself: it repeats the leader epoch that it has cached, and the broker refuses each
    request.
    """
    answers = admin.list_offsets(dict(wanted), isolation_level=isolation, request_timeout=timeout_s)
    try:
        return {where: int(answer.result().offset) for where, answer in answers.items()}
    except KafkaException as refused:
        if refused.args[0].code() in PASSING:
            for topic in {where.topic for where in wanted}:
                with suppress(KafkaException):
                    admin.list_topics(topic, timeout=min(timeout_s, _LEADERS_S))
        raise
