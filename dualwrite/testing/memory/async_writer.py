"""``AsyncInMemoryWriter``: an ``AsyncDualWriter`` for unit tests, without servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import StaticPool

from dualwrite.asyncio.transaction import Sessions
from dualwrite.asyncio.transaction import session_of_block as async_session_of_block
from dualwrite.asyncio.writer import AsyncDualWriter, OfTasks, async_engine_of
from dualwrite.errors import ConfigurationError
from dualwrite.protocol.values import DEFAULT_LIMITS, WriterLimits
from dualwrite.stores.sql.access import url_errors_mapped
from dualwrite.stores.sql.drivers import roll_back_before_closing
from dualwrite.testing.memory.writer import InMemory, InMemoryWriter

if TYPE_CHECKING:
    from dualwrite.asyncio.writer import TaskWriter
    from dualwrite.interfaces import Observer
    from dualwrite.protocol.outbox import Outbox
    from dualwrite.writing.transaction import Serializers


class AsyncInMemoryWriter(InMemory, AsyncDualWriter):
    """Stands in for an `AsyncDualWriter` in unit tests, as `InMemoryWriter` does for a `DualWriter`.

    The blocks, bound sessions, units of groups, cancellations and errors are the product's own code. Rows are really
    committed and rolled back in the engine's database.

    Args:
        transactional_id: As for `AsyncDualWriter`.
        database: An ``AsyncEngine`` or a URL; a new SQLite database in memory (aiosqlite) if not given. As for
            `InMemoryWriter`, dual writes on an engine with a ``StaticPool`` run one at a time.
        session_factory: As for `AsyncDualWriter`.
        outbox, limits, serializers, bulk, telemetry, max_message_bytes: As for `InMemoryWriter`.

    Raises:
        ConfigurationError: A setting cannot work with an `AsyncDualWriter` either.
    """

    def __init__(
        self,
        transactional_id: str = "in-memory",
        *,
        database: AsyncEngine | str | None = None,
        outbox: Outbox = "never",
        limits: WriterLimits = DEFAULT_LIMITS,
        session_factory: Callable[..., AsyncSession] = async_session_of_block,
        bulk: bool = False,
        serializers: Serializers | None = None,
        telemetry: Observer | None = None,
        max_message_bytes: int = 1_000_000,
    ) -> None:
        self._owns_engine = not isinstance(database, AsyncEngine)
        self._engine = _new_async_database() if database is None else async_engine_of(database)
        self._makes_own = False
        self._limits = limits
        memory = _ForTasks(
            transactional_id,
            self._engine,
            outbox=outbox,
            limits=limits,
            session_factory=Sessions(self._engine, session_factory).make,
            bulk=bulk,
            serializers=serializers,
            telemetry=telemetry,
            max_message_bytes=max_message_bytes,
        )
        self._inside = memory._inside  # noqa: SLF001 - what both of them show
        self._writer = cast("TaskWriter", memory)  # it has the methods that are called
        self._groups = memory.groups_of_tasks(limits, self._opened)
        self._loop = None
        self._pool = None

    @classmethod
    def leased(cls, fleet: str, **settings: object) -> NoReturn:
        """Raise: there is no fleet in memory.

        Raises:
            ConfigurationError: Always.
        """
        del settings
        raise ConfigurationError(
            "a writer in memory leases no id", transactional_id=fleet, next_step="make an AsyncInMemoryWriter"
        )

    @property
    def engine(self) -> AsyncEngine:
        """The engine."""
        return self._engine


class _ForTasks(OfTasks, InMemoryWriter):
    """An `InMemoryWriter` for greenlets, as :class:`dualwrite.asyncio.writer.ForTasks` is a `DualWriter`."""

    def __init__(self, transactional_id: str, asynchronous: AsyncEngine, **settings: Any) -> None:
        super().__init__(transactional_id, database=asynchronous.sync_engine, **settings)
        self._asynchronous = asynchronous
        roll_back_before_closing(asynchronous.sync_engine)


def _new_async_database() -> AsyncEngine:
    with url_errors_mapped():
        return create_async_engine("sqlite+aiosqlite://", poolclass=StaticPool)
