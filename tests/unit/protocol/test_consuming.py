"""The rules of a consumer: what follows a failed attempt, and whose transactions peers may settle."""

from itertools import product

import pytest

from dualwrite import errors
from dualwrite.errors import DualWriteError, TransactionAborted
from dualwrite.protocol.members import (
    Step,
    Trouble,
    around,
    consumer_member_id,
    failures_left_over,
    halves,
    left_behind,
    next_offsets,
    pause_s,
    step_after,
    trouble_of,
)

ALL_ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, DualWriteError) and kind is not DualWriteError
]


def test_only_failures_of_the_work_and_of_deserializers_count():
    """An outage of any length sends no message to the dead letters."""
    for trouble, messages, failures, attempts, sets_aside in product(
        Trouble, (1, 2, 500), range(10), range(1, 5), (False, True)
    ):
        step = step_after(trouble, messages=messages, failures=failures, attempts=attempts, sets_aside=sets_aside)
        if trouble is Trouble.UNREADABLE:
            assert step is (Step.ISOLATE if messages > 1 else Step.SET_ASIDE if sets_aside else Step.STOP)
        elif trouble is not Trouble.WORK:
            assert step not in {Step.SET_ASIDE, Step.SPLIT}
        elif failures < attempts:
            assert step is Step.REDO
        elif not sets_aside:
            assert step is Step.STOP
        else:
            assert step is (Step.SET_ASIDE if messages == 1 else Step.SPLIT)


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_work_runs_again_only_after_errors_that_say_that_nothing_was_written(kind):
    error = kind("it happened")
    step = step_after(trouble_of(error), messages=1, failures=1, attempts=3, sets_aside=True)
    if step is Step.REDO:
        assert error.outcome in {"none", "aborted"}
    if error.outcome == "lost" or isinstance(error, errors.ConfigurationError):
        assert step is Step.STOP
    if error.outcome == "decided":
        assert step is Step.DONE


def test_an_abort_that_is_not_retryable_is_the_works_failure():
    assert trouble_of(TransactionAborted("too large", retryable=False)) is Trouble.WORK
    assert trouble_of(TransactionAborted("a deadlock")) is Trouble.PASSING


@pytest.mark.parametrize("count", [2, 3, 64, 500])
def test_one_bad_message_is_found_and_all_others_are_written(count):
    """Splitting as the consumer does: few attempts, and nobody is lost or written twice."""
    attempts = 3
    for bad in {0, 1, count // 2, count - 1}:
        parts, written, aside, tried = [(list(range(count)), 0)], [], [], 0
        while parts:
            items, failures = parts.pop(0)
            tried += 1
            if bad not in items:
                written += items
                continue
            failures += 1
            step = step_after(Trouble.WORK, messages=len(items), failures=failures, attempts=attempts, sets_aside=True)
            if step is Step.REDO:
                parts.insert(0, (items, failures))
            elif step is Step.SPLIT:
                parts[:0] = [(half, failures_left_over(len(half), attempts)) for half in halves(items)]
            else:
                aside += items
        assert aside == [bad]
        assert written == [item for item in range(count) if item != bad]
        assert tried <= 2 * attempts + 2 * count.bit_length()


@pytest.mark.parametrize(
    ("index", "parts"), [(0, ["a", "bcd"]), (1, ["a", "b", "cd"]), (2, ["ab", "c", "d"]), (3, ["abc", "d"])]
)
def test_what_cannot_be_read_stands_between_its_neighbours(index, parts):
    assert around("abcd", index) == parts


def test_pauses_grow_and_stay_bounded():
    pauses = [pause_s(failures) for failures in range(1, 1000)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.1
    assert pauses[-1] == 10.0


def test_offsets_are_those_after_the_last_message_of_each_partition():
    assert next_offsets([("a", 0, 4), ("a", 0, 7), ("a", 1, 0), ("b", 0, 9)]) == {
        ("a", 0): 8,
        ("a", 1): 1,
        ("b", 0): 10,
    }
    assert next_offsets([]) == {}


@pytest.mark.parametrize("member", ["", "a/b", "a#1"])
def test_names_that_peers_would_read_otherwise_are_refused(member):
    with pytest.raises(ValueError, match="member's name"):
        consumer_member_id("group", member)


def test_only_members_that_have_left_the_group_are_settled():
    unsettled = ["g/dead", "g/dead#3", "g/alive", "g/alive#1", "g/ours#2"]
    assert left_behind("g", unsettled, ["g/alive", "g/ours"], "g/ours") == ["g/dead"]


def test_a_list_without_ourselves_proves_nothing():
    """We may be the member that was expelled, or the group's coordinator may have just moved."""
    assert left_behind("g", ["g/dead"], [], "g/ours") == []
    assert left_behind("g", ["g/dead"], ["g/other"], "g/ours") == []


def test_groups_whose_names_begin_alike_leave_each_other_alone():
    unsettled = ["a/b/0", "ab/0", "a/1"]
    assert left_behind("a", unsettled, ["a/0"], "a/0") == ["a/1"]
    assert left_behind("a/b", unsettled, ["a/b/9"], "a/b/9") == ["a/b/0"]
