"""Open transactions that block readers: whose they are, and what each withholds.

What it finds is judged in :mod:`dualwrite.protocol.blocking`. It asks about all partitions and all groups at once: each broker
gets a few requests, whatever is open.

A broker may list transactions of partitions of ``__transaction_state`` that it no longer leads, as it saw them last
(KAFKA-21481). So a list only says which ids to ask about. What is told, and what is done, rests on the answer of an id's
present coordinator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline
from dualwrite.errors import (
    ConfigurationError,
)
from dualwrite.kafka.brokers import Brokers, NotYet
from dualwrite.kafka.cluster import (
    Leader,
    OpenOffsets,
    Partition,
    Place,
    Topics,
    find_coordinators,
)
from dualwrite.kafka.error_codes import MISSING_RIGHT, Code, code_name
from dualwrite.kafka.log import AT_ONCE, batches_of, fetch, fetched, is_commit
from dualwrite.kafka.messages import DescribeProducers, Message, ProducerState
from dualwrite.kafka.opening_messages import CoordinatorType
from dualwrite.protocol.blocking import Blocker, PartitionEnds, blockers
from dualwrite.protocol.values import (
    TransactionView,
    is_drawn,
    parsed,
    writer_of,
)

if TYPE_CHECKING:
    from kafka.record.default_records import DefaultRecordBatch


@dataclass(frozen=True)
class BlockingTransaction:
    """A transaction open in a partition. ``read_committed`` consumers get nothing from its first offset on.

    In a partition of ``__consumer_offsets``, it withholds committed offsets from the groups stored there.

    Attributes:
        topic: The partition's topic.
        partition: Its number.
        first_offset: The transaction's first offset there.
        producer_id: Its producer's id.
        epoch: Its producer's epoch.
        kafka_id: Kafka's ``transactional.id``; None if no coordinator shows it to us.
        started_ms: When it began, in ms since 1970. None if its coordinator does not list the partition: the broker has
            lost the marker that ends it there, or we may not describe the id.
    """

    topic: str
    partition: int
    first_offset: int
    producer_id: int
    epoch: int
    kafka_id: str | None = None
    started_ms: int | None = None

    @property
    def writer(self) -> str | None:
        """The name of the ``DualWriter`` that began it; None if this library did not."""
        named = parsed(self.kafka_id) if self.kafka_id is not None else None
        return writer_of(named[0]) if named is not None and is_drawn(named[1]) else None

    def __str__(self) -> str:
        since = "an unknown time" if self.started_ms is None else _utc(self.started_ms)
        whose = f"producer {self.producer_id}:{self.epoch}"
        if self.kafka_id is not None:
            whose = f"{self.kafka_id!r} ({whose})"
        return (
            f"{Place(self.topic, self.partition)} from offset {self.first_offset} on, by the transaction of {whose}, "
            f"open since {since}; {self._way_on}"
        )

    @property
    def _way_on(self) -> str:
        if self.writer is not None:
            return f"if its owner is dead, run `dualwrite recover {self.writer}`"
        if self.started_ms is not None:
            return "its owner, the next producer of that id, or the broker's transaction timeout will end it"
        return "check with `kafka-transactions.sh find-hanging` whether it is hanging"


def find_blocking(
    places: Collection[Place],
    *,
    open_in: Callable[[Collection[Place]], Mapping[Place, OpenOffsets | None]],
    ids_of: Callable[[Collection[int]], Mapping[int, str]],
    describe: Callable[[Collection[str]], Mapping[str, TransactionView]],
    open_for_s: float,
) -> list[BlockingTransaction]:
    """The transactions open in these partitions, sorted by partition and first offset.

    Omits transactions known to have begun less than ``open_for_s`` seconds ago.
    """
    found = [
        BlockingTransaction(place.topic, place.partition, start, producer_id, epoch)
        for place, there in open_in(places).items()
        for (producer_id, epoch), start in (there or {}).items()
    ]
    if not found:
        return []
    ids = ids_of({one.producer_id for one in found})
    views = describe(set(ids.values())) if ids else {}
    named = [_named(one, ids.get(one.producer_id), views) for one in found]
    # The coordinators answered after the leaders: a transaction that they do not show may have ended in between.
    unknown = {Place(one.topic, one.partition) for one in named if one.started_ms is None}
    again = open_in(unknown) if unknown else {}
    oldest_ms = (time.time() - open_for_s) * 1000
    return sorted(
        (one for one in named if _is_still_open(one, again) and (one.started_ms or 0) <= oldest_ms),
        key=lambda one: (one.topic, one.partition, one.first_offset),
    )


def _named(one: BlockingTransaction, kafka_id: str | None, views: Mapping[str, TransactionView]) -> BlockingTransaction:
    view = views.get(kafka_id) if kafka_id is not None else None
    if view is None or view.producer_id != one.producer_id:  # the list was of a broker that coordinates it no more
        return one
    started_ms = view.started_ms if (one.topic, one.partition) in view.partitions else None
    return replace(one, kafka_id=kafka_id, started_ms=started_ms)


def _is_still_open(one: BlockingTransaction, again: Mapping[Place, OpenOffsets | None]) -> bool:
    if one.started_ms is not None:
        return True
    there = again.get(Place(one.topic, one.partition)) or {}
    return there.get((one.producer_id, one.epoch)) == one.first_offset


def _utc(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, tz=timezone.utc).isoformat(timespec="seconds")


# What every open transaction of the cluster blocks.

MOST_PARTITIONS: Final = 1_000
"""So many partitions are asked about, those of the oldest transactions first."""
_LOOK_S: Final = 10.0
"""Limits the questions: what has no answer then is shown as unknown."""
_NOTICED_S: Final = 1.0
"""No group is asked about for transactions younger than that: owners at work always have some open."""
_GROUPS_AT_ONCE: Final = 500
_MOST_READ: Final = 64
"""So many places where groups have stopped are read, to see whether anything is left for them before the last stable offset."""
_NEAR: Final = 1_000
"""A group that is further behind has something left to read."""
_READ_BYTES: Final = 65_536
_OFFSETS_TOPIC: Final = "__consumer_offsets"
_SHARE_GROUPS: Final = "share"


@dataclass(frozen=True)
class OpenTransactions:
    """What is open, and what is not known of what it blocks.

    Attributes:
        blockers: The open transactions, what blocks most first.
        unknown: In words, each with its remedy, where there is one.
    """

    blockers: Sequence[Blocker] = ()
    unknown: Sequence[str] = ()


def look_at_open(
    brokers: Brokers, topics: Topics, opened: Mapping[str, TransactionView], deadline: Deadline
) -> OpenTransactions:
    """What these open transactions block, as the leaders and the groups' coordinators show it. Asks once, and changes nothing.

    A partition or a group without an answer is left unknown, which ``unknown`` says: what is open must be shown while a broker
    is away, too. Groups are only asked about while a transaction of a second's age or more withholds something.

    Required rights: Describe on the topics and the groups; Read on the topics, to tell several transactions of one partition
    apart, and groups that stand still from slow ones.
    """
    look = _Look(brokers, topics, Deadline(min(_LOOK_S, deadline.remaining_s())))
    oldest_first = sorted(opened.values(), key=lambda view: view.started_ms or 0)
    wanted = dict.fromkeys(key for view in oldest_first for key in sorted(view.partitions) if key[0] != _OFFSETS_TOPIC)
    if len(wanted) > MOST_PARTITIONS:
        look.note(f"only {MOST_PARTITIONS} of {len(wanted)} partitions with open transactions were asked about")
    ends = look.ends([Place(*key) for key in list(wanted)[:MOST_PARTITIONS]])
    noticed_ms = (time.time() - _NOTICED_S) * 1000
    old = {key for view in oldest_first if (view.started_ms or 0) <= noticed_ms for key in view.partitions}
    if held := {key: one for key, one in ends.items() if key in old and one.high > one.stable}:
        ends |= look.with_groups(held)
    return OpenTransactions(blockers(opened, ends, time.time() * 1000), tuple(look.unknown))


class _Look:
    """One look at partitions and groups. It notes what has no answer, and goes on."""

    def __init__(self, brokers: Brokers, topics: Topics, deadline: Deadline) -> None:
        self._brokers = brokers
        self._topics = topics
        self._deadline = deadline
        self._leaders: dict[Place, Leader] = {}
        self.unknown: list[str] = []

    def note(self, what: str) -> None:
        """Say what is not known, once."""
        if what not in self.unknown:
            self.unknown.append(what)

    def _asked(self, requests: Sequence[tuple[int, Message]]) -> Sequence[Message | NotYet]:
        try:
            return self._brokers.exchange(requests, self._deadline)
        except NotYet as reason:
            return [reason] * len(requests)

    def _known(self, code: int, subject: str, right: str) -> bool:
        """Whether an answer holds something. Notes why it does not."""
        if code in MISSING_RIGHT:
            self.note(f"{subject}: {code_name(code)}; grant {right} to show what is blocked there")
        elif code:
            self.note(f"{subject}: {code_name(code)}")
        return not code

    # Partitions

    def ends(self, places: Sequence[Place]) -> dict[Partition, PartitionEnds]:
        """Where the partitions end for their readers, as their leaders say."""
        if not places:
            return {}
        try:
            found = self._topics.find({place.topic for place in places}, self._deadline, fresh=True)
        except (NotYet, ConfigurationError) as reason:
            self.note(f"the partitions of open transactions: {reason}")
            return {}
        for place in places:
            leader = place.leader(found)
            if isinstance(leader, Leader):
                self._leaders[place] = leader
            else:
                self.note(f"{place}: {leader or 'it does not exist any more'}")
        ends: dict[Partition, PartitionEnds] = {}
        led = list(self._leaders)
        for start in range(0, len(led), AT_ONCE):
            ends |= self._ends_of(led[start : start + AT_ONCE])
        return ends

    def _ends_of(self, places: Sequence[Place]) -> dict[Partition, PartitionEnds]:
        from dualwrite.kafka import kafka_python  # noqa: PLC0415 - loads kafka-python, which most writers do not need

        led_by: dict[int, dict[Partition, int]] = {}
        for place in places:
            leader = self._leaders[place]
            led_by.setdefault(leader.node, {})[place.key] = leader.epoch
        # In this order, which a connection keeps: what a leader shows as open then lies between both offsets, or has ended.
        requests = [
            (node, request)
            for node, epochs in led_by.items()
            for request in (
                kafka_python.list_offsets(epochs, read_committed=True),
                DescribeProducers(epochs),
                kafka_python.list_offsets(epochs, read_committed=False),
            )
        ]
        answers = iter(self._asked(requests))
        ends: dict[Partition, PartitionEnds] = {}
        for epochs in led_by.values():
            stable, firsts, high = (
                self._offsets(next(answers)),
                self._firsts(next(answers)),
                self._offsets(next(answers)),
            )
            for key in epochs:
                if key in stable and key in high:
                    ends[key] = PartitionEnds(stable[key], high[key], firsts.get(key))
        return ends

    def _offsets(self, answer: Message | NotYet) -> dict[Partition, int]:
        if isinstance(answer, NotYet):
            self.note(str(answer))
            return {}
        return {
            (topic.name, one.partition_index): one.offset
            for topic in answer.topics
            for one in topic.partitions
            if self._known(one.error_code, str(Place(topic.name, one.partition_index)), f"Describe on {topic.name!r}")
        }

    def _firsts(
        self, answer: Mapping[Partition, tuple[int, Sequence[ProducerState]]] | NotYet
    ) -> dict[Partition, Mapping[int, int]]:
        if isinstance(answer, NotYet):
            self.note(str(answer))
            return {}
        return {
            key: {one.producer_id: one.open_from for one in producers if one.open_from >= 0}
            for key, (code, producers) in answer.items()
            if self._known(code, f"the open transactions of {Place(*key)}", f"Read on the topic {key[0]!r}")
        }

    # Consumer groups

    def with_groups(self, held: Mapping[Partition, PartitionEnds]) -> dict[Partition, PartitionEnds]:
        """These partitions with the groups that stand still there."""
        candidates: dict[tuple[Partition, int], list[str]] = {}
        for group, offsets in self._committed():
            for key in offsets.keys() & held.keys():
                if 0 <= held[key].stable - offsets[key] <= _NEAR:
                    candidates.setdefault((key, offsets[key]), []).append(group)
        at_the_end = {place for place in candidates if place[1] == held[place[0]].stable}
        at_the_end |= self._nothing_left([place for place in candidates if place not in at_the_end], held)
        standing: dict[Partition, dict[str, int]] = {}
        for key, offset in at_the_end:
            standing.setdefault(key, {}).update(dict.fromkeys(candidates[key, offset], offset))
        return {key: replace(one, standing=standing.get(key, {})) for key, one in held.items()}

    def _committed(self) -> Iterator[tuple[str, Mapping[Partition, int]]]:
        """The offsets that the groups have committed, of all groups that we may describe."""
        from dualwrite.kafka import kafka_python  # noqa: PLC0415 - as above

        try:
            nodes = self._brokers.nodes(self._deadline)
            listed = self._asked([(node, kafka_python.list_groups()) for node in nodes])
            groups = sorted({group for answer in listed for group in self._groups(answer)})
            found = find_coordinators(self._brokers, CoordinatorType.GROUP, groups, self._deadline) if groups else {}
        except (NotYet, ConfigurationError) as reason:
            self.note(f"consumer groups: {reason}")
            return
        led_by: dict[int, list[str]] = {}
        for group, (code, node) in found.items():
            if self._known(code, f"the consumer group {group!r}", f"Describe on the group {group!r}"):
                led_by.setdefault(node, []).append(group)
        requests = [
            (node, kafka_python.committed_offsets(groups[start : start + _GROUPS_AT_ONCE]))
            for node, groups in led_by.items()
            for start in range(0, len(groups), _GROUPS_AT_ONCE)
        ]
        for answer in self._asked(requests):
            if isinstance(answer, NotYet):
                self.note(str(answer))
                continue
            for one in answer.groups:
                # A group that has been deleted meanwhile, or commits nothing, has no offsets.
                if one.error_code in MISSING_RIGHT:
                    self._known(one.error_code, f"the consumer group {one.group_id!r}", "Describe on consumer groups")
                yield (
                    one.group_id,
                    {
                        (topic.name, there.partition_index): there.committed_offset
                        for topic in one.topics
                        for there in topic.partitions
                        if there.error_code == Code.NONE and there.committed_offset >= 0
                    },
                )

    def _groups(self, answer: Message | NotYet) -> Iterable[str]:
        if isinstance(answer, NotYet):
            self.note(f"consumer groups: {answer}")
            return ()
        self._known(answer.error_code, "consumer groups", "Describe on consumer groups")
        return [one.group_id for one in answer.groups if (one.group_type or "").lower() != _SHARE_GROUPS]

    def _nothing_left(
        self, stopped: Sequence[tuple[Partition, int]], held: Mapping[Partition, PartitionEnds]
    ) -> set[tuple[Partition, int]]:
        """Those of the places from which only markers and aborted records are left up to the last stable offset.

        A client that commits the offset after its last record, as librdkafka does, stops before the markers behind it.
        """
        stopped = sorted(stopped, key=lambda place: held[place[0]].stable - place[1])
        if len(stopped) > _MOST_READ:
            self.note(f"only {_MOST_READ} of {len(stopped)} places were read at which consumer groups have stopped")
            stopped = stopped[:_MOST_READ]
        requests = []
        for key, offset in stopped:
            leader = self._leaders[Place(*key)]
            requests.append(
                (leader.node, fetch(Place(*key), leader, offset, max_bytes=_READ_BYTES, read_committed=True))
            )
        found = set()
        for (key, offset), answer in zip(stopped, self._asked(requests), strict=True):
            try:
                partition = fetched(Place(*key), answer)
            except ConfigurationError as error:
                self.note(str(error))
                continue
            if partition is None or isinstance(partition, NotYet):
                continue  # deleted by retention: the group will read on elsewhere; or asked again in the next look
            if nothing_to_read(batches_of(partition), partition.aborted_transactions or (), offset, held[key].stable):
                found.add((key, offset))
        return found


def nothing_to_read(
    batches: Iterable[DefaultRecordBatch], aborted: Iterable[Message], offset: int, stable: int
) -> bool:
    """Whether a ``read_committed`` consumer at this offset gets nothing before the last stable one.

    ``batches`` and ``aborted`` are of a ``read_committed`` answer from that offset on. False also if they end too early.
    """
    begun = sorted((one.first_offset, one.producer_id) for one in aborted)
    aborting: set[int] = set()
    position = offset
    for batch in batches:
        if batch.next_offset <= offset:
            continue
        while begun and begun[0][0] < batch.next_offset:
            aborting.add(begun.pop(0)[1])
        if batch.is_control_batch:
            if not is_commit(batch):
                aborting.discard(batch.producer_id)
        elif not (batch.is_transactional and batch.producer_id in aborting):
            return False
        position = batch.next_offset
        if position >= stable:
            break
    return position >= stable
