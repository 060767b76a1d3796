"""Conflicts of a dual write in the database: deadlocks, serialization failures, an exhausted pool."""

import logging
import threading

import pytest
from sqlalchemy import create_engine, exc, insert, select, text, update

from dualwrite import DualWriter, TransactionAborted, Unavailable, WriterLimits
from dualwrite.testing.checker import read_committed

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


@pytest.fixture
def messages(kafka, dualwrite_topic):
    return lambda: sorted(message.value.decode() for message in read_committed(kafka, dualwrite_topic))


@pytest.fixture
def notes(engine, orders):
    with engine.begin() as connection:
        connection.execute(insert(orders), [{"id": 1, "note": ""}, {"id": 2, "note": ""}])

    def read():
        with engine.connect() as connection:
            return list(connection.scalars(select(orders.c.note).order_by(orders.c.id)))

    return read


def appended(orders, number, letter):
    return update(orders).where(orders.c.id == number).values(note=orders.c.note + letter)


@pytest.fixture
def survived(caplog):
    """The attempts of ``writer.run`` that failed and were followed by another one, as the log tells them."""
    caplog.set_level(logging.INFO, "dualwrite.writing.work")
    return lambda: [one.getMessage() for one in caplog.records if "run again in" in one.getMessage()]


def test_a_deadlock_of_two_dual_writes_is_survived_by_running_one_again(
    kafka, engine, dualwrite_topic, orders, notes, messages, survived
):
    both_hold_one = threading.Barrier(2)
    with DualWriter("orders", kafka=kafka, database=engine) as writer:

        def write(letter, first, second):
            runs = []

            def work(tx):
                runs.append(tx)
                tx.connection.execute(appended(orders, first, letter))
                tx.produce(dualwrite_topic, value=letter)
                if len(runs) == 1:
                    both_hold_one.wait(120)
                tx.connection.execute(appended(orders, second, letter))

            writer.run(work)

        threads = [threading.Thread(target=write, args=args) for args in (("a", 1, 2), ("b", 2, 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert survived(), "PostgreSQL has seen no deadlock"
    assert all("deadlock detected" in message for message in survived())
    assert [sorted(note) for note in notes()] == [["a", "b"]] * 2
    assert messages() == ["a", "b"]


def test_a_serialization_failure_of_a_statement_is_the_drivers_inside_the_work_which_runs_again(
    kafka, engine, dualwrite_topic, orders, notes, messages, survived
):
    seen_inside = []
    repeatable = engine.execution_options(isolation_level="REPEATABLE READ")
    with DualWriter("orders", kafka=kafka, database=repeatable) as writer:

        def work(tx):
            tx.produce(dualwrite_topic, value=f"after {len(seen_inside)}")
            tx.connection.execute(select(orders)).all()
            if not seen_inside:
                with engine.begin() as other:
                    other.execute(appended(orders, 1, "other "))
            try:
                tx.connection.execute(appended(orders, 1, "ours"))
            except exc.DBAPIError as error:
                seen_inside.append(error)
                raise

        writer.run(work)
    assert len(seen_inside) == len(survived()) == 1
    assert notes()[0] == "other ours"
    assert messages() == ["after 1"]


def test_a_serialization_failure_of_commit_runs_the_work_again(
    kafka, engine, dualwrite_topic, orders, notes, messages, survived
):
    serializable = engine.execution_options(isolation_level="SERIALIZABLE")
    runs = []
    with DualWriter("orders", kafka=kafka, database=serializable) as writer:

        def work(tx):
            runs.append(tx)
            tx.produce(dualwrite_topic, value=f"run {len(runs)}")
            tx.connection.scalar(select(orders.c.note).where(orders.c.id == 1))
            if len(runs) == 1:
                with serializable.begin() as other:
                    other.scalar(select(orders.c.note).where(orders.c.id == 2))
                    other.execute(appended(orders, 1, "other"))
            tx.connection.execute(appended(orders, 2, "ours"))

        writer.run(work)
    assert len(runs) == 2
    [said] = survived()
    assert "TransactionAborted" in said
    assert notes() == ["other", "ours"]
    assert messages() == ["run 2"]


def test_a_conflict_leaves_a_block_as_an_error_that_names_it(kafka, engine, dualwrite_topic, orders, notes, messages):
    repeatable = engine.execution_options(isolation_level="REPEATABLE READ")
    with (
        DualWriter("orders", kafka=kafka, database=repeatable) as writer,
        pytest.raises(TransactionAborted, match="could not serialize access") as raised,
        writer.transaction() as tx,
    ):
        tx.produce(dualwrite_topic, value="never")
        tx.connection.execute(select(orders)).all()
        with engine.begin() as other:
            other.execute(appended(orders, 1, "other"))
        tx.connection.execute(appended(orders, 1, "ours"))
    assert raised.value.retryable
    assert isinstance(raised.value.__cause__, exc.OperationalError)
    assert messages() == []


def test_other_errors_of_the_users_statements_leave_the_block_as_they_are(kafka, engine, orders, notes):
    with (
        DualWriter("orders", kafka=kafka, database=engine) as writer,
        engine.begin() as other,
    ):
        other.execute(appended(orders, 1, "held"))
        with pytest.raises(exc.OperationalError, match="could not obtain lock"), writer.transaction() as tx:
            tx.connection.execute(text("SELECT * FROM orders WHERE id = 1 FOR UPDATE NOWAIT"))


def test_an_exhausted_pool_is_named_with_what_to_do(kafka, url, engine):
    small = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    try:
        with (
            DualWriter("orders", kafka=kafka, database=small, limits=WriterLimits(max_lanes=1)) as writer,
            small.connect(),
            pytest.raises(Unavailable, match=r"QueuePool limit .*pool_size or max_overflow"),
            writer.transaction(),
        ):
            pass
    finally:
        small.dispose()
