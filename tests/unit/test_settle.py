"""The settle decision, over the whole space of what can be known."""

from itertools import product

import pytest

from dualwrite.observations import LogProof, Outcome, TransactionStatus, TransactionView
from dualwrite.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.settle import (
    Knowledge,
    SettleStep,
    belongs,
    is_older,
    is_open,
    next_step,
    shows_same_transaction,
)

S = PreparedTxnState(42, 3, 7, (FirstOffset("orders", 0, 17), FirstOffset("orders", 1, 33)), 1000)
Status = TransactionStatus
TRANSITION = {Status.PREPARE_COMMIT, Status.PREPARE_ABORT, Status.DEAD, Status.PREPARE_EPOCH_FENCE}

VIEWS = [
    TransactionView(status, producer_id, epoch, started)
    for status, (producer_id, epoch), started in product(Status, [(42, 3), (42, 4), (43, 3)], [None, 1000, 1001])
]
ALL = [
    Knowledge(prepared, recorded, view, evidence, proof, retired)
    for prepared, recorded, view, evidence, proof, retired in product(
        [None, S], [None, *Outcome], [None, *VIEWS], [None, False, True], [None, *LogProof], [False, True]
    )
]


def expected(k: Knowledge) -> SettleStep:
    """The table of DESIGN in another form: by the coordinator's word first, as an operator would read it."""
    if k.retired:
        return SettleStep.FINISH
    if k.view is None:
        return SettleStep.LOOK
    if k.view.status in TRANSITION:
        return SettleStep.WAIT
    pending = k.prepared is not None and k.recorded is None
    ours = (k.view.producer_id, k.view.epoch) == (42, 3)
    match (k.view.status, pending):
        case (Status.NO_SUCH_ID, False):
            return SettleStep.FINISH
        case (_, False):
            return SettleStep.RETIRE
        case (Status.ONGOING, True) if ours and k.view.started_ms != 1001 and k.evidence is not False:
            return SettleStep.COMMIT if k.evidence else SettleStep.LOOK_AT_PARTITIONS
        case (Status.COMPLETE_COMMIT, True) if ours and k.proof in {LogProof.OPEN, LogProof.UNKNOWABLE}:
            return SettleStep.RECORD_COMMITTED
    return {
        None: SettleStep.PROVE,
        LogProof.COMMITTED: SettleStep.RECORD_COMMITTED,
        LogProof.ABORTED: SettleStep.RECORD_LOST,
        LogProof.OPEN: SettleStep.WAIT,
        LogProof.UNKNOWABLE: SettleStep.RECORD_UNVERIFIABLE,
    }[k.proof]


def test_every_combination_has_the_step_of_the_table():
    wrong = [(k, next_step(k), expected(k)) for k in ALL if next_step(k) is not expected(k)]
    assert not wrong, wrong[:3]
    assert len(ALL) > 5000


def test_a_decided_transaction_is_never_retired_before_its_outcome_is_recorded():
    for k in ALL:
        if k.prepared is not None and k.recorded is None and not k.retired:
            assert next_step(k) not in {SettleStep.RETIRE, SettleStep.FINISH}, k


def test_nothing_is_committed_without_evidence_of_the_very_transaction():
    commits = [k for k in ALL if next_step(k) is SettleStep.COMMIT]
    assert commits
    for k in commits:
        assert k.view.status is Status.ONGOING
        assert k.evidence is True
        assert (k.view.producer_id, k.view.epoch) == (S.producer_id, S.epoch)


@pytest.mark.parametrize("proof", [LogProof.UNKNOWABLE, LogProof.OPEN])
def test_absence_of_proof_is_never_taken_for_committed(proof):
    for k in ALL:
        if k.proof is proof and k.view is not None and k.view.status is not Status.COMPLETE_COMMIT:
            assert next_step(k) is not SettleStep.RECORD_COMMITTED, k


def test_an_abort_marker_in_the_log_outweighs_the_coordinators_word():
    view = TransactionView(Status.COMPLETE_COMMIT, S.producer_id, S.epoch)
    assert next_step(Knowledge(prepared=S, view=view)) is SettleStep.PROVE
    assert next_step(Knowledge(prepared=S, view=view, proof=LogProof.ABORTED)) is SettleStep.RECORD_LOST


def test_state_belongs_only_to_the_incarnation_that_prepared_it():
    assert belongs(S, 7)
    assert not belongs(S, 8)
    assert not belongs(PreparedTxnState(), 0)


def test_start_time_tells_two_transactions_of_one_epoch_apart():
    assert shows_same_transaction(TransactionView(Status.ONGOING, 42, 3, 1000), S)
    assert not shows_same_transaction(TransactionView(Status.ONGOING, 42, 3, 1001), S)
    assert shows_same_transaction(TransactionView(Status.ONGOING, 42, 3, None), S)


@pytest.mark.parametrize(
    ("offsets", "verdict"),
    [
        ({("orders", 0): 17, ("orders", 1): 33}, True),
        ({("orders", 0): 17, ("orders", 1): 34}, False),
        ({("orders", 0): 17, ("orders", 1): None}, False),
        ({("orders", 0): 17}, True),
        ({("orders", 0): 18}, False),
        ({("orders", 1): None}, False),
        ({}, False),
    ],
)
def test_open_means_every_first_offset_is_there_of_the_partitions_that_still_exist(offsets, verdict):
    assert is_open(S, offsets) is verdict


def test_a_state_without_evidence_is_never_open():
    assert not is_open(PreparedTxnState(42, 3, 7), {})


def state(incarnation=1, *offsets, topic_id="A" * 22):
    firsts = tuple(FirstOffset("t", partition, offset, topic_id) for partition, offset in enumerate(offsets))
    return PreparedTxnState(7, 0, incarnation, firsts)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (PreparedTxnState(), state(1, 5)),
        (state(1, 5), state(2, 3)),
        (state(1, 5), state(1, 9)),
        (state(1, 5, 8), state(1, 5, 9)),
    ],
)
def test_a_state_that_was_decided_before_another_one_is_older(older, newer):
    assert is_older(older, than=newer)
    assert not is_older(newer, than=older)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PreparedTxnState(), PreparedTxnState()),
        (state(1, 5), state(1, 5)),
        (state(1, 5), state(1, 9, topic_id="B" * 22)),
        (state(1, 5, topic_id=None), state(1, 9, topic_id=None)),
    ],
)
def test_states_that_cannot_be_ordered_are_not_older(one, other):
    assert not is_older(one, than=other)
    assert not is_older(other, than=one)
