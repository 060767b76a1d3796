"""Behaviour of PostgreSQL alone: isolation levels, waiting for rows, dying sessions."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from harness import patience
from harness.databases import CLUSTER, Database, Thread, prepare, prepared, wait_until, wait_until_blocked
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.exc import DBAPIError, OperationalError

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Fenced, TransactionAborted, TransactionInDoubt, Unavailable
from dualwrite.protocol.process import DatabaseVerdict
from dualwrite.protocol.values import Decision, Outcome, StateRow
from dualwrite.stores.sql import access
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.stores.sql.short_transactions import ShortTransactions, dialect_of
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import EmbeddedPostgres, PostgresProxy
from dualwrite.testing.servers.databases import POSTGRES_SERVER_VARIABLE

pytestmark = pytest.mark.postgresql

on_16_too = pytest.mark.parametrize(
    "postgres", ["postgres_url", "postgres_16_url"], indirect=True, ids=["newest", "16"]
)
"""Also on PostgreSQL 16, which has no ``transaction_timeout``: other settings limit a COMMIT there."""


@pytest.fixture
def store(postgres: Database) -> SqlStateStore:
    return postgres.store()


@pytest.fixture
def connection(store: SqlStateStore) -> Iterator[Connection]:
    with store.engine.connect() as made:
        yield made


@pytest.fixture
def since_17(postgres: Database) -> None:
    """The test is about ``transaction_timeout``."""
    with postgres.store().engine.connect() as connection:
        found = connection.dialect.server_version_info
    assert found is not None
    if found[0] < 17:
        pytest.skip(f"PostgreSQL {found[0]} has no transaction_timeout")


def backend(connection: Connection) -> int:
    driver: Any = connection.connection.dbapi_connection
    return driver.info.backend_pid


def terminate(database: Database, pid: int) -> None:
    database.query("SELECT pg_terminate_backend(:pid)", pid=pid)
    while database.query("SELECT 1 FROM pg_stat_activity WHERE pid = :pid", pid=pid):
        pass


def begin(store: SqlStateStore, connection: Connection, incarnation: int = 1) -> None:
    store.begin(connection)
    assert store.read_incarnation(connection, "orders") == incarnation


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
class TestIsolationLevels:
    def test_a_dual_write_is_decided(self, postgres: Database, store: SqlStateStore, level: str) -> None:
        with postgres.engine(isolation_level=level).connect() as connection:
            for number in range(3):
                incarnation = postgres.claim(store, "orders").incarnation
                begin(store, connection, incarnation)
                assert store.decide(connection, Decision("orders", incarnation, prepared(incarnation, number)))[0]
                store.commit(connection)
        assert store.read(["orders"])[0].prepared == prepared(3, 2)

    def test_who_is_claimed_away_in_the_middle_cannot_decide(
        self, postgres: Database, store: SqlStateStore, level: str
    ) -> None:
        postgres.claim(store, "orders")
        with postgres.engine(isolation_level=level).connect() as connection:
            for last in [
                lambda incarnation: store.decide(connection, Decision("orders", incarnation, prepared(incarnation)))[0],
                lambda incarnation: store.hold(connection, Decision("orders", incarnation))[0],
            ]:
                incarnation = store.read(["orders"])[0].incarnation
                begin(store, connection, incarnation)
                connection.execute(text("INSERT INTO orders VALUES (1)"))
                postgres.claim(store, "orders")
                if level == "READ COMMITTED":
                    assert not last(incarnation)
                else:
                    with pytest.raises(TransactionAborted) as caught:
                        last(incarnation)
                    assert caught.value.retryable
                store.rollback(connection)
        assert not store.read(["orders"])[0].prepared.has_transaction
        assert not postgres.query("SELECT 1 FROM orders")

    def test_a_claim_waits_for_a_decision_and_returns_it(
        self, postgres: Database, store: SqlStateStore, level: str
    ) -> None:
        postgres.claim(store, "orders")
        with postgres.engine(isolation_level=level).connect() as connection:
            begin(store, connection)
            store.decide(connection, Decision("orders", 1, prepared(1)))
            claim = Thread(lambda: postgres.claim(store, "orders"))
            wait_until_blocked(postgres)
            assert not claim.done
            store.commit(connection)
        row = claim.result()
        assert (row.incarnation, row.prepared) == (2, prepared(1))

    def test_a_claim_waits_for_whoever_holds_the_row(
        self, postgres: Database, store: SqlStateStore, level: str
    ) -> None:
        postgres.claim(store, "orders")
        with postgres.engine(isolation_level=level).connect() as connection:
            begin(store, connection)
            assert store.hold(connection, Decision("orders", 1))[0]
            claim = Thread(lambda: postgres.claim(store, "orders"))
            wait_until_blocked(postgres)
            store.commit(connection)
        assert claim.result().incarnation == 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_commit_that_finds_no_transaction_is_in_doubt(
    postgres: Database, store: SqlStateStore, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_leave", lambda _: None)  # or else the child could not reach the server
    row = postgres.claim(store, "orders")
    begin(store, connection)
    connection.execute(text("INSERT INTO orders VALUES (1)"))
    assert store.decide(connection, Decision("orders", 1, prepared(1)))[0]
    driver: Any = connection.connection.driver_connection
    child = os.fork()
    if child == 0:
        driver.pgconn.exec_(b"ROLLBACK")
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(TransactionInDoubt, match="ended the database transaction before COMMIT"):
        store.commit(connection)
    assert store.read(["orders"]) == [row]


def test_the_stores_own_transactions_do_not_depend_on_the_engines_level(postgres: Database) -> None:
    for level in ("AUTOCOMMIT", "SERIALIZABLE"):
        store = postgres.store(postgres.engine(isolation_level=level))
        row = postgres.claim(store, "orders")
        with pytest.raises(ZeroDivisionError):
            postgres.claim(store, "orders", verify=lambda _: 1 / 0)
        assert store.read(["orders"]) == [row]


def test_a_serialization_failure_at_commit_may_be_tried_again(postgres: Database, store: SqlStateStore) -> None:
    store.claim(["a", "b"], owner="me", cluster_id=CLUSTER)
    engine = postgres.engine(isolation_level="SERIALIZABLE")
    with engine.connect() as one, engine.connect() as two:
        for connection, name in ((one, "a"), (two, "b")):
            store.begin(connection)
            store.read_incarnation(connection, name)
            connection.execute(text("SELECT count(*) FROM orders")).all()
        one.execute(text("INSERT INTO orders VALUES (1)"))
        two.execute(text("INSERT INTO orders VALUES (2)"))
        assert store.decide(one, Decision("a", 1, prepared(1, 1)))[0]
        assert store.decide(two, Decision("b", 1, prepared(1, 2)))[0]
        store.commit(one)
        with pytest.raises(TransactionAborted, match="COMMIT failed") as caught:
            store.commit(two)
    assert caught.value.retryable
    assert [row.prepared.has_transaction for row in store.find("")] == [True, False]
    assert [row[0] for row in postgres.query("SELECT id FROM orders")] == [1]


def test_a_failed_transaction_is_not_committed_silently(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    postgres.claim(store, "orders")
    begin(store, connection)
    store.decide(connection, Decision("orders", 1, prepared(1)))
    with pytest.raises(DBAPIError):
        connection.execute(text("SELECT 1 / 0"))
    with pytest.raises(TransactionAborted, match="ROLLBACK") as caught:
        store.commit(connection)
    assert not caught.value.retryable
    assert not store.read(["orders"])[0].prepared.has_transaction


def test_nothing_is_decided_in_a_failed_transaction(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    postgres.claim(store, "orders")
    begin(store, connection)
    with pytest.raises(DBAPIError):
        connection.execute(text("SELECT 1 / 0"))
    with pytest.raises(TransactionAborted, match="earlier statement"):
        store.decide(connection, Decision("orders", 1, prepared(1)))


def test_a_session_killed_before_commit_is_in_doubt(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    row = postgres.claim(store, "orders")
    begin(store, connection)
    _, name = store.decide(connection, Decision("orders", 1, prepared(1)))
    terminate(postgres, backend(connection))
    with pytest.raises(TransactionInDoubt) as caught:
        store.commit(connection)
    assert isinstance(caught.value.__cause__, OperationalError)
    assert store.read_locked("orders", Deadline(5)) == row
    assert store.transaction_verdict(name) is DatabaseVerdict.ABORTED
    store.rollback(connection)
    begin(store, connection)  # on a new session


def test_a_session_lost_before_commit_was_sent_is_a_definite_abort(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    postgres.claim(store, "orders")
    begin(store, connection)
    store.decide(connection, Decision("orders", 1, prepared(1)))
    terminate(postgres, backend(connection))
    with pytest.raises(DBAPIError):
        connection.execute(text("SELECT 1"))
    with pytest.raises(TransactionAborted, match="before COMMIT was sent") as caught:
        store.commit(connection)
    assert caught.value.retryable


def test_a_commit_whose_answer_is_lost_is_in_doubt_and_found_out() -> None:
    # With no standby a COMMIT is done and then waits for ever to answer.
    with EmbeddedPostgres({"synchronous_standby_names": "nobody", "synchronous_commit": "local"}) as server:
        database = prepare("postgresql", server.create_database())
        store = database.store()
        database.claim(store, "orders")
        with store.engine.connect() as connection:
            begin(store, connection)
            connection.execute(text("SET LOCAL synchronous_commit = on"))
            _, name = store.decide(connection, Decision("orders", 1, prepared(1)))
            assert store.transaction_verdict(name) is DatabaseVerdict.UNKNOWN
            commit = Thread(lambda: store.commit(connection))
            wait_until(database, "wait_event = 'SyncRep'")
            terminate(database, backend(connection))
            with pytest.raises(TransactionInDoubt):
                commit.result()
        assert store.read_locked("orders", Deadline(5)).prepared == prepared(1)
        assert store.transaction_verdict(name) is DatabaseVerdict.COMMITTED
        server.restart()
        assert store.transaction_verdict(name) is DatabaseVerdict.UNKNOWN
        database.dispose()


@pytest.mark.parametrize("committed", [True, False])
def test_what_is_prepared_waits_for_its_end_whatever_happens_to_the_server(
    committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(POSTGRES_SERVER_VARIABLE, raising=False)  # it is restarted
    with EmbeddedPostgres() as server:
        database = prepare("postgresql", server.create_database())
        store = database.store()
        row = database.claim(store, "orders")
        another = database.claim(store, "another")
        with store.engine.connect() as connection:
            begin(store, connection)
            connection.execute(text("CREATE TABLE made (id int)"))
            store.prepare(connection, row, prepared(1))
            assert not connection.in_transaction()
            begin(store, connection)  # it is free for another transaction
            store.rollback(connection)
        server.restart("immediate")
        database.dispose()  # the connections of before
        with store.engine.connect() as connection:  # not ours: its name only begins like ours
            connection.execute(text("SELECT 1"))
            connection.exec_driver_sql("PREPARE TRANSACTION 'dualwrite:theirs'")
            connection.rollback()
        [found] = store.participants([row, another])
        assert (found.row, found.incarnation, found.decided) == (row, 1, False)
        [found] = store.participants([replace(row, prepared=prepared(1))])
        assert found.decided
        [found] = store.participants([replace(row, prepared=prepared(1, 1))])
        assert not found.decided
        assert store.participants([another]) == store.participants([]) == []
        for _ in range(2):
            store.end_participant(found, committed=committed)
        assert store.participants([row]) == []
        assert database.query("SELECT to_regclass('made') IS NOT NULL") == [(committed,)]
        database.dispose()


def test_a_server_that_takes_no_prepared_transactions_rolls_back() -> None:
    with EmbeddedPostgres({"max_prepared_transactions": "0"}) as server:
        database = prepare("postgresql", server.create_database())
        store = database.store()
        row = database.claim(store, "orders")
        with store.engine.connect() as connection:
            begin(store, connection)
            connection.execute(text("CREATE TABLE made (id int)"))
            with pytest.raises(TransactionAborted, match="PREPARE TRANSACTION failed: .*disabled"):
                store.prepare(connection, row, prepared(1))
        assert database.query("SELECT to_regclass('made') IS NULL") == [(True,)]
        database.dispose()


def test_rolling_back_a_dead_connection_raises_nothing(
    postgres: Database, store: SqlStateStore, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    postgres.claim(store, "orders")
    begin(store, connection)
    terminate(postgres, backend(connection))
    store.rollback(connection)
    assert not connection.in_transaction()
    begin(store, connection)


def test_sessions_of_the_pool_that_died_are_replaced(postgres: Database, store: SqlStateStore) -> None:
    with store.engine.connect() as one, store.engine.connect() as two:
        pids = [backend(one), backend(two)]
    for pid in pids:
        terminate(postgres, pid)
    assert postgres.claim(store, "orders").incarnation == 1


@pytest.mark.parametrize(
    # The limit of a session counts before the decision, too: a busy machine must be there by then.
    ("of_session_s", "limits"),
    [(2.0, {}), (None, {"idle_s": 0.05}), (None, {"within_s": 0.05})],
    ids=str,
)
def test_an_owner_that_is_paused_after_it_has_recorded_its_decision_has_decided_nothing(
    request: pytest.FixtureRequest, postgres: Database, of_session_s: float | None, limits: dict[str, float]
) -> None:
    if "within_s" in limits:
        request.getfixturevalue("since_17")
    store = postgres.store(paused_owner_timeout_s=of_session_s)
    postgres.claim(store, "orders")
    with store.engine.connect() as connection:
        begin(store, connection)
        store.decide(connection, Decision("orders", 1, prepared(1), **limits))
        assert postgres.claim(postgres.store(), "orders").incarnation == 2  # waits for the lock
        with pytest.raises((TransactionAborted, TransactionInDoubt)):
            store.commit(connection)
    assert not store.read(["orders"])[0].prepared.has_transaction


@pytest.mark.parametrize("postgres", ["postgres_16_url"], indirect=True)
def test_before_17_an_owner_is_limited_only_while_it_is_paused(postgres: Database) -> None:
    store = postgres.store(paused_owner_timeout_s=None)
    postgres.claim(store, "orders")
    with store.engine.connect() as connection:
        assert connection.dialect.server_version_info is not None
        assert connection.dialect.server_version_info[0] == 16
        begin(store, connection)
        store.decide(connection, Decision("orders", 1, prepared(1), within_s=0.05))
        connection.execute(text("SELECT pg_sleep(0.2)"))
        store.commit(connection)
        begin(store, connection)
        store.decide(connection, Decision("orders", 1, prepared(1, 7), idle_s=0.05))
        assert postgres.claim(postgres.store(), "orders").incarnation == 2  # waits for the lock
        with pytest.raises((TransactionAborted, TransactionInDoubt)):
            store.commit(connection)
    assert store.read(["orders"])[0].prepared == prepared(1)


def hang_at_commit(postgres: Database, seconds: float = 600) -> None:
    postgres.execute(
        "CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN PERFORM pg_sleep({seconds}); RETURN NULL; END $$"
    )
    postgres.execute(
        "CREATE CONSTRAINT TRIGGER hangs AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION hang()"
    )


@pytest.mark.usefixtures("since_17")
def test_the_server_ends_a_commit_that_takes_too_long(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    """No ``statement_timeout`` counts in COMMIT, and a deferred trigger may run in it for ever."""
    row = postgres.claim(store, "orders")
    hang_at_commit(postgres)
    begin(store, connection)
    connection.execute(text("SET LOCAL statement_timeout = '50ms'"))
    connection.execute(text("INSERT INTO orders VALUES (1)"))
    store.decide(connection, Decision("orders", 1, prepared(1), within_s=0.5))
    with pytest.raises(TransactionInDoubt, match="transaction timeout"):
        store.commit(connection)
    assert store.read_locked("orders", Deadline(120)) == row


@on_16_too
def test_what_was_deferred_to_commit_can_be_run_before_the_decision(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    postgres.claim(store, "orders")
    hang_at_commit(postgres, 0)
    begin(store, connection)
    connection.execute(text("SET LOCAL track_functions = 'all'"))
    connection.execute(text("INSERT INTO orders VALUES (1)"))
    calls = text("SELECT coalesce(pg_stat_get_xact_function_calls('hang'::regproc), 0)")
    assert connection.scalar(calls) == 0
    store.run_deferred(connection)
    assert connection.scalar(calls) == 1
    store.decide(connection, Decision("orders", 1, prepared(1)))
    store.commit(connection)


@on_16_too
def test_a_commit_that_is_not_answered_is_given_up(postgres: Database, store: SqlStateStore) -> None:
    postgres.claim(store, "orders")
    hang_at_commit(postgres)
    with store.engine.connect() as connection:
        begin(store, connection)
        connection.execute(text("INSERT INTO orders VALUES (1)"))
        store.decide(connection, Decision("orders", 1, prepared(1)))
        pid = backend(connection)
        with pytest.raises(TransactionInDoubt, match="COMMIT"):
            store.commit(connection, answer_s=0.2)
    terminate(postgres, pid)
    assert not store.read_locked("orders", Deadline(120)).prepared.has_transaction


@pytest.mark.usefixtures("since_17")
@pytest.mark.parametrize(
    ("of_session", "within_s", "expected_ms"),
    [
        ("0", 30, (30_000, 30_000)),
        ("1h", 30, (30_000, 30_000)),
        ("10s", 30, (1, 10_000)),
        ("10s", None, (10_000, 10_000)),
    ],
)
def test_the_limit_for_the_rest_of_the_transaction_is_only_lowered_and_only_for_it(
    postgres: Database, of_session: str, within_s: float | None, expected_ms: tuple[int, int]
) -> None:
    store = postgres.store()
    postgres.claim(store, "orders")
    show = text("SELECT extract(epoch FROM current_setting('transaction_timeout')::interval) * 1000")
    with store.engine.connect() as connection:
        connection.execute(text(f"SET transaction_timeout = '{of_session}'"))
        connection.commit()
        before = connection.scalar(show)
        connection.rollback()
        begin(store, connection)
        store.decide(connection, Decision("orders", 1, prepared(1), within_s=within_s))
        assert expected_ms[0] <= int(connection.scalar(show) or 0) <= expected_ms[1]
        store.commit(connection)
        assert connection.scalar(show) == before


@pytest.mark.parametrize(
    ("timeout_s", "present", "expected"),
    [
        (60, "0", "1min"),
        (60, "2min", "1min"),
        (60, "5s", "5s"),
        (None, "0", "0"),
        (None, "2h", "2h"),
        (0.25, "0", "250ms"),
    ],
)
def test_the_limit_for_a_paused_owner_is_only_lowered_and_only_for_the_transaction(
    postgres: Database, timeout_s: float | None, present: str, expected: str
) -> None:
    store = postgres.store(paused_owner_timeout_s=timeout_s)
    show = text("SHOW idle_in_transaction_session_timeout")
    with store.engine.connect() as connection:
        connection.execute(text(f"SET idle_in_transaction_session_timeout = '{present}'"))
        connection.commit()
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        assert connection.scalar(show) == expected
        store.commit(connection)
        assert connection.scalar(
            text("SELECT current_setting('idle_in_transaction_session_timeout')::interval = CAST(:p AS interval)"),
            {"p": present},
        )


@on_16_too
@pytest.mark.parametrize(("idle_s", "expected"), [(10, "10s"), (90, "1min"), (None, "1min")])
def test_from_the_record_of_the_decision_on_the_limit_is_lower(
    postgres: Database, idle_s: float | None, expected: str
) -> None:
    store = postgres.store()
    postgres.claim(store, "orders")
    show = text("SHOW idle_in_transaction_session_timeout")
    with store.engine.connect() as connection:
        begin(store, connection)
        assert connection.scalar(show) == "1min"
        store.decide(connection, Decision("orders", 1, prepared(1), idle_s=idle_s))
        assert connection.scalar(show) == expected
        store.commit(connection)
        assert connection.scalar(show) == "0"


@pytest.mark.parametrize(("present", "expected"), [("off", "on"), ("local", "local"), ("on", "on")])
def test_the_commit_of_a_decision_is_durable(
    postgres: Database, store: SqlStateStore, connection: Connection, present: str, expected: str
) -> None:
    postgres.claim(store, "orders")
    show = text("SHOW synchronous_commit")
    connection.execute(text(f"SET synchronous_commit = {present}"))
    connection.commit()
    for last in [
        lambda: store.decide(connection, Decision("orders", 1, prepared(1))),
        lambda: store.hold(connection, Decision("orders", 1)),
    ]:
        begin(store, connection)
        last()
        assert connection.scalar(show) == expected
        store.commit(connection)
        assert connection.scalar(show) == present
        connection.rollback()


def test_the_stores_own_transactions_are_durable(postgres: Database) -> None:
    store = postgres.store(postgres.engine(connect_args={"options": "-c synchronous_commit=off"}))
    seen = []
    own = store._own
    assert isinstance(own, ShortTransactions)
    own.run(lambda connection: seen.append(connection.scalar(text("SHOW synchronous_commit"))))
    assert seen == ["on"]


def test_waiting_for_a_lock_has_an_end(postgres: Database, connection: Connection, store: SqlStateStore) -> None:
    row = postgres.claim(store, "orders")
    hasty = postgres.store(lock_timeout_s=0.05)
    begin(store, connection)
    store.decide(connection, Decision("orders", 1, prepared(1)))
    with pytest.raises(Unavailable, match="lock"):
        postgres.claim(hasty, "orders")
    with pytest.raises(Unavailable, match="lock"):
        store.read_locked("orders", Deadline(0))
    store.rollback(connection)
    assert store.read_locked("orders", Deadline(0)) == row


def test_work_whose_lock_was_lost_is_begun_again(postgres: Database, store: SqlStateStore) -> None:
    postgres.claim(store, "orders")
    begun = []

    def work() -> None:
        begun.append(1)
        if len(begun) == 1:
            [[holder]] = postgres.query(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
            )
            terminate(postgres, holder)

    store.while_locked(["orders"], work, Deadline(120))
    assert len(begun) == 2


def test_a_decision_waits_for_a_claim_under_way(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    postgres.claim(store, "orders")
    begin(store, connection)
    decisions: list[Thread] = []

    def decide_meanwhile(_: object) -> None:
        decisions.append(Thread(lambda: store.decide(connection, Decision("orders", 1, prepared(1)))))
        wait_until_blocked(postgres)

    postgres.claim(store, "orders", verify=decide_meanwhile)
    assert decisions[0].result() == (False, None)


def test_claims_that_wait_for_each_other_are_run_again(postgres: Database) -> None:
    store = postgres.store(postgres.engine(connect_args={"options": "-c deadlock_timeout=20ms"}))
    for name in ("a", "b"):
        store.claim([name], owner=f"owner of {name}", cluster_id=CLUSTER)
    guarded = threading.Barrier(2)
    waited = threading.local()
    deadlocks: list[object] = []

    def each_holds_its_guard(*arguments: Any) -> None:
        if "FOR UPDATE" in arguments[2] and not hasattr(waited, "once"):
            waited.once = guarded.wait(120)

    event.listen(store.engine, "before_cursor_execute", each_holds_its_guard)
    event.listen(store.engine, "handle_error", lambda context: deadlocks.append(context.original_exception))
    claims = [
        Thread(
            lambda wanted=wanted, guard=guard: store.claim(
                [wanted], owner=f"owner of {guard}", cluster_id=CLUSTER, guard=(guard, 1)
            )
        )
        for wanted, guard in (("a", "b"), ("b", "a"))
    ]
    outcomes = []
    for claim in claims:
        try:
            outcomes.append(claim.result()[0].incarnation)
        except Fenced as error:
            outcomes.append(type(error))
    assert [type(error).__name__ for error in deadlocks] == ["DeadlockDetected"]
    assert sorted(outcomes, key=str) == [2, Fenced]


def test_the_verdict_on_another_servers_transaction_is_unknown(postgres: Database, store: SqlStateStore) -> None:
    number = postgres.query("SELECT pg_current_xact_id()::text")[0][0]
    assert store.transaction_verdict(f"{number}@1.5") is DatabaseVerdict.UNKNOWN


def test_a_claim_whose_session_was_ended_meanwhile_says_nothing_of_a_database_gone_back_in_time(
    postgres: Database, store: SqlStateStore
) -> None:
    """Paused inside its claim for too long: the transaction that it then finds in Kafka belongs to the next owner."""
    other = postgres.store()
    found: list[int] = []

    def verify(rows: Sequence[StateRow]) -> None:
        found.append(rows[0].incarnation)
        if len(found) > 1:
            return
        pid = postgres.query(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
        )[0][0]
        terminate(postgres, pid)
        assert postgres.claim(other, "orders").incarnation == rows[0].incarnation
        raise ConfigurationError("the database has gone back in time")

    assert postgres.claim(store, "orders", verify=verify).incarnation == 2
    assert found == [1, 2]


def test_a_snapshot_that_keeps_old_versions_of_the_rows_is_named(postgres: Database, store: SqlStateStore) -> None:
    database = SqlDatabase(store.engine, postgres.schema)
    postgres.claim(store, "orders")
    updates = f"DO $$ BEGIN FOR i IN 1..1200 LOOP UPDATE {postgres.state_table} SET owner = owner; END LOOP; END $$"

    def update() -> None:
        engine = postgres.engine()
        with engine.begin() as connection:
            connection.exec_driver_sql(updates)
        engine.dispose()  # the end of its session tells the statistics

    assert database.warnings() == ()
    reading = postgres.engine()
    with reading.connect() as other:
        other.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        pid = other.scalar(text("SELECT pg_backend_pid()"))
        assert other.scalar(text("SELECT count(*) FROM orders")) == 0
        update()
        patience.wait_until(lambda: database.warnings() != ())
        (warning,) = database.warnings()
        assert re.search(rf"^1,\d\d\d old versions of rows in .*kafka_transaction_state.* {pid} \(", warning)
        assert "idle in transaction" in warning
    reading.dispose()


def names_prepared(connection: Connection) -> set[str]:
    """The library's own prepared statements in this session."""
    found = connection.scalars(text("SELECT name FROM pg_prepared_statements WHERE name LIKE 'dualwrite%'"))
    names = set(found)
    connection.rollback()
    return names


def write(store: SqlStateStore, connection: Connection, number: int, *statements: str, commits: bool = True) -> None:
    begin(store, connection)
    watch = store.watch_savepoints(connection, "orders")
    for statement in statements:
        connection.exec_driver_sql(statement)
    watch.finish()
    assert store.decide(connection, Decision("orders", 1, prepared(1, number), deferred=True))[0]
    (store.commit if commits else store.rollback)(connection)


# psycopg forgets what it has prepared, and makes the session forget all, after DDL and after a rollback.
PREPARES = ["SELECT 1"] * 7


@pytest.mark.parametrize(
    "statements",
    [
        [*PREPARES, "CREATE TABLE IF NOT EXISTS extra (id integer)", "DROP TABLE extra"],
        [*PREPARES, "SAVEPOINT a", "ROLLBACK TO a"],
        ["DEALLOCATE ALL"],
    ],
    ids=["ddl", "savepoint", "deallocate"],
)
def test_what_makes_the_session_forget_prepared_statements_is_survived(
    postgres: Database, store: SqlStateStore, connection: Connection, statements: list[str]
) -> None:
    postgres.claim(store, "orders")
    write(store, connection, 1)  # finds out that there is no pooler
    write(store, connection, 1)
    names = names_prepared(connection)
    assert len(names) == 1  # of the first statement: a decision is named only where COMMIT goes with it
    write(store, connection, 2)
    assert names_prepared(connection) == names
    write(store, connection, 3, *statements)
    write(store, connection, 4)
    assert len(names_prepared(connection)) == 1
    write(store, connection, 5, *PREPARES, commits=False)
    write(store, connection, 6, *PREPARES)
    connection.exec_driver_sql("DEALLOCATE ALL")
    connection.commit()
    write(store, connection, 7)
    assert store.read(["orders"])[0].prepared == prepared(1, 7)


def test_without_prepared_statements_of_the_driver_there_are_none_of_ours(postgres: Database) -> None:
    store = postgres.store(postgres.engine(connect_args={"prepare_threshold": None}))
    postgres.claim(store, "orders")
    with store.engine.connect() as connection:
        for number in range(3):
            write(store, connection, number)
        assert names_prepared(connection) == set()


def test_a_dual_write_of_one_statement_takes_four_requests(
    postgres: Database, store: SqlStateStore, dualwrite_postgres: EmbeddedPostgres
) -> None:
    postgres.claim(store, "orders")
    with PostgresProxy(dualwrite_postgres) as proxy:
        own = postgres.store(create_engine(proxy.url(postgres.url)))
        for number in range(3):
            before = len(proxy.requests)
            with own.engine.connect() as connection:
                write(own, connection, number, "SELECT 1")
            firsts = [request.statements[0] for request in proxy.requests[before:]]
        own.engine.dispose()
    assert firsts == ["BEGIN", "SELECT 1", "SET CONSTRAINTS ALL IMMEDIATE", "COMMIT"]


def test_an_isolation_level_of_the_connection_is_that_of_the_dual_write(postgres: Database) -> None:
    store = postgres.store(postgres.engine(isolation_level="REPEATABLE READ"))
    postgres.claim(store, "orders")
    with store.engine.connect() as connection:
        begin(store, connection)
        assert connection.scalar(text("SHOW transaction_isolation")) == "repeatable read"
        store.rollback(connection)


def test_names_and_states_arrive_as_they_are_whatever_the_session_says_of_backslashes(postgres: Database) -> None:
    store = postgres.store(postgres.engine(connect_args={"options": "-c standard_conforming_strings=off"}))
    name = "o'r\\d%s\\' -- é \u4e2d"
    row = postgres.claim(store, name)
    with store.engine.connect() as connection:
        store.begin(connection)
        assert store.read_incarnation(connection, name, namespace=row.namespace) == 1
        assert store.decide(connection, Decision(name, 1, prepared(1), namespace=row.namespace))[0]
        store.commit(connection)
    assert store.read([name])[0].prepared == prepared(1)


def test_a_statement_that_stands_alone_waits_no_longer_for_a_table_that_somebody_has_locked(postgres: Database) -> None:
    """The server locks the table before it evaluates anything, so that a limit in the statement itself comes too late."""
    store = postgres.store(lock_timeout_s=0.3)
    postgres.claim(store, "orders")
    postgres.set_state("orders", str(prepared(1)))
    [row] = store.read(["orders"])
    with postgres.engines[0].begin() as other:
        other.execute(text("LOCK TABLE kafka_transaction_state IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(Unavailable, match="lock"):
            Thread(lambda: store.record_outcomes([(row, Outcome.COMMITTED, "")])).result(30)
    store.record_outcomes([(row, Outcome.COMMITTED, "")])
    assert store.read(["orders"])[0].completed is Outcome.COMMITTED


def test_a_statement_that_stands_alone_is_durable_and_read_committed_whatever_the_role_says(postgres: Database) -> None:
    """Otherwise it would fail beside every other change of its row."""
    asked = "SELECT current_setting('transaction_isolation'), current_setting('synchronous_commit')"
    options = "-c default_transaction_isolation=serializable -c synchronous_commit=off"
    engine = postgres.engine(connect_args={"options": options})
    own = ShortTransactions(engine, dialect_of(engine), postgres.tables)
    assert own.can_stand_alone
    for _ in range(2):
        assert own.run_one(lambda connection: tuple(connection.execute(text(asked)).one())) == ("read committed", "on")
        with engine.connect() as connection:  # nothing outlives the statement
            assert tuple(connection.execute(text(asked)).one()) == ("serializable", "off")
