"""Which blocks a thread is inside of: a block inside another of the same writer is refused, and nothing else is."""

import contextvars
import gc
import threading

import pytest

from dualwrite.errors import IllegalStateError
from dualwrite.writing.fair_queue import FairQueue
from dualwrite.writing.transaction import enter, refuse_nested


class Writer:
    """A writer, of which only the identity counts."""


@pytest.fixture
def writer():
    return Writer()


@pytest.fixture
def new_ticket():
    """Makes tickets that end with the test: it leaves no block open for the next one."""
    turns, made = FairQueue("abc"), []

    def make():
        made.append(turns.ticket())
        return made[-1]

    yield make
    for ticket in made:
        ticket.end()


def in_thread(call, context):
    """Call in another thread, in this context; what it raises is returned."""
    raised = []

    def run():
        try:
            context.run(call)
        except IllegalStateError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def test_a_block_inside_another_of_the_same_writer_is_refused_with_the_way_on(writer, new_ticket):
    refuse_nested(writer, "orders")
    ticket = new_ticket()
    enter(writer, ticket, "orders")
    with pytest.raises(IllegalStateError, match="begin_nested") as caught:
        refuse_nested(writer, "orders")
    assert caught.value.transactional_id == "orders"
    ticket.end()
    refuse_nested(writer, "orders")


def test_a_block_of_another_writer_is_no_obstacle(writer, new_ticket):
    ticket = new_ticket()
    enter(writer, ticket, "orders")
    refuse_nested(Writer(), "payments")


def test_the_outer_block_counts_after_a_block_of_another_writer_inside_it_has_ended(writer, new_ticket):
    outer, inner = new_ticket(), new_ticket()
    enter(writer, outer, "orders")
    enter(Writer(), inner, "orders")
    inner.end()
    with pytest.raises(IllegalStateError):
        refuse_nested(writer, "orders")


def test_another_thread_in_a_copy_of_the_context_may_enter(writer, new_ticket):
    """A web framework handles a request's parts in threads that all inherit the request's context."""
    ticket = new_ticket()
    enter(writer, ticket, "orders")
    assert in_thread(lambda: refuse_nested(writer, "orders"), contextvars.copy_context()) == []


def test_a_block_that_was_ended_in_another_thread_does_not_count_any_more(writer, new_ticket):
    ticket = new_ticket()
    enter(writer, ticket, "orders")
    in_thread(ticket.end, contextvars.copy_context())
    refuse_nested(writer, "orders")


def test_a_block_that_was_abandoned_does_not_count_any_more(writer):
    turns = FairQueue("a")
    enter(writer, turns.ticket(), "orders")
    gc.collect()
    refuse_nested(writer, "orders")


def test_entering_keeps_no_block_that_has_ended(writer, new_ticket):
    """A thread of a server enters blocks for as long as it lives."""
    context = contextvars.copy_context()

    def many():
        for _ in range(50):
            ticket = new_ticket()
            enter(writer, ticket, "orders")
            ticket.end()

    context.run(many)
    [noted] = [value for variable, value in context.items() if variable.name == "dualwrite_entered"]
    assert len(noted) == 1
