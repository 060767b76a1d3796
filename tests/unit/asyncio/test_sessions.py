"""Asynchronous sessions of the application on SQLite and a simulated Kafka: what their commit, rollback and end do."""

import asyncio
import gc

import pytest
import sqlalchemy
from harness.bound import Order
from harness.cancelling import at_last, at_once, cancelled_at_each, with_all_others
from harness.queue_order import watch_queue
from harness.served import SETTINGS, TOPIC
from sqlalchemy import event, exc, select
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from dualwrite import (
    AsyncDualWriter,
    ConfigurationError,
    DualWriter,
    Transaction,
    TransactionAborted,
    Unavailable,
    WriterLimits,
)
from dualwrite.asyncio.writer import async_engine_of
from dualwrite.errors import IllegalStateError
from dualwrite.protocol.lives import WriteState
from dualwrite.stores.sql.database import JoinedStore
from dualwrite.waiting import here
from dualwrite.writing.lane_pool import Lanes

pytest.importorskip("aiosqlite")
SQLALCHEMY_2_0 = sqlalchemy.__version__.startswith("2.0.")


class App:
    """A writer, the sessions of an application, and its function that places an order."""

    def __init__(self, url, **options):
        self.engine = async_engine_of(url)
        self.writer = AsyncDualWriter("orders", **{"kafka": SETTINGS, "database": self.engine, **options})
        self.sessions = async_sessionmaker(self.engine)
        self.messages = self.writer.bind(self.sessions)

    async def put(self, session, number):
        """Add a row and a message of this number."""
        session.add(Order(id=number))
        await self.messages.produce(session, TOPIC, str(number), partition=0)


@pytest.fixture
def in_app(shop):
    """Runs a coroutine function with an application whose writer is open."""

    def run(work, **options):
        async def main():
            app = App(shop.engine.url.render_as_string(False), **options)
            try:
                async with app.writer:
                    return await work(app)
            finally:
                await app.engine.dispose()

        return asyncio.run(main())

    return run


def test_commit_commits_both_sides_and_rollback_aborts_both(in_app, shop):
    async def work(app):
        async with app.sessions() as session:
            await app.put(session, 1)
            await session.commit()
            await app.put(session, 2)
            await session.rollback()
            await app.put(session, 3)
            await session.commit()
            await app.put(session, 4)

    in_app(work)
    assert shop.both_have(1, 3)


def test_the_end_of_begin_commits_and_an_exception_in_it_aborts(in_app, shop):
    async def work(app):
        async with app.sessions.begin() as session:
            await app.put(session, 1)
        with pytest.raises(ZeroDivisionError):
            async with app.sessions.begin() as session:
                await app.put(session, 2)
                raise ZeroDivisionError
        async with app.sessions() as session, session.begin():
            await app.put(session, 3)

    in_app(work)
    assert shop.both_have(1, 3)


def test_messages_of_a_savepoint_that_is_rolled_back_are_dropped(in_app, shop):
    async def work(app):
        async with app.sessions() as session:
            with pytest.raises(ZeroDivisionError):
                async with session.begin_nested():  # before the first message: on SQLite the session joins here
                    await app.put(session, 1)
                    raise ZeroDivisionError
            await app.put(session, 2)
            async with session.begin_nested():
                await app.put(session, 3)
                inner = await session.begin_nested()
                await app.put(session, 4)
                await inner.rollback()
            await session.commit()

    in_app(work)
    assert shop.both_have(2, 3)


def test_a_session_that_produces_nothing_is_left_alone(in_app, shop, monkeypatch):
    monkeypatch.setattr(Lanes, "take", lambda *_: pytest.fail("a lane was taken"))

    async def work(app):
        async with app.sessions() as session:
            session.add(Order(id=1))
            await session.commit()

    in_app(work)
    assert shop.rows == ["1"]


def test_savepoints_of_sessions_of_other_factories_join_nothing(in_app, shop, monkeypatch):
    async def work(app):
        with monkeypatch.context() as patch:
            patch.setattr(Lanes, "take", lambda *_: pytest.fail("a lane was taken"))
            async with AsyncSession(app.engine) as session, session.begin_nested():
                session.add(Order(id=1))
            with Session(shop.engine) as session, session.begin_nested():
                session.add(Order(id=2))

    in_app(work)
    assert shop.messages == []


@pytest.mark.parametrize("lanes", [1, 3])
def test_tasks_each_have_a_session_and_wait_fairly_for_a_lane(in_app, shop, monkeypatch, lanes):
    queue = watch_queue(monkeypatch)

    async def work(app):
        async def one(number):
            async with app.sessions.begin() as session:
                await app.put(session, number)

        await asyncio.gather(*map(one, range(20)))

    in_app(work, limits=WriterLimits(max_lanes=lanes))
    queue.assert_fair()
    assert queue.count == 20
    assert sorted(map(int, shop.messages)) == sorted(map(int, shop.rows)) == list(range(20))


def test_messages_that_tasks_produce_at_once_are_sent_one_by_one_and_before_the_commit(in_app, shop):
    async def work(app):
        async with app.sessions() as session:
            await session.connection()
            numbers = [asyncio.create_task(app.put(session, number)) for number in range(5)]
            await asyncio.wait(numbers)
            await session.commit()

    in_app(work)
    assert shop.both_have(*range(5))


def test_a_commit_waits_for_the_message_that_another_task_still_produces(in_app, shop, monkeypatch):
    real = Transaction.produce

    def slow(transaction, *args, **options):
        here().sleep(0.05)
        real(transaction, *args, **options)

    async def work(app):
        async with app.sessions() as session:
            await app.messages.join(session)
            session.add(Order(id=1))
            producing = asyncio.create_task(app.messages.produce(session, TOPIC, "1", partition=0))
            await asyncio.sleep(0.01)
            await session.commit()
            await producing

    monkeypatch.setattr(Transaction, "produce", slow)
    in_app(work)
    assert shop.both_have(1)


def test_the_joined_dual_write_sends_and_shows_its_state(in_app, shop):
    async def work(app):
        async with app.sessions() as session:
            joined = await app.messages.join(session)
            await joined.produce(TOPIC, "1", partition=0)
            with pytest.raises(IllegalStateError, match="use your own"):
                _ = joined.session
            await session.commit()
            assert joined.state is WriteState.COMPLETED
        assert "orders" in repr(app.messages)

    in_app(work)


def test_an_abort_at_commit_leaves_a_session_that_can_be_rolled_back(in_app, shop, monkeypatch):
    def refuse(*_, **__):
        raise TransactionAborted("a check failed")

    async def work(app):
        async with app.sessions() as session:
            await app.put(session, 1)
            with monkeypatch.context() as patch:
                patch.setattr(JoinedStore, "decide", refuse)
                with pytest.raises(TransactionAborted, match="a check failed"):
                    await session.commit()
            await session.rollback()
            await app.put(session, 2)
            await session.commit()

    in_app(work)
    assert shop.both_have(2)


def test_an_error_of_flush_aborts_both_sides(in_app, shop):
    shop.database.execute("INSERT INTO orders (id) VALUES (1)")

    async def work(app):
        async with app.sessions() as session:
            await app.put(session, 1)
            with pytest.raises(exc.IntegrityError):
                await session.commit()
            await session.rollback()
            await app.put(session, 2)
            await session.commit()

    in_app(work)
    assert (shop.rows, shop.messages) == (["1", "2"], ["2"])


def test_a_session_that_could_not_join_cannot_commit_its_rows_alone(in_app, shop, monkeypatch):
    def busy(*_):
        raise Unavailable("all lanes were busy")

    async def work(app):
        async with app.sessions() as session:
            with monkeypatch.context() as patch:
                patch.setattr(Lanes, "take", busy)
                with pytest.raises(Unavailable):
                    await app.put(session, 1)
            with pytest.raises(TransactionAborted, match="the session continued after an error: all lanes"):
                await session.commit()
            await session.rollback()
            await app.put(session, 2)
            await session.commit()

    in_app(work)
    assert shop.both_have(2)


def test_a_second_session_of_a_task_is_refused_while_the_first_is_inside(in_app, shop):
    async def work(app):
        async with app.sessions() as first, app.sessions() as second:
            await app.put(first, 1)
            with pytest.raises(IllegalStateError, match="this task is already inside"):
                await app.messages.produce(second, TOPIC, "2")
            await second.rollback()
            await first.commit()
            await app.put(second, 3)
            await second.commit()

    in_app(work)
    assert shop.both_have(1, 3)


def test_a_session_that_is_dropped_gives_its_lane_back(in_app, shop):
    async def work(app):
        async def drop():
            await app.put(app.sessions(), 1)

        await drop()
        gc.collect()

        async def next_one():
            async with app.sessions.begin() as session:
                await app.put(session, 2)

        await asyncio.create_task(next_one())

    in_app(work, limits=WriterLimits(max_lanes=1, lane_timeout_s=5))
    assert shop.both_have(2)


@pytest.mark.parametrize("how", ["maker", "scoped", "class", "maker of a class", "maker over a maker"])
def test_every_way_to_make_sessions_can_be_bound(in_app, shop, how):
    class Own(AsyncSession):
        pass

    async def work(app):
        maker = async_sessionmaker(app.engine)
        source = {
            "maker": maker,
            "scoped": async_scoped_session(maker, scopefunc=asyncio.current_task),
            "class": Own,
            "maker of a class": async_sessionmaker(app.engine, class_=Own),
            "maker over a maker": async_sessionmaker(app.engine, sync_session_class=sessionmaker()),
        }[how]
        messages = app.writer.bind(source)
        session = Own(app.engine) if how == "class" else source()
        session.add(Order(id=1))
        await messages.produce(source if how == "scoped" else session, TOPIC, "1", partition=0)
        await session.commit()
        await session.close()

    in_app(work)
    assert shop.both_have(1)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (async_sessionmaker(twophase=True), "two phases"),
        (sessionmaker(), "bind the async_sessionmaker"),
        (scoped_session(sessionmaker()), "bind the async_sessionmaker"),
        (Session, "bind the async_sessionmaker"),
        (object(), "bind the async_sessionmaker"),
    ],
    ids=["twophase", "sessionmaker", "scoped_session", "Session", "object"],
)
def test_what_cannot_be_bound_is_refused_with_what_to_do(in_app, source, words):
    async def work(app):
        with pytest.raises(ConfigurationError, match=words):
            app.writer.bind(source)

    in_app(work)


def test_a_session_of_the_other_kind_is_refused_with_what_to_do(in_app, shop):
    async def work(app):
        async with app.sessions() as session, AsyncSession(app.engine) as other:
            with pytest.raises(IllegalStateError, match="give the AsyncSession"):
                await app.messages.produce(session.sync_session, TOPIC, "1")
            with pytest.raises(IllegalStateError, match="bind the factory that made it"):
                await app.messages.produce(other, TOPIC, "1")
            with DualWriter("others", kafka=SETTINGS, database=shop.engine) as threads:
                with pytest.raises(ConfigurationError, match="bind them to an AsyncDualWriter"):
                    threads.bind(app.sessions)
                with pytest.raises(IllegalStateError, match="AsyncDualWriter"):
                    threads.bind(sessionmaker()).produce(session, TOPIC, "1")

    in_app(work)


def test_a_session_of_another_database_is_refused(in_app, shop, tmp_path):
    async def work(app):
        elsewhere = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/other.db")
        sessions = async_sessionmaker(elsewhere)
        messages = app.writer.bind(sessions)
        async with sessions() as session:
            with pytest.raises(ConfigurationError, match="another database"):
                await messages.produce(session, TOPIC, "1")
            with pytest.raises(TransactionAborted, match="continued"):
                await session.commit()
        await elsewhere.dispose()

    in_app(work)
    assert shop.messages == []


def test_a_session_of_another_engine_of_the_same_database_works(in_app, shop):
    async def work(app):
        another = create_async_engine(app.engine.url)
        sessions = async_sessionmaker(another)
        messages = app.writer.bind(sessions)
        async with sessions() as session:
            session.add(Order(id=1))
            await messages.produce(session, TOPIC, "1", partition=0)
            await session.commit()
        await another.dispose()

    in_app(work)
    assert shop.both_have(1)


def test_a_writer_that_is_not_open_or_of_another_event_loop_is_refused(shop):
    app = App(shop.engine.url.render_as_string(False))

    async def use():
        async with app.sessions() as session:
            await app.messages.produce(session, TOPIC, "1")

    with pytest.raises(IllegalStateError, match="is not open"):
        asyncio.run(use())


def test_a_committed_session_reads_on(in_app, shop):
    async def work(app):
        async with app.sessions() as session:
            await app.put(session, 1)
            await session.commit()
            assert (await session.scalars(select(Order.id))).all() == [1]

    in_app(work)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.skipif(
    SQLALCHEMY_2_0, reason="a cancelled connection of aiosqlite may keep its lock for seconds: docs/asyncio.md"
)
@pytest.mark.parametrize("way", ["commit", pytest.param("begin of the session", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("cancel", [at_once, pytest.param(at_last, marks=pytest.mark.thorough), with_all_others])
def test_a_cancellation_aborts_both_sides_before_the_decision_and_comes_after_it_from_then_on(
    in_app, shop, cancel, way
):
    async def work(app):
        async def committed(number, begun):
            async with app.sessions() as session:
                session.add(Order(id=number))
                begun.append(await app.messages.join(session))
                await app.messages.produce(session, TOPIC, str(number), partition=0)
                await session.commit()

        async def begun_by_the_session(number, begun):
            async with app.sessions() as session, session.begin():
                begun.append(await app.messages.join(session))
                await app.put(session, number)

        return await cancelled_at_each(committed if way == "commit" else begun_by_the_session, cancel)

    assert shop.both_have(*in_app(work, limits=WriterLimits(max_lanes=1)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_cancellation_in_the_end_of_begin_comes_after_the_commit(in_app, shop):
    async def work(app):
        begun = asyncio.Event()

        async def write():
            async with app.sessions.begin() as session:
                await app.put(session, 1)
                event.listen(session.sync_session, "before_commit", lambda _: begun.set())

        task = asyncio.create_task(write())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_app(work)
    assert shop.both_have(1)
