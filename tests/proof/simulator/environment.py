"""Events of the simulated broker that no request causes: markers, time, restarts, retention. `broker` lists them."""

from __future__ import annotations

from typing import Final

from simulator import coordinator as rules
from simulator import partition as log
from simulator.requests import (
    COMPLETE_ABORT,
    COMPLETE_COMMIT,
    EMPTY,
    NEVER_MS,
    ONGOING,
    PREPARE_ABORT,
    PREPARE_COMMIT,
    ErrorCode,
    TopicPartition,
)
from simulator.state import Broker, partition, transaction, with_partition, with_transaction

_AT_REST: Final = frozenset({EMPTY, COMPLETE_COMMIT, COMPLETE_ABORT})
_PREPARED: Final = frozenset({PREPARE_COMMIT, PREPARE_ABORT})


def write_marker(broker: Broker, transactional_id: str, topic_partition: TopicPartition | None = None) -> Broker:
    """Write the marker of a prepared transaction to one of its partitions; the last one completes the transaction.

    One without partitions, an abort of nothing, is completed without a marker.

    Does nothing if no transaction is prepared, if the partition's leader is suspended, or if the partition refuses the
    marker: the coordinator then gives up until it restarts. A partition that no longer exists needs no marker, and one
    without a leader gets none (KAFKA-20734).

    Args:
        broker: The broker.
        transactional_id: The transaction's id.
        topic_partition: The partition; if not given, the first one without a marker.
    """
    known = transaction(broker, transactional_id)
    if known is None or known.state not in _PREPARED:
        return broker
    if not known.partitions:
        return with_transaction(broker, rules.completed(known))
    wanted = known.unmarked[0] if topic_partition is None else topic_partition
    if wanted not in known.unmarked:
        return broker
    found = partition(broker, wanted)
    if found is not None and wanted not in broker.leaderless:
        if wanted in broker.suspended:
            return broker
        written, error = log.append_marker(
            found,
            known.producer_id,
            known.producer_epoch,
            committed=known.state == PREPARE_COMMIT,
            coordinator_epoch=broker.coordinator_epoch,
            transaction_version=known.transaction_version,
        )
        if error is not ErrorCode.NONE:
            return broker
        broker = with_partition(broker, written)
    return with_transaction(broker, rules.marker_written(known, wanted))


def forget_marker(broker: Broker, transactional_id: str, topic_partition: TopicPartition) -> Broker:
    """Count an unwritten marker of a prepared transaction as written: the partition has no leader (KAFKA-20734)."""
    known = transaction(broker, transactional_id)
    if known is None or known.state not in _PREPARED or topic_partition not in known.unmarked:
        return broker
    return with_transaction(broker, rules.marker_written(known, topic_partition))


def suspend(broker: Broker, topic_partition: TopicPartition) -> Broker:
    """Suspend the leader of a partition. Its connections stay; requests to it get no answer."""
    return broker._replace(suspended=tuple(sorted({*broker.suspended, topic_partition})))


def lose_leader(broker: Broker, topic_partition: TopicPartition) -> Broker:
    """End the session of a suspended leader: the partition then has no leader, and gets no markers."""
    if topic_partition not in broker.suspended:
        return broker
    return broker._replace(leaderless=tuple(sorted({*broker.leaderless, topic_partition})))


def resume(broker: Broker, topic_partition: TopicPartition) -> Broker:
    """Let the leader of a partition continue, with its log as it was."""
    return broker._replace(
        suspended=tuple(place for place in broker.suspended if place != topic_partition),
        leaderless=tuple(place for place in broker.leaderless if place != topic_partition),
    )


def write_markers(broker: Broker, transactional_id: str | None = None) -> Broker:
    """Write all pending markers of one id, or of all."""
    for known in broker.transactions:
        if transactional_id in {None, known.transactional_id} and known.state in _PREPARED:
            for wanted in known.unmarked or (None,):
                broker = write_marker(broker, known.transactional_id, wanted)
    return broker


def prepared_ids(broker: Broker) -> tuple[str, ...]:
    """The ids with pending markers."""
    return tuple(known.transactional_id for known in broker.transactions if known.state in _PREPARED)


def ongoing_ids(broker: Broker) -> tuple[str, ...]:
    """The ids with an open transaction."""
    return tuple(known.transactional_id for known in broker.transactions if known.state == ONGOING)


def advance_clock(broker: Broker, by_ms: int) -> Broker:
    """Let time pass."""
    return broker._replace(clock_ms=broker.clock_ms + by_ms)


def overdue(broker: Broker) -> tuple[str, ...]:
    """The ids whose open transaction has reached its timeout."""
    return tuple(
        known.transactional_id
        for known in broker.transactions
        if known.state == ONGOING
        and known.timeout_ms != NEVER_MS
        and known.start_ms + known.timeout_ms < broker.clock_ms
    )


def time_out(broker: Broker, transactional_id: str) -> Broker:
    """Abort the open transaction of an id under a raised epoch, as the broker does after its timeout, if it has one."""
    known = transaction(broker, transactional_id)
    if known is None or known.state != ONGOING or known.timeout_ms == NEVER_MS:
        return broker
    fenced = rules.fence(known, broker.transaction_version, broker.next_producer_id)
    if fenced.next_producer_id >= 0:
        broker = broker._replace(next_producer_id=fenced.next_producer_id + 1)
    return with_transaction(broker, fenced)


def expire_transactional_id(broker: Broker, transactional_id: str) -> Broker:
    """Forget an id that is at rest. The next ``InitProducerId`` for it returns another producer id."""
    return broker._replace(
        transactions=tuple(
            known
            for known in broker.transactions
            if known.transactional_id != transactional_id or known.state not in _AT_REST
        )
    )


def expire_producer(broker: Broker, topic_partition: TopicPartition, producer_id: int) -> Broker:
    """Let a partition forget a producer that has nothing open there."""
    found = partition(broker, topic_partition)
    if found is None:
        return broker
    kept = tuple(entry for entry in found.producers if entry.producer_id != producer_id or entry.txn_start >= 0)
    waiting = tuple(entry for entry in found.verifications if entry.producer_id != producer_id)
    return with_partition(broker, found._replace(producers=kept, verifications=waiting))


def restart(broker: Broker) -> Broker:
    """Stop and start the broker. It forgets what it keeps in memory only, but nothing acknowledged.

    It writes all markers of a prepared transaction again, even those already written.
    """
    return broker._replace(
        suspended=(),
        leaderless=(),
        coordinator_epoch=broker.coordinator_epoch + 2,  # the coordinator resigns, and is elected again
        transactions=tuple(known._replace(last_producer_epoch=-1, marked=()) for known in broker.transactions),
        partitions=tuple(
            found._replace(
                verifications=(),
                producers=tuple(entry._replace(kept=entry.kept[-1:]) for entry in found.producers),
            )
            for found in broker.partitions
        ),
    )


def delete_topic(broker: Broker, name: str) -> Broker:
    """Delete a topic with all its messages."""
    kept = tuple(found for found in broker.partitions if found.topic_partition[0] != name)
    return broker._replace(partitions=kept)


def delete_records(broker: Broker, topic_partition: TopicPartition, before: int) -> Broker:
    """Delete the records before an offset, as retention and ``DeleteRecords`` do. Never beyond the end."""
    found = partition(broker, topic_partition)
    if found is None:
        return broker
    start = max(found.log_start, min(before, found.log_end))
    kept = tuple(batch for batch in found.batches if batch.next_offset > start)
    aborted = tuple(entry for entry in found.aborted if entry.last_offset >= start)
    return with_partition(broker, found._replace(log_start=start, batches=kept, aborted=aborted))


def truncate(broker: Broker, topic_partition: TopicPartition, to: int) -> Broker:
    """Lose the end of a log from an offset on, as an unclean leader election does."""
    found = partition(broker, topic_partition)
    if found is None:
        return broker
    return with_partition(broker, log.truncated(found, to))
