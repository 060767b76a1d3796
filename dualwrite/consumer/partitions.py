"""The partitions assigned to a member: their messages, the units of work made of these, and where offsets stand.

Consumed offsets move with the work: in the Kafka transaction, or as rows in the database.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaException, TopicPartition

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.kafka.native.coordination import group_of
from dualwrite.stores.sql.consumed import NOTHING_YET, ClaimedOffset, ConsumedOffsets
from dualwrite.waiting import Condition

if TYPE_CHECKING:
    from confluent_kafka import Message

    from dualwrite.kafka.coordinator import KafkaCoordinator
    from dualwrite.writing.transaction import Transaction

Name = tuple[str, int]

_FULL: Final = 8
"""A partition is paused when it holds this many times the messages of a unit. Pausing discards what was fetched."""
_ALL_FULL: Final = 8
"""When all partitions together hold this many times as much, every partition that holds a unit's messages is paused, which
bounds the memory."""


@dataclass(eq=False)
class Partition:
    """A partition while it is assigned to this member. A new assignment makes a new one."""

    name: Name
    # The next offset to commit; None before anything was read.
    next_offset: int | None = None
    # Its row, where offsets are rows.
    claimed: ClaimedOffset | None = None
    waiting: deque[Message] = field(default_factory=deque)
    # Whether a unit works on it: one at a time keeps the order.
    busy: bool = False
    # It is being revoked: units begin no further transaction with it.
    leaving: bool = False
    # It is no longer ours: a transaction with it must not commit.
    lost: bool = False
    # Its position must be set back before anything else is read.
    rewind: bool = False
    paused: bool = False
    # The end of the log that the consumer came to before it read anything.
    reached: int | None = None
    # When something was last read from it, or it was assigned.
    read_at: float = field(default_factory=now_s)

    @property
    def is_due(self) -> bool:
        """Whether a unit may take messages from it."""
        return bool(self.waiting) and not (self.busy or self.leaving or self.lost or self.rewind)


@dataclass(frozen=True)
class Unit:
    """Messages for one transaction, and the partitions that they are from."""

    partitions: Sequence[Partition]
    messages: Sequence[Message]

    @property
    def is_lost(self) -> bool:
        """Whether a partition is no longer ours."""
        return any(partition.lost for partition in self.partitions)

    @property
    def must_end(self) -> bool:
        """Whether no further transaction may begin."""
        return any(partition.lost or partition.leaving for partition in self.partitions)


class Partitions:
    """All partitions of a member.

    A unit has at most ``max_messages``, and waits ``linger_s`` to become full. As many units as there are ``workers`` may run
    at a time.
    """

    def __init__(self, max_messages: int, linger_s: float, workers: int) -> None:
        self._max_messages = max_messages
        self._linger_s = linger_s
        self._workers = workers
        self._changed = Condition()
        self._assigned: dict[Name, Partition] = {}
        self._closed = False

    def add(self, names: Iterable[Name]) -> list[Partition]:
        """Note an assignment."""
        made = [Partition(name) for name in names]
        with self._changed:
            self._assigned.update((one.name, one) for one in made)
        return made

    def remove(self, names: Collection[Name], within_s: float) -> None:
        """Note that partitions are no longer ours. Waits for units that work on them; after ``within_s`` these must abort."""
        deadline = Deadline(within_s)
        with self._changed:
            gone = [one for name in names if (one := self._assigned.pop(name, None)) is not None]
            for one in gone:
                one.leaving = True
                one.waiting.clear()
            self._changed.notify_all()
            while any(one.busy for one in gone) and not deadline.expired:
                self._changed.wait(deadline.remaining_s())
            for one in gone:
                one.lost = True
            self._changed.notify_all()

    def all(self) -> list[Partition]:
        """The partitions that are ours now."""
        with self._changed:
            return list(self._assigned.values())

    def put(self, messages: Iterable[Message]) -> None:
        """Take messages that were read, in their order. Drops those of partitions that are not ours."""
        now = now_s()
        with self._changed:
            for message in messages:
                partition = self._assigned.get((message.topic() or "", message.partition() or 0))
                if partition is not None and not partition.rewind:
                    partition.waiting.append(message)
                    partition.read_at = now
                    if partition.next_offset is None:
                        partition.next_offset = message.offset()
            self._changed.notify_all()

    def reach(self, ends: Iterable[Message]) -> None:
        """Note that the consumer has come to the end of partitions. Nothing waits there for a unit."""
        with self._changed:
            for end in ends:
                partition = self._assigned.get((end.topic() or "", end.partition() or 0))
                if partition is not None:
                    partition.reached = end.offset()

    def take(self) -> Unit | None:
        """Wait for a unit of work, and take it. Returns None when closed. :meth:`give_back` must follow."""
        with self._changed:
            while not self._closed:
                due = [one for one in self._assigned.values() if one.is_due]
                wait_s = self._wait_s(due)
                if due and wait_s <= 0:
                    return self._unit(due)
                self._changed.wait(wait_s if due else None)
        return None

    def _wait_s(self, due: Sequence[Partition]) -> float:
        if not due or sum(len(one.waiting) for one in due) >= self._max_messages:
            return 0.0
        return min(one.read_at for one in due) + self._linger_s - now_s()

    def _unit(self, due: list[Partition]) -> Unit:
        """Take from enough partitions that each worker finds some, beginning with the longest queue."""
        share = -(-len(self._assigned) // self._workers)
        due.sort(key=lambda one: len(one.waiting), reverse=True)
        taken: list[Partition] = []
        messages: list[Message] = []
        for one in due[:share]:
            room = self._max_messages - len(messages)
            if room == 0:
                break
            messages += [one.waiting.popleft() for _ in range(min(room, len(one.waiting)))]
            one.busy = True
            taken.append(one)
        return Unit(taken, messages)

    def give_back(self, unit: Unit, *, rewind: bool) -> None:
        """End a unit. With ``rewind``, what was read from its partitions is read again from the committed offsets."""
        with self._changed:
            for one in unit.partitions:
                one.busy = False
                if rewind:
                    one.rewind = True
                    one.waiting.clear()
            self._changed.notify_all()

    def wait(self, unit: Unit | None, seconds: float) -> None:
        """Wait before another attempt; shorter if none may begin. Without a unit, only closing makes it shorter."""
        deadline = Deadline(seconds)
        with self._changed:
            while not (self._closed or deadline.expired or (unit is not None and unit.must_end)):
                self._changed.wait(deadline.remaining_s())

    @property
    def closed(self) -> bool:
        """Whether no further transaction may begin."""
        return self._closed

    def close(self) -> None:
        """Begin no further transaction."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def rewind(self, partition: Partition, first: int) -> None:
        """Drop its messages. They are read again from the committed offset, or from ``first`` without one."""
        with self._changed:
            if partition.next_offset is None:
                partition.next_offset = first
            partition.rewind = True
            partition.waiting.clear()

    def rewound(self, partition: Partition, offset: int) -> None:
        """Note that the consumer resumes from this offset."""
        with self._changed:
            partition.rewind = False
            partition.next_offset = offset
            partition.read_at = now_s()
            self._changed.notify_all()

    def to_pause(self) -> list[Partition]:
        """Partitions that hold more than enough, and are not paused."""
        full, found = _FULL * self._max_messages, self.all()
        if sum(len(one.waiting) for one in found) >= _ALL_FULL * full:
            full = self._max_messages
        return [one for one in found if not one.paused and len(one.waiting) >= full]

    def to_resume(self) -> list[Partition]:
        """Paused partitions that need more."""
        return [one for one in self.all() if one.paused and len(one.waiting) < self._max_messages]

    @property
    def is_idle(self) -> bool:
        """Whether nothing was read that is not written."""
        with self._changed:
            return not any(one.busy or one.waiting or one.rewind for one in self._assigned.values())


# Where the consumed offsets stand: in the Kafka transaction, or as rows in the database. Each is moved with the work.

_ANSWER_S: Final = 60.0


class PartitionLost(Exception):
    """A partition of the unit is no longer ours: the block must abort, and another member writes its messages."""


class Offsets(Protocol):
    """Where offsets stand."""

    def start(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int] | None:
        """Take over newly assigned partitions.

        Returns the offsets to read from, as librdkafka takes them; None leaves them to the consumer.
        """
        ...

    def membership(self, consumer: Consumer) -> None:
        """Note this member's identity in the group. Called between polls, in the thread that polls."""
        ...

    def move(self, tx: Transaction, unit: Unit, to: Mapping[Name, int]) -> None:
        """Move the offsets in the transaction. Raises `PartitionLost` if a partition is no longer ours."""
        ...

    def moved(self, unit: Unit, to: Mapping[Name, int]) -> None:
        """Note that the transaction has committed."""
        ...

    def committed(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int]:
        """Where to resume reading after an abort; partitions without an answer are left out."""
        ...


class KafkaOffsets:
    """Offsets in the Kafka transaction: the group coordinator refuses those of a member that was expelled (KIP-447).

    It compares the member's id and generation, and accepts offsets without either from any client. A consumer that was expelled
    loses its id at once and joins again under a later generation, so the membership is noted while the partitions are ours.
    """

    def __init__(self) -> None:
        self._metadata: object = None

    def start(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int] | None:
        """See :class:`Offsets`. The consumer asks for the committed offsets, and waits until none of them is pending."""
        del consumer, partitions
        return None

    def membership(self, consumer: Consumer) -> None:
        metadata = consumer.consumer_group_metadata()
        if metadata is not None:
            group = group_of(metadata)
            if group.member_id and group.generation >= 0:
                self._metadata = metadata

    def move(self, tx: Transaction, unit: Unit, to: Mapping[Name, int]) -> None:
        # In this order. A consumer joins again only after its callback has marked the partitions as lost: if the membership
        # is a later one than that of our messages, the mark is seen.
        metadata = self._metadata
        if unit.is_lost or metadata is None:
            raise PartitionLost
        tx.send_offsets_to_transaction([TopicPartition(*name, offset) for name, offset in to.items()], metadata)

    def moved(self, unit: Unit, to: Mapping[Name, int]) -> None:
        """See :class:`Offsets`."""

    def committed(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int]:
        asked = [TopicPartition(*one.name) for one in partitions]
        first = {one.name: one.next_offset for one in partitions}
        found = {}
        for answer in consumer.committed(asked, _ANSWER_S):
            name = (answer.topic, answer.partition)
            # Nothing committed: where we began to read.
            offset = answer.offset if answer.offset >= 0 else first[name]
            if answer.error is None and offset is not None:
                found[name] = offset
        return found


def _log_of(consumer: Consumer, name: Name) -> tuple[int, int]:
    try:
        found = consumer.get_watermark_offsets(TopicPartition(*name), timeout=_ANSWER_S)
    except KafkaException as error:
        raise Unavailable(f"the offsets of {name[0]}[{name[1]}] are not known: {error}") from error
    if found is None:
        raise Unavailable(f"the offsets of {name[0]}[{name[1]}] are not known: no answer in {_ANSWER_S:g} s")
    return found


def _require_in_log(name: Name, offset: int, log: tuple[int, int]) -> None:
    """Refuse to start elsewhere, as ``auto.offset.reset`` would: messages would be skipped, or written again."""
    first, end = log
    if first <= offset <= end:
        return
    why = "messages were deleted before they were consumed" if offset < first else "it has lost messages at its end"
    raise ConfigurationError(
        f"the group has consumed {name[0]}[{name[1]}] up to offset {offset}, but its log holds {first} to {end}: {why}",
        next_step="set next_offset in dualwrite_consumed to the offset to resume from; -1 leaves it to auto.offset.reset",
    )


class RowOffsets:
    """Offsets as rows: each move is conditional, and only the last member to claim the partition meets the condition."""

    def __init__(self, rows: ConsumedOffsets, coordinator: KafkaCoordinator) -> None:
        self._rows = rows
        self._coordinator = coordinator

    def start(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int] | None:
        """See :class:`Offsets`. Refuses a row that names an offset that the log does not hold."""
        claimed = self._claim(partitions)
        for name, row in claimed.items():
            if row.next_offset != NOTHING_YET:
                _require_in_log(name, row.next_offset, _log_of(consumer, name))
        # Without a row yet, offsets that the group has committed in Kafka count, then auto.offset.reset.
        return {
            name: OFFSET_INVALID if row.next_offset == NOTHING_YET else row.next_offset for name, row in claimed.items()
        }

    def _claim(self, partitions: Sequence[Partition]) -> dict[Name, ClaimedOffset]:
        ids = self._coordinator.topic_ids({one.name[0] for one in partitions}, Deadline(_ANSWER_S))
        claimed = self._rows.claim({one.name: ids.get(one.name[0]) for one in partitions})
        for one in partitions:
            one.claimed = claimed[one.name]
        return claimed

    def membership(self, consumer: Consumer) -> None:
        """See :class:`Offsets`. The row's epoch is the membership."""

    def move(self, tx: Transaction, unit: Unit, to: Mapping[Name, int]) -> None:
        if unit.is_lost:
            raise PartitionLost
        claimed = {one.name: one.claimed for one in unit.partitions}
        for name in sorted(to):
            row = claimed[name]
            if row is None or not self._rows.move(tx.connection, name, row, to[name]):
                raise PartitionLost

    def moved(self, unit: Unit, to: Mapping[Name, int]) -> None:
        for one in unit.partitions:
            if one.name in to and one.claimed is not None:
                one.claimed = ClaimedOffset(one.claimed.epoch, to[one.name])

    def committed(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int]:
        """See :class:`Offsets`. Claims again, which refuses an earlier transaction of ours that may still commit."""
        del consumer
        claimed = self._claim(partitions)
        found = {one.name: claimed[one.name].next_offset for one in partitions}
        for one in partitions:
            if found[one.name] == NOTHING_YET and one.next_offset is not None:
                found[one.name] = one.next_offset
        return {name: offset for name, offset in found.items() if offset != NOTHING_YET}
