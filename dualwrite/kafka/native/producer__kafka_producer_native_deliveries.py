"""Calls ``on_delivery`` with the result of each message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from dualwrite.kafka.engine import Callbacks
from dualwrite.protocol.message import Message

if TYPE_CHECKING:
    from dualwrite.kafka.native.produce_state import Delivered, Partition

_NO_OFFSET: Final = -1001
"""The offset of a message that is not in the log, or whose offset the broker did not tell; as in librdkafka."""
_CREATED: Final = 1


class Deliveries(Callbacks):
    """Calls the callbacks of one transaction. What waits with a batch for its acknowledgement is the message itself."""

    def delivered(self, found: Iterable[Delivered]) -> int:
        """Tell the callbacks of acknowledged batches; returns how many there were."""
        told = 0
        for one in found:
            for index, awaited in one.batch.callbacks:
                offset = one.base_offset + index if one.base_offset >= 0 else _NO_OFFSET
                self._tell(awaited, one.partition, None, offset)
                told += 1
        return told

    def failed(self, awaited: Iterable[tuple[Partition, object]], code: int) -> None:
        """Tell the callbacks of messages that were not delivered."""
        for partition, one in awaited:
            self._tell(one, partition, code, _NO_OFFSET)

    def _tell(self, awaited: object, partition: Partition, code: int | None, offset: int) -> None:
        # Loaded where callbacks are used, and not else.
        from confluent_kafka import KafkaError  # noqa: PLC0415 - as above
        from confluent_kafka import Message as KafkaMessage  # noqa: PLC0415 - as above

        assert isinstance(awaited, Message)
        assert awaited.on_delivery is not None
        error = None if code is None else KafkaError(code)
        shown = KafkaMessage(
            topic=partition[0],
            partition=partition[1],
            offset=offset,
            value=awaited.value,
            key=awaited.key,
            headers=list(awaited.headers) or None,
            timestamp=(_CREATED, awaited.timestamp_ms or 0),
            error=error,
        )
        self.call(awaited.on_delivery, error, shown)
