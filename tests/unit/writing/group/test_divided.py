"""One dual write divided into units: each is kept or rolled back alone, with its messages, savepoints and session."""

from concurrent.futures import wait

import pytest
from harness.served import TOPIC
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from dualwrite import TransactionAborted, TransactionInDoubt
from dualwrite.errors import IllegalStateError
from dualwrite.stores.sql.savepoints import _UNIT
from unit.writing.group.held import Refused


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.mark.parametrize("failing", [(1,), (2,), (3,), (1, 2), (2, 3), (1, 2, 3)])
def test_a_unit_that_fails_is_rolled_back_alone(shop, held, failing):
    with held.together():
        futures = {n: held.put(n, error=Refused(n) if n in failing else None) for n in (1, 2, 3)}
    for number, future in futures.items():
        assert isinstance(future.exception(30), Refused) is (number in failing)
    assert shop.both_have(*sorted({1, 2, 3} - set(failing)))


def test_an_error_of_the_last_flush_is_the_units_own(shop, held):
    def twice(tx):
        tx.session.add(Order(id=1))
        tx.produce(TOPIC, "1", partition=0)

    with held.together():
        first, second, third = held.put(1), held.writer.submit(twice, key=2), held.put(3)
    first.result(30)
    third.result(30)
    assert "UNIQUE" in str(second.exception(30))
    assert shop.both_have(1, 3)


def test_each_unit_has_a_session_of_its_own(shop, held):
    sessions = []

    def unit(tx):
        sessions.append(tx.session)
        tx.session.add(order := Order(id=len(sessions)))
        return order

    with held.together():
        futures = [held.writer.submit(unit, key=number) for number in (1, 2)]
    assert [future.result(30).id for future in futures] == [1, 2]
    assert sessions[0] is not sessions[1]
    assert shop.rows == ["1", "2"]


def test_a_unit_whose_session_was_rolled_back_fails_even_if_it_goes_on(shop, held):
    """The message may be older than the savepoint of the session."""

    def unit(tx):
        tx.produce(TOPIC, "2", partition=0)
        tx.session.add(Order(id=1))
        with pytest.raises(IntegrityError):
            tx.session.flush()
        tx.session.rollback()
        tx.session.add(Order(id=2))

    def skips(tx):
        shop.put(tx, 4)
        with pytest.raises(IntegrityError), tx.session.begin_nested():
            tx.session.add(Order(id=1))

    with held.together():
        futures = [held.put(1), held.writer.submit(unit, key=2), held.put(3), held.writer.submit(skips, key=4)]
    assert "session of the unit was rolled back" in str(futures[1].exception(30))
    wait(futures)
    assert futures[3].exception() is None
    assert shop.both_have(1, 3, 4)


def test_savepoints_of_a_unit_are_its_own(shop, held):
    def unit(tx):
        shop.put(tx, 2)
        inner = tx.connection.begin_nested()
        shop.put(tx, 20)
        inner.rollback()
        tx.connection.begin_nested()  # left open: kept, as at the end of a block
        shop.put(tx, 3)

    def failing(tx):
        tx.connection.begin_nested()
        shop.put(tx, 4)
        raise Refused

    with held.together():
        futures = [held.put(1), held.writer.submit(unit, key=2), held.writer.submit(failing, key=3), held.put(5)]
    assert isinstance(futures[2].exception(30), Refused)
    wait(futures)
    assert shop.both_have(1, 2, 3, 5)


def test_the_transaction_of_a_unit_ends_with_it(shop, held):
    kept = []

    def unit(tx):
        kept.append(tx)
        shop.put(tx, 1)

    def other(tx):
        for use in (lambda: kept[0].connection, lambda: kept[0].session, lambda: kept[0].produce("t", "x")):
            with pytest.raises(IllegalStateError, match="ended"):
                use()
        shop.put(tx, 2)

    with held.together():
        futures = [held.writer.submit(unit, key=1), held.writer.submit(other, key=2)]
    for future in futures:
        future.result(30)
    assert shop.both_have(1, 2)
    assert kept[0].state.value == "completed"


KEPT = {
    "statement": lambda kept: kept.exec_driver_sql("INSERT INTO orders (id) VALUES (9)"),
    "savepoint": lambda kept: kept.begin_nested(),
    "rollback": lambda kept: kept.rollback(),
    "commit": lambda kept: kept.commit(),
    "close": lambda kept: kept.close(),
}


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("use", KEPT)
def test_the_connection_of_a_unit_ends_with_it(shop, held, use, fails):
    kept = []

    def unit(tx):
        kept.append(tx.connection)
        shop.put(tx, 1)
        if fails:
            raise Refused

    def other(tx):
        with pytest.raises(IllegalStateError, match="await or join all parts"):
            KEPT[use](kept[0])
        shop.put(tx, 2)

    with held.together():
        futures = [held.writer.submit(unit, key=1), held.writer.submit(other, key=2), held.put(3)]
    assert isinstance(futures[0].exception(30), Refused) is fails
    assert [future.exception(30) for future in futures[1:]] == [None, None]
    assert shop.both_have(*(() if fails else (1,)), 2, 3)


def test_a_session_that_outlives_its_unit_writes_nothing(shop, held):
    kept = []

    def unit(tx):
        kept.append(tx.session)
        shop.put(tx, 1)
        raise Refused

    def other(tx):
        kept[0].add(Order(id=9))
        with pytest.raises(IllegalStateError, match="ended"):
            kept[0].flush()
        shop.put(tx, 2)

    with held.together():
        futures = [held.writer.submit(unit, key=1), held.writer.submit(other, key=2)]
    assert isinstance(futures[0].exception(30), Refused)
    futures[1].result(30)
    assert shop.both_have(2)


def commit(tx):
    tx.connection.commit()


def rollback(tx):
    tx.connection.rollback()


@pytest.mark.parametrize("end", [commit, rollback])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_unit_that_ends_the_transaction_fails_and_the_others_run_again(shop, held, end, goes_on):
    runs = []

    def unit(tx):
        shop.put(tx, 2)
        try:
            end(tx)
        except IllegalStateError:
            if not goes_on:
                raise

    def counted(tx):
        runs.append(1)
        shop.put(tx, 1)

    with held.together():
        futures = [held.writer.submit(counted, key=1), held.writer.submit(unit, key=2), held.put(3)]
    assert isinstance(futures[1].exception(30), IllegalStateError | TransactionAborted)
    futures[0].result(30)
    futures[2].result(30)
    assert len(runs) == 2
    assert shop.both_have(1, 3)


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK", "RELEASE {unit}"])
def test_a_unit_that_ends_it_past_the_library_leaves_all_in_doubt(shop, held, statement):
    """The rows may be committed: what has run may not run again."""

    def unit(tx):
        shop.put(tx, 2)
        tx.connection.connection.dbapi_connection.execute(statement.format(unit=_UNIT))

    with held.together():
        futures = [held.put(1), held.writer.submit(unit, key=2), held.put(3)]
    errors = [future.exception(30) for future in futures]
    assert [type(error) for error in errors[:2]] == [TransactionInDoubt] * 2
    assert errors[2] is None  # it had not begun
    assert shop.messages == ["3"]


@pytest.mark.parametrize("past", [True, False])
def test_a_unit_with_a_savepoint_of_a_likely_name_is_rolled_back_whole(shop, held, past):
    def unit(tx):
        shop.put(tx, 2)
        connection = tx.connection.connection.dbapi_connection if past else tx.connection
        (connection.execute if past else connection.exec_driver_sql)("SAVEPOINT dualwrite_unit")
        raise Refused

    with held.together():
        futures = [held.put(1), held.writer.submit(unit, key=2), held.put(3)]
    assert isinstance(futures[1].exception(30), Refused)
    wait(futures, 30)
    assert shop.both_have(1, 3)


def test_a_refused_message_concerns_its_unit_alone(shop, held):
    def unit(tx):
        shop.put(tx, 2)
        with pytest.raises(TransactionAborted):
            tx.produce(TOPIC, b"x" * 20_000_000)

    with held.together():
        futures = [held.put(1), held.writer.submit(unit, key=2), held.put(3)]
    assert "continued after an error" in str(futures[1].exception(30))
    futures[0].result(30)
    futures[2].result(30)
    assert shop.both_have(1, 3)
