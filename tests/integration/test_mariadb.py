"""Dual writes on MariaDB: what it does in a way of its own must not come between rows and messages."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing, contextmanager

import pytest
from harness.orders import Order
from sqlalchemy import create_engine, insert, make_url, select, text, update
from sqlalchemy.orm import sessionmaker

from dualwrite import (
    AsyncDualWriter,
    ConfigurationError,
    DualWriter,
    TransactionAborted,
    WriterLimits,
    migrations,
    recover,
)
from dualwrite.errors import IllegalStateError
from dualwrite.stores.sql.access import engine_of, fileno_of
from dualwrite.testing import EmbeddedMariaDB, read_committed

_DRIVERS = ["mariadb", pytest.param("mariadb through mysqlclient", marks=pytest.mark.thorough)]
pytestmark = [pytest.mark.mariadb, pytest.mark.parametrize("url", _DRIVERS, indirect=True)]


@pytest.fixture
def write(dualwrite_topic):
    def write(tx, number):
        tx.produce(dualwrite_topic, value=str(number))
        tx.connection.execute(insert(Order.__table__).values(id=number))

    return write


def test_each_block_is_on_both_sides_or_on_neither(writer, write, dualwrite_topic, both):
    with writer.transaction() as tx:
        write(tx, 1)
        with pytest.raises(KeyError), tx.connection.begin_nested():
            write(tx, 2)
            raise KeyError
        with tx.session.begin_nested():
            tx.session.add(Order(id=3))
            tx.produce(dualwrite_topic, value="3")
    with pytest.raises(ValueError, match="no"), writer.transaction() as tx:
        write(tx, 4)
        raise ValueError("no")
    assert both() == ([1, 3], [1, 3])


REFUSED = [
    "SET STATEMENT max_statement_time=10 FOR TRUNCATE TABLE other",
    "SET STATEMENT lock_wait_timeout=10 FOR ALTER TABLE other ADD COLUMN x INT",
    "EXECUTE IMMEDIATE 'TRUNCATE TABLE other'",
    "EXECUTE IMMEDIATE 'COMMIT'",
    "SET sql_mode='', autocommit=1",
    "SET SESSION sql_mode='', SESSION autocommit=1",
    "SET @x=1, autocommit=ON",
    "BEGIN NOT ATOMIC COMMIT; END",
    "BACKUP STAGE START",
    "SET DEFAULT ROLE NONE",
    "CREATE TEMPORARY SEQUENCE sq",
    "ANALYZE TABLE other",
    "/*!50000 COMMIT */",
    "/*M!100100 COMMIT */",
    "/* c */ COMMIT",
    "-- x\nCOMMIT",
    "#x\nTRUNCATE other",
    "COMMIT AND CHAIN",
    "COMMIT/**/",
    "ROLLBACK AND CHAIN",
    "LOCK TABLE other WRITE",
    "FLUSH TABLES",
    "IF 1 THEN COMMIT; END IF",
    "FOR i IN 1..1 DO COMMIT; END FOR",
    "CASE 1 WHEN 1 THEN COMMIT; END CASE",
    "WHILE 0 DO COMMIT; END WHILE",
    "REPEAT COMMIT; UNTIL 1 END REPEAT",
    "OPTIMIZE TABLE other",
]
FAILING = [
    "SHUTDOWN_",
    "XA START 'x'",
    "HANDLER other CLOSE",
    ";COMMIT",
    "LOOP_",
    "KILL QUERY 0",
    "LOAD DATA INFILE 'nono' INTO TABLE other",
]
HARMLESS = [
    "SET SESSION TRANSACTION READ WRITE",
    "SET SESSION completion_type=CHAIN",
    "SET SESSION completion_type=2",
    "SET autocommit=0",
    "DROP TEMPORARY TABLE IF EXISTS nono",
    "(SELECT 1)",
    "PREPARE s FROM 'COMMIT'",
    "HANDLER other OPEN",
    "PURGE BINARY LOGS BEFORE '2000-01-01'",
    "CREATE OR REPLACE TEMPORARY TABLE tt (i INT)",
    "SET ROLE NONE",
]
HIDDEN = ["CALL ends()", "CALL ends_and_goes_on()"]
"""Nothing but the server knows."""
EVERY = [("refused", one) for one in REFUSED]
EVERY += [("failing", one) for one in FAILING]
EVERY += [("harmless", one) for one in HARMLESS]
EVERY += [("hidden", one) for one in HIDDEN]


@pytest.fixture
def one_connection(url, engine, kafka, engine_of):
    """A writer whose blocks have one connection, which a statement may spoil."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS other (id INT) ENGINE=InnoDB"))
        connection.exec_driver_sql("CREATE OR REPLACE PROCEDURE ends() BEGIN COMMIT; END")
        connection.exec_driver_sql(
            "CREATE OR REPLACE PROCEDURE ends_and_goes_on() BEGIN COMMIT; INSERT INTO other VALUES (1); END"
        )
    with DualWriter(
        "orders", kafka=kafka, database=engine_of(url, pool_size=1), limits=WriterLimits(max_lanes=1)
    ) as writer:
        yield writer


@pytest.mark.parametrize("past", [False, True], ids=["sqlalchemy", "driver"])
def test_no_statement_decides_without_its_rows_or_leaves_the_writer_unusable(one_connection, write, both, past):
    last, rows, messages = 0, [], []
    for kind, statement in EVERY:
        last += 2
        error = None
        try:
            with one_connection.transaction() as tx:
                write(tx, last)
                if past:
                    with closing(tx.connection.connection.cursor()) as cursor:
                        cursor.execute(statement)
                else:
                    tx.connection.exec_driver_sql(statement)
                write(tx, last + 1)
        except Exception as found:  # noqa: BLE001 - compared below
            error = found
        if kind == "harmless":
            assert error is None, statement
            rows += [last, last + 1]
            messages += [last, last + 1]
        else:
            assert error is not None, statement
        if kind == "hidden":
            # Nothing takes back what the server has committed: the error says that it stays. Nothing more is written.
            assert isinstance(error, IllegalStateError), statement
            assert "stays" in str(error), statement
            assert error.outcome == "unknown", statement
            rows.append(last)
        # Whatever it has done to its connection, the next block has a good one.
        one_connection.run(lambda tx, number=1000 + last: write(tx, number))
        rows.append(1000 + last)
        messages.append(1000 + last)
    assert both() == (sorted(rows), sorted(messages))


def test_a_deadlock_of_two_dual_writes_is_survived_by_running_one_again(
    kafka, engine, write, dualwrite_topic, both, caplog
):
    caplog.set_level("INFO", "dualwrite.writing.work")
    with engine.begin() as connection:
        connection.execute(insert(Order.__table__), [{"id": -1}, {"id": -2}])
    both_hold_one = threading.Barrier(2)
    with DualWriter("orders", kafka=kafka, database=engine) as writer:

        def run(number, first, second):
            runs = []

            def work(tx):
                runs.append(tx)
                tx.connection.execute(update(Order).where(Order.id == first).values(note=str(number)))
                write(tx, number)
                if len(runs) == 1:
                    both_hold_one.wait(120)
                with tx.connection.begin_nested():  # which the deadlock takes away, too
                    tx.connection.execute(update(Order).where(Order.id == second).values(note=str(number)))

            writer.run(work)

        threads = [threading.Thread(target=run, args=args) for args in ((1, -1, -2), (2, -2, -1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum("Deadlock found" in record.getMessage() for record in caplog.records) >= 1
    assert both() == ([-2, -1, 1, 2], [1, 2])


def test_a_deadlock_in_a_group_runs_its_units_again(writer, engine, write, both):
    with engine.begin() as connection:
        connection.execute(insert(Order.__table__), [{"id": -1}, {"id": -2}])
    held, met = threading.Event(), threading.Event()

    def other():
        with engine.begin() as connection:
            connection.execute(update(Order).where(Order.id == -2).values(note="other " * 1000))
            connection.execute(insert(Order.__table__), [{"id": -number} for number in range(10, 60)])
            held.set()
            met.wait(120)
            connection.execute(update(Order).where(Order.id == -1).values(note="other"))
            connection.rollback()

    def first(tx):
        write(tx, 1)

    runs = []

    def victim(tx):
        runs.append(tx)
        write(tx, 2)
        if len(runs) == 1:
            tx.connection.execute(update(Order).where(Order.id == -1).values(note="ours"))
            held.wait(120)
            threading.Timer(0.3, met.set).start()
            tx.connection.execute(update(Order).where(Order.id == -2).values(note="ours"))

    thread = threading.Thread(target=other)
    thread.start()
    with together(writer):
        futures = [writer.submit(work, key=key) for key, work in enumerate((first, victim))]
    assert [future.exception(120) for future in futures] == [None, None]
    thread.join()
    assert len(runs) == 2
    rows, messages = both()
    assert [number for number in rows if number > 0] == messages == [1, 2]


@pytest.mark.parametrize("statement", ["CALL ends()", "CALL ends_and_goes_on()"])
def test_no_unit_runs_again_after_one_that_has_committed_past_the_library(one_connection, write, both, statement):
    runs, writer = [], one_connection

    def first(tx):
        runs.append(1)
        write(tx, 1)

    def commits(tx):
        write(tx, 2)
        with tx.connection.connection.cursor() as cursor:
            cursor.execute(statement)

    with together(writer):
        futures = [writer.submit(work, key=key) for key, work in enumerate((first, commits))]
    assert [future.exception(120).outcome for future in futures] == ["unknown"] * 2
    assert runs == [1]
    assert both() == ([1, 2], [])


@contextmanager
def together(writer):
    """The units that are submitted here become one group."""
    may_go, begun = threading.Event(), threading.Event()

    def blocking(_):
        begun.set()
        may_go.wait(60)

    future = writer.submit(blocking, key="first of a test")
    begun.wait(60)
    yield
    may_go.set()
    future.result(60)


@pytest.mark.parametrize("arrives", [True, False])
def test_the_lost_answer_of_a_commit_is_resolved_by_the_row(writer, write, both, arrives):
    def lose_the_answer_of_commit(driver, error):
        commit = driver.commit

        def committing():
            sent.append(True)
            if arrives:
                commit()
            raise error(2013, "Lost connection to MySQL server during query")

        driver.commit = committing

    sent = []
    try:
        with writer.transaction() as tx:
            write(tx, 1)
            lose_the_answer_of_commit(
                tx.connection.connection.dbapi_connection, tx.connection.dialect.dbapi.OperationalError
            )
        outcome = [1]
    except TransactionAborted:
        outcome = []
    assert any(sent)
    assert outcome == ([1] if arrives else [])
    assert both() == (outcome, outcome)


def test_a_session_of_the_applications_joins_before_its_first_statement(writer, engine, dualwrite_topic, both):
    factory = sessionmaker(engine)
    bound = writer.bind(factory)
    with factory() as session:
        bound.produce(session, dualwrite_topic, value="1")
        session.add(Order(id=1))
        session.commit()
    assert both() == ([1], [1])


@pytest.mark.thorough
def test_a_server_that_is_killed_and_comes_back(url, kafka, dualwrite_topic):
    """Whatever it had committed is completed; the rest is on neither side."""
    import dualwrite.migrations

    with EmbeddedMariaDB({"sync-binlog": "1"}) as server:
        found = make_url(server.create_database()).set(drivername=make_url(url).drivername)
        engine = create_engine(found, pool_pre_ping=True)
        with engine.connect() as connection:
            dualwrite.migrations.upgrade(connection)
        Order.__table__.create(engine)
        with DualWriter("orders-killed", kafka=kafka, database=engine) as writer:
            done = []
            for number in range(1, 7):  # 0 would ask for the next number
                try:
                    with writer.transaction() as tx:
                        tx.produce(dualwrite_topic, value=str(number))
                        tx.connection.execute(insert(Order.__table__).values(id=number))
                        if number == 2:
                            server.kill()
                except Exception:  # noqa: BLE001 - compared below
                    assert number == 2
                    server.start()
                    continue
                done.append(number)
        recover(kafka=kafka, database=engine, open_for_s=0)
        with engine.connect() as connection:
            rows = sorted(connection.execute(select(Order.id)).scalars())
        assert rows == sorted(int(message.value) for message in read_committed(kafka, dualwrite_topic))
        assert set(done) <= set(rows)
        assert {1, 3, 4, 5, 6} <= set(rows)
        assert 2 not in rows
        engine.dispose()


def test_the_loss_of_the_servers_machine_is_noticed_within_half_a_minute(url):
    engine = engine_of(url)
    with engine.connect() as connection:
        number = fileno_of(connection.connection.dbapi_connection)
        with socket.socket(fileno=os.dup(number)) as found:
            assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    engine.dispose()


def test_a_url_without_a_database_is_no_outage(url, kafka):
    engine = create_engine(make_url(url).set(database=""))
    with (
        pytest.raises(ConfigurationError, match="has no database.*name one in the URL"),
        engine.connect() as connection,
    ):
        migrations.upgrade(connection)
    with pytest.raises(ConfigurationError, match="No database selected"):
        DualWriter("orders", kafka=kafka, database=engine).open()
    engine.dispose()


def test_asynchronous_drivers_are_refused(url, kafka):
    with pytest.raises(ConfigurationError, match=r"not supported by an AsyncDualWriter.*to_thread"):
        AsyncDualWriter("orders", kafka=kafka, database=url)
    with pytest.raises(ConfigurationError, match=r"not supported by an AsyncDualWriter.*to_thread"):
        AsyncDualWriter("orders", kafka=kafka, database=make_url(url).set(drivername="mysql+aiomysql"))
