"""The types of a writer's settings; and names the conflicts of the statements of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypedDict

from dualwrite.stores.sql.access.failures import conflict_behind

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session
    from typing_extensions import Required

    from dualwrite.kafka.producer.choice import EngineName
    from dualwrite.ports.database import Database
    from dualwrite.ports.observer import Observer
    from dualwrite.protocol.process.grouping import GroupLimits
    from dualwrite.writing.blocks.serializing import Serializers
    from dualwrite.writing.lanes.losses import OnLoss


class CommonSettings(TypedDict, total=False):
    """The keyword arguments that `DualWriter` and `AsyncDualWriter` share."""

    kafka: Required[Mapping[str, object]]
    schema: str | None
    max_lanes: int
    timeout_s: float
    lane_timeout_s: float
    margin_s: float
    idle_after_s: float
    paused_owner_timeout_s: float | None
    bulk: bool
    producer_engine: EngineName
    owner: str | None
    on_loss: OnLoss | None
    key_serializer: Serializers
    value_serializer: Serializers
    telemetry: Observer | None
    groups: GroupLimits


class WriterSettings(CommonSettings, total=False):
    """The keyword arguments of `DualWriter`."""

    database: Required[Engine | Database | str]
    session_factory: Callable[..., Session]


class AsyncWriterSettings(CommonSettings, total=False):
    """The keyword arguments of `AsyncDualWriter`."""

    database: Required[AsyncEngine | str]
    own_engine: Engine | str | None
    session_factory: Callable[..., AsyncSession]


@contextmanager
def conflicts_named(transactional_id: str) -> Generator[None, None, None]:
    """Name the deadlock or serialization failure of a statement that leaves the block.

    Raises:
        TransactionAborted: One does; it is the cause.
    """
    try:
        yield
    except Exception as error:
        if (conflict := conflict_behind(error, transactional_id)) is not None:
            raise conflict from error
        raise
