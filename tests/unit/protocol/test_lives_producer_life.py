"""A producer's life: the whole matrix of states and events, the illegal ones included."""

import itertools

import pytest

from dualwrite.errors import IllegalStateError
from dualwrite.protocol.lives import PRODUCER_LIFE, WAY_ON, Machine, ProducerEvent, ProducerState

S, E = ProducerState, ProducerEvent

# Written down a second time, by what a user would read in KIP-939 and in the docstrings, not by copying the table.
ENDS = {E.COMMIT: S.READY, E.ABORT: S.READY, E.COMPLETE: S.READY}
ALWAYS = {E.DOUBT: S.DOUBTFUL, E.CLOSE: S.CLOSED}
EXPECTED = {
    S.CREATED: {E.INIT: S.READY, E.INIT_KEEPING: S.KEPT, **ALWAYS},
    S.KEPT: {**ENDS, **ALWAYS},
    S.READY: {E.BEGIN: S.BEGUN, **ALWAYS},
    S.BEGUN: {
        E.PRODUCE: S.BEGUN,
        E.SEND_OFFSETS: S.BEGUN,
        E.PREPARE: S.FLUSHED,
        E.COMMIT: S.READY,
        E.ABORT: S.READY,
        E.FAIL: S.FAILED,
        **ALWAYS,
    },
    S.FLUSHED: {E.NAME: S.PREPARED, E.ABORT: S.READY, E.FAIL: S.FAILED, **ALWAYS},
    S.PREPARED: {**ENDS, **ALWAYS},
    S.FAILED: {E.ABORT: S.READY, E.FAIL: S.FAILED, **ALWAYS},
    S.DOUBTFUL: {**ALWAYS},
    S.CLOSED: {E.CLOSE: S.CLOSED},
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)))
def test_an_event_moves_the_producer_as_expected_or_raises_and_changes_nothing(state, event):
    machine = Machine("producer", PRODUCER_LIFE, state)
    target = EXPECTED[state].get(event)
    assert machine.allows(event) is (target is not None)
    if target is None:
        with pytest.raises(IllegalStateError, match="is not allowed while the producer is"):
            machine.check(event)
        with pytest.raises(IllegalStateError):
            machine.apply(event)
        assert machine.state is state
    else:
        machine.check(event)
        assert machine.state is state
        assert machine.apply(event) is target
        assert machine.state is target


def reachable(start, without):
    seen, todo = {start}, [start]
    while todo:
        for event, target in PRODUCER_LIFE[todo.pop()].items():
            if event not in without and target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def test_from_doubt_no_transaction_can_ever_begin():
    assert reachable(S.DOUBTFUL, without=()) == {S.DOUBTFUL, S.CLOSED}


def test_a_prepared_transaction_can_be_left_only_by_its_end_by_doubt_or_by_closing():
    assert reachable(S.PREPARED, without={E.COMMIT, E.ABORT, E.COMPLETE, E.DOUBT, E.CLOSE}) == {S.PREPARED}


def test_a_failed_transaction_can_never_be_committed():
    assert reachable(S.FAILED, without={E.ABORT, E.DOUBT, E.CLOSE}) == {S.FAILED}
    assert E.COMMIT not in PRODUCER_LIFE[S.FAILED]


def test_every_state_says_how_to_go_on():
    assert set(WAY_ON) == set(S)
    assert all(WAY_ON.values())
