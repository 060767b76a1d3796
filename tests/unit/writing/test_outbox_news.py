"""What blocks and the sender of a writer tell each other: something waits, the mode has changed, the gate is closed."""

import logging
import threading

import pytest

from dualwrite.clock import now_s
from dualwrite.interfaces import Observer, OutboxNews
from dualwrite.writing.outbox import Outbox


class Counting(Observer):
    def __init__(self):
        self.news = []

    def outbox(self, writer, news, count):
        self.news.append((writer, news, count))


@pytest.fixture
def observer():
    return Counting()


@pytest.fixture
def outbox(observer):
    return Outbox("orders", observer)


def test_any_number_of_commits_wakes_the_sender_once(outbox):
    for _ in range(3):
        outbox.wake()
    assert outbox.wait(0.0)
    assert not outbox.wait(0.0)


def test_a_commit_while_the_sender_is_at_work_wakes_it_again(outbox):
    outbox.wake()
    assert outbox.wait(0.0)
    outbox.wake()
    assert outbox.wait(0.0)


def test_each_change_of_the_mode_is_logged_once(outbox, observer, caplog):
    with caplog.at_level(logging.WARNING):
        outbox.note_mode(later=False, why="read")
        outbox.note_later("Kafka does not answer")
        outbox.note_later("Kafka does not answer")
        outbox.note_mode(later=True, why="read")
        outbox.note_mode(later=False, why="12 messages were sent")
    assert [record.message for record in caplog.records] == [
        "orders: messages wait in the database from now on, and are sent later: Kafka does not answer",
        "orders: messages go to Kafka directly again: 12 messages were sent",
    ]
    assert ("orders", OutboxNews.FELL_BACK, 1) in observer.news


def test_falling_back_wakes_the_sender(outbox):
    outbox.note_later("Kafka does not answer")
    assert outbox.wait(0.0)
    assert outbox.state.later
    assert outbox.state.since is not None


def test_what_waits_is_shown_with_the_age_of_the_oldest(outbox):
    outbox.note_waiting(3, 100, 60.0)
    assert (outbox.state.rows, outbox.state.size) == (3, 100)
    assert now_s() - outbox.state.oldest_at >= 60
    outbox.note_waiting(0, 0, None)
    assert outbox.state.oldest_at is None


def test_an_open_gate_holds_nobody_back(outbox):
    outbox.pass_gate()


def test_a_block_waits_at_the_closed_gate_until_it_opens(outbox):
    passed, waits = threading.Event(), threading.Event()

    def block():
        waits.set()
        outbox.pass_gate()
        passed.set()

    with outbox.gate_closed():
        thread = threading.Thread(target=block)
        thread.start()
        assert waits.wait(30)
        assert not passed.is_set()
    assert passed.wait(30)
    thread.join()


def test_the_gate_holds_back_nobody_for_long(outbox):
    with outbox.gate_closed():
        outbox.pass_gate()


def test_news_that_nobody_has_taken_are_seen_without_taking_them(outbox):
    assert not outbox.has_news
    outbox.wake()
    assert outbox.has_news
    assert outbox.wait(0.0)
    assert not outbox.has_news
