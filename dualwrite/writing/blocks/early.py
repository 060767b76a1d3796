"""Messages that wait for a savepoint: checked and copied when they are handed over, not when they are sent.

What is wrong with one is its caller's to hear, at the call. Found later, among the messages of a group, it would fail them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias

from dualwrite.errors import IllegalStateError
from dualwrite.protocol.contents import Contents, Unsendable, checked

if TYPE_CHECKING:
    from confluent_kafka import KafkaError
    from confluent_kafka import Message as KafkaMessage

    from dualwrite.kafka.producer.transactional import TransactionalProducer
    from dualwrite.ports.savepoints import Message
    from dualwrite.protocol.contents import Content, Headers

Hold: TypeAlias = "Callable[[TransactionalProducer], tuple[Message, int]]"
"""Checks messages, and copies what their caller could change. Returns what hands them over, and their size in bytes."""


def hold(
    producer: TransactionalProducer,
    topic: str,
    value: Content,
    key: Content,
    *,
    partition: int | None,
    headers: Headers | None,
    timestamp_ms: int | None,
    on_delivery: Callable[[KafkaError | None, KafkaMessage], None] | None,
) -> tuple[Message, int]:
    """Check and copy one message.

    Returns:
        What hands it over, and the size of its key and value, in bytes.

    Raises:
        TransactionAborted: The producer would refuse it.
        IllegalStateError: ``on_delivery`` is given, and the producer is in bulk mode.
        TypeError, UnicodeEncodeError: A part is of another type, or a text has a surrogate.
    """
    refuse_callback(producer, on_delivery)
    try:
        contents = checked(
            topic,
            value,
            key,
            partition=partition,
            headers=headers,
            timestamp_ms=timestamp_ms,
            on_delivery=on_delivery,
            max_bytes=producer.max_message_bytes,
        )
    except Unsendable as error:
        raise error.refusal(topic, producer.transactional_id) from None

    def send(producer: TransactionalProducer) -> None:
        producer.produce(
            topic,
            contents.value,
            contents.key,
            partition=contents.partition,
            headers=contents.headers or None,
            timestamp_ms=contents.timestamp_ms,
            on_delivery=on_delivery,
        )

    return send, _size(contents)


def hold_many(
    producer: TransactionalProducer, topic: str, values: Sequence[Content], keys: Sequence[Content] | None
) -> tuple[Message, int]:
    """Check and copy many messages of one topic; see :func:`hold`.

    Raises:
        ValueError: The numbers of keys and values differ.
    """
    refuse_other_length(keys, values)
    max_bytes = producer.max_message_bytes
    try:
        rows = [
            checked(topic, value, key, max_bytes=max_bytes, subject=f"row {row}")
            for row, (value, key) in enumerate(zip(values, keys or repeat(None), strict=False))
        ]
    except Unsendable as error:
        raise error.refusal(topic, producer.transactional_id) from None
    own_values, own_keys = [row.value for row in rows], None if keys is None else [row.key for row in rows]
    return lambda producer: producer.produce_many(topic, own_values, own_keys), sum(map(_size, rows))


def refuse_callback(producer: TransactionalProducer, on_delivery: object) -> None:
    """Refuse a delivery callback in bulk mode.

    Raises:
        IllegalStateError: It is given, and the producer is in bulk mode.
    """
    if producer.bulk and on_delivery is not None:
        raise IllegalStateError(
            "a producer in bulk mode calls no on_delivery", transactional_id=producer.transactional_id
        )


def refuse_other_length(keys: Sequence[object] | None, values: Sequence[object]) -> None:
    """Refuse keys of which there are more or fewer than values.

    Raises:
        ValueError: The numbers differ.
    """
    if keys is not None and len(keys) != len(values):
        raise ValueError(f"{len(values)} values, {len(keys)} keys")


def _size(contents: Contents) -> int:
    return len(contents.value or b"") + len(contents.key or b"")
