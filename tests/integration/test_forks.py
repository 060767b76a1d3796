"""A process that is forked inside a dual write: whatever it does there, its parent's transaction goes on."""

import asyncio
import gc
import multiprocessing
import os
import threading

import psycopg
import pytest
from harness.forking import ChildEnds, ended_by, parents_alone
from harness.orders import Order, on_both, on_each
from sqlalchemy import insert, make_url
from sqlalchemy.orm import scoped_session, sessionmaker

from dualwrite import AsyncDualWriter, DualWriter, failpoints

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture
def write(dualwrite_topic):
    def write(tx, number):
        tx.connection.execute(insert(Order.__table__).values(id=number))
        tx.produce(dualwrite_topic, value=str(number))

    return write


def raises(_tx):
    raise ChildEnds


def leaves(_tx):
    """Reaches the end of the block, as if the dual write were its own."""


def works(tx):
    tx.connection.execute(insert(Order.__table__).values(id=9))


def commits(tx):
    tx.connection.commit()


def collects(tx):
    tx.connection.invalidate()
    gc.collect()
    raise ChildEnds


ENDS = [
    (raises, "ChildEnds"),
    (leaves, "IllegalStateError"),
    (works, "StatementError"),
    (commits, "IllegalStateError"),
    (collects, "ChildEnds"),
]


def is_left_by_a_child_and_ended_by_its_parent(writer, write, what, **options):
    with parents_alone(), writer.transaction(**options) as tx:
        write(tx, 1)
        child = os.fork()
        if child == 0:
            what(tx)
        else:
            found = ended_by(child)
            write(tx, 2)
    with writer.transaction() as tx:
        write(tx, 3)
    return found


@on_each
@pytest.mark.parametrize(("what", "end"), ENDS)
def test_a_child_that_leaves_the_block_does_not_end_it(writer, write, both, what, end):
    assert is_left_by_a_child_and_ended_by_its_parent(writer, write, what) == end
    assert both() == ([1, 2, 3], [1, 2, 3])


@on_each
@pytest.mark.parametrize(("what", "end"), ENDS)
def test_a_child_that_leaves_a_block_whose_messages_wait_does_not_end_it(kafka, engine, write, both, what, end):
    with DualWriter("orders", kafka=kafka, database=engine, outbox="fallback") as writer:
        assert is_left_by_a_child_and_ended_by_its_parent(writer, write, what, outbox="always") == end
    assert both() == ([1, 2, 3], [1, 2, 3])


@on_both
def test_a_child_sends_nothing_and_leaves_the_sender_to_its_parent(kafka, engine, write, both):
    """It is forked while the sender holds what it has read, and ends its copy of the writer."""

    def hold(name):
        if name == "outbox.read" and not reads.is_set():
            reads.set()
            goes_on.wait(60)

    reads, goes_on = threading.Event(), threading.Event()
    with (
        DualWriter("orders", kafka=kafka, database=engine, outbox="fallback") as writer,
        failpoints.watched(hold),
    ):
        with writer.transaction(outbox="always") as tx:
            write(tx, 1)
        assert reads.wait(60)
        try:
            with parents_alone():
                child = os.fork()
                if child == 0:
                    goes_on.set()  # its own copy: if anything of the sender lived here, it would go on
                    writer.close()
                    raise ChildEnds
                assert ended_by(child) == "ChildEnds"
        finally:
            goes_on.set()
        with writer.transaction() as tx:
            write(tx, 2)
    assert both() == ([1, 2], [1, 2])


@on_both
def test_a_child_that_is_forked_in_a_savepoint_leaves_it_to_its_parent(writer, write, both):
    with parents_alone(), writer.transaction() as tx:
        write(tx, 1)
        with tx.session.begin_nested():
            tx.session.add(Order(id=2))
            child = os.fork()
            if child == 0:
                raise ChildEnds
            assert ended_by(child) == "ChildEnds"
        write(tx, 3)
    rows, messages = both()
    assert (rows, messages) == ([1, 2, 3], [1, 3])


def test_a_child_leaves_the_users_psycopg_connection_alone(writer, write, url, dualwrite_topic, both):
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with parents_alone(), psycopg.connect(plain) as connection, writer.transaction(connection) as tx:
        connection.execute("INSERT INTO orders (id) VALUES (1)")
        write(tx, 2)
        child = os.fork()
        if child == 0:
            with pytest.raises(psycopg.OperationalError):
                connection.execute("ROLLBACK")
            raise ChildEnds
        assert ended_by(child) == "ChildEnds"
        tx.produce(dualwrite_topic, value="1")
    assert both() == ([1, 2], [1, 2])


@on_both
@pytest.mark.parametrize("forks", ["fork", "multiprocessing"])
@pytest.mark.parametrize("row_first", [True, False])
def test_another_thread_forks_while_a_session_holds_a_dual_write(
    writer, engine, dualwrite_topic, both, forks, row_first
):
    sessions = scoped_session(sessionmaker(engine))
    bound = writer.bind(sessions)
    ready, forked, told = threading.Event(), threading.Event(), []

    def request():
        steps = [
            lambda: (sessions.add(Order(id=1)), sessions.flush()),
            lambda: bound.produce(sessions, dualwrite_topic, "1"),
        ]
        try:
            for step in steps if row_first else reversed(steps):
                step()
            ready.set()
            forked.wait(60)
            sessions.commit()
            told.append("committed")
        except BaseException as error:  # noqa: BLE001 - shown below
            told.append(error)
        finally:
            ready.set()
            sessions.remove()

    thread = threading.Thread(target=request)
    thread.start()
    ready.wait(60)
    if forks == "fork":
        with parents_alone():
            child = os.fork()
            if child == 0:
                gc.collect()
                raise ChildEnds
            assert ended_by(child) == "ChildEnds"
    else:
        process = multiprocessing.get_context("fork").Process(target=gc.collect)
        process.start()
        process.join(60)
        assert process.exitcode == 0
    forked.set()
    thread.join(60)
    assert told == ["committed"]
    assert both() == ([1], [1])


@on_both
def test_a_child_of_a_session_cannot_end_it(writer, engine, dualwrite_topic, both):
    factory = sessionmaker(engine)
    bound = writer.bind(factory)
    for number, end in enumerate(("commit", "rollback", "close")):
        with parents_alone(), factory() as session:
            session.add(Order(id=number))
            bound.produce(session, dualwrite_topic, str(number))
            child = os.fork()
            if child == 0:
                getattr(session, end)()
                raise ChildEnds
            assert ended_by(child) != "NoneType"
            session.commit()
    assert both() == ([0, 1, 2], [0, 1, 2])


@pytest.mark.parametrize(
    ("url", "task_url"), [("postgresql", None), ("sqlite", None), ("postgresql", "asyncpg")], indirect=True
)
def test_a_child_leaves_the_block_of_a_task_alone(kafka, task_url, engine, dualwrite_topic, both):
    if task_url.startswith("sqlite"):
        pytest.importorskip("aiosqlite")

    async def main():
        async with AsyncDualWriter("orders", kafka=kafka, database=task_url) as writer:
            with parents_alone():
                async with writer.transaction() as tx:
                    await tx.connection.execute(insert(Order.__table__).values(id=1))
                    await tx.produce(dualwrite_topic, value="1")
                    child = os.fork()
                    if child == 0:
                        raise ChildEnds
                    assert ended_by(child) == "ChildEnds"
                    await tx.connection.execute(insert(Order.__table__).values(id=2))
                    await tx.produce(dualwrite_topic, value="2")

    asyncio.run(main())
    assert both() == ([1, 2], [1, 2])
