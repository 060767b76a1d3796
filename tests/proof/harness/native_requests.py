"""A native producer from the sender and the requests of the engine, without the engine."""

import secrets

from dualwrite.clock import Deadline, now_s
from dualwrite.kafka.brokers import Connections
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.native.coordination import CoordinatorRequests
from dualwrite.kafka.native.produce_state import Code, Limits, ProduceCore
from dualwrite.kafka.native.records import Codec, RecordsBuilder
from dualwrite.kafka.native.sender import Sender
from harness.patience import PATIENCE_S

MINUTE_MS = 60_000


class Producer:
    """A sender and its requests, for transactions one after the other."""

    def __init__(self, config, kafka_id=None):
        self.kafka_id = kafka_id or f"native-{secrets.token_hex(4)}"
        self.sender = Sender(Connections(KafkaConfig.parse(config)), self.kafka_id)
        self.requests = CoordinatorRequests(self.sender.brokers, self.kafka_id)
        self.ids = (-1, -1)

    @property
    def deadline(self):
        return Deadline(PATIENCE_S)

    def init(self):
        answered = self.requests.init_producer_id(MINUTE_MS, self.deadline)
        assert answered.code == Code.NONE
        self.ids = answered.ids
        return self

    def send(self, topic, value):
        core = ProduceCore(Limits(linger_s=0.0, topic_s=1.0), lambda: RecordsBuilder(Codec(), limit_bytes=100_000))
        self.sender.begin(self.ids, core)
        self.sender.topic(topic, self.deadline)
        core.append((topic, 0), value, None, (), 1, now=now_s())
        assert self.sender.flush(self.deadline)

    def commit_offsets(self, group, offsets):
        topic_ids = self.sender.ids_of({topic for topic, _ in offsets}, self.deadline)
        return self.requests.commit_offsets(self.ids, group, offsets, self.deadline, topic_ids=topic_ids).code

    def end(self, *, committed=True):
        answered = self.requests.end(self.ids, self.deadline, committed=committed)
        if answered.code == Code.NONE:
            self.ids = answered.ids
        return answered.code

    def close(self):
        self.sender.close()
