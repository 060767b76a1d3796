"""``AsyncDualWriter`` on real servers, through both engines, on both databases."""

import asyncio

import pytest
from harness.engines import ENGINES
from sqlalchemy import insert, select

from dualwrite import WriterLimits
from dualwrite.testing.checker import read_committed

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


SERVERS = [
    *((url, engine, None) for url in ("postgresql", "sqlite") for engine in ENGINES),
    ("postgresql", "native", "asyncpg"),
]


@pytest.mark.parametrize(("url", "producer_engine", "task_url"), SERVERS, indirect=["url", "task_url"])
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
