"""``AsyncDualWriter`` on real servers, through both engines, on both databases."""

import asyncio

import pytest
from harness.engines import ENGINES
from harness.orders import on_both
from sqlalchemy import insert, select

from dualwrite import WriterLimits
from dualwrite.asyncio.writer import AsyncDualWriter
from dualwrite.testing.reading import read_committed

pytest.importorskip("aiosqlite")


@pytest.fixture
def rows(engine, orders):
    def read():
        with engine.connect() as connection:
            return sorted(connection.execute(select(orders.c.id)).scalars())

    return read


@pytest.fixture
def messages(kafka, dualwrite_topic):
    def read():
        return sorted(int(message.value) for message in read_committed(kafka, dualwrite_topic))

    return read


@pytest.fixture
def in_writer(kafka, url, engine):
    """Runs a coroutine function with an open writer."""

    def run(work, **options):
        async def main():
            # SQLite lets writers wait for each other in no order: on a busy machine five seconds are not enough.
            patient = f"{url}?timeout=60" if url.startswith("sqlite") else url
            async with AsyncDualWriter("orders", **{"kafka": kafka, "database": patient, **options}) as writer:
                return await work(writer)

        return asyncio.run(main())

    return run


@on_both
@pytest.mark.parametrize("producer_engine", ENGINES)
def test_tasks_write_both_sides_or_neither(in_writer, dualwrite_topic, orders, rows, messages):
    async def work(writer):
        async def one(number):
            async with writer.transaction() as tx:
                await tx.produce(dualwrite_topic, value=str(number), key="k")
                await tx.connection.execute(insert(orders).values(id=number))
                if number % 5 == 4:
                    raise ZeroDivisionError

        return await asyncio.gather(*(one(number) for number in range(20)), return_exceptions=True)

    outcomes = in_writer(work, limits=WriterLimits(max_lanes=3))
    assert [type(one) for one in outcomes if one] == [ZeroDivisionError] * 4
    assert rows() == messages() == [number for number in range(20) if number % 5 != 4]
