"""The writer in memory for tasks shows what the real one shows, and fails as the one for threads does."""

import asyncio
import inspect
import time

import pytest
from harness.async_view import WAYS
from harness.databases import prepare, sqlite_url
from harness.served import SETTINGS, TOPIC
from harness.user_view import Base, View, rows_of
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool

from dualwrite import AsyncDualWriter, ConfigurationError, DualWriteError, TransactionAborted, Unavailable, WriterLimits
from dualwrite.testing import AsyncInMemoryWriter, InMemoryWriter
from dualwrite.testing.memory.lane import EFFECTS, Rows

pytest.importorskip("aiosqlite")
OF_SERVERS = {"leased"}


def in_bytes(value):
    return value.encode() if isinstance(value, str) else value


def asynchronous(database):
    return create_async_engine(database.engines[0].url.set(drivername="sqlite+aiosqlite"))


async def as_user_sees(writer, engine, way, seen):
    async with writer:
        await WAYS[way](View(writer, engine, TOPIC, seen))
    await engine.dispose()


@pytest.mark.parametrize("way", WAYS)
def test_a_user_sees_the_same_of_both_writers(shop, tmp_path, way):
    real, in_memory = [], []
    engine = asynchronous(shop.database)
    writer = AsyncDualWriter("orders", kafka=SETTINGS, database=engine, limits=WriterLimits(max_lanes=1))
    asyncio.run(as_user_sees(writer, engine, way, real))
    (tmp_path / "other").mkdir()
    other = prepare("sqlite", sqlite_url(tmp_path / "other"))
    engine = asynchronous(other)
    writer = AsyncInMemoryWriter("orders", database=engine, limits=WriterLimits(max_lanes=1))
    asyncio.run(as_user_sees(writer, engine, way, in_memory))
    assert in_memory == real
    assert real
    assert rows_of(other.engines[0]) == rows_of(shop.engine)
    assert [shown.value for shown in writer.messages] == [in_bytes(value) for value in shop.messages]
    other.dispose()


async def with_tables():
    engine = create_async_engine("sqlite+aiosqlite://", poolclass=StaticPool)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    return engine


async def put(tx, number):
    await tx.connection.execute(text(f"INSERT INTO orders (id) VALUES ({number})"))
    await tx.produce(TOPIC, str(number))


async def numbers(engine):
    async with engine.connect() as connection:
        return list(await connection.scalars(select(text("id")).select_from(text("orders"))))


@pytest.mark.parametrize(("place", "error"), EFFECTS, ids=lambda one: getattr(one, "value", None) or one.__name__)
def test_a_planted_failure_has_the_effect_of_the_table(place, error):
    effect = EFFECTS[place, error]

    async def fail(committed):
        engine = await with_tables()
        async with AsyncInMemoryWriter(database=engine) as writer:
            writer.fail_next(place, error, rows_committed=committed)
            with pytest.raises(DualWriteError) as raised:
                async with writer.transaction() as tx:
                    await put(tx, 1)
            assert writer.messages == [], "visible before it is settled"
            writer.settle()
            rows = committed if effect.rows is Rows.EITHER else effect.rows is Rows.COMMITTED
            assert (type(raised.value), raised.value.outcome) == (effect.raised, effect.outcome)
            assert await numbers(engine) == ([1] if rows else [])
            assert [message.value for message in writer.messages_of(TOPIC)] == (
                [b"1"] if rows and effect.settled else []
            )
        await engine.dispose()

    for committed in (True, False) if effect.rows is Rows.EITHER else (None,):
        asyncio.run(fail(committed))


def test_a_cancellation_aborts_both_sides():
    async def main():
        engine = await with_tables()
        async with AsyncInMemoryWriter(database=engine) as writer:
            has_written = asyncio.Event()
            task = asyncio.create_task(never_ending(writer, has_written))
            await has_written.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert [message.value for message in writer.aborted] == [b"1"]
            async with writer.transaction() as tx:
                await put(tx, 2)
            assert [message.value for message in writer.messages] == [b"2"]
            assert await numbers(engine) == [2]
        await engine.dispose()

    async def never_ending(writer, has_written):
        async with writer.transaction() as tx:
            await put(tx, 1)
            has_written.set()
            await asyncio.Event().wait()

    asyncio.run(main())


def test_a_planted_failure_that_nothing_has_reached_fails_the_test():
    async def main():
        async with AsyncInMemoryWriter() as writer:
            writer.fail_next("commit", TransactionAborted)

    with pytest.raises(AssertionError, match="no dual write came there"):
        asyncio.run(main())


def test_it_makes_a_database_of_its_own_and_leases_nothing():
    async def main():
        async with AsyncInMemoryWriter() as writer:
            async with writer.transaction() as tx:
                await tx.connection.execute(text("CREATE TABLE mine (id INTEGER)"))
                await tx.produce("t", "1")
            async with writer.engine.connect() as connection:
                assert (await connection.execute(text("SELECT count(*) FROM mine"))).scalar() == 0
            assert len(writer.transactions) == 1
        assert "AsyncInMemoryWriter" in repr(writer)
        with pytest.raises(ConfigurationError, match="leases no id"):
            AsyncInMemoryWriter.leased("orders")

    asyncio.run(main())


def test_it_has_the_interface_of_the_real_one_and_of_the_one_for_threads():
    def arguments(kind, name):
        return inspect.signature(getattr(kind, name)).parameters

    own = {name for name in vars(AsyncInMemoryWriter) if not name.startswith("_")} - OF_SERVERS
    assert own == {name for name in vars(InMemoryWriter) if not name.startswith("_")} - {
        name for name in vars(AsyncDualWriter) if not name.startswith("_")
    }
    assert arguments(AsyncInMemoryWriter, "fail_next") == arguments(InMemoryWriter, "fail_next")
    assert arguments(AsyncInMemoryWriter, "__init__").keys() == arguments(InMemoryWriter, "__init__").keys()


def test_a_dual_write_takes_milliseconds():
    async def main():
        engine = await with_tables()
        took = []
        async with AsyncInMemoryWriter(database=engine) as writer:
            for number in range(100):
                began = time.process_time()
                async with writer.transaction() as tx:
                    await put(tx, number)
                took.append(time.process_time() - began)
        await engine.dispose()
        return sorted(took)[50]

    assert asyncio.run(main()) < 0.02, "the page on testing says milliseconds"


def test_so_many_units_wait_as_the_limits_allow():
    async def main():
        async with AsyncInMemoryWriter(limits=WriterLimits(waiting_units=1, lane_timeout_s=0.05)) as writer:
            may_go = asyncio.Event()

            async def slow(_):
                await may_go.wait()

            tasks = [asyncio.create_task(writer.submit(slow)) for _ in range(2)]
            await asyncio.sleep(0.02)
            tasks.append(asyncio.create_task(writer.submit(slow)))
            tasks.append(asyncio.create_task(writer.submit(slow)))
            done, _ = await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            assert isinstance(done.pop().exception(), Unavailable)
            may_go.set()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
