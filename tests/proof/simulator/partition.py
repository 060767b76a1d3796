"""The rules of one partition's log: producers with their epochs and sequence numbers, markers, and reads.

They follow Kafka's ``ProducerStateManager``, ``ProducerAppendInfo`` and ``UnifiedLog`` (4.3), on one replica: every
write counts as replicated at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Final, NamedTuple

from simulator.requests import (
    ABORT,
    COMMIT,
    READ_COMMITTED,
    AbortedTransaction,
    Batch,
    DescribeProducersResponse,
    ErrorCode,
    FetchResponse,
    ProduceResponse,
    ProducerView,
    TopicPartition,
)

_BATCHES_KEPT: Final = 5
_SEQUENCES: Final = 2**31
_NO_SEQUENCE: Final = -1


class KeptBatch(NamedTuple):
    """A producer's batch that a partition remembers, to recognise a repetition."""

    first_sequence: int
    last_sequence: int
    base_offset: int


class ProducerEntry(NamedTuple):
    """A partition's memory of one producer. ``txn_start`` is -1 if it has nothing open."""

    producer_id: int
    producer_epoch: int = -1
    coordinator_epoch: int = -1
    txn_start: int = -1
    kept: tuple[KeptBatch, ...] = ()

    @property
    def last_sequence(self) -> int:
        """The last sequence number of this epoch; -1 if there is none."""
        return self.kept[-1].last_sequence if self.kept else _NO_SEQUENCE


class Verification(NamedTuple):
    """A first write that the coordinator was asked about; until it is written, it blocks higher sequence numbers.

    ``transaction_version`` is that of the first request.
    """

    producer_id: int
    producer_epoch: int
    lowest_sequence: int
    transaction_version: int = 1


class AbortedEntry(NamedTuple):
    """An entry of the index of aborted transactions."""

    producer_id: int
    first_offset: int
    last_offset: int


class Partition(NamedTuple):
    """One partition with its log. Producers and verifications are sorted by producer id."""

    topic_partition: TopicPartition
    topic_id: str
    log_start: int = 0
    log_end: int = 0
    batches: tuple[Batch, ...] = ()
    producers: tuple[ProducerEntry, ...] = ()
    aborted: tuple[AbortedEntry, ...] = ()
    verifications: tuple[Verification, ...] = ()


def producer(partition: Partition, producer_id: int) -> ProducerEntry | None:
    """The partition's memory of the producer; None if it has none."""
    for entry in partition.producers:
        if entry.producer_id == producer_id:
            return entry
    return None


def begin_verification(
    partition: Partition, producer_id: int, producer_epoch: int, sequence: int, transaction_version: int = 1
) -> Partition:
    """Record that the partition asks the coordinator."""
    begun = Verification(producer_id, producer_epoch, sequence, transaction_version)
    others = []
    for other in partition.verifications:
        if other.producer_id != producer_id:
            others.append(other)
        elif other.producer_epoch > producer_epoch or (
            other.producer_epoch == producer_epoch and other.lowest_sequence <= sequence
        ):
            begun = other
        else:
            begun = begun._replace(transaction_version=other.transaction_version)
    return partition._replace(verifications=tuple(sorted([*others, begun])))


def append(
    partition: Partition,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    values: tuple[Hashable, ...],
    *,
    checks_sequence: bool = True,
) -> tuple[Partition, ProduceResponse]:
    """Write one batch of a transaction that the coordinator has verified, or that is already open here."""
    entry = producer(partition, producer_id) or ProducerEntry(producer_id)
    last = (base_sequence + len(values) - 1) % _SEQUENCES
    if checks_sequence:
        if entry.producer_epoch == producer_epoch:
            for kept in entry.kept:
                if (kept.first_sequence, kept.last_sequence) == (base_sequence, last):
                    return partition, ProduceResponse(ErrorCode.NONE, kept.base_offset)
        if producer_epoch < entry.producer_epoch:
            return partition, ProduceResponse(ErrorCode.INVALID_PRODUCER_EPOCH)
        if not _in_sequence(partition, entry, producer_epoch, base_sequence):
            return partition, ProduceResponse(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    elif producer_epoch < entry.producer_epoch:
        return partition, ProduceResponse(ErrorCode.INVALID_PRODUCER_EPOCH)
    offset = partition.log_end
    kept_now = entry.kept if entry.producer_epoch == producer_epoch else ()
    renewed = entry._replace(
        producer_epoch=producer_epoch,
        txn_start=entry.txn_start if entry.txn_start >= 0 else offset,
        kept=(*kept_now, KeptBatch(base_sequence, last, offset))[-_BATCHES_KEPT:],
    )
    batch = Batch(offset, offset + len(values), producer_id, producer_epoch, base_sequence, values)
    return _written(partition, batch, renewed), ProduceResponse(ErrorCode.NONE, offset)


def append_plain(partition: Partition, values: tuple[Hashable, ...]) -> tuple[Partition, ProduceResponse]:
    """Write one batch without a producer id."""
    offset = partition.log_end
    batch = Batch(offset, offset + len(values), -1, -1, _NO_SEQUENCE, values)
    written = partition._replace(batches=(*partition.batches, batch), log_end=batch.next_offset)
    return written, ProduceResponse(ErrorCode.NONE, offset)


def _in_sequence(partition: Partition, entry: ProducerEntry, producer_epoch: int, base_sequence: int) -> bool:
    for verification in partition.verifications:
        if verification.producer_id == entry.producer_id:
            if base_sequence > verification.lowest_sequence:
                return False
            if base_sequence and verification.transaction_version > 1 and not entry.kept:
                return False
    if entry.producer_epoch < 0:
        return True
    if entry.producer_epoch != producer_epoch:
        return base_sequence == 0
    return base_sequence == (entry.last_sequence + 1) % _SEQUENCES


def append_marker(
    partition: Partition,
    producer_id: int,
    producer_epoch: int,
    *,
    committed: bool,
    coordinator_epoch: int,
    transaction_version: int = 1,
) -> tuple[Partition, ErrorCode]:
    """Write a control record, which ends the producer's open transaction here.

    The marker of a version 2 transaction has a later epoch than its messages: so a late one does not end the next.
    """
    entry = producer(partition, producer_id) or ProducerEntry(producer_id)
    if producer_epoch < entry.producer_epoch:
        return partition, ErrorCode.INVALID_PRODUCER_EPOCH
    if transaction_version > 1 and producer_epoch == entry.producer_epoch and entry.txn_start >= 0:
        return partition, ErrorCode.INVALID_PRODUCER_EPOCH
    if coordinator_epoch < entry.coordinator_epoch:
        return partition, ErrorCode.TRANSACTION_COORDINATOR_FENCED
    offset = partition.log_end
    batch = Batch(
        offset, offset + 1, producer_id, producer_epoch, _NO_SEQUENCE, (), COMMIT if committed else ABORT
    )  # fmt: skip
    aborted = partition.aborted
    if entry.txn_start >= 0 and not committed:
        aborted = (*aborted, AbortedEntry(producer_id, entry.txn_start, offset))
    ended = entry._replace(
        producer_epoch=producer_epoch,
        coordinator_epoch=coordinator_epoch,
        txn_start=-1,
        kept=entry.kept if entry.producer_epoch == producer_epoch else (),
    )
    return _written(partition._replace(aborted=aborted), batch, ended), ErrorCode.NONE


def _written(partition: Partition, batch: Batch, entry: ProducerEntry) -> Partition:
    others = [other for other in partition.producers if other.producer_id != entry.producer_id]
    verifications = tuple(other for other in partition.verifications if other.producer_id != entry.producer_id)
    return partition._replace(
        log_end=batch.next_offset,
        batches=(*partition.batches, batch),
        producers=tuple(sorted([*others, entry])),
        verifications=verifications,
    )


def last_stable_offset(partition: Partition) -> int:
    """The offset before which every transaction has ended."""
    return min((entry.txn_start for entry in partition.producers if entry.txn_start >= 0), default=partition.log_end)


def fetch(partition: Partition, fetch_offset: int, isolation_level: int) -> FetchResponse:
    """Read from an offset to the end, or to the last stable offset."""
    if not partition.log_start <= fetch_offset <= partition.log_end:
        return FetchResponse(ErrorCode.OFFSET_OUT_OF_RANGE)
    stable = last_stable_offset(partition)
    end = stable if isolation_level == READ_COMMITTED else partition.log_end
    batches = tuple(
        batch for batch in partition.batches if batch.next_offset > fetch_offset and batch.base_offset < end
    )
    aborted = None
    if isolation_level == READ_COMMITTED:
        upper = batches[-1].next_offset if batches else fetch_offset
        aborted = tuple(
            AbortedTransaction(entry.producer_id, entry.first_offset)
            for entry in partition.aborted
            if entry.last_offset >= fetch_offset and entry.first_offset < upper
        )
    return FetchResponse(ErrorCode.NONE, partition.log_end, stable, partition.log_start, aborted, batches)


def describe_producers(partition: Partition) -> DescribeProducersResponse:
    """The leader's view of its producers."""
    return DescribeProducersResponse(
        ErrorCode.NONE,
        tuple(
            ProducerView(
                entry.producer_id,
                entry.producer_epoch,
                entry.last_sequence,
                entry.coordinator_epoch,
                entry.txn_start,
            )
            for entry in partition.producers
        ),
    )


def committed_values(partition: Partition) -> tuple[Hashable, ...]:
    """The values that a ``read_committed`` consumer sees when it reads from the beginning, in its order."""
    return tuple(value for _, value in committed_records(fetch(partition, partition.log_start, READ_COMMITTED)))


def ended_values(partition: Partition) -> list[Hashable]:
    """The values of transactions that have committed, in the order of the log; also of those behind one that is open.

    So a group coordinator counts offsets: each transaction by its own marker.
    """
    open_values: dict[int, list[tuple[int, Hashable]]] = {}
    ended: list[tuple[int, Hashable]] = []
    for batch in partition.batches:
        if batch.control:
            values = open_values.pop(batch.producer_id, [])
            ended += values if batch.control == COMMIT else []
        else:
            open_values.setdefault(batch.producer_id, []).extend(enumerate(batch.values, batch.base_offset))
    return [value for _, value in sorted(ended, key=lambda one: one[0])]


def committed_records(answer: FetchResponse) -> Iterator[tuple[int, Hashable]]:
    """Yield what a ``read_committed`` consumer sees of an answer: offset and value."""
    starts = sorted(answer.aborted_transactions or (), key=lambda entry: entry.first_offset)
    aborting: set[int] = set()
    for batch in answer.batches:
        while starts and starts[0].first_offset <= batch.base_offset:
            aborting.add(starts.pop(0).producer_id)
        if batch.control == ABORT:
            aborting.discard(batch.producer_id)
        elif not batch.control and batch.producer_id not in aborting:
            yield from enumerate(batch.values, batch.base_offset)


def truncated(partition: Partition, to: int) -> Partition:
    """The partition as it was when the log ended at that offset. Drops whole batches."""
    kept = tuple(batch for batch in partition.batches if batch.next_offset <= to)
    end = max(partition.log_start, min(to, kept[-1].next_offset if kept else partition.log_start))
    rebuilt = Partition(partition.topic_partition, partition.topic_id, partition.log_start, end)
    for batch in kept:
        if batch.control:
            rebuilt = rebuilt._replace(log_end=batch.base_offset)
            rebuilt, _ = append_marker(
                rebuilt, batch.producer_id, batch.producer_epoch,
                committed=batch.control == COMMIT, coordinator_epoch=-1,
            )  # fmt: skip
        elif batch.producer_id >= 0:
            rebuilt = rebuilt._replace(log_end=batch.base_offset)
            rebuilt, _ = append(
                rebuilt, batch.producer_id, batch.producer_epoch, batch.base_sequence, batch.values,
                checks_sequence=False,
            )  # fmt: skip
    return rebuilt._replace(batches=kept, log_end=end)
