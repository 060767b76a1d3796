"""The proof of a transaction's outcome from the logs of the partitions that it wrote.

The proof is positive: the transaction's own first batch is still there, and the first control record of its producer after
it is a commit or an abort marker. Consumers never see control records, so the log is fetched raw, and its batches are told
apart by their headers: the data in them is not decompressed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import kafka.errors as kafka_errors
from kafka.protocol.consumer.fetch import FetchRequest
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.memory_records import MemoryRecords

from dualwrite.deadline import Deadline
from dualwrite.errors import Unavailable
from dualwrite.kafka.brokers import Brokers, until_answered, verdict
from dualwrite.kafka.network import Message, NotYet
from dualwrite.kafka.partitions import Place, end_offsets, leader_epochs
from dualwrite.kafka.routing import Leader, Topics
from dualwrite.observations import LogProof
from dualwrite.prepared_state import FirstOffset, PreparedTxnState

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 1_048_576  # a broker sends at least one whole batch, however great
_AT_ONCE: Final = 8  # partitions: bounds the memory
_NEWEST_VERSION_BY_NAME: Final = 12  # later versions name topics by id, which not every state has
_FIRST_MAGIC_WITH_PRODUCERS: Final = 2


@dataclass(eq=False)
class Scan:
    """The search for one transaction's marker in one partition: where it stands.

    Attributes:
        first: The transaction's first offset there.
        producer_id: Its producer's id.
        epoch: Its producer's epoch.
        position: The next offset to read.
        begun: Whether the transaction's own first batch has been seen.
    """

    first: FirstOffset
    producer_id: int
    epoch: int
    position: int = field(init=False)
    begun: bool = False

    def __post_init__(self) -> None:
        self.position = self.first.offset

    @property
    def place(self) -> Place:
        """The partition."""
        return Place(self.first.topic, self.first.partition, self.first.topic_id)

    def read(self, records: Iterable[DefaultRecordBatch]) -> LogProof | None:
        """Go on over these batches. Returns the proof as soon as there is one."""
        for batch in records:
            if batch.next_offset <= self.position:
                continue
            if not self.begun:
                if not self._is_own_first(batch):
                    return LogProof.UNKNOWABLE
                self.begun = True
            elif batch.is_control_batch and batch.producer_id == self.producer_id:
                return _marker(batch)
            self.position = batch.next_offset
        return None

    def _is_own_first(self, batch: DefaultRecordBatch) -> bool:
        return (
            batch.magic >= _FIRST_MAGIC_WITH_PRODUCERS
            and batch.base_offset <= self.first.offset
            and (batch.producer_id, batch.producer_epoch) == (self.producer_id, self.epoch)
            and not batch.is_control_batch
        )


def _marker(batch: DefaultRecordBatch) -> LogProof:
    record = next(iter(batch))
    if record.commit:
        return LogProof.COMMITTED
    if record.abort:
        return LogProof.ABORTED
    raise Unavailable(f"a control record at offset {batch.base_offset} is of the unknown type {record.type}")


def prove(brokers: Brokers, topics: Topics, state: PreparedTxnState, deadline: Deadline) -> LogProof:
    """What the logs prove of a transaction.

    A marker in one partition is a proof for the whole transaction: Kafka decides once, and writes what it decided to every
    partition. If one partition nevertheless shows a commit and another one an abort, somebody has written a marker by hand.
    Then the answer is ``ABORTED``, with an error in the log that names both: a part of the transaction is not there. A commit
    in some partitions and nothing yet in others is ``PARTLY``: replication is behind, or the broker has forgotten the others.

    Args:
        brokers: The brokers.
        topics: The topics.
        state: Names the producer and the transaction's first offset in each partition.
        deadline: Bounds the reading. It is as long as what was written to the partitions since.

    Raises:
        Unavailable: The leaders did not answer in time, or there was too much to read.
        ConfigurationError: We may not read or describe a topic.
    """
    scans = [Scan(first, state.producer_id, state.epoch) for first in state.first_offsets]
    proofs: dict[Scan, LogProof] = {}
    for start in range(0, len(scans), _AT_ONCE):
        search = _Search(brokers, topics, deadline)
        proofs |= until_answered(
            scans[start : start + _AT_ONCE], search.go_on, deadline, f"prove the outcome of {state}"
        )
    return combined(state, {scan.place: proof for scan, proof in proofs.items()})


def combined(state: PreparedTxnState, proofs: dict[Place, LogProof]) -> LogProof:
    """What the proofs of all its partitions say of a transaction; see :func:`prove`."""
    seen = set(proofs.values())
    if {LogProof.COMMITTED, LogProof.ABORTED} <= seen:
        shown = ", ".join(f"{place} {proof.value}" for place, proof in proofs.items())
        logger.error("transaction %s was ended by hand in some partitions: %s", state, shown)
    if LogProof.ABORTED not in seen and {LogProof.COMMITTED, LogProof.OPEN} <= seen:
        return LogProof.PARTLY
    for proof in (LogProof.ABORTED, LogProof.COMMITTED, LogProof.OPEN):
        if proof in seen:
            return proof
    return LogProof.UNKNOWABLE


class _Search:
    """Reads some partitions side by side. What has been read is not read again after an error."""

    def __init__(self, brokers: Brokers, topics: Topics, deadline: Deadline) -> None:
        self._brokers = brokers
        self._topics = topics
        self._deadline = deadline

    def go_on(self, scans: list[Scan]) -> dict[Scan, LogProof | NotYet]:
        """Read each partition until its proof is found, or something hinders it."""
        answers: dict[Scan, LogProof | NotYet] = {}
        leaders = self._leaders(scans, answers)
        reading = [scan for scan in scans if scan in leaders]
        while reading:
            if self._deadline.expired:
                raise NotYet("there is more to read")
            requests = [(leaders[scan].node, _fetch(scan, leaders[scan])) for scan in reading]
            responses = self._brokers.exchange(requests, self._deadline)
            for scan, response in zip(reading, responses, strict=True):
                answer = self._read(scan, leaders[scan], response)
                if answer is not None:
                    answers[scan] = answer
            reading = [scan for scan in reading if scan not in answers]
        self._topics.forget(scan.first.topic for scan, answer in answers.items() if isinstance(answer, NotYet))
        return answers

    def _leaders(self, scans: list[Scan], answers: dict[Scan, LogProof | NotYet]) -> dict[Scan, Leader]:
        # Asked anew: a topic may have been deleted and made again under its name.
        found = self._topics.find({scan.first.topic for scan in scans}, self._deadline, fresh=True)
        leaders: dict[Scan, Leader] = {}
        for scan in scans:
            leader = scan.place.leader(found)
            if isinstance(leader, Leader):
                leaders[scan] = leader
            else:
                answers[scan] = leader or LogProof.UNKNOWABLE
        return leaders

    def _read(self, scan: Scan, leader: Leader, response: Message | NotYet) -> LogProof | NotYet | None:
        if isinstance(response, NotYet):
            return response
        [partition] = response.responses[0].partitions
        if kafka_errors.for_code(partition.error_code) is kafka_errors.OffsetOutOfRangeError:
            return LogProof.UNKNOWABLE
        why = verdict(partition.error_code, str(scan.place), f"Read on the topic {scan.first.topic!r}")
        if why is not None:
            return why
        before = scan.position
        proof = scan.read(MemoryRecords(partition.records or b""))
        if proof is not None or scan.position > before:
            return proof
        if scan.begun and scan.position >= partition.high_watermark:
            return LogProof.OPEN
        return self._nothing_there(scan, leader)

    def _nothing_there(self, scan: Scan, leader: Leader) -> LogProof | NotYet:
        """Nothing could be read at the position: the log is shorter than that, or not yet replicated so far."""
        [response] = self._brokers.exchange([(leader.node, leader_epochs({scan.place.key: leader}))], self._deadline)
        end = response if isinstance(response, NotYet) else end_offsets(response)[scan.place.key]
        if isinstance(end, NotYet):
            return end
        if end <= scan.first.offset:
            return LogProof.UNKNOWABLE
        return NotYet(f"{scan.place} is not replicated up to offset {scan.position} yet")


def _fetch(scan: Scan, leader: Leader) -> Message:
    partition = FetchRequest.FetchTopic.FetchPartition(
        partition=scan.first.partition,
        current_leader_epoch=leader.epoch,
        fetch_offset=scan.position,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=_CHUNK_BYTES,
    )
    return FetchRequest(
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=_CHUNK_BYTES,
        isolation_level=0,  # read uncommitted
        session_id=0,
        session_epoch=-1,
        topics=[FetchRequest.FetchTopic(topic=scan.first.topic, partitions=[partition])],
        forgotten_topics_data=[],
        rack_id="",
        max_version=_NEWEST_VERSION_BY_NAME,
    )
