"""Random schedules of tasks: some in every run, thousands with ``--thorough``; ``make tasks N=...`` runs as many as one likes."""

import asyncio
import threading

import pytest
from harness.served import SETTINGS, TOPIC
from harness.stepped import SteppedKafka

from dualwrite import AsyncDualWriter, WriterLimits
from dualwrite.asyncio.writer import THREADS
from model import tasks

FIRST = 1_000_150
EVERY_TIME = 30
SOON = 235

pytest.importorskip("aiosqlite")


@pytest.mark.parametrize(
    ("first", "count"), [(FIRST, EVERY_TIME), pytest.param(FIRST + EVERY_TIME, 3000, marks=pytest.mark.thorough)]
)
def test_both_sides_agree_after_every_random_schedule_of_tasks(first, count):
    found = tasks.run(first, count)
    assert found["finding"] is None
    happened = found["happened"]
    assert happened["schedules"] == count
    for what in ("block", "session", "unit", "rows", "plain session", "cancellations", "fail points raised"):
        assert happened[what] > count / 4, what
    assert happened["told: cancelled, committed"] > count / 50, "cancelled after the decision"


def test_a_seed_runs_the_same_again():
    first, again = (tasks.run(FIRST, 3)["happened"] for _ in range(2))
    assert first == again


def test_a_planted_mistake_about_cancellation_is_found_soon():
    assert "left WriteState" in tasks.run(SOON, 20, "cancelled_after_the_decision")["finding"]["what"]


def test_a_thousand_tasks_wait_in_their_order_without_a_thread_for_each():
    lanes, count = 3, 1000
    threads = set(threading.enumerate())

    async def write(ground):
        own = {"database": ground.blocks, "own_engine": ground.own}
        async with AsyncDualWriter(
            "orders", kafka=SETTINGS, limits=WriterLimits(max_lanes=lanes, lane_timeout_s=1e6), **own
        ) as writer:

            async def one(number):
                async with writer.transaction() as tx:
                    await tx.produce(TOPIC, str(number), partition=0)

            ground.loop.busiest = 0
            await asyncio.gather(*map(one, range(count)))
            assert ground.loop.busiest <= THREADS + lanes
        await ground.blocks.dispose()

    with tasks.ground() as ground, ground.loop.on_its_clock():
        kafka = SteppedKafka(ground.loop)
        with tasks.without_threads(kafka) as order:
            ground.loop.run_until_complete(write(ground))
    order.assert_fair()
    assert order.count == len(kafka.visible()) == count
    assert set(threading.enumerate()) <= threads
