"""Which broker answers for what: coordinators of ids and groups, leaders of partitions, topics and their ids.

Questions go to many brokers at once and are repeated where the answer says that it is another broker's. What leaders show of
open transactions is read here, and which partitions these hold back from their readers.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import Unavailable
from dualwrite.kafka.brokers import Brokers, Connections, NotYet, until_answered, verdict
from dualwrite.kafka.error_codes import Code
from dualwrite.kafka.messages import DescribeProducers, Message, OffsetForLeaderEpoch, ProducerState, Request
from dualwrite.kafka.opening_messages import ClusterMetadata, CoordinatorType, DescribedTopic, FindCoordinator

Answer = TypeVar("Answer")
Partition = tuple[str, int]
Requests = Callable[[list[str]], Iterator[tuple[Request | Message, list[str]]]]
"""Makes the requests for the ids of one coordinator, each with the ids that it covers."""
Read = Callable[[list[str], Message], Iterator[tuple[str, "Answer | NotYet"]]]
"""Reads the response to a request that covered these ids."""
_NO_TOPIC_ID: Final = bytes(16)
_MOST_COORDINATORS: Final = 100_000
_SIGN_BIT: Final = 0x8000_0000
_OPERATIONS: Final = {3: "Read", 4: "Write", 8: "Describe", 10: "DescribeConfigs"}


@dataclass(frozen=True)
class Leader:
    """The leader of a partition. By the epoch a broker detects that it is no longer the leader that we asked for."""

    node: int
    epoch: int


@dataclass(frozen=True)
class Topic:
    """A topic that exists.

    ``topic_id`` is as Kafka prints it; None from a broker without topic ids. A partition has None while it has no
    leader. ``rights`` are the operations that this user may do there; None if the broker does not tell.
    """

    topic_id: str | None
    leaders: Mapping[int, Leader | None]
    rights: frozenset[str] | None = None


def internal_partition(key: str, partitions: int) -> int:
    """The partition of an internal topic that belongs to a key: Java's ``String.hashCode``, as brokers use it.

    The key is the ``group.id`` for ``__consumer_offsets``, the ``transactional.id`` for ``__transaction_state``.
    """
    encoded = key.encode("utf-16-be")
    hashed = 0
    for high, low in zip(encoded[::2], encoded[1::2], strict=True):
        hashed = (31 * hashed + (high << 8 | low)) & 0xFFFF_FFFF
    if hashed == _SIGN_BIT:
        return 0  # the least integer has no absolute value
    return (hashed if hashed < _SIGN_BIT else (1 << 32) - hashed) % partitions


def find_coordinators(
    brokers: Brokers | Connections, kind: CoordinatorType, keys: Collection[str], deadline: Deadline
) -> dict[str, tuple[int, int]]:
    """Ask a broker for the coordinators of transactional ids or of groups.

    By id, the error code, and the coordinator's broker if that is 0. Raises as :meth:`Connections.metadata`.
    """
    found: dict[str, tuple[int, int]] = brokers.lookup(lambda: FindCoordinator(kind, keys), deadline)
    return found


class Coordinators:
    """The transaction coordinators."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._known: dict[str, int] = {}

    def ask(
        self,
        kafka_ids: Collection[str],
        requests: Requests,
        read: Read[Answer],
        deadline: Deadline,
        what: str,
        *,
        once: bool = False,
    ) -> dict[str, Answer]:
        """Send the coordinators a request about each id, until all have answered.

        With ``once`` each request is sent at most once: ids without an answer are missing from the result, and
        `Unavailable` means that no coordinator was found, or none answered.
        """
        if not once:
            return until_answered(
                kafka_ids,
                lambda pending: self._sent(self._find(pending, deadline), requests, read, deadline),
                deadline,
                what,
            )
        nodes = until_answered(kafka_ids, lambda pending: self._find(pending, deadline), deadline, what)
        try:
            answers = self._sent(nodes, requests, read, deadline)
        except NotYet as reason:
            raise Unavailable(f"Kafka did not {what} in time: {reason}") from reason
        return {kafka_id: answer for kafka_id, answer in answers.items() if not isinstance(answer, NotYet)}

    def _sent(
        self,
        nodes: Mapping[str, int | NotYet],
        requests: Requests,
        read: Read[Answer],
        deadline: Deadline,
    ) -> dict[str, Answer | NotYet]:
        answers: dict[str, Answer | NotYet] = {}
        at: dict[int, list[str]] = {}
        for kafka_id, node in nodes.items():
            if isinstance(node, NotYet):
                answers[kafka_id] = node
            else:
                at.setdefault(node, []).append(kafka_id)
        sent = [(node, request, covered) for node, ids in at.items() for request, covered in requests(ids)]
        responses = self._brokers.exchange([(node, request) for node, request, _ in sent], deadline, spread=True)
        for (_, _, covered), response in zip(sent, responses, strict=True):
            if isinstance(response, NotYet):
                answers.update(dict.fromkeys(covered, response))
            else:
                answers.update(read(covered, response))
        for kafka_id, answer in answers.items():
            if isinstance(answer, NotYet) and answer.moved:
                self._known.pop(kafka_id, None)
        return answers

    def _find(self, kafka_ids: Collection[str], deadline: Deadline) -> dict[str, int | NotYet]:
        unknown = [kafka_id for kafka_id in kafka_ids if kafka_id not in self._known]
        failed: dict[str, NotYet] = {}
        if unknown:
            if len(self._known) > _MOST_COORDINATORS:
                self._known.clear()
            found = find_coordinators(self._brokers, CoordinatorType.TRANSACTION, unknown, deadline)
            for key, (code, node) in found.items():
                why = verdict(code, f"the coordinator of {key!r}", right_to_look(key))
                if why is None:
                    self._known[key] = node
                else:
                    failed[key] = why
        lost = NotYet("the coordinator's address was dropped meanwhile")
        return {key: failed[key] if key in failed else self._known.get(key, lost) for key in kafka_ids}


class Topics:
    """The topics and their leaders."""

    def __init__(self, brokers: Brokers | Connections) -> None:
        self._brokers = brokers
        self._lock = threading.Lock()
        self._known: Mapping[str, Topic] = {}
        self.cluster_id: str | None = None  # as the last answer has told it

    def known(self, topic: str) -> Topic | None:
        """The topic as it was last looked up; None if it has not been, or was not found. Asks no broker."""
        return self._known.get(topic)

    def find(self, topics: Collection[str], deadline: Deadline, *, fresh: bool) -> dict[str, Topic | NotYet | None]:
        """Each topic, or None for one that does not exist; `NotYet` if no broker answered.

        ``fresh`` looks up known topics again: a topic may have been recreated under its name.
        """
        known = {} if fresh else self._known
        unknown = [topic for topic in dict.fromkeys(topics) if topic not in known]
        asked = self._asked(unknown, deadline) if unknown else {}
        return {topic: known[topic] if topic in known else asked[topic] for topic in topics}

    def forget(self, topics: Iterable[str]) -> None:
        """Drop these topics from the cache."""
        gone = set(topics)
        with self._lock:
            self._known = {name: topic for name, topic in self._known.items() if name not in gone}

    def _asked(self, topics: Collection[str], deadline: Deadline) -> dict[str, Topic | NotYet | None]:
        described = self._brokers.metadata(topics, deadline)
        self.cluster_id = described.cluster_id
        answers = read_topics(described)
        absent = {name for name, topic in answers.items() if topic is None}
        if absent:
            # A broker that lags behind the controller may not know a new topic. It is absent if no broker knows it.
            for node in self._brokers.nodes(deadline):
                elsewhere = read_topics(self._brokers.metadata(absent, deadline, node=node))
                answers |= {name: topic for name, topic in elsewhere.items() if topic is not None}
        with self._lock:  # replace the mapping instead of changing it: readers do not take the lock
            self._known = {
                **self._known,
                **{name: topic for name, topic in answers.items() if isinstance(topic, Topic)},
            }
        return answers


def right_to_look(kafka_id: str) -> str:
    """The right that a look at a transactional id needs, and the one of producers and settlers, which must look first."""
    return f"Describe on the transactional id {kafka_id!r}, or on a prefix of it; to produce or recover Write, which implies it"


def read_topics(response: ClusterMetadata) -> dict[str, Topic | NotYet | None]:
    """The topics that a broker has described, by name; None for one that it does not know."""
    answers: dict[str, Topic | NotYet | None] = {}
    for topic in response.topics:
        if topic.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION:
            answers[topic.name] = None
            continue
        right = f"Describe on the topic {topic.name!r}"
        answers[topic.name] = verdict(topic.error_code, f"topic {topic.name!r}", right) or _read_topic(topic)
    return answers


def _read_topic(topic: DescribedTopic) -> Topic:
    raw = topic.topic_id
    return Topic(
        topic_id=None if raw == _NO_TOPIC_ID else base64.urlsafe_b64encode(raw).rstrip(b"=").decode(),
        leaders={
            partition.partition_index: Leader(partition.leader_id, partition.leader_epoch)
            if partition.leader_id >= 0
            else None
            for partition in topic.partitions
        },
        rights=rights_of(topic.operations),
    )


def rights_of(operations: int) -> frozenset[str] | None:
    """The operations of a topic that concern us, from a bit for each; None if the broker has not told any."""
    if operations <= 0:
        return None
    return frozenset(name for number, name in _OPERATIONS.items() if operations >> number & 1)


# Requests to partition leaders: the transactions open in a partition, and where its log ends.

_NO_TRANSACTION: Final = -1
OpenOffsets = Mapping[tuple[int, int], int]
"""By producer id and epoch, the offset at which its open transaction began."""
Producers = Mapping[int, tuple[int, int | None]]
"""By producer id, its epoch, and the offset at which its open transaction began; None if it has none open."""


@dataclass(frozen=True)
class Place:
    """A partition of one particular topic: ``topic_id``, where it is known, since a new topic may have taken the name."""

    topic: str
    partition: int
    topic_id: str | None = None

    @property
    def key(self) -> Partition:
        """Name and number alone."""
        return self.topic, self.partition

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"

    def leader(self, topics: Mapping[str, Topic | NotYet | None]) -> Leader | NotYet | None:
        """The partition's leader; None if the partition does not exist."""
        topic = topics[self.topic]
        if not isinstance(topic, Topic):
            return topic
        if self.topic_id not in {None, topic.topic_id}:
            return None
        return topic.leaders.get(self.partition) or NotYet(f"{self} has no leader")


def open_offsets(
    brokers: Brokers, topics: Topics, places: Collection[Place], deadline: Deadline, *, fresh: bool
) -> dict[Place, OpenOffsets | None]:
    """The transactions open in each partition, as its leader shows them; see :func:`producers`."""
    shown = producers(brokers, topics, places, deadline, fresh=fresh)
    return {
        place: None
        if there is None
        else {(number, epoch): start for number, (epoch, start) in there.items() if start is not None}
        for place, there in shown.items()
    }


def producers(
    brokers: Brokers, topics: Topics, places: Collection[Place], deadline: Deadline, *, fresh: bool
) -> dict[Place, Producers | None]:
    """The producers that each partition remembers, as its leader shows them (``DescribeProducers``).

    None for a partition that does not exist: no broker knows its topic, or only a new one of that name. ``fresh`` looks up
    the topics' ids and leaders first.
    """

    def ask(pending: list[Place]) -> dict[Place, Producers | NotYet | None]:
        return producers_now(brokers, topics, pending, deadline, fresh=fresh)

    return until_answered(places, ask, deadline, "report which transactions are open in the partitions")


def producers_now(
    brokers: Brokers, topics: Topics, places: Collection[Place], deadline: Deadline, *, fresh: bool
) -> dict[Place, Producers | NotYet | None]:
    """As :func:`producers`, asked once: the answer is the reason for a partition whose leader did not answer.

    Followers answer ``DescribeProducers`` too, and may lag behind. So each broker gets a second request after it, on the same
    connection, that only the leader of that epoch answers.
    """
    found = topics.find({place.topic for place in places}, deadline, fresh=fresh)
    leaders = {place: place.leader(found) for place in places}
    led_by: dict[int, dict[Partition, Leader]] = {}
    for place, leader in leaders.items():
        if isinstance(leader, Leader):
            led_by.setdefault(leader.node, {})[place.key] = leader
    requests = [
        (node, request) for node, led in led_by.items() for request in (DescribeProducers(led), leader_epochs(led))
    ]
    responses = brokers.exchange(requests, deadline)
    shown: dict[Partition, Producers | NotYet] = {}
    for led, described, epochs in zip(led_by.values(), responses[::2], responses[1::2], strict=True):
        shown |= joined(led, described, epochs)
    unlisted = NotYet("the broker left a partition out of its answer")
    answers = {
        place: shown.get(place.key, unlisted) if isinstance(leader, Leader) else leader
        for place, leader in leaders.items()
    }
    topics.forget(place.topic for place, answer in answers.items() if isinstance(answer, NotYet))
    return answers


def joined(
    led: Collection[Partition],
    described: Mapping[Partition, tuple[int, Sequence[ProducerState]]] | NotYet,
    epochs: Mapping[Partition, tuple[int, int]] | NotYet,
) -> dict[Partition, Producers | NotYet]:
    """The producers of the partitions that a broker has shown, as far as it has then answered as their leader.

    The broker was sent :func:`leader_epochs` after :class:`DescribeProducers`.
    """
    if isinstance(described, NotYet):
        return dict.fromkeys(led, described)
    ends = dict.fromkeys(led, epochs) if isinstance(epochs, NotYet) else end_offsets(epochs)
    left_out = NotYet("the broker left a partition out of its answer")
    answers: dict[Partition, Producers | NotYet] = {}
    for key, (code, producers) in described.items():
        if code and (why := verdict(code, f"the producers of {Place(*key)}", f"Read on the topic {key[0]!r}")):
            answers[key] = why
            continue
        end = ends.get(key, left_out)
        answers[key] = (
            end
            if isinstance(end, NotYet)
            else {
                one.producer_id: (one.epoch, None if one.open_from == _NO_TRANSACTION else one.open_from)
                for one in producers
            }
        )
    return answers


def leader_epochs(led: Mapping[Partition, Leader]) -> OffsetForLeaderEpoch:
    """The request that only the leader of the given epoch answers; the answer says where its log ends.

    All of the partitions have the same leader.
    """
    return OffsetForLeaderEpoch({key: leader.epoch for key, leader in led.items()})


def end_offsets(answer: Mapping[Partition, tuple[int, int]]) -> dict[Partition, int | NotYet]:
    """The end of each log, replicated or not, from the answer to :func:`leader_epochs`."""
    return {
        key: verdict(code, str(Place(*key)), f"Describe on the topic {key[0]!r}") or end
        for key, (code, end) in answer.items()
    }


# Partitions whose readers are held back.

HELD_BACK_S: Final = 5.0
"""A transaction that has held back readers for this long is worth a warning."""


class HeldBack:
    """Partitions whose last stable offset has not moved for a while. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[Place, tuple[int, float]] = {}
        self._told: dict[Place, int] = {}

    def note(self, place: Place, stable: int, *, upto: int) -> None:
        """Record a partition's last stable offset.

        ``upto`` is where a transaction of our own begins: if ``stable`` is lower, another producer's is open.
        """
        with self._lock:
            if stable >= upto or stable < 0:
                self._since.pop(place, None)
            elif self._since.get(place, (-1, 0.0))[0] != stable:
                self._since[place] = (stable, now_s())

    def due(self) -> dict[Place, int]:
        """The partitions held back at one offset for :data:`HELD_BACK_S`, with that offset. Each is reported once."""
        with self._lock:
            due = {
                place: stable
                for place, (stable, since) in self._since.items()
                if now_s() - since >= HELD_BACK_S and self._told.get(place) != stable
            }
            self._told |= due
        return due
