"""How many units may wait, and what a caller does at that number: it stands in line, or is refused."""

import asyncio
import threading
from contextlib import contextmanager

import pytest
from harness.patience import wait_until

from dualwrite import Unavailable, WriterLimits, waiting
from dualwrite.errors import IllegalStateError
from dualwrite.testing import InMemoryWriter
from dualwrite.writing.group_commit import Groups
from unit.writing.group.test_alone import serving


@contextmanager
def busy(writer):
    """The writer is in a group until the block ends, or the function given is called."""
    may_go, begun = threading.Event(), threading.Event()

    def first(_):
        begun.set()
        may_go.wait(30)

    blocking = writer.submit(first, key="first of a test")
    begun.wait(30)
    try:
        yield may_go.set
    finally:
        may_go.set()
        blocking.exception(30)


def in_line(writer, number):
    wait_until(lambda: len(writer._groups._units.in_line) == number, 30, pause_s=0.001)


@pytest.fixture
def few(shop):
    with shop.writer(limits=WriterLimits(waiting_units=2, lane_timeout_s=30.0)) as writer:
        yield writer


def test_callers_wait_for_a_place_first_come_first_served(few):
    done, threads, futures = [], [], []

    def caller(number):
        futures.append(few.submit(lambda _: done.append(number), key=number))

    with busy(few) as go_on:
        for number in (1, 2, 3, 4, 5):
            threads.append(threading.Thread(target=caller, args=(number,)))
            threads[-1].start()
            if number <= 2:
                threads[-1].join(30)
            else:
                in_line(few, number - 2)
        assert len(futures) == 2
        go_on()
        for thread in threads:
            thread.join(30)
    assert [future.result(30) for future in futures] == [None] * 5
    assert done == [1, 2, 3, 4, 5]


def test_units_of_one_thread_that_waits_for_no_result_keep_their_order(few):
    done = []
    futures = [few.submit(lambda _, n=n: done.append(n)) for n in range(30)]
    assert [future.result(30) for future in futures] == [None] * 30
    assert done == list(range(30))


def test_many_threads_with_one_place_lose_nothing(shop):
    with shop.writer(limits=WriterLimits(waiting_units=1)) as writer:

        def caller(first):
            futures = [writer.submit(lambda tx, n=n: shop.put(tx, n)) for n in range(first, first + 10)]
            for future in futures:
                future.result(60)

        threads = [threading.Thread(target=caller, args=(100 * n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(int, shop.rows)) == sorted(map(int, shop.messages))
    assert len(shop.rows) == 60


def test_a_unit_that_its_caller_runs_leaves_its_place(shop, monkeypatch):
    serve = Groups._serve
    monkeypatch.setattr(Groups, "_serve", lambda _: None)
    with shop.writer(limits=WriterLimits(waiting_units=1)) as writer:
        mine = writer.submit(lambda tx: shop.put(tx, 1))
        thread = threading.Thread(target=lambda: writer.submit(lambda tx: shop.put(tx, 2)))
        thread.start()
        in_line(writer, 1)
        mine.result()
        thread.join(10)
        assert not thread.is_alive()
        serving(writer._groups, serve)
    assert shop.both_have(1, 2)


def filled(writer, shop):
    return [writer.submit(lambda tx, n=n: shop.put(tx, n), key=n) for n in (1, 2)]


def test_one_that_finds_no_place_in_time_is_refused_and_never_runs(shop):
    with shop.writer(limits=WriterLimits(waiting_units=2, lane_timeout_s=0.05)) as writer:
        with busy(writer):
            futures = filled(writer, shop)
            with pytest.raises(
                Unavailable, match=r"queue of units is full \(limit 2\).*in time.*WriterLimits\(waiting_units"
            ):
                writer.submit(lambda tx: shop.put(tx, 3))
        for future in futures:
            future.result(30)
        writer.submit(lambda tx: shop.put(tx, 4)).result(30)
    assert shop.both_have(1, 2, 4)


def test_a_thread_that_runs_an_event_loop_is_refused_at_once(few, shop):
    async def coroutine():
        return few.submit(lambda tx: shop.put(tx, 3))

    with busy(few):
        futures = filled(few, shop)
        with pytest.raises(Unavailable, match="event loop"):
            asyncio.run(coroutine())
    assert [future.result(30) for future in futures] == [None, None]
    asyncio.run(coroutine()).result(30)
    assert shop.both_have(1, 2, 3)


@pytest.mark.parametrize("alone", [True, False])
def test_a_callback_of_a_future_is_refused_at_once(few, shop, alone, monkeypatch):
    """It runs in the thread that ends the group: if that waited, all units would."""
    found, filling = [], []
    serve = Groups._serve
    if alone:
        monkeypatch.setattr(Groups, "_serve", lambda _: None)

    def callback(_):
        filling.extend(filled(few, shop))
        try:
            few.submit(lambda tx: shop.put(tx, 3))
        except Unavailable as error:
            found.append(error)

    future = few.submit(lambda tx: shop.put(tx, 0), key=0)
    future.add_done_callback(callback)
    future.result()
    if alone:
        serving(few._groups, serve)
    assert [one.result(30) for one in filling] == [None, None]
    assert "event loop or a group" in str(found[0])


def test_a_callback_of_one_whose_time_is_over_is_refused_at_once(few, shop):
    """It runs in the thread that wakes the units that rest: if that waited, they would keep their places."""
    found = []

    def callback(_):
        try:
            few.submit(lambda tx: shop.put(tx, 3))
        except Unavailable as error:
            found.append(error)

    with busy(few):
        late = few.submit(lambda tx: shop.put(tx, 1), key=1, within_s=60)
        few.submit(lambda tx: shop.put(tx, 2), key=2)
        late.add_done_callback(callback)
        later = few._groups._later
        later.after(0.0, later._waiting[0][2])
        wait_until(lambda: found, 20, pause_s=0.001)  # less than a caller waits for a place
    assert "event loop or a group" in str(found[0])
    few.submit(lambda _: None).result(30)
    assert shop.both_have(2)


def test_a_writer_that_closes_refuses_those_in_line(shop):
    refused = []

    def caller(writer):
        try:
            writer.submit(lambda tx: shop.put(tx, 3))
        except IllegalStateError as error:
            refused.append(error)

    with shop.writer(limits=WriterLimits(waiting_units=2)) as writer, busy(writer) as go_on:
        futures = filled(writer, shop)
        thread = threading.Thread(target=caller, args=(writer,))
        thread.start()
        in_line(writer, 1)
        closing = threading.Thread(target=writer._groups.close, args=(30,))
        closing.start()
        thread.join(30)
        go_on()
        closing.join(30)
    assert "closed before the unit began" in str(refused[0])
    assert [future.result(0) for future in futures] == [None, None]
    assert shop.both_have(1, 2)


@pytest.mark.parametrize("placed", [True, False])
def test_an_interrupted_caller_leaves_no_unit(few, shop, monkeypatch, placed):
    """It has no future, so that nobody could learn what became of it."""
    with busy(few):
        futures = filled(few, shop)

        def interrupted(*_):
            if placed:
                units = few._groups._units
                taken = units.take(1)
                units.admit()
                units.end(taken, taken)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(waiting.Event, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                few.submit(lambda tx: shop.put(tx, 3))
        assert not few._groups._units.in_line
    assert [future.result(30) for future in futures] == [None, None]
    few.submit(lambda _: None).result(30)
    assert shop.both_have(1, 2)


def test_the_writer_in_memory_refuses_likewise():
    with InMemoryWriter(limits=WriterLimits(waiting_units=1, lane_timeout_s=0.05)) as writer, busy(writer):
        writer.submit(lambda _: None)
        with pytest.raises(Unavailable, match=r"full \(limit 1\)"):
            writer.submit(lambda _: None)


def test_the_first_unit_is_refused_once_the_writer_closes(shop):
    with shop.writer() as writer:
        writer._close_groups(0.0)
        with pytest.raises(IllegalStateError, match="closed"):
            writer.submit(lambda _: None)
