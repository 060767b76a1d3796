"""The question about the ends of many transactions that nobody waits for: what counts as an answer, and for whom."""

from __future__ import annotations

import pytest
from kafka.errors import NotLeaderForPartitionError, TopicAuthorizationFailedError

from dualwrite.kafka.brokers import NotYet
from dualwrite.kafka.cluster import Leader, Topic
from dualwrite.kafka.messages import ProducerState
from dualwrite.kafka.transaction_ends import PostedQuestion
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import ShownProducer

T, U = ("t", 0), ("t", 1)
NOT_LEADER, NO_RIGHT = NotLeaderForPartitionError.errno, TopicAuthorizationFailedError.errno


class Brokers:
    """Keeps what is posted; answers come when a test gives them.

    Attributes:
        posted: For each request, the broker and what takes its answer.
    """

    def __init__(self):
        self.posted = []
        self._arrived = []

    def post(self, node, request, done, **_):
        self.posted.append((node, request, done))

    def answer(self, number, response):
        self._arrived.append((self.posted[number][2], response))

    def serve(self):
        arrived, self._arrived = self._arrived, []
        for done, response in arrived:
            done(response)


class Topics:
    def __init__(self, **topics):
        self._known = topics
        self.forgotten = []

    def known(self, name):
        return self._known.get(name)

    def forget(self, names):
        self.forgotten += names


@pytest.fixture
def brokers():
    return Brokers()


@pytest.fixture
def topics():
    return Topics(t=Topic("id", {0: Leader(1, 5), 1: Leader(1, 6)}))


def state(producer_id, epoch, *partitions, topic_id="id"):
    offsets = dict.fromkeys(partitions or [T], 5)
    return PreparedTxnState.native(producer_id, epoch, 1, offsets, dict.fromkeys(("t", "new"), topic_id))


def described(*partitions, code=0):
    """Each partition with its producers: id, epoch, and where the open transaction began, or -1."""
    return {
        ("t", number): (code, [ProducerState(one, epoch, 0, 0, 0, start) for one, epoch, start in producers])
        for number, producers in partitions
    }


def led(*numbers, code=0):
    return {("t", number): (code, 9) for number in numbers}


def test_one_question_to_a_leader_is_about_all_producers_and_each_gets_its_own_rows(brokers, topics):
    asked = PostedQuestion(brokers, topics, [state(7, 3, T, U), state(8, 0, T)], [])
    assert [node for node, _, _ in brokers.posted] == [1, 1]
    assert not asked.has_come()
    brokers.answer(0, described((0, [(7, 4, -1), (8, 0, 12)]), (1, [(7, 4, -1)])))
    assert not asked.has_come(), "whether it is the leader is not known yet"
    assert asked.native == [{}, {}]
    brokers.answer(1, led(0, 1))
    assert asked.has_come()
    assert asked.native == [{T: ShownProducer(4), U: ShownProducer(4)}, {T: ShownProducer(0, 12)}]


def test_an_answer_of_a_former_leader_does_not_count_and_the_leader_is_looked_up_again(brokers, topics):
    asked = PostedQuestion(brokers, topics, [state(7, 3)], [])
    brokers.answer(0, described((0, [(7, 4, -1)])))
    brokers.answer(1, led(0, code=NOT_LEADER))
    assert asked.has_come()
    assert asked.native == [{}]
    assert topics.forgotten == ["t"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_broker_that_does_not_answer_shows_nothing(brokers, topics, number):
    asked = PostedQuestion(brokers, topics, [state(7, 3)], [])
    brokers.answer(number, NotYet("gone"))
    brokers.answer(1 - number, [described((0, [(7, 4, -1)])), led(0)][1 - number])
    assert asked.has_come()
    assert asked.native == [{}]


def test_a_partition_in_which_the_producer_is_not_known_shows_nothing(brokers, topics):
    """It may be one of a new topic of that name."""
    asked = PostedQuestion(brokers, topics, [state(7, 3)], [])
    brokers.answer(0, described((0, [(8, 4, -1)])))
    brokers.answer(1, led(0))
    assert asked.has_come()
    assert asked.native == [{}]


def test_a_right_that_is_missing_shows_nothing_and_raises_nothing_in_whoever_takes_the_answer(brokers, topics):
    asked = PostedQuestion(brokers, topics, [state(7, 3)], [])
    brokers.answer(0, described((0, []), code=NO_RIGHT))
    brokers.answer(1, led(0))
    assert asked.has_come()
    assert asked.native == [{}]


@pytest.mark.parametrize(
    "unknown", [state(7, 3, ("new", 0)), state(7, 3, ("t", 2)), state(7, 3, topic_id="former")], ids=str
)
def test_where_no_leader_is_known_or_the_topic_is_another_one_nobody_is_asked(brokers, topics, unknown):
    asked = PostedQuestion(brokers, topics, [unknown], [])
    assert not asked.is_sent
    assert brokers.posted == []
    assert asked.native == [{}]
