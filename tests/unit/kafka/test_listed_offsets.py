"""Asking for offsets with a client that has cached old leaders, without a broker. tests/integration/test_leader_epochs.py has one."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from dualwrite.clock import Deadline
from dualwrite.kafka.librdkafka.handle import list_offsets
from dualwrite.state.changelog import Changelog
from dualwrite.units.log import PartitionLogs
from dualwrite.units.records import Offsets

NAME = "events", 0


class Caching:
    """A client that is refused until its metadata is refreshed, as librdkafka is once a leader epoch has risen."""

    def __init__(self, *refusals):
        self.refusals = list(refusals)
        self.refreshed = 0

    def list_offsets(self, wanted, **_):
        answer = Future()
        if self.refreshed < len(self.refusals):
            answer.set_exception(KafkaException(KafkaError(self.refusals[self.refreshed])))
        else:
            answer.set_result(SimpleNamespace(offset=7))
        return dict.fromkeys(wanted, answer)

    def list_topics(self, topic, **_):
        assert topic == NAME[0]
        self.refreshed += 1
        if self.refreshed == 1:  # it may fail, too
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


RISEN = KafkaError.FENCED_LEADER_EPOCH, KafkaError._NOENT


def ask(admin):
    found = list_offsets(
        admin, {TopicPartition(*NAME): OffsetSpec.latest()}, IsolationLevel.READ_COMMITTED, timeout_s=1
    )
    return list(found.values())


def test_a_client_that_is_refused_refreshes_its_metadata_before_it_is_asked_again():
    admin = Caching(*RISEN)
    for code in RISEN:
        with pytest.raises(KafkaException) as refused:
            ask(admin)
        assert refused.value.args[0].code() == code
    assert ask(admin) == [7]
    assert admin.refreshed == 2


def test_another_refusal_is_raised_as_it_is():
    admin = Caching(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(KafkaException):
        ask(admin)
    assert admin.refreshed == 0


def test_a_changelog_is_read_on_after_its_leaders_epoch_has_risen(monkeypatch):
    log = Changelog({"bootstrap.servers": "localhost:1"}, *NAME)
    monkeypatch.setattr(log, "_admin", Caching(*RISEN))
    assert log._stable_end(Deadline(30), None, lambda: None) == 7


def test_a_log_of_units_is_read_on_after_its_leaders_epoch_has_risen(monkeypatch):
    logs = PartitionLogs({"bootstrap.servers": "localhost:1"})
    monkeypatch.setattr(logs, "_admin", Caching(*RISEN))
    assert logs.settled_offsets([NAME], Deadline(30)) == {NAME: Offsets(7, 7)}
    logs.close()
