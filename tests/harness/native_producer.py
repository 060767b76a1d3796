"""Transactions of version 2 (KIP-890) with batches as they are: no engine, a request and its answer at a time."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from kafka.protocol.metadata import FindCoordinatorRequest, FindCoordinatorResponse
from kafka.protocol.producer import EndTxnRequest, InitProducerIdRequest, ProduceRequest, ProduceResponse

from dualwrite.deadline import Deadline
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator.brokers import Brokers
from dualwrite.kafka.producer.native.records.body import RecordsBody
from harness.patience import PATIENCE_S

_NOT_YET = {3, 5, 6, 14, 15, 16, 51}
"""A new topic has no leader yet; the coordinator is loading, or not there yet; the last one's markers are missing."""


class NativeProducer:
    """One transactional id on a cluster of one broker.

    Attributes:
        ids: Producer id and epoch of the next transaction.
        sent: The sealed batches of each partition, in their order.
    """

    def __init__(self, config: dict[str, str]) -> None:
        self.kafka_id = f"native-{secrets.token_hex(4)}"
        self._brokers = Brokers(KafkaConfig.parse(config))
        self._node = self._brokers.nodes(Deadline(PATIENCE_S))[0]
        self._sequences: dict[int, int] = {}
        self.sent: dict[int, list[bytes]] = {}
        self._until_ready(lambda: FindCoordinatorRequest(key_type=1, coordinator_keys=[self.kafka_id], min_version=4))
        answer = self._until_ready(
            lambda: InitProducerIdRequest(
                transactional_id=self.kafka_id,
                transaction_timeout_ms=60_000,
                producer_id=-1,
                producer_epoch=-1,
                max_version=5,
            )
        )
        self.ids = (answer.producer_id, answer.producer_epoch)

    def send(self, topic: str, partition: int, body: RecordsBody) -> None:
        """Seal a body and send it; the broker has it on return."""
        batch = body.sealed(*self.ids, self._sequences.get(partition, 0))
        data = ProduceRequest.TopicProduceData
        answer = self._until_ready(
            lambda: ProduceRequest(
                transactional_id=self.kafka_id,
                acks=-1,
                timeout_ms=30_000,
                min_version=12,
                max_version=12,
                topic_data=[
                    data(name=topic, partition_data=[data.PartitionProduceData(index=partition, records=batch)])
                ],
            )
        )
        assert _error(answer) == 0, answer
        self._sequences[partition] = self._sequences.get(partition, 0) + body.count
        self.sent.setdefault(partition, []).append(batch)

    def end(self, *, commit: bool) -> None:
        """Commit or abort; the next transaction has an epoch of its own, whose sequence numbers begin at 0."""
        answer = self._until_ready(
            lambda: EndTxnRequest(
                transactional_id=self.kafka_id,
                producer_id=self.ids[0],
                producer_epoch=self.ids[1],
                committed=commit,
                min_version=5,
            )
        )
        assert _error(answer) == 0, answer
        self.ids = (answer.producer_id, answer.producer_epoch)
        self._sequences.clear()

    def close(self) -> None:
        """Close the connections."""
        self._brokers.close()

    def _until_ready(self, request: Callable[[], Any]) -> Any:
        deadline = Deadline(PATIENCE_S)
        while True:
            assert not deadline.expired
            [answer] = self._brokers.exchange([(self._node, request())], deadline)
            if isinstance(answer, Exception):
                raise answer
            if _error(answer) not in _NOT_YET:
                return answer


def _error(answer: Any) -> int:
    if isinstance(answer, FindCoordinatorResponse):
        return answer.coordinators[0].error_code
    if isinstance(answer, ProduceResponse):
        return answer.responses[0].partition_responses[0].error_code
    return answer.error_code
