"""A producer of native transactions (transaction version 2) from single requests, which leaves them as a test wants them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

import kafka.errors as kafka_errors
from kafka.protocol.producer import ProduceRequest
from kafka.protocol.producer.transaction import EndTxnRequest, InitProducerIdRequest

from dualwrite.clock import Deadline
from dualwrite.kafka.brokers import Brokers, NotYet, until_answered
from dualwrite.kafka.cluster import Coordinators, Topics
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.native.records import Codec, RecordsBody, RecordsBuilder
from dualwrite.protocol.values import NEVER_MS
from harness.patience import wait_until

NATIVE, UNVERIFIED = 12, 11
"""``Produce`` that adds its partition to the transaction; and one that leaves that to another request, which never comes."""


class NativeProducer:
    """One producer instance, with all its connections. Close it after use.

    Attributes:
        sent: The sealed batches of each partition, in their order.
    """

    def __init__(self, config: Mapping[str, Any], kafka_id: str | None = None, *, timeout_ms: int = NEVER_MS) -> None:
        self._brokers = Brokers(KafkaConfig.parse(config))
        self._topics = Topics(self._brokers)
        self._sequences: dict[tuple[str, int, int], int] = {}
        self.kafka_id = kafka_id or f"native-{secrets.token_hex(4)}"
        self.sent: dict[int, list[bytes]] = {}
        request = {"transactional_id": self.kafka_id, "transaction_timeout_ms": timeout_ms}
        answer = self._until_done(
            self.coordinator,
            lambda: InitProducerIdRequest(**request, producer_id=-1, producer_epoch=-1, max_version=5),
            lambda response: response.error_code,
        )
        self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch

    @property
    def ids(self) -> tuple[int, int]:
        """Producer id and epoch of the next transaction."""
        return self.producer_id, self.epoch

    @property
    def coordinator(self) -> int:
        """The broker that coordinates the id."""
        coordinators = Coordinators(self._brokers)

        def find(pending):
            return coordinators._find(pending, Deadline(60))

        return until_answered([self.kafka_id], find, Deadline(120), "find the coordinator")[self.kafka_id]

    def close(self) -> None:
        self._brokers.close()

    def produce(
        self, topic: str, partition: int, value: str, *, epoch: int | None = None, version: int = NATIVE
    ) -> int:
        """Produce one message; returns its offset."""
        builder = RecordsBuilder(Codec(), limit_bytes=1 << 20)
        builder.append(value.encode(), b"k", (), int(time.time() * 1000))
        return self.send(topic, partition, builder.build(), epoch=epoch, version=version)

    def send(
        self, topic: str, partition: int, body: RecordsBody, *, epoch: int | None = None, version: int = NATIVE
    ) -> int:
        """Seal a body and send it; the broker has it on return. Returns its first offset."""
        epoch = self.epoch if epoch is None else epoch
        sequence = self._sequences.get((topic, partition, epoch), 0)
        records = body.sealed(self.producer_id, epoch, sequence)

        def request():
            of = ProduceRequest.TopicProduceData.PartitionProduceData(index=partition, records=records)
            data = ProduceRequest.TopicProduceData(name=topic, partition_data=[of])
            return ProduceRequest(
                transactional_id=self.kafka_id,
                acks=-1,
                timeout_ms=10_000,
                topic_data=[data],
                min_version=version,
                max_version=version,
            )

        found = self._topics.find([topic], Deadline(60), fresh=True)[topic]
        answer = self._until_done(
            found.leaders[partition].node, request, lambda one: one.responses[0].partition_responses[0].error_code
        )
        self._sequences[topic, partition, epoch] = sequence + body.count
        self.sent.setdefault(partition, []).append(records)
        return answer.responses[0].partition_responses[0].base_offset

    def end(self, *, commit: bool) -> None:
        """Commit or abort; the next transaction has an epoch of its own, whose sequence numbers begin at 0."""
        answer = self._until_done(
            self.coordinator,
            lambda: EndTxnRequest(
                transactional_id=self.kafka_id,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                committed=commit,
                min_version=5,
            ),
            lambda response: response.error_code,
        )
        self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch

    def _until_done(self, node, request, code):
        answers = []

        def done():
            try:
                [answer] = self._brokers.exchange([(node, request())], Deadline(60))
            except NotYet:
                return False
            kind = None if isinstance(answer, NotYet) else kafka_errors.for_code(code(answer))
            assert kind in {None, kafka_errors.NoError} or kind.retriable, kind
            answers.append(answer)
            return kind is kafka_errors.NoError

        wait_until(done)
        return answers[-1]
