"""The writer behind the asynchronous classes: its blocks run in greenlets, on connections that await."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol

from dualwrite.asyncio.group_commit import AsyncGroups
from dualwrite.asyncio.transaction import Sessions, session_of_block
from dualwrite.asyncio.transaction__apps_async_sessions import AsyncBoundSessions
from dualwrite.stores.opening import database_of
from dualwrite.stores.sql.database import SqlDatabase, sql_of
from dualwrite.stores.sql.drivers__stores_sql_drivers_closing import roll_back_before_closing
from dualwrite.waiting import elsewhere
from dualwrite.writing import transaction__writing_entered
from dualwrite.writing.writer import DualWriter

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from typing_extensions import Unpack

    from dualwrite.protocol.values__protocol_allowed import WriterLimits
    from dualwrite.writing.lane_pool import Lanes
    from dualwrite.writing.sessions import Block
    from dualwrite.writing.transaction import Transaction
    from dualwrite.writing.transaction__writing_arguments import CommonSettings

THREADS: Final = 4
"""In addition to one for each lane: for work that can only block, which with the native engine is only claiming and
settling."""


class _Writer(Protocol):
    """A writer that :class:`OfTasks` is a part of."""

    transactional_id: str
    _asynchronous: AsyncEngine
    _group_runners: int
    _lanes: Lanes

    def transaction(self) -> AbstractContextManager[Transaction]: ...
    def _joined(self) -> tuple[Engine | None, Block]: ...
    def _note_group(self, units: int) -> None: ...
    def _require_open(self) -> None: ...


class OfTasks:
    """The part of a writer that only tasks need. Called in greenlets (:mod:`dualwrite.asyncio.greenlets`)."""

    def bind_for_tasks(self: _Writer, sessions: object, opened: Callable[[], ThreadPoolExecutor]) -> AsyncBoundSessions:
        """See :meth:`AsyncDualWriter.bind`."""
        joins_first, block = self._joined()
        return AsyncBoundSessions(
            self.transactional_id,
            sessions,
            block,
            engine=self._asynchronous,
            opened=opened,
            joins_first=joins_first,
        )

    def groups_of_tasks(self: _Writer, limits: WriterLimits, pool: Callable[[], ThreadPoolExecutor]) -> AsyncGroups:
        """The groups of :meth:`AsyncDualWriter.submit`."""
        return AsyncGroups(
            self.transactional_id,
            self.transaction,
            limits,
            runners=self._group_runners,
            grouped=self._note_group,
            engine=self._asynchronous,
            pool=pool,
        )

    def refuse_nested(self: _Writer) -> None:
        """Raise if the writer is not open, or the task is inside a transaction or a unit of it."""
        self._require_open()
        transaction__writing_entered.refuse_nested(self, self.transactional_id)


class ForTasks(OfTasks, DualWriter):
    """A :class:`DualWriter` for greenlets (:mod:`dualwrite.asyncio.greenlets`): all its methods are called in them."""

    _asynchronous: AsyncEngine

    def open(self) -> None:
        """As :meth:`DualWriter.open`, without blocking the event loop."""
        elsewhere(super().open)
        try:
            with self._database.connect() as connection:
                self._opened().context.store.check_same_database(connection)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """As :meth:`DualWriter.close`, without blocking the event loop."""
        elsewhere(super().close)


def with_blocks_of(asynchronous: AsyncEngine, database: Engine | SqlDatabase, schema: str | None) -> SqlDatabase:
    """The database for threads, whose blocks run on the asynchronous engine."""
    own = sql_of(database_of(database, schema), "writers of tasks")
    return SqlDatabase(own.engine, own.schema, blocks=asynchronous.sync_engine)


class TaskWriter(ForTasks):
    """The writer of one transactional id.

    Args:
        transactional_id: As for :class:`DualWriter`.
        asynchronous: The engine of the blocks' connections.
        database: Leads to the same database, for the writer's own transactions, in threads.
        session_factory: Makes the ORM session, called with ``bind=connection``.
        settings: As for :class:`DualWriter`.
    """

    def __init__(
        self,
        transactional_id: str,
        asynchronous: AsyncEngine,
        *,
        database: Engine | SqlDatabase,
        session_factory: Callable[..., AsyncSession] = session_of_block,
        **settings: Unpack[CommonSettings],
    ) -> None:
        made = Sessions(asynchronous, session_factory).make
        both = with_blocks_of(asynchronous, database, settings.get("schema"))
        super().__init__(transactional_id, database=both, session_factory=made, **settings)
        self._asynchronous = asynchronous
        roll_back_before_closing(asynchronous.sync_engine)
