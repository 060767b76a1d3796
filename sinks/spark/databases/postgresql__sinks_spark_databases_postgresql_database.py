"""PostgreSQL, as the sinks use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from psycopg import sql
from sqlalchemy import Connection

from dualwrite.sinks.spark.databases import (
    postgresql,
    postgresql__sinks_spark_databases_postgresql_catalog,
    postgresql__sinks_spark_databases_postgresql_copying,
    postgresql__sinks_spark_databases_postgresql_prepared,
)
from dualwrite.stores.sql.access__stores_sql_access_connecting import new_engine

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sqlalchemy import URL

    from dualwrite.errors import TransactionAborted
    from dualwrite.sinks.spark.column_types__sinks_spark_columns_table import Table
    from dualwrite.sinks.spark.databases.database import Emptying, Staged, StagingTable
    from dualwrite.sinks.spark.digests__sinks_spark_columns_row_names import RowNames
    from dualwrite.sinks.spark.layout import Layout


class PostgreSQL:
    """See :class:`~dualwrite.sinks.spark.databases.database.SinkDatabase`."""

    def __init__(self, url: URL) -> None:
        self.engine = new_engine(
            url,
            # Binary COPY sends text as UTF-8, whatever the database's own encoding is.
            connect_args={"client_encoding": "utf8"},
            # Reads the ledger and the catalog as they are now, not as of the transaction's start.
            isolation_level="READ COMMITTED",
            hide_parameters=True,
            pool_pre_ping=True,  # a reused worker may find its connection gone
        )

    def quoted(self, table: tuple[str, str]) -> str:
        """See the protocol."""
        return sql.Identifier(*table).as_string()

    def read_table(self, connection: Connection, name: str) -> Table:
        """See the protocol."""
        return postgresql__sinks_spark_databases_postgresql_catalog.read_table(connection, name)

    def require_types(
        self, connection: Connection, table: tuple[str, str], planned: Mapping[str, str], *, shown_name: str
    ) -> None:
        """See the protocol."""
        postgresql__sinks_spark_databases_postgresql_catalog.require_types(
            connection, table, planned, shown_name=shown_name
        )

    def writing(
        self, connection: Connection, layout: Layout, table: tuple[str, str], names: RowNames | None = None
    ) -> AbstractContextManager[postgresql__sinks_spark_databases_postgresql_copying.TableCopy]:
        """See the protocol."""
        return postgresql__sinks_spark_databases_postgresql_copying.copying(connection, layout, table, names)

    def choose_staging(self, wanted: str, schema: str, *, moves: bool) -> bool:
        """See the protocol."""
        return postgresql__sinks_spark_databases_postgresql_prepared.choose_staging(
            self.engine, wanted, schema, moves=moves
        )

    def create_staging(
        self, connection: Connection, made: StagingTable, target: tuple[str, str], columns: Sequence[str]
    ) -> None:
        """See the protocol."""
        postgresql.create_staging(connection, made, target, columns)

    def take_over(
        self,
        connection: Connection,
        parts: Sequence[Staged],
        target: tuple[str, str],
        columns: Sequence[str],
        *,
        key: Sequence[str] = (),
        upsert: Sequence[str] = (),
    ) -> None:
        """See the protocol."""
        for part in parts:
            postgresql.take_over(connection, part, target, columns, key=key, upsert=upsert)

    def drop_staging(self, tables: Collection[StagingTable]) -> None:
        """See the protocol."""
        postgresql.drop_staging(self.engine, tables)

    def drop_dead_staging(
        self, schema: str, incarnations: Mapping[str, int], holders: Callable[[], Mapping[str, str]]
    ) -> int:
        """See the protocol."""
        return postgresql.drop_dead_staging(self.engine, schema, incarnations, holders)

    def require_replaceable(
        self, connection: Connection, target: tuple[str, str], *, empty: Emptying | None, upsert: Sequence[str]
    ) -> None:
        """See the protocol."""
        postgresql.require_replaceable(connection, target, empty=empty, upsert=upsert)

    def empty(self, connection: Connection, table: tuple[str, str], how: Emptying) -> None:
        """See the protocol."""
        postgresql.empty(connection, table, how)

    def before_prepared(self, connection: Connection) -> None:
        """See the protocol."""
        postgresql__sinks_spark_databases_postgresql_prepared.require_room(connection)
        postgresql__sinks_spark_databases_postgresql_prepared.bound_waiting(connection)

    def require_prepared(self, connection: Connection, names: Collection[str], name: str) -> None:
        """See the protocol."""
        postgresql__sinks_spark_databases_postgresql_prepared.require_prepared(connection, names, name)

    def had_no_room(self, error: BaseException) -> TransactionAborted | None:
        """See the protocol."""
        return postgresql__sinks_spark_databases_postgresql_prepared.ran_out(error)

    def waited_in_vain(self, error: BaseException) -> bool:
        """See the protocol."""
        return postgresql__sinks_spark_databases_postgresql_prepared.waited_in_vain(error)
