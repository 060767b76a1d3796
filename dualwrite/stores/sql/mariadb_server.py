"""Checks that a server of MariaDB or MySQL keeps what it has committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from sqlalchemy import exc, literal_column, select, text

from dualwrite.protocol import database_requirements as requirements
from dualwrite.protocol.database_requirements import refuse
from dualwrite.protocol.findings import Status, Unasked
from dualwrite.stores.sql.access import Meaning, driver_words, meaning_of, version_of
from dualwrite.stores.sql.tables import OWN_TABLES

if TYPE_CHECKING:
    from sqlalchemy import Connection, TextClause
    from sqlalchemy.dialects import mysql

    from dualwrite.stores.sql.tables import Tables

logger = logging.getLogger(__name__)

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

_OTHER_ENGINES: Final = text(
    "SELECT table_name, engine FROM information_schema.tables "
    "WHERE table_schema = coalesce(:schema, database()) AND engine <> 'InnoDB'"
)
_REPLICATES: Final = text("SHOW GLOBAL STATUS LIKE 'Slave_running'")
_PREPARED: Final = text("XA RECOVER")
_OPEN: Final = text(
    "SELECT trx_mysql_thread_id, timestampdiff(SECOND, trx_started, now()) FROM information_schema.innodb_trx "
    "WHERE trx_mysql_thread_id NOT IN (0, connection_id()) ORDER BY trx_started"
)
Shown = TypeVar("Shown")


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
        refuse(requirements.mariadb_version(version_of(connection), is_mariadb=is_mariadb(connection)))
        row: Sequence[object] = connection.execute(select(*map(literal_column, [*FACTS, *_MORE_FACTS]))).one()
        check_facts(row)
        doublewrite, charset, mode = map(str, row[len(FACTS) :])
        refuse(requirements.charset(charset))
        if tables is not None and not self._checked:
            refuse(*(requirements.other_engine(*found) for found in other_engines(connection, tables).items()))
            refuse(requirements.replica(is_replica=is_replica(connection)))
            self._checked = True
        self._warn(connection, mode, doublewrite)

    def _warn(self, connection: Connection, mode: str, doublewrite: str) -> None:
        if self._warned:
            return
        self._warned = True
        is_maria = is_mariadb(connection)
        for finding in (
            requirements.strict_mode(mode, is_mariadb=is_maria),
            requirements.doublewrite(doublewrite, is_mariadb=is_maria),
        ):
            if finding.status is Status.WARNING:
                logger.warning("%s; %s", finding, finding.remedy)


def facts_of(connection: Connection, tables: Tables) -> requirements.MariadbFacts:
    """What shows of the server, for the rules."""
    row: Sequence[object] = connection.execute(select(*map(literal_column, [*FACTS, *_MORE_FACTS]))).one()
    writes, flush, logs, sync, _, doublewrite, charset, mode = map(str, row)
    return requirements.MariadbFacts(
        is_mariadb=is_mariadb(connection),
        version=version_of(connection),
        durability=(writes, flush, logs, sync),
        doublewrite=doublewrite,
        charset=charset,
        sql_mode=mode,
        other_engines=other_engines(connection, tables),
        is_replica=is_replica(connection),
        prepared=_shown(connection, _PREPARED, lambda row: str(row[3]), "XA_RECOVER_ADMIN"),
        open_ones=_shown(connection, _OPEN, lambda row: (f"session {row[0]}", float(row[1])), "PROCESS"),
    )


def _shown(
    connection: Connection, statement: TextClause, read: Callable[[Any], Shown], right: str
) -> Sequence[Shown] | Unasked:
    """What only users with the right may see."""
    try:
        return [read(row) for row in connection.execute(statement)]
    except exc.DBAPIError as error:
        if meaning_of(error) is not Meaning.PRIVILEGE:
            raise
        return Unasked(driver_words(error), f"grant {right} to see them")


def check_facts(values: Sequence[object]) -> None:
    """Refuse, by the values of :data:`FACTS`, a server that is read-only, or forgets in a crash what it has committed."""
    read_only, flush, logs, sync, *_ = map(str, values)
    refuse(*requirements.mariadb_durability(read_only, flush, logs, sync))


def rolls_back_on_timeout(values: Sequence[object]) -> bool:
    """Whether a lock wait that times out rolls back the whole transaction, by the values of :data:`FACTS`."""
    return str(values[len(FACTS) - 1]) not in _OFF


def other_engines(connection: Connection, tables: Tables) -> Mapping[str, str]:
    """The library's tables that are not InnoDB's, and their engines."""
    found = connection.execute(_OTHER_ENGINES, {"schema": tables.schema})
    return {name: engine for name, engine in found if name in OWN_TABLES}


def is_replica(connection: Connection) -> bool:
    """MySQL shows this only to roles with a special right, so ``read_only`` must be enough there."""
    found = connection.execute(_REPLICATES).one_or_none() if is_mariadb(connection) else None
    return found is not None and found[1] == "ON"
