"""A partition of units as readers of committed records see it: its ranges, the reader that follows it, and ``BatchReader``."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from dualwrite.clock import Deadline, pause
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.interfaces import Closing
from dualwrite.kafka.coordinator import connection_settings
from dualwrite.kafka.librdkafka.handle import list_offsets
from dualwrite.units.records import (
    BatchRange,
    Effect,
    Follower,
    Offsets,
    Partition,
    Snapshot,
    UnitEvent,
    UnitImage,
    UnitRecord,
    event_of,
)

logger = logging.getLogger(__name__)

UNIT_PARTITION: Final = 0
_AT_ONCE: Final = 1000
_POLL_S: Final = 0.1
_END_MS: Final = 20
"""How long a broker waits for more at the end of a partition: its empty answer shows the end. By default half a second."""
_LOOKS_AGAIN_S: Final = 0.01
_WINDOW: Final = 64
_WIDER: Final = 8
_QUEUED_KB: Final = 16 * 1024
_SETTINGS: Final = {
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    # An offset that retention has deleted must not be skipped silently.
    "auto.offset.reset": "error",
    "queued.max.messages.kbytes": _QUEUED_KB,
}
_REFUSED: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 - confluent-kafka's own error codes begin with an underscore
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
    }
)


class PartitionLogs:
    """Partitions as readers of committed records see them. Used by one thread; close it.

    ``follows`` is for :meth:`follow`, which waits for more; otherwise it reads what there is, to its end.
    """

    def __init__(self, kafka: Mapping[str, object], *, follows: bool = False) -> None:
        reaching = connection_settings(kafka)
        waiting = {} if follows else {"fetch.wait.max.ms": _END_MS}
        self._followed: Partition = ("", -1)
        self._next: int | None = None
        self._exact = True
        self._admin = AdminClient(reaching)  # type: ignore[arg-type] # callbacks, too
        self._consumer = Consumer(
            {**reaching, **_SETTINGS, **waiting, "group.id": f"dualwrite-units-{secrets.token_hex(8)}"}
        )

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    def partitions(self, topic: str, deadline: Deadline) -> list[int]:
        """The partitions of a topic."""
        try:
            found = self._admin.list_topics(topic, timeout=deadline.remaining_s()).topics[topic]
        except KafkaException as error:
            raise Unavailable(f"the partitions of {topic} are not known: {error}") from error
        if found.error is not None:
            raise ConfigurationError(f"the topic {topic!r} cannot be read: {found.error.str()}")
        return sorted(found.partitions)

    def offsets(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, Offsets]:
        """Where partitions begin, and where they end for ``read_committed`` readers now: before the first open transaction."""
        wanted = list(partitions)
        # Beginnings first: retention may delete in between, and a beginning must not lie beyond its end.
        begins = self._asked(wanted, OffsetSpec.earliest(), IsolationLevel.READ_COMMITTED, deadline)
        ends = self._asked(wanted, OffsetSpec.latest(), IsolationLevel.READ_COMMITTED, deadline)
        return {name: Offsets(begins[name], ends[name]) for name in wanted}

    def settled_offsets(self, partitions: Iterable[Partition], deadline: Deadline) -> dict[Partition, Offsets]:
        """As :meth:`offsets`, once readers see all that is committed now: no transaction that is open now hides any of it.

        Raises `Unavailable` if a transaction stays open.
        """
        wanted = list(partitions)
        highs = self._asked(wanted, OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED, deadline)
        while True:
            found = self.offsets(wanted, deadline)
            hidden = [name for name in wanted if found[name].end < highs[name]]
            if not hidden:
                return found
            if deadline.expired:
                raise Unavailable(f"a transaction stays open in {hidden[0][0]}[{hidden[0][1]}]")
            pause(_LOOKS_AGAIN_S)

    def _asked(
        self, partitions: list[Partition], which: OffsetSpec, isolation: IsolationLevel, deadline: Deadline
    ) -> dict[Partition, int]:
        while True:
            asked = {TopicPartition(topic, number): which for topic, number in partitions}
            try:
                found = list_offsets(self._admin, asked, isolation, timeout_s=max(1.0, deadline.remaining_s()))
                return {(where.topic, where.partition): offset for where, offset in found.items()}
            except KafkaException as error:
                if error.args[0].code() in _REFUSED:
                    raise ConfigurationError(f"the partitions cannot be read: {error.args[0].str()}") from error
                if deadline.expired:
                    raise Unavailable(f"the ends of partitions are not known: {error}") from error
                pause(_LOOKS_AGAIN_S)

    def read(
        self, ranges: Mapping[Partition, Offsets], *, timeout_s: float
    ) -> Generator[tuple[Partition, int, UnitRecord], None, None]:
        """Yield the committed records of ranges with their offsets, in the order of each partition.

        Keeps no more in memory than a consumer's queue. One call at a time. Raises `ConfigurationError` if retention has
        deleted the beginning of a range, and `Unavailable` if the brokers send nothing for ``timeout_s``.
        """
        missing = {name: wanted.end for name, wanted in ranges.items() if wanted.begin < wanted.end}
        self._consumer.assign([TopicPartition(*name, ranges[name].begin) for name in missing])
        try:
            deadline = Deadline(timeout_s)
            while missing:
                messages = self.poll(_POLL_S)
                if messages:
                    deadline = Deadline(timeout_s)
                elif deadline.expired:
                    raise Unavailable(f"{next(iter(missing))} was not read to its end: the brokers send nothing")
                for message in messages:
                    yield from self._taken(message, missing)
        finally:
            self._consumer.unassign()

    def _taken(self, message: Message, missing: dict[Partition, int]) -> Iterator[tuple[Partition, int, UnitRecord]]:
        name, offset = place_of(message)
        if is_end(message):
            following = offset
        else:
            following = offset + 1
            if name in missing and offset < missing[name]:
                yield name, offset, record_of(message)
        if name in missing and following >= missing[name]:
            del missing[name]
            self._consumer.incremental_unassign([TopicPartition(*name)])

    def tails(self, name: Partition, deadline: Deadline) -> Iterator[Iterator[tuple[int, UnitRecord]]]:
        """Yield ever longer tails of a partition, with the offsets of their records; the last one is the whole log."""
        whole = self.settled_offsets([name], deadline)[name]
        width = _WINDOW
        while True:
            begin = max(whole.begin, whole.end - width)
            found = self.read({name: Offsets(begin, whole.end)}, timeout_s=deadline.remaining_s())
            yield ((offset, record) for _, offset, record in found)
            if begin == whole.begin:
                return
            width *= _WIDER

    def last_event(self, name: Partition, deadline: Deadline) -> UnitEvent | None:
        """The meaning of the last committed record of a partition to a reader of units; None if there is none."""
        for tail in self.tails(name, deadline):
            last = None
            for _, record in tail:
                last = record
            if last is not None:
                return event_of(last.headers)
        return None

    def follow(self, name: Partition, begin: int | None) -> None:
        """Start to read a partition by :meth:`following`, from an offset or from its beginning."""
        self._followed, self._next, self._exact = name, begin, True
        self._consumer.assign([TopicPartition(*name, OFFSET_BEGINNING if begin is None else begin)])

    @property
    def reached(self) -> int:
        """The offset up to which all records of the followed partition were taken; 0 before the first one."""
        return self._next or 0

    def following(self, timeout_s: float) -> Iterator[tuple[int, UnitRecord]]:
        """Yield the next records of the followed partition with their offsets; none if none came in time.

        A record counts as taken when the next one is asked for. After an exception, here or in the caller's loop, the next
        call begins again at the first record that was not taken: what the consumer had handed out is lost with the exception.
        """
        if not self._exact:
            self.follow(self._followed, self._next)
        self._exact = False
        for message in self.poll(timeout_s):
            name, offset = place_of(message)
            if name != self._followed:
                continue
            if is_end(message):
                self._next = max(self.reached, offset)
            else:
                yield offset, record_of(message)
                self._next = offset + 1
        self._exact = True

    def poll(self, timeout_s: float) -> list[Message]:
        """The next messages and end-of-partition events; empty if none came in time."""
        first = self._consumer.poll(timeout_s)  # consume() would wait for as many as it may return
        return [] if first is None else [first, *self._consumer.consume(_AT_ONCE, 0)]


def place_of(message: Message) -> tuple[Partition, int]:
    """The partition and offset of a message, or of an end-of-partition event.

    Raises `ConfigurationError` if it is an error: retention has deleted what is read, or a right is missing.
    """
    error = message.error()
    if error is not None and error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001 - as above
        raise ConfigurationError(
            f"{message.topic()}[{message.partition()}]: the records to read next are deleted: {error.str()}",
            next_step="begin again without a position; keep records for longer than the slowest reader needs",
        )
    if error is not None and error.code() in _REFUSED:
        raise ConfigurationError(f"{message.topic()}[{message.partition()}] cannot be read: {error.str()}")
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    passing = error is not None and error.code() != KafkaError._PARTITION_EOF  # noqa: SLF001 - as above
    if passing or topic is None or partition is None or offset is None:
        logger.warning("a consumer reports: %s", error)
        return ("", -1), -1
    return (topic, partition), offset


def is_end(message: Message) -> bool:
    """Whether it is an end-of-partition event, not a record."""
    return message.error() is not None


def record_of(message: Message) -> UnitRecord:
    """The record in a message."""
    found = message.headers() or ()
    pairs = found.items() if isinstance(found, dict) else found
    headers = tuple((key, value.encode() if isinstance(value, str) else value) for key, value in pairs)
    return UnitRecord(_bytes(message.key()), _bytes(message.value()), headers)


def _bytes(part: str | bytes | None) -> bytes | None:
    return part.encode() if isinstance(part, str) else part


# `UnitReader`: reads the units of one partition into an image.

Contents = TypeVar("Contents")

_SHOWN: Final = frozenset({Effect.SHOW, Effect.PUBLISH})


class UnitReader(Closing, Generic[Contents]):
    """Reads a partition into an image, which shows whole units only. A context manager.

    It applies records as it reads them, publishes at the end of a unit and reverts at an abort: it needs memory for the image,
    not for the unit. One thread reads; any thread may take snapshots. It joins no consumer group and commits no offsets: keep
    a `Snapshot`, or read from the beginning.

    Args:
        topic: The topic.
        partition: The number of the partition.
        kafka: librdkafka configuration; ``bootstrap.servers`` at least. Only its connection settings are used.
        image: What it applies records to: a `KeyedImage`, or one of yours.
        position: That of the snapshot that the image begins with; None to read the log from its beginning.

    Raises:
        ConfigurationError: A setting cannot work.

    Source: KIP-868, "record visibility".
    """

    def __init__(
        self,
        topic: str,
        partition: int = 0,
        *,
        kafka: Mapping[str, object],
        image: UnitImage[Contents],
        position: int | None = None,
    ) -> None:
        self._name = topic, partition
        self._follower = Follower(image, position)
        self._shows_more = False
        self._logs = PartitionLogs(kafka, follows=True)
        self._logs.follow(self._name, position)

    def poll(self, timeout_s: float = 1.0) -> bool:
        """Read what there is, or wait for it. Returns whether the image shows more than when a call last returned.

        An exception may leave it (a time limit, Ctrl-C). The next call continues with the first record that was not applied;
        if the exception has struck while a record was applied, all further calls refuse, and the image stays as it is.

        Args:
            timeout_s: The longest wait, in seconds.

        Raises:
            ConfigurationError: The log breaks the rules of units, retention has deleted what comes next, or a right is missing.
            IllegalStateError: An exception has left an earlier call while it applied a record: open another reader.
        """
        for offset, record in self._logs.following(timeout_s):
            if self._follower.read(offset, record) in _SHOWN:
                self._shows_more = True
        shows_more, self._shows_more = self._shows_more, False
        return shows_more

    def catch_up(self, timeout_s: float = 60.0) -> None:
        """Read all that Kafka shows at the time of the call. A unit whose end it shows by then is visible on return.

        Kafka answers a commit a moment before it shows what was committed.

        Args:
            timeout_s: Limits the whole call, in seconds.

        Raises:
            Unavailable: It was not read in time.
            ConfigurationError, IllegalStateError: As :meth:`poll`.
        """
        deadline = Deadline(timeout_s)
        end = self._logs.offsets([self._name], deadline)[self._name].end
        while self._logs.reached < end:
            if deadline.expired:
                raise Unavailable(f"{self._name[0]}[{self._name[1]}] was not read to offset {end} in time")
            self.poll(min(1.0, deadline.remaining_s()))

    def snapshot(self) -> Snapshot[Contents]:
        """All that the image shows, and the position to resume from: no markers, and no part of a unit.

        Raises:
            IllegalStateError: An exception has left the image in the middle of a record.
        """
        return self._follower.snapshot()

    def close(self) -> None:
        """Disconnect."""
        self._logs.close()


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


class BatchReader(Closing):
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
