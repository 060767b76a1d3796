"""The sink's sessions with MariaDB and MySQL: opened by few statements, and nobody else's.

Each micro-batch of a stream is planned in a new process and ended in another, and each opens a connection. SQLAlchemy asks a
first connection five questions, and sets what PyMySQL has set already. Here one statement sets the session up, and what
SQLAlchemy asks follows from it, or from what the server has said by itself.

What is set stays as it is from one transaction to the next: no other code gets such a session.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, cast

import pymysql.connections
from sqlalchemy import event
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.mysql.mariadb import MariaDBDialect
from sqlalchemy.dialects.mysql.pymysql import MySQLDialect_pymysql

from dualwrite.interfaces import PAUSED_OWNER_TIMEOUT_S
from dualwrite.stores.sql.access import new_engine, note_read_committed, ping_idle_connections
from dualwrite.stores.sql.mariadb import changing, idle_limits, queries_of

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine
    from sqlalchemy.engine.interfaces import DBAPIConnection

SQL_MODE: Final = (
    "STRICT_TRANS_TABLES,STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION"
)
# The literals of the rows rely on these settings, under which the server refuses values that it would otherwise change.
# READ COMMITTED as on PostgreSQL; and no gaps are locked. Each server calls the level by a name of its own.
SESSION: Final = (
    "SET NAMES {names}, SESSION autocommit = 0, "
    "SESSION /*M! tx_isolation *//*!80000 transaction_isolation */ = 'READ-COMMITTED', "
    f"SESSION time_zone = '+00:00', SESSION sql_mode = '{SQL_MODE}'"
)
_LIMITS: Final = idle_limits(PAUSED_OWNER_TIMEOUT_S)
"""As in all of the sink's transactions but those that decide. MySQL, which has no such limits, passes over them."""
_SET_NAME: Final = "dualwrite_sink"


def own_engine(url: URL) -> Engine:
    """An engine whose sessions are the sink's own."""
    engine = new_engine(
        url.set(drivername=f"{url.get_backend_name()}+{_SET_NAME}"),
        connect_args={"autocommit": None},  # the session is set up by one statement
        hide_parameters=True,
    )
    engine.url = url  # errors and advice show it
    ping_idle_connections(engine)
    event.listen(engine, "connect", note_read_committed)
    return engine


def execute_ddl(connection: Connection, statement: str) -> None:
    """Execute a statement without parameters that commits by itself, so that nothing is open then."""
    connection.exec_driver_sql(statement.replace("%", "%%"))
    queries_of(cast("DBAPIConnection", connection.connection.dbapi_connection)).nothing_is_open()


class _Connection(pymysql.connections.Connection):  # type: ignore[misc]  # PyMySQL has no types
    """Leaves SET NAMES to :data:`SESSION`."""

    def set_character_set(self, charset: str, collation: str | None = None) -> None:
        del charset, collation


def _set_up(driver: Any) -> None:
    collation = getattr(driver, "collation", None)  # of PyMySQL 1.1 and newer
    names = driver.charset if not collation else f"{driver.charset} COLLATE {collation}"
    with closing(driver.cursor()) as cursor:
        cursor.execute(f"{SESSION.format(names=names)} /*M! , {changing(_LIMITS)} */")
    queries = queries_of(driver)
    queries.kept = dict(_LIMITS)
    queries.nothing_is_open()


class _OwnSessions(MySQLDialect_pymysql):
    """PyMySQL as SQLAlchemy uses it, with fewer statements."""

    supports_statement_cache = True
    _version: str
    _database: str

    def connect(self, *cargs: Any, **cparams: Any) -> Any:
        return _Connection(*cargs, **cparams)

    def on_connect(self) -> Callable[[Any], None]:
        return _set_up

    def initialize(self, connection: Connection) -> None:
        driver: Any = connection.connection.dbapi_connection
        said = str(driver.get_server_info())
        if "MariaDB" in said and "maxscale" not in said.lower():
            self._version = said.removeprefix("5.5.5-")  # for replicas that take it for a version of MySQL
        else:  # it may be that of a proxy
            with closing(driver.cursor()) as cursor:
                cursor.execute("SELECT version()")
                [self._version] = map(str, cursor.fetchone())
        self._database = connection.engine.url.database or ""
        super().initialize(connection)
        queries_of(driver).nothing_is_open()

    def _get_server_version_info(self, connection: Connection) -> tuple[int, ...]:
        del connection
        return self._parse_server_version(self._version)

    def _get_default_schema_name(self, connection: Connection) -> str:
        del connection
        return self._database

    def _fetch_setting(self, connection: Connection, setting_name: str) -> str | None:
        """The SQL mode is that of :data:`SESSION`; the case of table names matters to reflection alone, which is not used."""
        known = {"sql_mode": SQL_MODE, "lower_case_table_names": "0"}.get(setting_name)
        return super()._fetch_setting(connection, setting_name) if known is None else known

    def get_default_isolation_level(self, dbapi_conn: Any) -> Any:
        del dbapi_conn
        return "READ COMMITTED"

    def do_rollback(self, dbapi_connection: Any) -> None:
        """Nothing, if nothing was sent since the last COMMIT or ROLLBACK."""
        # That of the pool's proxy, if it is one.
        driver = getattr(dbapi_connection, "dbapi_connection", dbapi_connection)
        if not queries_of(driver).commit_was_last:
            driver.rollback()
            queries_of(driver).nothing_is_open()


class OwnOnMySQL(_OwnSessions):
    """For URLs that begin with ``mysql``."""

    supports_statement_cache = True


class OwnOnMariaDB(MariaDBDialect, _OwnSessions):
    """For URLs that begin with ``mariadb``."""

    supports_statement_cache = True


registry.register(f"mysql.{_SET_NAME}", __name__, OwnOnMySQL.__name__)
registry.register(f"mariadb.{_SET_NAME}", __name__, OwnOnMariaDB.__name__)
