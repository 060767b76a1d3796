"""Gives locks back before SQLAlchemy closes a connection because one of its statements was interrupted or cancelled."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from sqlalchemy import event
from sqlalchemy.util.concurrency import in_greenlet

from dualwrite.stores.sql.drivers__stores_sql_drivers_awaited import is_awaited
from dualwrite.stores.sql.drivers__stores_sql_drivers_listening import listens

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext


def roll_back_before_closing(engine: Engine) -> None:
    """Roll back SQLite's connections before SQLAlchemy closes them because a statement was interrupted or cancelled.

    SQLite ends a closed connection once its last statement is gone, which the traceback of the interruption may hold: until
    then nobody else could write.
    """
    if engine.dialect.name == "sqlite" and not listens(engine.pool, "invalidate", _roll_back):
        event.listen(engine, "handle_error", _end_statement)
        event.listen(engine, "invalidate", _roll_back)


def _end_statement(context: ExceptionContext) -> None:
    if (
        context.execution_context is not None
        and not isinstance(context.original_exception, Exception)
        and (cursor := context.execution_context.cursor) is not None
    ):
        cursor.close()


def _roll_back(driver: DBAPIConnection, record: object, error: BaseException | None) -> None:
    del record, error
    if in_greenlet() or not is_awaited(driver):
        with suppress(Exception):  # it is closed in any case
            driver.rollback()
