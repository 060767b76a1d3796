"""The records made after a decision, on every database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.databases import Database, prepared

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Decision, Outcome, StateRow
from dualwrite.stores.sql.store import SqlStateStore


def decided(database: Database, store: SqlStateStore, name: str = "orders", number: int = 1) -> StateRow:
    row = database.claim(store, name)
    state = prepared(row.incarnation, number)
    with store.engine.connect() as connection:
        store.begin(connection)
        store.read_incarnation(connection, name)
        store.decide(connection, Decision(name, row.incarnation, state))
        store.commit(connection)
    return replace(row, prepared=state)


def completed(store: SqlStateStore, name: str = "orders") -> Outcome | None:
    return store.read([name])[0].completed


def test_an_outcome_is_recorded_in_the_row(database: Database, store: SqlStateStore) -> None:
    rows = [decided(database, store, name) for name in ("b", "a")]
    for _ in range(2):
        store.record_outcomes([(row, Outcome.COMMITTED, "seen") for row in rows])
        assert [completed(store, name) for name in ("a", "b")] == [Outcome.COMMITTED] * 2
    assert store.incidents() == []
    store.record_outcomes([])


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.UNVERIFIABLE])
def test_a_loss_outlives_the_next_decision(database: Database, store: SqlStateStore, outcome: Outcome) -> None:
    row = decided(database, store)
    for _ in range(2):
        store.record_outcomes([(row, outcome, "the broker\x00 timed it out")])
        assert completed(store) is outcome
    decided(database, store, number=2)
    assert completed(store) is None
    assert store.incident("orders", row.prepared) is outcome
    assert store.incident("orders", replace(row.prepared, started_ms=123)) is outcome
    assert store.incident("orders", prepared(2, 2)) is None
    assert store.incident("others", row.prepared) is None
    (incident,) = store.incidents()
    assert (incident.transactional_id, incident.outcome) == ("orders", outcome)
    assert incident.prepared_transaction_state == str(row.prepared)
    assert incident.detail == "the broker? timed it out"
    assert (incident.detected_at.tzinfo is not None, incident.acknowledged_at) == (True, None)


def test_an_outcome_is_recorded_once(database: Database, store: SqlStateStore) -> None:
    row = decided(database, store)
    store.record_outcomes([(row, Outcome.COMMITTED, "")])
    store.record_outcomes([(row, Outcome.UNVERIFIABLE, "its records are gone by now")])
    assert (completed(store), store.incidents()) == (Outcome.COMMITTED, [])


def test_an_abort_marker_is_never_passed_over(database: Database, store: SqlStateStore) -> None:
    row = decided(database, store)
    store.record_outcomes([(row, Outcome.COMMITTED, "")])
    store.record_outcomes([(row, Outcome.LOST, "an abort marker")])
    assert completed(store) is Outcome.COMMITTED
    assert [incident.outcome for incident in store.incidents()] == [Outcome.LOST]


def test_the_outcome_of_an_older_decision_does_not_touch_the_newer_one(
    database: Database, store: SqlStateStore
) -> None:
    old = decided(database, store, number=1)
    decided(database, store, number=2)
    store.record_outcomes([(old, Outcome.COMMITTED, "late")])
    assert (completed(store), store.incidents()) == (None, [])
    store.record_outcomes([(old, Outcome.LOST, "late")])
    assert (completed(store), store.incident("orders", old.prepared)) == (None, Outcome.LOST)


def test_losses_are_listed_by_prefix_until_a_person_has_looked(database: Database, store: SqlStateStore) -> None:
    rows = [decided(database, store, name) for name in ("orders", "orders#1", "payments")]
    for row in rows:
        store.record_outcomes([(row, Outcome.LOST, row.transactional_id)])
    assert [incident.detail for incident in store.incidents()] == ["orders", "orders#1", "payments"]
    assert [incident.detail for incident in store.incidents("orders")] == ["orders", "orders#1"]
    assert store.acknowledge("orders", rows[0].prepared)
    assert not store.acknowledge("orders", rows[0].prepared)
    assert not store.acknowledge("nobody", rows[0].prepared)
    assert [incident.detail for incident in store.incidents("orders")] == ["orders#1"]
    seen = {incident.detail: incident.acknowledged_at for incident in store.incidents(acknowledged=True)}
    assert {name for name, when in seen.items() if when is None} == {"orders#1", "payments"}
    assert store.incident("orders", rows[0].prepared) is Outcome.LOST


@pytest.mark.usefixtures("unanswered")
def test_a_look_whose_commit_was_not_answered_counts(database: Database, store: SqlStateStore) -> None:
    row = decided(database, store)
    store.record_outcomes([(row, Outcome.LOST, "gone")])
    assert store.acknowledge("orders", row.prepared)
    assert not store.acknowledge("orders", row.prepared)


def test_the_settled_mark_only_rises(database: Database, store: SqlStateStore) -> None:
    for _ in range(3):
        store.claim(["a", "b"], owner="me", cluster_id="cluster-one")
    store.mark_settled({"b": 2, "a": 1, "nobody": 7})
    store.mark_settled({"a": 2, "b": 1})
    assert [row.settled_incarnation for row in store.read(["a", "b"])] == [2, 2]
    store.mark_settled({})


def test_an_incarnation_that_was_not_reached_is_not_settled(database: Database, store: SqlStateStore) -> None:
    database.claim(store, "a")
    with pytest.raises(ConfigurationError):
        store.mark_settled({"a": 2})


def test_a_state_of_any_size_can_become_an_incident(database: Database, store: SqlStateStore) -> None:
    row = database.claim(store, "orders")
    state = replace(
        prepared(1), first_offsets=tuple(replace(prepared(1).first_offsets[0], partition=n) for n in range(50_000))
    )
    database.set_state("orders", str(state))
    store.record_outcomes([(replace(row, prepared=state), Outcome.LOST, "long")])
    assert store.incident("orders", state) is Outcome.LOST


def native(incarnation: int, epoch: int) -> PreparedTxnState:
    return PreparedTxnState.native(
        42, epoch, incarnation, {("orders", 0): 17, ("orders", 1): None}, {"orders": "b3JkZXJz"}
    )


def decided_natively(database: Database, store: SqlStateStore, epoch: int) -> StateRow:
    row = store.read(["orders"])[0] if store.read(["orders"]) else database.claim(store, "orders")
    with store.engine.connect() as connection:
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        store.decide(connection, Decision("orders", row.incarnation, native(row.incarnation, epoch)))
        store.commit(connection)
    return store.read(["orders"])[0]


def test_the_fence_of_a_native_transaction_is_raised_only_from_the_value_that_was_read(
    database: Database, store: SqlStateStore
) -> None:
    row = decided_natively(database, store, 7)
    assert row.settle_fence is None
    assert store.raise_fence(row, 9)
    assert store.read(["orders"])[0] == replace(row, settle_fence=9, updated_at=store.read(["orders"])[0].updated_at)
    assert not store.raise_fence(row, 10)
    assert not store.raise_fence(replace(row, settle_fence=8), 10)
    assert store.raise_fence(replace(row, settle_fence=9), 10)
    assert store.read(["orders"])[0].settle_fence == 10


def test_the_fence_belongs_to_one_decision(database: Database, store: SqlStateStore) -> None:
    old = decided_natively(database, store, 7)
    assert store.raise_fence(old, 9)
    database.claim(store, "orders")
    assert store.raise_fence(
        replace(old, settle_fence=9), 10
    )  # a settler whose claim is older: the decision is the same
    new = decided_natively(database, store, 0)
    assert new.settle_fence is None
    assert not store.raise_fence(replace(old, settle_fence=None), 11)
    assert not store.raise_fence(replace(new, namespace="another"), 2)
    assert store.read(["orders"])[0].settle_fence is None


def test_a_fence_without_a_native_transaction_is_a_bad_row(database: Database, store: SqlStateStore) -> None:
    decided(database, store)
    database.execute(f"UPDATE {database.state_table} SET settle_fence = 3")
    with pytest.raises(ConfigurationError, match="settle_fence is 3"):
        store.read(["orders"])
    decided_row = f"UPDATE {database.state_table} SET prepared_transaction_state = '{native(1, 7)}', settle_fence = "
    database.execute(decided_row + "32769")
    with pytest.raises(ConfigurationError, match="settle_fence is 32769"):
        store.read(["orders"])
    database.execute(decided_row + "9")
    assert store.read(["orders"])[0].settle_fence == 9
