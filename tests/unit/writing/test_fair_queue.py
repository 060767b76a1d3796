"""First come, first served, whatever happens to waiting callers; and an interrupted caller keeps nothing."""

import gc
import itertools
import threading

import pytest
from harness.interruption import Interruption

from dualwrite.clock import Deadline
from dualwrite.writing.fair_queue import FairQueue, NoTurn, Place, longest_free

NOW = Deadline(0)


def taken(turns, *, choose=None):
    ticket = turns.ticket(choose)
    turns.queue_up(ticket)
    return ticket


def thing(ticket):
    return None if ticket.place is None else ticket.place.thing


@pytest.fixture
def turns():
    return FairQueue("ab")


def test_those_who_wait_get_what_is_given_back_in_the_order_in_which_they_came(turns):
    users = [taken(turns), taken(turns)]
    waiting = [taken(turns) for _ in range(4)]
    assert [thing(ticket) for ticket in waiting] == [None] * 4
    for number, (user, waiter) in enumerate(zip([*users, *waiting], waiting, strict=False)):
        given_back = thing(user)
        user.end()
        assert thing(waiter) == given_back
        assert [thing(ticket) for ticket in waiting[number + 1 :]] == [None] * (3 - number)


def test_nobody_who_comes_later_is_served_before_those_who_wait(turns):
    users = [taken(turns), taken(turns)]
    waiting = taken(turns)
    users[0].end()
    late = taken(turns)
    assert (thing(waiting), thing(late)) == ("a", None)


def test_the_one_that_was_free_for_longest_is_given_out(turns):
    first, second = taken(turns), taken(turns)
    second.end()
    first.end()
    assert thing(taken(turns)) == "b"


def test_whoever_times_out_keeps_nobody_waiting(turns):
    users = [taken(turns), taken(turns)]
    impatient = turns.ticket()
    with pytest.raises(NoTurn):
        impatient.wait(NOW)
    patient = taken(turns)
    impatient.end()
    users[0].end()
    assert (thing(impatient), thing(patient)) == (None, "a")


def test_a_thing_given_to_one_that_has_just_timed_out_goes_to_the_next(turns):
    users = [taken(turns), taken(turns)]
    impatient = turns.ticket()
    with pytest.raises(NoTurn):
        impatient.wait(NOW)
    patient = taken(turns)
    users[0].end()  # before the first one has left the queue
    assert (thing(impatient), thing(patient)) == ("a", None)
    impatient.end()
    assert thing(patient) == "a"


def test_one_that_is_choosy_lets_others_pass_and_does_not_lose_its_place(turns):
    users = [taken(turns), taken(turns)]
    choosy = taken(turns, choose=lambda places: next((p for p in places if p.user is None and p.thing == "b"), None))
    other = taken(turns)
    users[0].end()
    assert (thing(choosy), thing(other)) == (None, "a")
    third = taken(turns)
    users[1].end()
    assert (thing(choosy), thing(third)) == ("b", None)


def test_closing_refuses_those_who_wait_and_waits_for_those_who_use(turns):
    users = [taken(turns), taken(turns)]
    waiting = taken(turns)
    turns.close()
    assert waiting.answered
    with pytest.raises(NoTurn):
        turns.ticket().wait(Deadline(60))
    users[0].end()
    threading.Timer(0.01, users[1].end).start()
    assert sorted(turns.drain(Deadline(60))) == ["a", "b"]
    assert turns.drain(NOW) == []


def test_what_is_still_in_use_at_the_end_of_the_wait_is_left_to_its_user(turns):
    users = [taken(turns), taken(turns)]
    users[1].end()
    turns.close()
    assert turns.drain(NOW) == ["b"]
    users[0].end()


def test_a_thread_that_waits_is_woken(turns):
    users = [taken(turns), taken(turns)]
    got = []
    ticket = turns.ticket()
    waiting = threading.Thread(target=lambda: got.append(ticket.wait(Deadline(60))))
    waiting.start()
    users[0].end()
    waiting.join(60)
    assert got == ["a"]


def test_what_nobody_refers_to_any_more_is_given_back(turns):
    users = [taken(turns), taken(turns)]
    waiting = taken(turns)
    assert thing(waiting) is None
    del users[0]
    gc.collect()
    assert thing(waiting) == "a"


def test_a_finalizer_may_give_back_in_the_middle_of_giving_out(turns):
    users = [taken(turns), taken(turns)]
    in_the_middle = []

    def on_freed(_place, _now):
        if not in_the_middle:
            in_the_middle.append(True)
            users.pop().end()

    turns.on_freed = on_freed
    waiting = [taken(turns), taken(turns)]
    users.pop(0).end()
    assert sorted(thing(ticket) for ticket in waiting) == ["a", "b"]


def test_a_place_is_added_by_whoever_chooses(turns):
    users = [taken(turns), taken(turns)]

    def add(places):
        if len(places) == 2:
            places.append(Place("c"))
        return longest_free(places)

    assert thing(taken(turns, choose=add)) == "c"
    assert [thing(user) for user in users] == ["a", "b"]


def use(turns, before):
    """The use of a ticket by a block; and another block's end in the middle of it."""
    ticket = turns.ticket()
    try:
        try:
            ticket.wait(Deadline(60))
            before.end()
        finally:
            ticket.end()
    finally:
        ticket.end()


def test_an_interruption_at_any_line_keeps_nothing_and_nobody_waiting():
    for line in itertools.count(1):
        turns = FairQueue("ab")
        before, other = taken(turns), taken(turns)
        waiting = [taken(turns), taken(turns)]
        other.end()  # the first of those who wait has it; the user below waits behind the second
        assert thing(waiting[0]) is not None
        waiting[0].end()
        waiting[1].end()
        interruption = Interruption(line)
        try:
            with interruption.armed():
                use(turns, before)
        except KeyboardInterrupt:
            assert interruption.at is not None
        if interruption.at is None:
            break
        before.end()
        late = [taken(turns) for _ in range(3)]
        assert sorted(thing(ticket) for ticket in late[:2]) == ["a", "b"], interruption.at
        assert thing(late[2]) is None, interruption.at
    assert line > 40


def test_a_turn_costs_no_more_for_the_thousand_that_wait(turns):
    """Not in time, which is the machine's: none but the first of those that wait is asked to choose."""
    asked = []

    def choose(places):
        asked.append(1)
        return longest_free(places)

    waiting = [taken(turns, choose=choose) for _ in range(1000)]
    asked.clear()
    for ticket in waiting[:500]:
        ticket.end()
        ticket.end()
    assert [thing(ticket) is None for ticket in waiting[498:504]] == [False] * 4 + [True] * 2
    assert len(asked) <= 500 * 3


def test_one_that_leaves_the_queue_keeps_no_place_in_it(turns):
    users = [taken(turns), taken(turns)]
    waiting = [taken(turns) for _ in range(5)]
    for ticket in waiting[:4]:
        ticket.end()
    assert sum(map(len, turns._waiting.values())) == 1
    users[0].end()
    assert thing(waiting[4]) == "a"
