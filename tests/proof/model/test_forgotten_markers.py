"""A broker that forgets markers (KAFKA-20734): a settler dies at any of its steps, or meets another settler there."""

from __future__ import annotations

import logging

import pytest
from simulator.store import SimulatedStore

from dualwrite.kafka.librdkafka.producer import ProducerInstance
from dualwrite.protocol.batches import CompletionStep, next_completion_step
from dualwrite.recovery.settle import _Settling
from dualwrite.sinks import batches as completing
from dualwrite.writing.lane import Lane
from model.checker import Finding
from model.schedule import Impossible, run_lines, text_lines
from model.world import World

DECIDED = """
    A opens
    A runs
    A writes m1 to partition 0 and m2 to partition 1
    A runs to write.prepared
    the broker delays its markers
    A runs to write.completed
    the broker forgets the marker of orders, incarnation 1 on partition 0
    {more}
    the broker writes its markers
"""
FORGOTTEN_IN_ONE = DECIDED.format(more="")
FORGOTTEN_IN_ALL = DECIDED.format(more="the broker forgets the marker of orders, incarnation 1 on partition 1")
UNDECIDED = """
    A opens
    A runs
    A writes m1 to partition 0 and m2 to partition 1
    A runs to write.prepared
    A is killed
    the broker delays its markers
    R1 recovers
    R1 runs to settle.before_retire
    R1 steps
    the broker forgets the marker of orders, incarnation 1 on partition 0
    the broker writes its markers
"""
STEPS = range(1, 40)


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run(*parts: str):
    return run_lines(text_lines("\n".join(parts)))


@pytest.mark.parametrize("forgotten", [FORGOTTEN_IN_ONE, FORGOTTEN_IN_ALL], ids=["in one", "in all"])
@pytest.mark.parametrize("end", ["A is killed", "A closes", "A keeps house", "A writes m3 to partition 1"])
def test_the_next_settler_or_the_owner_itself_ends_it(forgotten, end):
    run(forgotten, end, "everything heals", "a last owner opens and writes")


ABORTED = """
    A opens
    A runs
    A writes m1 to partition 0 and m2 to partition 1, and its code fails
    A runs to write.rolled_back
    the broker delays its markers
    A runs
    the broker forgets the marker of orders, incarnation 1 on partition 0
    the broker writes its markers
"""


@pytest.mark.parametrize(
    "then", ["A writes m3 to partition 0\nA runs", "A writes m3 to partition 1\nA runs", "A closes"]
)
def test_what_an_owner_has_aborted_does_not_come_back_and_holds_nobody_back(then):
    run(ABORTED, then, "everything heals", "a last owner opens and writes")


def test_on_the_answer_alone_it_would_come_back(monkeypatch):
    monkeypatch.setattr(Lane, "know_end", lambda *_: None)
    monkeypatch.setattr(ProducerInstance, "_require_end_known", lambda *_: None)
    with pytest.raises(Finding):
        run(ABORTED, "A writes m3 to partition 0", "A runs", "everything heals")


@pytest.mark.parametrize("forgotten", [FORGOTTEN_IN_ONE, FORGOTTEN_IN_ALL], ids=["in one", "in all"])
def test_a_settler_may_die_at_any_step(forgotten):
    died = 0
    for steps in STEPS:
        try:
            run(forgotten, "A is killed", "R1 recovers", f"R1 steps {steps} times", "R1 is killed", "everything heals")
        except Impossible:
            break
        died += 1
    assert died > 12


@pytest.mark.parametrize("forgotten", [FORGOTTEN_IN_ONE, FORGOTTEN_IN_ALL], ids=["in one", "in all"])
def test_nobody_takes_it_for_complete_where_the_coordinator_has_forgotten_the_id_as_well(forgotten):
    """It can only be ended by hand now: docs/limits.md. Settling records it, and readers wait until an operator has done it."""
    with pytest.raises(Finding, match="is held back"):
        run(forgotten, "A is killed", "the broker forgets orders, incarnation 1", "everything heals")


def test_an_undecided_one_is_ended_by_the_settler_that_aborted_it():
    run(UNDECIDED, "everything heals", "a last owner opens and writes")


@pytest.mark.parametrize("forgotten", [FORGOTTEN_IN_ONE, FORGOTTEN_IN_ALL], ids=["in one", "in all"])
def test_two_settlers_may_meet_at_any_step(forgotten):
    met = 0
    for steps in STEPS:
        try:
            run(
                forgotten,
                "A is killed",
                "R1 recovers",
                f"R1 steps {steps} times",
                "R2 recovers",
                "R2 runs",
                "everything heals",
            )
        except Impossible:
            break
        met += 1
    assert met > 12


@pytest.mark.parametrize(
    "begin", [1, pytest.param(2, marks=pytest.mark.thorough), pytest.param(3, marks=pytest.mark.thorough)]
)
def test_two_settlers_in_turns_do_not_abort_what_the_other_is_ending(begin):
    assert in_turns(begin) > 300


def in_turns(begin):
    """Each third of the first settler's steps, with every step of the second."""
    ran = 0
    for first in STEPS[begin - 1 :: 3]:
        for second in STEPS:
            turns = ["R1 recovers", f"R1 steps {first} times", "R2 recovers", f"R2 steps {second} times", "R1 runs"]
            try:
                run(FORGOTTEN_IN_ONE, "A is killed", *turns, "everything heals")
            except Impossible:
                break
            ran += 1
    return ran


def test_without_the_lock_of_the_row_one_would_abort_what_the_other_is_ending(monkeypatch):
    monkeypatch.setattr(SimulatedStore, "while_locked", lambda _, _names, work, _deadline: work())
    monkeypatch.setattr(_Settling, "_retire_unless_changed", lambda self, items, _: self._make_unusable(items))
    with pytest.raises(Finding, match="told as lost"):
        in_turns(1)


def test_an_abort_that_was_forgotten_while_nobody_was_looking_is_left_to_an_operator():
    """It stays open, and is named nowhere: docs/limits.md."""
    world = run(UNDECIDED, "R1 is killed", "everything heals", "a last owner opens and writes")
    assert world.counts["undecided transactions ended by an operator"] == 1


def test_the_check_sees_a_marker_that_nobody_has_missed(monkeypatch):
    monkeypatch.setattr(World, "_end_what_hangs", lambda _: None)
    with pytest.raises(Finding, match="held back"):
        run(UNDECIDED, "R1 is killed", "everything heals")


HANDED_OVER = """
    W1 works on slot#1
    W1 writes m1 to partition 0 and m2 to partition 1, to hand over
    W1 runs
    D1 decides on the work of W1
    D1 runs to complete.before
    the broker delays its markers
    D1 runs to complete.ended
    the broker forgets the marker of slot#1, incarnation 1 on partition 0
    {more}
    the broker writes its markers
    D1 runs
    W1 writes m3 to partition 0, to hand over
    W1 runs
    everything heals
    a last worker hands over and goes on
"""
HANDED_OVER_FORGOTTEN = {
    "in one": HANDED_OVER.format(more=""),
    "in all": HANDED_OVER.format(more="the broker forgets the marker of slot#1, incarnation 1 on partition 1"),
}


@pytest.mark.parametrize("schedule", HANDED_OVER_FORGOTTEN.values(), ids=HANDED_OVER_FORGOTTEN)
def test_a_decider_claims_and_ends_what_was_forgotten_of_a_transaction_handed_over(schedule):
    world = run(schedule)
    assert world.writes[0].told == "decided", "not completed without a claim"


@pytest.mark.parametrize("schedule", HANDED_OVER_FORGOTTEN.values(), ids=HANDED_OVER_FORGOTTEN)
def test_a_decider_that_believed_the_coordinator_would_leave_it_open(monkeypatch, schedule):
    def without_proof(known):
        step = next_completion_step(known)
        return CompletionStep.RECORD if step is CompletionStep.PROVE else step

    monkeypatch.setattr(completing, "next_completion_step", without_proof)
    with pytest.raises(Finding):
        run(schedule)


def test_what_an_overtaken_settler_has_begun_under_a_settled_id_is_left_to_an_operator():
    """D3 dies before it has seen that its abort was skipped, so D5 settles the id. D1, overtaken, has seen it, and dies too."""
    world = run("""
        given transaction version 2
        W1 works on slot#1 (sends early, native)
        W1 writes m1 to partition 0 and m2 to partition 0, to hand over prepared
        W1 runs to batch.handed_over
        D1 decides on the work of W1
        D1 steps 2 times
        D2 settles slot#1
        D2 runs to claim.row_raised
        D2 is killed
        D1 runs to settle.before_retire
        D3 settles slot#1
        D3 runs to settle.before_retire
        the leader of partition 0 is suspended
        D3 steps
        partition 0 has no leader any more
        the leader of partition 0 goes on
        D3 is killed
        D5 settles slot#1
        D5 runs to settle.retired
        D1 runs to repair.added
        D1 is killed
        everything heals
    """)
    assert world.counts["undecided transactions ended by an operator"] == 1
