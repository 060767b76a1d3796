"""A partition's leader epoch rises while a client has the former one in its cache: the broker has died and come back."""

import pytest
from confluent_kafka import Producer

from dualwrite.clock import Deadline
from dualwrite.state.changelog import Changelog
from dualwrite.testing.checker import stable_ends
from dualwrite.units.log import PartitionLogs
from dualwrite.units.records import Offsets

pytestmark = pytest.mark.thorough


def test_what_was_asked_for_offsets_before_is_asked_again(mortal_kafka):
    topic = mortal_kafka.create_topic("risen", 1, config={"cleanup.policy": "compact"})
    kafka = mortal_kafka.client_config()
    producer = Producer(kafka)
    producer.produce(topic, b"1", b"key")
    producer.flush()
    log, logs = Changelog(kafka, topic, 0), PartitionLogs(kafka)
    for dies in (False, True, True):
        if dies:
            mortal_kafka.kill()
            mortal_kafka.start()
        assert log.describe(Deadline(60), None, lambda: None).end == 1
        assert logs.offsets([(topic, 0)], Deadline(60)) == {(topic, 0): Offsets(0, 1)}
        assert stable_ends(kafka, topic, timeout_s=60) == {0: 1}
    logs.close()
