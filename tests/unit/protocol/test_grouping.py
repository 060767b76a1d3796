"""Which units go into the next group, when it takes no more, and what follows an error: order, fairness, and no unit lost."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
    WriterLimits,
)
from dualwrite.errors import IllegalStateError, OutcomeUnverifiable
from dualwrite.protocol.grouping import (
    ATTEMPTS,
    Fate,
    Unit,
    Units,
    after_culprit,
    after_ending_group,
    after_group,
    after_unit,
    takes_no_more,
)

TAKE, END, RESTED, ADD = "take", "end", "rested", "add"


def waiting(*keys):
    units = Units()
    for number, key in enumerate(keys):
        units.add(Unit(number, key))
    return units


def works(taken):
    return [unit.work for unit in taken]


def test_a_group_is_what_waits():
    units = waiting("a", "b", "c")
    assert works(units.take(64)) == [0, 1, 2]
    assert not units.ready


def test_keys_take_turns():
    units = waiting("busy", "busy", "busy", "busy", "quiet", "other")
    assert works(units.take(4)) == [0, 4, 5, 1]


def test_units_of_a_key_wait_while_others_of_it_are_in_a_group():
    units = waiting("a", "a", "b")
    first = units.take(1)
    units.add(Unit(3, "a"))
    assert works(units.take(64)) == [2]
    units.end(first)
    assert works(units.take(64)) == [1, 3]


def test_units_that_run_again_come_before_the_others_of_their_key_and_before_other_keys():
    units = waiting("a", "b", "a")
    taken = units.take(2)
    units.add(Unit(3, "c"))
    units.end(taken, [taken[0]])
    assert works(units.take(64)) == [0, 3, 2]


def test_units_that_rest_keep_those_of_their_keys_waiting_and_no_others():
    units = waiting("a", "b", "a")
    taken = units.take(2)
    units.end(taken, [taken[0]], rest=[taken[0]])
    units.add(Unit(3, "b"))
    assert works(units.take(64)) == [3]
    assert not units.empty
    units.rested([taken[0]])
    units.rested([taken[0]])
    assert works(units.take(64)) == [0, 2]


def test_those_that_run_again_beside_one_that_rests_come_first_and_keep_the_order_of_their_key():
    units = waiting("a", "b", "c", "b", "a")
    taken = units.take(64)
    units.add(Unit(5, "d"))
    units.end(taken, [taken[0], taken[1], taken[3], taken[4]], rest=[taken[0]])
    assert works(units.take(2)) == [1, 5]
    units.end([taken[1]])
    assert works(units.take(64)) == [3]
    units.rested([taken[0]])
    assert works(units.take(1)) == [0]
    units.end([taken[0]])
    assert works(units.take(64)) == [4]


def offered(units, *numbers):
    made = [Unit(number, number) for number in numbers]
    return made, [units.offer(unit) for unit in made]


def test_so_many_wait_and_the_others_stand_in_line():
    units = Units(places=2)
    made, added = offered(units, 1, 2, 3, 4)
    assert added == [True, True, False, False]
    assert units.admit() == []
    taken = units.take(1)
    assert works(taken) == [1]
    assert units.admit() == [made[2]]
    assert units.admit() == []
    assert units.in_line == [made[3]]
    assert works(units.take(64)) == [2, 3]


def test_nobody_passes_those_in_line():
    units = Units(places=1)
    offered(units, 1, 2)
    units.take(1)
    assert offered(units, 3)[1] == [False]
    assert works(units.admit()) == [2]


def test_one_that_leaves_the_line_is_added_no_more():
    units = Units(places=1)
    made, _ = offered(units, 1, 2, 3)
    assert units.withdraw(made[1])
    assert not units.withdraw(made[1])
    assert not units.withdraw(made[0])
    units.take_lone()
    assert units.admit() == [made[2]]


def test_what_runs_again_needs_no_place_and_leaves_none():
    units = Units(places=2)
    offered(units, 1, 2)
    taken = units.take(1)
    assert offered(units, 3)[1] == [True]
    units.end(taken, taken)
    units.end(taken, taken)
    assert works(units.take(1)) == [1]
    assert offered(units, 4)[1] == [False]
    units.drain()
    assert works(units.admit()) == [4]


def test_a_place_that_an_interruption_left_uncounted_is_free_again():
    units = Units(places=1)
    offered(units, 1)
    units.take_lone()
    units._at_most += 1
    assert offered(units, 2)[1] == [True]


def test_a_unit_that_must_be_alone_is():
    units = waiting("a", "b", "c")
    taken = units.take(64)
    taken[1].alone = True
    units.end(taken, taken)
    assert [works(units.take(64)) for _ in range(3)] == [[0], [1], [2]]


def test_a_lone_unit_is_the_whole_of_the_next_group():
    units = waiting("a")
    assert units.lone.work == 0
    units.add(Unit(1, "a"))
    assert units.lone is None
    units = waiting("a", "b")
    assert units.lone is None
    first = units.take(1)
    assert units.lone.work == 1
    units.take_lone()
    assert units.lone is None
    assert not units.ready
    units.add(Unit(2, "b"))
    assert not units.ready
    units.end(first)
    units.end([Unit(1, "b")])
    units.end([Unit(1, "b")])
    assert units.lone.work == 2


def test_what_is_drained_is_in_no_group():
    units = waiting("a", "a", "b")
    taken = units.take(1)
    assert sorted(works(units.drain())) == [1, 2]
    assert not units.empty
    units.end(taken)
    assert units.empty


def test_what_is_drained_rests_no_more():
    units = waiting("a", "a", "b")
    taken = units.take(64)
    units.end(taken, taken, rest=[taken[0]])
    in_a_group = units.take(64)
    assert works(in_a_group) == [2]
    assert works(units.drain()) == [0, 1]
    units.end(in_a_group)
    assert units.empty
    units.rested([taken[0]])
    assert units.empty


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just(ADD), st.sampled_from("abcd")),
            st.tuples(st.just(TAKE), st.integers(1, 5)),
            st.tuples(st.just(END), st.lists(st.booleans(), min_size=5, max_size=5)),
            st.tuples(st.just(RESTED), st.just(None)),
        ),
        max_size=60,
    ),
    st.integers(1, 6),
)
def test_no_unit_is_lost_or_run_in_two_groups_and_each_key_keeps_its_order(steps, places):
    units, groups, done, added, number = Units(places), [], defaultdict(list), defaultdict(list), 0
    resting = []
    for what, value in steps:
        if what == ADD:
            number += 1
            added[value].append(number)
            units.offer(Unit(number, value))
        elif what == TAKE:
            taken = units.take(value)
            assert len(taken) <= value
            units.admit()
            keys = {unit.key for unit in taken}
            assert not keys & {unit.key for group in groups for unit in group}
            groups += [taken] if taken else []
        elif what == RESTED:
            if resting:
                units.rested(resting.pop(0))
        elif groups:
            resting.append(finish(units, groups.pop(0), value, done, rest=value[0]))
    for group in groups:
        finish(units, group, [], done)
    for rested in resting:
        units.rested(rested)
    while units.ready:
        taken = units.take(3)
        units.admit()
        finish(units, taken, [], done)
    assert units.empty
    assert done == added


def finish(units, taken, failing, done, *, rest=False):
    """Units that fail here run again, and so do those of their keys that come later in the group. Every other one rests."""
    again, held = [], set()
    for unit, fails in zip(taken, failing + [False] * len(taken), strict=False):
        if fails or unit.key in held:
            held.add(unit.key)
            again.append(unit)
        else:
            done[unit.key].append(unit.work)
    rested = again[::2] if rest else []
    units.end(taken, again, rest=rested)
    return rested


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=80), st.integers(1, 8))
def test_no_key_waits_for_more_than_one_unit_of_each_other_key(keys, limit):
    units = waiting(*keys)
    first_in_group = {}
    group = 0
    while units.ready:
        taken = units.take(limit)
        for unit in taken:
            first_in_group.setdefault(unit.key, group)
        units.end(taken)
        group += 1
    assert max(first_in_group.values()) <= (len(set(keys)) - 1) // limit


@pytest.mark.parametrize(
    ("seconds", "size", "reached"),
    [(0.0, 0, False), (0.49, 100, False), (0.5, 0, True), (0.0, 101, True)],
)
def test_a_group_takes_no_more_once_it_is_old_or_large(seconds, size, reached):
    assert takes_no_more(WriterLimits(group_open_s=0.5, group_bytes=100), seconds=seconds, size=size) is reached


def aborted(**kwargs):
    return TransactionAborted("x", **kwargs)


UNSAFE = [TransactionInDoubt, CompletionPending, DecidedTransactionLost, OutcomeUnverifiable]


@pytest.mark.parametrize(
    ("error", "fate"),
    [
        (aborted(), Fate.TOGETHER),
        (Unavailable("x"), Fate.TOGETHER),
        (aborted(retryable=False), Fate.FAIL),
        (ValueError("x"), Fate.FAIL),
        *((kind("x"), Fate.FAIL) for kind in UNSAFE),
    ],
)
def test_a_unit_runs_again_by_the_rule_of_run(error, fate):
    assert after_unit(error, 1) is fate
    assert after_unit(error, ATTEMPTS) is Fate.FAIL


@pytest.mark.parametrize(
    ("error", "first", "second", "single"),
    [
        (aborted(), Fate.TOGETHER, Fate.ALONE, Fate.TOGETHER),
        (Unavailable("x"), Fate.TOGETHER, Fate.ALONE, Fate.TOGETHER),
        # One of the units may be to blame: alone, it fails alone.
        (aborted(retryable=False), Fate.ALONE, Fate.ALONE, Fate.FAIL),
        (ConfigurationError("no right to write to one of the topics"), Fate.ALONE, Fate.ALONE, Fate.FAIL),
        # Rows may be committed by a COMMIT in a unit.
        (IllegalStateError("x"), Fate.FAIL, Fate.FAIL, Fate.FAIL),
        (Fenced("x"), Fate.FAIL, Fate.FAIL, Fate.FAIL),
        (ValueError("x"), Fate.FAIL, Fate.FAIL, Fate.FAIL),
        *((kind("x"), Fate.FAIL, Fate.FAIL, Fate.FAIL) for kind in UNSAFE),
    ],
)
def test_a_group_runs_again_only_if_nothing_was_written(error, first, second, single):
    assert after_group(error, units=3, failures=1) is first
    assert after_group(error, units=3, failures=2) is second
    assert after_group(error, units=1, failures=1) is single


def test_after_an_exception_at_its_end_that_has_aborted_both_sides_each_unit_runs_alone():
    """A delivery callback has raised it, say. Without the abort it may be anything."""
    assert after_group(ValueError(), units=3, failures=1, aborted=True) is Fate.ALONE
    assert after_group(ValueError(), units=3, failures=1) is Fate.FAIL
    assert after_group(ValueError(), units=1, failures=2, aborted=True) is Fate.FAIL
    assert after_group(KeyboardInterrupt(), units=3, failures=1, aborted=True) is Fate.FAIL
    assert after_group(TransactionInDoubt("x"), units=3, failures=1, aborted=True) is Fate.FAIL


def test_a_group_does_not_run_again_for_ever():
    assert after_group(aborted(), units=1, failures=ATTEMPTS) is Fate.FAIL


def test_a_group_that_a_silent_kafka_has_refused_does_not_run_again():
    refused = Unavailable("Kafka is silent")
    assert after_group(refused, units=3, failures=1) is Fate.TOGETHER  # a server that did not answer once
    refused.silent = True
    assert after_group(refused, units=3, failures=1) is Fate.FAIL


def test_an_abort_of_unknown_outcome_is_never_repeated():
    error = aborted()
    error.outcome = "unknown"
    assert after_group(error, units=3, failures=1) is Fate.FAIL
    assert after_culprit(error, 1) is Fate.FAIL


@pytest.mark.parametrize("error", [aborted(), aborted(retryable=False), Unavailable("x")])
def test_others_than_the_unit_that_ended_the_group_run_again(error):
    assert after_culprit(error, 1) is Fate.TOGETHER
    assert after_culprit(error, ATTEMPTS) is Fate.FAIL


@pytest.mark.parametrize("kind", UNSAFE)
def test_not_even_they_run_again_in_doubt(kind: type[DualWriteError]):
    assert after_culprit(kind("x"), 1) is Fate.FAIL


def test_a_unit_that_ends_its_group_by_a_conflict_runs_again_alone_and_by_anything_else_not():
    conflict, gone = TransactionAborted("a deadlock"), TransactionAborted("rolled back", retryable=False)
    assert after_ending_group(conflict, gone, 1) is Fate.ALONE
    assert after_ending_group(conflict, gone, ATTEMPTS) is Fate.FAIL
    assert after_ending_group(ValueError(), gone, 1) is Fate.FAIL
    assert after_ending_group(None, conflict, 1) is Fate.FAIL
    assert after_ending_group(conflict, TransactionInDoubt("who knows"), 1) is Fate.FAIL
