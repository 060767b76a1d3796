"""Where a URL may stand for an engine."""

from __future__ import annotations

from sqlalchemy import Engine, create_engine, exc

from dualwrite.errors import ConfigurationError


def engine_of(engine: Engine | str) -> Engine:
    """The engine, or a new one for its URL, which connects at first use; who gives a URL disposes of it.

    Raises:
        ConfigurationError: It is no URL, or its driver is not installed.
    """
    if isinstance(engine, Engine):
        return engine
    try:
        return create_engine(engine)
    except (exc.ArgumentError, ValueError, ModuleNotFoundError) as error:
        why = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else "it is none"
        # Without its cause: SQLAlchemy's words may repeat the URL, password included.
        raise ConfigurationError(
            f"the database URL cannot be used: {why}",
            next_step="write postgresql+psycopg://user@host/name (pip install 'dualwrite[postgresql]') or sqlite:///file; in a "
            "password, @ is %40 and : is %3A",
        ) from None
