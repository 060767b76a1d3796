"""``AsyncDualWriter.leased``: the writer behind it, with a leased id.

A thread renews the lease, as for a ``DualWriter``: an event loop that is busy for long must not lose its id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dualwrite.asyncio.writer__apps_task_writer import ForTasks, TaskWriter, with_blocks_of
from dualwrite.protocol.leases import LeaseTiming
from dualwrite.writing.leased import LeasedWriter

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from typing_extensions import Unpack

    from dualwrite.writing.transaction__writing_arguments import CommonSettings


class LeasedTaskWriter(ForTasks, LeasedWriter):
    """A `LeasedWriter` that stands for writers of tasks. Its arguments are those of a `TaskWriter`."""

    def __init__(
        self,
        fleet: str,
        timing: LeaseTiming,
        asynchronous: AsyncEngine,
        *,
        database: Engine,
        session_factory: Callable[..., AsyncSession],
        **settings: Unpack[CommonSettings],
    ) -> None:
        def make(name: str) -> TaskWriter:
            return TaskWriter(name, asynchronous, database=database, session_factory=session_factory, **settings)

        both = with_blocks_of(asynchronous, database, settings.get("schema"))
        LeasedWriter.__init__(self, fleet, timing, make=make, database=both, **settings)
        self._asynchronous = asynchronous
