"""Makes engines from database URLs."""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, Dialect, Engine, create_engine, event, exc, make_url

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.tables__stores_sql_tables_column_types import MYSQL

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

_TCP: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}

_AWAITED: Final = {("postgresql", "psycopg"), ("sqlite", "aiosqlite")}
_AWAITING: Final = {"sqlite": "sqlite+aiosqlite", "sqlite+pysqlite": "sqlite+aiosqlite"}
_CLIENTS: Final = {"Rdict": "RocksDatabase", "KazooClient": "ZooKeeperDatabase"}
"""By the class of another database's client, what a writer takes in its place."""
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
        return new_engine(make_url(engine))


def new_engine(url: URL, *, connect_args: Mapping[str, Any] | None = None, **options: Any) -> Engine:
    """A new engine, which connects on first use and detects lost servers; the caller disposes of it.

    Args:
        url: Where to.
        connect_args: Arguments of the driver, beside those that every engine of the library has.
        options: More of SQLAlchemy's.

    Raises:
        SQLAlchemyError, ImportError: The driver is not installed.
    """
    given = {**liveness_of(url), **_unprepared(url), **(connect_args or {})}
    made = create_engine(url, connect_args=given, **options)
    if url.get_backend_name() in MYSQL:
        event.listen(made, "connect", _keep_alive)
    return made


def _keep_alive(driver: Any, _: object) -> None:
    """As :data:`LIVENESS`, for MySQL's drivers, which have no settings for it and leave it to the system: hours."""
    with socket.socket(fileno=os.dup(fileno_of(driver))) as own:
        if own.family not in {socket.AF_INET, socket.AF_INET6}:
            return
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP.items():
            if hasattr(socket, name):
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def fileno_of(driver: Any) -> int:
    """The descriptor of the socket of a connection of PyMySQL or mysqlclient."""
    return int(driver.fileno() if hasattr(driver, "fileno") else driver._sock.fileno())  # noqa: SLF001 - PyMySQL has no other way


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
            if url.get_backend_name() in MYSQL:
                raise _not_awaited(url.get_backend_name(), url.get_driver_name())
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
        raise _not_awaited(*found)
    return engine


def _not_awaited(database: str, driver: str) -> ConfigurationError:
    step = "use postgresql+psycopg://... (psycopg 3) or sqlite+aiosqlite:///..."
    if database in MYSQL:
        step = "use a DualWriter with mysql+pymysql://... in a thread (asyncio.to_thread)"
    return ConfigurationError(f"{database}+{driver} is not supported by an AsyncDualWriter", next_step=step)


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
    made_of = _CLIENTS.get(kind)
    return ConfigurationError(
        f"{kind} is not an engine",
        next_step="give a SQLAlchemy Engine or a database URL" if made_of is None else f"give a {made_of} made of it",
    )


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
            next_step="write postgresql+psycopg://user@host/name (pip install 'dualwrite[postgresql]'), "
            "mysql+pymysql://user@host/name (MariaDB and MySQL; pip install 'dualwrite[mariadb]') or sqlite:///file; in a "
            "password, @ is %40 and : is %3A",
        ) from None
