"""PostgreSQL set-ups that are refused, and the messages: rights, logins, standbys, read-only sessions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness.databases import Database, prepare
from sqlalchemy import Connection, create_engine

from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import EmbeddedPostgres

pytestmark = pytest.mark.postgresql


@pytest.fixture
def store(postgres: Database) -> SqlStateStore:
    return postgres.store()


@pytest.fixture
def connection(store: SqlStateStore) -> Iterator[Connection]:
    with store.engine.connect() as made:
        yield made


def test_a_read_only_session_is_refused(postgres: Database) -> None:
    store = postgres.store(postgres.engine(connect_args={"options": "-c default_transaction_read_only=on"}))
    with pytest.raises(ConfigurationError, match="read-only"):
        postgres.claim(store, "orders")
    with store.engine.connect() as connection:
        store.begin(connection)
        with pytest.raises(ConfigurationError, match="read-only"):
            store.read_incarnation(connection, "orders")


def test_a_session_that_shows_times_in_another_style_than_iso_is_refused(postgres: Database) -> None:
    """psycopg reads them in no other, and would say so with an error of its own."""
    store = postgres.store(postgres.engine(connect_args={"options": "-c datestyle=german"}))
    for call in (lambda: postgres.claim(store, "orders"), lambda: store.read(["orders"])):
        with pytest.raises(ConfigurationError, match="DateStyle is 'German, DMY'"):
            call()


def test_a_given_connection_may_show_times_in_any_style(postgres: Database, store: SqlStateStore) -> None:
    """A block reads none on it."""
    with postgres.engine(connect_args={"options": "-c datestyle=german"}).connect() as given:
        store.check_same_database(given)


def test_a_connection_set_to_read_only_is_refused(store: SqlStateStore, connection: Connection) -> None:
    connection.execution_options(postgresql_readonly=True)
    with pytest.raises(ConfigurationError, match="read-only"):
        store.begin(connection)


def test_a_standby_is_refused(tmp_path: Any) -> None:
    with EmbeddedPostgres({"primary_conninfo": ""}) as server:
        database = prepare("postgresql", server.create_database())
        store = database.store()
        row = database.claim(store, "orders")
        server.stop()
        (server._process.directory / "data" / "standby.signal").touch()
        server.start()
        for call in [lambda: database.claim(store, "orders"), lambda: store.read(["orders"]), store.incidents]:
            with pytest.raises(ConfigurationError, match="standby"):
                call()
        with store.engine.connect() as connection:
            store.begin(connection)
            with pytest.raises(ConfigurationError, match="read-only"):
                store.read_incarnation(connection, "orders")
        database.dispose()
    assert row.incarnation == 1


def test_a_server_that_does_not_force_its_log_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedPostgres({"fsync": "off"}) as server, caplog.at_level(logging.WARNING):
        database = prepare("postgresql", server.create_database())
        store = database.store()
        for _ in range(3):
            database.claim(store, "orders")
        database.dispose()
    assert [record.message for record in caplog.records if "fsync" in record.message].__len__() == 1


def test_missing_rights_are_granted_by_what_the_error_says(postgres: Database) -> None:
    role = postgres.query("SELECT 'app_' || current_database()")[0][0]
    postgres.execute(f"CREATE ROLE {role} LOGIN")
    try:
        store = postgres.store(postgres.engine(connect_args={"options": f"-c role={role}"}))
        with pytest.raises(ConfigurationError, match="GRANT") as caught:
            postgres.claim(store, "orders")
        assert caught.value.next_step is not None
        statements = caught.value.next_step.partition(": ")[2].replace('"postgres"', f'"{role}"')
        for statement in statements.split("; "):
            postgres.execute(statement)
        row = postgres.claim(store, "orders")
        store.mark_settled({"orders": 1})
        assert store.incidents() == []
        assert row.incarnation == 1
    finally:
        postgres.execute(f"DROP OWNED BY {role}")
        postgres.execute(f"DROP ROLE {role}")


def test_nobody_listening_is_unavailable(postgres: Database) -> None:
    engine = postgres.engine()
    store = postgres.store(postgres.engine(connect_args={"port": 1}))
    with pytest.raises(Unavailable, match="refused") as caught:
        postgres.claim(store, "orders")
    assert engine.url.password
    assert engine.url.password not in str(caught.value)


def test_a_wrong_login_is_a_configuration_error(postgres: Database) -> None:
    store = postgres.store(postgres.engine(connect_args={"dbname": "nowhere"}))
    with pytest.raises(ConfigurationError, match="address, user and password"):
        postgres.claim(store, "orders")


def test_an_exhausted_pool_is_unavailable(postgres: Database) -> None:
    store = postgres.store(postgres.engine(pool_size=1, max_overflow=0, pool_timeout=0.01))
    with store.engine.connect(), pytest.raises(Unavailable):
        postgres.claim(store, "orders")


def test_a_driver_that_is_not_supported_is_refused(postgres: Database) -> None:
    driver = SimpleNamespace(paramstyle="format", __version__="1.31.2")  # as if it were installed
    engine = create_engine("postgresql+pg8000://", module=driver)
    with pytest.raises(ConfigurationError, match="psycopg"):
        SqlStateStore(engine)
