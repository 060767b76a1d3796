"""The database's part of a dual write, on every database."""

from __future__ import annotations

import pickle
import sqlite3
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from harness.databases import Database, prepared, run_raw
from sqlalchemy import AdaptedConnection, Connection, event, text
from sqlalchemy.exc import IntegrityError

from dualwrite.errors import (
    ConfigurationError,
    DualWriteError,
    IllegalStateError,
    TransactionAborted,
    TransactionInDoubt,
)
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.process import DatabaseVerdict
from dualwrite.protocol.values import Decision, Outcome
from dualwrite.stores.sql import asyncpg_driver
from dualwrite.stores.sql.asyncpg_driver import exchanges_of
from dualwrite.stores.sql.savepoints import SavepointWatch
from dualwrite.stores.sql.store import SqlStateStore

INSERT = text("INSERT INTO orders (id, customer) VALUES (:id, :customer)")


def insert(connection: Connection, number: int, customer: int | None = None) -> None:
    connection.execute(INSERT, {"id": number, "customer": customer})


def orders(database: Database) -> list[int]:
    return [row[0] for row in database.query("SELECT id FROM orders ORDER BY id")]


def test_a_decision_and_its_rows_become_visible_together(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    row = database.claim(store, "orders")
    state = prepared(1, started_ms=1767225600000)
    store.begin(connection)
    assert store.read_incarnation(connection, "orders") == 1
    insert(connection, 1)
    assert store.decide(connection, Decision("orders", 1, state))[0]
    assert (store.read(["orders"])[0].prepared, orders(database)) == (row.prepared, [])
    store.commit(connection)
    found = store.read(["orders"])[0]
    assert (str(found.prepared), orders(database)) == (str(state), [1])
    assert found.updated_at > row.updated_at
    assert not connection.in_transaction()


def test_the_connection_serves_one_dual_write_after_another(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    database.claim(store, "orders")
    for number in range(8):  # psycopg prepares a statement on the server from its sixth run
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        insert(connection, number)
        assert store.decide(connection, Decision("orders", 1, prepared(1, number)))[0]
        (store.rollback if number == 3 else store.commit)(connection)
    assert orders(database) == [0, 1, 2, 4, 5, 6, 7]
    assert store.read(["orders"])[0].prepared == prepared(1, 7)


def test_a_rollback_leaves_nothing(database: Database, store: SqlStateStore, connection: Connection) -> None:
    row = database.claim(store, "orders")
    store.begin(connection)
    store.read_incarnation(connection, "orders")
    insert(connection, 1)
    store.decide(connection, Decision("orders", 1, prepared(1)))
    store.rollback(connection)
    assert (store.read(["orders"]), orders(database)) == ([row], [])
    store.rollback(connection)
    assert not connection.in_transaction()


def test_an_id_without_a_row_has_no_incarnation(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    store.begin(connection)
    assert store.read_incarnation(connection, "orders") is None


def test_the_first_statement_sees_a_claim(database: Database, store: SqlStateStore, connection: Connection) -> None:
    database.claim(store, "orders")
    database.claim(store, "orders")
    store.begin(connection)
    assert store.read_incarnation(connection, "orders") == 2


def test_who_was_claimed_away_cannot_decide(database: Database, store: SqlStateStore, connection: Connection) -> None:
    database.claim(store, "orders")
    database.claim(store, "orders")
    store.begin(connection)
    store.read_incarnation(connection, "orders")
    assert store.decide(connection, Decision("orders", 1, prepared(1))) == (False, None)
    assert store.hold(connection, Decision("orders", 1)) == (False, None)
    assert store.hold(connection, Decision("orders", 2))[0]
    assert store.decide(connection, Decision("nobody", 1, prepared(1))) == (False, None)
    store.commit(connection)
    assert not store.read(["orders"])[0].prepared.has_transaction


def test_a_row_that_was_made_anew_is_not_ours(database: Database, store: SqlStateStore, connection: Connection) -> None:
    ours = database.claim(store, "orders").namespace
    database.execute(f"DELETE FROM {database.state_table}")
    renewed = database.claim(store, "orders").namespace
    store.begin(connection)
    assert store.read_incarnation(connection, "orders", namespace=ours) is None
    assert store.decide(connection, Decision("orders", 1, prepared(1), namespace=ours)) == (False, None)
    assert store.hold(connection, Decision("orders", 1, namespace=ours)) == (False, None)
    assert store.read_incarnation(connection, "orders", namespace=renewed) == 1
    assert store.hold(connection, Decision("orders", 1, namespace=renewed))[0]
    assert store.decide(connection, Decision("orders", 1, prepared(1), namespace=renewed))[0]
    store.commit(connection)
    assert store.read(["orders"])[0].prepared == prepared(1)


def test_several_ids_are_decided_at_once(database: Database, store: SqlStateStore, connection: Connection) -> None:
    store.claim(["a", "b", "c"], owner="me", cluster_id="cluster-one")
    store.begin(connection)
    store.read_incarnation(connection, "a")
    for number, name in enumerate("abc"):
        assert store.decide(connection, Decision(name, 1, prepared(1, number)))[0]
    store.commit(connection)
    assert [row.prepared for row in store.find("")] == [prepared(1, number) for number in range(3)]


def test_a_decision_forgets_what_became_of_the_one_before(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    row = replace(database.claim(store, "orders"), prepared=prepared(1, 1))
    database.set_state("orders", str(row.prepared))
    store.record_outcomes([(row, Outcome.COMMITTED, "")])
    assert store.read(["orders"])[0].completed is Outcome.COMMITTED
    store.begin(connection)
    store.read_incarnation(connection, "orders")
    store.decide(connection, Decision("orders", 1, prepared(1, 2)))
    store.commit(connection)
    assert store.read(["orders"])[0].completed is None


@pytest.mark.parametrize(
    "state",
    [
        PreparedTxnState(),
        PreparedTxnState(42, 0),
        PreparedTxnState(42, 0, 1),
        PreparedTxnState(42, 0, None, (FirstOffset("orders", 0, 1),)),
        prepared(2),
    ],
)
def test_a_state_that_could_not_be_settled_is_not_decided(
    database: Database, store: SqlStateStore, connection: Connection, state: PreparedTxnState
) -> None:
    database.claim(store, "orders")
    store.begin(connection)
    with pytest.raises(IllegalStateError, match="cannot be recorded"):
        store.decide(connection, Decision("orders", 1, state))


def test_a_state_that_could_not_be_read_back_is_not_decided(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    database.claim(store, "orders")
    long = tuple(FirstOffset("t" * 249, partition, 2**62) for partition in range(40_000))
    store.begin(connection)
    for firsts in [long, (FirstOffset("a;b", 0, 0),)]:
        with pytest.raises(ConfigurationError, match="not a prepared transaction state"):
            store.decide(connection, Decision("orders", 1, PreparedTxnState(42, 0, 1, firsts)))


def test_a_connection_inside_a_transaction_is_refused_and_left_alone(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    insert(connection, 1)
    with pytest.raises(IllegalStateError, match="already in a transaction"):
        store.begin(connection)
    connection.commit()
    assert orders(database) == [1]


def test_a_driver_inside_a_transaction_is_refused_and_left_alone(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    driver: Any = connection.connection.dbapi_connection
    run_raw(driver, "INSERT INTO orders VALUES (1, NULL)")
    with pytest.raises(IllegalStateError, match="already in a transaction"):
        store.begin(connection)
    driver.commit()
    assert orders(database) == [1]


def test_a_closed_connection_is_refused(database: Database, store: SqlStateStore, connection: Connection) -> None:
    connection.close()
    with pytest.raises(IllegalStateError, match="closed"):
        store.begin(connection)
    store.rollback(connection)


def test_a_connection_in_autocommit_is_refused(database: Database, store: SqlStateStore) -> None:
    with (
        database.engine(isolation_level="AUTOCOMMIT").connect() as connection,
        pytest.raises(ConfigurationError, match="autocommit"),
    ):
        store.begin(connection)


def test_a_connection_set_to_autocommit_is_refused(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    connection.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigurationError, match="autocommit"):
        store.begin(connection)
    assert not connection.in_transaction()


def test_a_violated_deferred_constraint_at_commit_is_a_definite_abort(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    if database.kind == "mariadb":
        pytest.skip("InnoDB defers no constraint")
    row = database.claim(store, "orders")
    store.begin(connection)
    store.read_incarnation(connection, "orders")
    insert(connection, 1, customer=404)
    store.decide(connection, Decision("orders", 1, prepared(1)))
    with pytest.raises(TransactionAborted, match="COMMIT failed") as caught:
        store.commit(connection)
    assert not caught.value.retryable
    assert isinstance(caught.value.__cause__, IntegrityError)
    assert caught.value.transactional_id == "orders"
    assert (store.read(["orders"]), orders(database)) == ([row], [])
    insert(connection, 1)  # the connection is free for the next transaction
    connection.commit()
    assert orders(database) == [1]


def test_a_listener_that_stops_the_commit_is_a_definite_abort(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    row = database.claim(store, "orders")
    store.begin(connection)
    store.read_incarnation(connection, "orders")
    insert(connection, 1)
    store.decide(connection, Decision("orders", 1, prepared(1)))

    def stop(_: Connection) -> None:
        raise KeyboardInterrupt

    event.listen(connection, "commit", stop)
    with pytest.raises(TransactionAborted) as caught:
        store.commit(connection)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert (store.read(["orders"]), orders(database)) == ([row], [])


def test_nobody_elses_commit_gets_through_and_what_it_would_have_committed_is_gone_at_once(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    database.claim(store, "orders")
    store.begin(connection)
    insert(connection, 1)
    with pytest.raises(IllegalStateError, match="committed inside the block"):
        connection.commit()
    connection.rollback()
    insert(connection, 2)
    store.rollback(connection)
    insert(connection, 3)
    connection.commit()
    assert orders(database) == [3]
    store.begin(connection)
    insert(connection, 4)
    with pytest.raises(IllegalStateError, match="committed inside the block"):
        connection.commit()
    store.rollback(connection)
    assert orders(database) == [3]


def test_a_rollback_after_a_listener_stopped_somebody_elses_commit_leaves_nothing_open(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    def stop(_: Connection) -> None:
        raise KeyboardInterrupt

    event.listen(connection, "commit", stop)
    database.claim(store, "orders")
    store.begin(connection)
    insert(connection, 1)
    with pytest.raises(KeyboardInterrupt):
        connection.commit()
    event.remove(connection, "commit", stop)
    store.rollback(connection)
    insert(connection, 2)
    connection.commit()
    assert orders(database) == [2]


def test_a_discarded_connection_leaves_nothing_and_is_free_for_the_next_transaction(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    database.claim(store, "orders")
    store.begin(connection)
    insert(connection, 1)
    store.discard(connection)
    insert(connection, 2)
    connection.commit()
    assert orders(database) == [2]


def test_a_commit_interrupted_after_it_was_sent_is_in_doubt(
    database: Database, store: SqlStateStore, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.claim(store, "orders")
    store.begin(connection)
    store.read_incarnation(connection, "orders")
    store.decide(connection, Decision("orders", 1, prepared(1)))
    send = connection.dialect.do_commit
    before = connection.connection.dbapi_connection

    def interrupted(driver: Any) -> None:
        send(driver)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(connection.dialect, "do_commit", interrupted)
        with pytest.raises(TransactionInDoubt) as caught:
            store.commit(connection)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert store.read(["orders"])[0].prepared == prepared(1)
    insert(connection, 1)
    connection.commit()
    assert connection.connection.dbapi_connection is not before


def end_unseen(connection: Connection, words: str) -> None:
    """Execute COMMIT or ROLLBACK as text; on MariaDB below the watch over the driver, which refuses it."""
    driver: Any = connection.connection.dbapi_connection
    if connection.dialect.name == "mysql":
        type(driver).query(driver, words)
    else:
        connection.exec_driver_sql(words)


@pytest.mark.parametrize("words", ["COMMIT", "ROLLBACK"])
def test_a_transaction_ended_inside_is_noticed_before_the_decision(
    database: Database, store: SqlStateStore, connection: Connection, words: str
) -> None:
    row = database.claim(store, "orders")
    for last in [
        lambda: store.decide(connection, Decision("orders", 1, prepared(1))),
        lambda: store.hold(connection, Decision("orders", 1)),
    ]:
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        end_unseen(connection, words)
        # asyncpg would not begin another transaction: the row would be committed by itself.
        with pytest.raises(IllegalStateError, match="ended inside") if database.by_asyncpg else nullcontext():
            insert(connection, 1)
        with pytest.raises(IllegalStateError, match="ended inside") as caught:
            last()
        assert caught.value.outcome == "unknown"
        store.rollback(connection)
        assert (store.read(["orders"]), orders(database)) == ([row], [])


def stand_alone(driver: Any) -> None:
    """Roll back behind the library's back, and let every statement from now on be a transaction of its own."""
    if hasattr(driver, "pgconn"):
        driver.rollback()
        driver.autocommit = True
    elif isinstance(driver, sqlite3.Connection):
        driver.rollback()
        driver.isolation_level = None
    elif isinstance(driver, AdaptedConnection):
        asyncpg_driver.await_only(exchanges_of(driver.driver_connection)._protocol.query("ROLLBACK", None))
    else:  # below the watch over the driver's statements
        type(driver).rollback(driver)
        type(driver).autocommit(driver, True)


@pytest.mark.parametrize("last", ["decide", "hold"])
def test_a_statement_that_stands_alone_decides_nothing(
    database: Database, store: SqlStateStore, connection: Connection, last: str
) -> None:
    row = database.claim(store, "orders")
    store.begin(connection)
    store.read_incarnation(connection, "orders")
    insert(connection, 1)
    stand_alone(connection.connection.dbapi_connection)
    with pytest.raises(IllegalStateError, match="ended inside") as caught:
        if last == "decide":
            store.decide(connection, Decision("orders", 1, prepared(1)))
        else:
            store.hold(connection, Decision("orders", 1))
    assert caught.value.outcome == "unknown"
    store.discard(connection)
    assert (store.read(["orders"]), orders(database)) == ([row], [])


def test_who_was_claimed_away_is_told_so_while_the_transaction_is_open(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    database.claim(store, "orders")
    if database.kind == "sqlite":
        pytest.skip("nobody can claim beside a transaction")
    connection = connection.execution_options(isolation_level="READ COMMITTED")
    store.begin(connection)
    store.read_incarnation(connection, "orders")
    insert(connection, 1)
    database.claim(store, "orders")
    assert store.decide(connection, Decision("orders", 1, prepared(1))) == (False, None)
    store.rollback(connection)
    assert orders(database) == []


def test_a_transaction_ended_after_the_decision_is_in_doubt(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    database.claim(store, "orders")
    store.begin(connection)
    store.read_incarnation(connection, "orders")
    store.decide(connection, Decision("orders", 1, prepared(1)))
    end_unseen(connection, "COMMIT")
    with pytest.raises(TransactionInDoubt) as caught:
        store.commit(connection)
    assert caught.value.transactional_id == "orders"


def test_savepoints_are_the_users(database: Database, store: SqlStateStore, connection: Connection) -> None:
    database.claim(store, "orders")
    store.begin(connection)
    store.read_incarnation(connection, "orders")
    insert(connection, 1)
    with pytest.raises(IntegrityError), connection.begin_nested():
        insert(connection, 1)
    with connection.begin_nested():
        insert(connection, 2)
    connection.begin_nested()
    insert(connection, 3)
    assert store.decide(connection, Decision("orders", 1, prepared(1)))[0]
    store.commit(connection)
    assert orders(database) == [1, 2, 3]


def test_the_next_dual_write_of_a_connection_follows_its_own_savepoints(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    database.claim(store, "orders")
    former: list[SavepointWatch] = []
    for _ in range(2):
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        watch = store.watch_savepoints(connection, "orders")
        savepoint = connection.begin_nested()
        watch.add(lambda _: None)
        assert watch.holds
        assert not any(one.holds for one in former)
        savepoint.commit()
        assert len(watch.take()) == 1
        watch.finish()
        store.rollback(connection)
        former.append(watch)


def test_a_missing_table_names_the_command(database: Database, store: SqlStateStore, connection: Connection) -> None:
    database.execute(f"DROP TABLE {database.state_table}")
    with pytest.raises(ConfigurationError, match="dualwrite migrate --url") as caught:
        database.claim(store, "orders")
    assert ("--schema" in str(caught.value)) == (database.schema is not None)
    for call in [lambda: store.read(["orders"]), lambda: store.find("")]:
        with pytest.raises(ConfigurationError, match="dualwrite migrate --url"):
            call()
    store.begin(connection)
    with pytest.raises(ConfigurationError, match="dualwrite migrate --url"):
        store.read_incarnation(connection, "orders")


def test_a_missing_column_names_the_command(database: Database, store: SqlStateStore) -> None:
    database.execute(f"ALTER TABLE {database.state_table} DROP COLUMN owner")
    with pytest.raises(ConfigurationError, match="dualwrite migrate --url"):
        database.claim(store, "orders")


def test_no_error_shows_a_password(database: Database) -> None:
    database.execute(f"DROP TABLE {database.state_table}")
    store = database.store()
    secret = store.engine.url.password
    with pytest.raises(ConfigurationError) as caught:
        database.claim(store, "orders")
    assert secret is None or secret not in str(caught.value) + repr(caught.value) + str(pickle.dumps(caught.value))


def test_no_database_error_escapes_unmapped(database: Database) -> None:
    store = database.store()
    for table in (database.tables.state, database.tables.incident):
        with store.engine.begin() as connection:
            table.drop(connection)
    row = database_row()
    calls = [
        lambda: store.claim(["a"], owner="me", cluster_id="c"),
        lambda: store.read(["a"]),
        lambda: store.find("a"),
        lambda: store.record_outcomes([(row, Outcome.LOST, "gone")]),
        lambda: store.mark_settled({"a": 1}),
        lambda: store.incident("a", prepared(1)),
        store.incidents,
        lambda: store.acknowledge("a", prepared(1)),
    ]
    for call in calls:
        with pytest.raises(DualWriteError):
            call()


def database_row() -> Any:
    from datetime import datetime, timezone

    from dualwrite.protocol.values import StateRow

    return StateRow("a", prepared(1), "n", 1, 0, None, "c", "me", datetime.now(timezone.utc))


def test_the_store_knows_nothing_of_an_unnamed_transaction(database: Database, store: SqlStateStore) -> None:
    assert store.transaction_verdict(None) is DatabaseVerdict.UNKNOWN


def test_a_store_made_from_a_url_owns_its_engine(database: Database) -> None:
    store = SqlStateStore(database.url, schema=database.schema)
    assert database.claim(store, "orders").incarnation == 1
    store.close()
    store.close()
