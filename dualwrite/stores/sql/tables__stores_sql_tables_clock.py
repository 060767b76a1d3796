"""The database's clock: leases and timestamps never depend on the clocks of client machines."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, DateTime, func, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from dualwrite.stores.sql.tables__stores_sql_tables_column_types import MYSQL

if TYPE_CHECKING:
    from sqlalchemy import Dialect
    from sqlalchemy.sql.compiler import SQLCompiler


class UtcDateTime(TypeDecorator[datetime]):
    """A timestamp with a time zone, always UTC in Python, even if the database stores no zone (SQLite, MariaDB)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """With microseconds, which MariaDB and MySQL cut off unless the column says otherwise."""
        if dialect.name not in MYSQL:
            return dialect.type_descriptor(self.impl_instance)
        from sqlalchemy.dialects.mysql import DATETIME  # noqa: PLC0415 - large, and only for those that use it

        return dialect.type_descriptor(DATETIME(fsp=6))

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


class row_made(FunctionElement[datetime]):  # noqa: N801 - used as a function
    """The default of a column: the database's time when the row is made, in UTC where the column holds no zone."""

    type = UtcDateTime()
    inherit_cache = True
    name = "row_made"


@compiles(row_made)
def _made(element: row_made, compiler: SQLCompiler, **options: object) -> str:
    del element
    return compiler.process(func.now(), **options)


@compiles(row_made, "mysql")
@compiles(row_made, "mariadb")
def _made_on_mysql(element: row_made, compiler: SQLCompiler, **options: object) -> str:
    del element, compiler, options
    return "(utc_timestamp(6))"


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


@compiles(_Moment, "mysql")
@compiles(_Moment, "mariadb")
def _on_mysql(element: _Moment, compiler: SQLCompiler, **options: object) -> str:
    offset = compiler.process(element.clauses, **options)
    # The time zone of the session does not matter to it, unlike to now().
    now = "utc_timestamp(6)"
    return f"timestampadd(MICROSECOND, CAST(({offset}) * 1000000 AS SIGNED), {now})" if offset else now
