"""The sessions of Spark's sink with MariaDB: set up by one statement, and theirs alone."""

from __future__ import annotations

from collections.abc import Iterator

import pymysql
import pytest
from harness.databases import Database, prepared
from sqlalchemy import Connection, Engine, exc, make_url, text

from dualwrite.errors import IllegalStateError
from dualwrite.protocol.values import Decision
from dualwrite.sinks.spark.databases.mariadb import MariaDB
from dualwrite.sinks.spark.databases.mariadb_sessions import SQL_MODE, execute_ddl, own_engine
from dualwrite.stores.sql.dialect import DECIDES_NOTHING
from dualwrite.stores.sql.mariadb import is_mariadb
from dualwrite.stores.sql.store import SqlStateStore

pytestmark = pytest.mark.mariadb

LIMITS = "@@innodb_lock_wait_timeout, @@idle_transaction_timeout, @@idle_write_transaction_timeout"


@pytest.fixture
def given() -> str:
    """What the user's URL sets in each session."""
    return (
        "SET sql_mode='ANSI_QUOTES', innodb_lock_wait_timeout=7, idle_write_transaction_timeout=3, time_zone='+05:00'"
    )


@pytest.fixture
def engine(mariadb: Database, given: str) -> Iterator[Engine]:
    made = own_engine(make_url(mariadb.url).update_query_dict({"init_command": given}))
    yield made
    made.dispose()


def asked(connection: Connection, what: str) -> tuple[object, ...]:
    """Below SQLAlchemy, which would begin a transaction of its own."""
    with connection.connection.cursor() as cursor:
        cursor.execute(f"SELECT {what}")
        return tuple(cursor.fetchone())


def test_it_is_set_up_whatever_the_url_sets(engine: Engine, mariadb: Database) -> None:
    with engine.connect() as connection:
        found = asked(connection, "@@autocommit, @@tx_isolation, @@time_zone, @@character_set_client")
        assert found == (0, "READ-COMMITTED", "+00:00", "utf8mb4")
        [modes] = asked(connection, "@@sql_mode")
        assert set(str(modes).split(",")) == set(SQL_MODE.split(","))
        assert is_mariadb(connection)
        [version] = asked(connection, "version()")
        assert str(version).startswith(".".join(map(str, connection.dialect.server_version_info or ("none",))))
    assert engine.url.drivername == make_url(mariadb.url).drivername
    assert engine.dialect.default_schema_name == engine.url.database


def test_a_server_behind_a_proxy_is_asked_for_its_version(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pymysql.connections.Connection, "get_server_info", lambda _: "8.0.11")
    with engine.connect() as connection:
        assert is_mariadb(connection)


def test_limits_are_those_that_each_transaction_needs(engine: Engine, mariadb: Database) -> None:
    store = SqlStateStore(engine)
    row = mariadb.claim(store, "orders")
    with engine.connect() as connection:
        assert asked(connection, LIMITS) == (75, 60, 3), "a claim waits longer than a paused owner's session lives"
        for _ in range(2):
            store.begin(connection)
            assert asked(connection, LIMITS) == (7, 60, 3), "the user's own limits hold for the rows"
            decision = Decision("orders", row.incarnation, prepared(row.incarnation), idle_s=5)
            assert store.decide(connection, decision)[0]
            assert asked(connection, LIMITS) == (7, 5, 3)
            store.rollback(connection)
        assert asked(connection, LIMITS) == (7, 5, 3), "nothing is restored: the next transaction sets what it needs"
    store.claim(["orders"], owner="another", cluster_id=None)
    with engine.connect() as connection:
        assert asked(connection, LIMITS) == (75, 5, 3)


def test_what_is_left_open_is_rolled_back_as_ever(engine: Engine, mariadb: Database) -> None:
    with engine.connect() as connection:
        connection.execute(text("INSERT INTO orders (id) VALUES (1)"))
    with engine.connect() as connection:
        execute_ddl(connection, "CREATE TABLE made (id INT)")
        connection.execute(text("INSERT INTO orders (id) VALUES (2)"))
    with engine.connect() as connection:
        execute_ddl(connection, "DROP TABLE made")
    assert mariadb.query("SELECT id FROM orders") == []


def test_what_is_handed_over_undecided_has_no_savepoint_and_cannot_decide(engine: Engine, mariadb: Database) -> None:
    store = SqlStateStore(engine)
    row = mariadb.claim(store, "orders")
    with engine.connect().execution_options(**DECIDES_NOTHING) as connection:
        store.begin(connection)
        connection.execute(text("INSERT INTO orders (id) VALUES (1)"))
        with pytest.raises(IllegalStateError, match="handed over undecided"):
            store.decide(connection, Decision("orders", row.incarnation, prepared(row.incarnation)))
        with pytest.raises(exc.OperationalError, match="SAVEPOINT dualwrite_transaction does not exist"):
            connection.exec_driver_sql("RELEASE SAVEPOINT dualwrite_transaction")
        store.commit(connection)
    assert mariadb.query("SELECT id FROM orders") == [(1,)]
    assert not store.read(["orders"])[0].prepared.has_transaction


def test_a_url_that_names_mariadb_is_served_as_well(mariadb: Database) -> None:
    engine = own_engine(make_url(mariadb.url).set(drivername="mariadb+pymysql"))
    row = mariadb.claim(SqlStateStore(engine), "orders")
    assert (engine.dialect.name, row.incarnation) == ("mariadb", 1)
    engine.dispose()


def test_all_json_columns_are_found_whatever_limit_the_session_has_for_joined_texts(mariadb: Database) -> None:
    url = make_url(mariadb.url).update_query_dict({"init_command": "SET group_concat_max_len = 64"})
    engine = MariaDB(url).engine
    with engine.connect() as connection:
        execute_ddl(connection, f"CREATE TABLE many ({', '.join(f'c{number} JSON' for number in range(9))})")
        table = MariaDB(url).read_table(connection, "many")
    engine.dispose()
    assert {column.type_name for column in table.columns.values()} == {"json"}
