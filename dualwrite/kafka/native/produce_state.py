"""The messages of one native transaction on their way to the partitions: which request comes next, and what answers change.

No sockets, threads or clock: the owner brings the time, sends what :meth:`ProduceCore.requests` returns, and gives the answers
back. Every request ends in exactly one of :meth:`~ProduceCore.answered` and :meth:`~ProduceCore.unanswered`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dualwrite.kafka.native.error_meanings import Code, Meaning, Request, meaning_of
from dualwrite.kafka.native.produce_state__kafka_producer_native_wire_partition import (
    MAX_IN_FLIGHT,
    Batch,
    PartitionQueue,
)
from dualwrite.kafka.native.records import Header, RecordsBuilder
from dualwrite.kafka.native.records__kafka_producer_native_records_body import RecordsBody

Partition = tuple[str, int]
_WAITS_FOR_A_TOPIC: Final = frozenset(
    {Code.UNKNOWN_TOPIC_OR_PARTITION, Code.UNKNOWN_TOPIC_ID, Code.INCONSISTENT_TOPIC_ID}
)


@dataclass(frozen=True)
class Limits:
    """The limits of sending, in seconds and bytes.

    Attributes:
        linger_s: How long a batch collects records before it is sent; longer while another one of its partition is in flight.
        delivery_s: How long a batch may take to be acknowledged (``message.timeout.ms``).
        topic_s: How long a topic or partition may be unknown to its leader (``topic.metadata.propagation.max.ms``).
        first_backoff_s: The pause before the first repetition; it doubles with each further one.
        longest_backoff_s: The longest pause.
        request_bytes: The batches of one request, together; a larger batch is sent alone.
        in_flight: The batches of one partition that may wait for their acknowledgement, 1 to 5.
        replicas_s: How long a broker may wait for its replicas before it answers (``request.timeout.ms``).
    """

    linger_s: float = 0.005
    delivery_s: float = 300.0
    topic_s: float = 5.0
    first_backoff_s: float = 0.002
    longest_backoff_s: float = 1.0
    request_bytes: int = 1_000_000
    in_flight: int = MAX_IN_FLIGHT
    replicas_s: float = 30.0


@dataclass(frozen=True, eq=False)
class ToSend:
    """One Produce request.

    Attributes:
        node: The broker.
        batches: By topic and partition, the batch.
    """

    node: int
    batches: Mapping[Partition, Batch]


@dataclass(frozen=True)
class Refusal:
    """Why a transaction failed.

    Attributes:
        meaning: ``ABORT`` or ``END``.
        code: The broker's error code; None if a batch was not acknowledged in time.
        partition: Where.
    """

    meaning: Meaning
    code: int | None
    partition: Partition


@dataclass(frozen=True)
class Delivered:
    """A batch that was acknowledged.

    Attributes:
        partition: Where.
        batch: The batch.
        base_offset: Its first record's offset; below 0 if the broker did not say.
    """

    partition: Partition
    batch: Batch
    base_offset: int


class ProduceCore:
    """Sends the messages of one transaction. One for each transaction.

    Args:
        limits: The limits.
        make_builder: Makes the builders of batches.

    Attributes:
        refusal: The first reason for which the transaction must be aborted; nothing is sent any more then.
        queued_bytes: The bytes of keys and values that are not acknowledged.
        queued_messages: The number of messages that are not acknowledged.
        outdated: Topics of which a partition with messages has no known leader: look them up.
    """

    def __init__(self, limits: Limits, make_builder: Callable[[], RecordsBuilder]) -> None:
        self._limits = limits
        self._make_builder = make_builder
        self._queues: dict[Partition, PartitionQueue] = {}
        self._busy: dict[Partition, PartitionQueue] = {}
        self._leaders: dict[Partition, int] = {}
        self.refusal: Refusal | None = None
        self.queued_bytes = 0
        self.queued_messages = 0
        self.in_flight = 0
        self.outdated: set[str] = set()

    @property
    def limits(self) -> Limits:
        """The limits of sending."""
        return self._limits

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
        return {key: queue.first_offset for key, queue in self._queues.items() if queue.sent}

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
        self.queued_bytes += self._queue(partition).append(
            value, key, headers, timestamp_ms, now=now, callback=callback
        )
        self.queued_messages += 1

    def add(self, partition: Partition, body: RecordsBody, now: float) -> None:
        """Take a whole batch."""
        self._queue(partition).add(body, now)
        self.queued_bytes += body.raw_size
        self.queued_messages += body.count

    def _queue(self, partition: Partition) -> PartitionQueue:
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = PartitionQueue(self._make_builder, self._limits.in_flight)
            if partition not in self._leaders:
                self._forget_leader(partition)
        self._busy[partition] = queue
        return queue

    def _forget_leader(self, partition: Partition) -> None:
        self._leaders.pop(partition, None)
        self.outdated.add(partition[0])

    def learn(self, topic: str, leaders: Mapping[int, int | None]) -> None:
        """Take the leaders of a topic's partitions: broker ids, or None where there is none at the moment."""
        self.outdated.discard(topic)
        for number, node in leaders.items():
            if node is None:
                self._leaders.pop((topic, number), None)
            else:
                self._leaders[topic, number] = node
        if any(key[0] == topic and key not in self._leaders for key in self._busy):
            self.outdated.add(topic)

    def requests(self, now: float, *, flush: bool = False) -> Iterator[ToSend]:
        """The requests to send now. Each counts as sent when it is returned.

        Args:
            now: The time, in seconds on the owner's clock.
            flush: Whether to send what still collects, too.
        """
        due_since = now - self._limits.linger_s
        while self.refusal is None:
            by_node: dict[int, dict[Partition, Batch]] = {}
            for key, queue in self._busy.items():
                node = self._leaders.get(key)
                if node is not None and (batch := queue.next_to_send(now, due_since, flush=flush)) is not None:
                    by_node.setdefault(node, {})[key] = batch
            if not by_node:
                return
            for node, batches in by_node.items():
                yield from self._divided(node, batches)

    def _divided(self, node: int, batches: Mapping[Partition, Batch]) -> Iterator[ToSend]:
        part: dict[Partition, Batch] = {}
        size = 0
        for key, batch in batches.items():
            if part and size + batch.body.size > self._limits.request_bytes:
                yield self._sent(node, part)
                part, size = {}, 0
            part[key] = batch
            size += batch.body.size
        yield self._sent(node, part)

    def _sent(self, node: int, batches: Mapping[Partition, Batch]) -> ToSend:
        for key, batch in batches.items():
            self._queues[key].note_sent(batch)
        self.in_flight += 1
        return ToSend(node, batches)

    def answered(self, sent: ToSend, answers: Mapping[Partition, tuple[int, int]], now: float) -> Iterable[Delivered]:
        """Take the answer to a request.

        Args:
            sent: The request.
            answers: By partition, the error code and the base offset. A partition that the broker left out is asked again.
            now: The time.

        Returns:
            What was acknowledged.
        """
        self.in_flight -= 1
        delivered = []
        for key, batch in sent.batches.items():
            answer = answers.get(key)
            if answer is None:
                self._queues[key].note_unanswered(batch, now + self._backoff_s(batch))
                continue
            code, base_offset = answer
            queue = self._queues[key]
            again_at = now + self._backoff_s(batch)
            meaning = queue.note_answer(batch, code, meaning_of(Request.PRODUCE, code), base_offset, again_at)
            if meaning is Meaning.DONE:
                self.queued_bytes -= batch.queued_bytes
                self.queued_messages -= batch.body.count
                delivered.append(Delivered(key, batch, base_offset))
                if queue.is_empty:
                    del self._busy[key]
            elif meaning is Meaning.MOVED:
                self._forget_leader(key)
                if code in _WAITS_FOR_A_TOPIC and now > batch.closed_at + self._limits.topic_s:
                    self._refuse(Meaning.ABORT, code, key)
            elif meaning is not Meaning.AGAIN:
                self._refuse(meaning, code, key)
        return delivered

    def unanswered(self, sent: ToSend, now: float) -> None:
        """No answer comes to a request: the connection broke, or the broker took too long."""
        self.in_flight -= 1
        for key, batch in sent.batches.items():
            self._queues[key].note_unanswered(batch, now + self._backoff_s(batch))
            self._forget_leader(key)

    def note_missing(self, topic: str, now: float) -> None:
        """No broker knows the topic: refuse the transaction if that lasts for longer than ``topic_s``."""
        for key, queue in self._busy.items():
            oldest = queue.oldest
            if key[0] == topic and oldest is not None and now > oldest.closed_at + self._limits.topic_s:
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
        for key, queue in self._busy.items():
            oldest = queue.oldest
            if oldest is not None and now > oldest.closed_at + self._limits.delivery_s:
                self._refuse(Meaning.ABORT, oldest.last_code or None, key)
                return

    def next_at(self) -> float | None:
        """When there is something to do that neither an answer nor a look-up brings, if there is anything."""
        times = []
        for key, queue in self._busy.items():
            oldest = queue.oldest
            if oldest is not None:
                times.append(oldest.closed_at + self._limits.delivery_s)
            if key in self._leaders and (ready_at := queue.ready_at()) is not None:
                times.append(ready_at)
        return min(times, default=None)

    def _backoff_s(self, batch: Batch) -> float:
        return min(self._limits.first_backoff_s * 2.0 ** (batch.attempts - 1), self._limits.longest_backoff_s)

    def _refuse(self, meaning: Meaning, code: int | None, partition: Partition) -> None:
        # An end outweighs an abort: after it there must be no next transaction.
        if self.refusal is None or (meaning is Meaning.END and self.refusal.meaning is Meaning.ABORT):
            self.refusal = Refusal(meaning, code, partition)
