"""The partitions assigned to a member, messages read from them, and the units of work made of these; for threads and tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline, now_s
from dualwrite.waiting import Condition

if TYPE_CHECKING:
    from confluent_kafka import Message

    from dualwrite.stores.sql.consumed import ClaimedOffset

Name = tuple[str, int]

_FULL: Final = 8
"""A partition is paused when it holds this many times the messages of a unit. Pausing discards what was fetched."""
_ALL_FULL: Final = 8
"""When all partitions together hold this many times as much, those pause that hold a unit's messages: memory is bounded."""


@dataclass(eq=False)
class Partition:
    """A partition while it is assigned to this member. A new assignment makes a new one.

    Attributes:
        name: The topic, and the partition's number.
        next_offset: The next offset to commit; None before anything was read.
        claimed: Its row, where offsets are rows.
        waiting: Messages that no unit has taken.
        busy: Whether a unit works on it: one at a time keeps the order.
        leaving: Whether it is being taken from us: units begin no further transaction with it.
        lost: Whether it is no longer ours: a transaction with it must not commit.
        rewind: Whether its position must be set back before anything else is read.
        paused: Whether the consumer does not fetch it.
        reached: The end of the log that the consumer came to before it read anything; None if it did not.
        read_at: When something was last read from it, or it was assigned.
    """

    name: Name
    next_offset: int | None = None
    claimed: ClaimedOffset | None = None
    waiting: deque[Message] = field(default_factory=deque)
    busy: bool = False
    leaving: bool = False
    lost: bool = False
    rewind: bool = False
    paused: bool = False
    reached: int | None = None
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

    Args:
        max_messages: The maximum number of messages in a unit.
        linger_s: How long a unit waits to become full, in seconds.
        workers: How many units may run at a time.
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
        """Drop what was read from it: it is read again from the committed offset, or from ``first`` if there is none."""
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
