"""Blocks and threads: entered in one and left in another, inside each other, and in the tasks of an event loop."""

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from sqlalchemy import insert

from dualwrite import DualWriter, WriterLimits
from dualwrite.errors import IllegalStateError

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


@pytest.fixture
def write(dualwrite_topic, orders):
    def write(tx, number):
        tx.produce(dualwrite_topic, value=str(number))
        tx.connection.execute(insert(orders).values(id=number))

    return write


@pytest.fixture
def threads():
    """Two threads that do what they are given, one after the other; in a copy of the context, or in their own."""
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        yield first, second


@pytest.mark.parametrize("copied", [True, False], ids=["in copied contexts", "in the threads' own"])
def test_a_block_is_entered_in_one_thread_and_left_in_another_and_the_first_goes_on(
    writer, threads, write, both, copied
):
    """As FastAPI does it with a dependency that yields; a plain pool of threads copies no context."""

    def run(thread, function, *arguments):
        if copied:
            function, arguments = contextvars.copy_context().run, (function, *arguments)
        return thread.submit(function, *arguments).result()

    def another(number):
        with writer.transaction() as tx:
            write(tx, number)

    first, second = threads
    for number in (1, 4):
        block = writer.transaction()
        tx = run(first, block.__enter__)
        run(second, write, tx, number)
        run(second, another, number + 1)
        run(second, block.__exit__, None, None, None)
        run(first, another, number + 2)
    assert both() == ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])


def test_a_block_that_fails_in_another_thread_aborts_both_and_the_first_goes_on(writer, threads, write, both):
    first, second = threads
    block = writer.transaction()
    tx = first.submit(block.__enter__).result()
    second.submit(write, tx, 1).result()
    error = LookupError()
    assert not second.submit(block.__exit__, LookupError, error, None).result()

    def again():
        with writer.transaction() as tx:
            write(tx, 2)

    first.submit(again).result()
    assert both() == ([2], [2])


def test_a_block_inside_a_block_is_refused_however_it_was_entered(writer, write, both):
    with ExitStack() as stack:
        write(stack.enter_context(writer.transaction()), 1)
        with pytest.raises(IllegalStateError, match="nested"):
            stack.enter_context(writer.transaction())
        with pytest.raises(IllegalStateError, match="nested"), writer.transaction():
            pass
    assert both() == ([1], [1])


def test_writers_are_apart(writer, kafka, engine, write, both):
    with (
        DualWriter("others", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as other,
        writer.transaction() as tx,
        other.transaction() as inner,
    ):
        write(tx, 1)
        write(inner, 2)
    assert both() == ([1, 2], [1, 2])


def test_a_thread_started_inside_a_block_has_a_block_of_its_own(writer, write, both):
    with writer.transaction() as tx:
        write(tx, 1)

        def other():
            with writer.transaction() as tx:
                write(tx, 2)

        thread = threading.Thread(target=contextvars.copy_context().run, args=(other,))
        thread.start()
        thread.join()
    assert both() == ([1, 2], [1, 2])


def test_a_block_that_is_left_lying_is_aborted_and_its_lane_comes_back(kafka, engine, write, both):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        block = writer.transaction()
        write(block.__enter__(), 1)
        del block
        with writer.transaction() as tx:
            write(tx, 2)
    assert both() == ([2], [2])
