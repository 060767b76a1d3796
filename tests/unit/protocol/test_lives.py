"""The tables and their interpreter: the whole matrix of states and events, the illegal ones included."""

import pytest

from dualwrite.errors import IllegalStateError
from dualwrite.protocol.batches import BATCH_LIFE, BatchEvent, BatchState
from dualwrite.protocol.lives import (
    LANE_LIFE,
    PRODUCER_LIFE,
    WRITE_LIFE,
    LaneEvent,
    LaneState,
    Machine,
    ProducerEvent,
    ProducerState,
    WriteEvent,
    WriteState,
)
from dualwrite.protocol.members import LEASE_LIFE, LeaseEvent, LeaseState

W, E = WriteState, WriteEvent
WRITE_ARROWS = {
    (W.BEGUN, E.CHECK): W.CHECKED,
    (W.BEGUN, E.ABORT): W.ABORTED,
    (W.CHECKED, E.PRODUCE): W.CHECKED,
    (W.CHECKED, E.EXECUTE): W.CHECKED,
    (W.CHECKED, E.FALL_BACK): W.CHECKED,
    (W.CHECKED, E.PREPARE): W.PREPARED,
    (W.CHECKED, E.ABORT): W.ABORTED,
    (W.PREPARED, E.RECORD): W.RECORDED,
    (W.PREPARED, E.HAND_OVER): W.HANDED_OVER,
    (W.PREPARED, E.ABORT): W.ABORTED,
    (W.RECORDED, E.COMMIT): W.DECIDED,
    (W.RECORDED, E.LOSE_ANSWER): W.IN_DOUBT,
    (W.RECORDED, E.ABORT): W.ABORTED,
    (W.IN_DOUBT, E.COMMIT): W.DECIDED,
    (W.IN_DOUBT, E.ABORT): W.ABORTED,
    (W.IN_DOUBT, E.FIND_LOST): W.LOST,
    (W.DECIDED, E.COMPLETE): W.COMPLETED,
    (W.DECIDED, E.WAIT): W.WAITING,
    (W.DECIDED, E.FIND_LOST): W.LOST,
}

L, N = LaneState, LaneEvent
LANE_ARROWS = {
    (L.UNCLAIMED, N.CLAIM): L.UNSETTLED,
    (L.UNCLAIMED, N.CLAIM_WITHOUT_KAFKA): L.UNVERIFIED,
    (L.UNVERIFIED, N.CLAIM): L.UNSETTLED,
    (L.UNVERIFIED, N.CLAIM_WITHOUT_KAFKA): L.UNVERIFIED,
    (L.UNSETTLED, N.CLAIM_WITHOUT_KAFKA): L.UNVERIFIED,
    (L.UNSETTLED, N.CLAIM): L.UNSETTLED,
    (L.UNSETTLED, N.SETTLE): L.SETTLED,
    (L.SETTLED, N.CLAIM): L.UNSETTLED,
    (L.SETTLED, N.START): L.STARTED,
    (L.STARTED, N.DISCARD): L.UNSETTLED,
    (L.UNVERIFIED, N.DOUBT): L.UNSETTLED,
    (L.SETTLED, N.DOUBT): L.UNSETTLED,
}
S, H = LeaseState, LeaseEvent
LEASE_ARROWS = {
    (S.FREE, H.TAKE): S.HELD,
    (S.HELD, H.RENEW): S.HELD,
    (S.HELD, H.EXPIRE): S.EXPIRED,
    (S.HELD, H.LOSE): S.TAKEN,
    (S.HELD, H.GIVE_BACK): S.FREE,
    (S.EXPIRED, H.RENEW): S.HELD,
    (S.EXPIRED, H.EXPIRE): S.EXPIRED,
    (S.EXPIRED, H.LOSE): S.TAKEN,
    (S.EXPIRED, H.GIVE_BACK): S.FREE,
    (S.TAKEN, H.GIVE_BACK): S.FREE,
}
B, A = BatchState, BatchEvent
BATCH_ARROWS = {
    (B.PREPARED, A.COMMIT): B.DECIDED,
    (B.PREPARED, A.FIND): B.FOLLOWING,
    (B.PREPARED, A.LOSE_ANSWER): B.IN_DOUBT,
    (B.PREPARED, A.ABORT): B.UNDECIDED,
    (B.IN_DOUBT, A.FIND): B.WRITTEN,
    (B.IN_DOUBT, A.ABORT): B.UNDECIDED,
    (B.DECIDED, A.COMPLETE): B.FOLLOWING,
    (B.FOLLOWING, A.SETTLE): B.WRITTEN,
}


def test_a_machine_reports_each_other_state_and_no_event_that_stays():
    shown = []
    machine = Machine("dual write", WRITE_LIFE, W.BEGUN, moved=shown.append)
    for event in (E.CHECK, E.PRODUCE, E.EXECUTE, E.PREPARE):
        machine.apply(event)
    with pytest.raises(IllegalStateError):
        machine.apply(E.PRODUCE)
    assert shown == [W.CHECKED, W.PREPARED]


def hold_against(machine, arrows, state, event):
    target = arrows.get((state, event))
    if target is None:
        assert not machine.allows(event)
        with pytest.raises(IllegalStateError, match=event.value):
            machine.apply(event)
        assert machine.state is state
    else:
        assert machine.apply(event) is target


@pytest.mark.parametrize("state", list(B))
@pytest.mark.parametrize("event", list(A))
def test_one_batch_moves_as_its_table_says_and_no_other_way(state, event):
    hold_against(Machine("batch", BATCH_LIFE, state), BATCH_ARROWS, state, event)


@pytest.mark.parametrize("state", list(L))
@pytest.mark.parametrize("event", list(N))
def test_one_lane_moves_as_its_table_says_and_no_other_way(state, event):
    hold_against(Machine("lane", LANE_LIFE, state), LANE_ARROWS, state, event)


@pytest.mark.parametrize("state", list(S))
@pytest.mark.parametrize("event", list(H))
def test_one_lease_moves_as_its_table_says_and_no_other_way(state, event):
    hold_against(Machine("lease", LEASE_LIFE, state), LEASE_ARROWS, state, event)


def test_a_lease_that_another_has_taken_can_only_be_given_up():
    assert set(LEASE_LIFE[S.TAKEN]) == {H.GIVE_BACK}


def test_a_producer_is_started_only_once_for_each_settled_claim():
    assert [state for state in L if N.START in LANE_LIFE[state]] == [L.SETTLED]
    assert LANE_LIFE[L.SETTLED][N.START] is L.STARTED
    assert N.SETTLE not in LANE_LIFE[L.STARTED]


@pytest.mark.parametrize("state", list(W))
@pytest.mark.parametrize("event", list(E))
def test_one_dual_write_moves_as_its_table_says_and_no_other_way(state, event):
    hold_against(Machine("dual write", WRITE_LIFE, state), WRITE_ARROWS, state, event)


def test_nothing_that_was_decided_can_abort():
    for state in (W.DECIDED, W.COMPLETED, W.LOST):
        assert E.ABORT not in WRITE_LIFE[state]
    for state in (B.DECIDED, B.FOLLOWING, B.WRITTEN):
        assert A.ABORT not in BATCH_LIFE[state]


def test_nothing_can_be_produced_before_the_check_or_after_prepare():
    assert [state for state in W if E.PRODUCE in WRITE_LIFE[state]] == [W.CHECKED]


def test_a_doubtful_producer_can_only_be_closed():
    allowed = set(PRODUCER_LIFE[ProducerState.DOUBTFUL]) - {ProducerEvent.DOUBT}
    assert allowed == {ProducerEvent.CLOSE}


@pytest.mark.parametrize("state", [ProducerState.KEPT, ProducerState.PREPARED])
def test_prepare_and_keep_freeze_everything_but_commit_abort_complete(state):
    allowed = set(PRODUCER_LIFE[state]) - {ProducerEvent.DOUBT, ProducerEvent.CLOSE}
    assert allowed == {ProducerEvent.COMMIT, ProducerEvent.ABORT, ProducerEvent.COMPLETE}


@pytest.mark.parametrize(
    ("table", "states"),
    [
        (WRITE_LIFE, WriteState),
        (PRODUCER_LIFE, ProducerState),
        (BATCH_LIFE, BatchState),
        (LANE_LIFE, LaneState),
        (LEASE_LIFE, LeaseState),
    ],
)
def test_every_state_has_a_row_and_cannot_be_changed(table, states):
    assert set(table) == set(states)
    with pytest.raises(TypeError):
        table[next(iter(states))] = {}
