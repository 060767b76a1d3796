"""The proxy in front of the embedded PostgreSQL: what happens to a COMMIT, seen by a second connection."""

from __future__ import annotations

import select
from contextlib import closing
from threading import Thread

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from dualwrite.errors import IllegalStateError
from dualwrite.testing import PostgresProxy


@pytest.fixture
def proxy(dualwrite_postgres):
    with PostgresProxy(dualwrite_postgres) as proxy:
        yield proxy


@pytest.fixture
def observer(dualwrite_postgres, dualwrite_database):
    dsn = dualwrite_postgres.dsn_of(make_url(dualwrite_database).database)
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        connection.execute("CREATE TABLE t (n int)")
        connection.execute("INSERT INTO t VALUES (0)")
        yield connection


@pytest.fixture
def client(proxy, dualwrite_database, observer):
    url = proxy.url(dualwrite_database).replace("+psycopg", "")
    with closing(psycopg.connect(url)) as connection:
        yield connection


def value(observer):
    return observer.execute("SELECT n FROM t").fetchone()[0]


def test_a_commit_that_is_reset_before_the_server_sees_it_changes_nothing(proxy, client, observer):
    reset = proxy.on("COMMIT").reset_request()
    client.execute("UPDATE t SET n = 1")
    with pytest.raises(psycopg.OperationalError):
        client.commit()
    assert reset.wait().statements == ("COMMIT",)
    # Waits for the lock of the back end, which has heard that its client is gone.
    observer.execute("SELECT n FROM t FOR UPDATE")
    assert value(observer) == 0


def test_a_commit_whose_answer_is_reset_is_durable_and_looks_like_a_failure(proxy, client, observer):
    proxy.on("commit").reset_answer()
    client.execute("UPDATE t SET n = 1")
    with pytest.raises(psycopg.OperationalError):
        client.commit()
    assert value(observer) == 1


def test_a_commit_can_arrive_after_its_client_has_given_up(proxy, client, observer):
    held = proxy.on("COMMIT").hold_request()
    client.execute("UPDATE t SET n = 1")
    errors = []

    def commit():
        try:
            client.commit()
        except psycopg.OperationalError as error:
            errors.append(error)

    committing = Thread(target=commit)
    committing.start()
    held.wait()
    held.cut()
    committing.join()
    assert len(errors) == 1
    with pytest.raises(psycopg.errors.LockNotAvailable):
        observer.execute("SELECT n FROM t FOR UPDATE NOWAIT")
    held.release()
    held.wait_answered()
    assert value(observer) == 1


def test_a_held_answer_is_durable_and_not_heard_of(proxy, client, observer):
    held = proxy.on("COMMIT").hold_answer()
    client.execute("UPDATE t SET n = 1")
    committing = Thread(target=client.commit)
    committing.start()
    held.wait_answered()
    assert value(observer) == 1
    assert committing.is_alive()
    held.release()
    committing.join()


def test_the_nth_commit_is_taken_and_the_others_are_not(proxy, client, observer):
    second = proxy.on("COMMIT", nth=2).reset_request()
    client.execute("UPDATE t SET n = 1")
    client.commit()
    client.execute("UPDATE t SET n = 2")
    with pytest.raises(psycopg.OperationalError):
        client.commit()
    assert len(second.taken) == 1
    assert value(observer) == 1


def update_in_a_pipeline(client):
    with client.pipeline():
        client.execute("UPDATE t SET n = %s", [1])
        client.commit()


def test_a_commit_in_a_pipeline_is_recognised(proxy, client, observer):
    rule = proxy.on("COMMIT").reset_answer()
    with pytest.raises(psycopg.OperationalError):
        update_in_a_pipeline(client)
    assert "COMMIT" in rule.wait().statements
    assert value(observer) == 1


def test_a_prepared_statement_is_recognised_each_time(proxy, client):
    updates = proxy.on("UPDATE t SET n", nth=None).watch()
    for number in range(4):
        client.execute("UPDATE t SET n = %s", [number], prepare=True)
    assert len(updates.taken) == 4
    updates.wait_answered(4)


def answer(raw):
    result = True
    while result is not None:
        while raw.is_busy():  # get_result would wait with the GIL held, and so stop the proxy
            select.select([raw.socket], [], [])
            raw.consume_input()
        result = raw.get_result()


@pytest.mark.parametrize("extended", [False, True], ids=["simple query", "extended query"])
def test_copy_in_both_directions_goes_through_and_the_commit_after_it_is_found(proxy, client, observer, extended):
    rule = proxy.on("COMMIT").reset_answer()
    client.execute("SELECT 1")
    if extended:  # psycopg itself never copies so, other drivers do
        raw = client.pgconn
        assert raw.exec_params(b"COPY t FROM STDIN", None).status == psycopg.pq.ExecStatus.COPY_IN
        for number in range(1, 7):
            raw.put_copy_data(b"%d\n" % number)
        raw.put_copy_end()
        assert raw.flush() == 0
        answer(raw)
    else:
        with client.cursor().copy("COPY t FROM STDIN") as copy:
            for number in range(1, 7):
                copy.write_row([number])
    with client.cursor().copy("COPY (SELECT n FROM t) TO STDOUT") as copy:
        assert len(list(copy.rows())) == 7
    with pytest.raises(psycopg.OperationalError):
        client.commit()
    rule.wait_answered()
    assert observer.execute("SELECT count(*) FROM t").fetchone()[0] == 7


def test_the_proxy_serves_sqlalchemy(proxy, dualwrite_database, observer):
    commits = proxy.on("COMMIT", nth=None).watch()
    engine = create_engine(proxy.url(dualwrite_database))
    with engine.begin() as connection:
        connection.execute(text("UPDATE t SET n = 3"))
    engine.dispose()
    commits.wait_answered()
    assert value(observer) == 3


def test_a_duplicate_is_refused_when_the_block_ends(dualwrite_postgres):
    with pytest.raises(IllegalStateError, match="no duplicates"):
        duplicate_a_commit(dualwrite_postgres)


def duplicate_a_commit(server):
    with PostgresProxy(server) as proxy:
        proxy.on("COMMIT").duplicate()
        with closing(psycopg.connect(proxy.url(server.url).replace("+psycopg", ""))) as connection:
            connection.execute("SELECT 1")
            with pytest.raises(psycopg.OperationalError):
                connection.commit()
