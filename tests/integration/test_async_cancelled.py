"""Cancellation at every await of a dual write: both sides stay equal, and the writer goes on with its one lane."""

import asyncio

import pytest
from harness.cancelling import at_last, at_once, cancelled_at_each, with_all_others
from sqlalchemy import insert, select

from dualwrite import AsyncDualWriter, WriterLimits
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing.checker import read_committed

pytest.importorskip("aiosqlite")
pytestmark = [
    # A driver that is cancelled while it connects or closes leaves the rest to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


SERVERS = [
    ("postgresql", "native", None),
    ("sqlite", "native", None),
    ("postgresql", "librdkafka", None),
    ("sqlite", "librdkafka", None),
    ("postgresql", "native", "asyncpg"),
]


@pytest.mark.thorough  # tests/unit/apps does the same without servers
@pytest.mark.parametrize("cancel", [at_once, at_last, with_all_others])
@pytest.mark.parametrize(("url", "producer_engine", "task_url"), SERVERS, indirect=["url", "task_url"])
def test_a_cancellation_at_any_await_aborts_both_sides_before_the_decision_and_comes_after_it_from_then_on(
    kafka, engine, task_url, dualwrite_topic, orders, cancel
):
    async def main():
        async with AsyncDualWriter(
            "orders", kafka=kafka, database=task_url, limits=WriterLimits(max_lanes=1)
        ) as writer:

            async def write(number, begun):
                async with writer.transaction() as tx:
                    begun.append(tx)
                    await tx.produce(dualwrite_topic, value=str(number), partition=0)
                    await tx.connection.execute(insert(orders).values(id=number))

            await write(-1, [])
            return await cancelled_at_each(write, cancel)

    committed = [-1, *asyncio.run(main())]
    with engine.connect() as connection:
        assert sorted(connection.execute(select(orders.c.id)).scalars()) == committed
    assert sorted(int(message.value) for message in read_committed(kafka, dualwrite_topic)) == committed
    assert SqlStateStore(engine).incidents("orders") == []
