"""Calls ``on_delivery`` with the result of each message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from dualwrite.kafka.producer.native.wire.core import Delivered, Partition
    from dualwrite.protocol.contents import Contents

logger = logging.getLogger(__name__)

_NO_OFFSET: Final = -1001
"""The offset of a message that is not in the log, or whose offset the broker did not tell; as in librdkafka."""
_CREATED: Final = 1
DeliveryCallback: TypeAlias = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Awaited:
    """A message whose delivery its sender wants to hear of.

    Attributes:
        callback: The sender's function: ``(error or None, message)``, as confluent-kafka has it.
        contents: Its parts.
    """

    callback: DeliveryCallback
    contents: Contents


class Deliveries:
    """Calls the callbacks of one transaction.

    Attributes:
        callback_error: The first exception that a callback raised.
    """

    def __init__(self) -> None:
        self.callback_error: BaseException | None = None

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
        from confluent_kafka import KafkaError, Message  # noqa: PLC0415 - needed where callbacks are used, and not else

        assert isinstance(awaited, Awaited)
        contents = awaited.contents
        error = None if code is None else KafkaError(code)
        message = Message(
            topic=partition[0],
            partition=partition[1],
            offset=offset,
            value=contents.value,
            key=contents.key,
            headers=list(contents.headers) or None,
            timestamp=(_CREATED, contents.timestamp_ms or 0),
            error=error,
        )
        try:
            awaited.callback(error, message)
        except BaseException as raised:
            # Raised in the middle of a verb, it would hide the verb's own outcome.
            logger.exception("a delivery callback raised")
            self.callback_error = self.callback_error or raised

    def take_callback_error(self) -> BaseException | None:
        """The first exception that a callback raised, once."""
        raised, self.callback_error = self.callback_error, None
        return raised

    def raise_callback_error(self) -> None:
        """Re-raise the first exception that a callback raised, once."""
        if (raised := self.take_callback_error()) is not None:
            raise raised
