"""A call that is given up at a deadline although its function does not return."""

import sys
import threading
import weakref

import pytest

from dualwrite.clock import Deadline
from dualwrite.kafka.librdkafka.handle import BoundedCaller, NoAnswer

LONG_S = 30.0


def test_one_whose_making_was_interrupted_is_collected_silently(monkeypatch):
    noise = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    del (_ := [BoundedCaller.__new__(BoundedCaller)])[0]
    assert noise == []


@pytest.fixture
def caller():
    return BoundedCaller("bounded")


def test_what_the_function_returns_is_returned(caller):
    assert caller.call(lambda: 42, Deadline(LONG_S)) == 42
    assert caller.call(lambda: None, Deadline(LONG_S)) is None


def test_what_the_function_raises_is_raised_and_the_next_call_works(caller):
    error = KeyError("x")

    def fail():
        raise error

    with pytest.raises(KeyError) as raised:
        caller.call(fail, Deadline(LONG_S))
    assert raised.value is error
    assert caller.call(lambda: 1, Deadline(LONG_S)) == 1


def test_a_function_that_hangs_is_left_behind_and_calls_wait_behind_it(caller):
    resume = threading.Event()
    with pytest.raises(NoAnswer):
        caller.call(resume.wait, Deadline(0.01))
    with pytest.raises(NoAnswer):
        caller.call(lambda: 1, Deadline(0.01))
    resume.set()
    assert caller.call(lambda: 2, Deadline(LONG_S)) == 2


def test_calls_run_on_one_other_thread(caller):
    threads = {caller.call(threading.current_thread, Deadline(LONG_S)) for _ in range(3)}
    assert len(threads) == 1
    [thread] = threads
    assert thread is not threading.current_thread()
    assert thread.daemon


def test_finish_ends_the_thread(caller):
    thread = caller.call(threading.current_thread, Deadline(LONG_S))
    assert caller.finish(lambda: "last", LONG_S) == "last"
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_last_function_that_takes_too_long_is_done_later(caller):
    resume, done = threading.Event(), threading.Event()

    def last():
        resume.wait()
        done.set()

    with pytest.raises(NoAnswer):
        caller.finish(last, 0.01)
    resume.set()
    assert done.wait(LONG_S)


def test_a_caller_that_is_dropped_ends_its_thread():
    caller = BoundedCaller("dropped")
    thread = caller.call(threading.current_thread, Deadline(LONG_S))
    dropped = weakref.ref(caller)
    del caller
    assert dropped() is None
    thread.join(LONG_S)
    assert not thread.is_alive()
