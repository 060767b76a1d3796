"""What the product sees of the simulated broker: through its own reading of the log, and its own words."""

from __future__ import annotations

from typing import Any, NamedTuple

from dualwrite.kafka.log import Scan, combined
from dualwrite.observations import LogProof, TransactionStatus, TransactionView
from dualwrite.prepared_state import PreparedTxnState
from dualwrite.testing.simulator import requests as sim
from dualwrite.testing.simulator.broker import handle
from dualwrite.testing.simulator.requests import ErrorCode
from dualwrite.testing.simulator.state import Broker

_STATUS = {status.value: status for status in TransactionStatus}


def describe(broker: Broker, kafka_id: str) -> TransactionView:
    """As ``KafkaCoordinator.describe``. Start times are left out: they only make a wrong match less likely."""
    shown = handle(broker, sim.DescribeTransactions(kafka_id))[1]
    if shown.error_code is not ErrorCode.NONE:
        return TransactionView(TransactionStatus.NO_SUCH_ID)
    return TransactionView(_STATUS[shown.transaction_state], shown.producer_id, shown.producer_epoch)


def open_offset(broker: Broker, place: sim.TopicPartition, state: PreparedTxnState) -> int | None:
    """As ``KafkaCoordinator.open_offsets``, of one partition."""
    for shown in handle(broker, sim.DescribeProducers(place))[1].active_producers:
        if (shown.producer_id, shown.producer_epoch) == (state.producer_id, state.epoch):
            return shown.current_txn_start_offset if shown.current_txn_start_offset >= 0 else None
    return None


class _Marker(NamedTuple):
    commit: bool
    abort: bool
    type: int = 0


class _Batch:
    """A simulated batch, as kafka-python shows a real one."""

    magic = 2

    def __init__(self, batch: sim.Batch) -> None:
        self.base_offset = batch.base_offset
        self.next_offset = batch.next_offset
        self.producer_id = batch.producer_id
        self.producer_epoch = batch.producer_epoch
        self.is_control_batch = bool(batch.control)
        self._control = batch.control

    def __iter__(self) -> Any:
        return iter([_Marker(self._control == sim.COMMIT, self._control == sim.ABORT)])


def prove(broker: Broker, state: PreparedTxnState) -> LogProof:
    """As ``dualwrite.kafka.log.prove``: its own scan of each partition, and its own combination of what they show."""
    proofs = {}
    for first in state.first_offsets:
        scan = Scan(first, state.producer_id, state.epoch)
        read = handle(broker, sim.Fetch((first.topic, first.partition), first.offset))[1]
        if read.error_code is not ErrorCode.NONE:
            proofs[scan.place] = LogProof.UNKNOWABLE
            continue
        proof = scan.read([_Batch(batch) for batch in read.batches])
        proofs[scan.place] = proof or (LogProof.OPEN if scan.begun else LogProof.UNKNOWABLE)
    return combined(state, proofs)
