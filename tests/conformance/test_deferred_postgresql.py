"""Checks deferred to COMMIT on PostgreSQL: they run before the decision, in one exchange with it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from harness.databases import Database, prepared, wait_until_blocked
from psycopg import ClientCursor
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from dualwrite.errors import TransactionAborted, Unavailable
from dualwrite.protocol.values import Decision
from dualwrite.stores.sql.adopted import usable
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import EmbeddedPostgres, PostgresProxy

pytestmark = pytest.mark.postgresql
IMMEDIATE = "SET CONSTRAINTS ALL IMMEDIATE"


@pytest.fixture
def store(postgres: Database) -> SqlStateStore:
    made = postgres.store()
    postgres.claim(made, "orders")
    return made


@pytest.fixture
def connection(store: SqlStateStore) -> Iterator[Connection]:
    with store.engine.connect() as made:
        yield made


def begin(store: SqlStateStore, connection: Connection) -> None:
    store.begin(connection)
    assert store.read_incarnation(connection, "orders") == 1


def order_of_nobody(connection: Connection) -> None:
    """Violates a deferred foreign key."""
    connection.execute(text("INSERT INTO orders VALUES (1, 99)"))


def in_tasks(postgres: Database, work: Callable[[Connection], None]) -> None:
    async def main() -> None:
        engine = create_async_engine(postgres.url)
        async with engine.connect() as connection:
            await connection.run_sync(work)
        await engine.dispose()

    asyncio.run(main())


@pytest.mark.parametrize("last", ["decide", "hold"])
def test_it_goes_out_with_the_last_statement_as_one_request(
    postgres: Database, store: SqlStateStore, dualwrite_postgres: EmbeddedPostgres, last: str
) -> None:
    with PostgresProxy(dualwrite_postgres) as proxy:
        engine = create_engine(proxy.url(postgres.url))
        with engine.connect() as connection:
            for number in range(8):  # from the sixth on, psycopg has prepared the UPDATE
                begin(store, connection)
                connection.execute(text("INSERT INTO orders VALUES (:n)"), {"n": number})
                before = len(proxy.requests)
                arguments = [prepared(1, number)] if last == "decide" else []
                assert getattr(store, last)(connection, Decision("orders", 1, *arguments, deferred=True))[0]
                (statements,) = [request.statements for request in proxy.requests[before:]]
                assert statements[0] == IMMEDIATE
                assert len(statements) == 2
                store.commit(connection)
        engine.dispose()
    if last == "decide":
        assert store.read(["orders"])[0].prepared == prepared(1, 7)


def test_a_violated_constraint_aborts_and_nothing_is_decided(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    begin(store, connection)
    order_of_nobody(connection)
    with pytest.raises(TransactionAborted, match="deferred to COMMIT failed.*foreign key") as caught:
        store.decide(connection, Decision("orders", 1, prepared(1), deferred=True))
    assert not caught.value.retryable
    store.rollback(connection)
    begin(store, connection)  # the same connection goes on
    assert store.decide(connection, Decision("orders", 1, prepared(1, 5), deferred=True))[0]
    store.commit(connection)
    assert store.read(["orders"])[0].prepared == prepared(1, 5)
    assert not postgres.query("SELECT * FROM orders")


def test_the_same_on_an_asynchronous_connection(postgres: Database, store: SqlStateStore) -> None:
    def work(connection: Connection) -> None:
        begin(store, connection)
        order_of_nobody(connection)
        with pytest.raises(TransactionAborted, match="deferred to COMMIT failed.*foreign key"):
            store.decide(connection, Decision("orders", 1, prepared(1), deferred=True))
        store.rollback(connection)
        begin(store, connection)
        assert store.decide(connection, Decision("orders", 1, prepared(1, 5), deferred=True))[0]
        store.commit(connection)

    in_tasks(postgres, work)
    assert store.read(["orders"])[0].prepared == prepared(1, 5)


def test_a_row_of_another_owner_is_not_decided(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    begin(store, connection)
    postgres.claim(store, "orders")
    assert store.decide(connection, Decision("orders", 1, prepared(1), deferred=True)) == (False, None)
    store.rollback(connection)


def test_an_error_of_the_record_itself_is_not_taken_for_a_constraint(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    begin(store, connection)
    connection.execute(text("SET LOCAL lock_timeout = '100ms'"))
    with postgres.engine().begin() as other:
        other.execute(text("SELECT FROM kafka_transaction_state FOR UPDATE"))
        with pytest.raises((TransactionAborted, Unavailable)) as caught:
            store.decide(connection, Decision("orders", 1, prepared(1), deferred=True))
    assert "deferred" not in str(caught.value)
    store.rollback(connection)


def test_a_statement_that_failed_before_is_named_as_the_cause(store: SqlStateStore, connection: Connection) -> None:
    begin(store, connection)
    with pytest.raises(Exception, match="division by zero"):
        connection.execute(text("SELECT 1 / 0"))
    with pytest.raises(TransactionAborted) as caught:
        store.decide(connection, Decision("orders", 1, prepared(1), deferred=True))
    assert "deferred" not in str(caught.value)
    store.rollback(connection)


def test_with_cursors_of_the_applications_own_it_goes_out_before(postgres: Database) -> None:
    """Such as those that bind values on the client's side."""
    store = postgres.store(postgres.engine(connect_args={"cursor_factory": ClientCursor}))
    postgres.claim(store, "orders")
    with store.engine.connect() as connection:
        begin(store, connection)
        order_of_nobody(connection)
        with pytest.raises(TransactionAborted, match="deferred to COMMIT failed.*foreign key"):
            store.decide(connection, Decision("orders", 1, prepared(1), deferred=True))
        store.rollback(connection)


@pytest.mark.parametrize("last", ["decide", "hold"])
def test_over_a_connection_of_psycopgs_it_goes_out_too(
    postgres: Database, store: SqlStateStore, dualwrite_postgres: EmbeddedPostgres, last: str
) -> None:
    with (
        closing(psycopg.connect(dualwrite_postgres.dsn_of(make_url(postgres.url).database))) as own,
        usable(own, store.engine) as connection,
    ):
        begin(store, connection)
        order_of_nobody(connection)
        arguments = [prepared(1)] if last == "decide" else []
        with pytest.raises(TransactionAborted, match="deferred to COMMIT failed.*foreign key"):
            getattr(store, last)(connection, Decision("orders", 1, *arguments, deferred=True))
        store.rollback(connection)


def test_an_interruption_in_it_is_passed_on_and_the_connection_goes_on(
    postgres: Database, store: SqlStateStore, connection: Connection
) -> None:
    begin(store, connection)
    with postgres.engine().connect() as other:
        other.execute(text("SELECT FROM kafka_transaction_state FOR UPDATE"))
        main = threading.main_thread().ident
        assert main is not None

        def interrupt() -> None:
            wait_until_blocked(postgres)
            signal.pthread_kill(main, signal.SIGINT)

        thread: Any = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            store.decide(connection, Decision("orders", 1, prepared(1), deferred=True))
        thread.join()
        store.rollback(connection)
    begin(store, connection)
    assert store.decide(connection, Decision("orders", 1, prepared(1, 5), deferred=True))[0]
    store.commit(connection)
