"""Requests to partition leaders: the transactions open in a partition, and where its log ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from kafka.protocol.admin.transactions import DescribeProducersRequest
from kafka.protocol.consumer.offsets import OffsetForLeaderEpochRequest

from dualwrite.clock import Deadline
from dualwrite.kafka.brokers import Brokers, until_answered, verdict
from dualwrite.kafka.cluster import Leader, Partition, Topic, Topics
from dualwrite.kafka.network import Message, NotYet

_NO_TRANSACTION: Final = -1
OpenOffsets = Mapping[tuple[int, int], int]
"""By producer id and epoch, the offset at which its open transaction began."""
Producers = Mapping[int, tuple[int, int | None]]
"""By producer id, its epoch, and the offset at which its open transaction began; None if it has none open."""


@dataclass(frozen=True)
class Place:
    """A partition of one particular topic.

    Attributes:
        topic: The topic's name.
        partition: The partition's number.
        topic_id: The topic's id, since a new topic may have taken the name. None if it is not known.
    """

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
        """The partition's leader; None if the partition does not exist.

        Args:
            topics: The known topics.
        """
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

    Args:
        brokers: The brokers.
        topics: The topics.
        places: The partitions. The answer is None for one that does not exist: no broker knows its topic, or only a new
            one of that name.
        deadline: Limits the wait.
        fresh: Whether to look up the topics' ids and leaders first, instead of using those already known.

    Raises:
        Unavailable: Some leaders did not answer in time.
        ConfigurationError: We may not read or describe a topic.
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
        (node, request) for node, led in led_by.items() for request in (describe_producers(led), leader_epochs(led))
    ]
    responses = brokers.exchange(requests, deadline)
    shown: dict[Partition, Producers | NotYet] = {}
    for led, described, epochs in zip(led_by.values(), responses[::2], responses[1::2], strict=True):
        shown |= _joined(led, described, epochs)
    unlisted = NotYet("the broker left a partition out of its answer")
    answers = {
        place: shown.get(place.key, unlisted) if isinstance(leader, Leader) else leader
        for place, leader in leaders.items()
    }
    topics.forget(place.topic for place, answer in answers.items() if isinstance(answer, NotYet))
    return answers


def _joined(
    led: Collection[Partition], described: Message | NotYet, epochs: Message | NotYet
) -> dict[Partition, Producers | NotYet]:
    if isinstance(described, NotYet):
        return dict.fromkeys(led, described)
    ends = dict.fromkeys(led, epochs) if isinstance(epochs, NotYet) else end_offsets(epochs)
    answers: dict[Partition, Producers | NotYet] = {}
    for topic in described.topics:
        for partition in topic.partitions:
            key = (topic.name, partition.partition_index)
            subject = f"the producers of {Place(*key)}"
            why = verdict(partition.error_code, subject, f"Read on the topic {topic.name!r}")
            end = ends.get(key, NotYet("the broker left a partition out of its answer"))
            if why is not None:
                answers[key] = why
            elif isinstance(end, NotYet):
                answers[key] = end
            else:
                answers[key] = {
                    producer.producer_id: (
                        producer.producer_epoch,
                        None
                        if producer.current_txn_start_offset == _NO_TRANSACTION
                        else producer.current_txn_start_offset,
                    )
                    for producer in partition.active_producers
                }
    return answers


def describe_producers(led: Collection[Partition]) -> Message:
    """The request for the producers of these partitions.

    Args:
        led: Partitions that one broker leads.
    """
    by_topic: dict[str, list[int]] = {}
    for name, partition in led:
        by_topic.setdefault(name, []).append(partition)
    topic = DescribeProducersRequest.TopicRequest
    return DescribeProducersRequest(
        topics=[topic(name=name, partition_indexes=indexes) for name, indexes in by_topic.items()]
    )


def leader_epochs(led: Mapping[Partition, Leader]) -> Message:
    """The request that only the leader of the given epoch answers; the answer says where its log ends.

    Args:
        led: Partitions with their leaders, which must be the same broker.
    """
    topic = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    by_topic: dict[str, list[Message]] = {}
    for (name, partition), leader in led.items():
        by_topic.setdefault(name, []).append(
            topic.OffsetForLeaderPartition(
                partition=partition, current_leader_epoch=leader.epoch, leader_epoch=leader.epoch
            )
        )
    return OffsetForLeaderEpochRequest(
        topics=[topic(topic=name, partitions=partitions) for name, partitions in by_topic.items()]
    )


def end_offsets(response: Message) -> dict[Partition, int | NotYet]:
    """The end of each log, replicated or not, from the answer to :func:`leader_epochs`.

    Raises:
        ConfigurationError: We may not describe a topic.
    """
    ends: dict[Partition, int | NotYet] = {}
    for topic in response.topics:
        for partition in topic.partitions:
            key = (topic.topic, partition.partition)
            why = verdict(partition.error_code, str(Place(*key)), f"Describe on the topic {topic.topic!r}")
            ends[key] = why or partition.end_offset
    return ends
