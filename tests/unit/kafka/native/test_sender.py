"""The Produce request says what the settings say; the rest of it is shown on real brokers."""

import uuid
from base64 import urlsafe_b64encode
from types import SimpleNamespace

from dualwrite.clock import Deadline
from dualwrite.kafka.native.produce_state import Limits, ProduceCore
from dualwrite.kafka.native.records import Codec, RecordsBuilder
from dualwrite.kafka.native.sender import Sender
from dualwrite.kafka.opening_messages import ClusterMetadata, DescribedPartition, DescribedTopic


class Posted:
    """Brokers that know one topic, and keep what is posted to them."""

    def __init__(self, topic_id):
        self.topic_id = topic_id
        self.posted = []

    def metadata(self, topics, _):
        leader = DescribedPartition(partition_index=0, leader_id=1, leader_epoch=0, replicas=1, in_sync=1)
        return ClusterMetadata((), "cluster", [DescribedTopic(0, name, self.topic_id, [leader], 0) for name in topics])

    def post(self, node, request, done):
        self.posted.append((node, request, done))

    def serve(self, seconds):
        pass


def test_a_produce_request_carries_the_brokers_wait_and_the_topics_id():
    brokers = Posted(uuid.uuid4().bytes)
    sender = Sender(brokers, "tx")
    for _ in range(2):  # the topic is made again between two transactions
        core = ProduceCore(Limits(replicas_s=0.25, linger_s=0), lambda: RecordsBuilder(Codec(), limit_bytes=1000))
        sender.begin((7, 1), core)
        sender.topic("t", Deadline(5), fresh=True)
        core.append(("t", 0), b"v", None, (), 0, now=0.0)
        sender.pump()
        [(node, request, done)] = brokers.posted
        assert (node, request.transactional_id) == (1, "tx")
        [(topic, [(number, _)])] = request.batches
        assert (topic.name, topic.topic_id, number) == ("t", brokers.topic_id, 0)
        assert (250).to_bytes(4, "big") in request.frame(12, 1, SimpleNamespace(flexible_head=b""))
        assert sender.topic_ids == {"t": urlsafe_b64encode(brokers.topic_id).decode().rstrip("=")}
        done({("t", 0): (0, 9)})
        assert [one.base_offset for one in sender.delivered] == [9]
        brokers.posted.clear()
        brokers.topic_id = uuid.uuid4().bytes
