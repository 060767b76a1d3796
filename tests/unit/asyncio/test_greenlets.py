"""Tasks run the very functions that threads run: a second copy of the protocol would pass its points in other ones."""

import asyncio
import sys

import pytest
from harness.bound import Order
from harness.served import SETTINGS, TOPIC
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from dualwrite import AsyncDualWriter, failpoints

pytest.importorskip("aiosqlite")
INSERT = "INSERT INTO orders (id) VALUES (1)"
_WAYS_IN = ("dualwrite.asyncio", "dualwrite.clock", "dualwrite.writing.sessions", "dualwrite.writing.sessions")
"""The ways to a dual write, and to wait in it, differ."""


class Passed:
    """The fail points that a process passes, each with the functions of the library that lead to it."""

    def __init__(self):
        self.points = []

    def __call__(self, name):
        frame, functions = sys._getframe(1), []
        while frame is not None:
            name_of_module = frame.f_globals.get("__name__", "")
            if name_of_module.startswith("dualwrite.") and not name_of_module.startswith(_WAYS_IN):
                functions.append(frame.f_code)
            frame = frame.f_back
        self.points.append((name, functions))


def in_thread(shop, way):
    with shop.writer() as writer:
        sessions = sessionmaker(shop.engine)
        messages = writer.bind(sessions)
        passed = Passed()
        with failpoints.watched(passed):
            if way == "session":
                with sessions.begin() as session:
                    session.add(Order(id=1))
                    messages.produce(session, TOPIC, "1", partition=0)
            else:
                try:
                    with writer.transaction() as tx:
                        shop.put(tx, 1)
                        if way == "aborted":
                            raise ZeroDivisionError
                except ZeroDivisionError:
                    pass
    return passed.points


def in_task(shop, way):
    async def put(tx):
        await tx.connection.exec_driver_sql(INSERT)
        await tx.produce(TOPIC, "1", partition=0)

    async def work():
        engine = create_async_engine(shop.engine.url.set(drivername="sqlite+aiosqlite"))
        async with AsyncDualWriter("tasks", kafka=SETTINGS, database=engine) as writer:
            sessions = async_sessionmaker(engine)
            messages = writer.bind(sessions)
            passed = Passed()
            with failpoints.watched(passed):
                if way == "session":
                    async with sessions.begin() as session:
                        session.add(Order(id=1))
                        await messages.produce(session, TOPIC, "1", partition=0)
                else:
                    try:
                        async with writer.transaction() as tx:
                            await put(tx)
                            if way == "aborted":
                                raise ZeroDivisionError
                    except ZeroDivisionError:
                        pass
        await engine.dispose()
        return passed.points

    return asyncio.run(work())


@pytest.mark.parametrize("way", ["block", "aborted", "session"])
def test_a_task_passes_every_point_of_a_dual_write_in_the_functions_that_a_thread_runs(shop, way):
    tasks = in_task(shop, way)
    shop.database.execute("DELETE FROM orders")
    threads = in_thread(shop, way)
    assert [name for name, _ in tasks] == [name for name, _ in threads]
    assert len(tasks) >= 5
    for (name, by_task), (_, by_thread) in zip(tasks, threads, strict=True):
        assert by_task, name
        assert by_task == by_thread, name
