"""Cancellation at every await of a dual write, on SQLite and a simulated Kafka."""

import asyncio

import pytest
from harness.cancelling import at_last, at_once, cancelled_at_each, with_all_others
from harness.served import SETTINGS, TOPIC

from dualwrite import AsyncDualWriter

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
        async with AsyncDualWriter("orders", kafka=SETTINGS, database=url, max_lanes=1) as writer:

            async def write(number, begun):
                async with writer.transaction() as tx:
                    begun.append(tx)
                    await tx.connection.exec_driver_sql(f"INSERT INTO orders (id) VALUES ({number})")
                    await tx.produce(TOPIC, str(number), partition=0)

            return await cancelled_at_each(write, cancel)

    assert shop.both_have(*asyncio.run(main()))
