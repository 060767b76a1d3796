"""When Kafka counts as silent, and what ends that."""

from datetime import datetime, timezone

import pytest

from dualwrite.protocol.process import KNOCK_S, SILENT_S, SUSPECT_S, Breaker, Silence

ASKED = Breaker().missing(10.0, "a flush")
PROBED = ASKED.probing(10.0 + SUSPECT_S)
SILENT = PROBED.judged(10.0 + SILENT_S)


def test_kafka_is_silent_once_neither_a_lane_nor_the_background_has_an_answer():
    assert not PROBED.judged(10.0 + SILENT_S - 0.1).silent
    assert SILENT.silent


def test_without_a_question_of_the_background_it_is_not_silent_however_long_a_lane_waits():
    assert not ASKED.judged(1000.0).silent
    assert not ASKED.probing(999.9).judged(1000.0).silent  # which has only just been asked
    assert not Breaker(probed_s=5.0).missing(10.0, "a flush").judged(1000.0).silent  # which was asked before


def test_the_background_asks_after_a_second_and_then_each_second():
    assert not Breaker().must_probe(1000.0)
    assert not ASKED.must_probe(10.0 + SUSPECT_S - 0.1)
    assert ASKED.must_probe(10.0 + SUSPECT_S)
    assert not PROBED.must_probe(10.0 + 2 * SUSPECT_S - 0.1)
    assert PROBED.must_probe(10.0 + 2 * SUSPECT_S)
    assert SILENT.probing(50.0).must_probe(51.0)


def test_two_refusals_by_all_brokers_in_a_row_show_it_too():
    once = ASKED.knocked(10.2, refused=True)
    assert not once.judged(10.3).silent
    assert once.knocked(10.4, refused=True).judged(10.4).silent
    assert not once.knocked(10.4, refused=False).knocked(10.6, refused=True).judged(10.6).silent
    assert not once.answered(10.3).missing(10.35, "a flush").knocked(10.4, refused=True).judged(10.5).silent


def test_a_refusal_from_before_the_question_shows_nothing():
    assert not ASKED.knocked(9.8, refused=True).knocked(9.9, refused=True).judged(10.5).silent
    assert not Breaker().knocked(9.0, refused=True).knocked(9.5, refused=True).judged(9.5).silent


def test_the_background_knocks_soon_after_the_question_again_after_a_refusal_and_seldom_otherwise():
    assert not Breaker().must_knock(1000.0)
    assert not ASKED.must_knock(10.0 + KNOCK_S - 0.01)
    assert ASKED.must_knock(10.0 + KNOCK_S)
    assert ASKED.knocked(10.2, refused=True).must_knock(10.3)
    assert not ASKED.knocked(10.2, refused=False).must_knock(10.2 + SUSPECT_S - 0.01)
    assert ASKED.knocked(10.2, refused=False).must_knock(10.2 + SUSPECT_S)
    assert not SILENT.must_knock(1000.0)


@pytest.mark.parametrize("breaker", [ASKED, PROBED, SILENT])
def test_an_answer_after_the_question_ends_it(breaker):
    heard = breaker.answered(10.5)
    assert not heard.silent
    assert not heard.judged(1000.0).silent
    assert not heard.must_probe(1000.0)
    assert heard.missing(10.0, "a flush") == heard  # the lane that still waits for it shows nothing new


@pytest.mark.parametrize("at_s", [9.0, 10.0])
def test_an_earlier_answer_does_not(at_s):
    assert SILENT.answered(at_s).silent
    assert SILENT.answered(at_s).asked == (10.0, "a flush")


def test_it_is_silent_since_the_oldest_question_without_an_answer():
    assert ASKED.missing(8.0, "a commit").missing(9.0, "a topic").asked == (8.0, "a commit")
    assert ASKED.answered(12.0).missing(11.0, "a topic").missing(13.0, "a commit").asked == (13.0, "a commit")


def test_a_silence_that_goes_on_does_not_begin_anew():
    assert SILENT.judged(1000.0) == SILENT


def test_the_error_names_kafka_its_address_and_since_when():
    silence = Silence("b:9092", datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc), 10.0, "a flush")
    error = silence.error("orders")
    assert (error.silent, error.outcome, error.transactional_id) == (True, "none", "orders")
    assert "Kafka at b:9092 has not answered since 03:04:05 UTC (a flush)" in str(error)
