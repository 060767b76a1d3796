"""Behaviour of MariaDB alone: what ends a transaction unseen, what its settings must be, how it compares texts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pymysql
import pytest
from harness.databases import Database, Thread, prepare, prepared, run_raw
from harness.patience import wait_until
from sqlalchemy import Connection, create_engine, exc, make_url, text

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, IllegalStateError, TransactionAborted, TransactionInDoubt, Unavailable
from dualwrite.protocol.message import Message
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process import DatabaseVerdict
from dualwrite.protocol.values import Decision
from dualwrite.stores.sql.access import new_engine
from dualwrite.stores.sql.consumed import NOTHING_YET, ClaimedOffset, ConsumedOffsets
from dualwrite.stores.sql.database import JoinedStore
from dualwrite.stores.sql.leases import Leases
from dualwrite.stores.sql.mariadb import queries_of
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import EmbeddedMariaDB


@pytest.fixture
def database(mariadb: Database) -> Database:
    return mariadb


def begin(database: Database, store: SqlStateStore, connection: Connection) -> None:
    """A dual write with a row, by the newest owner."""
    database.claim(store, "orders")
    store.begin(connection)
    store.read_incarnation(connection, "orders")
    connection.execute(text("INSERT INTO orders (id) VALUES (1)"))


def orders(database: Database) -> list[int]:
    return [row[0] for row in database.query("SELECT id FROM orders ORDER BY id")]


def incarnation(store: SqlStateStore) -> int:
    return store.read(["orders"])[0].incarnation


DDL = [
    "CREATE TABLE more (id INT)",
    "  /* a comment */ ALTER TABLE orders ADD COLUMN more INT",
    "-- a comment\nTRUNCATE customer",
    "/*! DROP TABLE customer */",
    "# a comment\nrename table customer to clients",
    "GRANT SELECT ON orders TO reader",
    "LOCK TABLES orders WRITE",
    "ANALYZE TABLE orders",
]


@pytest.mark.parametrize("statement", DDL)
def test_ddl_is_refused_before_it_is_sent(
    database: Database, store: SqlStateStore, connection: Connection, statement: str
) -> None:
    begin(database, store, connection)
    watch = store.watch_savepoints(connection, "orders")
    with pytest.raises(IllegalStateError, match="it was not sent"):
        connection.exec_driver_sql(statement)
    watch.stop()
    store.rollback(connection)
    assert orders(database) == []


@pytest.mark.parametrize("statement", ["COMMIT", "begin", "START TRANSACTION", "Rollback work", "SET autocommit = 1"])
def test_an_end_sent_as_text_is_refused(
    database: Database, store: SqlStateStore, connection: Connection, statement: str
) -> None:
    begin(database, store, connection)
    watch = store.watch_savepoints(connection, "orders")
    with pytest.raises(IllegalStateError, match="sent as text"):
        connection.exec_driver_sql(statement)
    watch.stop()
    store.rollback(connection)
    assert orders(database) == []


def test_temporary_tables_and_ordinary_statements_pass(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    begin(database, store, connection)
    watch = store.watch_savepoints(connection, "orders")
    for statement in (
        "CREATE TEMPORARY TABLE begin_with (commit_id INT)",
        "CREATE OR REPLACE TEMPORARY TABLE begin_with (commit_id INT)",
        "INSERT INTO begin_with SELECT id FROM orders",
        "SET @alter = 1",
        "SET autocommit = 0",
        "ANALYZE FORMAT=JSON SELECT 1",
        "DROP TEMPORARY TABLE begin_with",
    ):
        connection.exec_driver_sql(statement)
    watch.finish()
    assert store.decide(connection, Decision("orders", 1, prepared(1)))[0]
    store.commit(connection)
    assert orders(database) == [1]


@pytest.fixture
def procedures(database: Database) -> None:
    for name, does in {
        "ends": "COMMIT;",
        "goes_back": "ROLLBACK;",
        "goes_on": "COMMIT; INSERT INTO orders (id) VALUES (3);",
        "fails": "COMMIT; SIGNAL SQLSTATE '45000';",
    }.items():
        database.execute(f"CREATE OR REPLACE PROCEDURE {name}() BEGIN {does} END")


@pytest.mark.usefixtures("procedures")
@pytest.mark.parametrize("procedure", ["ends", "goes_back"])
def test_an_end_that_no_text_shows_is_noticed_at_once_by_the_servers_status(
    database: Database, store: SqlStateStore, connection: Connection, procedure: str
) -> None:
    begin(database, store, connection)
    driver = connection.connection.dbapi_connection
    with pytest.raises(IllegalStateError, match="ended inside it.*DDL.*stays"):
        run_raw(driver, f"CALL {procedure}()")
    for more in (  # a block that continues would write into no transaction, or into another one
        lambda: run_raw(driver, "INSERT INTO orders (id) VALUES (2)"),
        lambda: connection.execute(text("INSERT INTO orders (id) VALUES (2)")),
        lambda: store.decide(connection, Decision("orders", 1, prepared(1))),
    ):
        with pytest.raises(IllegalStateError, match="ended inside it"):
            more()
    store.rollback(connection)
    assert orders(database) == ([] if procedure == "goes_back" else [1])
    assert not store.read(["orders"])[0].prepared.has_transaction


@pytest.mark.usefixtures("procedures")
@pytest.mark.parametrize("procedure", ["goes_on", "fails"])
def test_an_end_that_the_servers_status_does_not_show_is_noticed_by_the_decision(
    database: Database, store: SqlStateStore, connection: Connection, procedure: str
) -> None:
    begin(database, store, connection)
    spoilt = connection.connection.dbapi_connection
    with suppress(pymysql.MySQLError):
        run_raw(spoilt, f"CALL {procedure}()")
    connection.execute(text("INSERT INTO orders (id) VALUES (2)"))
    with pytest.raises(IllegalStateError, match="ended inside it"):
        store.decide(connection, Decision("orders", 1, prepared(1)))
    store.rollback(connection)
    assert orders(database) == [1]
    assert not store.read(["orders"])[0].prepared.has_transaction
    assert connection.connection.dbapi_connection is not spoilt


def deadlock(database: Database, connection: Connection) -> None:
    """Make the connection's next lock a deadlock, of which it is the victim."""
    database.execute("INSERT INTO customer (id) VALUES (1), (2), (3), (4), (5), (6)")
    connection.execute(text("SELECT id FROM customer WHERE id = 1 FOR UPDATE")).all()
    other = database.engine().connect()
    number = other.scalar(text("SELECT CONNECTION_ID()"))
    # InnoDB rolls back the one that has changed fewer rows.
    other.execute(text("UPDATE customer SET id = id + 100 WHERE id > 1"))
    waiting = Thread(lambda: other.execute(text("SELECT id FROM customer WHERE id = 1 FOR UPDATE")).all())
    waits = f"SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT' AND trx_mysql_thread_id = {number}"
    # InnoDB looks again only if nobody has asked for a tenth of a second.
    wait_until(lambda: database.query(waits)[0][0], pause_s=0.3)
    try:
        connection.execute(text("SELECT id FROM customer WHERE id > 1 FOR UPDATE")).all()
    finally:
        waiting.result()
        other.rollback()
        other.close()


def test_after_a_deadlock_nothing_more_is_sent(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    begin(database, store, connection)
    watch = store.watch_savepoints(connection, "orders")
    with pytest.raises(exc.OperationalError, match="Deadlock"):
        deadlock(database, connection)
    with pytest.raises(TransactionAborted, match="rolled back the whole transaction: Deadlock") as caught:
        connection.execute(text("INSERT INTO orders (id) VALUES (2)"))
    assert caught.value.retryable
    watch.stop()
    store.rollback(connection)
    assert orders(database) == []


def test_a_deadlock_in_a_savepoint_leaves_no_savepoint_to_go_back_to(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    begin(database, store, connection)
    watch = store.watch_savepoints(connection, "orders")
    with pytest.raises(TransactionAborted, match="Deadlock") as caught, connection.begin_nested():
        deadlock(database, connection)
    assert caught.value.retryable
    watch.stop()
    store.rollback(connection)


def test_a_deadlock_that_nobody_watched_is_noticed_at_the_decision(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    begin(database, store, connection)
    with pytest.raises(exc.OperationalError, match="Deadlock"):
        deadlock(database, connection)
    with pytest.raises(TransactionAborted, match="Deadlock"):
        connection.execute(text("INSERT INTO orders (id) VALUES (2)"))
    with pytest.raises(TransactionAborted, match="Deadlock"):
        store.decide(connection, Decision("orders", 1, prepared(1)))
    with pytest.raises(TransactionAborted):
        store.commit(connection)
    assert orders(database) == []
    store.begin(connection)
    assert store.decide(connection, Decision("orders", 1, prepared(1)))[0]
    store.commit(connection)


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_claim_in_the_meantime_fences_at_every_level(database: Database, level: str) -> None:
    store = database.store(database.engine(isolation_level=level))
    newer = database.store()
    with store.engine.connect() as connection:
        if level == "SERIALIZABLE":  # a SELECT locks there: the claim would wait for this transaction
            database.claim(newer, "orders")
            store.begin(connection)
            database.claim(newer, "orders")
        else:
            begin(database, store, connection)
            database.claim(newer, "orders")
            assert store.read_incarnation(connection, "orders") == (2 if level == "READ COMMITTED" else 1)
        assert store.decide(connection, Decision("orders", 1, prepared(1))) == (False, None)
        assert store.hold(connection, Decision("orders", 1)) == (False, None)
        store.rollback(connection)
    assert not store.read(["orders"])[0].prepared.has_transaction


def test_a_claim_that_the_snapshot_does_not_see_is_a_conflict(database: Database) -> None:
    """As MariaDB 11.6 and newer have it by default."""
    store, newer = database.store(database.engine()), database.store()
    with store.engine.connect() as connection:
        if not connection.exec_driver_sql("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'").all():
            pytest.skip("this server has no innodb_snapshot_isolation")
        connection.exec_driver_sql("SET SESSION innodb_snapshot_isolation = ON")
        connection.commit()
        begin(database, store, connection)
        database.claim(newer, "orders")
        with pytest.raises(TransactionAborted, match="changed since last read") as caught:
            store.decide(connection, Decision("orders", 1, prepared(1)))
        assert caught.value.retryable
        store.rollback(connection)
        connection.exec_driver_sql("SET SESSION innodb_snapshot_isolation = OFF")
    assert orders(database) == []


def test_a_claim_waits_for_a_decision_and_no_longer_than_it_may(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    begin(database, store, connection)
    assert store.decide(connection, Decision("orders", 1, prepared(1)))[0]
    hasty = database.store(lock_timeout_s=1)
    with pytest.raises(Unavailable, match="lock"):
        database.claim(hasty, "orders")
    assert hasty.read(["orders"])[0].incarnation == 1
    patient = Thread(lambda: database.claim(database.store(), "orders"))
    store.commit(connection)
    assert patient.result().prepared == prepared(1)


def test_a_claim_does_not_wait_for_the_rows_of_others(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    """Even if the table is so small that a scan looks cheaper than its index."""
    store.claim(["a", "b", "orders"], owner="me", cluster_id="cluster-one")
    store.begin(connection)
    assert store.decide(connection, Decision("orders", 1, prepared(1)))[0]
    hasty = database.store(lock_timeout_s=1)
    rows = hasty.claim(["a", "b", "c"], owner="me", cluster_id="cluster-one")
    assert [row.incarnation for row in rows] == [2, 2, 1]
    hasty.while_locked(["a", "b"], lambda: None, Deadline(1))
    store.rollback(connection)


def test_the_lost_answer_of_a_commit_is_found_under_the_lock(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    begin(database, store, connection)
    assert store.decide(connection, Decision("orders", 1, prepared(1)))[0]
    asking = Thread(lambda: database.store().read_locked("orders", Deadline(60)))
    driver: Any = connection.connection.dbapi_connection
    real = driver._read_ok_packet

    def lose() -> None:
        real()
        raise OSError("no answer")

    driver._read_ok_packet = lose
    with pytest.raises(TransactionInDoubt):
        store.commit(connection)
    assert asking.result().prepared == prepared(1)
    assert store.transaction_verdict("1") is DatabaseVerdict.UNKNOWN


def test_a_session_that_was_killed_before_its_commit_is_in_doubt_and_has_not_committed(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    begin(database, store, connection)
    assert store.decide(connection, Decision("orders", 1, prepared(1)))[0]
    (number,) = connection.exec_driver_sql("SELECT connection_id()").one()
    database.execute(f"KILL {number}")
    with pytest.raises(TransactionInDoubt):
        store.commit(connection)
    assert not database.store().read_locked("orders", Deadline(60)).prepared.has_transaction
    assert orders(database) == []


def test_an_answer_that_does_not_come_in_time_is_in_doubt(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    begin(database, store, connection)
    assert store.decide(connection, Decision("orders", 1, prepared(1)))[0]
    driver: Any = connection.connection.dbapi_connection
    driver._execute_command = lambda *_: None  # COMMIT is swallowed
    with pytest.raises(TransactionInDoubt, match="Lost connection"):
        store.commit(connection, answer_s=0.2)
    assert not database.store().read_locked("orders", Deadline(60)).prepared.has_transaction


def test_a_paused_owner_loses_its_session_and_its_lock(database: Database) -> None:
    store = database.store(paused_owner_timeout_s=1)
    with store.engine.connect() as connection:
        begin(database, store, connection)
        assert store.decide(connection, Decision("orders", 1, prepared(1)))[0]
        assert database.claim(database.store(lock_timeout_s=60), "orders").incarnation == 2
        with pytest.raises(TransactionInDoubt):
            store.commit(connection)
    assert not store.read(["orders"])[0].prepared.has_transaction


def test_the_time_before_commit_is_limited_more_tightly_and_afterwards_as_before(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    idle = "SELECT @@session.idle_transaction_timeout, @@session.idle_write_transaction_timeout"
    connection.exec_driver_sql("SET SESSION idle_transaction_timeout = 40")
    connection.commit()
    for end in (store.commit, store.rollback):
        begin(database, store, connection)
        assert connection.exec_driver_sql(idle).one() == (40, 60)
        assert store.decide(
            connection, Decision("orders", incarnation(store), prepared(incarnation(store)), idle_s=7.5)
        )[0]
        assert connection.exec_driver_sql(idle).one() == (7, 7)
        end(connection)
        assert connection.exec_driver_sql(idle).one() == (40, 0)
        connection.rollback()
        database.execute("DELETE FROM orders")
    pooled = "SELECT @@session.innodb_lock_wait_timeout"
    with store.engine.connect() as other:
        assert other.exec_driver_sql(pooled).scalar() == 50
    assert connection.exec_driver_sql(pooled).scalar() == 50


NAMES = [
    "orders",
    "Orders",
    "orders ",
    "\u00f6rders",
    "o\u0308rders",
    "order\u00df",
    "orderss",
    "\U0001f600",
    "\U0001f601",
]


def test_ids_that_differ_only_a_little_are_different(database: Database, store: SqlStateStore) -> None:
    for number, name in enumerate(NAMES, start=1):
        store.claim([name] * number, owner="me", cluster_id="cluster-one")
    store.claim(NAMES, owner="me", cluster_id="cluster-one")
    assert {row.transactional_id: row.incarnation for row in store.read(NAMES)} == dict.fromkeys(NAMES, 2)
    assert [row.transactional_id for row in store.find("Ord")] == ["Orders"]
    assert [row.transactional_id for row in store.find("orders ")] == ["orders "]
    assert store.find("order_") == store.find("order%") == []


def test_the_longest_ids_can_be_keys(database: Database, store: SqlStateStore) -> None:
    name = "\U0001f600" * 255
    assert store.claim([name], owner="me", cluster_id="cluster-one")[0].transactional_id == name
    with pytest.raises(ConfigurationError, match="255"):
        store.claim([name + "x"], owner="me", cluster_id="cluster-one")


def test_a_free_lease_is_found_beside_one_that_another_member_is_taking(database: Database) -> None:
    leases = Leases(database.engine(), "fleet")
    first = leases.take("one", 60)
    leases.give_back(first, "one", settled=True)
    with database.engine().connect() as other:
        other.execute(
            text("SELECT * FROM dualwrite_lease WHERE transactional_id = :id FOR UPDATE"), {"id": first}
        ).all()
        second = leases.take("two", 60)
        assert second != first
    assert leases.take("three", 60) == first


def test_a_connection_that_cannot_carry_every_id_is_refused(database: Database) -> None:
    store = database.store(database.engine(connect_args={"charset": "latin1"}))
    with pytest.raises(ConfigurationError, match="latin1"):
        database.claim(store, "orders")


def test_a_session_begun_at_repeatable_read_is_joined_before_its_first_statement(database: Database) -> None:
    for level, late in [("REPEATABLE READ", False), ("READ COMMITTED", True)]:
        store = JoinedStore(database.engine(isolation_level=level))
        database.claim(store, "orders")
        with store.engine.begin() as connection:
            if late:
                connection.execute(text("SELECT * FROM orders")).all()
            store.begin(connection)
            store.rollback(connection)
    with database.engine(isolation_level="REPEATABLE READ").begin() as connection:
        connection.execute(text("SELECT * FROM orders")).all()
        with pytest.raises(IllegalStateError, match=r"REPEATABLE READ.*join\(session\).*READ COMMITTED"):
            JoinedStore(database.engine()).begin(connection)


def test_tables_in_another_engine_are_refused(database: Database, store: SqlStateStore) -> None:
    database.execute("ALTER TABLE dualwrite_incident ENGINE=Aria")
    with pytest.raises(ConfigurationError, match=r"dualwrite_incident is in the engine Aria.*ENGINE=InnoDB"):
        database.claim(store, "orders")


def test_missing_rights_are_granted_by_what_the_error_says(database: Database) -> None:
    name = make_url(database.url).database
    database.execute("CREATE OR REPLACE USER poor IDENTIFIED BY 'poor'")
    database.execute(f"GRANT SELECT ON `{name}`.orders TO poor")
    url = make_url(database.url).set(username="poor", password="poor")
    store = SqlStateStore(create_engine(url))
    try:
        with pytest.raises(ConfigurationError, match="GRANT") as caught:
            database.claim(store, "orders")
        assert caught.value.next_step is not None
        for statement in caught.value.next_step.partition(": ")[2].split("; "):
            database.execute(statement)
        row = database.claim(store, "orders")
        store.mark_settled({"orders": 1})
        store.engine.dispose()  # a right to the whole database counts from the next connection on
        with store.engine.connect() as connection:
            store.begin(connection)
            watch = store.watch_savepoints(connection, "orders")
            run_raw(connection.connection.dbapi_connection, "SAVEPOINT unseen")
            watch.add(lambda _: None)
            watch.finish()
            assert store.decide(connection, Decision("orders", row.incarnation, prepared(1)))[0]
            store.commit(connection)
    finally:
        store.engine.dispose()
        database.execute("DROP USER poor")


def test_without_strict_mode_the_librarys_rows_are_exact_and_a_warning_speaks_of_others(
    database: Database, mariadb_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server would shorten what does not fit, and say nothing."""
    engine = create_engine(f"{mariadb_url}?init_command=SET+sql_mode%3D%27%27")
    database.engines.append(engine)
    store = SqlStateStore(engine)
    long = "o" * 255
    row = database.claim(store, long)
    database.claim(store, long)
    assert caplog.text.count("sql_mode is not strict") == 1
    topics = ";".join(f"{'t' * 240}-{number:04}:0={number}" for number in range(400))
    state = PreparedTxnState.from_string(f"7:0;i={row.incarnation + 1};{topics}")
    assert len(str(state)) > 65_536
    with engine.connect() as connection:
        store.begin(connection)
        store.read_incarnation(connection, long)
        assert connection.scalar(text("SELECT @@session.sql_mode")) == ""
        assert store.decide(connection, Decision(long, row.incarnation + 1, state))[0]
        store.commit(connection)
    assert store.read([long])[0].prepared == state
    with pytest.raises(ConfigurationError, match="1 to 255 characters"):
        database.claim(store, long + "o")
    with pytest.raises(ConfigurationError, match="1 to 255 characters"):
        ConsumedOffsets(engine, None, long + "o", "me")
    consumed = ConsumedOffsets(engine, None, long, "me")
    assert consumed.claim({("t" * 249, 0): None}) == consumed.claim({("t" * 249, 0): None}) | {
        ("t" * 249, 0): ClaimedOffset(1, NOTHING_YET)
    }


def test_with_strict_mode_nothing_is_said(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    database.claim(database.store(), "orders")
    assert "sql_mode" not in caplog.text


@pytest.fixture(scope="module")
def logging_server(dualwrite_mariadb: EmbeddedMariaDB) -> Iterator[EmbeddedMariaDB]:
    """A server of its own, with a binary log, as primaries have it; a lock wait that times out ends its transaction."""
    with EmbeddedMariaDB({"log-bin": "binlog", "sync-binlog": "1", "innodb-rollback-on-timeout": "ON"}) as made:
        yield made


@pytest.fixture(scope="module")
def logging_database(logging_server: EmbeddedMariaDB) -> Iterator[Database]:
    made = prepare("mariadb", logging_server.create_database())
    yield made
    made.dispose()


@pytest.mark.parametrize(("size", "fits"), [(500_000, True), (600_000, False)])
def test_a_message_that_does_not_fit_into_a_packet_is_no_lost_connection(
    logging_database: Database, size: int, fits: bool
) -> None:
    database, store = logging_database, logging_database.store()
    claimed = database.claim(store, "large")
    before = database.query("SELECT @@global.max_allowed_packet")[0][0]
    database.execute(f"SET GLOBAL max_allowed_packet = {1 << 20}")
    store.engine.dispose()  # a session keeps its own limit
    try:
        with store.engine.connect() as connection:
            store.begin(connection)
            seen = store.outbox.read_first(connection, "large", "large")
            decision = Decision("large", claimed.incarnation, waits=seen.next_decision)
            message = Message.checked("t", b"\0" * size, max_bytes=2**30)
            with nullcontext() if fits else pytest.raises(TransactionAborted, match="max_allowed_packet is 1048576"):
                assert store.outbox.decide(connection, decision, "large", [message])[0]
            store.rollback(connection)
    finally:
        database.execute(f"SET GLOBAL max_allowed_packet = {before}")


@pytest.mark.parametrize(
    ("change", "back", "words"),
    [
        (
            "innodb_flush_log_at_trx_commit = 2",
            "innodb_flush_log_at_trx_commit = 1",
            "SET GLOBAL innodb_flush_log_at_trx_commit = 1",
        ),
        ("sync_binlog = 0", "sync_binlog = 1", "SET GLOBAL sync_binlog = 1"),
        ("read_only = 1", "read_only = 0", "connect to the primary"),
    ],
)
def test_settings_that_lose_commits_are_refused(logging_database: Database, change: str, back: str, words: str) -> None:
    database = logging_database
    store = database.store()
    database.claim(store, "orders")
    database.execute(f"SET GLOBAL {change}")
    try:
        with pytest.raises(ConfigurationError, match=words):
            database.claim(database.store(), "orders")
        with store.engine.connect() as connection:
            store.begin(connection)
            with pytest.raises(ConfigurationError, match=words):
                store.read_incarnation(connection, "orders")
            store.rollback(connection)
    finally:
        database.execute(f"SET GLOBAL {back}")


@pytest.mark.thorough
def test_a_replica_that_may_be_written_to_is_refused(
    logging_server: EmbeddedMariaDB, logging_database: Database
) -> None:
    """It shows by nothing but its replication: ``read_only`` is off."""
    primary = make_url(logging_database.url)
    with EmbeddedMariaDB({"server-id": "2"}) as replica:
        url = make_url(replica.url)
        with create_engine(url, isolation_level="AUTOCOMMIT").connect() as connection:
            connection.exec_driver_sql(
                f"CHANGE MASTER TO MASTER_HOST='{primary.host}', MASTER_PORT={primary.port}, MASTER_USER='{primary.username}', "
                f"MASTER_PASSWORD='{primary.password}', MASTER_SSL=0, MASTER_USE_GTID=slave_pos"
            )
            connection.exec_driver_sql("START SLAVE")
            found = text(
                "SELECT count(*) FROM information_schema.tables WHERE table_schema = :name AND table_name = 'orders'"
            )
            wait_until(lambda: connection.scalar(found, {"name": primary.database}))
            copy = Database("mariadb", url.set(database=primary.database).render_as_string(hide_password=False))
            try:
                with pytest.raises(ConfigurationError, match="the server is a replica, although"):
                    copy.claim(copy.store(), "orders")
                connection.exec_driver_sql("STOP SLAVE")
                copy.claim(copy.store(), "orders")  # it is its own primary now
            finally:
                copy.dispose()


def test_a_lock_wait_that_rolls_back_the_transaction_is_not_taken_for_a_commit_as_text(
    logging_database: Database,
) -> None:
    database = logging_database
    store = database.store()
    row = database.claim(store, "orders")
    database.execute("INSERT INTO orders (id) VALUES (1)")
    with store.engine.connect() as other, store.engine.connect() as connection:
        other.exec_driver_sql("DELETE FROM orders WHERE id = 1")
        connection.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 0")
        connection.rollback()
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        connection.exec_driver_sql("INSERT INTO orders (id) VALUES (2)")
        with pytest.raises(exc.OperationalError, match="1205"):
            connection.exec_driver_sql("DELETE FROM orders WHERE id = 1")
        with pytest.raises(TransactionAborted, match=r"rolled back the whole transaction.*timeout exceeded"):
            store.decide(connection, Decision("orders", row.incarnation, prepared(row.incarnation)))
        store.rollback(connection)
        other.rollback()
    assert database.query("SELECT id FROM orders") == [(1,)], "the row inserted before the timeout is gone"
    database.execute("DELETE FROM orders")


def test_a_server_that_is_killed_keeps_what_it_has_committed(
    logging_server: EmbeddedMariaDB, logging_database: Database
) -> None:
    database = logging_database
    store = database.store()
    row = database.claim(store, "orders")
    with store.engine.connect() as connection:
        store.begin(connection)
        connection.execute(text("INSERT INTO orders (id) VALUES (1)"))
        assert store.decide(connection, Decision("orders", row.incarnation, prepared(row.incarnation)))[0]
        store.commit(connection)
        store.begin(connection)
        connection.execute(text("INSERT INTO orders (id) VALUES (2)"))
        assert store.decide(connection, Decision("orders", row.incarnation, prepared(row.incarnation, 2)))[0]
        logging_server.kill()
        with pytest.raises(TransactionInDoubt):
            store.commit(connection)
    with pytest.raises(Unavailable):
        store.read(["orders"])
    logging_server.start()
    database.dispose()
    assert store.read(["orders"])[0].prepared == prepared(row.incarnation)
    assert orders(database) == [1]


def test_an_engine_of_ours_rolls_back_what_was_left_open_and_nothing_after_a_commit(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    engine = new_engine(make_url(database.url), pool_size=1, max_overflow=0)
    locking = "SELECT id FROM orders FOR UPDATE"  # PyMySQL does not see that it begins a transaction
    try:
        with engine.connect() as connection:
            driver: Any = connection.connection.dbapi_connection
            queries_of(driver)
            rollback = driver.rollback
            monkeypatch.setattr(driver, "rollback", lambda: (sent.append("ROLLBACK"), rollback())[1])
            connection.execute(text("INSERT INTO orders (id) VALUES (1)"))
            connection.commit()
        assert sent == []
        with engine.connect() as connection, connection.connection.cursor() as cursor:
            cursor.execute(locking)  # past SQLAlchemy, which knows of no transaction
        assert sent == ["ROLLBACK"]
        engine.connect().execute(text(locking)).all()
        gc.collect()  # it was not closed
        assert sent == ["ROLLBACK", "ROLLBACK"]
        database.execute("UPDATE orders SET id = 2")  # waits for no lock
    finally:
        engine.dispose()
