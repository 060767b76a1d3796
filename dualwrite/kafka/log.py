"""Proves a transaction's outcome from the logs of the partitions that it wrote to.

The proof is positive: the transaction's own first batch is still there, and so is the marker that ended it. Once
everything that begins before that batch has ended, usually a moment after the transaction itself, one small
``read_committed`` request at its offset suffices: with the batch, the leader sends the aborted transactions that span
it. While a transaction is still open there, perhaps another producer's, the search reads the log from that batch to the
producer's first control record. Consumers never see control records, so it fetches the log raw, and looks at batch
headers only: it decompresses no data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from kafka.record.default_records import DefaultRecordBatch
from kafka.record.memory_records import MemoryRecords

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.kafka.brokers import Brokers, until_answered
from dualwrite.kafka.cluster import Leader, Partition, Topics
from dualwrite.kafka.cluster__kafka_coordinator_partitions import Place, end_offsets, leader_epochs
from dualwrite.kafka.log__kafka_coordinator_blocking import HeldBack
from dualwrite.kafka.log__kafka_coordinator_fetching import AT_ONCE, fetch, fetched
from dualwrite.kafka.network import Message, NotYet
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import LogProof

logger = logging.getLogger(__name__)

_NEAR: Final = 2_000  # offsets: read this little at once instead of waiting for other producers' open transactions
_ONE_BATCH: Final = 1  # byte: a broker sends at least one whole batch, however large
_FIRST_MAGIC_WITH_PRODUCERS: Final = 2


class Aborted(Protocol):
    """An aborted transaction of one partition, as a ``read_committed`` answer lists it."""

    @property
    def producer_id(self) -> int:
        """Its producer."""
        ...

    @property
    def first_offset(self) -> int:
        """Its first offset."""
        ...


@dataclass(eq=False)
class Scan:
    """The state of the search for the marker that ended one transaction in one partition.

    Attributes:
        first: The transaction's first offset there.
        producer_id: Its producer's id.
        epoch: Its producer's epoch.
        position: The next offset to read.
        begun: Whether the transaction's own first batch has been seen.
        glanced: Whether :meth:`glance` was tried, without a proof.
        is_gone: Whether the partition no longer exists.
    """

    first: FirstOffset
    producer_id: int
    epoch: int
    position: int = field(init=False)
    begun: bool = field(default=False, init=False)
    glanced: bool = field(default=False, init=False)
    is_gone: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.position = self.first.offset

    @property
    def place(self) -> Place:
        """The partition."""
        return Place(self.first.topic, self.first.partition, self.first.topic_id)

    def glance(self, records: Iterable[DefaultRecordBatch], aborted: Iterable[Aborted]) -> LogProof | None:
        """The proof from a ``read_committed`` answer at the first offset; None if you have to :meth:`read` on.

        The answer has no batch while a transaction that begins there or before is open. A producer has one transaction
        open at a time. So an aborted one of the same producer that spans this offset, and does not begin after it, is
        this one.

        Args:
            records: The batches at the first offset.
            aborted: The aborted transactions that span the batches, of any producer.
        """
        self.glanced = True
        batch = next((batch for batch in records if batch.next_offset > self.first.offset), None)
        if batch is None:
            return None
        if not self._is_own_first(batch):
            return LogProof.UNKNOWABLE
        own = any(one.producer_id == self.producer_id and one.first_offset <= self.first.offset for one in aborted)
        return LogProof.ABORTED if own else LogProof.COMMITTED

    def read(self, records: Iterable[DefaultRecordBatch]) -> LogProof | None:
        """Continue over these batches. Returns the proof as soon as there is one."""
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
    raise Unavailable(f"the control record at offset {batch.base_offset} has the unknown type {record.type}")


def prove(brokers: Brokers, topics: Topics, states: Sequence[PreparedTxnState], deadline: Deadline) -> list[LogProof]:
    """Prove the outcome of each transaction from the logs.

    An abort in one partition proves it for the whole transaction: Kafka decides once, and writes its decision to every
    partition. If one partition nevertheless shows a commit and another an abort, an operator wrote a marker by hand.
    The answer is then ``ABORTED``, since a part of the transaction is missing, and an error in the log names both
    partitions. A commit in some partitions, and no outcome in others, is ``PARTLY``: replication is behind, the broker
    has forgotten to end the others, or their records were deleted, and the transaction may still be open there.

    Args:
        brokers: The brokers.
        topics: The topics.
        states: Each names the producer and the transaction's first offset in each partition.
        deadline: Limits the reading. If other transactions are open before one of these, its partitions are read from
            there on to their ends.

    Raises:
        Unavailable: The leaders did not answer in time, or there was too much to read.
        ConfigurationError: We may not read or describe a topic.
    """
    scans = [[Scan(first, state.producer_id, state.epoch) for first in state.first_offsets] for state in states]
    pending = [scan for of_state in scans for scan in of_state]
    what = "prove the outcome of " + (str(states[0]) if len(states) == 1 else f"{len(states)} transactions")
    proofs: dict[Scan, LogProof] = {}
    for start in range(0, len(pending), AT_ONCE):
        search = _Search(brokers, topics, deadline)
        proofs |= until_answered(pending[start : start + AT_ONCE], search.go_on, deadline, what)
    return [
        combined(state, {scan.place: proofs[scan] for scan in of_state})
        for state, of_state in zip(states, scans, strict=True)
    ]


def prove_now(
    brokers: Brokers,
    topics: Topics,
    states: Sequence[PreparedTxnState],
    deadline: Deadline,
    *,
    read_on: bool,
    held_back: HeldBack,
) -> list[dict[Partition, LogProof | None]]:
    """Read, without retrying, what each partition's log proves of each transaction. Unanswered partitions are missing.

    None stands for a partition that is gone with its topic: no broker knows the topic, or only a new one of that name.

    Args:
        brokers: The brokers.
        topics: The topics; uses the leaders already known.
        states: As for :func:`prove`.
        deadline: Covers all requests.
        read_on: Whether to read on, however long the log, if other transactions are open before one of these. Otherwise
            the answer is ``OPEN``.
        held_back: Receives each partition's last stable offset.

    Raises:
        ConfigurationError: We may not read or describe a topic.
    """
    scans = [[Scan(first, state.producer_id, state.epoch) for first in state.first_offsets] for state in states]
    asked = [scan for of_state in scans for scan in of_state]
    search = _Search(brokers, topics, deadline, read_on=read_on, fresh=False, held_back=held_back)
    answers = _answered_now(search, asked)
    # A new topic may have taken the place of the known one.
    doubtful = {scan: replace(scan) for scan in asked if answers.get(scan) is LogProof.UNKNOWABLE}
    again = _answered_now(_Search(brokers, topics, deadline, read_on=read_on), list(doubtful.values()))
    for scan, fresh in doubtful.items():
        answers.pop(scan)
        if fresh in again:
            answers[scan], scan.is_gone = again[fresh], fresh.is_gone
    return [
        {scan.place.key: None if scan.is_gone else answers[scan] for scan in of_state if scan in answers}
        for of_state in scans
    ]


def _answered_now(search: _Search, scans: Sequence[Scan]) -> dict[Scan, LogProof]:
    answers: dict[Scan, LogProof] = {}
    for start in range(0, len(scans), AT_ONCE):
        try:
            found = search.go_on(list(scans[start : start + AT_ONCE]))
        except NotYet as reason:
            logger.debug("no answer about the ends of transactions: %s", reason)
        else:
            answers |= {scan: answer for scan, answer in found.items() if isinstance(answer, LogProof)}
    return answers


def combined(state: PreparedTxnState, proofs: dict[Place, LogProof]) -> LogProof:
    """Combine the proofs of a transaction's partitions; see :func:`prove`."""
    seen = set(proofs.values())
    if {LogProof.COMMITTED, LogProof.ABORTED} <= seen:
        shown = ", ".join(f"{place} {proof.value}" for place, proof in proofs.items())
        logger.error("transaction %s was ended by hand in some partitions: %s", state, shown)
    if LogProof.ABORTED not in seen and LogProof.COMMITTED in seen and len(seen) > 1:
        return LogProof.PARTLY
    for proof in (LogProof.ABORTED, LogProof.COMMITTED, LogProof.OPEN):
        if proof in seen:
            return proof
    return LogProof.UNKNOWABLE


class _Search:
    """Reads some partitions in parallel. After an error it continues where it stopped.

    Args:
        brokers: The brokers.
        topics: The topics.
        deadline: Covers all requests.
        read_on: Whether to read on if :meth:`Scan.glance` finds no proof; else the answer is ``OPEN``.
        fresh: Whether to look up the leaders first: a topic may have been deleted and recreated under its name.
        held_back: Receives each partition's last stable offset.
    """

    def __init__(
        self,
        brokers: Brokers,
        topics: Topics,
        deadline: Deadline,
        *,
        read_on: bool = True,
        fresh: bool = True,
        held_back: HeldBack | None = None,
    ) -> None:
        self._brokers = brokers
        self._topics = topics
        self._deadline = deadline
        self._read_on = read_on
        self._fresh = fresh
        self._held_back = held_back

    def go_on(self, scans: list[Scan]) -> dict[Scan, LogProof | NotYet]:
        """Read each partition until its proof is found, or until an error."""
        answers: dict[Scan, LogProof | NotYet] = {}
        leaders = self._leaders(scans, answers)
        reading = [scan for scan in scans if scan in leaders]
        while reading:
            if self._deadline.expired:
                answers.update(dict.fromkeys(reading, NotYet("there is more to read")))
                break
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
        found = self._topics.find({scan.first.topic for scan in scans}, self._deadline, fresh=self._fresh)
        leaders: dict[Scan, Leader] = {}
        for scan in scans:
            leader = scan.place.leader(found)
            if isinstance(leader, Leader):
                leaders[scan] = leader
            else:
                scan.is_gone = leader is None
                answers[scan] = leader or LogProof.UNKNOWABLE
        return leaders

    def _read(self, scan: Scan, leader: Leader, response: Message | NotYet) -> LogProof | NotYet | None:
        partition = fetched(scan.place, response)
        if partition is None:
            return LogProof.UNKNOWABLE
        if isinstance(partition, NotYet):
            return partition
        records = MemoryRecords(partition.records or b"")
        if not scan.glanced:
            if self._held_back is not None:
                self._held_back.note(Place(*scan.place.key), partition.last_stable_offset, upto=scan.first.offset)
            proof = scan.glance(records, partition.aborted_transactions or ())
            near = partition.high_watermark - scan.first.offset < _NEAR
            return proof if proof is not None or self._read_on or near else LogProof.OPEN
        before = scan.position
        proof = scan.read(records)
        if proof is not None or scan.position > before:
            return proof
        if scan.begun and scan.position >= partition.high_watermark:
            return LogProof.OPEN
        return self._nothing_there(scan, leader)

    def _nothing_there(self, scan: Scan, leader: Leader) -> LogProof | NotYet:
        """Find out why the fetch returned nothing: the log ends before the position, or is not replicated that far."""
        [response] = self._brokers.exchange([(leader.node, leader_epochs({scan.place.key: leader}))], self._deadline)
        end = response if isinstance(response, NotYet) else end_offsets(response)[scan.place.key]
        if isinstance(end, NotYet):
            return end
        if end <= scan.first.offset:
            return LogProof.UNKNOWABLE
        return NotYet(f"{scan.place} is not replicated up to offset {scan.position} yet")


def _fetch(scan: Scan, leader: Leader) -> Message:
    if scan.glanced:
        return fetch(scan.place, leader, scan.position)
    return fetch(scan.place, leader, scan.position, max_bytes=_ONE_BATCH, read_committed=True)
