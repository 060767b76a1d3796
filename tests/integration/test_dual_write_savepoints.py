"""Savepoints inside a dual write: rows and messages of what is rolled back are on neither side."""

from contextlib import nullcontext

import pytest
from confluent_kafka import Consumer, TopicPartition
from harness.orders import Order, on_both, on_postgresql
from sqlalchemy import insert, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from dualwrite import DualWriter, TransactionAborted
from dualwrite.errors import IllegalStateError
from dualwrite.stores.sql import savepoints
from dualwrite.testing.checker import read_committed


@pytest.fixture
def both(engine, orders, kafka, dualwrite_topic):
    """The state that both sides show."""

    def read():
        with engine.connect() as connection:
            rows = list(connection.scalars(select(orders.c.note).order_by(orders.c.id)))
        return rows, [message.value.decode() for message in read_committed(kafka, dualwrite_topic)]

    return read


def add_by_session(tx, orders, number, note):
    tx.session.add(Order(id=number, note=note))


def add_by_connection(tx, orders, number, note):
    tx.connection.execute(insert(orders).values(id=number, note=note))


@pytest.mark.parametrize("add", [add_by_session, add_by_connection])
@on_both
def test_insert_or_skip(writer, dualwrite_topic, orders, both, add):
    def insert_or_skip(tx, number, note):
        savepoint = tx.session.begin_nested if add is add_by_session else tx.connection.begin_nested
        try:
            with savepoint():
                tx.produce(dualwrite_topic, value=note, partition=0)
                add(tx, orders, number, note)
        except IntegrityError:
            return False
        return True

    for number, note, is_new in ((1, "first", True), (1, "again", False), (2, "second", True)):
        with writer.transaction() as tx:
            assert insert_or_skip(tx, number, note) is is_new
    with writer.transaction() as tx:
        assert [insert_or_skip(tx, *order) for order in ((3, "a"), (1, "b"), (4, "c"))] == [True, False, True]
    assert both() == (["first", "second", "a", "c"], ["first", "second", "a", "c"])


@on_both
def test_messages_of_nested_savepoints_are_sent_in_their_order_and_dropped_with_the_outer_one(
    writer, dualwrite_topic, orders, both
):
    delivered = []

    def write(tx, number):
        def note(error, message):
            delivered.append((error, message.value()))

        tx.produce(dualwrite_topic, value=str(number), partition=0, on_delivery=note)
        tx.connection.execute(insert(orders).values(id=number, note=str(number)))

    with writer.transaction() as tx:
        write(tx, 1)
        with tx.connection.begin_nested():
            write(tx, 2)
            with tx.connection.begin_nested() as inner:
                write(tx, 3)
                inner.rollback()
            tx.connection.execute(text("SAVEPOINT mine"))
            tx.produce_many(dualwrite_topic, ["no", "never"])
            write(tx, 4)
            tx.connection.execute(text("ROLLBACK TO SAVEPOINT mine"))
            write(tx, 5)
            tx.connection.execute(text("RELEASE SAVEPOINT mine"))
        outer = tx.connection.begin_nested()
        with tx.connection.begin_nested():
            write(tx, 6)
        outer.rollback()
        tx.connection.begin_nested()
        write(tx, 7)  # still open when the block ends: COMMIT takes its rows
    assert both() == (["1", "2", "5", "7"], ["1", "2", "5", "7"])
    assert delivered == [(None, number.encode()) for number in ("1", "2", "5", "7")]


@on_both
def test_a_session_of_the_users_opens_its_savepoint_before_the_message_not_with_its_next_statement(
    writer, dualwrite_topic, both
):
    with writer.transaction() as tx:
        session = Session(bind=tx.connection)
        with pytest.raises(ZeroDivisionError), session.begin_nested():
            tx.produce(dualwrite_topic, value="1")
            session.add(Order(id=1))
            session.flush()
            raise ZeroDivisionError
        session.close()
    assert both() == ([], [])


@on_postgresql
@pytest.mark.parametrize("rolled_back", [True, False])
def test_offsets_go_with_their_savepoint(kafka, writer, dualwrite_topic, rolled_back):
    consumer = Consumer({**kafka, "group.id": dualwrite_topic, "enable.auto.commit": False})
    offsets = [TopicPartition(dualwrite_topic, 0, 5)]
    with writer.transaction() as tx:
        savepoint = tx.connection.begin_nested()
        tx.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata())
        if rolled_back:
            savepoint.rollback()
    (found,) = consumer.committed(offsets, timeout=60)
    consumer.close()
    assert (found.offset == 5) is not rolled_back


@on_postgresql
def test_a_savepoint_that_the_library_cannot_see_aborts_both(writer, dualwrite_topic, orders, both):
    with pytest.raises(TransactionAborted, match="past SQLAlchemy") as caught, writer.transaction() as tx:
        tx.produce(dualwrite_topic, value="1")
        with tx.connection.connection.driver_connection.transaction(force_rollback=True):
            tx.connection.execute(insert(orders).values(id=1, note="1"))
            tx.produce(dualwrite_topic, value="2")
    assert not caught.value.retryable
    with writer.transaction() as tx:
        add_by_connection(tx, orders, 3, "3")
        tx.produce(dualwrite_topic, value="3")
    assert both() == (["3"], ["3"])


@on_postgresql
def test_sessions_that_are_first_possible_inside_the_block_abort_it_once(
    writer, dualwrite_topic, orders, both, monkeypatch
):
    orm = savepoints._ORM
    monkeypatch.setattr(savepoints, "_ORM", "not imported")
    with (
        pytest.raises(
            TransactionAborted, match=r"continued after an error: sqlalchemy\.orm was imported inside"
        ) as caught,
        writer.transaction() as tx,
    ):
        add_by_connection(tx, orders, 1, "1")
        tx.produce(dualwrite_topic, value="1")
        monkeypatch.setattr(savepoints, "_ORM", orm)
        with pytest.raises(TransactionAborted, match="a savepoint may have been missed"):
            tx.produce(dualwrite_topic, value="2")
    assert caught.value.retryable
    monkeypatch.setattr(savepoints, "_ORM", "not imported")
    with writer.transaction() as tx:
        tx.session.add(Order(id=1, note="1"))  # the block's own session is no surprise
        monkeypatch.setattr(savepoints, "_ORM", orm)
        tx.produce(dualwrite_topic, value="1")
    assert both() == (["1"], ["1"])


@pytest.mark.parametrize("kept", [True, False])
@on_both
def test_what_the_producer_would_refuse_is_refused_inside_the_savepoint(writer, dualwrite_topic, orders, both, kept):
    """Nothing that is known to fail waits; and once it has failed, both sides abort whatever becomes of the savepoint."""
    with (
        pytest.raises(TransactionAborted, match="continued after an error: .*MESSAGE_TOO_LARGE"),
        writer.transaction() as tx,
    ):
        add_by_connection(tx, orders, 1, "1")
        savepoint = tx.connection.begin_nested()
        with pytest.raises(TransactionAborted, match="MESSAGE_TOO_LARGE"):
            tx.produce(dualwrite_topic, value=b"x" * 1_000_001)
        (savepoint.commit if kept else savepoint.rollback)()
    with pytest.raises(ValueError, match="2 values, 1 keys"), writer.transaction() as tx, tx.connection.begin_nested():
        tx.produce_many(dualwrite_topic, ["1", "2"], ["1"])
    assert both() == ([], [])


@on_postgresql
def test_bulk_mode_refuses_on_delivery_inside_a_savepoint_too(kafka, engine, dualwrite_topic):
    with (
        DualWriter("orders", kafka={**kafka, "dualwrite.bulk": True}, database=engine) as writer,
        writer.transaction() as tx,
        tx.connection.begin_nested(),
        pytest.raises(IllegalStateError, match="on_delivery"),
    ):
        tx.produce(dualwrite_topic, value="1", on_delivery=print)


@on_both
def test_a_connection_of_the_users_is_free_after_the_block(writer, engine, dualwrite_topic, orders, both):
    with engine.connect() as connection:
        for end in ("normal", "error"):
            with (
                pytest.raises(ZeroDivisionError) if end == "error" else nullcontext(),
                writer.transaction(connection) as tx,
            ):
                with connection.begin_nested():
                    add_by_connection(tx, orders, len(end), end)
                    tx.produce(dualwrite_topic, value=end)
                if end == "error":
                    raise ZeroDivisionError
        assert "wait" not in getattr(connection.connection.driver_connection, "__dict__", {})
        for listeners in (connection.dispatch.before_cursor_execute, connection.dispatch.after_cursor_execute):
            assert len(list(listeners)) == (connection.dialect.name == "sqlite"), "however many blocks it has served"
        connection.execute(orders.insert().values(id=1, note="on its own"))
        connection.commit()
    rows, messages = both()
    assert (sorted(rows), messages) == (["normal", "on its own"], ["normal"])
