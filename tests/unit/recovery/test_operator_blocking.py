"""Open transactions that hold back a consumer: in its topics, and in the offsets of its group."""

import pytest

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.cluster import HELD_BACK_S
from dualwrite.recovery import recover
from dualwrite.recovery.operator import blocking_transactions


class Kafka:
    """A cluster with these topics; keeps the question and answers with it."""

    def __init__(self, topics):
        self.topics = topics
        self.settings = None
        self.closed = 0

    def __call__(self, settings):
        self.settings = settings
        return self

    def partitions_of(self, topics, _deadline):
        return {topic: self.topics[topic] for topic in topics if topic in self.topics}

    def blocking(self, places, _deadline, *, open_for_s):
        return [*sorted(places), open_for_s]

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.closed += 1


@pytest.fixture
def kafka(monkeypatch):
    found = Kafka({"orders": 2, "payments": 1, "__consumer_offsets": 50})
    monkeypatch.setattr(recover, "KafkaCoordinator", found)
    return found


SETTINGS = {"bootstrap.servers": "here:9092"}


def test_all_partitions_of_the_topics_are_asked_about(kafka):
    *places, open_for_s = blocking_transactions(SETTINGS, topics=["orders", "payments"])
    assert places == [("orders", 0), ("orders", 1), ("payments", 0)]
    assert open_for_s == HELD_BACK_S, "owners at work are left out"
    assert kafka.closed == 1


def test_of_a_group_only_the_partition_of_its_offsets_is_asked_about(kafka):
    del kafka
    *places, open_for_s = blocking_transactions(SETTINGS, topics=["payments"], group="a", open_for_s=0.5)
    assert places == [("__consumer_offsets", 97 % 50), ("payments", 0)]
    assert open_for_s == 0.5


def test_where_no_group_has_committed_offsets_yet_nothing_can_hold_them_back(kafka):
    del kafka.topics["__consumer_offsets"]
    assert blocking_transactions(SETTINGS, group="a", open_for_s=1.0) == [1.0]


@pytest.mark.parametrize("group", [None, "a"])
def test_a_topic_that_does_not_exist_is_an_error_and_not_an_empty_answer(kafka, group):
    with pytest.raises(ConfigurationError, match="there is no topic 'refunds', 'returns'"):
        blocking_transactions(SETTINGS, topics=["returns", "orders", "refunds"], group=group)
    assert kafka.closed == 1


def test_settings_that_cannot_work_are_refused(kafka):
    with pytest.raises(ConfigurationError):
        blocking_transactions({}, topics=["orders"])
    assert kafka.settings is None
