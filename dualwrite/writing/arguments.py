"""Checks a writer's arguments, and names the conflicts of the statements of its blocks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from dualwrite.errors import ConfigurationError
from dualwrite.stores.failures import conflict_behind


def check_arguments(transactional_id: str, max_lanes: int) -> None:
    """Refuse a name or a number of lanes that cannot work.

    Raises:
        ConfigurationError: It cannot.
    """
    if not 1 <= len(transactional_id) <= 240 or "#" in transactional_id:  # noqa: PLR2004 - leaves room for a lane's number
        raise ConfigurationError(
            f"{transactional_id!r} cannot be a transactional id",
            next_step="use 1 to 240 characters without '#', which separates the numbers of lanes",
        )
    if max_lanes < 1:
        raise ConfigurationError(f"max_lanes is {max_lanes}; it must be at least 1", transactional_id=transactional_id)


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
