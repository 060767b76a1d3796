"""``BatchReader``: hands out complete batches only, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.protocol.lives import Effect
from dualwrite.units.image import Follower
from dualwrite.units.log import PartitionLogs
from dualwrite.units.records import BatchRange, UnitRecord
from dualwrite.units.writer import UNIT_PARTITION

if TYPE_CHECKING:
    from typing_extensions import Self


class BatchRecord(NamedTuple):
    """One message of a batch.

    Attributes:
        topic: Its topic.
        partition: Its partition.
        offset: Its offset there.
        key: Its key; None if it has none.
        value: Its value; None for a tombstone.
        headers: Its headers, in their order.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class VisibleBatch:
    """A complete batch.

    Attributes:
        name: Name of the batch.
        position: The position to resume from once this batch is processed: that of the next batch.
        ranges: The offsets that it has written in each partition.
    """

    def __init__(self, ranges: Sequence[BatchRange], position: int, logs: PartitionLogs, timeout_s: float) -> None:
        self.name = ranges[0].batch
        self.position = position
        self.ranges = ranges
        self._logs = logs
        self._timeout_s = timeout_s

    def records(self) -> Iterator[BatchRecord]:
        """Yield its messages as they are read, in order within each partition: only a consumer's queue is held in memory.

        May be called again, but not while another call is still yielding.

        Raises:
            ConfigurationError: Retention has deleted some of them, or a right is missing.
            Unavailable: The brokers send nothing for too long.
        """
        wanted = {one.name: one.offsets for one in self.ranges}
        for (topic, partition), offset, record in self._logs.read(wanted, timeout_s=self._timeout_s):
            yield BatchRecord(topic, partition, offset, *record)

    def __repr__(self) -> str:
        return f"<VisibleBatch {self.name} in {len(self.ranges)} partitions>"


class _Ranges:
    """The image of a unit topic: the ranges of the newest batch."""

    def __init__(self) -> None:
        self.shown: Sequence[BatchRange] = ()
        self._held: list[BatchRange] = []

    def apply(self, record: UnitRecord) -> None:
        self._held.append(BatchRange.decoded(record.value))

    def publish(self) -> None:
        self.shown, self._held = self._held, []

    def revert(self) -> None:
        self._held = []

    def contents(self) -> Sequence[BatchRange]:
        return self.shown


class BatchReader:
    """Reads the batches that a Spark sink announces in its unit topic: each becomes visible whole, at one moment.

    A context manager; it joins no consumer group. Keep `VisibleBatch.position` with the results of the batch, in the same
    transaction if they must count once, and give it to the next reader. Used by one thread.

    Args:
        unit_topic: The sink's ``unit_topic``.
        kafka: librdkafka configuration; ``bootstrap.servers`` at least. Only its connection settings are used.
        position: That of the last batch that was processed; None to begin with the first one that the unit topic holds.
        timeout_s: How long brokers may send nothing of a batch, in seconds.

    Raises:
        ConfigurationError: A setting cannot work.
    """

    def __init__(
        self, unit_topic: str, *, kafka: Mapping[str, object], position: int | None = None, timeout_s: float = 60.0
    ) -> None:
        self._name = unit_topic, UNIT_PARTITION
        self._image = _Ranges()
        self._follower = Follower(self._image, position)
        self._timeout_s = timeout_s
        self._waiting: list[VisibleBatch] = []
        self._units = PartitionLogs(kafka, follows=True)
        self._data = PartitionLogs(kafka)
        self._units.follow(self._name, position)

    def next_batch(self, timeout_s: float = 1.0) -> VisibleBatch | None:
        """The next complete batch; None if there is none in time.

        Args:
            timeout_s: The longest wait, in seconds.

        Raises:
            ConfigurationError: The unit topic holds something else, retention has deleted what comes next, or a right is
                missing.
            IllegalStateError: An exception (a time limit, Ctrl-C) has left an earlier call in the middle of a record: open
                another reader with the position of the last batch that was processed.
        """
        deadline = Deadline(timeout_s)
        while not self._waiting:
            for offset, record in self._units.following(deadline.remaining_s()):
                self._read(offset, record)
            if deadline.expired:
                break
        return self._waiting.pop(0) if self._waiting else None

    def _read(self, offset: int, record: UnitRecord) -> None:
        effect = self._follower.read(offset, record)
        if effect is Effect.SHOW:
            raise ConfigurationError(
                f"offset {offset} of {self._name[0]} belongs to no unit",
                next_step="let nothing but the sink write to the unit topic",
            )
        if effect is Effect.PUBLISH and self._image.shown:
            self._waiting.append(VisibleBatch(self._image.shown, offset + 1, self._data, self._timeout_s))

    def close(self) -> None:
        """Disconnect. Batches that were handed out cannot be read any more."""
        self._units.close()
        self._data.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
