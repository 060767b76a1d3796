"""One message, as it is handed to a producer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ProducerRecord(NamedTuple):
    """One message as it is produced, by Kafka's name for it.

    Attributes:
        topic: Topic name.
        value: Payload: what the topic's value serializer takes; without one, bytes, a string, or None.
        key: Key, likewise.
        headers: Headers, in order.
        partition: The partition; None if Kafka chooses it.
        timestamp_ms: The timestamp, in ms since 1970; None for the time at which it is produced.
    """

    topic: str
    value: object = None
    key: object = None
    headers: Sequence[tuple[str, str | bytes | None]] = ()
    partition: int | None = None
    timestamp_ms: int | None = None
