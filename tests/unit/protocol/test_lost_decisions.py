"""Has the database lost decisions: every kind of view against every kind of knowledge."""

from itertools import product

import pytest

from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.settle import (
    CLOCKS_DIFFER_MS,
    Later,
    Lookup,
    NewestKnown,
    contradiction,
    known_of,
    look_up,
    lost_decision,
)
from dualwrite.protocol.values import TransactionStatus, TransactionView

COMMITTED = {TransactionStatus.PREPARE_COMMIT, TransactionStatus.COMPLETE_COMMIT}
NONE = NewestKnown(None, None)


def state(offset=10, *, incarnation=1, started_ms=None, partition=0, epoch=0):
    return PreparedTxnState(7, epoch, incarnation, (FirstOffset("t", partition, offset, "id"),), started_ms)


def view(status=TransactionStatus.COMPLETE_COMMIT, started_ms=100, *, epoch=0):
    return TransactionView(status, 7, epoch, newest_started_ms=started_ms)


@pytest.mark.parametrize("status", list(TransactionStatus))
def test_a_commit_of_an_incarnation_that_nobody_names_is_lost(status):
    assert look_up(NONE, view(status)) is (Lookup.LOST if status in COMMITTED else Lookup.NOTHING)


@pytest.mark.parametrize(("status", "started_ms"), list(product(TransactionStatus, [None, 99, 100, 101])))
def test_the_start_alone_tells_where_both_sides_know_it_and_the_newest_was_committed(status, started_ms):
    known = known_of([state(started_ms=100)], 1)
    expected = Lookup.READ
    if status in COMMITTED and started_ms is not None:
        expected = Lookup.LOST if started_ms > 100 else Lookup.NOTHING
    assert look_up(known, view(status, started_ms)) is expected


def test_another_epoch_is_a_settlers_commit():
    assert look_up(known_of([state(started_ms=100)], 1), view(started_ms=101, epoch=1)) is Lookup.READ


def test_known_is_what_the_row_and_the_incidents_name_together():
    known = known_of(
        [state(10, started_ms=5), state(30), state(20, partition=1), state(99, incarnation=2), PreparedTxnState()], 1
    )
    assert {(first.partition, first.offset) for first in known.newest.first_offsets} == {(0, 30), (1, 20)}
    assert known.started_ms is None  # one without a start may be the newest
    assert known_of([state(started_ms=5), state(20, started_ms=9)], 1).started_ms == 9
    assert known_of([state(incarnation=2)], 1) == NONE


E = 4
S = PreparedTxnState.native(7, E, 1, {("t", 0): 10, ("t", 1): None}, {"t": "id"})
UNWITNESSED = PreparedTxnState.native(7, E, 1, {("t", 0): None}, {"t": "id"})


def histories():
    """The coordinator's epoch and status, the row's fence, and whether a later decision was committed.

    After S its owner ends up to three transactions, may leave one open, and may be settled up to some point, with repairs.
    """
    ended = {True: TransactionStatus.COMPLETE_COMMIT, False: TransactionStatus.COMPLETE_ABORT}
    for count in range(4):
        for later in product([True, False], repeat=count):
            lost = any(later)
            epoch, status = E + 1 + count, ended[later[-1] if later else True]
            for opens in (True, False):
                shown = TransactionStatus.ONGOING if opens else status
                yield epoch, shown, None, lost, later
                fence = epoch + 1
                yield epoch, shown, fence, lost, later  # written, and nothing aborted yet
                for repairs in product([True, False], repeat=2):
                    yield fence, TransactionStatus.COMPLETE_ABORT, fence, lost, later
                    yield fence, TransactionStatus.ONGOING, fence, lost, later
                    yield fence + 1, ended[repairs[0]], fence, lost, later
                    yield fence + 2, ended[repairs[1]], fence, lost, later


@pytest.mark.parametrize("known", [S, UNWITNESSED])
def test_the_epochs_of_native_transactions_never_tell_a_lost_decision_that_is_none_nor_hide_one_that_logs_show(known):
    for epoch, status, fence, lost, later in histories():
        answer = look_up(NewestKnown(known, None), view(status, epoch=epoch), fence)
        story = (epoch - E, status, fence, later)
        if answer is Lookup.LOST:
            assert lost, story
        elif answer is Lookup.NOTHING:
            assert not lost or not known.first_offsets, story
        if fence is None and status is TransactionStatus.COMPLETE_COMMIT:
            assert answer is (Lookup.LOST if later else Lookup.NOTHING), story
        if not later:
            assert answer is Lookup.NOTHING, story


def test_where_the_coordinator_knows_the_id_no_more_only_the_logs_can_tell_of_native_transactions():
    gone = TransactionView(TransactionStatus.NO_SUCH_ID)
    assert look_up(NewestKnown(S, None), gone) is Lookup.READ
    assert look_up(NewestKnown(UNWITNESSED, None), gone) is Lookup.NOTHING


def native(epoch, offset=None):
    named = {} if offset is None else {("t", 0): offset}
    return PreparedTxnState.native(7, epoch, 1, named, {"t": "id"})


@pytest.mark.parametrize(
    ("answer", "later", "epoch", "lost"),
    [
        (Lookup.NOTHING, Later(native(5, 50)), 7, None),
        (Lookup.READ, None, 7, None),
        (Lookup.READ, Later(), 7, None),
        (Lookup.READ, Later(native(5, 50)), 7, native(5, 50)),
        (Lookup.LOST, None, 7, native(6)),
        (Lookup.LOST, Later(), 7, native(6)),
        (Lookup.LOST, Later(native(6, 60)), 7, native(6, 60)),
        (Lookup.LOST, Later(native(5, 50)), 7, native(6)),
    ],
)
def test_the_newest_lost_native_decision(answer, later, epoch, lost):
    shown = view(epoch=epoch)
    found = lost_decision(NewestKnown(S, None), shown, 1, answer, later)
    assert str(found) == str(lost or "None")
    if found is not None:  # as an incident it is named by then
        assert PreparedTxnState.from_string(str(found)) == found
        assert look_up(known_of([S, found], 1), shown) is (Lookup.LOST if found.epoch < epoch - 1 else Lookup.NOTHING)


LATER = Later(state(50))
LONG_AGO, JUST_NOW = 100 - CLOCKS_DIFFER_MS - 1, 100 - CLOCKS_DIFFER_MS


@pytest.mark.parametrize(
    ("known", "answer", "later", "shown", "lost"),
    [
        (NONE, Lookup.NOTHING, None, view(), None),
        (NONE, Lookup.LOST, None, view(), PreparedTxnState(7, 0, 1, (), 100)),
        (known_of([state()], 1), Lookup.READ, None, view(), None),
        (known_of([state()], 1), Lookup.READ, Later(), view(), None),
        (known_of([state()], 1), Lookup.READ, LATER, view(), state(50, started_ms=100)),
        (known_of([state()], 1), Lookup.READ, LATER, view(TransactionStatus.COMPLETE_ABORT), state(50)),
        (known_of([state()], 1), Lookup.READ, Later(None, LONG_AGO), view(), PreparedTxnState(7, 0, 1, (), 100)),
        (known_of([state()], 1), Lookup.READ, Later(None, JUST_NOW), view(), None),
        (known_of([state()], 1), Lookup.READ, Later(None, LONG_AGO), view(TransactionStatus.ONGOING), None),
        (known_of([state()], 1), Lookup.READ, Later(None, LONG_AGO), view(epoch=1), None),
        (known_of([state(started_ms=9)], 1), Lookup.LOST, LATER, view(), state(50, started_ms=100)),
        (known_of([state(started_ms=9)], 1), Lookup.LOST, Later(state(50), 100), view(), state(50, started_ms=100)),
        (known_of([state(started_ms=9)], 1), Lookup.LOST, None, view(), PreparedTxnState(7, 0, 1, (), 100)),
        (known_of([state(started_ms=9)], 1), Lookup.LOST, Later(None, 99), view(), PreparedTxnState(7, 0, 1, (), 100)),
        # It wrote a marker where the known one had records, and no record.
        (known_of([state(started_ms=9)], 1), Lookup.LOST, Later(None, 100), view(), None),
    ],
)
def test_the_newest_lost_decision(known, answer, later, shown, lost):
    found = lost_decision(known, shown, 1, answer, later)
    assert str(found) == str(lost)
    if found is not None:  # as an incident it is named by then
        named = [found] if known.newest is None else [known.newest, found]
        assert look_up(known_of(named, 1), shown) is not Lookup.LOST


@pytest.mark.parametrize(
    ("incarnation", "shown", "says"),
    [
        (2, state(), None),
        (2, state(5), "as the newest decision"),
        (1, state(), "although 2 was claimed"),
        (1, state(5), "as the newest decision"),
        (3, state(5), None),
    ],
)
def test_a_row_contradicts_its_owner_as_long_as_nobody_has_claimed_it_since(incarnation, shown, says):
    found = contradiction(2, state(), incarnation, shown)
    assert found is says is None or says in found
