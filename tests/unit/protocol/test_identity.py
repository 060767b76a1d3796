"""Which transaction the servers show, by what a prepared state names."""

import pytest

from dualwrite.protocol.identity import belongs, is_older, is_open, others_than, shows_same_transaction
from dualwrite.protocol.observations import TransactionStatus, TransactionView
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState

S = PreparedTxnState(42, 3, 7, (FirstOffset("orders", 0, 17), FirstOffset("orders", 1, 33)), 1000)
P0, P1, ELSEWHERE = ("orders", 0), ("orders", 1), ("payments", 4)
ONGOING = TransactionStatus.ONGOING


def view(*partitions):
    return TransactionView(ONGOING, 42, 3, partitions=partitions)


def test_state_belongs_only_to_the_incarnation_that_prepared_it():
    assert belongs(S, 7)
    assert not belongs(S, 8)
    assert not belongs(PreparedTxnState(), 0)


def test_start_time_tells_two_transactions_of_one_epoch_apart():
    assert shows_same_transaction(TransactionView(ONGOING, 42, 3, 1000), S)
    assert not shows_same_transaction(TransactionView(ONGOING, 42, 3, 1001), S)
    assert shows_same_transaction(TransactionView(ONGOING, 42, 3, None), S)


@pytest.mark.parametrize(
    ("partitions", "same"),
    [
        ((), True),
        ((P0, P1), True),
        ((P0, P1, ("__consumer_offsets", 7)), True),
        ((P0, P1, ELSEWHERE), True),
        ((P0,), False),
    ],
)
def test_partitions_tell_two_transactions_of_one_epoch_apart(partitions, same):
    assert shows_same_transaction(view(*partitions), S) is same


def test_partitions_that_a_late_request_has_added_are_asked_about():
    shown = view(P0, P1, ELSEWHERE, ("__consumer_offsets", 7))
    assert others_than(S, shown) == {ELSEWHERE}


@pytest.mark.parametrize(
    ("offsets", "verdict"),
    [
        ({("orders", 0): 3, ("orders", 1): 33}, True),
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


def test_open_exactly_means_from_no_earlier_offset_on():
    assert is_open(S, {P0: 17, P1: 33}, exactly=True)
    assert not is_open(S, {P0: 3, P1: 33}, exactly=True)


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
