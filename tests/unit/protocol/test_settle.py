"""The settle decision, over the whole space of what can be known."""

from dataclasses import replace
from itertools import product

import pytest

from dualwrite.kafka.cluster import Place
from dualwrite.kafka.log import combined
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.settle import (
    Knowledge,
    SettleStep,
    compared,
    initial,
    looked,
    next_step,
    proved,
    retired,
    to_end,
)
from dualwrite.protocol.values import LogProof, Outcome, TransactionStatus, TransactionView, own_among

S = PreparedTxnState(42, 3, 7, (FirstOffset("orders", 0, 17), FirstOffset("orders", 1, 33)), 1000)
P0, P1, ELSEWHERE = ("orders", 0), ("orders", 1), ("payments", 4)
OWN = frozenset({P0, P1})
Status = TransactionStatus
TRANSITION = {Status.PREPARE_COMMIT, Status.PREPARE_ABORT, Status.DEAD, Status.PREPARE_EPOCH_FENCE}
AT_REST = {Status.EMPTY, Status.COMPLETE_COMMIT, Status.COMPLETE_ABORT}
RECORDS = {SettleStep.RECORD_COMMITTED, SettleStep.RECORD_LOST, SettleStep.RECORD_UNVERIFIABLE}
CONTRARY = {True: Status.COMPLETE_ABORT, False: Status.COMPLETE_COMMIT}
IDS = [(42, 3), (42, 4), (43, 3)]

VIEWS = [
    TransactionView(status, producer_id, epoch, started, partitions=partitions)
    for status, (producer_id, epoch), (started, partitions) in product(
        Status, IDS, [(None, ()), (1001, ()), (None, (P0, P1)), (None, (P0,))]
    )
]


@pytest.fixture(scope="module")
def every() -> list[Knowledge]:
    return [
        Knowledge(
            prepared,
            recorded,
            view,
            evidence,
            proof,
            ids,
            suspects,
            still_open=still_open,
            ended=ended,
            confirmed=still_open is not None,
        )
        for (prepared, recorded), view, evidence, proof, ids, suspects, still_open, ended in product(
            [(None, None), (S, None), (S, Outcome.COMMITTED), (S, Outcome.LOST)],
            [None, *VIEWS],
            [None, False, True],
            [None, *LogProof],
            [None, (42, 4)],
            [frozenset(), OWN],
            [None, (), ((P0, 17),), ((P0, 18),)],
            [False, True],
        )
    ]


def expected(k: Knowledge) -> SettleStep:
    """The table in another form: by the coordinator's word first, as an operator would read it."""
    pending = k.prepared is not None and k.recorded is None
    if not pending and k.retired and not k.suspects:
        return SettleStep.FINISH
    if k.view is None:
        return SettleStep.LOOK
    if k.view.status in TRANSITION:
        return SettleStep.WAIT
    return expected_of_decided(k) if pending else expected_of_undecided(k)


def expected_of_undecided(k: Knowledge) -> SettleStep:
    done = k.view.status in AT_REST and (k.view.producer_id, k.view.epoch) == k.retired
    if k.view.status is Status.NO_SUCH_ID:
        return SettleStep.FINISH
    if k.suspects and k.still_open is None and (done or k.view.status is Status.ONGOING):
        return SettleStep.LOOK_FOR_OPEN
    if not done:
        return SettleStep.RETIRE
    if not k.still_open:
        return SettleStep.FINISH
    # What is left is committed only where it is the decided one, whose commit is not recorded as anything else.
    commits = k.still_open == ((P0, 17),) and k.recorded is Outcome.COMMITTED
    return SettleStep.RETIRE if k.view.status is CONTRARY[commits] else SettleStep.REPAIR_MARKERS


def expected_of_decided(k: Knowledge) -> SettleStep:  # noqa: C901, PLR0912 - a row of the table is a branch
    ids = (k.view.producer_id, k.view.epoch)
    left_open = k.still_open == ((P0, 17),)
    if k.view.status is Status.ONGOING:
        if ids == (42, 3) and k.view.started_ms != 1001 and k.view.partitions != (P0,) and not k.ended:
            if k.evidence is not False:
                return SettleStep.COMMIT if k.evidence else SettleStep.LOOK_AT_PARTITIONS
        elif ids == (42, 4):
            if k.still_open is None:
                return SettleStep.LOOK_FOR_OPEN
            if left_open and k.view.partitions:
                return SettleStep.COMMIT
    if k.proof in {LogProof.OPEN, LogProof.PARTLY, LogProof.UNKNOWABLE}:
        if k.still_open is None:
            return SettleStep.LOOK_FOR_OPEN
        if left_open:
            if ids[0] != 42:
                return SettleStep.RECORD_UNVERIFIABLE
            if k.evidence is False:
                return SettleStep.WAIT
            if k.view.status is Status.ONGOING and ids == (42, 3) and k.view.partitions:
                return SettleStep.COMMIT
            fenced = k.view.status in AT_REST - {Status.COMPLETE_ABORT} and ids == (42, 4)
            return SettleStep.REPAIR_MARKERS if fenced else SettleStep.RETIRE
    if k.view.status is Status.COMPLETE_COMMIT and ids == (42, 3) and k.proof in {LogProof.OPEN, LogProof.UNKNOWABLE}:
        return SettleStep.RECORD_COMMITTED
    return {
        None: SettleStep.PROVE,
        LogProof.COMMITTED: SettleStep.RECORD_COMMITTED,
        LogProof.PARTLY: SettleStep.RECORD_COMMITTED,
        LogProof.ABORTED: SettleStep.RECORD_LOST,
        LogProof.OPEN: SettleStep.WAIT,
        LogProof.UNKNOWABLE: SettleStep.RECORD_UNVERIFIABLE,
    }[k.proof]


def test_every_combination_has_the_step_of_the_table(every: list[Knowledge]):
    wrong = [(k, next_step(k), expected(k)) for k in every if next_step(k) is not expected(k)]
    assert not wrong, wrong[:3]
    assert len(every) > 200_000
    assert {next_step(k) for k in every} == set(SettleStep)


def test_a_decided_transaction_is_retired_before_its_outcome_is_recorded_only_to_end_it_where_it_was_forgotten(
    every: list[Knowledge],
):
    for k in every:
        if k.is_pending:
            step = next_step(k)
            assert step is not SettleStep.FINISH, k
            if step is SettleStep.RETIRE:
                assert own_among(S, k.still_open), k
                assert k.proof in {LogProof.OPEN, LogProof.PARTLY, LogProof.UNKNOWABLE}, k


def test_nothing_is_committed_without_evidence_of_the_very_transaction(every: list[Knowledge]):
    commits = [k for k in every if next_step(k) is SettleStep.COMMIT]
    assert {k.view.epoch for k in commits} == {3, 4}
    for k in commits:
        assert k.view.status is Status.ONGOING
        assert k.view.producer_id == S.producer_id
        if k.evidence is not True:
            assert set(k.view.partitions) & own_among(S, k.still_open)


def test_what_was_forgotten_is_ended_only_under_an_id_that_nobody_else_writes_under(every: list[Knowledge]):
    ends = [k for k in every if next_step(k) is SettleStep.REPAIR_MARKERS]
    assert {k.is_pending for k in ends} == {True, False}
    for k in ends:
        assert k.view.status in AT_REST
        assert (k.view.producer_id, k.view.epoch) == (42, 4)


def test_one_epoch_ends_what_was_forgotten_in_one_way_only(every: list[Knowledge]):
    for k in every:
        if next_step(k) is SettleStep.REPAIR_MARKERS:
            _, committed = to_end(k)
            assert k.view.status is not CONTRARY[committed], k


def test_what_is_aborted_after_the_decided_one_was_committed_is_aborted_under_the_next_epoch():
    known = looked(Knowledge(prepared=S, suspects=frozenset({ELSEWHERE})), view(Status.COMPLETE_COMMIT))
    known = replace(proved(known, LogProof.PARTLY), still_open=((P0, 17), (ELSEWHERE, 5)))
    assert next_step(known) is SettleStep.RETIRE
    known = replace(proved(retired(known, (42, 4)), LogProof.PARTLY), still_open=((P0, 17), (ELSEWHERE, 5)))
    assert next_step(known) is SettleStep.REPAIR_MARKERS
    assert to_end(known) == ({P0}, True)
    known = proved(looked(known, view(Status.COMPLETE_COMMIT, 4)), LogProof.COMMITTED)
    assert next_step(known) is SettleStep.RECORD_COMMITTED
    known = replace(known, recorded=Outcome.COMMITTED)
    assert next_step(known) is SettleStep.LOOK_FOR_OPEN
    known = replace(known, still_open=((ELSEWHERE, 5),))
    assert next_step(known) is SettleStep.RETIRE
    known = replace(retired(known, (42, 5)), still_open=((ELSEWHERE, 5),))
    assert next_step(known) is SettleStep.REPAIR_MARKERS
    assert to_end(known) == ({ELSEWHERE}, False)


def test_a_commit_beside_deleted_records_is_looked_at_before_it_counts_for_the_whole():
    places = {Place("orders", 0): LogProof.UNKNOWABLE, Place("orders", 1): LogProof.COMMITTED}
    known = looked(Knowledge(prepared=S), view(Status.COMPLETE_COMMIT))
    known = proved(known, combined(S, places))
    assert next_step(known) is SettleStep.LOOK_FOR_OPEN
    assert next_step(replace(known, still_open=((P0, 17),))) is SettleStep.RETIRE
    known = replace(known, still_open=())
    assert next_step(known) is SettleStep.PROVE
    assert next_step(proved(known, LogProof.PARTLY)) is SettleStep.RECORD_COMMITTED


def test_what_was_open_when_the_log_was_read_and_is_not_any_more_is_proved_again(every: list[Knowledge]):
    """It may have been aborted in between: after a time-out of the process that was ending it there."""
    for k in every:
        unproved = (
            k.is_pending and k.proof in {LogProof.OPEN, LogProof.PARTLY, LogProof.UNKNOWABLE} and k.still_open == ()
        )
        if unproved and next_step(k) in RECORDS:
            assert next_step(replace(k, confirmed=False)) is SettleStep.PROVE, k


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.UNVERIFIABLE])
def test_whoever_comes_after_a_settler_that_has_recorded_a_loss_looks_what_it_has_left_open(outcome):
    known = retired(initial(S, outcome), (42, 4))
    assert next_step(known) is SettleStep.LOOK_FOR_OPEN
    assert next_step(replace(known, still_open=((P0, 17),))) is SettleStep.REPAIR_MARKERS
    assert next_step(retired(initial(S, Outcome.COMMITTED), (42, 4))) is SettleStep.FINISH


def test_a_late_request_that_begins_a_forgotten_transaction_again_is_committed_with_it():
    known = looked(Knowledge(prepared=S), view(Status.ONGOING, 3, P0))
    known = replace(proved(known, LogProof.PARTLY), still_open=((P0, 17),))
    assert next_step(known) is SettleStep.COMMIT
    assert next_step(replace(known, tainted=frozenset({P0}))) is SettleStep.RETIRE
    assert next_step(replace(known, still_open=((P0, 17), (ELSEWHERE, 5)))) is SettleStep.COMMIT
    beside = replace(known, view=view(Status.ONGOING, 3, P0, ELSEWHERE), still_open=((P0, 17), (ELSEWHERE, 5)))
    assert next_step(beside) is SettleStep.RETIRE


@pytest.mark.parametrize("proof", [LogProof.UNKNOWABLE, LogProof.OPEN])
def test_absence_of_proof_is_never_taken_for_committed(every: list[Knowledge], proof: LogProof):
    for k in every:
        if k.proof is proof and k.view is not None and k.view.status is not Status.COMPLETE_COMMIT:
            assert next_step(k) is not SettleStep.RECORD_COMMITTED, k


def view(status, epoch=3, *partitions):
    return TransactionView(status, 42, epoch, partitions=partitions)


@pytest.mark.parametrize("status", Status)
def test_what_is_open_or_ending_is_suspected_and_what_another_has_aborted_there_is_never_committed(status):
    known = looked(Knowledge(prepared=S), view(status, 3, P0, ELSEWHERE))
    unended = status in {Status.ONGOING, *TRANSITION} - {Status.PREPARE_COMMIT}
    aborting = status in {Status.PREPARE_ABORT, Status.PREPARE_EPOCH_FENCE}
    assert known.suspects == (frozenset({P0, ELSEWHERE}) if unended else frozenset())
    assert known.tainted == (frozenset({P0, ELSEWHERE}) if aborting else frozenset())
    assert looked(known, view(Status.EMPTY)).suspects == known.suspects


def test_a_round_forgets_the_answers_of_the_one_before_but_not_that_it_was_ended():
    known = Knowledge(
        prepared=S, view=view(Status.ONGOING), evidence=False, proof=LogProof.PARTLY, still_open=((P0, 17),)
    )
    again = looked(known, view(Status.ONGOING))
    assert (again.evidence, again.proof, again.still_open, again.ended) == (None, None, None, True)
    assert next_step(again) is SettleStep.PROVE
    assert not looked(looked(Knowledge(prepared=S), view(Status.ONGOING)), view(Status.ONGOING)).ended


def test_what_is_being_committed_of_an_incarnation_that_has_nothing_pending_is_suspected():
    for nothing in (Knowledge(), Knowledge(prepared=S, recorded=Outcome.COMMITTED)):
        assert looked(nothing, view(Status.PREPARE_COMMIT, 3, P0)).suspects == {P0}


def test_the_partitions_of_the_decided_transaction_itself_are_not_suspected_as_the_log_proves_its_end():
    known = looked(Knowledge(prepared=S), view(Status.ONGOING, 3, P0, P1))
    assert compared(known, True).suspects == frozenset()
    assert compared(known, False).suspects == {P0, P1}


def test_a_proof_of_an_earlier_transaction_clears_no_partition_of_a_later_one():
    known = Knowledge(prepared=S, suspects=frozenset({P0, ELSEWHERE}))
    assert proved(known, LogProof.COMMITTED).suspects == {P0, ELSEWHERE}
    for proof in set(LogProof) - {LogProof.COMMITTED}:
        assert proved(known, proof).suspects == {P0, P1, ELSEWHERE}


def test_retiring_aborts_what_is_ongoing_and_that_is_remembered():
    known = retired(Knowledge(prepared=S, view=view(Status.ONGOING, 3, P1)), (42, 4))
    assert (known.view, known.retired, known.tainted) == (view(Status.EMPTY, 4), (42, 4), {P1})
    assert retired(Knowledge(prepared=S, view=view(Status.COMPLETE_COMMIT)), (42, 4)).tainted == frozenset()


@pytest.mark.parametrize(
    ("prepared", "recorded", "tainted", "still_open", "ends"),
    [
        (S, None, (), ((P0, 17),), ({P0}, True)),
        (S, None, (), ((P0, 5), (P1, 33)), ({P0, P1}, True)),
        (S, None, (), ((P0, 17), (P1, 34), (ELSEWHERE, 1)), ({P0}, True)),
        (S, None, (P0,), ((P0, 17), (P1, 33)), ({P1}, True)),
        (S, None, (P0,), ((P0, 17),), ({P0}, False)),
        (S, Outcome.COMMITTED, (), ((P0, 17), (ELSEWHERE, 1)), ({P0}, True)),
        (S, Outcome.COMMITTED, (), ((P0, 18), (ELSEWHERE, 1)), ({P0, ELSEWHERE}, False)),
        (S, Outcome.LOST, (), ((P0, 17),), ({P0}, False)),
        (S, Outcome.UNVERIFIABLE, (), ((P0, 17),), ({P0}, False)),
        (None, None, (), ((P0, 17),), ({P0}, False)),
    ],
)
def test_only_records_of_the_decided_transaction_and_no_others_are_committed(
    prepared, recorded, tainted, still_open, ends
):
    known = Knowledge(prepared=prepared, recorded=recorded, tainted=frozenset(tainted), still_open=still_open)
    assert to_end(known) == ends


def test_an_abort_marker_in_the_log_outweighs_the_coordinators_word():
    complete = view(Status.COMPLETE_COMMIT)
    assert next_step(Knowledge(prepared=S, view=complete)) is SettleStep.PROVE
    assert next_step(Knowledge(prepared=S, view=complete, proof=LogProof.ABORTED)) is SettleStep.RECORD_LOST
