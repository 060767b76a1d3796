"""The partitions of messages that may go anywhere: one batch for one partition, and every partition in its turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dualwrite.protocol.message import OVERHEAD

Choose = Callable[[Sequence[int]], int]


@dataclass(slots=True)
class _Stay:
    partition: int
    since: float
    size: int = 0


class StickyPartitions:
    """Keeps messages without a key together, so that one of many partitions gets one large batch, not all small ones.

    Messages stay in a partition until its batch is sent or full, or for ``sticky.partitioning.linger.ms``. Then they move
    to another one, at random. Source: KIP-480, KIP-794, librdkafka's ``rd_kafka_msg_sticky_partition``.

    Args:
        sticky_s: ``sticky.partitioning.linger.ms``, in seconds; 0 chooses for each message.
        batch_bytes: The greatest size of a batch.
        choose: Chooses one of several partitions; for tests.
    """

    def __init__(self, sticky_s: float, batch_bytes: int, choose: Choose = random.choice) -> None:
        self._sticky_s = sticky_s
        self._batch_bytes = batch_bytes
        self._choose: Final = choose
        self._stays: dict[str, _Stay] = {}
        self._sent_to: dict[str, dict[int, int]] = {}

    def begin(self) -> None:
        """A transaction begins: its batches are spread without regard to those of the last one."""
        self._sent_to.clear()

    def one_message(
        self,
        topic: str,
        candidates: Sequence[int],
        size: int,
        now: float,
        collects_in: Callable[[tuple[str, int]], bool],
    ) -> int:
        """The partition of one message.

        Args:
            topic: Its topic.
            candidates: The partitions to choose from.
            size: The bytes of its key and value.
            now: The time, in seconds.
            collects_in: Whether a batch is open in a partition.
        """
        stay = self._stays.get(topic)
        size += OVERHEAD
        if (
            stay is None
            or stay.size + size > self._batch_bytes
            or now - stay.since >= self._sticky_s
            or not collects_in((topic, stay.partition))
        ):
            left = None if stay is None or self._sticky_s <= 0 else stay.partition
            others = [one for one in candidates if one != left]
            stay = self._stays[topic] = _Stay(self._choose(others or candidates), now)
        stay.size += size
        return stay.partition

    def whole_batch(self, topic: str, candidates: Sequence[int], size: int) -> int:
        """The partition of a whole batch: one of those that got the fewest bytes of the transaction.

        Args:
            topic: Its topic.
            candidates: The partitions to choose from.
            size: Its bytes.
        """
        sent_to = self._sent_to.setdefault(topic, {})
        least = min(sent_to.get(one, 0) for one in candidates)
        partition = self._choose([one for one in candidates if sent_to.get(one, 0) == least])
        sent_to[partition] = least + size
        return partition
