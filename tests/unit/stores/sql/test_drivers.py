"""A connection whose answer is overdue is shut; every other one stays as it is."""

import os
import socket
import sys
import threading

import pytest

from dualwrite.stores.sql.drivers import WATCHDOG, Watch, Watchdog


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_wait_ends_when_its_time_is_over(pair):
    ours, _ = pair
    with Watch(Watchdog(), ours.fileno(), 0.05) as watch:
        assert ours.recv(1) == b"", "the wait ends as if the other side had closed"
    assert watch.expired


def test_an_answer_in_time_leaves_the_connection_usable(pair):
    ours, theirs = pair
    dog = Watchdog()
    with Watch(dog, ours.fileno(), 600) as watch:
        theirs.send(b"x")
        assert ours.recv(1) == b"x"
    assert not watch.expired
    theirs.send(b"y")
    assert ours.recv(1) == b"y"


def test_a_wait_whose_making_was_interrupted_is_collected_silently(monkeypatch):
    noise = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    del (_ := [Watch.__new__(Watch)])[0]
    assert noise == []


def test_a_shorter_wait_that_begins_later_ends_first(pair):
    ours, theirs = pair
    dog = Watchdog()
    with Watch(dog, theirs.fileno(), 600) as longer:
        with Watch(dog, ours.fileno(), 0.05) as shorter:
            assert ours.recv(1) == b""
        assert shorter.expired
        assert not longer.expired


def test_a_wait_after_the_thread_had_nothing_to_do_is_watched_too(pair):
    ours, _ = pair
    dog = Watchdog()
    with Watch(dog, ours.fileno(), 0.01):
        pass
    with Watch(dog, ours.fileno(), 0.05):
        assert ours.recv(1) == b""


def test_many_at_once_use_one_thread():
    dog, before = Watchdog(), threading.active_count()
    pairs = [socket.socketpair() for _ in range(20)]

    def wait(ours):
        with Watch(dog, ours.fileno(), 0.05):
            assert ours.recv(1) == b""

    threads = [threading.Thread(target=wait, args=(ours,)) for ours, _ in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert threading.active_count() == before + 1
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


@pytest.mark.filterwarnings("ignore:.*fork")  # of a process with threads: that is what is tried
def test_a_forked_process_watches_by_a_thread_of_its_own(pair):
    ours, theirs = pair
    with Watch(WATCHDOG, theirs.fileno(), 600), WATCHDOG._changed:  # the lock is held in the moment of the fork
        if (child := os.fork()) == 0:
            with Watch(WATCHDOG, ours.fileno(), 0.05) as watch:
                ours.recv(1)
            os._exit(0 if watch.expired else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_peer_sees_the_end_of_a_connection_that_is_closed_after_a_wait(pair):
    """Its session would stay in its transaction, with all locks, as long as anything holds the socket."""
    ours, theirs = pair
    watch = Watch(Watchdog(), ours.fileno(), 600)
    with watch:
        pass
    ours.close()
    theirs.settimeout(10)
    assert theirs.recv(1) == b""


def test_a_wait_that_never_began_holds_nothing(pair):
    ours, theirs = pair
    watch = Watch(Watchdog(), ours.fileno(), 600)
    ours.close()
    del watch
    assert theirs.recv(1) == b""


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_keeps_no_duplicate(pair):
    """Or else the server would not see that its parent has died."""
    ours, theirs = pair
    ends, told = os.pipe()
    with Watch(WATCHDOG, ours.fileno(), 600):
        if (child := os.fork()) == 0:
            ours.close()
            os.close(told)
            os.read(ends, 1)
            os._exit(0)
    ours.close()
    theirs.settimeout(10)
    assert theirs.recv(1) == b"", "the child holds it"
    os.close(told)
    os.close(ends)
    os.waitpid(child, 0)
