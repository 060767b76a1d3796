"""The partitions assigned to a member: the thread that reads them, units of work made of their messages, and offsets.

Consumed offsets move with the work: in the Kafka transaction, or as rows in the database.

One thread polls, so that the member stays in the group whatever its workers wait for. An open transaction of a dead member
would block its successors, and Kafka does not say so; members look for such transactions and settle them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import ConfigurationError, Fenced, TransactionAborted, Unavailable
from dualwrite.kafka.coordinator import connection_settings
from dualwrite.kafka.native.coordination import group_of
from dualwrite.protocol.members import left_behind, member_prefix, pause_s
from dualwrite.protocol.process import is_for_good
from dualwrite.recovery.recover import status
from dualwrite.stores.sql.consumed import NOTHING_YET, ClaimedOffset, ConsumedOffsets
from dualwrite.waiting import Condition
from dualwrite.writing.left_behind import recover

if TYPE_CHECKING:
    from confluent_kafka import Message

    from dualwrite.interfaces import Database
    from dualwrite.kafka.coordinator import KafkaCoordinator
    from dualwrite.recovery.recover import IdStatus, RecoveryReport
    from dualwrite.writing.transaction import Transaction


Name = tuple[str, int]

_FULL: Final = 8
"""A partition is paused when it holds this many times the messages of a unit. Pausing discards what was fetched."""
_ALL_FULL: Final = 8
"""When all partitions together hold this many times as much, every partition that holds a unit's messages is paused. This
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
    # It is being revoked: units begin no more transactions with it.
    leaving: bool = False
    # It is no longer ours: a transaction with it must not commit.
    lost: bool = False
    # Its position must be reset before anything else is read.
    rewind: bool = False
    paused: bool = False
    # The end of the log, if the consumer reached it before it read anything.
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

    A unit has at most ``max_messages``, and waits up to ``linger_s`` to become full. Up to ``workers`` units run at a time.
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
        """Note that partitions are no longer ours. Units that work on them have ``within_s`` to end; then they must abort."""
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
        """Note that the consumer has reached the ends of partitions."""
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
        self._changed.notify_all()  # there is room
        return Unit(taken, messages)

    def give_back(self, unit: Unit, *, rewind: bool) -> None:
        """End a unit. With ``rewind``, its partitions are read again from the committed offsets."""
        with self._changed:
            for one in unit.partitions:
                one.busy = False
                if rewind:
                    one.rewind = True
                    one.waiting.clear()
            self._changed.notify_all()

    def wait(self, unit: Unit | None, seconds: float) -> None:
        """Wait before another attempt. Returns early if none may begin; without a unit, only when closed."""
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

    def to_pause(self, within_s: float = 0.0) -> list[Partition]:
        """Partitions that hold more than enough and are not paused. First waits up to ``within_s`` for units to take some."""
        deadline = Deadline(within_s)
        with self._changed:
            while (full := self._full()) and not (self._closed or deadline.expired):
                self._changed.wait(deadline.remaining_s())
        return full

    def _full(self) -> list[Partition]:
        full, found = _FULL * self._max_messages, self._assigned.values()
        if sum(len(one.waiting) for one in found) >= _ALL_FULL * full:
            full = self._max_messages
        return [one for one in found if not one.paused and len(one.waiting) >= full]

    def to_resume(self) -> list[Partition]:
        """Paused partitions that need more."""
        return [one for one in self.all() if one.paused and len(one.waiting) < self._max_messages]

    @property
    def is_idle(self) -> bool:
        """Whether everything that was read is written."""
        with self._changed:
            return not any(one.busy or one.waiting or one.rewind for one in self._assigned.values())


# Where the consumed offsets are kept: in the Kafka transaction, or as rows in the database. They move with the work.

_ANSWER_S: Final = 60.0


class PartitionLost(Exception):
    """A partition of the unit is no longer ours: the block must abort, and another member writes its messages."""


class Offsets(Protocol):
    """Where offsets are kept."""

    def start(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int] | None:
        """Take over newly assigned partitions.

        Returns the offsets to read from, as librdkafka takes them; None leaves them to the consumer.
        """
        ...

    def membership(self, consumer: Consumer) -> None:
        """Note this member's identity in the group. Called between polls, in the polling thread."""
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

    The coordinator compares the member's id and generation, and accepts offsets without them from any client. An expelled
    consumer loses its id at once and joins again under a later generation, so we note the membership while the partitions are
    ours.
    """

    def __init__(self) -> None:
        self._metadata: object = None

    def start(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int] | None:
        """Leaves it to the consumer, which asks for the committed offsets and waits until none of them is pending."""
        del consumer, partitions
        return None

    def membership(self, consumer: Consumer) -> None:
        metadata = consumer.consumer_group_metadata()
        if metadata is not None:
            group = group_of(metadata)
            if group.member_id and group.generation >= 0:
                self._metadata = metadata

    def move(self, tx: Transaction, unit: Unit, to: Mapping[Name, int]) -> None:
        # In this order: a consumer joins again only after its callback has marked the partitions as lost. So if the membership
        # is later than that of our messages, the mark is seen.
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
            # If nothing is committed: where we began to read.
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
    """Refuse an offset outside of the log. ``auto.offset.reset`` would start elsewhere, and skip or repeat messages."""
    first, end = log
    if first <= offset <= end:
        return
    why = "messages were deleted before they were consumed" if offset < first else "it has lost messages at its end"
    raise ConfigurationError(
        f"the group has consumed {name[0]}[{name[1]}] up to offset {offset}, but its log holds {first} to {end}: {why}",
        next_step="set next_offset in dualwrite_consumed to the offset to resume from; -1 leaves it to auto.offset.reset",
    )


class RowOffsets:
    """Offsets as rows: a move succeeds only for the last member that claimed the partition."""

    def __init__(self, rows: ConsumedOffsets, coordinator: KafkaCoordinator) -> None:
        self._rows = rows
        self._coordinator = coordinator

    def start(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int] | None:
        """Refuses a row whose offset is not in the log."""
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
        """The row's epoch is the membership."""

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
        """Claims again, so that an earlier transaction of ours can no longer commit."""
        del consumer
        claimed = self._claim(partitions)
        found = {one.name: claimed[one.name].next_offset for one in partitions}
        for one in partitions:
            if found[one.name] == NOTHING_YET and one.next_offset is not None:
                found[one.name] = one.next_offset
        return {name: offset for name, offset in found.items() if offset != NOTHING_YET}


logger = logging.getLogger(__name__)

_MOST: Final = 1000
_POLL_S: Final = 0.1
_SHORT_POLL_S: Final = 0.01
_ROOM_S: Final = 0.5
"""How long reading waits for units to take messages, before it pauses partitions, which discards what was fetched."""
_STALLED_S: Final = 5.0
_LONGEST_STALLED_S: Final = 60.0
_DEFAULT_MAX_POLL_MS: Final = 300_000

_MISCONFIGURED: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001 - confluent-kafka's own error codes begin with an underscore
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.UNSUPPORTED_ASSIGNOR,
    }
)


class Reading:
    """A consumer, and what its rebalances do to the member's partitions. Used by the polling thread.

    ``stop`` is set when the member must end: then it waits for nothing.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        partitions: Partitions,
        offsets: Offsets,
        peers: Peers,
        stop: threading.Event,
        *,
        make_consumer: Callable[[dict[str, Any]], Consumer] | None = None,
    ) -> None:
        # Only :meth:`lag` and :meth:`_is_stalled` need end-of-partition events: nothing else shows where the consumer is before
        # it reads.
        self._consumer = (make_consumer or Consumer)({**settings, "enable.partition.eof": True})
        self._incremental = is_incremental(settings)
        self._partitions = partitions
        self._offsets = offsets
        self._peers = peers
        self._stop = stop
        max_poll_s = float(str(settings.get("max.poll.interval.ms", _DEFAULT_MAX_POLL_MS))) / 1000
        # The rest of the time is for the callback's other work, and for the poll that follows.
        self._revoke_s = max_poll_s / 2
        self._rebalances = 0
        # librdkafka keeps a partition paused while another member has it: we would never fetch it again.
        self._paused: set[Name] = set()
        self._stalled_s = _STALLED_S
        self._look_at = now_s() + _STALLED_S

    def subscribe(self, topics: Sequence[str]) -> None:
        """Join the group with the first poll."""
        self._consumer.subscribe(list(topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()

    def poll(self) -> bool:
        """Serve the group, and read what is available. Returns whether messages came."""
        paused = self._pause_and_resume()
        self._rewind()
        message = self._consumer.poll(_SHORT_POLL_S if paused else _POLL_S)
        self._offsets.membership(self._consumer)
        if message is None:
            self._look_for_stalled()
            return False
        rebalances = self._rebalances
        found, ends = _divided([message, *self._consumer.consume(_MOST, 0)])
        self._partitions.reach(ends)
        if self._rebalances == rebalances:
            self._partitions.put(found)
        else:
            # Their partitions may have been revoked and assigned again meanwhile: read them again.
            self._offsets.membership(self._consumer)
            self._read_again(found)
        if not found:
            self._look_for_stalled()
            return False
        self._stalled_s = _STALLED_S
        return True

    # Rebalances: called from within poll(), and close().

    def _assigned(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        self._rebalances += 1
        logger.info("assigned: %s", _shown(assigned))
        if not assigned:
            return
        # First, because the consumer would wait silently for committed offsets that an open transaction holds back.
        self._peers.settle()
        made = self._partitions.add([(one.topic, one.partition) for one in assigned])
        for partition in made:
            partition.paused = partition.name in self._paused
        found = self._patiently_start(made)
        if found is None:
            return
        placed = [TopicPartition(one.topic, one.partition, found[one.topic, one.partition]) for one in assigned]
        if self._incremental:
            consumer.incremental_assign(placed)
        else:
            consumer.assign(placed)

    def _patiently_start(self, made: Sequence[Partition]) -> Mapping[Name, int] | None:
        deadline, failures = Deadline(self._revoke_s), 0
        while True:
            try:
                return self._offsets.start(self._consumer, made)
            except (ConfigurationError, Unavailable) as error:
                failures += 1
                if is_for_good(error) or deadline.expired or self._stop.is_set():
                    raise
                logger.warning("cannot read committed offsets yet; retrying: %s", error)
                self._stop.wait(min(pause_s(failures), deadline.remaining_s()))

    def _revoked(self, consumer: Consumer, revoked: list[TopicPartition]) -> None:
        del consumer
        self._rebalances += 1
        logger.info("revoked: %s", _shown(revoked))
        began = now_s()
        self._partitions.remove([(one.topic, one.partition) for one in revoked], self._revoke_s)
        # Meanwhile nothing is read, not even from other partitions. People who look for the reason must find it in the log.
        if (took_s := now_s() - began) >= _STALLED_S:
            logger.warning("transactions under way with %s held up reading for %.0f s", _shown(revoked), took_s)

    def _lost(self, consumer: Consumer, lost: list[TopicPartition]) -> None:
        del consumer
        self._rebalances += 1
        logger.warning("lost: %s", _shown(lost))
        self._partitions.remove([(one.topic, one.partition) for one in lost], 0)

    # Positions

    def _read_again(self, dropped: Sequence[Message]) -> None:
        first: dict[Name, int] = {}
        for message in dropped:
            first.setdefault((message.topic() or "", message.partition() or 0), message.offset() or 0)
        for one in self._partitions.all():
            if one.name in first:
                self._partitions.rewind(one, first[one.name])

    def _rewind(self) -> None:
        """Reset the positions of partitions whose work was aborted for good, once no unit works on them."""
        asked = [one for one in self._partitions.all() if one.rewind and not one.busy]
        if not asked:
            return
        try:
            found = self._offsets.committed(self._consumer, asked)
            for one in asked:
                if one.name in found:
                    self._consumer.seek(TopicPartition(*one.name, found[one.name]))
                    self._partitions.rewound(one, found[one.name])
        except (KafkaException, ConfigurationError, Unavailable) as error:
            if is_for_good(error):
                raise
            logger.warning("cannot reset positions yet; retrying: %s", error)

    def _pause_and_resume(self) -> bool:
        for one in self._partitions.to_pause(_ROOM_S):
            self._consumer.pause([TopicPartition(*one.name)])
            one.paused = True
            self._paused.add(one.name)
        for one in self._partitions.to_resume():
            self._consumer.resume([TopicPartition(*one.name)])
            one.paused = False
            self._paused.discard(one.name)
        return any(one.paused for one in self._partitions.all())

    # Peers

    def _look_for_stalled(self) -> None:
        """Look for dead members again, less and less often, while a partition yields nothing although its log has more."""
        if now_s() < self._look_at:
            return
        self._look_at = now_s() + self._stalled_s
        if any(self._is_stalled(one) for one in self._partitions.all()):
            self._stalled_s = min(2 * self._stalled_s, _LONGEST_STALLED_S)
            self._peers.settle()

    def _is_stalled(self, partition: Partition) -> bool:
        if partition.busy or partition.waiting or now_s() - partition.read_at < _STALLED_S:
            return False
        [position] = self._consumer.position([TopicPartition(*partition.name)])
        # Before its first message it has no position, but may have reached the end of the log.
        at = partition.reached if position.offset < 0 else position.offset
        end = self._end(partition)
        return at is None or end is None or at < end

    def _end(self, partition: Partition) -> int | None:
        """The high watermark as of the last fetch; None before the first fetch."""
        _, high = self._consumer.get_watermark_offsets(TopicPartition(*partition.name), cached=True)
        return high if high >= 0 else None

    def lag(self) -> dict[Name, int]:
        """Offsets not yet processed, per partition."""
        found = {}
        for one in self._partitions.all():
            end, at = self._end(one), one.reached if one.next_offset is None else one.next_offset
            if end is not None and at is not None:
                found[one.name] = max(0, end - at)
        return found


def _divided(polled: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The messages, and the ends of partitions. Logs errors that may pass, and raises the others."""
    messages: list[Message] = []
    ends: list[Message] = []
    for one in polled:
        error = one.error()
        if error is None:
            messages.append(one)
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - as above
            ends.append(one)
        elif error.fatal() or error.code() in _MISCONFIGURED:
            raise ConfigurationError(f"the consumer cannot read: {error.str()}")
        else:
            logger.warning("the consumer reports: %s", error.str())
    return messages, ends


def _shown(partitions: Sequence[TopicPartition]) -> str:
    return ", ".join(f"{one.topic}[{one.partition}]" for one in partitions) or "none"


# The consumer's settings: those that the protocol fixes, the user's, and those with which every client reaches the brokers.

_FIXED: Final[Mapping[str, tuple[str, str]]] = {
    "enable.auto.commit": (
        "false",
        "offsets must be committed together with the rows and messages that come from them",
    ),
    "isolation.level": ("read_committed", "messages of open and aborted transactions must not be consumed"),
}
"""Settings with the only value that they may have, and the reason."""

_OWN: Final[Mapping[str, str]] = {
    "group.id": "it is the argument group",
    "client.id": "peers find a dead member's transactions by it; it consists of the group's and the member's name",
    "on_commit": "offsets are not committed by the consumer",
    "group.instance.id": "a restarted member would not look gone, so peers would not settle what it left",
}


def consumer_settings(
    kafka: Mapping[str, object], given: Mapping[str, object], *, group: str, client_id: str
) -> dict[str, object]:
    """All settings for confluent-kafka's ``Consumer``: those shared with producers, then the user's for the consumer alone.

    Refuses a setting that would break the promise, or that belongs to this library.
    """
    settings: dict[str, object] = {"auto.offset.reset": "earliest", **connection_settings(kafka), **given}
    for key, (value, reason) in _FIXED.items():
        if str(settings.get(key, value)).lower() != value:
            raise ConfigurationError(
                f"the consumer's setting {key!r} must be {value}, not {settings[key]!r}",
                next_step=f"leave it out: {reason}",
            )
        settings[key] = value
    for key, reason in _OWN.items():
        if key in given:
            raise ConfigurationError(f"the consumer's setting {key!r} is this library's own", next_step=reason)
    return {**settings, "group.id": group, "client.id": client_id}


def is_incremental(settings: Mapping[str, object]) -> bool:
    """Whether a rebalance moves single partitions (cooperative, KIP-848) instead of all of them."""
    strategy = str(settings.get("partition.assignment.strategy", ""))
    return settings.get("group.protocol") == "consumer" or strategy.startswith("cooperative")


# Settles what dead members left open.

_PEERS_ANSWER_S: Final = 30.0


class Peers:
    """The other members of a group. ``ours`` is our own transactional id and client id."""

    def __init__(self, group: str, ours: str, *, kafka: Mapping[str, object], database: Database) -> None:
        self._group = group
        self._ours = ours
        self._kafka = kafka
        self._database = database

    def settle(self) -> list[str]:
        """Settle the transactions left open by members that are no longer in the group, and return their transactional ids.

        If a server does not answer, it logs that, and leaves the rest to the next call. If it raises, a person must look.
        """
        try:
            return self._settle()
        except (KafkaException, TimeoutError, ConfigurationError, Unavailable, Fenced, TransactionAborted) as error:
            if is_for_good(error):
                raise
            logger.warning("%s: cannot settle peers' transactions yet; retrying later: %s", self._ours, error)
        return []

    def _settle(self) -> list[str]:
        unsettled = {one.row.transactional_id for one in self._status() if one.needs_recovery}
        if not unsettled:
            return []
        # Only now: left_behind() needs a list of members that is newer than the transactions.
        gone = left_behind(self._group, unsettled, self._members(), self._ours)
        settled = []
        for name in gone:
            report = self._recover(name)
            settled += report.settled
            logger.warning("%s: settled the open transactions of %s, which left the group", self._ours, name)
            if report.losses:
                raise report.losses[0].as_error()
        return settled

    def _status(self) -> list[IdStatus]:
        return status(
            prefix=member_prefix(self._group), kafka=self._kafka, database=self._database, timeout_s=_PEERS_ANSWER_S
        )

    def _recover(self, name: str) -> RecoveryReport:
        return recover(
            name, kafka={**self._kafka, "client.id": self._ours}, database=self._database, timeout_s=_PEERS_ANSWER_S
        )

    def _members(self) -> set[str]:
        """The client ids of the group's members, whichever protocol the group uses."""
        admin = AdminClient(connection_settings(self._kafka))  # type: ignore[arg-type] # callbacks, too
        answer = admin.describe_consumer_groups([self._group], request_timeout=_PEERS_ANSWER_S)[self._group]
        return {member.client_id for member in answer.result(_PEERS_ANSWER_S).members}
