"""Connections that the application gives: of psycopg, of Django, and in the transaction that Django's is in.

SQLAlchemy gets a connection over the driver's own, for as long as the block lasts.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from sqlalchemy import Connection, Engine, StaticPool

from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    IllegalStateError,
    OutcomeUnverifiable,
    TransactionAborted,
)
from dualwrite.stores.sql.access import SAVEPOINTS

if TYPE_CHECKING:
    import psycopg

_infos: Final[weakref.WeakKeyDictionary[object, dict[Any, Any]]] = weakref.WeakKeyDictionary()
"""Facts about each of the user's psycopg connections, which outlive the connection of SQLAlchemy over it."""
_PERMIT: Final = "dualwrite.permit"
_AFTER_THE_DECISION: Final = (CompletionPending, DecidedTransactionLost, OutcomeUnverifiable)


class DjangoConnection(Protocol):
    """``django.db.connection``, or one of ``django.db.connections``: what is used of it here."""

    alias: str
    in_atomic_block: bool
    needs_rollback: bool
    run_on_commit: list[Any]
    savepoint_ids: list[str | None]
    connection: Any

    def ensure_connection(self) -> None:
        """Connect, unless connected."""
        ...

    def run_and_clear_commit_hooks(self) -> None:
        """Run what ``on_commit`` was given."""
        ...


@dataclass(frozen=True)
class InAtomic:
    """The transaction that Django has begun on its connection, and will end: a dual write is to join it."""

    connection: DjangoConnection


@contextmanager
def usable(given: object, engine: Engine) -> Generator[Connection, None, None]:
    """The user's connection (SQLAlchemy's, psycopg's or Django's) as SQLAlchemy's.

    One of psycopg's or Django's stays open, unless its transaction is in doubt.
    """
    if isinstance(given, Connection):
        yield given
    elif isinstance(given, InAtomic):
        with inside(given.connection, engine) as connection:
            yield connection
    elif _is_psycopg(given):
        with _over(cast("psycopg.Connection[Any]", given), engine) as connection:
            yield connection
    elif _is_django(given):
        with _in_atomic(cast("DjangoConnection", given), engine) as connection:
            yield connection
    else:
        raise IllegalStateError(
            f"transaction() takes a connection of SQLAlchemy, psycopg 3 or Django, not {type(given).__name__}",
            next_step="give engine.connect(), or nothing; for sessions of your own use bind()",
        )


def permit_of(connection: Connection) -> Callable[[object], None]:
    """A function that may still refuse the decision, called right before COMMIT. For Django it looks at the marks."""
    permit: Callable[[object], None] = connection.info.get(_PERMIT, _permit_all)
    return permit


def _permit_all(_: object) -> None:
    pass


def _is_psycopg(given: object) -> bool:
    loaded = sys.modules.get("psycopg")
    if loaded is None:
        return False
    if isinstance(given, loaded.AsyncConnection):
        raise ConfigurationError(
            "the connection is asynchronous", next_step="give a psycopg.Connection, in a thread (asyncio.to_thread)"
        )
    return isinstance(given, loaded.Connection)


@contextmanager
def _over(driver: psycopg.Connection[Any], engine: Engine) -> Generator[Connection, None, None]:
    """A connection of SQLAlchemy's over one of the driver's, with the dialect that the writer's engine has found out."""
    from psycopg.pq import TransactionStatus  # noqa: PLC0415 - only SQLite's users may lack it

    if engine.dialect.name != "postgresql":
        raise ConfigurationError(
            f"a psycopg connection leads to another database than the writer's engine ({engine.dialect.name})",
            next_step="give a connection to the writer's database: a dual write is decided in one database",
        )
    if driver.closed:
        raise IllegalStateError("the psycopg connection is closed", next_step="give an open one")
    if driver.info.transaction_status != TransactionStatus.IDLE:
        raise IllegalStateError(
            "the psycopg connection is already in a transaction",
            next_step="end it first (psycopg begins one with the first statement, also with a SELECT)",
        )
    with _on(driver, engine) as connection:
        yield connection


@contextmanager
def _on(driver: psycopg.Connection[Any], engine: Engine) -> Generator[Connection, None, None]:
    from psycopg import Cursor  # noqa: PLC0415 - only SQLite's users may lack it
    from psycopg.rows import tuple_row  # noqa: PLC0415 - as above

    pool = StaticPool(lambda: driver, reset_on_return=None, dialect=engine.dialect)  # type: ignore[arg-type]
    with Engine(pool, engine.dialect, engine.url).connect() as connection:
        # The user's row factory and kind of cursor are for the user's statements.
        vars(connection.connection)["cursor"] = lambda: Cursor(driver, row_factory=tuple_row)
        connection.info.update(_infos.get(driver, {}))
        info = connection.info
        try:
            yield connection
        finally:
            _infos[driver] = info


def _is_django(given: object) -> bool:
    loaded = sys.modules.get("django.db")
    if loaded is None:
        return False
    from django.db.backends.base.base import BaseDatabaseWrapper  # noqa: PLC0415 - only Django's users have it

    return isinstance(given, BaseDatabaseWrapper) or given is loaded.connection


@contextmanager
def _in_atomic(given: DjangoConnection, engine: Engine) -> Generator[Connection, None, None]:
    """``atomic()`` around a block: Django's marks can roll it back, and its ``on_commit`` hooks run if it commits.

    ``atomic()`` itself then finds nothing left to commit or to roll back, and does only the rest of its work.
    """
    from django.db import transaction  # noqa: PLC0415 - only Django's users have it

    if given.in_atomic_block:
        raise IllegalStateError(
            "Django's connection is already inside atomic()",
            next_step="begin the block outside of it; with ATOMIC_REQUESTS, mark the view with "
            "@transaction.non_atomic_requests",
        )
    marked = TransactionAborted("Django has marked the transaction for rollback", retryable=False)
    asked = False
    reported: BaseException | None = None
    hooks: list[Any] = []

    def permit(_: object) -> None:
        nonlocal asked
        if given.needs_rollback:
            raise marked
        asked = True

    try:
        with transaction.atomic(using=given.alias, durable=True):
            driver = _psycopg_of(given)
            with _over(driver, engine) as connection:
                connection.info[_PERMIT] = permit
                try:
                    yield connection
                except BaseException as error:
                    if error is not marked:
                        reported = error
                        # Asked for a permit, the block's own code has ended: the error is not one that it has raised itself.
                        if not asked or not isinstance(error, _AFTER_THE_DECISION):
                            raise
                finally:
                    connection.info.pop(_PERMIT, None)  # a lost connection has lost it
            if asked and driver.closed:
                # Committed, but the connection was lost afterwards: Django would connect again to send a COMMIT, and forget
                # the hooks.
                hooks, given.run_on_commit, given.connection = given.run_on_commit, [], None
        if hooks:
            given.run_on_commit = hooks
            given.run_and_clear_commit_hooks()
    finally:
        if reported is not None:
            # Also if Django could not connect again, or a hook has failed: the outcome is what the caller must know.
            raise reported


@contextmanager
def inside(given: DjangoConnection, engine: Engine) -> Generator[Connection, None, None]:
    """A connection of SQLAlchemy's in the transaction that Django's is in. It sends neither COMMIT nor ROLLBACK by itself."""
    driver = _psycopg_of(given)
    if engine.dialect.name != "postgresql":
        raise ConfigurationError(
            f"Django's connection leads to another database than the writer's engine ({engine.dialect.name})",
            next_step="give the writer the same database: a dual write is decided in one database",
        )
    with _on(driver, engine) as connection:
        connection.begin()  # SQLAlchemy must know; the driver sends BEGIN before the first statement, unless it has
        # Whoever ends the transaction does so below this, on the driver's connection. As this one is closed, SQLAlchemy would
        # roll back what it believes to be open.
        vars(connection.connection).update(commit=_nothing, rollback=_nothing)
        info = connection.info
        info[SAVEPOINTS] = [name for name in given.savepoint_ids if name is not None]
        try:
            yield connection
        finally:
            del info[SAVEPOINTS]


def _nothing() -> None:
    pass


def _psycopg_of(given: DjangoConnection) -> psycopg.Connection[Any]:
    given.ensure_connection()
    if not _is_psycopg(given.connection):
        raise ConfigurationError(
            f"Django's connection is one of {type(given.connection).__module__}",
            next_step="use Django's PostgreSQL backend with psycopg 3",
        )
    return cast("psycopg.Connection[Any]", given.connection)
