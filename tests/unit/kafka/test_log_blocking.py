"""The open transactions that hold back readers, and when that is worth a warning."""

import time

import pytest

from dualwrite.kafka import cluster
from dualwrite.kafka.blocking import BlockingTransaction, find_blocking
from dualwrite.kafka.cluster import HELD_BACK_S, HeldBack, Place
from dualwrite.protocol.values import TransactionStatus, TransactionView

T0, T1 = Place("t", 0), Place("t", 1)
OURS, THEIRS = "orders#1.0123456789ab.3", "unknown"


def view(producer_id, started_ms, *places):
    return TransactionView(
        TransactionStatus.ONGOING, producer_id, 0, started_ms, partitions=tuple(place.key for place in places)
    )


def found(shown, ids, views, *, later=None, open_for_s=5.0):
    answers = iter([shown, shown if later is None else later])
    return find_blocking(
        [T0, T1],
        open_in=lambda places: {place: there for place, there in next(answers).items() if place in places},
        ids_of=lambda producer_ids: {one: ids[one] for one in producer_ids if one in ids},
        describe=lambda kafka_ids: {one: views[one] for one in kafka_ids},
        open_for_s=open_for_s,
    )


def test_each_is_named_with_its_writer_and_its_start():
    views = {OURS: view(7, 1000, T0, T1), THEIRS: view(8, 2000, T0)}
    shown = {T0: {(8, 0): 4, (7, 0): 2}, T1: {(7, 0): 9}}
    first, second, third = found(shown, {7: OURS, 8: THEIRS}, views)
    assert (first.first_offset, first.writer, first.started_ms) == (2, "orders", 1000)
    assert (second.first_offset, second.writer) == (4, None)
    assert (third.partition, third.first_offset) == (1, 9)
    assert str(first) == (
        "t[0] from offset 2 on, by the transaction of 'orders#1.0123456789ab.3' (producer 7:0), "
        "open since 1970-01-01T00:00:01+00:00; if its owner is dead, run `dualwrite recover orders`"
    )


def test_young_ones_are_left_out():
    views = {OURS: view(7, time.time() * 1000, T0)}
    assert found({T0: {(7, 0): 2}}, {7: OURS}, views) == []
    assert len(found({T0: {(7, 0): 2}}, {7: OURS}, {OURS: view(7, time.time() * 1000 - 6000, T0)})) == 1


@pytest.mark.parametrize(
    "shown",
    [None, view(7, 1000, T1), view(9, 1000, T0)],
    ids=["no coordinator shows the id", "elsewhere", "another producer"],
)
def test_one_whose_coordinator_does_not_show_it_there_counts_while_its_leader_does(shown):
    ids = {} if shown is None else {7: OURS}
    at_t0 = {T0: {(7, 0): 2}}
    [one] = found(at_t0, ids, {OURS: shown})
    assert one.started_ms is None
    assert "open since an unknown time" in str(one)
    assert (one.kafka_id is None) is (shown is None or shown.producer_id != 7), "a list alone names nobody"
    assert found(at_t0, ids, {OURS: shown}, later={T0: {}}) == []
    assert found(at_t0, ids, {OURS: shown}, later={T0: {(7, 0): 5}}) == []


def test_what_belongs_to_no_writer_has_another_way_on():
    assert "find-hanging" in str(BlockingTransaction("t", 0, 1, 7, 0))
    assert "transaction timeout will end it" in str(BlockingTransaction("t", 0, 1, 7, 0, "orders.x.1", 1000))


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(cluster, "now_s", lambda: now[0])
    return now


def test_a_partition_is_due_once_for_each_transaction_that_holds_it_back_for_long(clock):
    seen = HeldBack()
    seen.note(T0, 3, upto=5)
    assert seen.due() == {}
    clock[0] += HELD_BACK_S
    seen.note(T0, 3, upto=8)
    assert seen.due() == {T0: 3}
    assert seen.due() == {}
    seen.note(T0, 6, upto=8)
    assert seen.due() == {}
    clock[0] += HELD_BACK_S
    assert seen.due() == {T0: 6}


@pytest.mark.parametrize("stable", [5, 6, -1])
def test_a_partition_that_is_not_held_back_any_more_is_not_due(clock, stable):
    seen = HeldBack()
    seen.note(T0, 3, upto=5)
    seen.note(T0, stable, upto=5)
    clock[0] += HELD_BACK_S
    assert seen.due() == {}
