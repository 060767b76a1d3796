"""The product's view of the simulated broker: through its own reading of the log, and its own words."""

from __future__ import annotations

from collections.abc import Iterable

from simulator import requests as sim
from simulator.broker import handle
from simulator.outside import SeenBatch
from simulator.requests import ErrorCode
from simulator.state import Broker

from dualwrite.kafka.log import Scan, combined
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import (
    LogProof,
    OpenPlaces,
    OpenTransaction,
    ShownProducer,
    TransactionStatus,
    TransactionView,
)

OpenTransactions = tuple[OpenTransaction, ...]

_STATUS = {status.value: status for status in TransactionStatus}


def describe(broker: Broker, kafka_id: str, *, places: bool = False) -> TransactionView:
    """As ``KafkaCoordinator.describe``. Start times are left out: they only make a wrong match less likely.

    So are the partitions and the time limit, if ``places`` is not set: they only matter for native transactions, and where markers
    are skipped.
    """
    shown = handle(broker, sim.DescribeTransactions(kafka_id))[1]
    if shown.error_code is not ErrorCode.NONE:
        return TransactionView(TransactionStatus.NO_SUCH_ID)
    status = _STATUS[shown.transaction_state]
    if not places:
        return TransactionView(status, shown.producer_id, shown.producer_epoch)
    return TransactionView(
        status, shown.producer_id, shown.producer_epoch, None, shown.transaction_timeout_ms, shown.partitions
    )


def open_offset(broker: Broker, place: sim.TopicPartition, state: PreparedTxnState) -> int | None:
    """As ``KafkaCoordinator.open_offsets``, of one partition."""
    for shown in handle(broker, sim.DescribeProducers(place))[1].active_producers:
        if (shown.producer_id, shown.producer_epoch) == (state.producer_id, state.epoch):
            return shown.current_txn_start_offset if shown.current_txn_start_offset >= 0 else None
    return None


def still_open(broker: Broker, producer_id: int, places: Iterable[sim.TopicPartition]) -> OpenPlaces:
    """As ``KafkaCoordinator.still_open``, of one producer."""
    return tuple(
        (place, shown.current_txn_start_offset)
        for place in sorted(places)
        for shown in handle(broker, sim.DescribeProducers(place))[1].active_producers
        if shown.producer_id == producer_id and shown.current_txn_start_offset >= 0
    )


def shown_producer(broker: Broker, place: sim.TopicPartition, producer_id: int) -> ShownProducer:
    """As ``KafkaCoordinator.producer_epochs``, of one partition."""
    for shown in handle(broker, sim.DescribeProducers(place))[1].active_producers:
        if shown.producer_id == producer_id:
            start = shown.current_txn_start_offset
            return ShownProducer(shown.producer_epoch, start if start >= 0 else None)
    return ShownProducer()


def producers(broker: Broker, place: sim.TopicPartition) -> dict[int, ShownProducer]:
    """All producers of a partition, as its leader answers the one question about all ends."""
    return {
        shown.producer_id: ShownProducer(
            shown.producer_epoch, shown.current_txn_start_offset if shown.current_txn_start_offset >= 0 else None
        )
        for shown in handle(broker, sim.DescribeProducers(place))[1].active_producers
    }


def open_transactions(broker: Broker, producer_id: int, places: Iterable[sim.TopicPartition]) -> OpenTransactions:
    """As ``KafkaCoordinator.open_transactions``, of one producer."""
    shown = ((place, shown_producer(broker, place, producer_id)) for place in places)
    return tuple(OpenTransaction(place, one.epoch, one.open_from) for place, one in shown if one.open_from is not None)


def proofs_now(broker: Broker, state: PreparedTxnState) -> dict[sim.TopicPartition, LogProof]:
    """As ``KafkaCoordinator.prove_now``, of one transaction: each partition by itself."""
    return {
        (first.topic, first.partition): _proof(broker, Scan(first, state.producer_id, state.epoch))
        for first in state.first_offsets
    }


def prove(broker: Broker, state: PreparedTxnState) -> LogProof:
    """As ``dualwrite.kafka.log.prove``: its own scan of each partition, and its own combination of what they show.

    Raises:
        AssertionError: Its glance and its scan tell different things.
    """
    scans = [Scan(first, state.producer_id, state.epoch) for first in state.first_offsets]
    return combined(state, {scan.place: _proof(broker, scan) for scan in scans})


def _proof(broker: Broker, scan: Scan) -> LogProof:
    first, place = scan.first, (scan.first.topic, scan.first.partition)
    read = handle(broker, sim.Fetch(place, first.offset))[1]
    if read.error_code is not ErrorCode.NONE:
        return LogProof.UNKNOWABLE
    stable = handle(broker, sim.Fetch(place, first.offset, sim.READ_COMMITTED))[1]
    seen = [SeenBatch(batch) for batch in stable.batches]
    glance = scan.glance(seen, stable.aborted_transactions)
    proof = scan.read([SeenBatch(batch) for batch in read.batches])
    assert glance in {None, proof}, (first, glance, proof)
    return proof or (LogProof.OPEN if scan.begun else LogProof.UNKNOWABLE)
