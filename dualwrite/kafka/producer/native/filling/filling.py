"""Messages on their way into a transaction: each given a partition, and collected in that partition's batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import repeat
from typing import TYPE_CHECKING, Final, Protocol

from dualwrite.kafka.coordinator.routing import Topic
from dualwrite.kafka.producer.native.filling.sticky import StickyPartitions
from dualwrite.kafka.producer.native.records.compression import Codec
from dualwrite.kafka.producer.native.records.partitioners import partitioner
from dualwrite.kafka.producer.native.wire.core import ProduceCore
from dualwrite.protocol.contents import (
    ANY_PARTITION,
    Content,
    Contents,
    Unsendable,
    check_topic,
    checked,
    no_partition,
)
from dualwrite.runtime.deadline import now_s

if TYPE_CHECKING:
    from dualwrite.kafka.producer.native.records.column_rows import Column

_YIELD_EVERY: Final = 256
_ROWS_AT_ONCE: Final = 10_000
_COLUMNS_FROM: Final = 250
"""From this many messages for each partition on, columns of them cost at most half as much as taking them one by one."""
_IMPORT_FROM: Final = 100_000
"""From this many on columns repay that pyarrow is imported: 0.2 s, while they save 2 microseconds a message."""


class FillingSettings(Protocol):
    """The settings that decide what a message may be and where it goes."""

    @property
    def codec(self) -> Codec:
        """How batches are compressed."""

    @property
    def partitioner(self) -> str:
        """The partitioner's name, as librdkafka has it."""

    @property
    def batch_bytes(self) -> int:
        """The greatest size of a batch that holds several messages."""

    @property
    def max_message_bytes(self) -> int:
        """The greatest size of a message."""

    @property
    def queue_bytes(self) -> int:
        """How many bytes of keys and values may wait for acknowledgement."""

    @property
    def queue_messages(self) -> int:
        """How many messages may wait for acknowledgement."""

    @property
    def batch_messages(self) -> int:
        """The most messages in a batch."""

    @property
    def sticky_s(self) -> float:
        """For how long messages without a key stay in one partition, in seconds."""


@dataclass(frozen=True)
class _Target:
    """A topic's partitions.

    Attributes:
        count: The number of its partitions.
        candidates: Those with a leader, or all if none has one.
    """

    count: int
    candidates: tuple[int, ...]

    @classmethod
    def of(cls, topic: Topic) -> _Target:
        count = len(topic.leaders)
        led = tuple(sorted(number for number, leader in topic.leaders.items() if leader is not None))
        return cls(count, led or tuple(range(count)))


class Filling:
    """Brings the messages of one transaction after another into its :class:`ProduceCore`. Used by one thread at a time.

    Nothing here waits or sends. Before the next message the owner waits while :attr:`is_full`, and lets batches go.

    Args:
        core: The first transaction's messages.
        settings: The limits, the partitioner and the codec.
        topic: Looks a topic up by its name; None if there is none. It may ask a broker, and must where the second argument is
            true. Called once for each topic and transaction, and then for a partition that the topic does not have.
        sticky: Where messages without a key go; for tests.
        clock: The time, in seconds, on the owner's clock.
        clock_ms: The time (ms since 1970).

    Raises:
        ConfigurationError: There is no such partitioner.
    """

    def __init__(
        self,
        core: ProduceCore,
        settings: FillingSettings,
        topic: Callable[[str, bool], Topic | None],
        *,
        sticky: StickyPartitions | None = None,
        clock: Callable[[], float] = now_s,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._settings = settings
        self._look_up = topic
        self._clock = clock
        self._clock_ms = clock_ms
        self._partitioner = partitioner(settings.partitioner)
        self._sticky = sticky or StickyPartitions(settings.sticky_s, settings.batch_bytes)
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

    @property
    def max_message_bytes(self) -> int:
        """The greatest size of a message."""
        return self._settings.max_message_bytes

    def append(self, topic: str, contents: Contents, *, now: float, callback: object = None) -> None:
        """Take one message. If this raises, nothing of it was taken.

        Args:
            topic: Its topic.
            contents: Its parts.
            now: The time, in seconds on the owner's clock.
            callback: Kept with its batch, for the owner to call after the acknowledgement.

        Raises:
            Unsendable: There is no such topic or partition.
        """
        value, key, headers, partition, timestamp_ms, _ = contents
        target = self._targets.get(topic) or self._target(topic)
        number = self._explicit(topic, partition, target)
        if number is None:
            number = self._partitioner.partition(key, target.count)
        if number is None:
            size = len(value or b"") + len(key or b"")
            number = self._sticky.one_message(topic, target.candidates, size, now, self._core.collects_in)
        created_ms = self._clock_ms() if timestamp_ms is None else timestamp_ms
        self._core.append((topic, number), value, key, headers, created_ms, now=now, callback=callback)

    def append_many(
        self, topic: str, values: Sequence[Content], keys: Sequence[Content] | None = None
    ) -> Iterator[None]:
        """Check and take many messages of one topic: as :meth:`append` for each, in less time.

        Args:
            topic: The topic of all.
            values: Their values.
            keys: As many keys; None if there are none.

        Yields:
            Now and then, so that the owner may wait while :attr:`is_full`, and let batches go.

        Raises:
            Unsendable, TypeError, UnicodeEncodeError: As `append` and `checked`. What stands before may have been taken.
            ValueError: The numbers of keys and values differ.
        """
        if keys is not None and len(keys) != len(values):
            raise ValueError(f"{len(values)} values, {len(keys)} keys")
        check_topic(topic)
        target = self._targets.get(topic) or self._target(topic)
        created_ms = self._clock_ms()
        if _columns_pay(len(values), 1 if keys is None else target.count):
            yield from self._as_columns(topic, values, keys, created_ms)
            return
        max_bytes = self._settings.max_message_bytes
        for row, (value, key) in enumerate(zip(values, keys or repeat(None), strict=False)):
            contents = checked(topic, value, key, timestamp_ms=created_ms, max_bytes=max_bytes, subject=f"row {row}")
            self.append(topic, contents, now=self._clock())
            if (row + 1) % _YIELD_EVERY == 0:
                yield

    def _as_columns(
        self, topic: str, values: Sequence[Content], keys: Sequence[Content] | None, timestamp_ms: int
    ) -> Iterator[None]:
        from dualwrite.kafka.producer.native.filling.column_filling import column_of  # noqa: PLC0415 - imports pyarrow

        for first in range(0, len(values), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            its_keys = None if keys is None else column_of(keys[part])
            yield from self.append_columns(
                topic, column_of(values[part]), its_keys, timestamp_ms=timestamp_ms, first_row=first
            )

    def append_columns(
        self,
        topic: str,
        values: Column,
        keys: Column | None = None,
        headers: Column | None = None,
        partitions: Column | None = None,
        *,
        timestamps: Column | None = None,
        timestamp_ms: int | None = None,
        first_row: int = 0,
    ) -> Iterator[None]:
        """Take the rows of Arrow's columns; no Python object is made for a row.

        Args:
            topic: The topic of all.
            values: The values: binary or text of any Arrow type, in one array or in chunks; a null is a tombstone.
            keys: As many keys, likewise; None if there are none.
            headers: As many lists of headers: of structs of ``key`` and ``value``, or maps; None if there are none.
            partitions: As many partitions: integers; null or -1 chooses; None if none is given.
            timestamps: As many timestamps (ms since 1970): integers; null is now; None if none is given.
            timestamp_ms: When those were created that have no timestamp of their own (ms since 1970); None is now.
            first_row: The number of the first row in errors.

        Yields:
            After each batch, so that the owner may wait while :attr:`is_full`, and let batches go.

        Raises:
            Unsendable: There is no such topic, or a row cannot be sent: its number is named. Rows more than 8 MB before
                it may have been taken.
            TypeError: A column is of another type.
            ValueError: The columns differ in length.
        """
        from dualwrite.kafka.producer.native.filling.column_filling import Columns  # noqa: PLC0415 - imports pyarrow

        settings = self._settings
        columns = Columns(topic, values, keys, headers, partitions, timestamps=timestamps, first_row=first_row)
        created_ms = self._clock_ms() if timestamp_ms is None else timestamp_ms
        check_topic(topic)
        target = self._targets.get(topic) or self._target(topic)
        if columns.highest_partition >= target.count:
            target = self._target(topic, fresh=True)  # it may have got more partitions
        for number, body in columns.bodies(
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

    def _explicit(self, topic: str, partition: int | None, target: _Target) -> int | None:
        if partition is None:
            return None
        if partition >= target.count:
            target = self._target(topic, fresh=True)  # it may have got more partitions
        if partition < target.count:
            return partition
        raise no_partition(topic, partition, target.count)

    def _target(self, topic: str, *, fresh: bool = False) -> _Target:
        found = self._look_up(topic, fresh)
        if found is None or not found.leaders:
            raise Unsendable("UNKNOWN_TOPIC_OR_PARTITION", f"there is no topic {topic!r}")
        target = self._targets[topic] = _Target.of(found)
        return target


def _columns_pay(messages: int, partitions: int) -> bool:
    """Whether columns cost less than single records. The batches of columns do not collect: they must not be small."""
    if messages < _COLUMNS_FROM * partitions:
        return False
    if "pyarrow" in sys.modules:
        return True
    return messages >= _IMPORT_FROM and find_spec("pyarrow") is not None and find_spec("numpy") is not None
