"""The two forms of waiting, and what interrupts them."""

import asyncio
import sys
import threading

import pytest
from harness.forking import processes
from harness.patience import PATIENCE_S

from dualwrite import waiting
from dualwrite.errors import CompletionPending, TransactionAborted
from dualwrite.waiting import Event

transaction = pytest.importorskip("dualwrite.asyncio.transaction")
Threads, run = transaction.Threads, transaction.run


@pytest.fixture
def pool():
    with Threads(2, "orders") as pool:
        yield pool


def until(reached):
    """Wait for a form of waiting to come there."""
    return asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, reached.wait), 30)


async def cancelled_while_waiting(pool, function, reached, go_on=lambda: None):
    """Cancel the run once `reached` is set, then let it go on. Returns the run's task."""
    task = asyncio.create_task(run(pool, function))
    await until(reached)
    task.cancel()
    await asyncio.sleep(0)
    go_on()
    await asyncio.wait([task])
    return task


def test_an_event_that_another_thread_sets_wakes_a_thread_and_a_task(pool):
    async def main(event):
        waited = asyncio.create_task(run(pool, lambda: event.wait(60)))
        await asyncio.sleep(0)
        threading.Thread(target=event.set).start()
        return await waited

    assert asyncio.run(main(Event())) is True
    event = Event()
    threading.Thread(target=event.set).start()
    assert event.wait(60)
    assert event.wait(0)  # it stays set


def test_the_end_of_the_time_ends_both_waits(pool):
    assert Event().wait(0) is Event().wait(0.001) is False
    assert asyncio.run(run(pool, lambda: Event().wait(0.001))) is False


def test_tasks_wait_side_by_side_in_one_thread(pool):
    met = [Event(), Event()]

    def meet(mine, others):
        mine.set()
        return others.wait(60), threading.get_ident()

    async def main():
        return await asyncio.gather(run(pool, lambda: meet(*met)), run(pool, lambda: meet(*met[::-1])))

    assert asyncio.run(main()) == [(True, threading.get_ident())] * 2


def test_work_that_blocks_goes_to_another_thread_and_keeps_its_error(pool):
    async def main(work):
        return await run(pool, lambda: waiting.elsewhere(work))

    assert asyncio.run(main(threading.get_ident)) != threading.get_ident()
    assert waiting.elsewhere(threading.get_ident) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(main(lambda: 1 / 0))


def test_a_descriptor_that_becomes_readable_ends_the_wait(pool):
    import socket

    ours, theirs = socket.socketpair()
    polled = []

    async def main():
        form = asyncio.create_task(run(pool, lambda: waiting.here().poll(polled.append, ours.fileno, 60)))
        await asyncio.sleep(0.01)
        assert not polled
        theirs.send(b"1")
        await form

    with ours, theirs:
        asyncio.run(main())
    assert polled == [0]
    waiting.here().poll(polled.append, None, 3)
    assert polled == [0, 3]


def test_a_cancellation_comes_out_of_the_wait(pool):
    reached, seen = threading.Event(), []

    def work():
        reached.set()
        try:
            waiting.here().sleep(60)
        except BaseException as error:
            seen.append(isinstance(error, waiting.here().cancelled))
            raise

    assert asyncio.run(cancelled_while_waiting(pool, work, reached)).cancelled()
    assert seen == [True]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (None, asyncio.CancelledError),
        (ValueError("user"), asyncio.CancelledError),
        (TransactionAborted("neither side"), asyncio.CancelledError),
        (CompletionPending("decided"), CompletionPending),
    ],
)
def test_a_cancellation_that_was_put_off_comes_after_the_block_unless_an_error_says_more(pool, error, raised):
    reached, go_on, ended = threading.Event(), Event(), []

    def work():
        with waiting.uninterrupted():
            reached.set()
            assert go_on.wait(60)
            ended.append(1)
            if error is not None:
                raise error

    async def main():
        with pytest.raises(raised):
            (await cancelled_while_waiting(pool, work, reached, go_on.set)).result()

    asyncio.run(main())
    assert ended == [1]


def test_work_elsewhere_is_ended_before_the_cancellation_comes(pool):
    reached, go_on, ended = threading.Event(), threading.Event(), []

    def work():
        reached.set()
        assert go_on.wait(60)
        ended.append(1)

    task = asyncio.run(cancelled_while_waiting(pool, lambda: waiting.elsewhere(work), reached, go_on.set))
    assert task.cancelled()
    assert ended == [1]


def test_a_block_that_may_be_interrupted_again_gives_what_was_put_off(pool):
    reached, go_on, steps = threading.Event(), Event(), []

    def work():
        with waiting.uninterrupted():
            reached.set()
            go_on.wait(60)
            steps.append("uninterrupted")
            with waiting.interruptible():
                steps.append("never")

    assert asyncio.run(cancelled_while_waiting(pool, work, reached, go_on.set)).cancelled()
    assert steps == ["uninterrupted"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks begin in the next turn of the loop before Python 3.12")
def test_what_need_not_wait_takes_no_turn_of_the_loop(pool):
    turns = []

    async def at_once():
        return "done"

    def work():
        with waiting.uninterrupted():
            return transaction.awaited(at_once()), list(turns)

    async def main():
        asyncio.get_running_loop().call_soon(turns.append, "another")
        return await run(pool, work)

    assert asyncio.run(main()) == ("done", [])


def test_only_a_thread_that_runs_an_event_loop_would_block_it(pool):
    async def main():
        in_thread = await asyncio.to_thread(waiting.blocks_a_loop)
        return waiting.blocks_a_loop(), in_thread, await run(pool, waiting.blocks_a_loop)

    assert waiting.blocks_a_loop() is False
    assert asyncio.run(main()) == (True, False, False)


def test_a_thread_is_its_own_unless_an_event_loop_runs_in_it(pool):
    async def main():
        in_thread = await asyncio.to_thread(waiting.in_own_thread)
        return waiting.in_own_thread(), in_thread, await run(pool, waiting.in_own_thread)

    assert waiting.in_own_thread() is True
    assert asyncio.run(main()) == (False, True, False)


def drop_after_its_loop(worked):
    """What the collection of a coroutine does when its loop has ended."""
    with Threads(1, "orders") as pool, pytest.raises(RuntimeError, match="no running event loop"):
        run(pool, worked.set).send(None)


def test_a_coroutine_that_outlives_its_loop_blocks_nobody_in_a_process_that_was_forked_after_the_imports():
    worked = processes().Event()
    child = processes().Process(target=drop_after_its_loop, args=(worked,))
    child.start()
    child.join(PATIENCE_S)
    assert (child.exitcode, worked.is_set()) == (0, False)
