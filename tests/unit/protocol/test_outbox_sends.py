"""How waiting messages are sent: how many at once, when the last send turns the mode back, and how a refused one is found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite import ConfigurationError, Fenced, TransactionAborted, Unavailable
from dualwrite.kafka.error_codes import Code, Phase, advice_on, error_for
from dualwrite.protocol.message import Unsendable
from dualwrite.protocol.outbox import (
    FIRST_ROWS,
    LAST_ROWS,
    MOST_ROWS,
    Round,
    Sends,
    pause_after,
    refusal_behind,
)


def at_work(**known):
    return Sends(**({"turns_back": True} | known))


def test_the_first_send_is_small():
    assert at_work().next() == Round(FIRST_ROWS)


def test_sends_grow_with_the_backlog_up_to_a_limit():
    sends, sizes = at_work(), []
    for _ in range(10):
        made = sends.next()
        sizes.append(made.rows)
        sends = sends.sent(made, made.rows, seconds=0.1)
    assert sizes[:3] == [FIRST_ROWS, 2 * FIRST_ROWS, 4 * FIRST_ROWS]
    assert sizes[-1] == MOST_ROWS


def test_a_send_that_takes_long_makes_the_next_one_smaller():
    sends = at_work(rows=MOST_ROWS)
    assert sends.sent(sends.next(), MOST_ROWS, seconds=5.0).next() == Round(MOST_ROWS // 2)


def test_a_send_that_failed_makes_the_next_one_smaller_and_never_empty():
    sends = at_work()
    for _ in range(30):
        sends = sends.failed()
    assert sends.next() == Round(1)


def test_the_last_send_comes_once_little_is_left():
    sends = at_work(rows=4000)
    made = sends.next()
    assert sends.sent(made, 4000, seconds=0.1).next().last is False
    assert sends.sent(made, LAST_ROWS + 1, seconds=0.1).next().last is False
    assert sends.sent(made, 3, seconds=0.1).next() == Round(LAST_ROWS, last=True)
    assert sends.sent(made, 0, seconds=0.1).next() == Round(LAST_ROWS, last=True)


def test_messages_gather_after_a_small_send_while_blocks_commit_and_one_that_comes_alone_goes_at_once():
    sends = at_work()
    assert sends.rest_s == 0
    alone = sends.sent(sends.next(), 3, seconds=0.004)
    assert alone.rest_s == 0
    busy = alone.sent(sends.next(), 3, seconds=0.004, news=True)
    assert 0 < busy.rest_s <= 0.05
    assert busy.sent(sends.next(), FIRST_ROWS, seconds=0.004, news=True).rest_s == 0
    assert busy.sent(sends.next(), 3, seconds=0.004).rest_s == 0


def test_bytes_that_fill_a_send_count_as_a_full_one():
    sends = at_work()
    assert sends.sent(sends.next(), 3, seconds=0.1, full=True).next() == Round(2 * FIRST_ROWS)


def test_a_writer_whose_messages_always_wait_never_turns_back():
    sends = at_work(turns_back=False)
    assert sends.sent(sends.next(), 0, seconds=0.1).next().last is False


def test_a_last_send_that_was_full_was_not_the_last_one():
    sends = at_work(caught_up=True)
    made = sends.next()
    assert made.last
    assert sends.sent(made, LAST_ROWS, seconds=0.1).next().last is False


def test_a_lock_that_was_not_free_is_asked_for_again_after_a_growing_pause():
    sends, pauses = at_work(caught_up=True), []
    for _ in range(8):
        sends = sends.not_locked()
        assert sends.next().last is False
        pauses.append(sends.lock_pause_s)
        sends = sends.sent(sends.next(), 1, seconds=0.01)
        assert sends.next(lock_due=False).last is False
        assert sends.next(lock_due=True).last is True
    assert pauses == sorted(pauses)
    assert sum(pauses[:3]) < 1.0  # back within a second, if the lock is free within three tries
    assert sends.sent(Round(LAST_ROWS, last=True), 0, seconds=0.01).lock_pause_s == 0.0


class Kafka:
    """Takes the first rows of a list, or refuses them if one of them is among those that it refuses."""

    def __init__(self, waiting, refused):
        self.waiting = list(waiting)
        self.refused = refused
        self.sent, self.aside, self.tries = [], [], 0

    def drain(self, sends):
        while self.waiting:
            self.tries += 1
            made = sends.next()
            rows = self.waiting[: made.rows]
            if self.refused.isdisjoint(rows):
                del self.waiting[: len(rows)]
                self.sent += rows
                sends = sends.sent(made, len(rows), seconds=0.01)
                continue
            sends = sends.refused(len(rows))
            if sends.found:
                self.aside.append(self.waiting.pop(0))
                sends = sends.moved_aside()


@given(st.integers(1, 400), st.sets(st.integers(0, 399), max_size=12), st.booleans())
def test_exactly_the_refused_messages_are_moved_aside_and_the_others_keep_their_order(count, refused, turns_back):
    kafka = Kafka(range(count), refused)
    kafka.drain(at_work(turns_back=turns_back))
    assert kafka.aside == sorted(number for number in refused if number < count)
    assert kafka.sent == [number for number in range(count) if number not in refused]


def test_one_refused_message_of_many_is_found_by_halving():
    kafka = Kafka(range(16_384), {10_000})
    kafka.drain(at_work(rows=16_384))
    assert kafka.aside == [10_000]
    assert kafka.tries < 25


def test_pauses_grow_and_never_end():
    pauses = [pause_after(failures) for failures in range(1, 200)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.5
    assert pauses[-1] == 15.0


@pytest.mark.parametrize(
    "code",
    [
        Code.MESSAGE_TOO_LARGE,
        Code.UNKNOWN_TOPIC_OR_PARTITION,
        Code.TOPIC_AUTHORIZATION_FAILED,
        Code.INVALID_RECORD,
        Code.INVALID_TIMESTAMP,
    ],
)
def test_an_answer_about_the_message_is_a_refusal(code):
    error = error_for(advice_on(code), code.name, Phase.DELIVERY, transactional_id="a#outbox", subject="bills")
    topic, why = refusal_behind(error)
    assert topic == "bills"
    assert code.name in why


def test_a_message_that_this_library_refuses_is_one_too_also_behind_another_error():
    refusal = Unsendable("MESSAGE_TOO_LARGE", "the message has 9 bytes").refusal("bills", "a#outbox")
    behind = TransactionAborted("the block continued after an error")
    behind.__cause__ = refusal
    assert refusal_behind(behind)[0] == "bills"


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("no answer"),
        Fenced("another owner"),
        TransactionAborted("open for too long", retryable=False),
        ConfigurationError("wrong password"),
        error_for(advice_on(Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), "", Phase.INIT, transactional_id="a#outbox"),
        error_for(advice_on(Code.CLUSTER_AUTHORIZATION_FAILED), "", Phase.DELIVERY, transactional_id="a", subject="b"),
        error_for(advice_on(Code.NOT_ENOUGH_REPLICAS), "", Phase.DELIVERY, transactional_id="a", subject="b"),
        error_for(advice_on(Code.UNKNOWN_TOPIC_ID), "", Phase.DELIVERY, transactional_id="a", subject="b"),
    ],
)
def test_silence_and_what_is_not_the_messages_fault_are_no_refusals(error):
    assert refusal_behind(error) is None
