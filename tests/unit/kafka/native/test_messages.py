"""The Produce request says what the settings say; the rest of it is shown on real brokers."""

import uuid
from base64 import urlsafe_b64encode

from dualwrite.kafka.native.messages import produce
from dualwrite.kafka.native.produce_state import Limits, ProduceCore
from dualwrite.kafka.native.records import Codec, RecordsBuilder

TOPIC = uuid.uuid4()


def test_a_produce_request_carries_the_brokers_wait_and_asks_all_replicas():
    core = ProduceCore(Limits(replicas_s=0.25), lambda: RecordsBuilder(Codec(), limit_bytes=1000))
    core.learn("t", {0: 1})
    core.append(("t", 0), b"v", None, (), 0, now=0.0)
    [request] = core.requests(0.0, flush=True)
    topic_ids = {"t": urlsafe_b64encode(TOPIC.bytes).decode().rstrip("=")}
    message = produce("tx", (7, 1), request, topic_ids, core.limits.replicas_s)
    assert (message.timeout_ms, message.acks, message.transactional_id) == (250, -1, "tx")
    assert [(topic.name, topic.topic_id) for topic in message.topic_data] == [("t", TOPIC)]
