"""The sequence numbers of a producer's open transaction, from the logs of its partitions and from their leaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kafka.record.memory_records import MemoryRecords

from dualwrite.clock import Deadline
from dualwrite.kafka.brokers import Brokers, until_answered
from dualwrite.kafka.cluster import Leader, Partition, Topics
from dualwrite.kafka.cluster__kafka_coordinator_partitions import Place, describe_producers
from dualwrite.kafka.log__kafka_coordinator_fetching import AT_ONCE, fetch, fetched
from dualwrite.kafka.log__kafka_coordinator_later import newest_records
from dualwrite.kafka.network import Message, NotYet

_ONE_BATCH: Final = 1  # byte: a broker sends at least one whole batch, however large
_LEFT_OUT: Final = NotYet("the broker left a partition out of its answer")
Span = tuple[int, int]
"""The sequence numbers of a transaction's first record and of its producer's newest one."""


def spans(
    brokers: Brokers,
    topics: Topics,
    ids: tuple[int, int],
    firsts: Mapping[Partition, int],
    deadline: Deadline,
) -> dict[Partition, Span | None]:
    """By partition, the sequence numbers of a producer's first record at an offset, and of its newest record.

    Args:
        brokers: The brokers.
        topics: The topics; uses the leaders already known.
        ids: The producer's id and epoch.
        firsts: By partition, the offset of the first record.
        deadline: Limits the requests.

    Returns:
        None for a partition that does not hold that record.

    Raises:
        Unavailable: Some leaders did not answer in time.
        ConfigurationError: We may not read or describe a topic.
    """

    def ask(pending: list[Partition]) -> dict[Partition, Span | NotYet | None]:
        found = topics.find({topic for topic, _ in pending}, deadline, fresh=False)
        leaders = {key: Place(*key).leader(found) for key in pending}
        answers: dict[Partition, Span | NotYet | None] = {
            key: leader for key, leader in leaders.items() if not isinstance(leader, Leader)
        }
        led = {key: leader for key, leader in leaders.items() if isinstance(leader, Leader)}
        # A follower answers the first request, too, and may lag behind; only the leader of that epoch answers the second.
        requests = [
            (leader.node, request)
            for key, leader in led.items()
            for request in (describe_producers([key]), fetch(Place(*key), leader, firsts[key], max_bytes=_ONE_BATCH))
        ]
        responses = brokers.exchange(requests, deadline)
        for key, producers, batches in zip(led, responses[::2], responses[1::2], strict=True):
            answers[key] = _span(key, ids, firsts[key], producers, batches)
        topics.forget(topic for (topic, _), answer in answers.items() if isinstance(answer, NotYet))
        return answers

    places = list(firsts)
    shown: dict[Partition, Span | None] = {}
    for start in range(0, len(places), AT_ONCE):
        shown |= until_answered(
            places[start : start + AT_ONCE], ask, deadline, "report a producer's sequence numbers in the partitions"
        )
    return shown


def _span(
    key: Partition, ids: tuple[int, int], first: int, producers: Message | NotYet, batches: Message | NotYet
) -> Span | NotYet | None:
    partition = fetched(Place(*key), batches)
    if partition is None or isinstance(partition, NotYet):
        return partition
    if isinstance(producers, NotYet):
        return producers
    newest = newest_records(producers).get(key, _LEFT_OUT)
    if isinstance(newest, NotYet):
        return newest
    batch = next((one for one in MemoryRecords(partition.records or b"") if one.next_offset > first), None)
    if batch is None:
        return NotYet(f"{Place(*key)} is not replicated up to offset {first} yet")
    if (batch.producer_id, batch.producer_epoch) != ids or batch.base_offset != first or batch.is_control_batch:
        return None
    (epoch, last), _ = newest.get(ids[0], ((-1, -1), -1))
    return (batch.base_sequence, last) if epoch == ids[1] else None
