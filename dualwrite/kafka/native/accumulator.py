"""Messages on their way into a transaction: each given a partition, and collected in that partition's batch.

A message without a key goes where the last one went until the batch is full (sticky partitioning). Many messages at
once may be built as columns, which loads numpy and pyarrow only then.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from dualwrite.clock import now_s
from dualwrite.kafka.cluster import Topic
from dualwrite.kafka.native.produce_state import ProduceCore
from dualwrite.kafka.native.records import partitioner
from dualwrite.protocol.message import (
    ANY_PARTITION,
    OVERHEAD,
    Content,
    Message,
    MessageBatch,
    MessageColumns,
    Unsendable,
    check_topic,
    no_partition,
)

if TYPE_CHECKING:
    from dualwrite.kafka.native.settings import NativeSettings

_LOOK_EVERY: Final = 256
_YIELD_EVERY: Final = 2048
"""What comes in one call goes in few requests: the first one of a transaction goes alone, and the next waits for its answer."""
_ROWS_AT_ONCE: Final = 10_000
_COLUMNS_FROM: Final = 250
"""Above this many messages per partition, building columns is at least twice as fast."""
_IMPORT_FROM: Final = 100_000
"""From this many on columns repay that pyarrow is imported: 0.2 s, while they save 2 microseconds a message."""


@dataclass(frozen=True)
class _Target:
    """A topic's partitions: their number, and as candidates those with a leader, or all if none has one."""

    topic: Topic
    count: int
    candidates: tuple[int, ...]

    @classmethod
    def of(cls, topic: Topic) -> _Target:
        count = len(topic.leaders)
        led = tuple(sorted(number for number, leader in topic.leaders.items() if leader is not None))
        return cls(topic, count, led or tuple(range(count)))


class Filling:
    """Brings the messages of one transaction after another into its :class:`ProduceCore`. Used by one thread at a time.

    Nothing here waits or sends. Before the next message the owner waits while :attr:`is_full`, and lets batches go.
    ``topic`` looks a topic up by its name: it may ask a broker, and must where the second argument is true. It is called
    once for each topic and transaction, and then for a partition that the topic does not have.
    """

    def __init__(
        self,
        core: ProduceCore,
        settings: NativeSettings,
        topic: Callable[[str, bool], Topic | None],
        *,
        clock: Callable[[], float] = now_s,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        self._settings = settings
        self._look_up = topic
        self._clock = clock
        self._clock_ms = clock_ms
        self._partitioner = partitioner(settings.partitioner)
        self._last_targets: dict[str, _Target] = {}  # as the last look-ups of their topics have shown them
        self._sticky = StickyPartitions(settings.sticky_s, settings.batch_bytes)
        self.begin(core)

    def begin(self, core: ProduceCore) -> None:
        """Fill another transaction from now on."""
        self._core = core
        self._targets: dict[str, _Target] = {}
        self._sticky.begin()

    @property
    def is_full(self) -> bool:
        """Whether so much waits for acknowledgement that the next message must wait."""
        core, settings = self._core, self._settings
        return core.queued_bytes >= settings.queue_bytes or core.queued_messages >= settings.queue_messages

    def append(self, message: Message, *, now: float) -> None:
        """Take one message. If this raises, nothing of it was taken.

        A callback stays with its batch until the acknowledgement. `Unsendable` if there is no such topic or partition.
        """
        topic, value, key, number, headers, created_ms, on_delivery, _ = message
        target = self._targets.get(topic) or self._target(topic)
        if number is not None:
            if number >= target.count:
                self._require_partition(topic, number)
        elif (number := self._partitioner.partition(key, target.count)) is None:
            size = (0 if value is None else len(value)) + (0 if key is None else len(key))
            number = self._sticky.one_message(topic, target.candidates, size, now, self._core.collects_in)
        if created_ms is None:
            created_ms = self._now_ms()
        callback = None if on_delivery is None else message
        self._core.append((topic, number), value, key, headers, created_ms, now=now, callback=callback)

    def append_many(self, batch: MessageBatch) -> Iterator[None]:
        """Take many messages of one topic: as :meth:`append` for each, in less time. Those not checked yet are checked.

        Yields now and then, so that the owner may wait while :attr:`is_full`, and let batches go. If it raises, what stands
        before may have been taken.
        """
        topic = batch.topic
        check_topic(topic)
        target = self._targets.get(topic) or self._target(topic)
        created_ms = self._now_ms()
        if _columns_pay(batch.messages, 1 if batch.keys is None else target.count):
            yield from self._as_columns(topic, batch.values, batch.keys, created_ms)
            return
        for row, (value, key, size) in enumerate(batch.rows(self._settings.max_message_bytes), 1):
            self.append(Message(topic, value, key, None, (), created_ms, None, size), now=self._clock())
            if row % _LOOK_EVERY == 0 and (row % _YIELD_EVERY == 0 or self.is_full):
                yield

    def _as_columns(
        self, topic: str, values: Sequence[Content], keys: Sequence[Content] | None, timestamp_ms: int
    ) -> Iterator[None]:
        from dualwrite.kafka.native.arrow import column_of  # noqa: PLC0415 - imports pyarrow

        for first in range(0, len(values), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            its_keys = None if keys is None else column_of(keys[part])
            columns = MessageColumns(topic, column_of(values[part]), its_keys)
            yield from self.append_columns(columns, timestamp_ms=timestamp_ms, first_row=first)

    def append_columns(
        self, columns: MessageColumns, *, timestamp_ms: int | None = None, first_row: int = 0
    ) -> Iterator[None]:
        """Take the rows of Arrow's columns; no Python object is made for a row.

        Yields after each batch, so that the owner may wait while :attr:`is_full`, and let batches go. `Unsendable` names
        the number of a row, counted from ``first_row``; rows more than 8 MB before it may have been taken.
        """
        from dualwrite.kafka.native.arrow import Columns  # noqa: PLC0415 - imports pyarrow

        settings, topic = self._settings, columns.topic
        rows = Columns(columns, first_row=first_row)
        created_ms = self._now_ms() if timestamp_ms is None else timestamp_ms
        check_topic(topic)
        target = self._targets.get(topic) or self._target(topic)
        if rows.highest_partition >= target.count:
            target = self._target(topic, fresh=True)  # it may have got more partitions
        for number, body in rows.bodies(
            target.count,
            self._partitioner,
            settings.codec,
            batch_bytes=settings.batch_bytes,
            batch_messages=settings.batch_messages,
            max_message_bytes=settings.max_message_bytes,
            timestamp_ms=created_ms,
        ):
            where = self._sticky.whole_batch(topic, target.candidates, body.size) if number == ANY_PARTITION else number
            self._core.add((topic, where), body, self._clock())
            yield

    def _now_ms(self) -> int:
        return time.time_ns() // 1_000_000 if self._clock_ms is None else self._clock_ms()

    def _require_partition(self, topic: str, number: int) -> None:
        target = self._target(topic, fresh=True)  # it may have got more partitions
        if number >= target.count:
            raise no_partition(topic, number, target.count)

    def _target(self, topic: str, *, fresh: bool = False) -> _Target:
        found = self._look_up(topic, fresh)
        if found is None or not found.leaders:
            raise Unsendable("UNKNOWN_TOPIC_OR_PARTITION", f"there is no topic {topic!r}")
        target = self._last_targets.get(topic)
        if target is None or target.topic is not found:
            target = self._last_targets[topic] = _Target.of(found)
        self._targets[topic] = target
        return target


def _columns_pay(messages: int, partitions: int) -> bool:
    """Whether columns cost less than single records. The batches of columns do not collect: they must not be small."""
    if messages < _COLUMNS_FROM * partitions:
        return False
    if "pyarrow" in sys.modules:
        return True
    return messages >= _IMPORT_FROM and find_spec("pyarrow") is not None and find_spec("numpy") is not None


# The partitions of messages that may go anywhere: one batch for one partition, and every partition in its turn.

Choose = Callable[[Sequence[int]], int]


@dataclass(slots=True)
class _Stay:
    partition: int
    since: float
    size: int = 0


class StickyPartitions:
    """Keeps messages without a key together, so that one of many partitions gets one large batch, not all small ones.

    Messages stay in a partition until its batch is sent or full, or for ``sticky.partitioning.linger.ms``. Then they move
    to another one, at random; 0 chooses for each message. Source: KIP-480, KIP-794, librdkafka's
    ``rd_kafka_msg_sticky_partition``.
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
        """The partition of one message."""
        if len(candidates) == 1:
            return candidates[0]
        stay = self._stays.get(topic)
        size += OVERHEAD
        if (
            stay is None
            or stay.size + size > self._batch_bytes
            or now - stay.since >= self._sticky_s
            or not collects_in((topic, stay.partition))
        ):
            left = None if stay is None or self._sticky_s <= 0 else stay.partition
            stay = self._stays[topic] = _Stay(self._choose([one for one in candidates if one != left]), now)
        stay.size += size
        return stay.partition

    def whole_batch(self, topic: str, candidates: Sequence[int], size: int) -> int:
        """The partition of a whole batch: one of those that got the fewest bytes of the transaction."""
        sent_to = self._sent_to.setdefault(topic, {})
        least = min(sent_to.get(one, 0) for one in candidates)
        partition = self._choose([one for one in candidates if sent_to.get(one, 0) == least])
        sent_to[partition] = least + size
        return partition
