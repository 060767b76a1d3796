"""Conflicts of a dual write in the database: deadlocks, serialization failures, an exhausted pool."""

import threading

import pytest
from sqlalchemy import create_engine, exc, insert, select, text, update

from dualwrite import DualWriter, TransactionAborted, Unavailable
from dualwrite.testing.reading import read_committed

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


def retried(work):
    """The retry of the recipes; returns the errors that it has survived."""
    survived = []
    for _ in range(5):
        try:
            work(len(survived))
        except TransactionAborted as error:
            if not error.retryable:
                raise
            survived.append(error)
        else:
            break
    return survived


def test_a_deadlock_of_two_dual_writes_is_survived_by_the_retry(
    kafka, engine, dualwrite_topic, orders, notes, messages
):
    both_hold_one = threading.Barrier(2)
    survived = {}
    with DualWriter("orders", kafka=kafka, engine=engine) as writer:

        def write(letter, first, second):
            def attempt(number):
                with writer.transaction() as tx:
                    tx.connection.execute(appended(orders, first, letter))
                    tx.produce(dualwrite_topic, value=letter)
                    if not number:
                        both_hold_one.wait(120)
                    tx.connection.execute(appended(orders, second, letter))

            survived[letter] = retried(attempt)

        threads = [threading.Thread(target=write, args=args) for args in (("a", 1, 2), ("b", 2, 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    errors = survived["a"] + survived["b"]
    assert errors, "PostgreSQL has seen no deadlock"
    for error in errors:
        assert "deadlock detected" in str(error)
        assert isinstance(error.__cause__, exc.OperationalError)
    assert [sorted(note) for note in notes()] == [["a", "b"]] * 2
    assert messages() == ["a", "b"]


def test_a_serialization_failure_of_a_statement_is_retryable_outside_the_block_and_the_drivers_inside(
    kafka, engine, dualwrite_topic, orders, notes, messages
):
    seen_inside = []
    repeatable = engine.execution_options(isolation_level="REPEATABLE READ")
    with DualWriter("orders", kafka=kafka, engine=repeatable) as writer:

        def attempt(number):
            with writer.transaction() as tx:
                tx.produce(dualwrite_topic, value=f"attempt {number}")
                tx.connection.execute(select(orders)).all()
                if not number:
                    with engine.begin() as other:
                        other.execute(appended(orders, 1, "other "))
                try:
                    tx.connection.execute(appended(orders, 1, "ours"))
                except exc.DBAPIError as error:
                    seen_inside.append(error)
                    raise

        (survived,) = retried(attempt)
    assert [survived.__cause__] == seen_inside
    assert notes()[0] == "other ours"
    assert messages() == ["attempt 1"]


def test_other_errors_of_the_users_statements_leave_the_block_as_they_are(kafka, engine, orders, notes):
    with (
        DualWriter("orders", kafka=kafka, engine=engine) as writer,
        engine.begin() as other,
    ):
        other.execute(appended(orders, 1, "held"))
        with pytest.raises(exc.OperationalError, match="could not obtain lock"), writer.transaction() as tx:
            tx.connection.execute(text("SELECT * FROM orders WHERE id = 1 FOR UPDATE NOWAIT"))


def test_an_exhausted_pool_is_named_with_what_to_do(kafka, url, engine):
    small = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    try:
        with (
            DualWriter("orders", kafka=kafka, engine=small, max_lanes=1) as writer,
            small.connect(),
            pytest.raises(Unavailable, match=r"QueuePool limit .*pool_size or max_overflow"),
            writer.transaction(),
        ):
            pass
    finally:
        small.dispose()
