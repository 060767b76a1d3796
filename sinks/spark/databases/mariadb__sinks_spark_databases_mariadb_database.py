"""MariaDB and MySQL, as the sinks use them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, event

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.databases import (
    mariadb,
    mariadb__sinks_spark_databases_mariadb_catalog,
    mariadb__sinks_spark_databases_mariadb_inserting,
)
from dualwrite.sinks.spark.databases.mariadb__sinks_spark_databases_mariadb_quoting import table_name
from dualwrite.stores.sql.access__stores_sql_access_connecting import new_engine

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sqlalchemy import URL

    from dualwrite.errors import TransactionAborted
    from dualwrite.sinks.spark.column_types__sinks_spark_columns_table import Table
    from dualwrite.sinks.spark.databases.database import Emptying, Staged, StagingTable
    from dualwrite.sinks.spark.digests__sinks_spark_columns_row_names import RowNames
    from dualwrite.sinks.spark.layout import Layout

SESSION: Final = (
    "SET SESSION time_zone = '+00:00', SESSION sql_mode = "
    "'STRICT_TRANS_TABLES,STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION'"
)
"""The literals rely on these settings, under which the server refuses values that it would otherwise change."""


class MariaDB:
    """See :class:`~dualwrite.sinks.spark.databases.database.SinkDatabase`."""

    def __init__(self, url: URL) -> None:
        self.engine = new_engine(
            url,
            isolation_level="READ COMMITTED",  # as on PostgreSQL; and no gaps are locked
            hide_parameters=True,
            pool_pre_ping=True,  # a reused worker may find its connection gone
        )
        event.listen(self.engine, "connect", _set_session)

    def quoted(self, table: tuple[str, str]) -> str:
        """See the protocol."""
        return table_name(table)

    def read_table(self, connection: Connection, name: str) -> Table:
        """See the protocol."""
        return mariadb__sinks_spark_databases_mariadb_catalog.read_table(connection, name)

    def require_types(
        self, connection: Connection, table: tuple[str, str], planned: Mapping[str, str], *, shown_name: str
    ) -> None:
        """See the protocol."""
        mariadb__sinks_spark_databases_mariadb_catalog.require_types(connection, table, planned, shown_name=shown_name)

    def writing(
        self, connection: Connection, layout: Layout, table: tuple[str, str], names: RowNames | None = None
    ) -> AbstractContextManager[mariadb__sinks_spark_databases_mariadb_inserting.Inserts]:
        """See the protocol."""
        return mariadb__sinks_spark_databases_mariadb_inserting.inserting(connection, layout, table, names)

    def choose_staging(self, wanted: str, schema: str, *, moves: bool) -> bool:
        """See the protocol. Always: there is no other way."""
        del schema, moves
        if wanted == "prepared":
            raise _not_prepared()
        return True

    def create_staging(
        self, connection: Connection, made: StagingTable, target: tuple[str, str], columns: Sequence[str]
    ) -> None:
        """See the protocol."""
        del connection  # DDL would commit its transaction
        mariadb.create_staging(self.engine, made, target, columns)

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
        mariadb.take_over(connection, parts, target, columns, key=key, upsert=upsert)

    def drop_staging(self, tables: Collection[StagingTable]) -> None:
        """See the protocol."""
        mariadb.drop_staging(self.engine, tables)

    def drop_dead_staging(
        self, schema: str, incarnations: Mapping[str, int], holders: Callable[[], Mapping[str, str]]
    ) -> int:
        """See the protocol."""
        return mariadb.drop_dead_staging(self.engine, schema, incarnations, holders)

    def require_replaceable(
        self, connection: Connection, target: tuple[str, str], *, empty: Emptying | None, upsert: Sequence[str]
    ) -> None:
        """See the protocol."""
        mariadb.require_replaceable(connection, target, empty=empty, upsert=upsert)

    def empty(self, connection: Connection, table: tuple[str, str], how: Emptying) -> None:
        """See the protocol. Not by TRUNCATE, which would commit: `require_replaceable` has refused it."""
        del how
        mariadb.empty(connection, table)

    def before_prepared(self, connection: Connection) -> None:
        """See the protocol. Refused."""
        del connection
        raise _not_prepared()

    def require_prepared(self, connection: Connection, names: Collection[str], name: str) -> None:
        """See the protocol. Refused."""
        del connection, names, name
        raise _not_prepared()

    def had_no_room(self, error: BaseException) -> TransactionAborted | None:
        """None: this database prepares nothing."""
        del error
        return None

    def waited_in_vain(self, error: BaseException) -> bool:
        """False: nothing prepared holds locks here."""
        del error
        return False


def _set_session(driver: Any, _: object) -> None:
    with closing(driver.cursor()) as cursor:
        cursor.execute(SESSION)


def _not_prepared() -> ConfigurationError:
    return ConfigurationError(
        "MariaDB and MySQL have no PREPARE TRANSACTION, and their XA is not used: a batch is decided as one by staging tables",
        next_step='leave databaseLeg out, or set it to "staging"',
    )
