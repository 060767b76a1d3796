"""A proxy that spoils answers of the broker: half of one, or other bytes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from dualwrite.testing import EmbeddedKafka
from dualwrite.testing.proxy import Answer, KafkaCodec, KafkaProxy, KafkaRequest, Unit

Spoil = Callable[[bytes], bytes]

SPOILS: Mapping[str, Spoil] = {
    "half of it": lambda frame: frame[: len(frame) // 2],
    "other bytes in its frame": lambda frame: frame[:8] + b"\xff" * (len(frame) - 8),
    "another request's": lambda frame: frame[:4] + struct.pack(">i", 2**30) + frame[8:],
    "a frame of two gigabytes": lambda frame: struct.pack(">i", 2**31 - 1) + frame[4:],
    "a frame of a negative size": lambda frame: struct.pack(">i", -7) + frame[4:],
    "no protocol of Kafka's": lambda _: b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
}
"""By name, what becomes of the frame of an answer."""


class SpoilingProxy(KafkaProxy):
    """Spoils the first answer to each kind of request that it is told to.

    Attributes:
        spoils: By API key, how to spoil the next answer; taken out when it is done.
        changes: By API key, what becomes of every answer.
    """

    def __init__(self, kafka: EmbeddedKafka) -> None:
        super().__init__(kafka)
        self.spoils: dict[int, Spoil] = {}
        self.changes: dict[int, Spoil] = {}
        self._codec = partial(_SpoilingCodec, self.spoils, self.changes)


class _SpoilingCodec(KafkaCodec):
    def __init__(self, spoils: dict[int, Spoil], changes: Mapping[int, Spoil]) -> None:
        super().__init__()
        self._spoils = spoils
        self._changes = changes
        self._asked: dict[int, int] = {}

    async def next_request(self, client: asyncio.StreamReader) -> Unit[KafkaRequest]:
        unit = await super().next_request(client)
        assert unit.request is not None
        self._asked[unit.key] = unit.request.api_key
        return unit

    async def next_answer(self, server: asyncio.StreamReader) -> Answer:
        answer = await super().next_answer(server)
        api_key = self._asked.pop(answer.key, -1)
        spoil = self._spoils.pop(api_key, None) or self._changes.get(api_key)
        return answer if spoil is None else replace(answer, data=spoil(answer.data))
