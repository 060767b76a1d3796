"""The embedded PostgreSQL server: real, killable, and gone when it should be."""

from __future__ import annotations

import os
from contextlib import closing

import psycopg
import pytest
from sqlalchemy import create_engine, text

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.testing import EmbeddedPostgres
from dualwrite.testing.servers.embedded import accepts_connections

pytestmark = pytest.mark.postgresql


@pytest.fixture(scope="module")
def server():
    with EmbeddedPostgres(settings={"max_prepared_transactions": "7"}) as postgres:
        yield postgres


@pytest.fixture
def dsn(server):
    name = f"db_{os.urandom(4).hex()}"
    server.create_database(name)
    yield server.dsn_of(name)
    server.drop_database(name)


def execute(dsn, statement):
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else None


END = {
    "kill": lambda server: server.kill(),
    "fast": lambda server: server.stop("fast"),
    "immediate": lambda server: server.stop("immediate"),
}


@pytest.mark.parametrize("end", END)
def test_a_server_that_ended_comes_back_on_its_port_with_what_was_committed_and_nothing_more(server, dsn, end):
    execute(dsn, "CREATE TABLE t (n int)")
    execute(dsn, "INSERT INTO t VALUES (1)")
    url, port = server.url, server.port
    with closing(psycopg.connect(dsn)) as connection:
        connection.execute("INSERT INTO t VALUES (2)")
        END[end](server)
        assert not server.running
        assert not accepts_connections(port)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    server.start()
    assert server.url == url
    assert execute(dsn, "SELECT n FROM t") == [(1,)]


def test_a_kill_leaves_no_back_end_behind(server, dsn):
    with closing(psycopg.connect(dsn)) as connection:
        back_end = connection.info.backend_pid
        os.kill(back_end, 0)
        server.kill()
        with pytest.raises(ProcessLookupError):
            os.kill(back_end, 0)
    server.start()


def test_it_is_as_durable_as_out_of_the_box(server):
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        assert execute(server.dsn, f"SHOW {setting}") == [("on",)]


def test_settings_are_the_servers(server):
    assert execute(server.dsn, "SHOW max_prepared_transactions") == [("7",)]


def test_a_server_that_refuses_its_settings_is_an_error_with_its_own_words():
    with pytest.raises(ConfigurationError, match="no_such_setting"):
        EmbeddedPostgres(settings={"no_such_setting": "1"}).start()


def test_the_url_works_for_sqlalchemy_and_a_new_database_is_empty(server):
    engine = create_engine(server.create_database("new"))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT current_database()")).scalar_one() == "new"
        assert connection.execute(text("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")).scalar_one() == 0
    # Dropped although the pool keeps a session in it.
    server.drop_database("new")
    engine.dispose()
    assert execute(server.dsn, "SELECT 1 FROM pg_database WHERE datname = 'new'") == []


def test_the_jdbc_url_names_the_same_place(server):
    assert server.jdbc_url_of("new").startswith(
        f"jdbc:postgresql://127.0.0.1:{server.port}/new?user=postgres&password="
    )
    assert server.jdbc_url.split("?")[0] == f"jdbc:postgresql://127.0.0.1:{server.port}/postgres"


def test_without_the_password_nobody_gets_in(server):
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(host="127.0.0.1", port=server.port, user="postgres", password="guess", dbname="postgres")


def test_the_password_is_not_in_the_repr(server):
    assert server._password not in repr(server)


def test_nothing_is_left_when_the_server_is_closed():
    with EmbeddedPostgres() as postgres:
        process, port = postgres._process, postgres.port
        assert process.directory.is_dir()
        # In shared memory a server that is killed leaves its segments until the machine is started again.
        shared, *_ = process.directory.glob("data/pg_dynshmem/mmap.*")
        postgres.kill()
        assert shared.exists()
    assert not process.directory.exists()
    assert not accepts_connections(port)
    with pytest.raises(IllegalStateError, match="closed"):
        _ = postgres.url


def test_a_server_of_the_environment_is_used_and_never_touched(server, monkeypatch):
    monkeypatch.setenv("DUALWRITE_TEST_POSTGRES", server.url)
    with EmbeddedPostgres() as postgres:
        assert server._password not in repr(postgres)
        assert postgres.dsn == server.dsn
        assert postgres.jdbc_url == server.jdbc_url
        assert postgres.create_database("environment") == server.url_of("environment")
        for deed in (postgres.kill, postgres.stop, postgres.restart, postgres.log_tail):
            with pytest.raises(IllegalStateError, match="DUALWRITE_TEST_POSTGRES"):
                deed()
        postgres.drop_database("environment")
    assert server.running
