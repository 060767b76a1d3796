"""The dual writes of a user's tasks, and all that they show. As :mod:`harness.user_view`, for the writers of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker

from dualwrite import TransactionAborted
from harness.user_view import Order, Refused, View


async def _put(view: View, tx: Any, number: int) -> None:
    await tx.connection.execute(text(f"INSERT INTO orders (id) VALUES ({number})"))
    await tx.produce(view.topic, str(number), partition=0)


async def commit_and_abort(view: View) -> None:
    async with view.writer.transaction() as tx:
        await _put(view, tx, 1)
    view.state_of(tx)
    with view.error():
        async with view.writer.transaction() as tx:
            await _put(view, tx, 2)
            raise Refused
    view.state_of(tx)
    with view.error():
        async with asyncio.timeout(0), view.writer.transaction() as tx:
            await _put(view, tx, 3)
    async with view.writer.transaction() as tx:
        await tx.produce_many(view.topic, ["a", "b"], ["k", "l"])
        with view.error():
            async with tx.connection.begin_nested():
                await _put(view, tx, 4)
                raise Refused


async def sessions(view: View) -> None:
    async with view.writer.transaction() as tx:
        tx.session.add(Order(id=1))
        await tx.session.commit()
    with view.error():
        async with view.writer.transaction() as tx:
            tx.session.add(Order(id=1))
            await tx.produce(view.topic, "again", partition=0)
    factory = async_sessionmaker(view.engine)
    bound = view.writer.bind(factory)
    async with factory() as session:
        session.add(Order(id=2))
        await bound.produce(session, view.topic, "2", partition=0)
        await session.commit()
        session.add(Order(id=3))
        await bound.produce(session, view.topic, "3", partition=0)
        await session.rollback()
    with view.error():
        async with factory() as session:
            session.add(Order(id=2))
            await bound.produce(session, view.topic, "twice", partition=0)
            await session.commit()


async def refusals(view: View) -> None:
    async with view.writer.transaction() as tx:
        with view.error():
            async with view.writer.transaction():
                view.show("entered")
        with view.error():
            await view.writer.submit(lambda _: asyncio.sleep(0))
    with view.error():
        await tx.produce(view.topic, "late")
    with view.error():
        async with view.writer.transaction() as tx:
            await tx.connection.commit()
    for wrong in (view.engine, async_sessionmaker(view.engine)()):
        with view.error():
            async with view.writer.transaction(wrong):
                view.show("entered")
    with view.error():
        await view.writer.open()
    with view.error(), view.writer:
        view.show("entered")


async def runs_and_units(view: View) -> None:
    errors: list[BaseException] = [TransactionAborted("a conflict")] * 2

    async def work(tx: Any) -> str:
        await _put(view, tx, len(errors))
        if errors:
            raise errors.pop()
        return "done"

    view.show(await view.writer.run(work, longest_pause_s=0))

    async def unit(tx: Any, number: int) -> int:
        await _put(view, tx, number)
        if number == 12:
            raise Refused
        return number

    told = await asyncio.gather(
        *(view.writer.submit(lambda tx, number=number: unit(tx, number)) for number in range(10, 15)),
        return_exceptions=True,
    )
    view.show([type(one).__name__ if isinstance(one, BaseException) else one for one in told])


async def closed(view: View) -> None:
    view.show(view.writer.ready)
    await view.writer.close()
    await view.writer.close()
    with view.error():
        async with view.writer.transaction():
            view.show("entered")
    with view.error():
        await view.writer.submit(lambda _: asyncio.sleep(0))
    with view.error():
        await view.writer.open()


WAYS: Final[Mapping[str, Callable[[View], Awaitable[None]]]] = {
    way.__name__: way for way in (commit_and_abort, sessions, refusals, runs_and_units, closed)
}
"""The dual writes by name. Each begins with an empty table; the last one closes the writer."""
