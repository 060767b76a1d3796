"""Group commit on real servers: each unit whole or not at all, in its caller's order, whatever becomes of its group."""

import asyncio
import itertools
import threading
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial

import pytest
from harness.checker import Case
from harness.orders import Order, on_both, on_each, on_postgresql
from harness.page_examples import Base, example, run_example
from harness.patience import wait_until
from sqlalchemy import bindparam, create_engine, insert, select, text, update
from sqlalchemy.event import listen
from sqlalchemy.exc import IntegrityError, OperationalError

from dualwrite import (
    AsyncDualWriter,
    DualWriter,
    ProducerRecord,
    RowUnit,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
    WriterLimits,
    recover,
)
from dualwrite.errors import IllegalStateError
from dualwrite.stores.sql.savepoints import _UNIT
from dualwrite.testing.checker import read_committed
from dualwrite.testing.proxy import PostgresProxy


class Refused(Exception):
    """Raised by a unit."""


@contextmanager
def together(writer):
    """The units that are submitted here become groups of as many as a group takes."""
    may_go, begun = threading.Event(), threading.Event()

    def first(_):
        begun.set()
        may_go.wait(60)

    blocking = writer.submit(first, key="first of a test")
    begun.wait(60)
    yield
    may_go.set()
    blocking.result(60)


@pytest.fixture
def submit(writer, dualwrite_topic, orders):
    def submit(number, *, then=None, key=None):
        def unit(tx):
            tx.produce(dualwrite_topic, value=str(number), key="k")
            tx.connection.execute(insert(orders).values(id=number))
            if then is not None:
                then(tx)
            return number

        return writer.submit(unit, key=number if key is None else key)

    return submit


@on_each
def test_each_unit_is_whole_or_nowhere(writer, submit, both):
    def fail(_):
        raise Refused

    def duplicate(tx):
        tx.connection.execute(insert(Order.__table__).values(id=1))

    def flush_fails(tx):
        tx.session.add(Order(id=1))

    with together(writer):
        good = [submit(number) for number in (1, 2, 3)]
        bad = [submit(4, then=fail), submit(5, then=duplicate), submit(6, then=flush_fails)]
        good.append(submit(7))
    assert [future.result(60) for future in good] == [1, 2, 3, 7]
    assert [type(future.exception(60)) for future in bad] == [Refused, IntegrityError, IntegrityError]
    assert both() == ([1, 2, 3, 7], [1, 2, 3, 7])


@on_each
def test_each_unit_of_rows_is_whole_or_nowhere(writer, dualwrite_topic, orders, both):
    def unit(number):
        return RowUnit(insert(orders), {"id": number}, messages=[ProducerRecord(dualwrite_topic, str(number))])

    with together(writer):
        good = [writer.submit(unit(number), key=number) for number in (1, 2, 3)]
        bad = writer.submit(unit(2), key="again")
        good.append(writer.submit(unit(4), key=4))
    assert [future.result(60) for future in good] == [None] * 4
    assert isinstance(bad.exception(60), IntegrityError)
    assert both() == ([1, 2, 3, 4], [1, 2, 3, 4])


@on_postgresql
def test_a_unit_that_swallows_a_failed_statement_fails_alone(writer, submit, both):
    def swallow(tx):
        with pytest.raises(IntegrityError):
            tx.connection.execute(insert(Order.__table__).values(id=1))

    with together(writer):
        futures = [submit(1), submit(2, then=swallow), submit(3)]
    assert "a statement failed" in str(futures[1].exception(60))
    wait(futures, 60)
    assert both() == ([1, 3], [1, 3])


@on_postgresql
@pytest.mark.parametrize("past", ["ROLLBACK TO SAVEPOINT {unit}", "SAVEPOINT own; SELECT 1; ROLLBACK TO SAVEPOINT own"])
def test_what_a_unit_does_past_the_library_concerns_it_alone(writer, submit, both, past):
    """Whether a message belongs to rows that are gone can be found out, or the unit is rolled back."""

    def undo(tx):
        for statement in past.format(unit=_UNIT).split("; "):
            tx.connection.connection.dbapi_connection.execute(statement)

    with together(writer):
        futures = [submit(1), submit(2, then=undo), submit(3)]
    wait(futures, 60)
    rows, messages = both()
    assert rows == messages
    assert {1, 3} <= set(rows)


@on_postgresql
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN", "COMMIT; SELECT 1 / 0"])
@pytest.mark.parametrize("last", [True, False])
def test_no_unit_runs_again_after_one_that_may_have_committed(writer, submit, both, end, last):
    runs = []

    def end_it(tx):
        for statement in end.split("; "):
            tx.connection.exec_driver_sql(statement)

    def counted(_):
        runs.append(1)

    with together(writer):
        futures = [submit(1, then=counted), submit(2, then=end_it)] + ([] if last else [submit(3)])
    assert [type(future.exception(60)) for future in futures[:2]] == [TransactionInDoubt] * 2
    assert runs == [1]
    wait(futures, 60)
    assert 1 not in both()[1]


@on_postgresql
def test_a_unit_that_loses_the_connection_fails_and_the_others_run_again(writer, submit, both):
    runs = []

    def lose(tx):
        tx.connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with together(writer):
        futures = [submit(1, then=lambda _: runs.append(1)), submit(2, then=lose), submit(3)]
    assert isinstance(futures[1].exception(60), OperationalError)
    assert futures[0].result(60) == 1
    assert futures[2].result(60) == 3
    assert len(runs) == 2
    assert both() == ([1, 3], [1, 3])


@on_postgresql
def test_a_constraint_deferred_to_commit_fails_its_unit_alone(writer, submit, engine, both):
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE once (n integer UNIQUE DEFERRABLE INITIALLY DEFERRED)"))

    def twice(tx):
        tx.connection.execute(text("INSERT INTO once VALUES (1), (1)"))

    with together(writer):
        futures = [submit(1), submit(2, then=twice), submit(3)]
    assert "deferred to COMMIT" in str(futures[1].exception(60))
    wait(futures, 60)
    assert both() == ([1, 3], [1, 3])


@on_postgresql
@pytest.mark.parametrize("resolved", [True, False])
def test_a_lost_answer_to_the_commit(
    monkeypatch, kafka, url, dualwrite_postgres, dualwrite_topic, engine, both, resolved
):
    """Resolved, every caller has its result; otherwise every unit gets the doubt."""
    runs = []
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url))
        with DualWriter("orders", kafka=kafka, database=through) as writer:

            def submit(number):
                def unit(tx):
                    runs.append(number)
                    tx.produce(dualwrite_topic, value=str(number))
                    tx.connection.execute(insert(Order.__table__).values(id=number))

                return writer.submit(unit, key=number)

            def unresolved(*_):
                raise Unavailable("nobody answers")

            # The first group is empty, and ends by COMMIT, too.
            lost = proxy.on("COMMIT", nth=2).reset_answer()
            if not resolved:  # before the group runs: it may ask at once
                monkeypatch.setattr("dualwrite.recovery.in_doubt.resolve_commit", unresolved)
            with together(writer):
                futures = [submit(number) for number in (1, 2, 3)]
            lost.wait_answered()
            wait(futures, 60)
            monkeypatch.undo()
        through.dispose()
    assert {type(future.exception()) for future in futures} == {type(None) if resolved else TransactionInDoubt}
    assert runs == [1, 2, 3]
    recover(kafka=kafka, database=engine, open_for_s=0)
    assert both() == ([1, 2, 3], [1, 2, 3])


@on_each
def test_the_units_of_many_callers_keep_the_order_of_each(kafka, engine, dualwrite_topic, orders, both):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(group_units=7)) as writer:

        def caller(first):
            futures = []
            for number in range(first, first + 25):

                def unit(tx, number=number):
                    tx.produce(dualwrite_topic, value=str(number), partition=0)
                    tx.connection.execute(insert(orders).values(id=number))
                    if number % 10 == 4:
                        raise Refused

                futures.append(writer.submit(unit))
            wait(futures, 60)

        threads = [threading.Thread(target=caller, args=(100 * n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows, messages = both()
    assert rows == messages
    assert len(rows) == 6 * 22
    seen = [int(message.value) for message in read_committed(kafka, dualwrite_topic)]
    for first in range(0, 600, 100):
        mine = [number for number in seen if first <= number < first + 100]
        assert mine == sorted(mine)


@on_postgresql
def test_a_serialization_failure_runs_its_unit_again(kafka, url, dualwrite_topic, orders, engine, both):
    serializable = create_engine(url, isolation_level="SERIALIZABLE")
    runs = []
    with DualWriter("orders", kafka=kafka, database=serializable) as writer:

        def conflicted(tx):
            runs.append(1)
            count = len(tx.connection.execute(select(orders.c.id)).all())
            if len(runs) == 1:
                with engine.connect().execution_options(isolation_level="SERIALIZABLE") as other, other.begin():
                    other.execute(select(orders.c.id)).all()
                    other.execute(insert(orders).values(id=1))
            tx.connection.execute(insert(orders).values(id=10 + count))
            tx.produce(dualwrite_topic, value=str(10 + count))

        with together(writer):
            futures = [writer.submit(lambda _: None, key=0), writer.submit(conflicted, key=1)]
        wait(futures, 60)
        assert all(future.exception() is None for future in futures)
    serializable.dispose()
    assert both() == ([1, 11], [11])


@on_postgresql
def test_units_of_rows_survive_a_deadlock(kafka, engine_of, url, engine, dualwrite_topic, orders, both):
    """Another transaction locks the same rows in the opposite order; the server ends the statement of the group."""
    change = update(orders).where(orders.c.id == bindparam("old")).values(id=bindparam("new"))
    mine, executed = engine_of(url, connect_args={"options": "-c deadlock_timeout=2s"}), []
    listen(mine, "before_cursor_execute", lambda *args: executed.append(args[5]) if "UPDATE orders" in args[2] else 0)

    def unit(old, new):
        return RowUnit(change, {"old": old, "new": new}, messages=[ProducerRecord(dualwrite_topic, str(new))])

    with engine.begin() as connection:
        connection.execute(insert(orders), [{"id": number} for number in (1, 2, 3)])
    limits = WriterLimits(group_open_s=60)
    with (
        DualWriter("orders", kafka=kafka, database=mine, limits=limits) as writer,
        engine.connect() as other,
    ):
        other.execute(text("SET deadlock_timeout = '1h'"))  # so that it is never the victim
        other.execute(change, {"old": 2, "new": 2})
        with together(writer):
            futures = [writer.submit(unit(number, 10 + number), key=number) for number in (1, 2, 3)]
        with engine.connect() as looking:
            wait_until(lambda: looking.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")))
        other.execute(change, {"old": 1, "new": 1})
        other.rollback()
        assert [future.result(60) for future in futures] == [None] * 3
    assert executed == [True, False, False, False]
    assert both() == ([11, 12, 13], [11, 12, 13])


@on_both
def test_the_units_of_tasks(kafka, url, engine, dualwrite_topic, orders, both):
    pytest.importorskip("aiosqlite")

    async def main():
        async with AsyncDualWriter("orders", kafka=kafka, database=url) as writer:

            def unit(number):
                async def work(tx):
                    await tx.produce(dualwrite_topic, value=str(number))
                    if number % 2:
                        await tx.connection.execute(insert(orders).values(id=number))
                    else:
                        tx.session.add(Order(id=number))
                    if number % 5 == 4:
                        await tx.connection.execute(insert(orders).values(id=number))

                return work

            return await asyncio.gather(*(writer.submit(unit(n)) for n in range(20)), return_exceptions=True)

    found = asyncio.run(main())
    assert [number for number, error in enumerate(found) if isinstance(error, IntegrityError)] == [4, 9, 14, 19]
    expected = [number for number in range(20) if number % 5 != 4]
    assert both() == (expected, expected)


@on_both
def test_the_units_of_rows_of_tasks(kafka, url, dualwrite_topic, orders, both):
    pytest.importorskip("aiosqlite")

    async def main():
        async with AsyncDualWriter("orders", kafka=kafka, database=url) as writer:

            def unit(number):
                row = {"id": 3 if number == 7 else number}
                return RowUnit(insert(orders), row, messages=[ProducerRecord(dualwrite_topic, str(number))])

            return await asyncio.gather(*(writer.submit(unit(n)) for n in range(20)), return_exceptions=True)

    found = asyncio.run(main())
    assert [number for number, error in enumerate(found) if isinstance(error, IntegrityError)] == [7]
    assert [one for one in found if one is not None] == [found[7]]
    expected = [number for number in range(20) if number != 7]
    assert both() == (expected, expected)


@on_postgresql
@pytest.mark.parametrize("producer_engine", ["native", "librdkafka"])
def test_a_message_that_waits_has_the_headers_of_its_call(kafka, engine, dualwrite_topic, orders, producer_engine):
    """In a savepoint, in a unit, and in a unit of rows. The caller uses its own dict or list again."""

    def produced(tx, first):
        by_name, pairs = {}, [["seq", ""]]
        for number in (first, first + 1):
            by_name["seq"] = pairs[0][1] = str(number)
            tx.produce(dualwrite_topic, value=str(number), headers=by_name)
            tx.produce(dualwrite_topic, value=str(number), headers=pairs)

    def in_savepoint(tx):
        with tx.connection.begin_nested():
            produced(tx, 20)

    with DualWriter("orders", kafka={**kafka, "dualwrite.engine": producer_engine}, database=engine) as writer:
        with writer.transaction() as tx:
            in_savepoint(tx)
        headers = [("seq", "")]
        with together(writer):
            futures = [writer.submit(partial(produced, first=first), key=first) for first in (30, 40)]
            for number in (50, 51):
                headers[:] = [("seq", str(number))]
                record = ProducerRecord(dualwrite_topic, str(number), headers=headers)
                futures.append(writer.submit(RowUnit(insert(orders), {"id": number}, messages=[record]), key=number))
        wait(futures, 60)
    found = [(message.value, dict(message.headers)["seq"]) for message in read_committed(kafka, dualwrite_topic)]
    assert len(found) == 14
    assert [value for value, seq in found] == [seq for value, seq in found]


@on_postgresql
def test_a_topic_that_no_broker_knows_concerns_its_unit_alone(writer, submit, dualwrite_topic, both):
    """The others of its group neither wait for it nor run again."""
    runs, tries = [], []

    def misspelt(tx):
        tries.append(tx)
        tx.produce(f"{dualwrite_topic}-misspelt", value="x")

    with together(writer):
        futures = [submit(number, then=runs.append) for number in (1, 2)]
        wrong = writer.submit(misspelt, key="wrong")
    assert "no broker knows the topic" in str(wrong.exception(60))
    assert [future.result(60) for future in futures] == [1, 2]
    assert (len(runs), len(tries)) == (2, 5)
    assert both() == ([1, 2], [1, 2])


@on_postgresql
@pytest.mark.parametrize("alone", [True, False])
def test_a_topic_that_appears_is_found_when_its_unit_runs_again(
    writer, submit, dualwrite_kafka, dualwrite_topic, kafka, alone
):
    name, tries = f"{dualwrite_topic}-late", []

    def early(tx):
        tries.append(tx)
        try:
            tx.produce(name, value="x")
        except TransactionAborted:
            if len(tries) == 1:
                dualwrite_kafka.create_topic(name, 1)
            raise

    if alone:
        writer.submit(early).result(60)
    else:
        with together(writer):
            futures = [submit(1), writer.submit(early, key="early")]
        wait(futures, 60)
    assert len(tries) > 1
    assert [message.value for message in read_committed(kafka, name)] == [b"x"]


@on_both
@pytest.mark.parametrize("how", ["connection", "session"])
def test_what_outlives_a_unit_of_tasks_writes_nothing(kafka, url, dualwrite_topic, orders, both, how):
    """asyncio.gather() lets the siblings of a part that has failed go on, in the middle of a statement, say."""
    pytest.importorskip("aiosqlite")
    late = []

    async def main():
        async with AsyncDualWriter("orders", kafka=kafka, database=url) as writer:

            async def goes_on(tx, numbers, written):
                execute, produce = (tx.connection if how == "connection" else tx.session).execute, tx.produce
                try:
                    for number in numbers:
                        await execute(insert(orders).values(id=number))
                        await produce(dualwrite_topic, value=str(number))
                        written.set()
                except IllegalStateError as error:
                    late.append(error)

            async def fails(tx, number):
                written = asyncio.Event()

                async def part():
                    await written.wait()
                    raise Refused

                await asyncio.gather(goes_on(tx, itertools.count(1000 * number), written), part())

            async def whole(tx, number):
                await tx.connection.execute(insert(orders).values(id=number))
                await tx.produce(dualwrite_topic, value=str(number))

            for first in (1, 10):
                units = [partial(whole if n % 3 else fails, number=n) for n in range(first, first + 9)]
                found = await asyncio.gather(*map(writer.submit, units), return_exceptions=True)
                assert [type(one) for one in found] == [type(None), type(None), Refused] * 3

    asyncio.run(main())
    expected = [n for n in range(1, 19) if n % 3]
    assert both() == (expected, expected)
    assert len(late) == 6


@on_both
def test_a_thread_that_outlives_its_unit_writes_nothing(writer, submit, orders, both):
    may_go, late = threading.Event(), []

    def goes_on(connection, produce):
        may_go.wait(60)
        for use in (lambda: connection.execute(insert(orders).values(id=20)), lambda: produce("t", value="20")):
            try:
                use()
            except IllegalStateError as error:
                late.append(error)

    threads = []

    def fail(tx):
        threads.append(threading.Thread(target=goes_on, args=(tx.connection, tx.produce)))
        threads[0].start()
        raise Refused

    def let_go(_):
        may_go.set()
        threads[0].join(60)

    with together(writer):
        futures = [submit(1), submit(2, then=fail), submit(3, then=let_go)]
    assert isinstance(futures[1].exception(60), Refused)
    assert [futures[0].result(60), futures[2].result(60)] == [1, 3]
    assert both() == ([1, 3], [1, 3])
    assert len(late) == 2


def test_the_examples(writer, engine, kafka, dualwrite_topic):
    Base.metadata.create_all(engine)
    run_example(example("group-commit.md", "Group commit")[0], dualwrite_topic, writer=writer)
    run_example(example("group-commit.md", "Units of rows")[0], dualwrite_topic, writer=writer)
    with engine.connect() as connection:
        assert sorted(connection.scalars(text("SELECT item FROM items"))) == ["cocoa", "coffee", "juice", "tea"]
    assert sorted(m.value for m in read_committed(kafka, dualwrite_topic)) == [b"cocoa", b"coffee", b"juice", b"tea"]


POINTS = [
    "group.unit_begun:1",
    "group.unit_begun:3",
    "group.unit_kept:2",
    "group.unit_dropped:1",
    "group.units_done:1",
    "write.recorded:2",
    "write.decided:2",
    "group.committed:1",
]
IN_EVERY_RUN = {"group.unit_kept:2", "write.decided:2"}


@on_postgresql
@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=() if point in IN_EVERY_RUN else pytest.mark.thorough) for point in POINTS]
)
def test_a_group_killed_in_the_middle_leaves_both_sides_equal(tmp_path, kafka, url, dualwrite_topic, point):
    case = Case(tmp_path, kafka, url, dualwrite_topic)
    case.run(failpoint=point, killed=True, group=True, threads=8, max_lanes=2, abort=[1])
    case.run(operations=2, group=True, threads=4, max_lanes=2)
    case.verify()


ROW_POINTS = ["group.rows_executed:2", "group.unit_kept:1", "group.unit_dropped:1", "write.decided:2"]


@on_postgresql
@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=() if point == ROW_POINTS[0] else pytest.mark.thorough) for point in ROW_POINTS],
)
def test_a_group_of_rows_killed_in_the_middle_leaves_both_sides_equal(tmp_path, kafka, url, dualwrite_topic, point):
    """The second statement has the rows of those that have waited for the first one."""
    case = Case(tmp_path, kafka, url, dualwrite_topic)
    case.run(failpoint=point, killed=True, rows=True, threads=8, max_lanes=2, abort=[1])
    case.run(operations=2, rows=True, threads=4, max_lanes=2, abort=[1])
    case.verify()
