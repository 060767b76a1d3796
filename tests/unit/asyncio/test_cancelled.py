"""Cancellation at every await of a dual write, on SQLite and a simulated Kafka."""

import asyncio
from contextlib import suppress

import pytest
from harness.cancelling import at_last, at_once, cancelled_at_each, with_all_others
from harness.served import SETTINGS, TOPIC
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from dualwrite import AsyncDualWriter, TransactionInDoubt, WriterLimits, waiting
from dualwrite.writing.dual_write import DualWrite

pytest.importorskip("aiosqlite")
pytestmark = [
    # A driver that is cancelled while it connects or closes leaves the rest to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.mark.parametrize("cancel", [at_once, pytest.param(at_last, marks=pytest.mark.thorough), with_all_others])
def test_a_cancellation_aborts_both_sides_before_the_decision_and_comes_after_it_from_then_on(shop, cancel):
    async def main():
        url = shop.engine.url.render_as_string(False)
        async with AsyncDualWriter("orders", kafka=SETTINGS, database=url, limits=WriterLimits(max_lanes=1)) as writer:

            async def write(number, begun):
                async with writer.transaction() as tx:
                    begun.append(tx)
                    await tx.connection.exec_driver_sql(f"INSERT INTO orders (id) VALUES ({number})")
                    await tx.produce(TOPIC, str(number), partition=0)

            return await cancelled_at_each(write, cancel)

    assert shop.both_have(*asyncio.run(main()))


async def with_block(writer, sessions):
    async with writer.transaction():
        pytest.fail("it was cancelled")


async def with_session(writer, sessions):
    messages = writer.bind(sessions)
    async with sessions() as session:
        await messages.produce(session, TOPIC, "1", partition=0)


@pytest.mark.parametrize("begins", [with_block, with_session])
def test_a_cancellation_put_off_until_the_block_has_begun_ends_it(shop, monkeypatch, begins):
    """It stays put off beside an error that says more, even if the writer then swallows that error."""
    begin, tasks = DualWrite._begin, []

    def cancelled_at_its_end(self):
        begin(self)
        if tasks:
            with suppress(TransactionInDoubt), waiting.uninterrupted():
                tasks.pop().cancel()
                waiting.here().sleep(0.01)
                raise TransactionInDoubt("another one")

    monkeypatch.setattr(DualWrite, "_begin", cancelled_at_its_end)

    async def main():
        engine = create_async_engine(shop.engine.url.set(drivername="sqlite+aiosqlite"))
        async with AsyncDualWriter(
            "orders",
            kafka=SETTINGS,
            database=engine,
            limits=WriterLimits(max_lanes=1, lane_timeout_s=2, timeout_s=2),
        ) as writer:
            task = asyncio.create_task(begins(writer, async_sessionmaker(engine)))
            tasks.append(task)
            with pytest.raises(asyncio.CancelledError):
                await task
            async with writer.transaction() as tx:
                await tx.connection.exec_driver_sql("INSERT INTO orders (id) VALUES (2)")
                await tx.produce(TOPIC, "2", partition=0)
        await engine.dispose()

    asyncio.run(main())
    assert shop.both_have(2)
