"""Many transactions at once, as a Spark batch has them: opened, prepared, decided in one database transaction, completed.

Opened by requests side by side, because a thousand producers would measure this machine and not the servers. Deciding and
completing are the product's own: what the driver of a batch does, or, where the driver has died, the next one, by a claim.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from kafka.protocol.producer import ProduceRequest
from kafka.record.memory_records import MemoryRecordsBuilder
from sqlalchemy import create_engine
from typing_extensions import Self

from benchmarks.servers import Ground
from dualwrite.clock import Deadline
from dualwrite.kafka.brokers import Brokers
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import Decision, StateRow
from dualwrite.recovery.claim import OwnerContext, claim_rows, unique_owner
from dualwrite.recovery.settle import settle
from dualwrite.sinks.batches import complete_handed_over
from dualwrite.stores.sql.store import SqlStateStore

PATIENCE_S = 600.0
TIMEOUT_MS = 900_000


@dataclass
class Leg:
    """One part of the work.

    Attributes:
        seconds: How long it took.
        requests: What was sent to the brokers, by kind.
    """

    seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)

    @classmethod
    @contextmanager
    def measured(cls) -> Iterator[Self]:
        """Measure the block: its time, and every request that it sends to a broker of its choice."""
        leg, exchange = cls(), Brokers.exchange

        def counted(self, requests, *others, **how):
            leg.requests.update(type(request).__name__.removesuffix("Request") for _, request in requests)
            return exchange(self, requests, *others, **how)

        Brokers.exchange = counted
        begun = time.perf_counter()
        try:
            yield leg
        finally:
            leg.seconds = time.perf_counter() - begun
            Brokers.exchange = exchange


def measure(ground: Ground, count: int, topic: str, *, partitions: int, by_claim: bool = False) -> dict[str, Leg]:
    """Open, decide and complete that many transactions, each with a record in every partition of the topic."""
    engine = create_engine(ground.url)
    deadline = Deadline(PATIENCE_S)
    names = [f"many-{secrets.token_hex(4)}#{number}" for number in range(count)]
    legs: dict[str, Leg] = {}
    try:
        with closing(KafkaCoordinator(KafkaConfig.parse(ground.kafka))) as coordinator:
            claimant = OwnerContext(coordinator, SqlStateStore(engine), unique_owner("bench"))
            rows = claim_rows(claimant, names, deadline)
            with Leg.measured() as legs["open"]:
                states = _open(ground, claimant, rows, [(topic, number) for number in range(partitions)], deadline)
            with Leg.measured() as legs["decide"]:
                _decide(claimant, rows, states)
            with Leg.measured() as legs["complete"]:
                completed = (_claimed if by_claim else _completed)(claimant, names, deadline)
    finally:
        engine.dispose()
    if sorted(completed) != sorted(names):
        raise RuntimeError(f"{len(completed)} of {count} transactions were completed")
    return legs


def _completed(claimant: OwnerContext, names: Sequence[str], deadline: Deadline) -> list[str]:
    store = claimant.store
    found = complete_handed_over(store.read(names), coordinator=claimant.coordinator, store=store, deadline=deadline)
    return [row.transactional_id for row in found]


def _claimed(claimant: OwnerContext, names: Sequence[str], deadline: Deadline) -> list[str]:
    rows = claim_rows(claimant, names, deadline)
    return settle(rows, coordinator=claimant.coordinator, store=claimant.store, deadline=deadline).rolled_forward


def _open(
    ground: Ground,
    claimant: OwnerContext,
    rows: Sequence[StateRow],
    places: Sequence[tuple[str, int]],
    deadline: Deadline,
) -> list[PreparedTxnState]:
    coordinator = claimant.coordinator
    kafka_ids = [row.kafka_id(row.incarnation) for row in rows]
    found = coordinator.retire(kafka_ids, deadline, timeouts_ms=dict.fromkeys(kafka_ids, TIMEOUT_MS))  # InitProducerId
    added = coordinator.add_partitions({key: (*found[key], places) for key in kafka_ids}, deadline)
    if not all(added.values()):
        raise RuntimeError("partitions were not added")
    topics = coordinator.topic_ids({topic for topic, _ in places}, deadline)
    with closing(Brokers(KafkaConfig.parse(ground.kafka))) as brokers:
        node = brokers.nodes(deadline)[0]
        requests = [(node, _produce(key, *found[key], places)) for key in kafka_ids]
        answers = brokers.exchange(requests, deadline, spread=True)
    states = []
    for row, answer in zip(rows, answers, strict=True):
        if isinstance(answer, Exception):
            raise answer
        written = [
            FirstOffset(topic.name, partition.index, partition.base_offset, topics[topic.name])
            for topic in answer.responses
            for partition in topic.partition_responses
            if partition.error_code == 0
        ]
        if len(written) != len(places):
            raise RuntimeError(f"not all was produced: {answer}")
        states.append(PreparedTxnState(*found[row.kafka_id(row.incarnation)], row.incarnation, tuple(written)))
    return states


def _produce(kafka_id: str, producer_id: int, epoch: int, places: Sequence[tuple[str, int]]) -> ProduceRequest:
    [topic] = {topic for topic, _ in places}
    data = ProduceRequest.TopicProduceData
    builder = MemoryRecordsBuilder(
        magic=2,
        compression_type=0,
        batch_size=1_000_000,
        transactional=True,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=0,
    )
    builder.append(timestamp=int(time.time() * 1000), key=None, value=kafka_id.encode())
    builder.close()
    records = bytes(builder.buffer())
    return ProduceRequest(
        transactional_id=kafka_id,
        acks=-1,
        timeout_ms=30_000,
        topic_data=[
            data(
                name=topic,
                partition_data=[data.PartitionProduceData(index=number, records=records) for _, number in places],
            )
        ],
        max_version=10,
    )


def _decide(claimant: OwnerContext, rows: Sequence[StateRow], states: Sequence[PreparedTxnState]) -> None:
    store = claimant.store
    with store.engine.connect() as connection:
        store.begin(connection)
        for row, state in sorted(zip(rows, states, strict=True), key=lambda one: one[0].transactional_id):
            ours, _ = store.decide(
                connection, Decision(row.transactional_id, row.incarnation, state, namespace=row.namespace)
            )
            if not ours:
                raise RuntimeError(f"{row.transactional_id} is another's")
        store.commit(connection)
