"""A decision that is sent with its COMMIT, in one exchange with PostgreSQL: all that may fail in it, and how it is told."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from harness.databases import Database, Thread, prepared, wait_until, wait_until_blocked
from harness.interruption import Interruption
from harness.served import SETTINGS, TOPIC, ServedKafka
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from dualwrite import DualWriter, WriterLimits, recover
from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError, TransactionAborted, TransactionInDoubt
from dualwrite.protocol.values import Decided, Decision
from dualwrite.stores.sql import access
from dualwrite.stores.sql.commit_with_decision import CommitWithDecision
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import EmbeddedPostgres, PostgresProxy
from dualwrite.writing.lane_pool import Lanes

pytestmark = pytest.mark.postgresql

AGE_S = 60.0


@pytest.fixture
def store(postgres: Database) -> SqlStateStore:
    return postgres.store()


@pytest.fixture
def connection(store: SqlStateStore) -> Iterator[Connection]:
    with store.engine.connect() as made:
        yield made


def at_once(store: SqlStateStore) -> CommitWithDecision:
    found = store.with_commit
    assert isinstance(found, CommitWithDecision)
    return found


def begin(store: SqlStateStore, connection: Connection, name: str = "orders", order: int | None = 1) -> None:
    store.begin(connection)
    store.read_incarnation(connection, name)
    if order is not None:
        connection.execute(text("INSERT INTO orders VALUES (:id)"), {"id": order})


def execute(
    store: SqlStateStore, connection: Connection, name: str = "orders", *, number: int = 0, age_s: float = AGE_S
) -> Decided:
    assert at_once(store).is_possible(connection, AGE_S)
    decision = Decision(name, 1, prepared(1, number), within_s=10, answer_s=20, deferred=True)
    return at_once(store).execute(connection, decision, age_s)


def orders(database: Database) -> list[int]:
    return [row[0] for row in database.query("SELECT id FROM orders ORDER BY id")]


def test_it_is_committed_and_the_connection_may_be_used_again(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    postgres.claim(store, "orders")
    for number in range(3):
        begin(store, connection, order=number)
        assert execute(store, connection, number=number) is Decided.COMMITTED
        assert not connection.in_transaction()
        assert store.read(["orders"])[0].prepared == prepared(1, number)
    assert orders(postgres) == [0, 1, 2]


def test_it_saves_an_exchange(postgres: Database, store: SqlStateStore, dualwrite_postgres: EmbeddedPostgres) -> None:
    postgres.claim(store, "orders")
    with PostgresProxy(dualwrite_postgres) as proxy:
        own = postgres.store(create_engine(proxy.url(postgres.url)))
        with own.engine.connect() as connection:
            begin(own, connection, order=1)
            execute(own, connection)
            before = len(proxy.requests)
            begin(own, connection, order=2)
            execute(own, connection, number=1)
        assert "PREPARE" in proxy.requests[before - 1].statements[1]
        sent = [[statement.split()[0] for statement in request.statements] for request in proxy.requests[before:]]
        own.engine.dispose()
    assert [words[0] for words in sent] == ["BEGIN", "INSERT", "SET"]
    assert sent[-1] == ["SET", "WITH", "COMMIT"]


def test_the_session_plans_it_once(postgres: Database, store: SqlStateStore, connection: Connection) -> None:
    if (connection.dialect.server_version_info or ()) < (14,):
        pytest.skip("this server does not count plans")
    postgres.claim(store, "orders")
    for number in range(3):
        begin(store, connection, order=number)
        execute(store, connection, number=number)
    found = connection.execute(
        text(
            "SELECT custom_plans + generic_plans FROM pg_prepared_statements WHERE statement LIKE '%too late to commit%'"
        )
    )
    assert found.scalars().all() == [3]


# psycopg counts statements, prepares those that come often, and has the session forget all of them after a rollback or DDL.
OFTEN = ["SELECT 1"] * 7


@pytest.mark.parametrize(
    "statements",
    [
        [*OFTEN, "CREATE TABLE IF NOT EXISTS extra (id integer)", "DROP TABLE extra"],
        [*OFTEN, "DROP TABLE IF EXISTS missing", "SELECT 2"],
        [*OFTEN, "SAVEPOINT a", "ROLLBACK TO a"],
        [*OFTEN, "SAVEPOINT a", "ROLLBACK TO a", "SELECT 2"],
        ["DEALLOCATE ALL"],
        [f"SELECT {number}" for number in range(150) for _ in range(6)],
    ],
    ids=["ddl last", "ddl", "savepoint last", "savepoint", "deallocate", "many"],
)
def test_no_decision_is_named_that_the_session_has_forgotten(
    postgres: Database, store: SqlStateStore, connection: Connection, statements: list[str]
) -> None:
    postgres.claim(store, "orders")
    for number in range(6):
        begin(store, connection, order=number)
        for statement in statements if number % 2 else ():
            connection.exec_driver_sql(statement)
        assert execute(store, connection, number=number) is Decided.COMMITTED
    assert orders(postgres) == [0, 1, 2, 3, 4, 5]


def test_no_decision_is_named_that_will_be_forgotten(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    """At the end of a pipeline psycopg only notes that it must send DEALLOCATE ALL, which goes with its next statement."""
    postgres.claim(store, "orders")
    driver: Any = connection.connection.driver_connection
    for number in range(4):
        begin(store, connection, order=number)
        if number % 2:
            with driver.pipeline():
                driver.execute("SAVEPOINT a")
                driver.execute("ROLLBACK TO a")
        assert execute(store, connection, number=number) is Decided.COMMITTED
    assert orders(postgres) == [0, 1, 2, 3]


def test_a_decision_forgotten_behind_the_drivers_back_aborts_once(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    postgres.claim(store, "orders")
    begin(store, connection, order=0)
    execute(store, connection)
    begin(store, connection, order=1)
    driver: Any = connection.connection.driver_connection
    driver.pgconn.exec_(b"DEALLOCATE ALL")
    with pytest.raises(TransactionAborted) as raised:
        execute(store, connection)
    assert raised.value.retryable
    assert not connection.in_transaction()
    begin(store, connection, order=2)
    assert execute(store, connection, number=2) is Decided.COMMITTED
    assert orders(postgres) == [0, 2]


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_of_an_id_that_another_has_claimed_nothing_is_committed(
    postgres: Database, store: SqlStateStore, level: str
) -> None:
    postgres.claim(store, "orders")
    with postgres.engine(isolation_level=level).connect() as connection:
        begin(store, connection)
        postgres.claim(store, "orders")
        if level == "READ COMMITTED":
            assert execute(store, connection) is Decided.FENCED
        else:
            with pytest.raises(TransactionAborted):  # the claim shows as a conflict
                execute(store, connection)
        assert not connection.in_transaction()
    assert orders(postgres) == []
    assert not store.read(["orders"])[0].prepared.has_transaction


def test_it_waits_for_a_claim_under_way_and_is_fenced_by_it(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    postgres.claim(store, "orders")
    begin(store, connection)
    with postgres.engine().connect() as claiming:
        claiming.execute(text(f"UPDATE {postgres.state_table} SET incarnation = 2"))
        decided = Thread(lambda: execute(store, connection))
        wait_until_blocked(postgres)
        claiming.commit()
    assert decided.result() is Decided.FENCED
    assert orders(postgres) == []


def test_the_wait_for_the_lock_counts_for_the_age(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    """The server evaluates a condition on the row before it waits for it, and not once more after it."""
    postgres.claim(store, "orders")
    begin(store, connection)
    with postgres.engine().connect() as holding:
        holding.execute(text(f"SELECT FROM {postgres.state_table} FOR UPDATE"))
        decided = Thread(lambda: execute(store, connection, age_s=2))
        wait_until_blocked(postgres)
        holding.execute(text("SELECT pg_sleep(2)"))
    assert decided.result() is Decided.LATE
    assert orders(postgres) == []
    assert not store.read(["orders"])[0].prepared.has_transaction


def test_a_deferred_constraint_that_fails_is_told_as_one(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    postgres.claim(store, "orders")
    postgres.execute("CREATE TABLE notes (id int, order_id int REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)")
    begin(store, connection)
    connection.execute(text("INSERT INTO notes VALUES (1, 7)"))
    with pytest.raises(TransactionAborted, match="a check deferred to COMMIT failed") as caught:
        execute(store, connection)
    assert not caught.value.retryable
    assert orders(postgres) == []


def test_a_serialization_failure_may_be_tried_again(postgres: Database, store: SqlStateStore) -> None:
    store.claim(["a", "b"], owner="me", cluster_id="c")
    engine = postgres.engine(isolation_level="SERIALIZABLE")
    with engine.connect() as one, engine.connect() as two:
        for connection, name in ((one, "a"), (two, "b")):
            begin(store, connection, name, order=None)
            connection.execute(text("SELECT count(*) FROM orders")).all()
        one.execute(text("INSERT INTO orders VALUES (1)"))
        two.execute(text("INSERT INTO orders VALUES (2)"))
        assert execute(store, one, "a", number=1) is Decided.COMMITTED
        with pytest.raises(TransactionAborted) as caught:
            execute(store, two, "b", number=2)
    assert caught.value.retryable
    assert orders(postgres) == [1]


@pytest.mark.parametrize("fault", ["reset_request", "reset_answer"])
def test_a_connection_lost_in_it_leaves_a_doubt_that_the_row_resolves(
    postgres: Database, store: SqlStateStore, dualwrite_postgres: EmbeddedPostgres, fault: str
) -> None:
    row = postgres.claim(store, "orders")
    with PostgresProxy(dualwrite_postgres) as proxy:
        own = postgres.store(create_engine(proxy.url(postgres.url)))
        with own.engine.connect() as connection:
            begin(own, connection)
            getattr(proxy.on("COMMIT"), fault)()
            with pytest.raises(TransactionInDoubt, match="the answer to COMMIT is missing"):
                execute(own, connection)
        own.engine.dispose()
    committed = fault == "reset_answer"
    found = store.read_locked("orders", Deadline(5))
    assert found.prepared == (prepared(1) if committed else row.prepared)
    assert orders(postgres) == ([1] if committed else [])


def test_a_session_that_was_ended_while_the_decision_waits_leaves_a_doubt(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    """Such an error may also be a pooler's, and come after the COMMIT."""
    postgres.claim(store, "orders")
    begin(store, connection)
    driver: Any = connection.connection.driver_connection
    with postgres.engine().connect() as holding:
        holding.execute(text(f"SELECT FROM {postgres.state_table} FOR UPDATE"))
        decided = Thread(lambda: execute(store, connection))
        wait_until_blocked(postgres)
        postgres.query("SELECT pg_terminate_backend(:pid)", pid=driver.info.backend_pid)
        with pytest.raises(TransactionInDoubt):
            decided.result()
    assert orders(postgres) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_in_a_transaction_that_was_ended_unseen_nothing_is_committed(
    postgres: Database, store: SqlStateStore, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_leave", lambda _: None)  # or else the child could not reach the server
    row = postgres.claim(store, "orders")
    begin(store, connection)
    driver: Any = connection.connection.driver_connection
    child = os.fork()
    if child == 0:
        driver.pgconn.exec_(b"ROLLBACK")
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(IllegalStateError, match="was ended inside it"):
        execute(store, connection)
    assert store.read(["orders"]) == [row]


def test_where_something_must_come_between_they_go_one_by_one(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    postgres.claim(store, "orders")
    possible = at_once(store).is_possible

    begin(store, connection)
    assert possible(connection, AGE_S)
    assert not possible(connection, 0), "the transaction is too old already: that of Kafka may be younger"

    def audit(_: Connection) -> None:
        pass

    event.listen(store.engine, "commit", audit)
    assert not possible(connection, AGE_S), "a listener to COMMIT"
    event.remove(store.engine, "commit", audit)
    assert possible(connection, AGE_S)

    driver: Any = connection.connection.driver_connection
    with driver.pipeline():
        assert not possible(connection, AGE_S), "a pipeline"
    with driver.transaction():
        assert not possible(connection, AGE_S), "a block of psycopg's"
    with pytest.raises(DBAPIError):
        connection.execute(text("SELECT 1 / 0"))
    assert not possible(connection, AGE_S), "a failed transaction"
    store.rollback(connection)

    begin(store, connection)
    pid = driver.info.backend_pid
    postgres.query("SELECT pg_terminate_backend(:pid)", pid=pid)
    wait_until_gone = f"NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid})"
    wait_until(postgres, wait_until_gone)
    assert not possible(connection, AGE_S), "the server has ended the session: nothing is in doubt if nothing is sent"
    store.rollback(connection)


@pytest.mark.parametrize(
    "inside",
    [
        pytest.param("let_go", id="once it is committed"),
        pytest.param("_decide_at_once", id="at any line", marks=pytest.mark.thorough),
    ],
)
def test_an_interruption_leaves_both_sides_equal(
    postgres: Database, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    """Behind COMMIT, too, Kafka must not be told to abort: only the row says what was decided."""
    kafka = ServedKafka()
    kafka.plant(monkeypatch)
    monkeypatch.setattr(Lanes, "_choose_due", lambda *_: None)
    numbers = itertools.count()
    engine = postgres.engine()

    def write(writer: DualWriter) -> int:
        number = next(numbers)
        with writer.transaction() as tx:
            tx.produce(TOPIC, str(number), partition=0)
            tx.connection.execute(text("INSERT INTO orders VALUES (:id)"), {"id": number})
        return number

    with DualWriter("orders", kafka=SETTINGS, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        told = [write(writer)]
        for line in itertools.count(1):
            interruption = Interruption(line, inside=inside)
            with suppress(KeyboardInterrupt), interruption.armed():
                told.append(write(writer))
            if interruption.at is None:
                break
            told.append(write(writer))
    recover("orders", kafka=SETTINGS, database=engine)
    assert [str(number) for number in orders(postgres)] == kafka.visible()
    assert set(told) <= set(orders(postgres))
    assert postgres.store(engine).incidents("orders") == []
