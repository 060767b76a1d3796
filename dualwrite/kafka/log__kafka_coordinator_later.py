"""Finds a producer's commits after a known transaction, in the logs of that transaction's partitions.

Reads each log raw from the known transaction on, up to the producer's newest record, whose sequence number the
partition's leader reports. That record usually belongs to the known transaction itself, so that one small request
suffices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kafka.record.memory_records import MemoryRecords

from dualwrite.clock import Deadline
from dualwrite.kafka.brokers import Brokers, until_answered, verdict
from dualwrite.kafka.cluster import Leader, Partition, Topics
from dualwrite.kafka.cluster__kafka_coordinator_partitions import Place, describe_producers
from dualwrite.kafka.log__kafka_coordinator_fetching import AT_ONCE, fetch, fetched
from dualwrite.kafka.network import Message, NotYet
from dualwrite.protocol.lost_decisions import Later
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState

_NO_SEQUENCE: Final = -1
Sequenced = tuple[int, int]
"""An epoch and a sequence number, which identify a record of a producer."""


class LogBatch(Protocol):
    """The fields of a log batch that the scan reads."""

    @property
    def base_offset(self) -> int: ...  # noqa: D102
    @property
    def next_offset(self) -> int: ...  # noqa: D102
    @property
    def producer_id(self) -> int: ...  # noqa: D102
    @property
    def producer_epoch(self) -> int: ...  # noqa: D102
    @property
    def last_sequence(self) -> int: ...  # noqa: D102
    @property
    def is_control_batch(self) -> bool: ...  # noqa: D102


@dataclass(eq=False)
class LaterScan:
    """The state of the search in one partition.

    Attributes:
        first: The known transaction's first offset there.
        producer_id: The producer.
        epoch: The known transaction's epoch if it is native: then each transaction has its own.
        newest: Its newest record, as the leader reports it; None reads to the log's end.
        position: The next offset to read.
        idle_since_ms: Time of the producer's last write to the partition, markers included, by the leader's clock.
        found: Where the newest committed transaction after the known one begins; None while none was seen.
        found_epoch: Its epoch.
        done: Whether no record of the producer follows.
    """

    first: FirstOffset
    producer_id: int
    epoch: int | None = None
    newest: Sequenced | None = None
    idle_since_ms: int | None = None
    position: int = field(init=False)
    found: int | None = None
    found_epoch: int = -1
    done: bool = False
    _begun_at: int | None = None
    _begun_epoch: int = -1
    _past_known: bool = False

    def __post_init__(self) -> None:
        self.position = self.first.offset

    @property
    def place(self) -> Place:
        """The partition."""
        return Place(self.first.topic, self.first.partition, self.first.topic_id)

    def read(self, batches: Iterable[LogBatch]) -> None:
        """Continue the search over these batches."""
        for batch in batches:
            if batch.next_offset <= self.position or self.done:
                continue
            if batch.producer_id == self.producer_id:
                self._own(batch)
            self.position = batch.next_offset

    @property
    def has_nothing_later(self) -> bool:
        """Whether the leader's report shows that nothing of a later native transaction is there.

        The known one's marker raises the epoch, without a record.
        """
        return self.epoch is not None and self.newest is not None and self.newest <= (self.epoch + 1, _NO_SEQUENCE)

    def _own(self, batch: LogBatch) -> None:
        if self.epoch is not None:
            self._own_native(batch, self.epoch)
            return
        if batch.is_control_batch:
            if self._past_known and self._begun_at is not None and is_commit(batch):
                self.found = self._begun_at
            self._past_known, self._begun_at = True, None
            return
        if self._begun_at is None:
            self._begun_at = batch.base_offset
        # The known transaction's own marker need not be read; a later transaction's marker decides.
        self.done = not self._past_known and (batch.producer_epoch, batch.last_sequence) == self.newest

    def _own_native(self, batch: LogBatch, known_epoch: int) -> None:
        if batch.is_control_batch:
            # A settler's repair commits under a later epoch still.
            if self._begun_at is not None and is_commit(batch) and batch.producer_epoch == self._begun_epoch + 1:
                self.found, self.found_epoch = self._begun_at, self._begun_epoch
            self._begun_at = None
        elif batch.producer_epoch > known_epoch and (
            self._begun_at is None or batch.producer_epoch > self._begun_epoch
        ):
            self._begun_at, self._begun_epoch = batch.base_offset, batch.producer_epoch


def is_commit(batch: LogBatch) -> bool:
    """Whether a control batch is a commit marker."""
    record = next(iter(batch))  # type: ignore[call-overload]
    return bool(record.commit)


def scans_of(state: PreparedTxnState) -> list[LaterScan]:
    """The scans of a state's partitions, as far as it names offsets."""
    epoch = state.epoch if state.is_native else None
    return [LaterScan(first, state.producer_id, epoch) for first in state.first_offsets]


def joined(state: PreparedTxnState, scans: Sequence[LaterScan]) -> Later:
    """Combine the scans of a state's partitions."""
    firsts = tuple(
        FirstOffset(scan.first.topic, scan.first.partition, scan.found, scan.first.topic_id)
        for scan in scans
        if scan.found is not None
    )
    if state.is_native:
        commit = _newest_native(state, scans) if firsts else None
    else:
        commit = PreparedTxnState(state.producer_id, state.epoch, state.incarnation, firsts) if firsts else None
    return Later(commit, max((at for scan in scans if (at := scan.idle_since_ms) is not None), default=None))


def _newest_native(state: PreparedTxnState, scans: Sequence[LaterScan]) -> PreparedTxnState:
    epoch = max(scan.found_epoch for scan in scans)
    offsets = {scan.place.key: scan.found for scan in scans if scan.found_epoch == epoch}
    ids = {topic: topic_id for topic, topic_id in state.topic_ids.items() if topic_id is not None}
    return PreparedTxnState.native(state.producer_id, epoch, state.incarnation, offsets, ids)


def later_commits(
    brokers: Brokers, topics: Topics, states: Sequence[PreparedTxnState], deadline: Deadline
) -> list[Later]:
    """For each state, its producer's later commits, as the logs of the state's partitions show them.

    A partition that no longer holds the state's records shows nothing, nor does one whose leader has forgotten the
    producer (``producer.id.expiration.ms``, a day by default).

    Args:
        brokers: The brokers.
        topics: The topics.
        states: Each names a producer, and where one of its transactions began.
        deadline: Limits the reading.

    Raises:
        Unavailable: The leaders did not answer in time, or there was too much to read.
        ConfigurationError: We may not read or describe a topic.
    """
    scans = [scans_of(state) for state in states]
    pending = [scan for of_state in scans for scan in of_state]
    search = _Search(brokers, topics, deadline)
    for start in range(0, len(pending), AT_ONCE):
        until_answered(pending[start : start + AT_ONCE], search.go_on, deadline, "look for later transactions")
    return [joined(state, of_state) for state, of_state in zip(states, scans, strict=True)]


class _Search:
    """Reads some partitions in parallel. After an error it continues where it stopped."""

    def __init__(self, brokers: Brokers, topics: Topics, deadline: Deadline) -> None:
        self._brokers = brokers
        self._topics = topics
        self._deadline = deadline

    def go_on(self, scans: list[LaterScan]) -> dict[LaterScan, bool | NotYet]:
        """Read each partition up to the producer's newest record, or until an error."""
        found = self._topics.find({scan.first.topic for scan in scans}, self._deadline, fresh=True)
        answers: dict[LaterScan, bool | NotYet] = {}
        leaders: dict[LaterScan, Leader] = {}
        for scan in scans:
            leader = scan.place.leader(found)
            if isinstance(leader, Leader):
                leaders[scan] = leader
            else:
                answers[scan] = leader or True
        self._ask_newest(leaders, answers)
        while reading := [scan for scan in leaders if scan not in answers]:
            if self._deadline.expired:
                raise NotYet("there is more to read")
            requests = [(leaders[scan].node, fetch(scan.place, leaders[scan], scan.position)) for scan in reading]
            for scan, response in zip(reading, self._brokers.exchange(requests, self._deadline), strict=True):
                answer = _read(scan, response)
                if answer is not None:
                    answers[scan] = answer
        self._topics.forget(scan.first.topic for scan, answer in answers.items() if isinstance(answer, NotYet))
        return answers

    def _ask_newest(self, leaders: Mapping[LaterScan, Leader], answers: dict[LaterScan, bool | NotYet]) -> None:
        by_node: dict[int, list[LaterScan]] = {}
        for scan, leader in leaders.items():
            by_node.setdefault(leader.node, []).append(scan)
        requests = [(node, describe_producers({scan.place.key for scan in led})) for node, led in by_node.items()]
        for led, response in zip(by_node.values(), self._brokers.exchange(requests, self._deadline), strict=True):
            shown = response if isinstance(response, NotYet) else newest_records(response)
            for scan in led:
                answer = shown if isinstance(shown, NotYet) else shown.get(scan.place.key, _LEFT_OUT)
                if isinstance(answer, NotYet):
                    answers[scan] = answer
                elif scan.producer_id in answer:
                    scan.newest, scan.idle_since_ms = answer[scan.producer_id]
                    if scan.has_nothing_later:
                        answers[scan] = True
                else:
                    answers[scan] = True  # the leader has forgotten the producer


_LEFT_OUT: Final = NotYet("the broker left a partition out of its answer")


def newest_records(response: Message) -> dict[Partition, dict[int, tuple[Sequenced, int]] | NotYet]:
    """By partition and producer id, the newest record and the time of the last write, from ``DescribeProducers``' answer.

    Raises:
        ConfigurationError: We may not read a topic.
    """
    shown: dict[Partition, dict[int, tuple[Sequenced, int]] | NotYet] = {}
    for topic in response.topics:
        for partition in topic.partitions:
            key = (topic.name, partition.partition_index)
            why = verdict(partition.error_code, f"the producers of {Place(*key)}", f"Read on the topic {topic.name!r}")
            shown[key] = why or {
                producer.producer_id: ((producer.producer_epoch, producer.last_sequence), producer.last_timestamp)
                for producer in partition.active_producers
            }
    return shown


def _read(scan: LaterScan, response: Message | NotYet) -> bool | NotYet | None:
    """True once the partition is read to its end; None if there is more."""
    partition = fetched(scan.place, response)
    if partition is None:
        return True
    if isinstance(partition, NotYet):
        return partition
    scan.read(MemoryRecords(partition.records or b""))
    return True if scan.done or scan.position >= partition.high_watermark else None
