"""``DualWriter`` on real servers: both sides or neither, whatever the block does and wherever it fails."""

import logging
import os
import threading
from contextlib import suppress

import pytest
from harness.orders import Order, on_each, on_postgresql
from sqlalchemy import insert, select, text
from sqlalchemy.exc import IntegrityError

from dualwrite import (
    ConfigurationError,
    DualWriter,
    Fenced,
    TransactionAborted,
    WriterLimits,
    failpoints,
)
from dualwrite.errors import IllegalStateError
from dualwrite.failpoints import FailpointError
from dualwrite.recovery.recover import status
from dualwrite.testing.checker import read_committed


@pytest.fixture
def rows(engine, orders):
    def read():
        with engine.connect() as connection:
            return sorted(connection.execute(select(orders.c.id)).scalars())

    return read


@pytest.fixture
def messages(kafka, dualwrite_topic):
    def read():
        return sorted(int(message.value) for message in read_committed(kafka, dualwrite_topic))

    return read


def write(tx, topic, orders, number):
    tx.produce(topic, value=str(number), key="k")
    tx.connection.execute(insert(orders).values(id=number))


@on_each
def test_block_that_ends_writes_both_sides(writer, dualwrite_topic, orders, rows, messages):
    for number in range(5):
        with writer.transaction() as tx:
            write(tx, dualwrite_topic, orders, number)
    assert rows() == messages() == [0, 1, 2, 3, 4]


@on_postgresql
def test_nothing_is_visible_before_the_block_ends(writer, dualwrite_topic, orders, rows):
    with writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 1)
        assert rows() == []
    assert rows() == [1]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(2)])
def test_block_that_raises_writes_neither_and_the_exception_passes(
    writer, dualwrite_topic, orders, rows, messages, error
):
    with pytest.raises(type(error)), writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 1)
        raise error
    with writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 2)
    assert rows() == messages() == [2]


@pytest.mark.parametrize(
    "point", ["write.checked", "write.produced", "write.body_done", "write.prepared", "write.recorded"]
)
def test_failure_at_every_step_before_the_decision_aborts_both(writer, dualwrite_topic, orders, rows, messages, point):
    failpoints.arm(f"{point}:1:raise")
    with pytest.raises(FailpointError), writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 1)
    failpoints.arm("")
    with writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 2)
    assert rows() == messages() == [2]


@on_each
def test_failure_right_after_the_decision_is_completed_by_the_next_transaction_on_the_lane(
    kafka, engine, dualwrite_topic, orders, rows, messages
):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        failpoints.arm("write.decided:1:raise")
        with pytest.raises(FailpointError), writer.transaction() as tx:
            write(tx, dualwrite_topic, orders, 1)
        with writer.transaction() as tx:
            write(tx, dualwrite_topic, orders, 2)
        assert rows() == messages() == [1, 2]


@on_postgresql
def test_database_error_that_the_user_swallows_still_aborts_both(writer, dualwrite_topic, orders, rows, messages):
    with writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 1)
    with pytest.raises(TransactionAborted), writer.transaction() as tx:
        tx.produce(dualwrite_topic, value="2", key="k")
        with pytest.raises(IntegrityError):
            tx.connection.execute(insert(orders).values(id=1))
    assert rows() == messages() == [1]


@on_postgresql
def test_deferred_constraint_that_fails_at_commit_aborts_both(writer, engine, dualwrite_topic, orders, rows, messages):
    ddl = "CREATE TABLE notes (id int, order_id int REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)"
    with engine.begin() as connection:
        connection.execute(text(ddl))
    with pytest.raises(TransactionAborted), writer.transaction() as tx:
        tx.produce(dualwrite_topic, value="7", key="k")
        tx.connection.execute(text("INSERT INTO notes VALUES (1, 99)"))
    with writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 8)
    assert rows() == messages() == [8]


@on_postgresql
def test_what_is_deferred_to_commit_takes_its_time_before_the_decision(
    kafka, engine, dualwrite_topic, orders, rows, messages
):
    """A trigger that runs in COMMIT may exceed the broker's limit, and the clock is not checked after that."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN PERFORM pg_sleep(4); RETURN NULL; END $$"
            )
        )
        connection.execute(
            text(
                "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION slow()"
            )
        )
    settings = {**kafka, "transaction.timeout.ms": 12_000}
    with (
        DualWriter("orders", kafka=settings, database=engine, limits=WriterLimits(margin_s=8.5)) as writer,
        pytest.raises(TransactionAborted, match="must be left"),
        writer.transaction() as tx,
    ):
        write(tx, dualwrite_topic, orders, 1)
    assert rows() == messages() == []


def test_message_that_cannot_be_delivered_aborts_both(writer, dualwrite_topic, orders, rows, messages):
    with pytest.raises(TransactionAborted) as caught, writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 1)
        tx.produce(dualwrite_topic, value=b"x" * 900_000 * 2, key="k")
    assert not caught.value.retryable
    with writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 2)
    assert rows() == messages() == [2]


@on_postgresql
def test_a_refused_message_whose_error_is_swallowed_aborts_both_and_is_named(
    writer, dualwrite_topic, orders, rows, messages
):
    with (
        pytest.raises(
            TransactionAborted, match=r"continued after an error: .*(MSG_SIZE|MESSAGE)_TOO_LARGE.*message\.max\.bytes"
        ) as caught,
        writer.transaction() as tx,
    ):
        write(tx, dualwrite_topic, orders, 1)
        with pytest.raises(TransactionAborted):
            tx.produce(dualwrite_topic, value=b"x" * 900_000 * 2, key="k")
    assert not caught.value.retryable
    assert rows() == messages() == []


@on_each
def test_savepoint_inside_the_block_is_the_users(writer, dualwrite_topic, orders, rows, messages):
    with writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 1)
        savepoint = tx.connection.begin_nested()
        tx.connection.execute(insert(orders).values(id=5))
        savepoint.rollback()
    assert rows() == messages() == [1]


@on_each
def test_session_is_flushed_before_prepare_and_its_commit_commits_nothing(writer, dualwrite_topic, rows, messages):
    with writer.transaction() as tx:
        order = Order(id=1, note="hello")
        tx.session.add(order)
        tx.produce(dualwrite_topic, value="1")
        tx.session.commit()
        assert tx.session is tx.session
    assert order.note == "hello"
    assert rows() == messages() == [1]
    with pytest.raises(IntegrityError), writer.transaction() as tx:
        tx.session.add(Order(id=1))
        tx.produce(dualwrite_topic, value="1")
    assert rows() == messages() == [1]


@on_each
def test_commit_inside_the_block_is_refused_and_aborts_both(writer, dualwrite_topic, orders, rows, messages):
    with pytest.raises(IllegalStateError, match="commit"), writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 1)
        tx.connection.commit()
    with writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 2)
    assert rows() == messages() == [2]


@pytest.mark.parametrize("verb", ["__enter__", "_begin", "_commit", "_abort"])
@on_postgresql
def test_a_verb_of_the_block_that_is_called_inside_it_aborts_both(
    writer, dualwrite_topic, orders, rows, messages, verb
):
    """Nothing that is committed is ever reported with an error that says "none", whether or not the user's code goes on."""
    with pytest.raises(IllegalStateError, match="inside its block"), writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 1)
        getattr(tx._dual_write, verb)()
    with pytest.raises(TransactionAborted, match="inside its block"), writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 2)
        with suppress(IllegalStateError):
            getattr(tx._dual_write, verb)()
    with writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 3)
    assert rows() == messages() == [3]


def test_use_after_the_block_is_refused(writer, dualwrite_topic, orders):
    with writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 1)
    for use in (lambda: tx.produce(dualwrite_topic, value="2"), lambda: tx.connection, lambda: tx.session):
        with pytest.raises(IllegalStateError):
            use()


def test_nested_use_is_refused_and_the_outer_block_goes_on(writer, dualwrite_topic, orders, rows, messages):
    with writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 1)
        with pytest.raises(IllegalStateError, match="nested"), writer.transaction():
            pass
    assert rows() == messages() == [1]


@on_each
def test_database_only_and_kafka_only_and_empty_blocks(writer, engine, dualwrite_topic, orders, rows, messages):
    with writer.transaction():
        pass
    with writer.transaction() as tx:
        tx.connection.execute(insert(orders).values(id=1))
    with writer.transaction() as tx:
        tx.produce(dualwrite_topic, value="2")
    assert rows() == [1]
    assert messages() == [2]


@on_each
def test_a_connection_of_the_users_is_used_and_left_open(writer, engine, dualwrite_topic, orders, rows, messages):
    with engine.connect() as connection:
        with writer.transaction(connection) as tx:
            assert tx.connection is connection
            write(tx, dualwrite_topic, orders, 1)
        assert not connection.closed
        connection.execute(select(orders))
        with pytest.raises(IllegalStateError, match="transaction"), writer.transaction(connection):
            pass
        assert connection.in_transaction(), "the user's own transaction was touched"
    assert rows() == messages() == [1]


@on_each
def test_autocommit_is_refused(writer, engine):
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(ConfigurationError, match="(?i)autocommit"),
        writer.transaction(connection),
    ):
        pass


@on_postgresql
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_every_isolation_level_of_the_users(kafka, engine, dualwrite_topic, orders, rows, messages, level):
    with DualWriter("orders", kafka=kafka, database=engine.execution_options(isolation_level=level)) as writer:
        for number in range(4):
            with writer.transaction() as tx:
                write(tx, dualwrite_topic, orders, number)
    assert rows() == messages() == [0, 1, 2, 3]


@on_each
def test_a_second_writer_of_the_name_fences_the_first_on_every_lane(
    kafka, engine, dualwrite_topic, orders, rows, messages
):
    with DualWriter("orders", kafka=kafka, database=engine) as first:
        with first.transaction() as tx:
            write(tx, dualwrite_topic, orders, 1)
        with DualWriter("orders", kafka=kafka, database=engine) as second:
            for _ in range(3):
                with pytest.raises(Fenced), first.transaction() as tx:
                    write(tx, dualwrite_topic, orders, 2)
            with second.transaction() as tx:
                write(tx, dualwrite_topic, orders, 3)
    assert rows() == messages() == [1, 3]


@on_postgresql  # on SQLite its writer holds the only lock: no other process can claim meanwhile
def test_an_owner_fenced_in_the_middle_of_its_block_writes_nothing(
    kafka, engine, dualwrite_topic, orders, rows, messages
):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as first:
        with pytest.raises((Fenced, TransactionAborted)), first.transaction() as tx:
            write(tx, dualwrite_topic, orders, 1)
            with (
                DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as second,
                second.transaction() as other,
            ):
                write(other, dualwrite_topic, orders, 2)
        with pytest.raises(Fenced), first.transaction() as tx:
            pass
        with pytest.raises(Fenced), first.transaction() as tx:
            tx.connection.execute(insert(orders).values(id=3))
    assert rows() == messages() == [2]


@on_each
def test_threads_share_a_writer(kafka, engine, dualwrite_topic, orders, rows, messages):
    failures = []
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=3)) as writer:

        def work(base):
            try:
                for number in range(5):
                    with writer.transaction() as tx:
                        write(tx, dualwrite_topic, orders, base + number)
            except BaseException as error:  # noqa: BLE001 - handed to the main thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert rows() == messages() == sorted(10 * n + k for n in range(4) for k in range(5))


@on_each
def test_a_url_works_as_well_as_an_engine(kafka, url, engine, dualwrite_topic, orders, rows, messages):
    with DualWriter("orders", kafka=kafka, database=url) as writer, writer.transaction() as tx:
        write(tx, dualwrite_topic, orders, 1)
    assert rows() == messages() == [1]


def test_a_closed_or_unopened_writer_is_refused(kafka, engine):
    writer = DualWriter("orders", kafka=kafka, database=engine)
    with pytest.raises(IllegalStateError, match="not open"), writer.transaction():
        pass
    with writer:
        pass
    with pytest.raises(IllegalStateError), writer.transaction():
        pass
    with pytest.raises(IllegalStateError):
        writer.open()
    writer.close()


@on_each
def test_a_connection_that_other_code_has_left_in_a_transaction_is_not_the_blocks_problem(
    kafka, url, engine_of, dualwrite_topic, orders, both, caplog
):
    # Made by a pool that does not reset what comes back, or by a setting of the session: all that wait there are like that.
    careless = engine_of(url, pool_reset_on_return=None)
    left = [careless.raw_connection() for _ in range(3)]
    for one in left:
        one.cursor().execute("BEGIN")
        one.close()
    with DualWriter("orders", kafka=kafka, database=careless) as writer:
        with writer.transaction() as tx:
            write(tx, dualwrite_topic, orders, 1)
        own = careless.raw_connection()
        own.cursor().execute("BEGIN")
        own.close()
        with writer.transaction() as tx:
            write(tx, dualwrite_topic, orders, 2)
    assert "discarding a connection of the pool that other code has left unusable" in caplog.text
    assert both() == ([1, 2], [1, 2])


def test_an_engine_in_autocommit_is_refused_however_many_connections_it_makes(kafka, engine, engine_of, url):
    with DualWriter("orders", kafka=kafka, database=engine_of(url, isolation_level="AUTOCOMMIT")) as writer:
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="autocommit"), writer.transaction():
                pass


def test_use_after_fork_is_refused(writer, dualwrite_topic):
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        try:
            with writer.transaction():
                os.write(write_end, b"used")
        except IllegalStateError:
            os.write(write_end, b"refused")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 10) == b"refused"


@on_each
def test_close_records_that_all_is_complete(kafka, engine, dualwrite_topic, orders):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        with writer.transaction() as tx:
            write(tx, dualwrite_topic, orders, 1)
        assert [item.row.completed for item in status(kafka=kafka, database=engine)] == [None]
    (item,) = status(kafka=kafka, database=engine)
    assert item.row.completed.value == "committed"
    assert not item.needs_recovery


def test_an_idle_owner_records_that_all_is_complete(kafka, engine, dualwrite_topic, orders):
    with DualWriter(
        "orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1, idle_after_s=0.05)
    ) as writer:
        with writer.transaction() as tx:
            write(tx, dualwrite_topic, orders, 1)
        deadline = threading.Event()
        for _ in range(200):
            (item,) = status(kafka=kafka, database=engine)
            if item.row.completed is not None or deadline.wait(0.05):
                break
        assert item.row.completed.value == "committed"


@pytest.mark.parametrize("name", ["", "x" * 241, "a#1"])
def test_a_bad_transactional_id_is_refused(kafka, engine, name):
    with pytest.raises(ConfigurationError):
        DualWriter(name, kafka=kafka, database=engine)


def test_every_log_line_of_a_dual_write_names_its_id(writer, dualwrite_topic, orders, caplog):
    with caplog.at_level(logging.DEBUG, logger="dualwrite"):
        failpoints.arm("write.prepared:1:raise")
        with pytest.raises(FailpointError), writer.transaction() as tx:
            write(tx, dualwrite_topic, orders, 1)
    for record in caplog.records:
        if record.name.startswith("dualwrite"):
            assert "orders" in record.getMessage(), record.getMessage()
