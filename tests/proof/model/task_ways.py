"""One work of a task in a random schedule: a block, a bound session, a unit of a group as code or as rows; how it ended, and what both sides have of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from harness.bound import Order
from harness.served import SETTINGS, TOPIC
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import sessionmaker

from dualwrite import AsyncDualWriter, DualWriter, ProducerRecord, RowUnit, WriterLimits
from dualwrite.errors import DualWriteError
from dualwrite.failpoints import FailpointError
from dualwrite.protocol.lives import WriteState

if TYPE_CHECKING:
    from harness.stepped import SteppedLoop
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import async_sessionmaker

WAYS: Final = ("block", "session", "session", "unit", "rows", "rows", "rows")
_INSERT: Final = text("INSERT INTO orders (id) VALUES (:id)")
_ENDED = {WriteState.ABORTED, WriteState.COMPLETED}


class WrongOutcome(Exception):
    """Both sides show something else than a caller was told."""


@dataclass(eq=False)
class Work:
    """One dual write, or one unit of a group.

    Attributes:
        number: Its row and its message.
        way: How it is written.
        fails: Whether it raises an error of its own.
        within_s: How long a unit may wait to begin; None sets no limit.
        transaction: The last one that it has begun, if any.
        told: How it ended, for its caller.
    """

    number: int
    way: str
    fails: bool
    within_s: float | None = None
    transaction: Any = None
    told: str = "nothing"

    def note(self, error: BaseException | None, *, undisturbed: bool) -> None:
        """Note how it ended, and whether no fail point has raised meanwhile: it may have been in the end of this one."""
        state = None if self.transaction is None else self.transaction.state
        if error is None:
            self.told = "committed"
        elif isinstance(error, (ZeroDivisionError, IntegrityError)):
            _demand(self.fails, f"{self}: failed by itself: {error}")
            self.told = "failed"
        elif isinstance(error, asyncio.CancelledError):
            self.told = "cancelled"
            if self.way != "unit" and undisturbed:
                _demand(state in {None, *_ENDED}, f"{self}: cancelled, and left {state}")
        elif isinstance(error, FailpointError):
            self.told = "raised"
        elif isinstance(error, DualWriteError):
            self.told = error.outcome
        else:
            raise error
        if self.way != "unit" and state is WriteState.COMPLETED:
            _demand(self.told not in {"aborted", "failed"}, f"{self}: completed")
            self.told = f"{self.told}, committed" if error is not None else "committed"

    def check(self, rows: Counter[str], messages: Counter[str]) -> None:
        """Compare what was told with both sides."""
        found = rows[str(self.number)], messages[str(self.number)]
        _demand(found in {(0, 0), (1, 1)}, f"{self}: {found[0]} rows, {found[1]} messages")
        if self.told.endswith("committed"):
            _demand(found == (1, 1), f"{self}: nothing is there")
        if self.told in {"none", "aborted", "failed"}:
            _demand(found == (0, 0), f"{self}: it is there")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WrongOutcome(otherwise)


class Ways:
    """Does a work in its way."""

    def __init__(self, writer: AsyncDualWriter, sessions: async_sessionmaker[Any], plain: Plain | None) -> None:
        self._writer = writer
        self._sessions = sessions
        self._messages = writer.bind(sessions)
        self._plain = plain

    def __call__(self, work: Work) -> Awaitable[None]:
        if work.way == "block":
            return self._block(work)
        if work.way == "session":
            return self._session(work)
        if work.way == "unit":
            return self._writer.submit(partial(self._unit, work), within_s=work.within_s)
        if work.way == "rows":
            return self._writer.submit(_row_unit(work), within_s=work.within_s)
        assert self._plain is not None
        return self._plain.write(work)

    async def _block(self, work: Work) -> None:
        async with self._writer.transaction() as tx:
            work.transaction = tx
            await _put(tx, work)

    async def _unit(self, work: Work, tx: Any) -> None:
        work.transaction = tx
        if work.fails:
            await asyncio.gather(_put_later(tx, work), _put(tx, work))
        await _put(tx, work)

    async def _session(self, work: Work) -> None:
        async with self._sessions() as session:
            session.add(Order(id=work.number))
            work.transaction = await self._messages.join(session)
            await self._messages.produce(session, TOPIC, str(work.number), partition=0)
            if work.fails:
                raise ZeroDivisionError
            await session.commit()


def _row_unit(work: Work) -> RowUnit:
    """To fail, its row comes twice."""
    rows = [{"id": work.number}] * (2 if work.fails else 1)
    return RowUnit(_INSERT, rows, messages=[ProducerRecord(TOPIC, str(work.number), partition=0)])


async def _put(tx: Any, work: Work) -> None:
    await tx.connection.execute(_INSERT, {"id": work.number})
    await tx.produce(TOPIC, str(work.number), partition=0)
    if work.fails:
        raise ZeroDivisionError


async def _put_later(tx: Any, work: Work) -> None:
    """Go on after the unit has ended, as what a gather leaves behind does."""
    connection, produce = tx.connection, tx.produce
    for later in range(1, 6):
        await asyncio.sleep(work.number % 3 * 0.001 * later)
        await connection.execute(_INSERT, {"id": -10 * work.number - later})
        await produce(TOPIC, str(work.number), partition=0)


class Plain:
    """A writer for threads, whose bound sessions run side by side in the same loop."""

    def __init__(self, name: str, loop: SteppedLoop, own: Engine) -> None:
        self._loop = loop
        self._writer = DualWriter(
            name, kafka=SETTINGS, database=own, limits=WriterLimits(max_lanes=2, lane_timeout_s=1000.0)
        )
        self._sessions = sessionmaker(own)
        self._messages = self._writer.bind(self._sessions)

    async def open(self) -> None:
        await self._loop.run_in_executor(None, self._writer.open)

    async def close(self) -> None:
        await self._loop.run_in_executor(None, self._writer.close)

    async def write(self, work: Work) -> None:
        await self._loop.run_in_executor(None, partial(self._write, work))

    def _write(self, work: Work) -> None:
        with self._sessions() as session:
            session.add(Order(id=work.number))
            work.transaction = self._messages.join(session)
            self._messages.produce(session, TOPIC, str(work.number), partition=0)
            if work.fails:
                raise ZeroDivisionError
            session.commit()
