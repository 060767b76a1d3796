"""Makes engines from database URLs."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from sqlalchemy import URL, Dialect, Engine, create_engine, exc, make_url

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

LIVENESS: Final[Mapping[str, int]] = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""libpq settings that detect the loss of a server's machine or network within half a minute, not hours."""


_AWAITED: Final = {("postgresql", "psycopg"), ("sqlite", "aiosqlite")}
_AWAITING: Final = {"sqlite": "sqlite+aiosqlite", "sqlite+pysqlite": "sqlite+aiosqlite"}
_BLOCKING: Final = {"sqlite+aiosqlite": "sqlite", "postgresql+psycopg_async": "postgresql+psycopg"}


def engine_of(engine: Engine | URL | str) -> Engine:
    """The engine itself, or a new one for a URL.

    A new engine connects on first use and detects lost servers; the caller disposes of it.

    Raises:
        ConfigurationError: The argument is neither (an ``AsyncEngine``, say), or the URL's driver is not installed.
    """
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, (str, URL)):
        raise _no_engine(engine)
    with _refused():
        url = make_url(engine)
        return create_engine(url, connect_args={**liveness_of(url), **_unprepared(url)})


def async_engine_of(engine: object) -> AsyncEngine:
    """The engine itself, or a new one for a URL, as :func:`engine_of`.

    Raises:
        ConfigurationError: The argument is neither (an ``Engine``, say), the URL's driver is not installed, or the engine's
            driver is not supported.
    """
    from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine  # noqa: PLC0415 - for those that use it

    if isinstance(engine, (str, URL)):
        with _refused():
            url = _with_driver(make_url(engine), _AWAITING)
            engine = create_async_engine(url, connect_args={**liveness_of(url), **_unprepared(url)})
    if not isinstance(engine, AsyncEngine):
        kind = type(engine).__name__
        raise ConfigurationError(
            f"{kind} is not an asynchronous engine",
            next_step="give create_async_engine() the same database with postgresql+psycopg:// or sqlite+aiosqlite://"
            if isinstance(engine, Engine)
            else "give a SQLAlchemy AsyncEngine or a database URL",
        )
    if (found := (engine.dialect.name, engine.dialect.driver)) not in _AWAITED:
        raise ConfigurationError(
            f"{'+'.join(found)} is not supported by an AsyncDualWriter",
            next_step="use postgresql+psycopg://... (psycopg 3) or sqlite+aiosqlite:///...",
        )
    return engine


def blocking_twin(engine: AsyncEngine) -> Engine:
    """An engine for threads, which connects to the same URL. The caller disposes of it."""
    return engine_of(_with_driver(engine.url, _BLOCKING))


def _with_driver(url: URL, drivers: Mapping[str, str]) -> URL:
    name = drivers.get(url.drivername)
    return url if name is None else url.set(drivername=name)


def _unprepared(url: URL) -> Mapping[str, None]:
    """Turn off named prepared statements, which no URL can do: a pooler may switch connections between transactions."""
    return {"prepare_threshold": None} if url.get_driver_name().startswith("psycopg") else {}


def liveness_of(url: URL) -> Mapping[str, int]:
    """The :data:`LIVENESS` settings that the URL does not set. Empty if it names a service, whose file may set them."""
    if url.get_backend_name() != "postgresql" or "service" in url.query:
        return {}
    return {name: value for name, value in LIVENESS.items() if name not in url.query}


def _no_engine(given: object) -> ConfigurationError:
    kind = type(given).__name__
    if hasattr(given, "sync_engine"):  # SQLAlchemy's asyncio part may not be installed
        return ConfigurationError(
            f"{kind} cannot be used by a writer for threads",
            next_step="give it to AsyncDualWriter; or give create_engine() the same database with postgresql+psycopg:// or "
            "sqlite://",
        )
    return ConfigurationError(f"{kind} is not an engine", next_step="give a SQLAlchemy Engine or a database URL")


def kind_of(url: URL | str) -> Dialect:
    """The kind of database that a URL names. Works without its driver.

    Raises:
        ConfigurationError: The argument is not a URL, or SQLAlchemy does not know that kind of database.
    """
    with _refused():
        return make_url(url).get_dialect()()


@contextmanager
def _refused() -> Generator[None, None, None]:
    try:
        yield
    except (exc.ArgumentError, ValueError, ImportError) as error:
        absent = (error.name or "its driver") if isinstance(error, ImportError) else None
        why = f"{absent} is not installed" if absent else "it cannot be read"
        # "from None": SQLAlchemy's message may repeat the URL, password included.
        raise ConfigurationError(
            f"the database URL cannot be used: {why}",
            next_step="write postgresql+psycopg://user@host/name (pip install 'dualwrite[postgresql]') or sqlite:///file; in a "
            "password, @ is %40 and : is %3A",
        ) from None
