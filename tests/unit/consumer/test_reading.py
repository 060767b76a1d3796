"""The thread that polls, on a consumer that answers as told: rebalances, positions set back, and a look at stalled partitions."""

import threading

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from dualwrite.consumer import partitions as module
from dualwrite.consumer.partitions import Partitions, Reading
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.protocol.findings import standby

from .messages import Read, read

AT = ("input", 0)


class Answering:
    """confluent-kafka's consumer; each poll does the next thing of ``polls``, each consume of ``consumes``."""

    def __init__(self, settings):
        self.settings = settings
        self.polls, self.consumes, self.did = [], [], []
        self.end = 10
        self.at = 10

    def subscribe(self, _topics, **callbacks):
        self.callbacks = callbacks

    def call(self, name, *partitions):
        self.callbacks[f"on_{name}"](self, [TopicPartition(*one) for one in partitions])

    def poll(self, _):
        return self.polls.pop(0)() if self.polls else None

    def consume(self, *_):
        return self.consumes.pop(0)() if self.consumes else []

    def assign(self, partitions):
        self.did.append(("assign", [(one.topic, one.partition, one.offset) for one in partitions]))

    def incremental_assign(self, partitions):
        self.did.append(("incremental_assign", [(one.topic, one.partition, one.offset) for one in partitions]))

    def seek(self, one):
        self.did.append(("seek", (one.topic, one.partition, one.offset)))

    def pause(self, partitions):
        self.did.append(("pause", len(partitions)))

    def resume(self, partitions):
        self.did.append(("resume", len(partitions)))

    def position(self, _):
        return [TopicPartition(*AT, self.at)]

    def get_watermark_offsets(self, _, **_cached):
        return 0, self.end


class InMemory:
    """Offsets in memory."""

    def __init__(self):
        self.starts = None
        self.at = {}
        self.failures = []

    def start(self, _consumer, _made):
        if self.failures:
            raise self.failures.pop()
        return self.starts

    def membership(self, _consumer):
        pass

    def committed(self, _consumer, asked):
        if self.failures:
            raise self.failures.pop()
        return {one.name: self.at.get(one.name, one.next_offset) for one in asked}


class Settling:
    def __init__(self):
        self.calls = 0

    def settle(self):
        self.calls += 1


class Member:
    def __init__(self, settings=None):
        self.partitions = Partitions(10, 0.0, 1)
        self.offsets, self.peers, self.stop = InMemory(), Settling(), threading.Event()
        self.reading = Reading(settings or {}, self.partitions, self.offsets, self.peers, self.stop)
        self.consumer = self.reading._consumer
        self.reading.subscribe(["input"])

    def read(self, *batches):
        for first, *more in batches:
            self.consumer.polls.append(lambda first=first: first)
            self.consumer.consumes.append(lambda more=more: more)
            self.reading.poll()


@pytest.fixture
def member(monkeypatch):
    monkeypatch.setattr(module, "Consumer", Answering)
    monkeypatch.setattr(module, "pause_s", lambda _: 0.0)
    return Member


def test_peers_are_settled_before_the_consumer_asks_for_offsets(member):
    found = member()
    found.consumer.call("assign", AT)
    assert found.peers.calls == 1
    assert found.consumer.did == [], "the consumer assigns by itself, where the group has committed"
    assert [one.name for one in found.partitions.all()] == [AT]
    found.consumer.call("assign")
    assert found.peers.calls == 1


@pytest.mark.parametrize(("settings", "verb"), [({}, "assign"), ({"group.protocol": "consumer"}, "incremental_assign")])
def test_rows_say_where_to_begin(member, settings, verb):
    found = member(settings)
    found.offsets.starts = {AT: 7, ("input", 1): OFFSET_INVALID}
    found.consumer.call("assign", AT, ("input", 1))
    assert found.consumer.did == [(verb, [("input", 0, 7), ("input", 1, OFFSET_INVALID)])]


@pytest.mark.parametrize("error", [Unavailable("no database"), standby(is_standby=True).as_error()])
def test_a_database_out_of_reach_is_waited_for_when_partitions_come(member, error):
    found = member()
    found.offsets.starts = {AT: 7}
    found.offsets.failures = [error] * 3
    found.consumer.call("assign", AT)
    assert found.consumer.did == [("assign", [("input", 0, 7)])]


def test_messages_read_across_a_rebalance_are_read_again(member):
    found = member()
    found.consumer.polls.append(lambda: Read(5))

    def rebalance():
        found.consumer.call("assign", AT)
        return read(2, begin=6)

    found.consumer.consumes.append(rebalance)
    found.reading.poll()
    [partition] = found.partitions.all()
    assert not partition.waiting
    found.reading.poll()
    assert found.consumer.did == [("seek", ("input", 0, 5))]
    assert not partition.rewind


@pytest.mark.parametrize(
    "error", [KafkaException(KafkaError(KafkaError._TIMED_OUT)), standby(is_standby=True).as_error()]
)
def test_a_position_is_set_back_once_no_unit_works(member, error):
    found = member()
    found.consumer.call("assign", AT)
    found.read(read(5))
    unit = found.partitions.take()
    found.offsets.at = {AT: 3}
    found.partitions.give_back(unit, rewind=True)
    found.offsets.failures = [error]
    found.reading.poll()
    assert found.consumer.did == [], "without an answer it waits"
    found.reading.poll()
    assert found.consumer.did == [("seek", ("input", 0, 3))]


def test_revoked_and_lost_partitions_take_no_more_messages(member):
    found = member()
    for verb in ("revoke", "lost"):
        found.consumer.call("assign", AT)
        found.read(read(2))
        found.consumer.call(verb, AT)
        assert found.partitions.all() == []
        found.read(read(2))
        assert found.partitions.is_idle


def test_a_stalled_partition_makes_the_member_look_for_dead_peers_again(member, monkeypatch):
    found = member()
    found.consumer.call("assign", AT)
    clock = [0.0]
    monkeypatch.setattr(module, "now_s", lambda: clock[0])
    [partition] = found.partitions.all()
    partition.read_at = 0.0
    found.reading._look_at = 0.0
    looked = []
    found.consumer.at = 4
    for second in range(200):
        clock[0] = float(second)
        before = found.peers.calls
        found.reading.poll()
        if found.peers.calls > before:
            looked.append(second)
    assert looked[0] == 5
    assert len(looked) <= 8, "less and less often"
    found.consumer.at = found.consumer.end
    before = found.peers.calls
    clock[0] = 1000.0
    found.reading.poll()
    assert found.peers.calls == before, "all was read"


class Broken(Read):
    def __init__(self, code, offset=0):
        super().__init__(offset)
        self._error = KafkaError(code)

    def error(self):
        return self._error


def test_what_cannot_be_read_is_raised_and_what_passes_is_not(member):
    found = member()
    found.read([Broken(KafkaError._ALL_BROKERS_DOWN)], [Broken(KafkaError._PARTITION_EOF)])
    for code in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._AUTO_OFFSET_RESET):
        with pytest.raises(ConfigurationError, match="cannot read"):
            found.read([Broken(code)])


def test_full_partitions_are_paused_and_resumed(member):
    found = member()
    found.consumer.call("assign", AT)
    found.read(read(80))
    found.reading.poll()
    assert found.consumer.did == [("pause", 1)]
    while len(found.partitions.all()[0].waiting) >= 10:
        found.partitions.give_back(found.partitions.take(), rewind=False)
    found.reading.poll()
    assert found.consumer.did == [("pause", 1), ("resume", 1)]


def test_a_partition_that_went_while_it_was_paused_is_resumed_when_it_comes_back(member):
    found = member()
    found.consumer.call("assign", AT)
    found.read(read(80))
    found.reading.poll()
    found.consumer.call("revoke", AT)
    found.reading.poll()
    assert found.consumer.did == [("pause", 1)]
    found.consumer.call("assign", AT)
    found.reading.poll()
    found.reading.poll()
    assert found.consumer.did == [("pause", 1), ("resume", 1)]


def test_the_lag_is_what_is_behind_the_last_offset_written(member):
    found = member()
    found.consumer.call("assign", AT)
    assert found.reading.lag() == {}
    found.read(read(3, begin=4))
    assert found.reading.lag() == {AT: 6}


def test_a_partition_that_was_at_its_end_when_it_was_assigned_has_no_lag(member):
    found = member()
    assert found.consumer.settings["enable.partition.eof"]
    found.consumer.call("assign", AT)
    found.consumer.polls.append(lambda: Broken(KafkaError._PARTITION_EOF, 10))
    assert not found.reading.poll(), "no message came"
    assert found.reading.lag() == {AT: 0}
    found.consumer.end = 14
    assert found.reading.lag() == {AT: 4}
    [partition] = found.partitions.all()
    assert partition.next_offset is None, "an end is not an offset to commit, or to go back to"
    found.read([*read(3, begin=10), Broken(KafkaError._PARTITION_EOF, 14)])
    assert found.reading.lag() == {AT: 4}


def test_an_end_does_not_hide_that_another_partition_is_stalled(member, monkeypatch):
    found = member()
    found.consumer.call("assign", AT)
    clock = [0.0]
    monkeypatch.setattr(module, "now_s", lambda: clock[0])
    [partition] = found.partitions.all()
    partition.read_at = 0.0
    found.reading._look_at = 0.0
    found.consumer.at = 4
    before = found.peers.calls
    for second in range(7):
        clock[0] = float(second)
        found.read([Broken(KafkaError._PARTITION_EOF, 3)])
    assert found.peers.calls == before + 1


def test_a_partition_that_was_at_its_end_when_it_was_assigned_is_not_stalled_until_the_end_moves(member, monkeypatch):
    found = member()
    found.consumer.call("assign", AT)
    clock = [0.0]
    monkeypatch.setattr(module, "now_s", lambda: clock[0])
    [partition] = found.partitions.all()
    partition.read_at = 0.0
    found.reading._look_at = 0.0
    found.consumer.at = OFFSET_INVALID
    before = found.peers.calls
    clock[0] = 1000.0
    found.reading.poll()
    assert found.peers.calls == before + 1, "it has shown neither a message nor its end"
    found.read([Broken(KafkaError._PARTITION_EOF, 10)])
    clock[0] = 2000.0
    found.reading.poll()
    assert found.peers.calls == before + 1, "nothing is there to be read"
    found.consumer.end = 11
    clock[0] = 3000.0
    found.reading.poll()
    assert found.peers.calls == before + 2
