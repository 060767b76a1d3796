"""Checks that a server of MariaDB or MySQL keeps what it has committed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

from sqlalchemy import literal_column, select, text

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.tables import OWN_TABLES

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.dialects import mysql

    from dualwrite.stores.sql.tables import Tables

logger = logging.getLogger(__name__)

_OLDEST: Final = {True: ("MariaDB", (10, 6)), False: ("MySQL", (8, 0, 17))}  # SKIP LOCKED; utf8mb4_0900_bin
_OFF: Final = frozenset({"0", "OFF", "off"})
FACTS: Final = (
    "@@global.read_only",
    "@@global.innodb_flush_log_at_trx_commit",
    "@@global.log_bin",
    "@@global.sync_binlog",
    "@@global.innodb_rollback_on_timeout",
)
"""Read in every dual write."""
_MORE_FACTS: Final = ("@@global.innodb_doublewrite", "@@session.character_set_client", "@@session.sql_mode")
_STRICT: Final = frozenset({"STRICT_TRANS_TABLES", "STRICT_ALL_TABLES"})

_OTHER_ENGINES: Final = text(
    "SELECT table_name, engine FROM information_schema.tables "
    "WHERE table_schema = coalesce(:schema, database()) AND engine <> 'InnoDB'"
)
_REPLICATES: Final = text("SHOW GLOBAL STATUS LIKE 'Slave_running'")


def is_mariadb(connection: Connection) -> bool:
    """Which of the two the connection leads to."""
    return bool(cast("mysql.base.MySQLDialect", connection.dialect).is_mariadb)


class Server:
    """The server of one engine. The costly questions are asked once."""

    def __init__(self) -> None:
        self._warned = False
        self._checked = False

    def check(self, connection: Connection, tables: Tables | None = None) -> None:
        """Refuse a server or a connection that may lose or change what is written."""
        product, oldest = _OLDEST[is_mariadb(connection)]
        version = connection.dialect.server_version_info or ()
        if version < oldest:
            raise ConfigurationError(
                f"{product} {'.'.join(map(str, version))} is too old",
                next_step=f"use {product} {'.'.join(map(str, oldest))} or newer",
            )
        row: Sequence[object] = connection.execute(select(*map(literal_column, [*FACTS, *_MORE_FACTS]))).one()
        check_facts(row)
        doublewrite, charset, mode = row[len(FACTS) :]
        if charset != "utf8mb4":
            raise ConfigurationError(
                f"the connection's character set is {charset}: it cannot carry every transactional id",
                next_step="remove charset= from the URL, or write charset=utf8mb4",
            )
        if tables is not None and not self._checked:
            _check_tables(connection, tables)
            _check_primary(connection)
            self._checked = True
        self._warn(product, mode, doublewrite)

    def _warn(self, product: str, mode: object, doublewrite: object) -> None:
        if self._warned:
            return
        self._warned = True
        if _STRICT.isdisjoint(str(mode).split(",")):
            logger.warning(
                "sql_mode is not strict: %s shortens or changes values that do not fit your columns, and commits such rows "
                "with their messages; add STRICT_TRANS_TABLES to it",
                product,
            )
        if str(doublewrite) in _OFF:
            logger.warning(
                "%s runs with innodb_doublewrite=OFF: unless its file system writes pages atomically, committed data may be "
                "lost when its machine crashes",
                product,
            )


def check_facts(values: Sequence[object]) -> None:
    """Refuse, by the values of :data:`FACTS`, a server that is read-only, or forgets in a crash what it has committed."""
    read_only, flush, logs, sync, *_ = (str(value) for value in values)
    if read_only not in _OFF:
        raise ConfigurationError(
            "the server is read-only: it is a replica, or is being maintained", next_step="connect to the primary"
        )
    if flush not in {"1", "3"}:
        raise ConfigurationError(
            f"innodb_flush_log_at_trx_commit is {flush}: committed data may be lost when the server's machine crashes",
            next_step="SET GLOBAL innodb_flush_log_at_trx_commit = 1, and the same in the server's configuration",
        )
    if logs not in _OFF and sync != "1":
        raise ConfigurationError(
            f"the binary log is on, and sync_binlog is {sync}: after a crash the server rolls back what the log has lost",
            next_step="SET GLOBAL sync_binlog = 1, and the same in the server's configuration",
        )


def rolls_back_on_timeout(values: Sequence[object]) -> bool:
    """Whether a lock wait that times out rolls back the whole transaction, by the values of :data:`FACTS`."""
    return str(values[len(FACTS) - 1]) not in _OFF


def _check_tables(connection: Connection, tables: Tables) -> None:
    for name, engine in connection.execute(_OTHER_ENGINES, {"schema": tables.schema}):
        if name in OWN_TABLES:
            raise ConfigurationError(
                f"the table {name} is in the engine {engine}, which has no transactions",
                next_step=f"ALTER TABLE {name} ENGINE=InnoDB",
            )


def _check_primary(connection: Connection) -> None:
    """MySQL shows this only to roles with a special right, so ``read_only`` must be enough there."""
    found = connection.execute(_REPLICATES).one_or_none() if is_mariadb(connection) else None
    if found is not None and found[1] == "ON":
        raise ConfigurationError(
            "the server is a replica, although it may be written to: its primary knows nothing of what is decided here",
            next_step="connect to the primary",
        )
