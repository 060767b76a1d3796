"""Messages that wait for a savepoint: refuses at once those that the producer would refuse later."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from dualwrite.errors import DualWriteError, IllegalStateError

if TYPE_CHECKING:
    from dualwrite.kafka.producer.transactional import TransactionalProducer


def refuse_early(
    producer: TransactionalProducer,
    topic: str,
    values: Sequence[str | bytes | None],
    keys: Sequence[str | bytes | None] | None = None,
    *,
    on_delivery: object = None,
) -> int:
    """Raise what the producer would certainly raise for these messages, without handing it anything.

    Returns:
        The size of all keys and values, in bytes.

    Raises:
        TransactionAborted: A message is larger than ``message.max.bytes``.
        IllegalStateError: ``on_delivery`` is given, and the producer is in bulk mode.
        ValueError: The numbers of keys and values differ.
    """
    if producer.bulk and on_delivery is not None:
        raise IllegalStateError(
            "a producer in bulk mode calls no on_delivery", transactional_id=producer.transactional_id
        )
    if keys is not None and len(keys) != len(values):
        raise ValueError(f"{len(values)} values, {len(keys)} keys")
    total = 0
    for value, key in zip(values, keys or repeat(None), strict=False):
        if (size := _size(value) + _size(key)) > producer.max_message_bytes:
            raise _too_large(producer, topic, size)
        total += size
    return total


def _too_large(producer: TransactionalProducer, topic: str, size: int) -> DualWriteError:
    # Loads the Kafka clients, which a writer in memory does not have.
    from dualwrite.kafka.producer.codes import Code  # noqa: PLC0415 - as above
    from dualwrite.kafka.producer.failure import Phase, advice_on, error_for  # noqa: PLC0415 - as above

    return error_for(
        advice_on(Code.MESSAGE_TOO_LARGE),
        f"the message has {size} bytes, message.max.bytes is {producer.max_message_bytes} (MESSAGE_TOO_LARGE)",
        Phase.PRODUCE,
        transactional_id=producer.transactional_id,
        subject=topic,
    )


def _size(part: str | bytes | None) -> int:
    return 0 if part is None else len(part.encode() if isinstance(part, str) else part)
