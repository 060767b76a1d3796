"""The database's clock: leases and timestamps never depend on the clocks of client machines."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, DateTime, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

if TYPE_CHECKING:
    from sqlalchemy import Dialect
    from sqlalchemy.sql.compiler import SQLCompiler


class UtcDateTime(TypeDecorator[datetime]):
    """A timestamp with a time zone, always UTC in Python, even if the database stores no zone (SQLite)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to the database's form."""
        del dialect
        return None if value is None else value.astimezone(timezone.utc)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to Python's form, in UTC."""
        del dialect
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


class _Moment(FunctionElement[datetime]):
    """The database's time when the statement runs, not when its transaction began, plus some seconds."""

    type = UtcDateTime()
    inherit_cache = True
    name = "database_moment"


def database_now() -> ColumnElement[datetime]:
    """The database's time when the statement runs."""
    return _Moment()


def database_now_plus(seconds: ColumnElement[float] | float) -> ColumnElement[datetime]:
    """The database's time when the statement runs, plus ``seconds``."""
    return _Moment(literal(seconds) if isinstance(seconds, (int, float)) else seconds)


@compiles(_Moment, "postgresql")
def _on_postgresql(element: _Moment, compiler: SQLCompiler, **options: object) -> str:
    offset = compiler.process(element.clauses, **options)
    # CAST: the driver may send the bare placeholder without a type.
    return f"(clock_timestamp() + make_interval(secs => CAST({offset} AS float8)))" if offset else "clock_timestamp()"


@compiles(_Moment, "sqlite")
def _on_sqlite(element: _Moment, compiler: SQLCompiler, **options: object) -> str:
    offset = compiler.process(element.clauses, **options)
    # Six fractional digits, as SQLAlchemy writes and reads them: texts in one format compare as times.
    modifier = f", {offset} || ' seconds'" if offset else ""
    return f"strftime('%Y-%m-%d %H:%M:%f000', 'now'{modifier})"
