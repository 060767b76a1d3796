"""The rules of the native engine's requests, without I/O: batches, sequence numbers, and what each answer means.

Source: the broker's ``Errors`` and, by request, ``TransactionCoordinator``, ``ProducerStateManager``, ``ReplicaManager``
and ``GroupCoordinator`` of Kafka 4; KIP-360, KIP-890.

A code that a table does not have ends the incarnation: what this library does not know is no ground to write on.

For each partition: what is queued, in flight, acknowledged or failed. Over them, the transaction: what to send next,
and what an answer changes. The sender carries it out.

No sockets, threads or clock: the owner brings the time, sends what :meth:`ProduceCore.requests` returns, and gives the answers
back. Every request ends in exactly one of :meth:`~ProduceCore.answered` and :meth:`~ProduceCore.unanswered`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from dualwrite.kafka.error_codes import Code, code_name
from dualwrite.kafka.native.records import Header, RecordsBody, RecordsBuilder

__all__ = ["MEANINGS", "Code", "Meaning", "Request", "code_name", "meaning_of"]


class Meaning(Enum):
    """The meaning of an answer for the producer."""

    DONE = "done"
    AGAIN = "ask the same broker again"
    MOVED = "ask again, perhaps another broker: look up the leader or the coordinator first"
    NOT_OPEN = "this transaction is not open any more: only a look shows how it ended"
    ABORT = "the transaction must be aborted; the producer may continue"
    END = "the incarnation must end"


class Request(Enum):
    """The requests of a transaction."""

    INIT_PRODUCER_ID = "InitProducerId"
    PRODUCE = "Produce"
    TXN_OFFSET_COMMIT = "TxnOffsetCommit"
    END_TXN = "EndTxn"


_AT_THE_COORDINATOR: Final = {
    Code.NONE: Meaning.DONE,
    Code.CONCURRENT_TRANSACTIONS: Meaning.AGAIN,
    Code.COORDINATOR_LOAD_IN_PROGRESS: Meaning.AGAIN,
    Code.COORDINATOR_NOT_AVAILABLE: Meaning.MOVED,
    Code.NOT_COORDINATOR: Meaning.MOVED,
    Code.NETWORK_EXCEPTION: Meaning.MOVED,
    Code.REQUEST_TIMED_OUT: Meaning.MOVED,
    Code.THROTTLING_QUOTA_EXCEEDED: Meaning.AGAIN,
    Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Meaning.END,
    Code.CLUSTER_AUTHORIZATION_FAILED: Meaning.END,
    Code.TRANSACTION_COORDINATOR_FENCED: Meaning.END,
    Code.UNSUPPORTED_VERSION: Meaning.END,
    Code.INVALID_REQUEST: Meaning.END,
    Code.UNKNOWN_SERVER_ERROR: Meaning.END,
}

_INIT_PRODUCER_ID: Final = _AT_THE_COORDINATOR | {
    Code.INVALID_TRANSACTION_TIMEOUT: Meaning.END,
    Code.INVALID_PRODUCER_EPOCH: Meaning.END,
    Code.PRODUCER_FENCED: Meaning.END,
    Code.INVALID_TXN_STATE: Meaning.END,
}

_IN_A_TRANSACTION: Final = {
    Code.NONE: Meaning.DONE,
    Code.CONCURRENT_TRANSACTIONS: Meaning.AGAIN,
    Code.COORDINATOR_LOAD_IN_PROGRESS: Meaning.AGAIN,
    Code.NETWORK_EXCEPTION: Meaning.AGAIN,
    Code.REQUEST_TIMED_OUT: Meaning.AGAIN,
    Code.THROTTLING_QUOTA_EXCEEDED: Meaning.AGAIN,
    Code.UNSUPPORTED_FOR_MESSAGE_FORMAT: Meaning.ABORT,
    Code.TOPIC_AUTHORIZATION_FAILED: Meaning.ABORT,
    Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Meaning.ABORT,
    # The epoch is not ours any more, or the transaction of this epoch has ended: by its timeout, an operator, a settler.
    Code.INVALID_TXN_STATE: Meaning.END,
    # A leader asks about several producers at once, and says one for the other where they are of different versions.
    Code.TRANSACTION_ABORTABLE: Meaning.END,
    Code.INVALID_PRODUCER_EPOCH: Meaning.END,
    Code.PRODUCER_FENCED: Meaning.END,
    Code.INVALID_PRODUCER_ID_MAPPING: Meaning.END,
    Code.UNKNOWN_PRODUCER_ID: Meaning.END,
    Code.UNSUPPORTED_VERSION: Meaning.END,
    Code.INVALID_REQUEST: Meaning.END,
    Code.UNKNOWN_SERVER_ERROR: Meaning.END,
}
"""What the answers to messages and to consumed offsets have in common."""

_PRODUCE: Final = _IN_A_TRANSACTION | {
    # The broker remembers the last five batches of a producer. It already has this one, which was older.
    Code.DUPLICATE_SEQUENCE_NUMBER: Meaning.DONE,
    # Verifying the transaction, the leader asks the coordinator: its answers come through.
    Code.COORDINATOR_NOT_AVAILABLE: Meaning.AGAIN,
    Code.NOT_COORDINATOR: Meaning.AGAIN,
    Code.CORRUPT_MESSAGE: Meaning.AGAIN,
    Code.NOT_ENOUGH_REPLICAS: Meaning.AGAIN,
    Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND: Meaning.AGAIN,
    Code.LEADER_NOT_AVAILABLE: Meaning.MOVED,
    Code.NOT_LEADER_OR_FOLLOWER: Meaning.MOVED,
    Code.REPLICA_NOT_AVAILABLE: Meaning.MOVED,
    Code.FENCED_LEADER_EPOCH: Meaning.MOVED,
    Code.UNKNOWN_LEADER_EPOCH: Meaning.MOVED,
    Code.KAFKA_STORAGE_ERROR: Meaning.MOVED,
    Code.UNKNOWN_TOPIC_OR_PARTITION: Meaning.MOVED,
    Code.UNKNOWN_TOPIC_ID: Meaning.MOVED,
    Code.INCONSISTENT_TOPIC_ID: Meaning.MOVED,
    Code.MESSAGE_TOO_LARGE: Meaning.ABORT,
    Code.RECORD_LIST_TOO_LARGE: Meaning.ABORT,
    Code.INVALID_TOPIC_EXCEPTION: Meaning.ABORT,
    Code.INVALID_TIMESTAMP: Meaning.ABORT,
    Code.INVALID_RECORD: Meaning.ABORT,
    Code.UNSUPPORTED_COMPRESSION_TYPE: Meaning.ABORT,
    Code.POLICY_VIOLATION: Meaning.ABORT,
    # Behind a batch that failed the answer comes by itself; see `PartitionQueue`. At the head it is a gap that nobody explains.
    Code.OUT_OF_ORDER_SEQUENCE_NUMBER: Meaning.ABORT,
    Code.CLUSTER_AUTHORIZATION_FAILED: Meaning.END,
    Code.INVALID_REQUIRED_ACKS: Meaning.END,
}

_TXN_OFFSET_COMMIT: Final = _IN_A_TRANSACTION | {
    Code.UNKNOWN_TOPIC_OR_PARTITION: Meaning.AGAIN,
    Code.COORDINATOR_NOT_AVAILABLE: Meaning.MOVED,
    Code.NOT_COORDINATOR: Meaning.MOVED,
    Code.ILLEGAL_GENERATION: Meaning.ABORT,
    Code.UNKNOWN_MEMBER_ID: Meaning.ABORT,
    Code.STALE_MEMBER_EPOCH: Meaning.ABORT,
    Code.FENCED_MEMBER_EPOCH: Meaning.ABORT,
    Code.GROUP_ID_NOT_FOUND: Meaning.ABORT,
    # What was consumed is of a topic that was deleted, or made again: its offsets mean nothing in the new one.
    Code.UNKNOWN_TOPIC_ID: Meaning.ABORT,
    Code.REBALANCE_IN_PROGRESS: Meaning.ABORT,
    Code.FENCED_INSTANCE_ID: Meaning.ABORT,
    Code.INVALID_GROUP_ID: Meaning.ABORT,
    Code.INVALID_COMMIT_OFFSET_SIZE: Meaning.ABORT,
    Code.OFFSET_METADATA_TOO_LARGE: Meaning.ABORT,
    Code.GROUP_AUTHORIZATION_FAILED: Meaning.ABORT,
}

_END_TXN: Final = _AT_THE_COORDINATOR | {
    # An answer whose request was lost on the way back is given again: success, with the same next epoch.
    Code.INVALID_TXN_STATE: Meaning.NOT_OPEN,
    Code.PRODUCER_FENCED: Meaning.NOT_OPEN,
    Code.INVALID_PRODUCER_EPOCH: Meaning.NOT_OPEN,
    Code.INVALID_PRODUCER_ID_MAPPING: Meaning.NOT_OPEN,
    Code.TRANSACTION_ABORTABLE: Meaning.ABORT,
}

MEANINGS: Final[Mapping[Request, Mapping[Code, Meaning]]] = MappingProxyType(
    {
        Request.INIT_PRODUCER_ID: MappingProxyType(_INIT_PRODUCER_ID),
        Request.PRODUCE: MappingProxyType(_PRODUCE),
        Request.TXN_OFFSET_COMMIT: MappingProxyType(_TXN_OFFSET_COMMIT),
        Request.END_TXN: MappingProxyType(_END_TXN),
    }
)


def meaning_of(request: Request, code: int) -> Meaning:
    """The meaning of an answer; ``END`` for a code that the table does not have."""
    if not code:
        return Meaning.DONE
    try:
        return MEANINGS[request].get(Code(code), Meaning.END)
    except ValueError:
        return Meaning.END


# One partition's share of a transaction: records collected, batches numbered, sent, repeated and acknowledged.
#
# A batch gets its sequence number when it is closed and keeps it, so that the broker recognises every repetition. Three
# rules keep the order:
#
# - Batches are sent in their order. After a failed one, those behind it are sent again behind it.
# - The first batch of a transaction goes alone: a partition that does not know the producer would take a later one first.
# - At most five are in flight: the broker remembers no more than that to recognise repetitions by.
#
# Source: KIP-98, `ProducerStateManager`, `ProducerAppendInfo.checkSequence`.

MAX_IN_FLIGHT: Final = 5
_SEQUENCES: Final = 2**31


@dataclass(eq=False, slots=True)
class Batch:
    """A closed batch, until it is acknowledged."""

    body: RecordsBody
    sequence: int
    closed_at: float
    queued_bytes: int = 0  # of keys and values
    callbacks: Sequence[tuple[int, object]] = ()  # by index in the batch
    ready_at: float = 0.0  # when it may be sent, again or for the first time
    attempts: int = 0  # how often it was sent
    answers: int = 0  # how many of these requests were answered, in whatever way
    in_flight: bool = False
    sent_behind: bool = False  # a batch before it was unacknowledged when it was sent last
    last_code: int | None = None


@dataclass(eq=False, slots=True)
class _Open:
    builder: RecordsBuilder
    since: float
    queued_bytes: int = 0
    callbacks: list[tuple[int, object]] = field(default_factory=list)


class PartitionQueue:
    """The queue of one partition, for one transaction."""

    def __init__(self, make_builder: Callable[[], RecordsBuilder], in_flight: int = MAX_IN_FLIGHT) -> None:
        self._make_builder = make_builder
        self._in_flight = in_flight
        self._batches: deque[Batch] = deque()
        self._open: _Open | None = None
        self._next_sequence = 0
        self._knows_us = False
        self.first_offset: int | None = None  # of the transaction's first record here
        self.sent = False  # whether a batch ever was: the partition may be part of the transaction
        self.unsent = 0  # the batches that are not in flight, the one that collects included

    @property
    def is_empty(self) -> bool:
        """Whether every record was acknowledged."""
        return not self._batches and self._open is None

    @property
    def may_come_late(self) -> bool:
        """Whether a request with a batch was not answered: a copy of the batch may still be on its way."""
        return any(batch.attempts > batch.answers for batch in self._batches)

    @property
    def may_have_written(self) -> bool:
        """Whether a batch was acknowledged, or one waits for its answer."""
        return self._knows_us or any(batch.in_flight for batch in self._batches)

    @property
    def collects(self) -> bool:
        """Whether a batch is open for further records."""
        return self._open is not None

    def callbacks(self) -> Iterator[object]:
        """The callbacks of the messages that are not acknowledged, in the messages' order."""
        opened = () if self._open is None else self._open.callbacks
        for callbacks in (*(batch.callbacks for batch in self._batches), opened):
            for _, callback in callbacks:
                yield callback

    @property
    def oldest(self) -> Batch | None:
        """The first batch that is not acknowledged; None if no batch is closed."""
        return self._batches[0] if self._batches else None

    def append(
        self,
        value: bytes | None,
        key: bytes | None,
        headers: Sequence[Header],
        timestamp_ms: int,
        *,
        now: float,
        callback: object = None,
    ) -> int:
        """Collect one record; returns the bytes of its key and value."""
        opened = self._open
        if opened is None:
            opened = self._open = _Open(self._make_builder(), now)
            self.unsent += 1
        if not opened.builder.append(value, key, headers, timestamp_ms):
            self.close_open(now)
            opened = self._open = _Open(self._make_builder(), now)
            self.unsent += 1
            opened.builder.append(value, key, headers, timestamp_ms)
        size = (0 if value is None else len(value)) + (0 if key is None else len(key))
        opened.queued_bytes += size
        if callback is not None:
            opened.callbacks.append((opened.builder.count - 1, callback))
        return size

    def add(self, body: RecordsBody, now: float) -> None:
        """Queue a whole batch behind what was collected before."""
        self.close_open(now)
        self._close(body, now, body.raw_size, ())
        self.unsent += 1

    def close_open(self, now: float) -> None:
        """Close the batch that collects records, if there is one."""
        opened, self._open = self._open, None
        if opened is not None:
            self._close(opened.builder.build(), now, opened.queued_bytes, opened.callbacks)

    def _close(self, body: RecordsBody, now: float, queued_bytes: int, callbacks: Sequence[tuple[int, object]]) -> None:
        self._batches.append(Batch(body, self._next_sequence, now, queued_bytes, callbacks))
        self._next_sequence = (self._next_sequence + body.count) % _SEQUENCES

    def next_to_send(self, now: float, due_since: float, *, flush: bool) -> Batch | None:
        """The batch to send now; None if none may be sent. ``flush`` sends what still collects, too.

        A batch that was opened at ``due_since`` or before has collected for long enough, if nothing is in flight: without a
        linger, a loop over a few messages would otherwise send a request for each of the first ones.
        """
        if self.unsent > (self._open is not None):
            batch = self._unsent()
            if batch is not None:
                return batch if batch.ready_at <= now else None
        if self._open is None or (self._batches and not self._takes(len(self._batches))):
            return None
        if not flush and (self._batches or self._open.since > due_since):
            return None
        self.close_open(now)
        return self._batches[-1]

    def _unsent(self) -> Batch | None:
        """The first batch that is not in flight, if those before it let it go."""
        for index, batch in enumerate(self._batches):
            if not self._takes(index):
                return None
            if not batch.in_flight:
                return batch
        return None

    def _takes(self, before: int) -> bool:
        """Whether a batch may be sent behind that many unacknowledged ones."""
        return before < (self._in_flight if self._knows_us else 1)

    def ready_at(self) -> float | None:
        """When the next batch may be sent again; None if that depends on answers alone."""
        batch = self._unsent()
        return None if batch is None else batch.ready_at

    def note_sent(self, batch: Batch) -> None:
        """The batch was given to a connection."""
        batch.in_flight = self.sent = True
        self.unsent -= 1
        batch.attempts += 1
        batch.sent_behind = batch is not self._batches[0]

    def note_unanswered(self, batch: Batch, ready_at: float) -> None:
        """No answer comes any more: it may be in the log or not. It is sent again, under the same numbers."""
        batch.in_flight = False
        batch.ready_at = ready_at
        self.unsent += 1

    def note_answer(self, batch: Batch, code: int, meaning: Meaning, base_offset: int, ready_at: float) -> Meaning:
        """Take the answer about a batch; ``base_offset`` is below 0 if the broker did not say.

        Returns what the answer means here: a batch refused for a gap is sent again if one before it was unacknowledged.
        """
        batch.in_flight = False
        batch.last_code = code
        batch.answers += 1
        if code == Code.TOPIC_AUTHORIZATION_FAILED and batch.attempts == 1 and not self._knows_us:
            # Checked before the partition becomes part of the transaction: no marker comes here, and none is needed.
            self.sent = False
        if code == Code.OUT_OF_ORDER_SEQUENCE_NUMBER and batch.sent_behind:
            meaning, ready_at = Meaning.AGAIN, 0.0
        if meaning is Meaning.DONE:
            if batch.sequence == 0 and base_offset >= 0:
                self.first_offset = base_offset
            self._knows_us = True
            self._batches.remove(batch)
            return meaning
        self.unsent += 1
        if meaning is Meaning.AGAIN or meaning is Meaning.MOVED:
            batch.ready_at = ready_at
        return meaning


Partition = tuple[str, int]
_WAITS_FOR_A_TOPIC: Final = frozenset(
    {Code.UNKNOWN_TOPIC_OR_PARTITION, Code.UNKNOWN_TOPIC_ID, Code.INCONSISTENT_TOPIC_ID}
)


@dataclass(frozen=True)
class Limits:
    """The limits of sending, in seconds and bytes."""

    linger_s: float = 0.005  # how long a batch collects; longer while another one of its partition is in flight
    delivery_s: float = 300.0  # message.timeout.ms: how long a batch may take to be acknowledged
    topic_s: float = 5.0  # topic.metadata.propagation.max.ms: how long a topic may be unknown to its leader
    first_backoff_s: float = 0.002  # doubles with each repetition
    longest_backoff_s: float = 1.0
    request_bytes: int = 1_000_000  # a larger batch is sent alone
    in_flight: int = MAX_IN_FLIGHT
    replicas_s: float = 30.0  # request.timeout.ms: how long a broker may wait for its replicas before it answers


@dataclass(eq=False, slots=True)
class ToSend:
    """One Produce request to a broker."""

    node: int
    batches: Mapping[Partition, Batch]


@dataclass(frozen=True)
class Refusal:
    """Why a transaction failed: ``ABORT`` or ``END``. Without a code, a batch was not acknowledged in time."""

    meaning: Meaning
    code: int | None
    partition: Partition


@dataclass(slots=True)
class Delivered:
    """A batch that was acknowledged; ``base_offset`` is below 0 if the broker did not say."""

    partition: Partition
    batch: Batch
    base_offset: int


class ProduceCore:
    """Sends the messages of one transaction. One for each transaction."""

    def __init__(self, limits: Limits, make_builder: Callable[[], RecordsBuilder]) -> None:
        self.limits = limits
        self._make_builder = make_builder
        self._queues: dict[Partition, PartitionQueue] = {}
        self._busy: dict[Partition, PartitionQueue] = {}
        self._leaders: dict[str, Mapping[int, int | None]] = {}
        self.to_send: dict[Partition, PartitionQueue] = {}  # with batches that are not in flight
        self.give_up_at = float("inf")  # before this time no batch has waited too long
        self.refusal: Refusal | None = None  # the first reason to abort; nothing is sent any more then
        self.queued_bytes = 0  # of keys and values that are not acknowledged
        self.queued_messages = 0
        self.in_flight = 0
        self.outdated: set[str] = set()  # a partition with messages has no known leader: look them up

    @property
    def is_flushed(self) -> bool:
        """Whether everything was acknowledged."""
        return not self._busy

    @property
    def sent_to(self) -> frozenset[Partition]:
        """The partitions that the transaction may have written to."""
        return frozenset(key for key, queue in self._queues.items() if queue.sent)

    @property
    def late(self) -> frozenset[Partition]:
        """Partitions with a batch of which a request was not answered: a copy may still be on its way."""
        return frozenset(key for key, queue in self._busy.items() if queue.may_come_late)

    @property
    def first_offsets(self) -> Mapping[Partition, int | None]:
        """By partition that was sent to, the offset of the transaction's first record; None where it is not known."""
        found: dict[Partition, int | None] = {}
        for key, queue in self._queues.items():  # a comprehension would be one more call
            if queue.sent:
                found[key] = queue.first_offset
        return found

    def callbacks(self) -> Iterator[tuple[Partition, object]]:
        """The callbacks of all messages that are not acknowledged, with their partitions."""
        for key, queue in self._busy.items():
            for callback in queue.callbacks():
                yield key, callback

    def collects_in(self, partition: Partition) -> bool:
        """Whether a batch is open there for further records."""
        queue = self._busy.get(partition)
        return queue is not None and queue.collects

    def append(
        self,
        partition: Partition,
        value: bytes | None,
        key: bytes | None,
        headers: Sequence[Header],
        timestamp_ms: int,
        *,
        now: float,
        callback: object = None,
    ) -> None:
        """Take one message."""
        queue = self.to_send.get(partition) or self._queue(partition, now)
        self.queued_bytes += queue.append(value, key, headers, timestamp_ms, now=now, callback=callback)
        self.queued_messages += 1

    def add(self, partition: Partition, body: RecordsBody, now: float) -> None:
        """Take a whole batch."""
        self._queue(partition, now).add(body, now)
        self.queued_bytes += body.raw_size
        self.queued_messages += body.count

    def _queue(self, partition: Partition, now: float) -> PartitionQueue:
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = PartitionQueue(self._make_builder, self.limits.in_flight)
            leaders = self._leaders.get(partition[0])
            if leaders is None or leaders.get(partition[1]) is None:
                self.outdated.add(partition[0])
        if not self._busy:
            self.give_up_at = now + self.limits.delivery_s
        self._busy[partition] = self.to_send[partition] = queue
        return queue

    def _leader(self, partition: Partition) -> int | None:
        topic, number = partition
        return self._leaders[topic].get(number) if topic in self._leaders else None

    def _forget_leader(self, partition: Partition) -> None:
        topic, number = partition
        if (
            self._leader(partition) is not None
        ):  # changed in a copy: transactions share what the topic's look-up has shown
            self._leaders[topic] = {**self._leaders[topic], number: None}
        self.outdated.add(topic)

    def learn(self, topic: str, leaders: Mapping[int, int | None]) -> None:
        """Take the leaders of a topic's partitions: broker ids, or None where there is none at the moment."""
        self.outdated.discard(topic)
        known = self._leaders.get(topic)
        self._leaders[topic] = leaders if known is None else {**known, **leaders}
        for name, number in self._busy:
            if name == topic and self._leaders[topic].get(number) is None:
                self.outdated.add(topic)

    def requests(self, now: float, *, flush: bool = False) -> Sequence[ToSend]:
        """The requests to send now. Each counts as sent when it is returned. ``flush`` sends what still collects, too."""
        due_since = now - self.limits.linger_s
        made: list[ToSend] = []
        while self.to_send and self.refusal is None:
            by_node: dict[int, dict[Partition, Batch]] = {}
            for key, queue in self.to_send.items():
                node = self._leaders[key[0]].get(key[1]) if key[0] in self._leaders else None
                if node is not None and (batch := queue.next_to_send(now, due_since, flush=flush)) is not None:
                    queue.note_sent(batch)
                    by_node.setdefault(node, {})[key] = batch
            if not by_node:
                break
            for node, batches in by_node.items():
                for key in batches:
                    if not self.to_send[key].unsent:
                        del self.to_send[key]
                if len(batches) == 1:
                    made.append(ToSend(node, batches))
                else:
                    made += self._divided(node, batches)
        self.in_flight += len(made)
        return made

    def _divided(self, node: int, batches: Mapping[Partition, Batch]) -> Iterator[ToSend]:
        part: dict[Partition, Batch] = {}
        size = 0
        for key, batch in batches.items():
            if part and size + batch.body.size > self.limits.request_bytes:
                yield ToSend(node, part)
                part, size = {}, 0
            part[key] = batch
            size += batch.body.size
        yield ToSend(node, part)

    def answered(self, sent: ToSend, answers: Mapping[Partition, tuple[int, int]], now: float) -> Iterable[Delivered]:
        """Take the answer to a request; returns what was acknowledged.

        By partition, the error code and the base offset. A partition that the broker left out is asked again.
        """
        self.in_flight -= 1
        delivered = []
        for key, batch in sent.batches.items():
            queue = self._queues[key]
            answer = answers.get(key)
            if answer is None:
                queue.note_unanswered(batch, now + self._backoff_s(batch))
                self.to_send[key] = queue
                continue
            code, base_offset = answer
            meaning = meaning_of(Request.PRODUCE, code) if code else Meaning.DONE
            again_at = now + self._backoff_s(batch) if code else now
            meaning = queue.note_answer(batch, code, meaning, base_offset, again_at)
            if meaning is not Meaning.DONE:
                self.to_send[key] = queue
            if meaning is Meaning.DONE:
                self.queued_bytes -= batch.queued_bytes
                self.queued_messages -= batch.body.count
                delivered.append(Delivered(key, batch, base_offset))
                if queue.is_empty:
                    del self._busy[key]
            elif meaning is Meaning.MOVED:
                self._forget_leader(key)
                if code in _WAITS_FOR_A_TOPIC and now > batch.closed_at + self.limits.topic_s:
                    self._refuse(Meaning.ABORT, code, key)
            elif meaning is not Meaning.AGAIN:
                self._refuse(meaning, code, key)
        return delivered

    def unanswered(self, sent: ToSend, now: float) -> None:
        """No answer comes to a request: the connection broke, or the broker took too long."""
        self.in_flight -= 1
        for key, batch in sent.batches.items():
            queue = self.to_send[key] = self._queues[key]
            queue.note_unanswered(batch, now + self._backoff_s(batch))
            self._forget_leader(key)

    def note_missing(self, topic: str, now: float) -> None:
        """No broker knows the topic: refuse the transaction if that lasts for longer than ``topic_s``."""
        for key, queue in self._busy.items():
            oldest = queue.oldest
            if key[0] == topic and oldest is not None and now > oldest.closed_at + self.limits.topic_s:
                self._refuse(Meaning.ABORT, Code.UNKNOWN_TOPIC_OR_PARTITION, key)

    def may_have_written(self, topic: str) -> bool:
        """Whether a message of the transaction may stand in the topic by an answer, or by one that may still come."""
        return any(key[0] == topic and queue.may_have_written for key, queue in self._queues.items())

    def note_recreated(self, topic: str) -> None:
        """The topic was deleted and made again since the transaction's first message to it: refuse the transaction."""
        for key in self._queues:
            if key[0] == topic:
                self._refuse(Meaning.ABORT, Code.UNKNOWN_TOPIC_ID, key)
                return

    def give_up(self, now: float) -> None:
        """Refuse the transaction if a batch has waited for its acknowledgement longer than ``delivery_s``."""
        oldest_at = now
        for key, queue in self._busy.items():
            oldest = queue.oldest
            if oldest is None:
                continue
            if now > oldest.closed_at + self.limits.delivery_s:
                self._refuse(Meaning.ABORT, oldest.last_code or None, key)
                return
            oldest_at = min(oldest_at, oldest.closed_at)
        self.give_up_at = oldest_at + self.limits.delivery_s

    def next_at(self) -> float | None:
        """When there is something to do that neither an answer nor a look-up brings, if there is anything."""
        times = []
        for key, queue in self._busy.items():
            oldest = queue.oldest
            if oldest is not None:
                times.append(oldest.closed_at + self.limits.delivery_s)
            if self._leader(key) is not None and (ready_at := queue.ready_at()) is not None:
                times.append(ready_at)
        return min(times, default=None)

    def _backoff_s(self, batch: Batch) -> float:
        doublings = min(batch.attempts - 1, 30)  # a thousand would be more than a number holds
        return min(self.limits.first_backoff_s * 2.0**doublings, self.limits.longest_backoff_s)

    def _refuse(self, meaning: Meaning, code: int | None, partition: Partition) -> None:
        # An end outweighs an abort: after it there must be no next transaction.
        if self.refusal is None or (meaning is Meaning.END and self.refusal.meaning is Meaning.ABORT):
            self.refusal = Refusal(meaning, code, partition)
