"""A worker whose operations are written by the tasks of an event loop, in blocks or in sessions that are bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from dualwrite import AsyncDualWriter
from dualwrite.asyncio.writer import async_engine_of
from dualwrite.testing import Journal
from harness.worker import LOSE_CONNECTION, OPERATIONS, OnPurpose, Operations, make_durable, settings_of

if TYPE_CHECKING:
    from dualwrite import AsyncTransaction


def write_in_tasks(job: dict, engine: Engine, opened: Callable[[], None]) -> None:
    """Open the writer, write the operations, close it."""
    asyncio.run(_write(job, engine, opened))


async def _write(job: dict, engine: Engine, opened: Callable[[], None]) -> None:
    asynchronous = async_engine_of(job.get("task_url", job["url"]))
    make_durable(asynchronous.sync_engine)
    try:
        async with AsyncDualWriter(
            job["transactional_id"], database=asynchronous, own_engine=engine, **settings_of(job)
        ) as writer:
            opened()
            with Journal(job["journal"]) as journal:
                writing = _Writing(job, asynchronous, writer, journal)
                tasks = [asyncio.create_task(writing.run(number)) for number in range(job.get("threads", 1))]
                await asyncio.wait(tasks)
                for task in tasks:
                    task.result()
    finally:
        await asynchronous.dispose()


class _Writing:
    """``run`` writes one task's share."""

    def __init__(self, job: dict, engine: AsyncEngine, writer: AsyncDualWriter, journal: Journal) -> None:
        self._job = job
        self._writer = writer
        self._operations = Operations(job, journal)
        self._one = self._in_session if job.get("session") else self._in_block
        self._sessions = async_sessionmaker(engine)
        self._bound = writer.bind(self._sessions)

    async def run(self, task: int) -> None:
        if self._job.get("units_at_once"):
            await self._run_units(task)
            return
        for operation, abort in self._operations.of(task):
            with self._operations.noted(operation, task):
                await self._one(operation, abort=abort)

    async def _run_units(self, task: int) -> None:
        """All units of this task are under way at once."""
        waiting = []
        for operation, abort in self._operations.of(task):
            self._operations.begun(operation, task)
            unit = self._writer.submit(self._unit(operation, task, abort=abort), key=task)
            waiting.append((operation, asyncio.create_task(unit)))
        await asyncio.wait([under_way for _, under_way in waiting])
        for operation, under_way in waiting:
            with self._operations.noted(operation, task):
                under_way.result()

    def _unit(self, operation: str, task: int, *, abort: bool) -> Callable[[AsyncTransaction], Awaitable[None]]:
        async def unit(tx: AsyncTransaction) -> None:
            await self._both(tx, operation, abort=abort)
            if self._operations.spoils(task, operation):
                await tx.connection.execute(LOSE_CONNECTION)

        return unit

    async def _in_block(self, operation: str, *, abort: bool) -> None:
        async with self._writer.transaction() as tx:
            await self._both(tx, operation, abort=abort)

    async def _both(self, tx: AsyncTransaction, operation: str, *, abort: bool) -> None:
        for partition in range(self._job.get("partitions", 2)):
            await tx.produce(self._job["topic"], value=operation, key=str(partition), partition=partition)
        await tx.connection.execute(OPERATIONS.insert().values(id=operation))
        if abort:
            raise OnPurpose(operation)

    async def _in_session(self, operation: str, *, abort: bool) -> None:
        async with self._sessions() as session:
            await session.execute(OPERATIONS.insert().values(id=operation))
            for partition in range(self._job.get("partitions", 2)):
                async with session.begin_nested():
                    await self._bound.produce(
                        session, self._job["topic"], value=operation, key=str(partition), partition=partition
                    )
            if abort:
                raise OnPurpose(operation)
            await session.commit()
