"""A decider's next step on a handed-over transaction, and when its owner may continue: over all inputs."""

from dataclasses import replace
from datetime import datetime, timezone
from itertools import product

import pytest

from dualwrite.protocol.batches import (
    CompletionStep,
    HandedOver,
    NativeHandedOver,
    may_go_on,
    next_completion_step,
    next_native_completion_step,
    waited,
)
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.settle import EndStep
from dualwrite.protocol.values import EndAnswer, LogProof, Outcome, StateRow, TransactionStatus, TransactionView

S = PreparedTxnState(42, 3, 7, (FirstOffset("events", 0, 17), FirstOffset("events", 1, 33)), 1000)
Status = TransactionStatus
IDS = [(42, 3), (42, 4), (43, 3), (-1, -1)]
VIEWS = [None, *(TransactionView(status, *ids) for status, ids in product(Status, IDS))]
SPACE = list(product([None, *EndAnswer], VIEWS, [None, *LogProof]))


def own(status):
    return TransactionView(status, S.producer_id, S.epoch)


def step(answer, view=None, proof=None):
    return next_completion_step(HandedOver(S, answer, view, proof))


@pytest.mark.parametrize("answer", [None, *(answer for answer in EndAnswer if answer is not EndAnswer.ENDED)])
def test_what_was_not_answered_or_refused_is_left_whatever_is_seen_later(answer):
    steps = {step(answer, view, proof) for view, proof in product(VIEWS, [None, *LogProof])}
    assert steps == {CompletionStep.LEAVE}


def test_what_was_answered_is_looked_at():
    assert step(EndAnswer.ENDED) is CompletionStep.LOOK


def test_markers_that_are_being_written_are_waited_for():
    assert step(EndAnswer.ENDED, own(Status.PREPARE_COMMIT)) is CompletionStep.WAIT


def test_what_the_coordinator_shows_as_complete_is_proved():
    assert step(EndAnswer.ENDED, own(Status.COMPLETE_COMMIT)) is CompletionStep.PROVE


def test_what_the_log_proves_is_recorded():
    assert step(EndAnswer.ENDED, own(Status.COMPLETE_COMMIT), LogProof.COMMITTED) is CompletionStep.RECORD


@pytest.mark.parametrize("proof", [proof for proof in LogProof if proof is not LogProof.COMMITTED])
def test_what_the_log_does_not_prove_is_left(proof):
    assert step(EndAnswer.ENDED, own(Status.COMPLETE_COMMIT), proof) is CompletionStep.LEAVE


@pytest.mark.parametrize(
    "status", [one for one in Status if one not in {Status.PREPARE_COMMIT, Status.COMPLETE_COMMIT}]
)
def test_any_other_state_is_left(status):
    assert {step(EndAnswer.ENDED, own(status), proof) for proof in (None, *LogProof)} == {CompletionStep.LEAVE}


@pytest.mark.parametrize("ids", IDS[1:])
@pytest.mark.parametrize("status", Status)
def test_what_another_producer_has_there_is_left(status, ids):
    view = TransactionView(status, *ids)
    assert {step(EndAnswer.ENDED, view, proof) for proof in (None, *LogProof)} == {CompletionStep.LEAVE}


def test_only_one_combination_of_all_lets_the_owner_go_on():
    told = [known for known in SPACE if step(*known) is CompletionStep.RECORD]
    assert told == [(EndAnswer.ENDED, own(Status.COMPLETE_COMMIT), LogProof.COMMITTED)]


def native_steps():
    for answer, end, proof in product([None, *EndAnswer], [None, *EndStep], [None, *LogProof]):
        yield (answer, end, proof), next_native_completion_step(NativeHandedOver(answer, end, proof))


def test_a_native_transaction_is_ended_until_the_coordinator_has_done_it():
    for (answer, _, _), step in native_steps():
        assert (step is CompletionStep.END) is (answer is None)
        if answer is EndAnswer.IN_PROGRESS:
            assert step is CompletionStep.WAIT
        elif answer is not None and answer is not EndAnswer.ENDED:
            assert step is CompletionStep.LEAVE


def test_a_native_transaction_is_recorded_on_the_end_in_every_partition_and_the_logs_proof():
    recorded = [known for known, step in native_steps() if step is CompletionStep.RECORD]
    assert recorded == [(EndAnswer.ENDED, EndStep.KNOWN, LogProof.COMMITTED)]
    for (answer, end, proof), step in native_steps():
        if answer is EndAnswer.ENDED and end is not EndStep.KNOWN:
            asking = {None: CompletionStep.LOOK, EndStep.WAIT: CompletionStep.WAIT}
            assert step is asking.get(end, CompletionStep.LEAVE)
        elif answer is EndAnswer.ENDED and proof is not LogProof.COMMITTED:
            assert step is (CompletionStep.PROVE if proof is None else CompletionStep.LEAVE)


def test_after_waiting_a_native_transaction_is_asked_for_again():
    for answer, end in product(EndAnswer, EndStep):
        step = next_native_completion_step(waited(NativeHandedOver(answer, end)))
        asked = {EndAnswer.IN_PROGRESS: CompletionStep.END, EndAnswer.ENDED: CompletionStep.LOOK}
        assert step is asked.get(answer, CompletionStep.LEAVE)


KNOWN = StateRow("slot#1", PreparedTxnState(), "n", 7, 6, None, "c", "W1", datetime(2026, 1, 1, tzinfo=timezone.utc))
COMPLETED = replace(KNOWN, prepared=S, completed=Outcome.COMMITTED)
OTHERS = {
    "an earlier transaction": replace(S, first_offsets=(FirstOffset("events", 0, 3),)),
    "another epoch": replace(S, epoch=4),
    "another producer": replace(S, producer_id=43),
    "another incarnation": replace(S, incarnation=8),
    "nothing": PreparedTxnState(),
}


def test_an_owner_goes_on_where_the_row_names_its_transaction_as_completed():
    assert may_go_on(KNOWN, COMPLETED, S)


def test_being_settled_up_to_an_earlier_incarnation_or_touched_later_does_not_matter():
    assert may_go_on(KNOWN, replace(COMPLETED, settled_incarnation=5, owner="R1"), S)


def test_decided_is_not_completed():
    assert not may_go_on(KNOWN, replace(COMPLETED, completed=None), S)


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.COMMITTED])
def test_lost_or_unverifiable_is_not_completed(outcome):
    assert not may_go_on(KNOWN, replace(COMPLETED, completed=outcome), S)


@pytest.mark.parametrize("completed", [None, *Outcome])
@pytest.mark.parametrize("prepared", OTHERS.values(), ids=OTHERS)
def test_a_row_that_names_another_transaction_says_nothing_of_this_one(prepared, completed):
    assert not may_go_on(KNOWN, replace(COMPLETED, prepared=prepared, completed=completed), S)


@pytest.mark.parametrize("handed_over", [None, S])
@pytest.mark.parametrize("incarnation", [6, 8])
def test_an_owner_that_was_claimed_does_not_go_on(incarnation, handed_over):
    assert not may_go_on(KNOWN, replace(COMPLETED, incarnation=incarnation), handed_over)


@pytest.mark.parametrize("handed_over", [None, S])
def test_an_owner_whose_row_was_made_anew_does_not_go_on(handed_over):
    assert not may_go_on(KNOWN, replace(COMPLETED, namespace="o"), handed_over)


@pytest.mark.parametrize("completed", [None, *Outcome])
@pytest.mark.parametrize("prepared", [PreparedTxnState(), S])
def test_an_owner_that_has_handed_nothing_over_needs_its_incarnation_alone(prepared, completed):
    assert may_go_on(KNOWN, replace(KNOWN, prepared=prepared, completed=completed), None)
