"""Where a URL may stand for an engine."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final

from sqlalchemy import URL, Dialect, Engine, create_engine, exc, make_url

from dualwrite.errors import ConfigurationError

LIVENESS: Final[Mapping[str, int]] = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""libpq's own settings, so that a server whose machine or network is gone is noticed within half a minute, not hours."""


def engine_of(engine: Engine | str) -> Engine:
    """The engine, or a new one for its URL, which connects at first use and notices lost servers; the caller disposes of it.

    Raises:
        ConfigurationError: It is neither (an ``AsyncEngine``, say), or the URL's driver is not installed.
    """
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, (str, URL)):
        raise _no_engine(engine)
    with _refused():
        url = make_url(engine)
        return create_engine(url, connect_args={**liveness_of(url), **_unprepared(url)})


def _unprepared(url: URL) -> Mapping[str, None]:
    """No URL can say it: no statements prepared by name, since a pooler may give the next transaction another connection."""
    return {"prepare_threshold": None} if url.get_driver_name() == "psycopg" else {}


def liveness_of(url: URL) -> Mapping[str, int]:
    """Those of :data:`LIVENESS` that the URL leaves open. None where it names a service, whose file may set them."""
    if url.get_backend_name() != "postgresql" or "service" in url.query:
        return {}
    return {name: value for name, value in LIVENESS.items() if name not in url.query}


def _no_engine(given: object) -> ConfigurationError:
    kind = type(given).__name__
    if hasattr(given, "sync_engine"):  # SQLAlchemy's asyncio part may not be installed
        return ConfigurationError(
            f"{kind} cannot be used: there is no asyncio interface",
            next_step="give create_engine() the same database with postgresql+psycopg:// or sqlite://, and run dual writes in "
            "threads: await asyncio.to_thread(...)",
        )
    return ConfigurationError(f"{kind} is no engine", next_step="give a SQLAlchemy Engine or a database URL")


def kind_of(url: URL | str) -> Dialect:
    """The kind of database that a URL names; its driver is not needed.

    Raises:
        ConfigurationError: It is no URL, or names a kind that nobody knows.
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
        # Without its cause: SQLAlchemy's words may repeat the URL, password included.
        raise ConfigurationError(
            f"the database URL cannot be used: {why}",
            next_step="write postgresql+psycopg://user@host/name (pip install 'dualwrite[postgresql]') or sqlite:///file; in a "
            "password, @ is %40 and : is %3A",
        ) from None
