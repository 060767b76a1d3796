"""Behaviour of SQLite alone: the driver's ways of transaction control, files and locks."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.databases import Database, prepared, sqlite_url
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.pool import StaticPool

import dualwrite.migrations
from dualwrite.errors import ConfigurationError, IllegalStateError, TransactionAborted, TransactionInDoubt, Unavailable
from dualwrite.protocol.process import DatabaseVerdict
from dualwrite.protocol.values import Decision
from dualwrite.stores.sql.store import SqlStateStore

manual = pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has autocommit= from Python 3.12 on")


def recipe(database: Database) -> Engine:
    """SQLAlchemy's recipe for transactions that begin with a BEGIN."""
    engine = database.engine()
    event.listen(engine, "connect", lambda driver, _: setattr(driver, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


ENGINES = {
    "legacy": lambda database: database.engine(),
    "recipe": recipe,
    "manual": lambda database: database.engine(connect_args={"autocommit": False}),
}


@pytest.fixture(params=["legacy", "recipe", pytest.param("manual", marks=manual)])
def store(request: pytest.FixtureRequest, sqlite: Database) -> SqlStateStore:
    return sqlite.store(ENGINES[request.param](sqlite))


@pytest.fixture
def connection(store: SqlStateStore) -> Iterator[Connection]:
    with store.engine.connect() as made:
        yield made


def pragma(connection: Connection, name: str) -> Any:
    driver: Any = connection.connection.dbapi_connection
    return driver.execute(f"PRAGMA {name}").fetchone()[0]


def test_every_way_of_transaction_control_decides(
    sqlite: Database, store: SqlStateStore, connection: Connection
) -> None:
    for number in range(1, 4):
        assert sqlite.claim(store, "orders").incarnation == number
        store.begin(connection)
        assert store.read_incarnation(connection, "orders") == number
        connection.execute(text("INSERT INTO orders VALUES (:id, NULL)"), {"id": number})
        assert store.decide(connection, Decision("orders", number, prepared(number))) == (True, None)
        (store.rollback if number == 2 else store.commit)(connection)
    assert store.read(["orders"])[0].prepared == prepared(3)
    assert [row[0] for row in sqlite.query("SELECT id FROM orders")] == [1, 3]


def test_the_write_lock_is_taken_at_begin(sqlite: Database, store: SqlStateStore, connection: Connection) -> None:
    sqlite.claim(store, "orders")
    hasty = sqlite.store(sqlite.engine(connect_args={"timeout": 0.01}))
    store.begin(connection)
    with pytest.raises(Unavailable, match="locked"):
        sqlite.claim(hasty, "orders")
    with hasty.engine.connect() as other:
        with pytest.raises(Unavailable, match="locked"):
            hasty.begin(other)
        assert not other.in_transaction()
        store.rollback(connection)
        hasty.begin(other)


def test_a_transaction_ended_inside_is_noticed(sqlite: Database, store: SqlStateStore, connection: Connection) -> None:
    sqlite.claim(store, "orders")
    driver: Any = connection.connection.dbapi_connection
    ends = [driver.commit, driver.rollback]
    if getattr(driver, "autocommit", None) is not False:
        ends.append(lambda: driver.executescript("SELECT 1"))  # commits first, in the legacy way
    for end in ends:
        store.begin(connection)
        if end is driver.commit:
            connection.execute(text("INSERT INTO orders VALUES (1, NULL)"))
        end()
        connection.execute(text("DELETE FROM orders"))
        with pytest.raises(IllegalStateError, match="ended inside"):
            store.decide(connection, Decision("orders", 1, prepared(1)))
        store.rollback(connection)


def test_a_reader_in_the_way_of_commit_is_a_definite_abort(sqlite: Database) -> None:
    store = sqlite.store(sqlite.engine(connect_args={"timeout": 0.01}))
    row = sqlite.claim(store, "orders")
    reader = sqlite3.connect(Path(store.engine.url.database or ""))
    with store.engine.connect() as connection:
        store.begin(connection)
        connection.execute(text("INSERT INTO orders VALUES (1, NULL)"))
        store.decide(connection, Decision("orders", 1, prepared(1)))
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM orders").fetchall()
        with pytest.raises(TransactionAborted, match="locked") as caught:
            store.commit(connection)
        assert caught.value.retryable
        reader.close()
        assert store.read(["orders"]) == [row]
        assert not sqlite.query("SELECT * FROM orders")
        store.begin(connection)
        store.decide(connection, Decision("orders", 1, prepared(1)))
        store.commit(connection)


def test_a_full_disk_is_a_clear_error(sqlite: Database) -> None:
    store = sqlite.store()
    row = sqlite.claim(store, "orders")
    with store.engine.connect() as connection:
        store.begin(connection)
        connection.exec_driver_sql("PRAGMA max_page_count = 1")
        wide = prepared(1)
        long = type(wide)(42, 0, 1, tuple(type(wide.first_offsets[0])("t", n, n) for n in range(20_000)))
        with pytest.raises(Unavailable, match="full"):
            store.decide(connection, Decision("orders", 1, long))
        store.rollback(connection)
        connection.invalidate()
    assert store.read(["orders"]) == [row]


def test_an_error_of_commit_that_says_nothing_is_in_doubt(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    store = sqlite.store()
    sqlite.claim(store, "orders")
    with store.engine.connect() as connection:
        store.begin(connection)
        store.decide(connection, Decision("orders", 1, prepared(1)))

        def fail(driver: Any) -> None:
            driver.commit()
            raise sqlite3.OperationalError("disk I/O error")

        with monkeypatch.context() as patched:
            patched.setattr(connection.dialect, "do_commit", fail)
            before = connection.connection.dbapi_connection
            with pytest.raises(TransactionInDoubt):
                store.commit(connection)
        assert connection.connection.dbapi_connection is not before
    assert store.read(["orders"])[0].prepared == prepared(1)


@pytest.mark.parametrize(("value", "expected"), [("OFF", 2), ("NORMAL", 2), ("FULL", 2), ("EXTRA", 3)])
def test_commits_are_forced_to_the_disk(sqlite: Database, value: str, expected: int) -> None:
    engine = sqlite.engine()
    event.listen(engine, "connect", lambda driver, _: driver.execute(f"PRAGMA synchronous = {value}"))
    store = sqlite.store(engine)
    with engine.connect() as connection:
        store.begin(connection)
        assert pragma(connection, "synchronous") == expected


@manual
def test_commits_that_cannot_be_forced_to_the_disk_are_refused(sqlite: Database) -> None:
    engine = sqlite.engine(connect_args={"autocommit": False})

    def careless(driver: Any, _: object) -> None:
        driver.rollback()
        driver.autocommit = True
        driver.execute("PRAGMA synchronous = OFF")
        driver.autocommit = False

    event.listen(engine, "connect", careless)
    store = sqlite.store(engine)
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="synchronous"):
        store.begin(connection)


@manual
def test_the_drivers_autocommit_is_refused(sqlite: Database) -> None:
    store = sqlite.store(sqlite.engine(connect_args={"autocommit": True}))
    with store.engine.connect() as connection, pytest.raises(ConfigurationError, match="autocommit"):
        store.begin(connection)


def test_wal_is_fine(sqlite: Database) -> None:
    sqlite.query("PRAGMA journal_mode = WAL")
    store = sqlite.store()
    sqlite.claim(store, "orders")
    with store.engine.connect() as connection:
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        assert store.decide(connection, Decision("orders", 1, prepared(1)))[0]
        assert not store.read(["orders"])[0].prepared.has_transaction
        store.commit(connection)
    assert store.read(["orders"])[0].prepared == prepared(1)


@pytest.mark.parametrize("mode", ["OFF", "MEMORY"])
def test_a_journal_that_does_not_survive_is_refused(sqlite: Database, mode: str) -> None:
    engine = sqlite.engine()
    event.listen(engine, "connect", lambda driver, _: driver.execute(f"PRAGMA journal_mode = {mode}"))
    with pytest.raises(ConfigurationError, match="journal_mode"):
        sqlite.claim(sqlite.store(engine), "orders")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///file:x?mode=memory&uri=true"])
def test_a_database_in_memory_is_refused(url: str) -> None:
    engine = create_engine(url, poolclass=StaticPool)
    with engine.connect() as connection:
        dualwrite.migrations.upgrade(connection)
    with pytest.raises(ConfigurationError, match="memory"):
        SqlStateStore(engine).claim(["orders"], owner="me", cluster_id="c")
    engine.dispose()


def attached(database: Database, tmp_path: Path) -> Engine:
    engine = database.engine()
    event.listen(engine, "connect", lambda driver, _: driver.execute(f"ATTACH '{tmp_path / 'side.db'}' AS side"))
    return engine


def test_tables_in_an_attached_file_work(sqlite: Database, tmp_path: Path) -> None:
    engine = attached(sqlite, tmp_path)
    with engine.connect() as connection:
        dualwrite.migrations.upgrade(connection, schema="side")
    store = SqlStateStore(engine, schema="side")
    sqlite.claim(store, "orders")
    with engine.connect() as connection:
        store.begin(connection)
        connection.execute(text("INSERT INTO orders VALUES (1, NULL)"))
        store.decide(connection, Decision("orders", 1, prepared(1)))
        store.commit(connection)
    assert store.read(["orders"])[0].prepared == prepared(1)


def test_files_that_would_be_committed_one_by_one_are_refused(sqlite: Database, tmp_path: Path) -> None:
    sqlite.query("PRAGMA journal_mode = WAL")
    with pytest.raises(ConfigurationError, match="one by one"):
        sqlite.claim(sqlite.store(attached(sqlite, tmp_path)), "orders")


def test_a_schema_that_is_not_attached_is_refused(sqlite: Database) -> None:
    with pytest.raises(ConfigurationError, match="not attached"):
        sqlite.claim(SqlStateStore(sqlite.engine(), schema="side"), "orders")


def test_a_read_only_file_is_refused(sqlite: Database, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///file:{tmp_path / 'test.db'}?mode=ro&uri=true")
    with pytest.raises(ConfigurationError, match="written to"):
        sqlite.claim(SqlStateStore(engine), "orders")
    engine.dispose()


def test_a_connection_set_to_query_only_is_refused(sqlite: Database) -> None:
    engine = sqlite.engine()
    event.listen(engine, "connect", lambda driver, _: driver.execute("PRAGMA query_only = ON"))
    store = sqlite.store(engine)
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="read-only"):
        store.begin(connection)


def test_a_file_that_cannot_be_opened_is_a_configuration_error(tmp_path: Path) -> None:
    engine = create_engine(sqlite_url(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match="unable to open"):
        SqlStateStore(engine).claim(["orders"], owner="me", cluster_id="c")


def test_a_transaction_has_no_verdict(sqlite: Database) -> None:
    assert sqlite.store().transaction_verdict("12") is DatabaseVerdict.UNKNOWN
