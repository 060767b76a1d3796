"""Cancels dual writes: a task at its n-th await, for every n."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

from dualwrite.protocol.lives import WriteState

Cancel = Callable[["asyncio.Task[Any]", "asyncio.Future[Any] | None"], object]
"""Cancels a task that awaits a future, or, without one, its next turn."""


def at_once(task: asyncio.Task[Any], awaited: asyncio.Future[Any] | None) -> None:
    """Cancel the task as soon as it awaits."""
    del awaited
    task.cancel()


def at_last(task: asyncio.Task[Any], awaited: asyncio.Future[Any] | None) -> None:
    """Cancel the task when what it awaits has happened, but before it goes on."""
    if awaited is None:
        task.cancel()
    else:
        awaited.add_done_callback(lambda _: task.cancel())


def with_all_others(task: asyncio.Task[Any], awaited: asyncio.Future[Any] | None) -> None:
    """Cancel every task but the one called "spared", as the end of ``asyncio.run`` does."""
    del task, awaited
    for one in asyncio.all_tasks():
        if one.get_name() != "spared":
            one.cancel()


class Cancelling:
    """Awaits a coroutine, and cancels the task once.

    Args:
        coroutine: The coroutine.
        number: At which await, from 1 on.
        cancel: How.
        counts: Whether an await counts.

    Attributes:
        awaits: How many awaits have counted.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], number: int, cancel: Cancel, counts: Callable[[], bool]
    ) -> None:
        self._coroutine = coroutine
        self._number = number
        self._cancel = cancel
        self._counts = counts
        self.awaits = 0

    @property
    def came(self) -> bool:
        """Whether there were so many awaits."""
        return self.awaits >= self._number

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = lambda: self._coroutine.send(None)  # noqa: E731 - as below
        while True:
            try:
                awaited = step()
            except StopIteration as ended:
                return ended.value
            self.awaits += self._counts()
            if self.awaits == self._number and self._counts():
                task = asyncio.current_task()
                assert task is not None
                self._cancel(task, awaited)
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001 - passed on
                step = lambda error=error: self._coroutine.throw(error)  # noqa: E731
            else:
                step = lambda: self._coroutine.send(None)  # noqa: E731


Write = Callable[[int, list[Any]], Coroutine[Any, Any, None]]
"""Writes this number on both sides, and notes the transaction in the list once it has begun."""


async def cancelled_at_each(write: Write, cancel: Cancel) -> list[int]:
    """Cancel a dual write at its first await, another at its second one, and so on until one ends by itself.

    Then the same with the awaits from the COMMIT on: how many there are before it depends on when the broker answers.

    Returns:
        The numbers that both sides must have, by the states of their dual writes.
    """
    this = asyncio.current_task()
    assert this is not None
    this.set_name("spared")
    numbers = itertools.count()
    committed: list[int] = []
    for from_commit_on in (False, True):
        seen = set()
        for at in itertools.count(1):
            begun: list[Any] = []
            number = next(numbers)
            counts = partial(_is_recorded, begun) if from_commit_on else lambda: True
            cancelling = Cancelling(write(number, begun), at, cancel, counts)
            await asyncio.create_task(_to_its_end(cancelling))
            state = begun[0].state if begun else WriteState.ABORTED
            assert state in {WriteState.ABORTED, WriteState.COMPLETED}, f"{state} after await {at}"
            if state is WriteState.COMPLETED:
                committed.append(number)
            if not cancelling.came:
                assert at > (
                    2 if from_commit_on else 3
                )  # asyncpg awaits a COMMIT once, and the broker is awaited for EndTxn
                break
            seen.add(state)
        if cancel is not with_all_others:
            # Then the driver's COMMIT is cancelled, too: the database says what became of it.
            assert from_commit_on or WriteState.ABORTED in seen, "none was cancelled before its COMMIT"
            assert not from_commit_on or WriteState.ABORTED not in seen, "aborted after its COMMIT was sent"
    gc.collect()  # a driver's task that was cancelled before it began warns in this test, and in no other
    return committed


def _is_recorded(begun: list[Any]) -> bool:
    return bool(begun) and begun[0].state in _FROM_COMMIT_ON


_FROM_COMMIT_ON = {WriteState.RECORDED, WriteState.IN_DOUBT, WriteState.DECIDED, WriteState.COMPLETED}


async def _to_its_end(cancelling: Cancelling) -> None:
    try:
        await cancelling
    except asyncio.CancelledError:
        assert cancelling.came, "cancelled by something else"
    else:
        assert not cancelling.came, f"the cancellation at await {cancelling.awaits} has vanished"
