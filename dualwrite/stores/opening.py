"""The database behind what a caller gives: an engine, a URL, or a database itself."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final, cast

from sqlalchemy import URL

from dualwrite.errors import ConfigurationError
from dualwrite.interfaces import Database
from dualwrite.stores.sql.access import engine_of
from dualwrite.stores.sql.database import SqlDatabase

if TYPE_CHECKING:
    from sqlalchemy import Engine

_OTHERS: Final[dict[str, str]] = {
    "rocksdb": "dualwrite.stores.keyed.rocksdb.RocksDatabase",
    "zookeeper": "dualwrite.stores.keyed.zookeeper.ZooKeeperDatabase",
}
"""By the beginning of its URLs, the class of a database that SQLAlchemy does not know; each has ``from_url``."""


def database_of(given: Engine | Database | URL | str, schema: str | None = None) -> Database:
    """The database itself, or a new one over an engine or a URL. It connects on first use."""
    made = _made(given)
    if made is None:
        return SqlDatabase(engine_of(cast("Engine | URL | str", given)), schema)
    if schema not in {None, made.schema}:
        raise ConfigurationError(
            f"schema is {schema!r}, and the database is {made.traits.name}", next_step="leave schema out"
        )
    return made


def _made(given: object) -> Database | None:
    if isinstance(given, Database):
        return given
    if not isinstance(given, str):
        return None
    place = _OTHERS.get(given.partition(":")[0])
    if place is None:
        return None
    module, _, name = place.rpartition(".")
    from_url = cast("Callable[[str], Database]", getattr(import_module(module), name).from_url)
    return from_url(given)


def has_tables(url: str) -> bool:
    """Whether a URL names a database whose tables must be made by a migration."""
    return url.partition(":")[0] not in _OTHERS


def is_made_here(given: object) -> bool:
    """Whether :func:`database_of` makes the connections, so that the caller closes the database."""
    return isinstance(given, (str, URL))


@contextmanager
def opened(given: Engine | Database | URL | str, schema: str | None = None) -> Generator[Database, None, None]:
    """The database for a block, which closes it if it was made from a URL. Checked."""
    database = database_of(given, schema)
    try:
        database.check()
        yield database
    finally:
        if is_made_here(given):
            database.close()
