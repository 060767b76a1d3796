"""One run of a group: the end of each of its units, and the answers for their callers."""

import pytest

from dualwrite import CompletionPending, TransactionAborted, TransactionInDoubt
from dualwrite.protocol.grouping import ATTEMPTS, Unit
from dualwrite.writing.units_of_work import GroupRun, NothingKept


class Caller:
    """Records what it is told."""

    rows = None

    def __init__(self, *, gives_up=False):
        self.gives_up = gives_up
        self.result = self.error = None

    def begin(self):
        return not self.gives_up

    def rest(self, error):
        self.rests_after = error

    def succeed(self, result):
        assert self.error is None
        self.result = result

    def fail(self, error):
        assert self.result is None
        self.error = error


def run_of(*callers):
    return GroupRun("w", [Unit(caller, number) for number, caller in enumerate(callers)])


def ran(group, *errors):
    """Let the units end with these errors; ``...`` leaves a unit out."""
    for unit, error in zip(group.taken, errors, strict=True):
        if error is not ... and group.begins(unit):
            group.has_run(unit, error)
            group.ended(unit, "done", error)


def tell(told):
    for one in told:
        one()


def test_results_are_told_after_the_commit():
    group = run_of(Caller(), Caller())
    ran(group, None, None)
    assert group.kept == 2
    told = group.committed()
    assert group.taken[0].work.result is None
    tell(told)
    assert [unit.work.result for unit in group.taken] == ["done", "done"]
    assert group.again == []


def test_a_unit_that_failed_by_itself_fails_alone():
    error = ValueError()
    group = run_of(Caller(), Caller())
    ran(group, error, None)
    tell(group.committed())
    assert [unit.work.error for unit in group.taken] == [error, None]


def test_its_error_may_rest_on_what_is_gone_if_the_group_is_aborted():
    group = run_of(Caller(), Caller())
    ran(group, ValueError(), None)
    tell(group.failed(TransactionAborted("a conflict")))
    assert group.again == group.taken
    assert [unit.work.error for unit in group.taken] == [None, None]


def test_its_error_holds_if_the_group_may_be_committed():
    error = ValueError()
    group = run_of(Caller(), Caller())
    ran(group, error, None)
    tell(group.failed(CompletionPending("x")))
    assert [type(unit.work.error) for unit in group.taken] == [ValueError, CompletionPending]


def test_each_caller_gets_an_error_of_its_own_with_its_cause():
    group = run_of(Caller(), Caller())
    ran(group, None, None)
    error = CompletionPending("x", transactional_id="w")
    error.__cause__ = KeyError()
    tell(group.failed(error))
    first, second = (unit.work.error for unit in group.taken)
    assert first is not second
    assert str(first) == str(second) == str(error)
    assert first.__cause__ is second.__cause__ is error.__cause__


def test_a_unit_that_has_not_begun_runs_again_even_after_doubt():
    group = run_of(Caller(), Caller())
    ran(group, None, ...)
    tell(group.failed(CompletionPending("x")))
    assert group.again == group.taken[1:]
    assert group.again[0].failures == 0


def test_if_none_has_begun_all_have_failed():
    """Otherwise they would run again for ever while no group can begin. Until then their callers may give them up."""
    group = run_of(Caller(), Caller(gives_up=True), Caller())
    tell(group.failed(error := TransactionAborted("x")))
    assert group.again == list(group.taken)
    assert not group.begun
    assert [unit.work.rests_after for unit in group.taken] == [error] * 3
    assert [unit.failures for unit in group.again] == [1, 1, 1]
    assert group.failures == 1


def test_only_those_that_have_failed_rest():
    conflict = TransactionAborted("a conflict")
    group = run_of(Caller(), Caller(), Caller())
    ran(group, conflict, None, ...)
    tell(group.committed())
    assert group.again == [group.taken[0], group.taken[2]]
    assert group.resting == [group.taken[0]]
    group = run_of(Caller(), Caller())
    ran(group, None, ...)
    tell(group.failed(conflict))
    assert group.again == group.taken
    assert group.resting == [group.taken[0]]


def test_the_unit_that_ended_the_group_gets_its_own_error():
    error = ValueError()
    group = run_of(Caller(), Caller(), Caller())
    ran(group, None, ..., ...)
    group.begins(group.taken[1])
    group.has_run(group.taken[1], error)
    tell(group.failed(TransactionAborted("it has rolled back", retryable=False)))
    assert group.taken[1].work.error is error
    assert group.again == [group.taken[0], group.taken[2]]
    assert not any(unit.alone for unit in group.again)
    assert group.failures == 0  # nothing to wait for
    assert group.resting == []


def end_by_the_second(raised, error):
    """A group of three, ended by its second unit."""
    group = run_of(Caller(), Caller(), Caller())
    ran(group, None, ..., ...)
    group.begins(group.taken[1])
    group.has_run(group.taken[1], raised)
    tell(group.failed(error))
    return group


def test_a_deadlock_that_has_ended_the_group_runs_again_alone():
    group = end_by_the_second(TransactionAborted("a deadlock"), TransactionAborted("rolled back the whole transaction"))
    assert [unit.work.error for unit in group.taken] == [None] * 3
    assert group.again == group.taken
    assert [unit.alone for unit in group.taken] == [False, True, False]
    assert group.failures == 1
    assert group.resting == [group.taken[1]]


@pytest.mark.parametrize("raised", [TransactionAborted("a deadlock"), ValueError("after a COMMIT as text")])
def test_an_error_of_a_unit_does_not_hide_that_its_group_may_be_committed(raised):
    error = TransactionInDoubt("who knows")
    group = end_by_the_second(raised, error)
    assert [type(unit.work.error) for unit in group.taken] == [TransactionInDoubt, TransactionInDoubt, type(None)]
    assert group.again == group.taken[2:]


def test_a_deadlock_that_comes_again_and_again_is_told_in_the_end():
    raised = TransactionAborted("a deadlock")
    group = run_of(Caller())
    group.taken[0].failures = ATTEMPTS - 1
    group.begins(group.taken[0])
    group.has_run(group.taken[0], raised)
    tell(group.failed(TransactionAborted("rolled back the whole transaction")))
    assert group.taken[0].work.error is raised


def test_a_group_with_nothing_to_commit_tells_the_errors():
    error = ValueError()
    group = run_of(Caller(), Caller(gives_up=True))
    ran(group, error, None)
    with pytest.raises(NothingKept) as nothing:
        group.require_any()
    tell(group.failed(nothing.value))
    assert group.taken[0].work.error is error
    assert group.again == []


def test_an_error_that_cannot_be_copied_is_shared():
    class Stubborn(Exception):
        def __init__(self, *, needed):
            super().__init__(needed)

    group = run_of(Caller(), Caller())
    ran(group, None, None)
    tell(group.failed(Stubborn(needed=1)))
    assert group.taken[0].work.error is group.taken[1].work.error
