"""Claiming, on every database."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from harness.databases import CLUSTER, Database, Thread, prepared
from sqlalchemy import Connection, event

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Fenced
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Decision, StateRow
from dualwrite.stores.sql.store import SqlStateStore


def decide(store: SqlStateStore, row: StateRow, number: int = 0) -> PreparedTxnState:
    state = prepared(row.incarnation, number)
    with store.engine.connect() as connection:
        store.begin(connection)
        assert store.read_incarnation(connection, row.transactional_id) == row.incarnation
        assert store.decide(connection, Decision(row.transactional_id, row.incarnation, state))[0]
        store.commit(connection)
    return state


def test_a_first_claim_makes_the_row(database: Database, store: SqlStateStore) -> None:
    (row,) = store.claim(["orders"], owner="me", cluster_id=CLUSTER)
    assert (row.transactional_id, row.incarnation, row.settled_incarnation) == ("orders", 1, 0)
    assert (row.owner, row.cluster_id, row.completed) == ("me", CLUSTER, None)
    assert not row.prepared.has_transaction
    assert len(row.namespace) >= 8
    assert abs(row.updated_at - datetime.now(timezone.utc)) < timedelta(minutes=1)
    assert store.read(["orders", "unknown"]) == [row]


def test_rows_have_namespaces_of_their_own(database: Database, store: SqlStateStore) -> None:
    rows = store.claim([f"id{number}" for number in range(20)], owner="me", cluster_id=CLUSTER)
    assert len({row.namespace for row in rows}) == 20


def test_the_next_claim_raises_the_incarnation_and_returns_the_newest_decision(
    database: Database, store: SqlStateStore
) -> None:
    first = database.claim(store, "orders")
    state = decide(store, first)
    second = store.claim(["orders"], owner="another owner", cluster_id=CLUSTER)[0]
    assert (second.incarnation, second.prepared, second.namespace) == (2, state, first.namespace)
    assert second.owner == "another owner"


def test_rows_come_in_order_of_id_and_once_each(database: Database, store: SqlStateStore) -> None:
    rows = store.claim(["b", "a", "B", "b", "a#10", "a#2"], owner="me", cluster_id=CLUSTER)
    assert [row.transactional_id for row in rows] == ["B", "a", "a#10", "a#2", "b"]
    assert {row.incarnation for row in rows} == {1}
    assert store.claim([], owner="me", cluster_id=CLUSTER) == []


def test_concurrent_claimers_never_share_an_incarnation(database: Database, store: SqlStateStore) -> None:
    ids = [f"id{number}" for number in range(5)]
    claimed: list[tuple[str, int]] = []
    together = threading.Barrier(4)

    def claim(number: int) -> None:
        order = ids if number % 2 else ids[::-1]
        together.wait()
        for _ in range(5):
            rows = store.claim(order[number % 3 :], owner=f"thread {number}", cluster_id=CLUSTER)
            claimed.extend((row.transactional_id, row.incarnation) for row in rows)

    threads = [Thread(lambda number=number: claim(number)) for number in range(4)]
    for thread in threads:
        thread.result()
    assert len(claimed) == len(set(claimed))
    for row in store.read(ids):
        mine = sorted(incarnation for name, incarnation in claimed if name == row.transactional_id)
        assert mine == list(range(1, row.incarnation + 1))


def test_concurrent_first_claimers_share_the_row(database: Database) -> None:
    together = threading.Barrier(4)

    def claim() -> StateRow:
        store = database.store()
        together.wait()
        return database.claim(store, "new")

    rows = [thread.result() for thread in [Thread(claim) for _ in range(4)]]
    assert sorted(row.incarnation for row in rows) == [1, 2, 3, 4]
    assert len({row.namespace for row in rows}) == 1


def test_a_guard_that_still_holds_lets_the_claim_through(database: Database, store: SqlStateStore) -> None:
    first = database.claim(store, "orders")
    assert database.claim(store, "orders#1", guard=("orders", first.incarnation)).incarnation == 1
    renewed = database.claim(store, "orders", guard=("orders", first.incarnation))
    assert renewed.incarnation == first.incarnation + 1


def test_a_guard_lets_its_owner_through_who_does_not_know_of_a_claim_of_its_own(
    database: Database, store: SqlStateStore
) -> None:
    """The answer to that claim's COMMIT was lost."""
    first = database.claim(store, "orders")
    database.claim(store, "orders", guard=("orders", first.incarnation))
    again = database.claim(store, "orders", guard=("orders", first.incarnation))
    assert again.incarnation == first.incarnation + 2


def test_a_guard_of_the_same_incarnation_but_another_owner_stops_the_claim(
    database: Database, store: SqlStateStore
) -> None:
    """The row was deleted, and another process created it again."""
    first = store.claim(["orders"], owner="another owner", cluster_id=CLUSTER)[0]
    with pytest.raises(Fenced):
        database.claim(store, "orders", guard=("orders", first.incarnation))


def test_a_guard_that_shows_an_older_claim_of_its_owner_means_that_the_database_went_back(
    database: Database, store: SqlStateStore
) -> None:
    first = database.claim(store, "orders")
    with pytest.raises(ConfigurationError, match="gone back in time"):
        database.claim(store, "orders", guard=("orders", first.incarnation + 1))


@pytest.mark.parametrize("guard", [("orders", 1), ("nobody", 1)])
def test_a_guard_that_was_claimed_away_stops_the_claim(
    database: Database, store: SqlStateStore, guard: tuple[str, int]
) -> None:
    database.claim(store, "orders")
    store.claim(["orders"], owner="another owner", cluster_id=CLUSTER)
    with pytest.raises(Fenced) as caught:
        database.claim(store, "orders", "orders#1", guard=guard)
    assert caught.value.transactional_id == guard[0]
    assert [(row.transactional_id, row.incarnation) for row in store.find("")] == [("orders", 2)]


def test_what_verify_raises_rolls_the_claim_back(database: Database, store: SqlStateStore) -> None:
    database.claim(store, "orders")
    seen: list[Any] = []

    def refuse(rows: Any) -> None:
        seen.extend((row.transactional_id, row.incarnation) for row in rows)
        raise ConfigurationError("gone back in time")

    with pytest.raises(ConfigurationError, match="gone back in time"):
        database.claim(store, "orders", "orders#1", verify=refuse)
    assert seen == [("orders", 2), ("orders#1", 1)]
    assert [(row.transactional_id, row.incarnation) for row in store.find("")] == [("orders", 1)]


def test_an_incarnation_can_be_raised_to_a_number_but_not_lowered(database: Database, store: SqlStateStore) -> None:
    database.claim(store, "orders")
    rows = store.claim(["a", "orders"], owner="me", cluster_id=CLUSTER, raise_to={"orders": 9, "elsewhere": 99})
    assert [row.incarnation for row in rows] == [1, 9]
    assert database.claim(store, "orders", raise_to={"orders": 5}).incarnation == 10


def test_a_guard_of_another_cluster_stops_the_claim(database: Database, store: SqlStateStore) -> None:
    """The address has led elsewhere since the guard was claimed. A lane that is new has no row that could tell."""
    first = database.claim(store, "orders")
    with pytest.raises(ConfigurationError, match=r"'cluster-one'.*'cluster-two'"):
        store.claim(["orders#1"], owner=first.owner, cluster_id="cluster-two", guard=("orders", first.incarnation))
    assert [row.transactional_id for row in store.find("")] == ["orders"]
    # Kafka is away: nobody knows the cluster.
    store.claim(["orders#1"], owner=first.owner, cluster_id=None, guard=("orders", first.incarnation))


def test_another_cluster_is_refused_and_nothing_is_claimed(database: Database, store: SqlStateStore) -> None:
    database.claim(store, "orders")
    with pytest.raises(ConfigurationError, match=r"'cluster-one'.*'cluster-two'") as caught:
        store.claim(["a", "orders"], owner="me", cluster_id="cluster-two")
    assert caught.value.transactional_id == "orders"
    assert [(row.transactional_id, row.incarnation) for row in store.find("")] == [("orders", 1)]


def test_a_row_says_that_it_was_claimed_without_kafka_until_it_is_compared(store: SqlStateStore) -> None:
    [row] = store.claim(["orders"], owner="me", cluster_id=None)
    assert (row.incarnation, row.cluster_id, row.unverified_from) == (1, "", 1)
    [row] = store.claim(["orders"], owner="me", cluster_id=None, raise_to={"orders": 3})
    assert (row.incarnation, row.cluster_id, row.unverified_from) == (3, "", 1)
    assert store.read(["orders"]) == [row]
    seen: list[Any] = []
    [row] = store.claim(["orders"], owner="me", cluster_id=CLUSTER, verify=seen.extend)
    assert [(one.incarnation, one.unverified_from) for one in seen] == [(4, 1)], "what there is to compare"
    assert (row.incarnation, row.cluster_id, row.unverified_from) == (4, CLUSTER, None)
    assert store.read(["orders"]) == [row]
    [row] = store.claim(["orders"], owner="me", cluster_id=None)
    assert (row.incarnation, row.cluster_id, row.unverified_from) == (5, CLUSTER, 5)
    with pytest.raises(ConfigurationError, match=r"'cluster-one'.*'cluster-two'"):
        store.claim(["orders"], owner="me", cluster_id="cluster-two")
    assert store.read(["orders"]) == [row]


def test_a_claim_that_compares_nothing_leaves_the_row_unverified(store: SqlStateStore) -> None:
    store.claim(["orders"], owner="me", cluster_id=None)
    [row] = store.claim(["orders"], owner="me", cluster_id=CLUSTER)
    assert (row.incarnation, row.unverified_from) == (2, 1)
    assert store.read(["orders"]) == [row]


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("nonsense", "producer_id:epoch"),
        ("42:0", "no incarnation"),
        ("42:0;i=1", "no first offsets"),
        ("42:0;i=2;orders:0=1", "had not reached"),
        ("42:0;i=9;orders:0=1", "incarnation 9"),
        ("42:0;i=01;orders:0=1", "incarnation"),
        ("42:99999;i=1;orders:0=1", "epoch"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_claimed(
    database: Database, store: SqlStateStore, state: str, cause: str
) -> None:
    database.claim(store, "orders")
    database.set_state("orders", state)
    with pytest.raises(ConfigurationError, match=cause) as caught:
        database.claim(store, "a", "orders", "z")
    assert caught.value.transactional_id == "orders"
    assert "kafka_transaction_state" in str(caught.value)
    database.set_state("orders", None)
    assert [(row.transactional_id, row.incarnation) for row in store.find("")] == [("orders", 1)]


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", "a\x00b", "\ud800"])
def test_an_id_that_cannot_be_a_key_is_refused(database: Database, store: SqlStateStore, name: str) -> None:
    with pytest.raises(ConfigurationError, match="transactional id"):
        database.claim(store, name)


@pytest.mark.parametrize("name", ["x" * 255, "ünïcode 🎉", "quote ' \" % _ \\ :name"])
def test_an_unusual_id_is_a_key_as_any_other(database: Database, store: SqlStateStore, name: str) -> None:
    row = database.claim(store, name)
    assert row.transactional_id == name
    state = decide(store, row)
    assert store.read([name])[0].prepared == state
    assert [found.transactional_id for found in store.find(name[:3])] == [name]


def test_a_prefix_is_taken_literally(database: Database, store: SqlStateStore) -> None:
    special = ["a*", "a?", "a[b]", "a\\", "a]"]
    ids = ["a#1", "a#2", "A#3", "a_1", "a%", "ab", *special]
    store.claim(ids, owner="me", cluster_id=CLUSTER)
    assert [row.transactional_id for row in store.find("a#")] == ["a#1", "a#2"]
    assert [row.transactional_id for row in store.find("a%")] == ["a%"]
    assert [row.transactional_id for row in store.find("a_")] == ["a_1"]
    for name in special:
        assert [row.transactional_id for row in store.find(name)] == [name]
    assert len(store.find("")) == len(ids)


def test_more_ids_than_a_statement_can_bind(database: Database, store: SqlStateStore) -> None:
    ids = [f"id{number:05}" for number in range(6000)]
    rows = store.claim(ids, owner="me", cluster_id=CLUSTER)
    assert [row.transactional_id for row in rows] == ids
    store.mark_settled(dict.fromkeys(ids, 1))
    assert {row.settled_incarnation for row in store.read(ids)} == {1}


def test_a_row_is_read_under_its_lock(database: Database, store: SqlStateStore) -> None:
    row = database.claim(store, "orders")
    state = decide(store, row)
    assert store.read_locked("orders", Deadline(5)).prepared == state
    with pytest.raises(ConfigurationError, match="gone"):
        store.read_locked("nobody", Deadline(5))


def test_work_under_the_locks_of_rows_is_done_by_one_after_the_other(database: Database, store: SqlStateStore) -> None:
    for name in ("a", "b", "c"):
        database.claim(store, name)
    entered, leave, overtook, done = threading.Event(), threading.Event(), threading.Event(), []

    def slowly() -> None:
        entered.set()
        assert leave.wait(120)
        done.append("first")

    def at_once() -> None:
        overtook.set()
        done.append("second")

    first = Thread(lambda: store.while_locked(["b", "a"], slowly, Deadline(120)))
    assert entered.wait(120)
    second = Thread(lambda: store.while_locked(["b", "c"], at_once, Deadline(120)))
    assert not overtook.wait(0.2)
    leave.set()
    first.result()
    second.result()
    assert done == ["first", "second"]


def test_the_names_of_one_writer_are_found_by_an_index(database: Database, store: SqlStateStore) -> None:
    """A pool of lanes and slots has many thousand names, and every opening looks for those of one writer."""
    made = ", ".join(column.name for column in store._tables.state.columns if column.name != "transactional_id")
    row = database.claim(store, "others")
    numbers, name, source, analyze, explain = {
        "sqlite": (
            "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 200000) ",
            "'other#' || n",
            "numbers",
            "ANALYZE",
            "EXPLAIN QUERY PLAN ",
        ),
        "postgresql": (
            "",
            "'other#' || n",
            "generate_series(1, 200000) AS numbers (n)",
            f"ANALYZE {database.state_table}",
            "EXPLAIN ",
        ),
        "mariadb": (
            "",
            "concat('other#', seq)",
            "seq_1_to_20000",
            f"ANALYZE TABLE {database.state_table}",
            "EXPLAIN ",
        ),
    }[database.kind]
    database.execute(
        f"INSERT INTO {database.state_table} (transactional_id, {made}) {numbers}"
        f"SELECT {name}, {made} FROM {database.state_table}, {source} WHERE transactional_id = 'others'"
    )
    database.execute(analyze)
    for name in ("mine#1", "mine#2"):
        database.claim(store, name)
    if database.kind == "postgresql":  # these binaries know the collation C alone, where the primary key would do, too
        database.execute(f"ALTER TABLE {database.state_table} DROP CONSTRAINT kafka_transaction_state_pkey CASCADE")
    plans: list[str] = []

    def note_plan(connection: Connection, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if "kafka_transaction_state" in statement:
            cursor.execute(explain + statement, parameters)
            plans.append("\n".join(str(line) for line in cursor.fetchall()))

    event.listen(store.engine, "before_cursor_execute", note_plan)
    assert [found.transactional_id for found in store.find("mine#")] == ["mine#1", "mine#2"]
    assert store.find("others") == [row]
    assert plans
    for plan in plans:
        assert "index" in plan.lower() or "'range', 'PRIMARY" in plan, plan
        assert "seq scan" not in plan.lower(), plan
        assert "scan kafka_transaction_state" not in plan.lower(), plan
