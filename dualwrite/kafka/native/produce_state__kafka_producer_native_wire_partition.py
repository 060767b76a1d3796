"""One partition's share of a transaction: records collected, batches numbered, sent, repeated and acknowledged.

A batch gets its sequence number when it is closed and keeps it, so that the broker recognises every repetition. Three rules
keep the order:

- Batches are sent in their order. After a failed one, those behind it are sent again behind it.
- The first batch of a transaction goes alone: a partition that does not know the producer would take a later one first.
- At most five are in flight: the broker remembers no more than that to recognise repetitions by.

Source: KIP-98, ``ProducerStateManager``, ``ProducerAppendInfo.checkSequence``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from dualwrite.kafka.native.error_meanings import Code, Meaning
from dualwrite.kafka.native.records import Header, RecordsBuilder
from dualwrite.kafka.native.records__kafka_producer_native_records_body import RecordsBody

MAX_IN_FLIGHT: Final = 5
_SEQUENCES: Final = 2**31


@dataclass(eq=False, slots=True)
class Batch:
    """A closed batch, until it is acknowledged.

    Attributes:
        body: Its records.
        sequence: The first record's sequence number.
        closed_at: When it was closed (seconds, on the caller's clock).
        queued_bytes: The bytes of its messages' keys and values.
        callbacks: By index in the batch, what to call with the offset.
        ready_at: When it may be sent, again or for the first time.
        attempts: How often it was sent.
        answers: How many of these requests were answered, in whatever way.
        in_flight: Whether it waits for an answer.
        sent_behind: Whether a batch before it was unacknowledged when it was sent last.
        last_code: The error code of the last answer; None if there was none.
    """

    body: RecordsBody
    sequence: int
    closed_at: float
    queued_bytes: int = 0
    callbacks: Sequence[tuple[int, object]] = ()
    ready_at: float = 0.0
    attempts: int = 0
    answers: int = 0
    in_flight: bool = False
    sent_behind: bool = False
    last_code: int | None = None


@dataclass(eq=False, slots=True)
class _Open:
    builder: RecordsBuilder
    since: float
    queued_bytes: int = 0
    callbacks: list[tuple[int, object]] = field(default_factory=list)


class PartitionQueue:
    """The queue of one partition, for one transaction.

    Args:
        make_builder: Makes the builder of the next batch.
        in_flight: The batches that may wait for their acknowledgement, at most :data:`MAX_IN_FLIGHT`.

    Attributes:
        first_offset: The offset of the transaction's first record here; None until it is known.
        sent: Whether a batch was ever sent: the partition may be part of the transaction.
    """

    def __init__(self, make_builder: Callable[[], RecordsBuilder], in_flight: int = MAX_IN_FLIGHT) -> None:
        self._make_builder = make_builder
        self._in_flight = in_flight
        self._batches: deque[Batch] = deque()
        self._open: _Open | None = None
        self._next_sequence = 0
        self._knows_us = False
        self.first_offset: int | None = None
        self.sent = False

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
        """Collect one record.

        Returns:
            The bytes of its key and value.
        """
        opened = self._open
        if opened is None:
            opened = self._open = _Open(self._make_builder(), now)
        if not opened.builder.append(value, key, headers, timestamp_ms):
            self.close_open(now)
            opened = self._open = _Open(self._make_builder(), now)
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

    def close_open(self, now: float) -> None:
        """Close the batch that collects records, if there is one."""
        opened, self._open = self._open, None
        if opened is not None:
            self._close(opened.builder.build(), now, opened.queued_bytes, opened.callbacks)

    def _close(self, body: RecordsBody, now: float, queued_bytes: int, callbacks: Sequence[tuple[int, object]]) -> None:
        self._batches.append(Batch(body, self._next_sequence, now, queued_bytes, callbacks))
        self._next_sequence = (self._next_sequence + body.count) % _SEQUENCES

    def next_to_send(self, now: float, due_since: float, *, flush: bool) -> Batch | None:
        """The batch to send now; None if none may be sent.

        Args:
            now: The time.
            due_since: A batch that was opened at this time or before has collected for long enough, if nothing is in flight:
                without a linger, a loop over a few messages would otherwise send a request for each of the first ones.
            flush: Whether to send what still collects, too.
        """
        batch = self._unsent()
        if batch is not None:
            return batch if batch.ready_at <= now else None
        if self._open is None or not self._takes(len(self._batches)):
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
        batch.attempts += 1
        batch.sent_behind = batch is not self._batches[0]

    def note_unanswered(self, batch: Batch, ready_at: float) -> None:
        """No answer comes any more: it may be in the log or not. It is sent again, under the same numbers."""
        batch.in_flight = False
        batch.ready_at = ready_at

    def note_answer(self, batch: Batch, code: int, meaning: Meaning, base_offset: int, ready_at: float) -> Meaning:
        """Take the answer about a batch.

        Args:
            batch: The batch.
            code: The answer's error code.
            meaning: What the table says of it.
            base_offset: The offset of its first record, where ``meaning`` is ``DONE``; below 0 if the broker did not say.
            ready_at: When it may be sent again, if it must.

        Returns:
            What it means here: a batch refused for a gap is sent again if one before it was unacknowledged.
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
        elif meaning in {Meaning.AGAIN, Meaning.MOVED}:
            batch.ready_at = ready_at
        return meaning
