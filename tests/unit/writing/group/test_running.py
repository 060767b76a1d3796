"""One group from its block to its end: which units run, and in which order the steps come."""

from contextlib import contextmanager

from dualwrite import WriterLimits
from dualwrite.protocol.grouping import Unit
from dualwrite.writing.group_commit import run_group
from dualwrite.writing.units_of_work import GroupRun
from unit.writing.group.held import transaction_of_nothing
from unit.writing.group.test_results import Caller, tell


def run_one(steps, call, caller):
    @contextmanager
    def block():
        steps.append("begin")
        yield transaction_of_nothing()
        steps.append("commit")

    group = GroupRun("w", [Unit(caller, "k")])
    tell(run_group(group, block, WriterLimits(), call, lambda: steps.append("all run")))
    return group


def test_the_next_group_may_run_before_this_one_commits():
    steps = []
    caller = Caller()
    run_one(steps, lambda *_: steps.append("ran") or "done", caller)
    assert steps == ["begin", "ran", "all run", "commit"]
    assert caller.result == "done"


def test_an_error_of_the_only_unit_leaves_the_block():
    steps, error = [], ValueError()

    def call(*_):
        raise error

    caller = Caller()
    run_one(steps, call, caller)
    assert steps == ["begin"]
    assert caller.error is error


def test_nothing_is_committed_for_a_caller_that_has_given_up():
    steps = []
    run_one(steps, lambda *_: steps.append("ran"), Caller(gives_up=True))
    assert steps == ["begin", "all run"]


def test_a_block_that_cannot_begin_has_failed_for_all_its_units():
    @contextmanager
    def block():
        raise ValueError("no lane")
        yield

    callers = [Caller(), Caller()]
    group = GroupRun("w", [Unit(caller, n) for n, caller in enumerate(callers)])
    tell(run_group(group, block, WriterLimits(), lambda *_: None, lambda: None))
    assert [str(caller.error) for caller in callers] == ["no lane"] * 2
