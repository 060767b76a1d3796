"""Steps of a migration that can be taken again: MariaDB and MySQL commit each one, so an interruption leaves some of them."""

from __future__ import annotations

from typing import Any

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Column, inspect

from dualwrite.stores.sql.tables import MYSQL, TABLE_OPTIONS


def operations_in(context: MigrationContext, schema: str | None) -> Operations:
    """The operations for migrations of that schema in the context's database."""
    return _Resuming(context, schema) if context.dialect.name in MYSQL else Operations(context)


class _Resuming(Operations):
    """Leaves out what an earlier attempt has done. A script that is printed holds every step."""

    def __init__(self, context: MigrationContext, schema: str | None) -> None:
        super().__init__(context)
        self._schema = schema

    def _has_table(self, name: str) -> bool | None:
        bind = self.get_context().bind
        return None if self.get_context().as_sql or bind is None else inspect(bind).has_table(name, schema=self._schema)

    def _has(self, kind: str, table: str, name: str) -> bool | None:
        bind = self.get_context().bind
        if self.get_context().as_sql or bind is None:
            return None
        return any(found["name"] == name for found in getattr(inspect(bind), f"get_{kind}")(table, schema=self._schema))

    def create_table(self, table_name: str, *columns: Any, **options: Any) -> Any:
        """Make a table in InnoDB, unless it is there."""
        if not self._has_table(table_name):
            super().create_table(table_name, *columns, **options, **TABLE_OPTIONS)

    def drop_table(self, table_name: str, **options: Any) -> None:
        """Drop a table if it is there."""
        if self._has_table(table_name) is not False:
            super().drop_table(table_name, **options)

    def add_column(self, table_name: str, column: Column[Any], **options: Any) -> None:
        """Add a column unless it is there."""
        if not self._has("columns", table_name, column.name):
            super().add_column(table_name, column, **options)

    def drop_column(self, table_name: str, column_name: str, **options: Any) -> None:
        """Drop a column if it is there."""
        if self._has("columns", table_name, column_name) is not False:
            super().drop_column(table_name, column_name, **options)

    def create_index(self, index_name: str | None, table_name: str, columns: Any, **options: Any) -> None:
        """Make an index unless it is there."""
        if not self._has("indexes", table_name, str(index_name)):
            super().create_index(index_name, table_name, columns, **options)

    def drop_index(self, index_name: str, table_name: str | None = None, **options: Any) -> None:
        """Drop an index if it is there."""
        if self._has("indexes", str(table_name), index_name) is not False:
            super().drop_index(index_name, table_name, **options)
