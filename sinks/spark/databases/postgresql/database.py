"""PostgreSQL, as the sinks use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from psycopg import sql
from sqlalchemy import Connection

from dualwrite.sinks.spark.databases.postgresql import catalog, copying, prepared, staging
from dualwrite.stores.sql.access.connecting import new_engine

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sqlalchemy import URL

    from dualwrite.errors import TransactionAborted
    from dualwrite.sinks.spark.columns.layout import Layout
    from dualwrite.sinks.spark.columns.row_names import RowNames
    from dualwrite.sinks.spark.columns.table import Table
    from dualwrite.sinks.spark.databases.database import Emptying, Staged, StagingTable


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
        return catalog.read_table(connection, name)

    def require_types(
        self, connection: Connection, table: tuple[str, str], planned: Mapping[str, str], *, shown_name: str
    ) -> None:
        """See the protocol."""
        catalog.require_types(connection, table, planned, shown_name=shown_name)

    def writing(
        self, connection: Connection, layout: Layout, table: tuple[str, str], names: RowNames | None = None
    ) -> AbstractContextManager[copying.TableCopy]:
        """See the protocol."""
        return copying.copying(connection, layout, table, names)

    def choose_staging(self, wanted: str, schema: str, *, moves: bool) -> bool:
        """See the protocol."""
        return prepared.choose_staging(self.engine, wanted, schema, moves=moves)

    def create_staging(
        self, connection: Connection, made: StagingTable, target: tuple[str, str], columns: Sequence[str]
    ) -> None:
        """See the protocol."""
        staging.create_staging(connection, made, target, columns)

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
            staging.take_over(connection, part, target, columns, key=key, upsert=upsert)

    def drop_staging(self, tables: Collection[StagingTable]) -> None:
        """See the protocol."""
        staging.drop_staging(self.engine, tables)

    def drop_dead_staging(
        self, schema: str, incarnations: Mapping[str, int], holders: Callable[[], Mapping[str, str]]
    ) -> int:
        """See the protocol."""
        return staging.drop_dead_staging(self.engine, schema, incarnations, holders)

    def require_replaceable(
        self, connection: Connection, target: tuple[str, str], *, empty: Emptying | None, upsert: Sequence[str]
    ) -> None:
        """See the protocol."""
        staging.require_replaceable(connection, target, empty=empty, upsert=upsert)

    def empty(self, connection: Connection, table: tuple[str, str], how: Emptying) -> None:
        """See the protocol."""
        staging.empty(connection, table, how)

    def before_prepared(self, connection: Connection) -> None:
        """See the protocol."""
        prepared.require_room(connection)
        prepared.bound_waiting(connection)

    def require_prepared(self, connection: Connection, names: Collection[str], name: str) -> None:
        """See the protocol."""
        prepared.require_prepared(connection, names, name)

    def had_no_room(self, error: BaseException) -> TransactionAborted | None:
        """See the protocol."""
        return prepared.ran_out(error)

    def waited_in_vain(self, error: BaseException) -> bool:
        """See the protocol."""
        return prepared.waited_in_vain(error)
