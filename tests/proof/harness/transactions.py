"""A plain confluent-kafka transactional producer, and its own view of its transactions."""

from __future__ import annotations

import secrets

from confluent_kafka import Producer

from dualwrite.clock import Deadline
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState


def fresh_id(name="id"):
    """A new transactional id."""
    return f"{name}-{secrets.token_hex(6)}"


class PlainProducer:
    """Knows nothing of this library; its delivery reports are the truth that the coordinator's view is held against."""

    def __init__(self, config, kafka_id=None, **settings):
        self.kafka_id = kafka_id or fresh_id()
        self.client = Producer({**config, "transactional.id": self.kafka_id, "log_level": 0, **settings})
        self.client.init_transactions(60)
        self.first_offsets = {}

    def write(self, topic, partitions=(0,), *, value=b"x", count=1):
        """Begin a transaction, write to each partition and wait until all is delivered. Returns the first offsets."""
        self.client.begin_transaction()
        self.first_offsets = {}
        for _ in range(count):
            for partition in partitions:
                self.client.produce(topic, value, partition=partition, on_delivery=self._delivered)
        assert self.client.flush(60) == 0
        return self.first_offsets

    def _delivered(self, error, message):
        assert error is None, error
        self.first_offsets.setdefault((message.topic(), message.partition()), message.offset())

    def state(self, coordinator, *, topic_ids=True):
        """The state of what has just been written."""
        view = coordinator.describe([self.kafka_id], Deadline(30))[self.kafka_id]
        topics = {topic for topic, _ in self.first_offsets}
        ids = coordinator.topic_ids(topics, Deadline(30)) if topic_ids else {}
        firsts = tuple(FirstOffset(*key, offset, ids.get(key[0])) for key, offset in self.first_offsets.items())
        return PreparedTxnState(view.producer_id, view.epoch, None, firsts, view.started_ms)
