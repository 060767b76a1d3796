"""A unit that waits alone is run by the thread that waits for it, unless something forbids it."""

import asyncio
import contextvars
import itertools
import threading
from concurrent.futures import TimeoutError as OutOfTime  # before Python 3.11 another than the built-in one
from concurrent.futures import wait
from contextlib import contextmanager

import pytest
from harness.interruption import Interruption

from dualwrite import TransactionAborted, WriterLimits, waiting
from dualwrite.writing.group_commit import Groups
from unit.writing.group.held import Refused, transaction_of_nothing

NAME = contextvars.ContextVar("name", default="nobody's")


SERVE = Groups._serve


@pytest.fixture
def writer(shop, monkeypatch):
    """A writer whose own threads run nothing until ``serve()``."""
    monkeypatch.setattr(Groups, "_serve", lambda _: None)
    with shop.writer() as writer:
        yield writer
        monkeypatch.undo()
        serving(writer._groups)


def serving(groups, serve=SERVE):
    groups._threads = 1
    threading.Thread(target=serve, args=[groups]).start()


def here(_):
    return threading.get_ident()


def test_the_thread_that_waits_runs_it(shop, writer):
    def unit(tx):
        assert not tx.connection.in_nested_transaction()
        shop.put(tx, 1)
        return threading.get_ident()

    assert writer.submit(unit).result() == threading.get_ident()
    assert shop.both_have(1)


def test_its_error_reaches_the_caller_and_the_next_one_runs(shop, writer):
    def unit(tx):
        shop.put(tx, 1)
        raise Refused

    future = writer.submit(unit)
    assert isinstance(future.exception(), Refused)
    with pytest.raises(Refused):
        future.result()
    writer.submit(lambda tx: shop.put(tx, 2)).result()
    assert shop.both_have(2)


def test_it_has_the_context_of_its_submit(writer):
    NAME.set("the caller's")
    future = writer.submit(lambda _: (NAME.get(), NAME.set("the unit's")))
    NAME.set("a later one")
    assert future.result()[0] == "the caller's"
    assert NAME.get() == "a later one"


def test_a_callback_sees_the_result(writer):
    seen = []
    future = writer.submit(here)
    future.add_done_callback(lambda done: seen.append(done.result()))
    assert [future.result()] == seen


def test_after_a_group_of_several_a_thread_of_the_writers_runs_the_next_one(shop, writer):
    together = [writer.submit(here, key=key) for key in (1, 2)]
    serving(writer._groups)
    assert {future.result() for future in together}.isdisjoint({threading.get_ident()})
    assert writer.submit(here).result() != threading.get_ident()
    assert writer.submit(here).result() == threading.get_ident()


def refusals(writer, shop):
    """The reasons for which a thread does not run the unit of a future itself."""

    def with_a_time_out(future):
        with pytest.raises(OutOfTime):
            future.result(0.01)

    yield "a time-out", with_a_time_out

    def with_another(future):
        writer.submit(here, key="another")
        writer._groups._run_here(future)

    yield "another unit waits", with_another

    def inside_a_block(future):
        with writer.transaction():
            writer._groups._run_here(future)

    yield "its own block would wait for it", inside_a_block

    def in_a_loop(future):
        async def main():
            writer._groups._run_here(future)

        asyncio.run(main())

    yield "it would block an event loop", in_a_loop


@pytest.mark.parametrize("number", range(4))
def test_otherwise_it_waits_for_a_thread_of_the_writer(shop, writer, number):
    future = writer.submit(here)
    why, act = list(refusals(writer, shop))[number]
    act(future)
    assert not future.done(), why


def test_a_cancelled_one_never_runs(shop, writer):
    future = writer.submit(lambda tx: shop.put(tx, 1))
    assert future.cancel()
    writer._groups._run_here(future)
    writer.submit(lambda tx: shop.put(tx, 2)).result()
    assert shop.both_have(2)


def test_one_that_must_run_again_is_left_to_the_writer(shop):
    ran = []

    def unit(tx):
        ran.append(threading.get_ident())
        shop.put(tx, 1)
        if len(ran) == 1:
            raise TransactionAborted("a conflict")
        return "done"

    with shop.writer() as writer:
        assert writer.submit(unit).result() == "done"
    assert shop.both_have(1)


def test_one_that_a_thread_of_the_writer_has_taken_meanwhile_is_left_to_it(shop, monkeypatch):
    serve, ran, inside, may_go = Groups._serve, [], threading.Event(), threading.Event()
    monkeypatch.setattr(Groups, "_serve", lambda _: None)

    def unit(tx):
        ran.append(threading.get_ident())
        inside.set()
        may_go.wait(30)
        if len(ran) == 1:
            raise TransactionAborted("a conflict")
        shop.put(tx, 1)

    with shop.writer() as writer:

        def taken_after_the_first_look():
            serving(writer._groups, serve)
            return inside.wait(30)

        future = writer.submit(unit)
        with monkeypatch.context() as patch:
            patch.setattr(waiting, "in_own_thread", taken_after_the_first_look)
            writer._groups._run_here(future)
        may_go.set()
        future.result(30)
    assert shop.both_have(1)
    assert threading.get_ident() not in ran


def test_units_of_other_threads_wait_for_it_and_run(shop):
    inside, may_go = threading.Event(), threading.Event()

    def slow(tx):
        inside.set()
        may_go.wait(30)
        shop.put(tx, 1)

    with shop.writer() as writer:
        caller = threading.Thread(target=lambda: writer.submit(slow).result())
        caller.start()
        inside.wait(30)
        futures = [writer.submit(lambda tx, n=n: shop.put(tx, n), key=n) for n in (2, 3)]
        may_go.set()
        wait(futures, 30)
        caller.join()
    assert shop.both_have(1, 2, 3)


def test_an_interrupted_unit_leaves_nothing_and_the_next_one_runs(shop, writer):
    def unit(tx):
        shop.put(tx, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.submit(unit).result()
    writer.submit(lambda tx: shop.put(tx, 2)).result()
    assert shop.both_have(2)


def test_an_interruption_at_any_line_leaves_nobody_waiting(monkeypatch):
    @contextmanager
    def block():
        yield transaction_of_nothing()

    serve = Groups._serve
    monkeypatch.setattr(Groups, "_serve", lambda _: None)
    for line in itertools.count(1):
        groups = Groups("orders", block, WriterLimits(group_units=1))
        future, interruption = groups.submit(lambda _: "done", "key"), Interruption(line)
        try:
            with interruption.armed():
                future.result()
        except KeyboardInterrupt:
            assert interruption.at is not None
        if interruption.at is None:
            break
        later = groups.submit(lambda _: "later", "key")
        serving(groups, serve)
        assert later.result(30) == "later", interruption.at
        assert not wait([future], 30).not_done, interruption.at
        groups.close(30)
        assert not groups._begun, interruption.at
    assert line > 50
