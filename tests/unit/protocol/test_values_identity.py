"""Which transaction the servers show, by what a prepared state names."""

from dataclasses import replace
from itertools import permutations, product

import pytest

from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import (
    TransactionStatus,
    TransactionView,
    another_owner_since,
    belongs,
    is_older,
    is_open,
    others_than,
    own_among,
    shows_same_transaction,
)

S = PreparedTxnState(42, 3, 7, (FirstOffset("orders", 0, 17), FirstOffset("orders", 1, 33)), 1000)
P0, P1, ELSEWHERE = ("orders", 0), ("orders", 1), ("payments", 4)
ONGOING = TransactionStatus.ONGOING


def view(*partitions):
    return TransactionView(ONGOING, 42, 3, partitions=partitions)


def test_state_belongs_only_to_the_incarnation_that_prepared_it():
    assert belongs(S, 7)
    assert not belongs(S, 8)
    assert not belongs(PreparedTxnState(), 0)
    assert not belongs(PreparedTxnState(42, 3), 0), "KIP-939's own form names no incarnation"


@pytest.mark.parametrize(("producer_id", "epoch"), [(43, 3), (42, 4), (-1, -1)])
def test_another_producer_shows_another_transaction_whatever_else_is_the_same(producer_id, epoch):
    assert not shows_same_transaction(TransactionView(ONGOING, producer_id, epoch, 1000, partitions=(P0, P1)), S)


def test_a_start_that_the_state_does_not_know_tells_nothing_apart():
    assert shows_same_transaction(TransactionView(ONGOING, 42, 3, 1001), PreparedTxnState(42, 3, 7))


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


@pytest.mark.parametrize(
    ("still_open", "own"),
    [
        ((), set()),
        (((P0, 17), (P1, 33)), {P0, P1}),
        (((P0, 5), (P1, 34)), {P0}),
        (((P0, 18), (ELSEWHERE, 1)), set()),
    ],
)
def test_what_begins_at_or_before_the_first_record_includes_it(still_open, own):
    assert own_among(S, still_open) == own


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


def test_older_is_an_order():
    """No two states are each older than the other, and one older than an older one is older."""
    of_incarnation = [state(one, *offsets) for one, offsets in product((1, 2), [(5,), (9,), (5, 8), (9, 9)])]
    states = [PreparedTxnState(), *of_incarnation]
    for one, other in product(states, states):
        assert not (is_older(one, than=other) and is_older(other, than=one))
    for first, second, third in permutations(states, 3):
        if is_older(first, than=second) and is_older(second, than=third):
            assert is_older(first, than=third)


OPEN = TransactionView(TransactionStatus.ONGOING, 7, 3, started_ms=100)
REST = TransactionView(TransactionStatus.COMPLETE_COMMIT, 7, 3)
EMPTY_VIEW = TransactionView(TransactionStatus.EMPTY, 7, 3)


@pytest.mark.parametrize(
    ("seen", "now", "another"),
    [
        (OPEN, OPEN, False),
        (OPEN, replace(OPEN, partitions=(("orders", 0),)), False),
        (OPEN, replace(OPEN, epoch=4), True),
        (OPEN, replace(OPEN, producer_id=8), True),
        (OPEN, replace(OPEN, started_ms=101), True),
        # Its own producer, or the broker, has ended it.
        (OPEN, REST, False),
        (OPEN, replace(REST, epoch=4), False),
        (OPEN, replace(REST, status=TransactionStatus.COMPLETE_ABORT, epoch=4), False),
        (replace(OPEN, epoch=32766), replace(REST, producer_id=9, epoch=0), False),
        (OPEN, replace(EMPTY_VIEW, epoch=4), True),
        # Another one has been initialised since, and has completed a transaction of its own.
        (OPEN, replace(REST, epoch=5), True),
        (OPEN, replace(REST, producer_id=9, epoch=0), True),
        (OPEN, TransactionView(TransactionStatus.NO_SUCH_ID), False),
        # Nothing was open.
        (REST, REST, False),
        (EMPTY_VIEW, EMPTY_VIEW, False),
        (TransactionView(TransactionStatus.NO_SUCH_ID), TransactionView(TransactionStatus.NO_SUCH_ID), False),
        (REST, TransactionView(TransactionStatus.NO_SUCH_ID), False),
        (REST, OPEN, True),
        (EMPTY_VIEW, replace(OPEN, started_ms=None), True),
        (REST, replace(EMPTY_VIEW, epoch=4), True),
        (TransactionView(TransactionStatus.NO_SUCH_ID), EMPTY_VIEW, True),
    ],
)
def test_a_kept_transaction_is_no_longer_this_producers_once_another_one_was_at_work(seen, now, another):
    assert another_owner_since(seen, now) is another
