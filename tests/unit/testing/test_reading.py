"""Asking for the ends of a topic, without a broker."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from dualwrite.testing import checker


@pytest.fixture
def stable_ends(monkeypatch):
    """Asks a broker that refuses the first questions, and then tells an end of 7."""

    def ask(*refusals, timeout_s=60.0):
        left = list(refusals)

        def list_offsets(*_, **__):
            answer = Future()
            if left:
                answer.set_exception(KafkaException(KafkaError(left.pop(0))))
            else:
                answer.set_result(SimpleNamespace(offset=7))
            return {TopicPartition("events", 0): answer}

        topic = SimpleNamespace(error=None, partitions={0: None})
        admin = SimpleNamespace(
            list_topics=lambda *_, **__: SimpleNamespace(topics={"events": topic}), list_offsets=list_offsets
        )
        monkeypatch.setattr(checker, "AdminClient", lambda _config: admin)
        return checker.stable_ends({}, "events", timeout_s=timeout_s)

    return ask


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
    ],
)
def test_a_partition_whose_leader_is_not_known_yet_or_has_changed_is_asked_again(stable_ends, code):
    assert stable_ends(code, code) == {0: 7}


@pytest.mark.parametrize(
    ("code", "timeout_s"), [(KafkaError.NOT_LEADER_FOR_PARTITION, 0), (KafkaError.TOPIC_AUTHORIZATION_FAILED, 60)]
)
def test_another_refusal_or_one_at_the_deadline_is_raised(stable_ends, code, timeout_s):
    with pytest.raises(KafkaException) as raised:
        stable_ends(code, timeout_s=timeout_s)
    assert raised.value.args[0].code() == code
