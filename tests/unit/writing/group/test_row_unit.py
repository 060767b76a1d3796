"""Units of rows: written together where their statement is the same, and still kept or rolled back one by one."""

import contextvars
import logging
from concurrent.futures import wait

import pytest
from confluent_kafka.error import ValueSerializationError
from harness.served import TOPIC
from sqlalchemy import Column, Integer, MetaData, Table, bindparam, delete, event, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from dualwrite import ConfigurationError, ProducerRecord, RowUnit, TransactionAborted, WriterLimits, failpoints
from dualwrite.writing import group_commit
from unit.writing.group.held import Held, Refused

ORDERS = Table("orders", MetaData(), Column("id", Integer, primary_key=True))
INSERT = insert(ORDERS)


def row(number, *, statement=INSERT, value=None):
    return RowUnit(statement, {"id": number}, messages=[ProducerRecord(TOPIC, value or str(number), partition=0)])


def rows(held, *numbers):
    return {number: held.writer.submit(row(number), key=number) for number in numbers}


@pytest.fixture
def executed(shop):
    """The statements on the orders, each with the number of its rows."""
    seen = []

    def note(_, __, statement, parameters, *___):
        if "orders" in statement and "CREATE" not in statement:
            seen.append(len(parameters) if isinstance(parameters, list) else 1)

    event.listen(shop.engine, "before_cursor_execute", note)
    yield seen
    event.remove(shop.engine, "before_cursor_execute", note)


def test_the_same_statement_writes_them_at_once(shop, held, executed):
    with held.together():
        futures = rows(held, 1, 2, 3)
    assert [future.result(30) for future in futures.values()] == [None] * 3
    assert executed == [3]
    assert held.sizes == [1, 3]
    assert shop.both_have(1, 2, 3)


def test_a_bare_insert_may_be_made_for_each(shop, held, executed):
    with held.together():
        wait([held.writer.submit(row(n, statement=insert(ORDERS)), key=n) for n in (1, 2)], 0)
    held.put(3).result(30)
    assert executed == [2, 1]
    assert shop.both_have(1, 2, 3)


def test_one_alone_is_a_plain_block(shop, held, executed):
    assert held.writer.submit(row(1)).result() is None
    assert executed == [1]
    assert shop.both_have(1)


def test_several_rows_of_one_unit(shop, held, executed):
    unit = RowUnit(INSERT, [{"id": 1}, {"id": 2}], messages=[ProducerRecord(TOPIC, "1,2", partition=0)])
    with held.together():
        futures = [held.writer.submit(unit, key=1), *rows(held, 3).values()]
    wait(futures, 30)
    assert executed == [3]
    assert shop.rows == ["1", "2", "3"]
    assert shop.messages == ["1,2", "3"]


@pytest.mark.parametrize("failing", [(1,), (2,), (3,), (1, 3), (1, 2, 3)])
def test_a_unit_whose_row_is_refused_fails_alone(shop, held, failing):
    for number in failing:
        shop.database.execute(f"INSERT INTO orders (id) VALUES ({number})")
    with held.together():
        futures = rows(held, 1, 2, 3)
    for number, future in futures.items():
        assert isinstance(future.exception(30), IntegrityError) is (number in failing)
    assert shop.rows == ["1", "2", "3"]
    assert shop.messages == [str(number) for number in (1, 2, 3) if number not in failing]


def test_a_duplicate_of_another_unit_fails_as_the_later_one(shop, held):
    with held.together():
        futures = [held.writer.submit(row(n), key=key) for key, n in enumerate((1, 2, 1, 3))]
    assert [type(future.exception(30)) for future in futures] == [type(None), type(None), IntegrityError, type(None)]
    assert shop.both_have(1, 2, 3)


def test_a_message_that_cannot_be_made_fails_its_unit_alone(shop):
    def serialize(value, _):
        if value == "2":
            raise Refused
        return value

    with shop.writer(serializers={"value": serialize}) as writer:
        held = Held(shop, writer)
        with held.together():
            futures = rows(held, 1, 2, 3)
        assert isinstance(futures[2].exception(30), ValueSerializationError)
        wait(futures.values(), 30)
    assert shop.both_have(1, 3)


def test_code_and_rows_keep_their_order(shop, held, executed):
    """Each later one sees the rows of the earlier ones, and its messages come after theirs."""
    counts = []

    def code(number):
        def unit(tx):
            counts.append(len(tx.connection.execute(select(ORDERS)).all()))
            shop.put(tx, number)

        return unit

    units = [row(1), row(2), code(3), row(4), code(5), row(6), row(7)]
    with held.together():
        futures = [held.writer.submit(unit) for unit in units]
    wait(futures, 30)
    assert counts == [2, 4]
    assert executed == [2, 1, 1, 1, 1, 1, 2]
    assert shop.both_have(*range(1, 8))


def test_units_of_one_thread_keep_their_order_if_one_of_them_fails(shop, held):
    shop.database.execute("INSERT INTO orders (id) VALUES (4)")
    with held.together():
        futures = [held.writer.submit(row(number)) for number in range(1, 8)]
    wait(futures, 30)
    assert shop.messages == ["1", "2", "3", "5", "6", "7"]


def test_different_statements_are_executed_one_by_one(shop, held, executed):
    other = text("INSERT INTO orders (id) VALUES (:id)")
    with held.together():
        units = [row(1), row(2, statement=other), row(3, statement=other), row(4)]
        futures = [held.writer.submit(unit) for unit in units]
    wait(futures, 30)
    assert executed == [1, 2, 1]
    assert shop.both_have(1, 2, 3, 4)


def test_updates_and_deletes(shop, held, executed):
    change = update(ORDERS).where(ORDERS.c.id == bindparam("old")).values(id=bindparam("new"))
    with held.together():
        futures = [held.writer.submit(RowUnit(INSERT, {"id": n})) for n in (1, 2, 3)]
        futures += [held.writer.submit(RowUnit(change, {"old": n, "new": 10 * n})) for n in (1, 2)]
        futures += [held.writer.submit(RowUnit(delete(ORDERS).where(ORDERS.c.id == 3)))]
    for future in futures:
        future.result(30)
    assert executed == [3, 2, 1]
    assert shop.rows == ["10", "20"]


def test_statements_with_other_values_are_not_mixed_up(shop, held):
    """Values that stand in the statement are no parameters."""
    with held.together():
        futures = [held.writer.submit(RowUnit(insert(ORDERS).values(id=n)), key=n) for n in (1, 2, 3)]
    for future in futures:
        future.result(30)
    assert shop.rows == ["1", "2", "3"]


def test_the_messages_of_each_unit_have_the_context_of_its_caller(shop):
    name = contextvars.ContextVar("name")
    with shop.writer(serializers={"value": lambda value, _: f"{value} of {name.get()}"}) as writer:
        held = Held(shop, writer)
        with held.together():
            futures = []
            for number in (1, 2):
                name.set(f"caller {number}")
                futures.append(held.writer.submit(row(number), key=number))
        for future in futures:
            future.result(30)
    assert shop.messages == ["1 of caller 1", "2 of caller 2"]


@pytest.mark.parametrize("limits", [WriterLimits(group_open_s=0.0), WriterLimits(group_bytes=0)])
def test_old_and_large_groups_take_no_more(shop, limits):
    with shop.writer(limits=limits) as writer:
        held = Held(shop, writer)
        with held.together():
            futures = rows(held, 1, 2, 3)
        wait(futures.values(), 30)
        assert held.sizes == [1, 1, 1, 1]
    assert shop.both_have(1, 2, 3)


def test_a_unit_given_up_before_is_left_out(shop, held, executed):
    with held.together():
        futures = rows(held, 1, 2, 3)
        assert futures[2].cancel()
    futures[1].result(30)
    futures[3].result(30)
    assert executed == [2]
    assert shop.both_have(1, 3)


def test_a_conflict_of_their_statement_runs_each_alone_and_again(shop, held, monkeypatch):
    """As after a deadlock: the savepoint takes back all of them, and the one that is still its victim runs again."""
    real, runs = group_commit.execute_rows, []

    def execute(units, transaction):
        runs.append([unit.rows[0]["id"] for unit in units])
        if len(units) > 1 or (runs[-1] == [2] and runs.count([2]) == 1):
            raise TransactionAborted("a deadlock")
        real(units, transaction)

    monkeypatch.setattr(group_commit, "execute_rows", execute)
    with held.together():
        futures = rows(held, 1, 2, 3)
    for future in futures.values():
        future.result(30)
    assert runs == [[1, 2, 3], [1], [2], [3], [2]]
    assert shop.messages == ["1", "3", "2"]
    assert shop.rows == ["1", "2", "3"]


def test_a_group_that_was_aborted_runs_again_each_alone(shop, held):
    with held.together():
        futures = rows(held, 1, 2, 3)
        failpoints.arm("group.units_done:2:raise")
    assert [future.exception(30) for future in futures.values()] == [None] * 3
    assert shop.both_have(1, 2, 3)


def test_a_unit_that_ended_its_transaction_leaves_no_row(shop, held, monkeypatch, caplog):
    """Nobody knows which unit it was: all of them run again, and the second time each alone."""
    caplog.set_level(logging.INFO)
    real, failures = group_commit.execute_rows, []

    def execute(units, transaction):
        real(units, transaction)
        if len(failures) < 2 and any(unit.rows[0]["id"] == 2 for unit in units):
            failures.append(len(units))
            transaction.connection.rollback()

    monkeypatch.setattr(group_commit, "execute_rows", execute)
    with held.together():
        futures = rows(held, 1, 2, 3)
    found = [future.exception(30) for future in futures.values()]
    assert [type(one) for one in found] == [type(None), TransactionAborted, type(None)], found
    assert shop.both_have(1, 3)


@pytest.mark.parametrize(
    "statement",
    [
        select(ORDERS),
        text("SELECT 1"),
        text("COMMIT"),
        text("WITH x AS (SELECT 1) SELECT * FROM x"),
        insert(ORDERS).returning(ORDERS.c.id),
        text("INSERT INTO orders (id) VALUES (1) RETURNING id"),
        "INSERT INTO orders (id) VALUES (1)",
    ],
)
def test_what_returns_rows_or_writes_none_is_refused(statement):
    with pytest.raises(ConfigurationError, match="the statement of a RowUnit"):
        RowUnit(statement)


@pytest.mark.parametrize("parameters", [[], [{"id": 1}, {"id": 2, "other": 3}]])
def test_parameters_that_cannot_be_used_are_refused(parameters):
    with pytest.raises(ConfigurationError, match="a RowUnit ha"):
        RowUnit(INSERT, parameters)


def test_a_message_of_another_type_is_refused():
    with pytest.raises(ConfigurationError, match="tuple is no message"):
        RowUnit(INSERT, {"id": 1}, messages=[(TOPIC, "x")])


def test_other_names_of_parameters_do_not_go_together(shop, held):
    """SQLAlchemy would leave out what the first of them does not have."""
    statement = text("INSERT INTO orders (id) VALUES (:id)")
    first, second = RowUnit(statement, {"id": 1}), RowUnit(statement, {"id": 2, "more": 3})
    assert not first.goes_with(second)
    assert first.goes_with(RowUnit(statement, {"id": 3}))


def test_the_callers_parameters_may_change_afterwards(shop, held):
    parameters = {"id": 1}
    unit = RowUnit(INSERT, parameters)
    parameters["id"] = 2
    held.writer.submit(unit).result()
    assert shop.rows == ["1"]
