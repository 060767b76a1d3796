"""Asynchronous sessions, bound to an ``AsyncDualWriter`` on real servers: their commit is the dual write."""

import asyncio
import gc
import weakref
from contextlib import suppress
from typing import Annotated

import pytest
from fastapi import Depends, FastAPI
from harness.asgi import ask
from harness.cancelling import at_last, at_once, cancelled_at_each, with_all_others
from harness.engines import ENGINES
from harness.orders import Order, by_asyncpg_too, on_postgresql
from sqlalchemy import exc, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlmodel import Field, SQLModel
from sqlmodel.ext.asyncio.session import AsyncSession as SQLModelSession

from dualwrite import AsyncDualWriter, ConfigurationError, TransactionAborted, WriterLimits
from dualwrite.asyncio.writer import async_engine_of
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing.proxy import PostgresProxy

pytest.importorskip("aiosqlite")


class App:
    """A writer, the sessions of an application, and its function that places an order."""

    def __init__(self, url, kafka, topic, **options):
        self.engine = async_engine_of(url)
        self.writer = AsyncDualWriter("orders", kafka=kafka, database=self.engine, **options)
        self.sessions = async_sessionmaker(self.engine)
        self.messages = self.writer.bind(self.sessions)
        self.topic = topic

    async def put(self, session, number):
        """Add a row and a message of this number."""
        session.add(Order(id=number))
        await self.messages.produce(session, self.topic, str(number), partition=0)


@pytest.fixture
def in_app(task_url, kafka, engine, dualwrite_topic):
    """Runs a coroutine function with an application whose writer is open."""

    def run(work, *, through=task_url, producer_engine="auto", **options):
        async def main():
            app = App(through, {**kafka, "dualwrite.engine": producer_engine}, dualwrite_topic, **options)
            try:
                async with app.writer:
                    return await work(app)
            finally:
                await app.engine.dispose()

        return asyncio.run(main())

    return run


@on_postgresql
@by_asyncpg_too
def test_commits_rollbacks_and_savepoints_of_sessions(in_app, both):
    async def work(app):
        async with app.sessions() as session:
            await app.put(session, 1)
            await session.commit()
            await app.put(session, 2)
            await session.rollback()
            session.add(Order(id=3))
            await session.flush()
            with pytest.raises(exc.IntegrityError):
                async with session.begin_nested():  # the first message is inside a savepoint
                    await app.put(session, 1)
                    await session.flush()
            async with session.begin_nested() as outer:
                await app.put(session, 4)
                async with session.begin_nested():
                    await app.put(session, 5)
                await outer.rollback()
            await app.put(session, 6)
            await session.commit()
        with pytest.raises(ZeroDivisionError):
            async with app.sessions.begin() as session:
                await app.put(session, 7)
                raise ZeroDivisionError
        async with app.sessions.begin() as session:
            await app.put(session, 8)

        async def sleep():
            async with app.sessions() as session:
                await app.put(session, 9)
                await session.execute(text("SELECT pg_sleep(60)"))

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sleep(), 0.2)

    in_app(work)
    assert both() == ([1, 3, 6, 8], [1, 6, 8])


@on_postgresql
def test_a_dependency_that_yields_a_session_commits_both_sides(in_app, both, engine):
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE notes (order_id int REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)")
        )

    async def work(app):
        async def session():
            async with app.sessions.begin() as session:
                yield session

        web = FastAPI()

        @web.post("/orders/{number}/{noted}")
        async def place_order(
            number: int, noted: int, session: Annotated[AsyncSession, Depends(session, scope="function")]
        ):
            await app.put(session, number)
            await session.execute(text("INSERT INTO notes VALUES (:noted)"), {"noted": noted})

        assert await ask(web, "/orders/1/1") == ([200], None)
        statuses, error = await ask(web, "/orders/2/3")
        assert (statuses, type(error)) == ([500], TransactionAborted)
        answers = await asyncio.gather(*(ask(web, f"/orders/{number}/{number}") for number in range(3, 20)))
        assert {status for [status], _ in answers} == {200}

    in_app(work, limits=WriterLimits(max_lanes=3))
    expected = [1, *range(3, 20)]
    assert both() == (expected, expected)


@on_postgresql
def test_the_session_of_sqlmodel(in_app, both):
    class Placed(SQLModel, table=True):
        __tablename__ = "orders"
        id: int = Field(primary_key=True)

    async def work(app):
        sessions = async_sessionmaker(app.engine, class_=SQLModelSession)
        messages = app.writer.bind(sessions)
        async with sessions() as session:
            session.add(Placed(id=1))
            await messages.produce(session, app.topic, "1")
            await session.commit()

    in_app(work)
    SQLModel.metadata.clear()
    assert both() == ([1], [1])


@on_postgresql
def test_a_session_of_a_copy_of_the_database_is_refused_and_of_another_engine_works(in_app, url, copied, both):
    async def work(app):
        for other, number in ((copied.url, 1), (url, 2)):
            engine = async_engine_of(other if isinstance(other, str) else other.render_as_string(False))
            sessions = async_sessionmaker(engine)
            messages = app.writer.bind(sessions)
            async with sessions() as session:
                session.add(Order(id=number))
                await session.flush()
                if number == 1:
                    with pytest.raises(ConfigurationError, match="another database"):
                        await messages.produce(session, app.topic, "1")
                    with pytest.raises(TransactionAborted):
                        await session.commit()
                else:
                    await messages.produce(session, app.topic, str(number))
                    await session.commit()
            await engine.dispose()

    in_app(work)
    assert both() == ([2], [2])


@on_postgresql
@by_asyncpg_too
@pytest.mark.parametrize("fault", ["reset_answer", "reset_request"])
def test_a_lost_answer_to_the_commit_of_a_session_is_resolved(in_app, dualwrite_postgres, task_url, both, fault):
    with PostgresProxy(dualwrite_postgres) as proxy:

        async def work(app):
            async with app.sessions() as session:
                await app.put(session, 1)
                getattr(proxy.on("COMMIT"), fault)()
                if fault == "reset_request":
                    with pytest.raises(TransactionAborted):
                        await session.commit()
                    await session.rollback()
                else:
                    await session.commit()
                await app.put(session, 2)
                await session.commit()

        in_app(work, through=proxy.url(task_url), limits=WriterLimits(max_lanes=1))
    expected = [2] if fault == "reset_request" else [1, 2]
    assert both() == (expected, expected)


@pytest.mark.thorough  # tests/unit/apps does the same without servers
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("cancel", [at_once, at_last, with_all_others])
@pytest.mark.parametrize(
    ("url", "producer_engine", "task_url"),
    [
        ("postgresql", "native", None),
        ("sqlite", "native", None),
        ("postgresql", "librdkafka", None),
        ("sqlite", "librdkafka", None),
        ("postgresql", "native", "asyncpg"),
    ],
    indirect=["url", "task_url"],
)
def test_a_cancellation_at_any_await_aborts_both_sides_before_the_decision_and_comes_after_it_from_then_on(
    in_app, engine, both, cancel
):
    async def work(app):
        async def write(number, begun):
            async with app.sessions() as session:
                begun.append(await app.messages.join(session))
                await app.put(session, number)
                await session.commit()

        await write(-1, [])
        return await cancelled_at_each(write, cancel)

    committed = [-1, *in_app(work, limits=WriterLimits(max_lanes=1))]
    assert both() == (committed, committed)
    assert SqlStateStore(engine).incidents("orders") == []


@on_postgresql
@pytest.mark.usefixtures("collects_itself")
@pytest.mark.parametrize("producer_engine", ENGINES)
def test_a_session_that_is_dropped_after_a_refused_message_keeps_nothing(in_app, both, producer_engine):
    dropped = []

    async def work(app):
        async def request():
            session = app.sessions()
            dropped.append(weakref.ref(session.sync_session))
            await app.put(session, 1)
            await app.messages.produce(session, app.topic, b"x" * 2_000_000)

        async def next_one():
            async with app.sessions.begin() as session:
                await app.put(session, 1)

        with suppress(TransactionAborted):
            await asyncio.create_task(request())
        for _ in range(100):  # the event loop, and a thread that has told it a result, hold that for a moment
            await asyncio.sleep(0.01)
            gc.collect()
            if dropped[0]() is None:
                break
        assert dropped[0]() is None
        await asyncio.create_task(next_one())  # it waits for the lane, and for the lock of its row

    in_app(work, limits=WriterLimits(max_lanes=1), producer_engine=producer_engine)
    assert both() == ([1], [1])
