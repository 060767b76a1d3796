"""The clock goes on while the machine is suspended, as the brokers' clocks do."""

import time
from types import SimpleNamespace

import pytest

from dualwrite import clock as deadline
from dualwrite.clock import Deadline, GrowingPause, now_s, running_on


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no such clock on this system")
def test_a_deadline_passes_while_the_machine_is_suspended(monkeypatch):
    suspended_s = 0.0
    real = time.clock_gettime

    def clock_gettime(clock):
        return real(clock) + (suspended_s if clock == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(deadline.time, "clock_gettime", clock_gettime)
    with running_on(SimpleNamespace(monotonic=deadline._system_clock(), sleep=time.sleep)):
        began, an_hour, two_hours = now_s(), Deadline(3600), Deadline(7200)
        suspended_s = 3700.0
        assert an_hour.expired
        assert 0 < two_hours.remaining_s() < 3600
        assert now_s() - began >= 3700


def test_it_is_the_systems_clock_for_time_since_its_start():
    if hasattr(time, "CLOCK_BOOTTIME"):
        assert time.clock_gettime(time.CLOCK_BOOTTIME) <= now_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)
    else:
        assert now_s() <= now_s()


class Sleeps:
    """A clock on which only sleeping takes time."""

    def __init__(self):
        self.slept = []

    def monotonic(self):
        return sum(self.slept)

    def sleep(self, seconds, /):
        self.slept.append(seconds)


def test_pauses_grow_up_to_the_longest_and_end_with_the_deadline():
    with running_on(clock := Sleeps()):
        within, between = Deadline(20), GrowingPause(first_s=1, longest_s=6)
        for _ in range(6):
            between.wait(within)
        between.wait()
    assert clock.slept == [1, 2, 4, 6, 6, 1, 6]
