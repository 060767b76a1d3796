"""The types of a writer's settings; and names the conflicts of the statements of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypedDict

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.access__stores_sql_access_failures import conflict_behind

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session
    from typing_extensions import Required

    from dualwrite.interfaces__ports_database import Database
    from dualwrite.interfaces__ports_observer import Observer
    from dualwrite.kafka.producer__kafka_producer_choice import EngineName
    from dualwrite.protocol.values__protocol_allowed import WriterLimits
    from dualwrite.writing.dual_write__writing_blocks_serializing import Serializers
    from dualwrite.writing.lane__writing_lanes_losses import OnLoss


class CommonOptions(TypedDict, total=False):
    """The keyword arguments that all writers share, and that do not say which servers they use."""

    limits: WriterLimits
    serializers: Serializers | None
    bulk: bool
    producer_engine: EngineName
    on_loss: OnLoss | None
    telemetry: Observer | None


class WriterOptions(CommonOptions, total=False):
    """The keyword arguments of `DualWriter` that do not say which servers it uses."""

    session_factory: Callable[..., Session]


class AsyncWriterOptions(CommonOptions, total=False):
    """The keyword arguments of `AsyncDualWriter` that do not say which servers it uses."""

    session_factory: Callable[..., AsyncSession]


class CommonSettings(CommonOptions, total=False):
    """The keyword arguments that `DualWriter` and `AsyncDualWriter` share."""

    kafka: Required[Mapping[str, object]]
    schema: str | None


class WriterSettings(CommonSettings, WriterOptions, total=False):
    """The keyword arguments of `DualWriter`."""

    database: Required[Engine | Database | str]


class AsyncWriterSettings(CommonSettings, AsyncWriterOptions, total=False):
    """The keyword arguments of `AsyncDualWriter`."""

    database: Required[AsyncEngine | str]
    own_engine: Engine | str | None


def check_options(given: Mapping[str, object]) -> None:
    """Refuse what is not an argument of a writer, or what the caller gives to it.

    Raises:
        ConfigurationError: There is such an argument.
    """
    known = WriterOptions.__annotations__.keys()
    if unknown := sorted(given.keys() - known):
        raise ConfigurationError(
            f"writer has {', '.join(map(repr, unknown))}", next_step=f"it may have {', '.join(sorted(known))}"
        )


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
