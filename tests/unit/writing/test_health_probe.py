"""Questions that a thread in the background asks now and then."""

import threading

import pytest
from harness.patience import wait_until

from dualwrite import Unavailable
from dualwrite.writing import health
from dualwrite.writing.health import Probe, SeldomAsked


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(health, "now_s", clock)
    return clock


def test_one_question_runs_at_a_time_and_the_next_begins_no_sooner_than_its_time(clock):
    asked, go_on = threading.Semaphore(0), threading.Event()
    count = []

    def ask():
        count.append(1)
        asked.release()
        go_on.wait(60)

    one = Probe("asks", ask, every_s=30)
    one.start()
    assert asked.acquire(timeout=60)
    clock.now += 100
    one.start()  # it still runs
    go_on.set()
    wait_until(lambda: one._next_at == clock.now + 30)
    one.start()
    clock.now += 29.9
    one.start()
    assert len(count) == 1
    clock.now += 0.1
    one.start()
    assert asked.acquire(timeout=60)


def test_the_last_answer_is_kept_until_it_is_old_and_errors_are_passed_on(clock):
    answers, errors, done = [7.0], [], threading.Semaphore(0)

    def ask():
        try:
            if not answers:
                raise Unavailable("no answer")
            return answers.pop()
        finally:
            done.release()

    look = SeldomAsked("asks", ask, errors.append)
    assert look() is None  # the first look has it asked
    assert done.acquire(timeout=60)
    wait_until(lambda: look() == 7.0)
    wait_until(lambda: look._probe._next_at == clock.now + health.EVERY_S)
    clock.now += 180
    assert look() == 7.0
    assert done.acquire(timeout=60)
    wait_until(lambda: errors)
    assert look() == 7.0
    clock.now += 0.1
    assert look() is None
