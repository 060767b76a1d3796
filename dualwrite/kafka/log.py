"""Reads partitions' logs for proof: whether a transaction was committed, and what came later.

The coordinator forgets; the log does not, as long as it is retained. Everything here reads control records and headers
of batches, never the user's data.

The proof is positive: the transaction's own first batch is still there, and so is the marker that ended it. Once
everything that begins before that batch has ended, usually a moment after the transaction itself, one small
``read_committed`` request at its offset suffices: with the batch, the leader sends the aborted transactions that span
it. While a transaction is still open there, perhaps another producer's, the search reads the log from that batch to the
producer's first control record. Consumers never see control records, so it fetches the log raw, and looks at batch
headers only: it decompresses no data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.kafka.brokers import Brokers, NotYet, until_answered, verdict
from dualwrite.kafka.cluster import HeldBack, Leader, Partition, Place, Topics, end_offsets, leader_epochs
from dualwrite.kafka.error_codes import Code
from dualwrite.kafka.messages import DescribeProducers, Message, ProducerState
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.settle import Later
from dualwrite.protocol.values import LogProof

if TYPE_CHECKING:
    from kafka.record.default_records import DefaultRecordBatch

logger = logging.getLogger(__name__)

AnyScan = TypeVar("AnyScan", "Scan", "LaterScan")

_NEAR: Final = 2_000  # offsets: read this little at once instead of waiting for other producers' open transactions
_ONE_BATCH: Final = 1  # byte: a broker sends at least one whole batch, however large
_FIRST_MAGIC_WITH_PRODUCERS: Final = 2


@dataclass(eq=False)
class Scan:
    """The state of the search for the marker that ended one transaction in one partition."""

    first: FirstOffset
    producer_id: int
    epoch: int
    position: int = field(init=False)
    begun: bool = field(default=False, init=False)  # whether the transaction's own first batch has been seen
    glanced: bool = field(default=False, init=False)  # whether glance() was tried, without a proof
    is_gone: bool = field(default=False, init=False)  # whether the partition no longer exists

    def __post_init__(self) -> None:
        self.position = self.first.offset

    @property
    def place(self) -> Place:
        """The partition."""
        return Place(self.first.topic, self.first.partition, self.first.topic_id)

    def glance(self, records: Iterable[DefaultRecordBatch], aborted: Iterable[Message]) -> LogProof | None:
        """The proof from a ``read_committed`` answer at the first offset; None if you have to :meth:`read` on.

        The answer has no batch while a transaction that begins there or before is open. A producer has one transaction open
        at a time. So an aborted one of the same producer that spans this offset, and does not begin after it, is this one.
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
    partition. If one partition nevertheless shows a commit and another an abort, an operator wrote a marker by hand. The
    answer is then ``ABORTED``, since a part of the transaction is missing, and an error in the log names both partitions. A
    commit in some partitions, and no outcome in others, is ``PARTLY``: replication is behind, the broker has forgotten to
    end the others, or their records were deleted, and the transaction may still be open there.

    If other transactions are open before one of these, its partitions are read from there on to their ends: `Unavailable`
    may mean that there was too much to read.
    """
    scans = [[Scan(first, state.producer_id, state.epoch) for first in state.first_offsets] for state in states]
    pending = [scan for of_state in scans for scan in of_state]
    what = "prove the outcome of " + (str(states[0]) if len(states) == 1 else f"{len(states)} transactions")
    proofs: dict[Scan, LogProof] = {}
    for start in range(0, len(pending), AT_ONCE):
        search = _LogSearch(brokers, topics, deadline)
        proofs |= until_answered(pending[start : start + AT_ONCE], search.resume, deadline, what)
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

    None stands for a partition that is gone with its topic: no broker knows the topic, or only a new one of that name. If
    other transactions are open before one of these, ``read_on`` reads on, however long the log; otherwise the answer is
    ``OPEN``. ``held_back`` receives each partition's last stable offset.
    """
    scans = [[Scan(first, state.producer_id, state.epoch) for first in state.first_offsets] for state in states]
    asked = [scan for of_state in scans for scan in of_state]
    search = _LogSearch(brokers, topics, deadline, read_on=read_on, fresh=False, held_back=held_back)
    answers = _answered_now(search, asked)
    # A new topic may have taken the place of the known one.
    doubtful = {scan: replace(scan) for scan in asked if answers.get(scan) is LogProof.UNKNOWABLE}
    again = _answered_now(_LogSearch(brokers, topics, deadline, read_on=read_on), list(doubtful.values()))
    for scan, fresh in doubtful.items():
        answers.pop(scan)
        if fresh in again:
            answers[scan], scan.is_gone = again[fresh], fresh.is_gone
    return [
        {scan.place.key: None if scan.is_gone else answers[scan] for scan in of_state if scan in answers}
        for of_state in scans
    ]


def _answered_now(search: _LogSearch, scans: Sequence[Scan]) -> dict[Scan, LogProof]:
    answers: dict[Scan, LogProof] = {}
    for start in range(0, len(scans), AT_ONCE):
        try:
            found = search.resume(list(scans[start : start + AT_ONCE]))
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


class _LogSearch:
    """Reads some partitions in parallel. After an error it continues where it stopped.

    With ``fresh`` it looks up the leaders first: a topic may have been deleted and recreated under its name.
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

    def resume(self, scans: list[Scan]) -> dict[Scan, LogProof | NotYet]:
        """Read each partition until its proof is found, or until an error."""
        leaders, absent = _led(self._topics, scans, self._deadline, fresh=self._fresh)
        answers: dict[Scan, LogProof | NotYet] = {scan: why or LogProof.UNKNOWABLE for scan, why in absent.items()}
        for scan, why in absent.items():
            scan.is_gone = why is None
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

    def _read(self, scan: Scan, leader: Leader, response: Message | NotYet) -> LogProof | NotYet | None:
        partition = fetched(scan.place, response)
        if partition is None:
            return LogProof.UNKNOWABLE
        if isinstance(partition, NotYet):
            return partition
        records = batches_of(partition)
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


def _led(
    topics: Topics, scans: Sequence[AnyScan], deadline: Deadline, *, fresh: bool
) -> tuple[dict[AnyScan, Leader], dict[AnyScan, NotYet | None]]:
    """The leaders of the scans' partitions, and why some have none: None for one that does not exist."""
    found = topics.find({scan.first.topic for scan in scans}, deadline, fresh=fresh)
    shown = {scan: scan.place.leader(found) for scan in scans}
    leaders = {scan: leader for scan, leader in shown.items() if isinstance(leader, Leader)}
    return leaders, {scan: why for scan, why in shown.items() if not isinstance(why, Leader)}


def _fetch(scan: Scan, leader: Leader) -> Message:
    return fetch(scan.place, leader, scan.position) if scan.glanced else glance_request(scan, leader)


def glance_request(scan: Scan, leader: Leader) -> Message:
    """The request whose answer :meth:`Scan.glance` takes."""
    return fetch(scan.place, leader, scan.position, max_bytes=_ONE_BATCH, read_committed=True)


# Finds a producer's commits after a known transaction, in the logs of that transaction's partitions.
#
# Reads each log raw from the known transaction on, up to the producer's newest record, whose sequence number the
# partition's leader reports. That record usually belongs to the known transaction itself, so that one small request
# suffices.

_NO_SEQUENCE: Final = -1
Sequenced = tuple[int, int]
"""An epoch and a sequence number, which identify a record of a producer."""


@dataclass(eq=False)
class LaterScan:
    """The state of the search for later commits in one partition."""

    first: FirstOffset
    producer_id: int
    epoch: int | None = None  # the known transaction's if it is native: then each transaction has its own
    newest: Sequenced | None = None  # the producer's newest record by its leader; None reads to the log's end
    idle_since_ms: int | None = None  # its last write, markers included, by the leader's clock
    position: int = field(init=False)
    found: int | None = None  # where the newest committed transaction after the known one begins
    found_epoch: int = -1
    done: bool = False  # whether no record of the producer follows
    _begun_at: int | None = None
    _begun_epoch: int = -1
    _past_known: bool = False

    def __post_init__(self) -> None:
        self.position = self.first.offset

    @property
    def place(self) -> Place:
        """The partition."""
        return Place(self.first.topic, self.first.partition, self.first.topic_id)

    def read(self, batches: Iterable[DefaultRecordBatch]) -> None:
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

    def _own(self, batch: DefaultRecordBatch) -> None:
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

    def _own_native(self, batch: DefaultRecordBatch, known_epoch: int) -> None:
        if batch.is_control_batch:
            # A settler's repair commits under a later epoch still.
            if self._begun_at is not None and is_commit(batch) and batch.producer_epoch == self._begun_epoch + 1:
                self.found, self.found_epoch = self._begun_at, self._begun_epoch
            self._begun_at = None
        elif batch.producer_epoch > known_epoch and (
            self._begun_at is None or batch.producer_epoch > self._begun_epoch
        ):
            self._begun_at, self._begun_epoch = batch.base_offset, batch.producer_epoch


def is_commit(batch: DefaultRecordBatch) -> bool:
    """Whether a control batch is a commit marker."""
    record = next(iter(batch))
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

    A partition that no longer holds the state's records shows nothing, nor does one whose leader has forgotten the producer
    (``producer.id.expiration.ms``, a day by default). `Unavailable` may mean that there was too much to read.
    """
    scans = [scans_of(state) for state in states]
    pending = [scan for of_state in scans for scan in of_state]
    search = partial(_later_now, brokers, topics, deadline)
    for start in range(0, len(pending), AT_ONCE):
        until_answered(pending[start : start + AT_ONCE], search, deadline, "look for later transactions")
    return [joined(state, of_state) for state, of_state in zip(states, scans, strict=True)]


def _later_now(
    brokers: Brokers, topics: Topics, deadline: Deadline, scans: list[LaterScan]
) -> dict[LaterScan, bool | NotYet]:
    """Read some partitions in parallel, each up to the producer's newest record, or until an error: then continue there."""
    leaders, absent = _led(topics, scans, deadline, fresh=True)
    answers: dict[LaterScan, bool | NotYet] = {scan: why or True for scan, why in absent.items()}
    _ask_newest(brokers, leaders, deadline, answers)
    while reading := [scan for scan in leaders if scan not in answers]:
        if deadline.expired:
            raise NotYet("there is more to read")
        requests = [(leaders[scan].node, fetch(scan.place, leaders[scan], scan.position)) for scan in reading]
        for scan, response in zip(reading, brokers.exchange(requests, deadline), strict=True):
            answer = _read(scan, response)
            if answer is not None:
                answers[scan] = answer
    topics.forget(scan.first.topic for scan, answer in answers.items() if isinstance(answer, NotYet))
    return answers


def _ask_newest(
    brokers: Brokers, leaders: Mapping[LaterScan, Leader], deadline: Deadline, answers: dict[LaterScan, bool | NotYet]
) -> None:
    by_node: dict[int, list[LaterScan]] = {}
    for scan, leader in leaders.items():
        by_node.setdefault(leader.node, []).append(scan)
    requests = [(node, DescribeProducers({scan.place.key for scan in led})) for node, led in by_node.items()]
    for led, response in zip(by_node.values(), brokers.exchange(requests, deadline), strict=True):
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


def newest_records(
    answer: Mapping[Partition, tuple[int, Sequence[ProducerState]]],
) -> dict[Partition, dict[int, tuple[Sequenced, int]] | NotYet]:
    """By partition and producer id, the newest record and the time of the last write, from ``DescribeProducers``' answer."""
    return {
        key: verdict(code, f"the producers of {Place(*key)}", f"Read on the topic {key[0]!r}")
        or {one.producer_id: ((one.epoch, one.last_sequence), one.last_timestamp) for one in producers}
        for key, (code, producers) in answer.items()
    }


def _read(scan: LaterScan, response: Message | NotYet) -> bool | NotYet | None:
    """True once the partition is read to its end; None if there is more."""
    partition = fetched(scan.place, response)
    if partition is None:
        return True
    if isinstance(partition, NotYet):
        return partition
    scan.read(batches_of(partition))
    return True if scan.done or scan.position >= partition.high_watermark else None


# The sequence numbers of a producer's open transaction, from the logs of its partitions and from their leaders.

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

    None for a partition that does not hold that record. Uses the leaders already known.
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
            for request in (DescribeProducers([key]), fetch(Place(*key), leader, firsts[key], max_bytes=_ONE_BATCH))
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
    key: Partition,
    ids: tuple[int, int],
    first: int,
    producers: Mapping[Partition, tuple[int, Sequence[ProducerState]]] | NotYet,
    batches: Message | NotYet,
) -> Span | NotYet | None:
    partition = fetched(Place(*key), batches)
    if partition is None or isinstance(partition, NotYet):
        return partition
    if isinstance(producers, NotYet):
        return producers
    newest = newest_records(producers).get(key, _LEFT_OUT)
    if isinstance(newest, NotYet):
        return newest
    batch = next((one for one in batches_of(partition) if one.next_offset > first), None)
    if batch is None:
        return NotYet(f"{Place(*key)} is not replicated up to offset {first} yet")
    if (batch.producer_id, batch.producer_epoch) != ids or batch.base_offset != first or batch.is_control_batch:
        return None
    (epoch, last), _ = newest.get(ids[0], ((-1, -1), -1))
    return (batch.base_sequence, last) if epoch == ids[1] else None


# One raw fetch from a partition's leader. Consumers never see control records, so the library reads the log itself.

CHUNK_BYTES: Final = 1_048_576
AT_ONCE: Final = 16  # partitions: limits the memory


def fetch(
    place: Place, leader: Leader, offset: int, *, max_bytes: int = CHUNK_BYTES, read_committed: bool = False
) -> Message:
    """Build the request for the batches from an offset on.

    The broker sends at least one whole batch, however large: the one that holds the offset. ``read_committed`` stops at the
    last stable offset and lists the aborted transactions.
    """
    from dualwrite.kafka import kafka_python  # noqa: PLC0415 - loads kafka-python, which few writers need

    return kafka_python.fetch(place.key, leader.epoch, offset, max_bytes=max_bytes, read_committed=read_committed)


def fetched(place: Place, response: Message | NotYet) -> Message | NotYet | None:
    """The partition's part of the answer to :func:`fetch`; None where its log has no such offset."""
    if isinstance(response, NotYet):
        return response
    [partition] = response.responses[0].partitions
    if partition.error_code == Code.OFFSET_OUT_OF_RANGE:
        return None
    return verdict(partition.error_code, str(place), f"Read on the topic {place.topic!r}") or partition


def batches_of(partition: Message) -> Iterable[DefaultRecordBatch]:
    """The batches of what :func:`fetched` returns."""
    from dualwrite.kafka import kafka_python  # noqa: PLC0415 - as above

    return kafka_python.batches(partition.records)
