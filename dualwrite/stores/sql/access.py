"""Reaching a SQL database: connections and pools, what its failures mean, and the rights that the library needs.

A failure is mapped to what is known afterwards: nothing happened, or the outcome is unknown. Connections that came
through a fork are left to the parent.

Each unit of a group gets a :class:`UnitConnection` over that of its block.

A connection belongs to the process that began the dual write on it. In one that was forked meanwhile nothing must reach the
server: a ROLLBACK from there would end the parent's transaction, and the parent would not notice.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sqlite3
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    URL,
    AdaptedConnection,
    Connection,
    CursorResult,
    Engine,
    create_engine,
    event,
    exc,
    make_url,
)

from dualwrite.clock import now_s
from dualwrite.errors import (
    ConfigurationError,
    DualWriteError,
    IllegalStateError,
    TransactionAborted,
    Unavailable,
)
from dualwrite.stores.sql.tables import (
    ACTION_TABLE,
    BATCH_VIEW,
    CONSUMED_TABLE,
    INCIDENT_TABLE,
    LEASE_TABLE,
    LEDGER_TABLE,
    MYSQL,
    OUTBOX_ASIDE_TABLE,
    OUTBOX_MODE_TABLE,
    OUTBOX_TABLE,
    RUN_TABLE,
    SLOT_TABLE,
    STATE_TABLE,
    VERSION_TABLE,
)

if TYPE_CHECKING:
    from sqlalchemy import PoolProxiedConnection
    from sqlalchemy.pool import ConnectionPoolEntry, PoolResetState


# Makes engines from database URLs.

LIVENESS: Final[Mapping[str, int]] = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""libpq settings that detect the loss of a server's machine or network within half a minute, not hours."""

_TCP: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}

ASYNCPG: Final = "asyncpg"
"""SQLAlchemy's name of the driver."""
_CLIENTS: Final = {"Rdict": "RocksDatabase", "KazooClient": "ZooKeeperDatabase"}
"""By the class of another database's client, what a writer takes in its place."""
_EXTRAS: Final = {
    "psycopg": "postgresql",
    "asyncpg": "asyncpg",
    "pymysql": "mariadb",
    "MySQLdb": "mysqlclient",
    "aiosqlite": "async",
}
"""By a driver's module, the extra that installs it."""


def engine_of(engine: Engine | URL | str) -> Engine:
    """The engine itself, or a new one for a URL, which connects on first use; the caller disposes of it."""
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, (str, URL)):
        raise _no_engine(engine)
    with url_errors_mapped():
        return new_engine(make_url(engine))


def new_engine(url: URL, *, connect_args: Mapping[str, Any] | None = None, **options: Any) -> Engine:
    """A new engine, which connects on first use and detects lost servers; the caller disposes of it."""
    given = {**liveness_of(url), **unprepared(url), **(connect_args or {})}
    is_mysql = url.get_backend_name() in MYSQL
    if is_mysql:
        options.setdefault("pool_reset_on_return", None)
    made = create_engine(url, connect_args=given, **options)
    if is_mysql:
        event.listen(made, "connect", keep_alive)
        event.listen(made, "reset", _roll_back)
    if options.get("isolation_level") == _READ_COMMITTED:
        event.listen(made, "connect", note_read_committed)
    return made


WATCHED: Final = "dualwrite_queries"
"""The attribute of a MySQL connection that has the watch over it."""


def _roll_back(driver: Any, _: object, state: PoolResetState) -> None:
    """As the pool would, but not after a COMMIT: psycopg sends no ROLLBACK outside a transaction, MySQL's drivers do.

    The server's status does not tell whether there is one: PyMySQL reads it from no answer that has rows.
    """
    watch = vars(driver).get(WATCHED)
    if not state.transaction_was_reset and not state.terminate_only and not (watch and watch.commit_was_last):
        driver.rollback()


_READ_COMMITTED: Final = "READ COMMITTED"


def note_read_committed(_: object, record: ConnectionPoolEntry) -> None:
    """Note of a new connection that its session has that level; see :func:`at_read_committed`."""
    record.info[_READ_COMMITTED] = True


def at_read_committed(connection: Connection) -> None:
    """Let the connection's transactions run at READ COMMITTED until it goes back to its pool.

    One of an engine that was made for that level stays as it is: MySQL's drivers would set the level by two statements, and
    again as the connection goes back.
    """
    if not connection.info.get(_READ_COMMITTED):
        connection.execution_options(isolation_level=_READ_COMMITTED)


_IDLE_S: Final = 1.0
_IDLE_SINCE: Final = "dualwrite.idle_since"


def ping_idle_connections(engine: Engine) -> None:
    """Let the pool ping a connection that nobody has used for a second, and replace it if it is lost.

    SQLAlchemy's own ``pool_pre_ping`` doubles the round trips of short transactions that follow each other.
    """

    def note(_: object, record: ConnectionPoolEntry) -> None:
        record.info[_IDLE_SINCE] = now_s()

    def ping(driver: Any, record: ConnectionPoolEntry, _: object) -> None:
        since = record.info.get(_IDLE_SINCE)
        if since is None or now_s() - since < _IDLE_S:
            return
        try:
            engine.dialect.do_ping(driver)
        except engine.dialect.loaded_dbapi.Error as error:
            # Its neighbours were lost with it: the pool renews all that are older than this error.
            raise exc.InvalidatePoolError from error

    event.listen(engine, "checkin", note)
    event.listen(engine, "checkout", ping)


def keep_alive(driver: Any, _: object) -> None:
    """As :data:`LIVENESS`, for asyncpg and MySQL's drivers: they have no settings for it and leave it to the system, hours."""
    driver = driver.driver_connection if isinstance(driver, AdaptedConnection) else driver
    with socket.socket(fileno=os.dup(fileno_of(driver))) as own:
        if own.family not in {socket.AF_INET, socket.AF_INET6}:
            return
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP.items():
            if hasattr(socket, name):
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def fileno_of(driver: Any) -> int:
    """The descriptor of the socket of a connection of PyMySQL, mysqlclient or asyncpg."""
    if (transport := getattr(driver, "_transport", None)) is not None:
        driver = transport.get_extra_info("socket")
    return int(driver.fileno() if hasattr(driver, "fileno") else driver._sock.fileno())  # noqa: SLF001 - PyMySQL has no other way


def unprepared(url: URL) -> Mapping[str, object]:
    """Turn off named prepared statements, which no URL can do: a pooler may switch connections between transactions."""
    if url.get_driver_name() == ASYNCPG:
        if url.query.get("prepared_statement_cache_size", "0") != "0":
            return {}
        # Even without a cache, SQLAlchemy's statements would get names; two processes may choose the same.
        return {"statement_cache_size": 0, "prepared_statement_cache_size": 0, "prepared_statement_name_func": str}
    return {"prepare_threshold": None} if url.get_driver_name().startswith("psycopg") else {}


def liveness_of(url: URL) -> Mapping[str, int]:
    """The :data:`LIVENESS` settings that the URL does not set. Empty if it names a service, whose file may set them."""
    if url.get_driver_name() == ASYNCPG:
        return {"timeout": LIVENESS["connect_timeout"]}
    if url.get_backend_name() != "postgresql" or "service" in url.query:
        return {}
    return {name: value for name, value in LIVENESS.items() if name not in url.query}


def _no_engine(given: object) -> ConfigurationError:
    kind = type(given).__name__
    if hasattr(given, "sync_engine"):  # SQLAlchemy's asyncio part may not be installed
        return ConfigurationError(
            f"{kind} cannot be used by a writer for threads",
            next_step="give it to AsyncDualWriter; or give create_engine() the same database with postgresql+psycopg:// or "
            "sqlite://",
        )
    made_of = _CLIENTS.get(kind)
    return ConfigurationError(
        f"{kind} is not an engine",
        next_step="give a SQLAlchemy Engine or a database URL" if made_of is None else f"give a {made_of} made of it",
    )


@contextmanager
def url_errors_mapped() -> Generator[None, None, None]:
    """Refuse a database URL that SQLAlchemy cannot use. If its driver is not installed, the error names the extra."""
    try:
        yield
    except (exc.ArgumentError, ValueError, ImportError) as error:
        absent = (error.name or "its driver") if isinstance(error, ImportError) else None
        why = f"{absent} is not installed" if absent else "it cannot be read"
        extra = _EXTRAS.get(absent or "")
        # "from None": SQLAlchemy's message may repeat the URL, password included.
        raise ConfigurationError(
            f"the database URL cannot be used: {why}",
            next_step=f"pip install 'dualwrite[{extra}]'"
            if extra
            else "write postgresql+psycopg://user@host/name (pip install 'dualwrite[postgresql]'), "
            "postgresql+asyncpg://user@host/name (AsyncDualWriter; pip install 'dualwrite[asyncpg]'), "
            "mysql+pymysql://user@host/name (MariaDB and MySQL; pip install 'dualwrite[mariadb]') or sqlite:///file; in a "
            "password, @ is %40 and : is %3A",
        ) from None


logger = logging.getLogger(__name__)

LEFT_OPEN: Final = "the driver's connection is already in a transaction"
LEFT_IN_AUTOCOMMIT: Final = "the connection is in autocommit: each statement would be committed by itself"
_LEFT: Final = frozenset({LEFT_OPEN, LEFT_IN_AUTOCOMMIT})

_BORROWED: Final = "dualwrite_borrowed"
"""On a connection of SQLAlchemy's, that it is ours. No set of them: one that an interruption has let drop would stay in it, and
never go back to its pool."""


class Begun:
    """The transaction of a dual write, from its beginning to its end.

    Attributes:
        awaits: Whether the driver's connection is an asynchronous one.
        joined_late: Whether other code has executed statements in it before.
        started: The database's word for it, which its first statement has returned.
        limits: What the dialect must know of the session's own limits to lower them.
        decided: The ids whose decisions it holds.
        refuses: Whether a COMMIT by other code is refused.
        left: Whether it was left to the process that this one was forked from.
        plain: Whether this process has watched all statements in it, and all were plain ones on rows.
    """

    __slots__ = (
        "awaits",
        "decided",
        "driver",
        "joined_late",
        "left",
        "limits",
        "plain",
        "pooled",
        "refuses",
        "session",
        "started",
    )

    def __init__(self, pooled: PoolProxiedConnection, *, joined_late: bool) -> None:
        self.pooled = pooled
        dbapi: Any = pooled.dbapi_connection
        self.awaits = isinstance(dbapi, AdaptedConnection)
        self.driver = dbapi.driver_connection if self.awaits else dbapi
        self.session: Any = None
        self.joined_late = joined_late
        self.started: object = None
        self.limits: Any = None
        self.decided: list[str] = []
        self.refuses = False
        self.left = False


_in_dual_writes: Final[dict[Connection, Begun]] = {}
"""Strong references: what a forked process drops must not be collected there, as the pool would roll it back."""
_process = os.getpid()


class Borrowed:
    """A connection of an engine's, for as long as a ``with`` block lasts."""

    __slots__ = ("_engine", "_own")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._own: Connection | None = None

    def __enter__(self) -> Connection:
        try:
            own = self._own = self._engine.connect()
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self._engine) from error
        except Exception as error:
            if self._engine.dialect.driver != ASYNCPG or isinstance(error, DualWriteError):
                raise
            # SQLAlchemy passes on what asyncpg raises as it connects.
            raise map_database_error(exc.OperationalError("connect", None, error), self._engine) from error
        vars(own)[_BORROWED] = True
        return own

    def __exit__(self, *error: object) -> None:
        """Return it to the pool, if there is one: a task may have been cancelled while it connected."""
        if self._own is not None:
            _in_dual_writes.pop(self._own, None)  # the beginning of one may have been interrupted
            self._own.close()


def stand_alone(connection: Connection) -> None:
    """Let each statement of a connection that has not begun be a transaction by itself, until it goes back to its pool."""
    connection.execution_options(isolation_level="AUTOCOMMIT")


def begin_on(connection: Connection, begin: Callable[[Connection], None], *, own: bool | None = None) -> None:
    """Begin a transaction; on another connection of the pool if other code has left the engine's own one unusable.

    A connection is the engine's ``own``, and not the user's, if it was :class:`Borrowed`, unless the caller says otherwise.
    """
    others: int | None = None
    while True:
        try:
            begin(connection)
        except DualWriteError as error:
            if error.what not in _LEFT or not (_BORROWED in vars(connection) if own is None else own):
                raise
            if others is None:
                # All idle connections of the pool may be like this one; only one that is made after them is not. A pool that
                # keeps none makes a new one each time, or shares a single one, which must not be taken from its other users.
                waiting = getattr(connection.engine.pool, "checkedin", None)
                others = 0 if waiting is None else waiting() + 1
            if not others:
                raise
            others -= 1
            logger.warning("discarding a connection of the pool that other code has left unusable: %s", error.what)
            connection.invalidate()
        else:
            return


def keep(connection: Connection, *, joined_late: bool = False) -> Begun:
    """Note that a dual write begins on the connection. In a process that is forked meanwhile it is left to this one."""
    begun = _in_dual_writes[connection] = Begun(connection.connection, joined_late=joined_late)
    return begun


begun_on: Final = _in_dual_writes.get


def let_go(connection: Connection) -> None:
    """Note that the dual write has ended."""
    _in_dual_writes.pop(connection, None)


def leave_to_parent() -> None:
    """In a forked process, let go of the connections of the parent's dual writes. Finalizers, which run first, call it too."""
    global _process  # noqa: PLW0603 - the process is global to the process
    if os.getpid() == _process:
        return
    _process = os.getpid()
    for begun in _in_dual_writes.values():  # they stay, so that this process ends none of them
        if not begun.left:
            begun.left = True
            _leave(begun.pooled)


os.register_at_fork(after_in_child=leave_to_parent)


def _leave(pooled: PoolProxiedConnection) -> None:
    """Take the driver's connection from SQLAlchemy without sending anything, and make it useless in this process."""
    driver = pooled.driver_connection
    if driver is None:
        return
    import ctypes  # noqa: PLC0415 - in a forked process only

    # Forever: when a connection is collected, SQLite rolls back what is open in the file.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(driver))
    with suppress(Exception):  # an asynchronous driver's thread is in the parent
        if isinstance(driver, sqlite3.Connection):
            driver.set_authorizer(lambda *_: sqlite3.SQLITE_DENY)
        else:
            _sever(fileno_of(driver))
    record: Any = pooled._connection_record  # noqa: SLF001 - invalidate() would close it
    for holder in (record, pooled):
        if holder is not None:
            holder.dbapi_connection = None


def _sever(fileno: int) -> None:
    """Replace a socket that the parent uses by one without a peer, so that sending on it fails in this process."""
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        os.dup2(ours.fileno(), fileno, inheritable=False)


class UnitConnection(Connection):
    """The connection of one unit: that of its group, until the unit has ended.

    Parts of a unit may outlive it: the siblings of a part that has failed in ``asyncio.gather``, a thread. With the group's
    own connection they would write into the commit of the others. So each use enters ``uses``, which raises once the unit has
    ended.
    """

    def __init__(self, group: Connection, uses: AbstractContextManager[object]) -> None:
        vars(self).update(vars(group))  # the same driver's connection, transaction, events and options
        self._group = group
        self._uses = uses

    def _execute_context(self, *args: Any, **options: Any) -> CursorResult[Any]:
        """Every statement passes here, also those of SQLAlchemy's own savepoints."""
        with self._uses:
            return super()._execute_context(*args, **options)

    def commit(self) -> None:
        with self._uses:
            super().commit()

    def rollback(self) -> None:
        with self._uses:
            super().rollback()

    def close(self) -> None:
        with self._uses:
            self._group.close()
            self._dbapi_connection = None

    def invalidate(self, exception: BaseException | None = None) -> None:
        """The group must know that the driver's connection is lost."""
        self._group.invalidate(exception)
        self._dbapi_connection = None


SAVEPOINTS: Final = "dualwrite.savepoints"
"""In the ``info`` of a connection: the names of the savepoints that other code than SQLAlchemy had opened on it before."""


# Maps database errors to ours: the class says what the caller must do, the text names the command or the GRANT.
#
# Maps only errors of the library's own statements; errors of the user's statements are left to the user. No message
# holds a password: addresses appear without password and query, and only the first line of the driver's message is
# shown.


class Meaning(Enum):
    """The meaning of a database error."""

    SCHEMA = "a table or a column is missing"
    PRIVILEGE = "a right is missing"
    READ_ONLY = "the database cannot be written to"
    LOGIN = "the database refuses us"
    REJECTED = "the database rejects the statement"
    CONFLICT = "another transaction was in the way"
    FAILED_TRANSACTION = "an earlier statement of the transaction had failed"
    BUSY = "a lock was not free in time"
    POOL = "the engine's pool had no free connection"
    POOLER = "a pooler between us and the database shares connections by statement"
    UNPREPARED = "a statement that the driver has prepared is not there, or another is there under its name"
    GONE = "the connection is lost, or was not made"
    FULL = "there is no space or memory left"
    OTHER = "the database failed"


# By SQLSTATE; the longest prefix wins. Source: PostgreSQL manual, appendix A.
_BY_SQLSTATE: Final = {
    "42P01": Meaning.SCHEMA,
    "42703": Meaning.SCHEMA,
    "3F000": Meaning.SCHEMA,
    "42501": Meaning.PRIVILEGE,
    "25006": Meaning.READ_ONLY,
    "28": Meaning.LOGIN,
    "3D000": Meaning.LOGIN,
    "40": Meaning.CONFLICT,
    "25P02": Meaning.FAILED_TRANSACTION,
    "26000": Meaning.UNPREPARED,
    "42P05": Meaning.UNPREPARED,
    "25P03": Meaning.GONE,
    "25P04": Meaning.GONE,
    "55P03": Meaning.BUSY,
    "57014": Meaning.BUSY,
    "57": Meaning.GONE,
    "08": Meaning.GONE,
    "53300": Meaning.BUSY,
    "53": Meaning.FULL,
    "0A": Meaning.REJECTED,
    "22": Meaning.REJECTED,
    "23": Meaning.REJECTED,
    "42": Meaning.REJECTED,
}

# By SQLite's message: Python 3.10 does not expose the error code.
_BY_SQLITE_MESSAGE: Final = {
    "no such table": Meaning.SCHEMA,
    "no such column": Meaning.SCHEMA,
    "has no column": Meaning.SCHEMA,
    "unknown database": Meaning.SCHEMA,
    "attempt to write a readonly database": Meaning.READ_ONLY,
    "unable to open database file": Meaning.LOGIN,
    "database is locked": Meaning.BUSY,
    "database table is locked": Meaning.BUSY,
    "database schema is locked": Meaning.BUSY,
    "database or disk is full": Meaning.FULL,
}

# By the error numbers of MariaDB and MySQL: their drivers give no SQLSTATE.
_BY_NUMBER: Final = {
    **dict.fromkeys((1146, 1054), Meaning.SCHEMA),
    **dict.fromkeys((1044, 1142, 1143, 1227, 1370), Meaning.PRIVILEGE),
    **dict.fromkeys((1290, 1792, 1836), Meaning.READ_ONLY),
    **dict.fromkeys((1045, 1046, 1049, 1130, 1698, 2005, 2061), Meaning.LOGIN),
    **dict.fromkeys((1020, 1213, 1412, 1614, 3101), Meaning.CONFLICT),  # 1412: a migration came after the snapshot
    **dict.fromkeys((1040, 1203, 1205, 1226, 1317, 1969, 3024, 3572), Meaning.BUSY),
    **dict.fromkeys((1021, 1037, 1038, 1041, 1114), Meaning.FULL),
    **dict.fromkeys((1264, 1366, 1406, 3819, 4025), Meaning.REJECTED),
    **dict.fromkeys((1053, 1077, 1079, 1152, 1153, 1158, 1159, 1160, 1161, 1184, 1927), Meaning.GONE),
    **dict.fromkeys((2002, 2003, 2006, 2013, 2014, 2045, 2055, 4031), Meaning.GONE),
}

# PgBouncer's refusal of BEGIN shows in its text only: its SQLSTATE (08P01) has many meanings.
_POOLER_WORDS: Final = "transaction blocks not allowed in statement pooling mode"

_MYSQL_DRIVERS: Final = frozenset({"pymysql", "MySQLdb"})

# Django's errors, which wrap the driver's without its SQLSTATE.
_DJANGO: Final = "django.db.utils"

# libpq gives no SQLSTATE for a refused connection.
_LOGIN_WORDS: Final = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "does not exist")


def sqlstate_of(error: BaseException | None) -> str | None:
    """The SQLSTATE of a driver's error; None if it has none (SQLite, or libpq itself)."""
    state = getattr(error, "sqlstate", None)
    return state if isinstance(state, str) else None


def number_of(error: BaseException | None) -> int | None:
    """The number of an error of PyMySQL or mysqlclient; None for errors of other drivers."""
    if error is None or type(error).__module__.partition(".")[0] not in _MYSQL_DRIVERS:
        return None
    number = error.args[0] if error.args else None
    return number if isinstance(number, int) else None


def meaning_of(error: exc.SQLAlchemyError) -> Meaning:
    """The meaning of an error, by its code."""
    if isinstance(error, exc.TimeoutError):
        return Meaning.POOL
    if not isinstance(error, exc.DBAPIError):
        return Meaning.OTHER
    if isinstance(error.orig, sqlite3.Error):
        return _sqlite_meaning(error.orig)
    if _POOLER_WORDS in str(error.orig):
        return Meaning.POOLER
    if type(error.orig).__module__.partition(".")[0] in _MYSQL_DRIVERS:
        return _mysql_meaning(error)
    state = sqlstate_of(error.orig)
    if state is None:
        if error.connection_invalidated or isinstance(error, (exc.OperationalError, exc.InterfaceError)):
            return Meaning.LOGIN if any(words in str(error.orig) for words in _LOGIN_WORDS) else Meaning.GONE
        return Meaning.REJECTED
    for length in (5, 2):
        if state[:length] in _BY_SQLSTATE:
            return _BY_SQLSTATE[state[:length]]
    return Meaning.OTHER


def _sqlite_meaning(error: sqlite3.Error) -> Meaning:
    text = str(error)
    for words, meaning in _BY_SQLITE_MESSAGE.items():
        if words in text:
            return meaning
    return Meaning.REJECTED if isinstance(error, (sqlite3.IntegrityError, sqlite3.ProgrammingError)) else Meaning.OTHER


def _mysql_meaning(error: exc.DBAPIError) -> Meaning:
    number = number_of(error.orig)
    if number in _BY_NUMBER:
        return _BY_NUMBER[number]
    if error.connection_invalidated or isinstance(error, exc.InterfaceError):
        return Meaning.GONE
    rejected = (exc.IntegrityError, exc.ProgrammingError, exc.DataError, exc.NotSupportedError)
    return Meaning.REJECTED if isinstance(error, rejected) else Meaning.OTHER


def conflict_behind(error: BaseException, transactional_id: str) -> TransactionAborted | None:
    """The retryable error for a deadlock, a serialization failure or a busy lock; None for others: the user's error stays.

    The dual write has aborted on both sides, even if the statement ran on the driver's own connection, or through Django.
    """
    if type(error).__module__ == _DJANGO and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, exc.DBAPIError):
        meaning = meaning_of(error)
        of_sqlite = isinstance(error.orig, sqlite3.Error)
    else:
        conflict = (sqlstate_of(error) or "").startswith("40") or _BY_NUMBER.get(
            number_of(error) or 0
        ) is Meaning.CONFLICT
        meaning = Meaning.CONFLICT if conflict else Meaning.OTHER
        of_sqlite = False
    if meaning is not Meaning.CONFLICT and not (of_sqlite and meaning is Meaning.BUSY):
        return None
    return TransactionAborted(
        f"{meaning.value}: {driver_words(error)}",
        transactional_id=transactional_id,
        next_step="run the same work again",
    )


def ended_inside(by: str, next_step: str) -> IllegalStateError:
    """The error for a dual write whose database transaction was ended inside it. Nothing was decided."""
    error = IllegalStateError(
        f"the database transaction of the dual write was ended inside it, {by}: no message is sent; if it was committed, "
        "what was written before that stays, and what was written after it may stay",
        next_step=next_step,
    )
    error.outcome = "unknown"
    return error


def driver_words(error: BaseException) -> str:
    """The driver's message in one line, without details, which may hold values of rows."""
    orig = error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error
    primary = getattr(getattr(orig, "diag", None), "message_primary", None)
    if number_of(orig) is not None and len(orig.args) > 1:
        primary = f"{orig.args[1]} ({orig.args[0]})"
    text = primary if isinstance(primary, str) else str(orig)
    return text.strip().partition("\n")[0] or type(orig).__name__


def version_of(connection: Connection) -> tuple[int, ...]:
    """The server's version, as numbers."""
    return tuple(number for number in connection.dialect.server_version_info or () if isinstance(number, int))


def shown_url(url: URL | str) -> str:
    """The address to show: no password, and no query, which may hold one too."""
    return make_url(url).set(query={}).render_as_string(hide_password=True)


def migrate_command(url: URL | str, schema: str | None) -> str:
    """The exact command that makes or upgrades the tables, with ``***`` for the password."""
    words = ["dualwrite", "migrate", "--url", shown_url(url)]
    return shlex.join([*words, "--schema", schema] if schema is not None else words)


def migrate_advice(url: URL | str | None, schema: str | None) -> str:
    """How to make or upgrade the tables: as their owner, since the application's role need not create tables."""
    if url is None:
        return "run: dualwrite migrate"
    shown = make_url(url)
    if shown.get_backend_name() == "sqlite":  # it has no roles
        return f"run: {migrate_command(url, schema)}"
    role = repr(shown.username) if shown.username else "the application's role"
    owner = shown.set(username="OWNER")
    return f"run as the tables' owner, not necessarily {role}: {migrate_command(owner, schema)}"


@contextmanager
def reading(engine: Engine, schema: str | None) -> Generator[Connection, None, None]:
    """A connection for a look at the library's tables, with database errors mapped."""
    try:
        with engine.connect() as connection:
            yield connection
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine, schema) from error


def map_database_error(
    error: exc.SQLAlchemyError,
    engine: Engine | None = None,
    schema: str | None = None,
    *,
    transactional_id: str | None = None,
) -> DualWriteError:
    """The error to raise, ``from error``, for a database error of one of our own statements.

    Not for errors of COMMIT: :func:`dualwrite.stores.sql.dialect.commit` handles those.

    Returns:
        ``ConfigurationError`` if a person must change something; ``TransactionAborted`` if another run may succeed
        (serialisation failure, deadlock), and if the transaction had already failed; ``Unavailable`` for the rest.
    """
    meaning = meaning_of(error)
    what = f"{meaning.value}: {driver_words(error)}"
    if meaning is Meaning.SCHEMA:
        return ConfigurationError(
            what,
            transactional_id=transactional_id,
            next_step=migrate_advice(None if engine is None else engine.url, schema),
        )
    if meaning is Meaning.PRIVILEGE:
        return ConfigurationError(
            what,
            transactional_id=transactional_id,
            next_step=grants_to_work(None if engine is None else engine.url, schema),
        )
    if meaning in _ADVICE:
        refused = ConfigurationError(what, transactional_id=transactional_id, next_step=_ADVICE[meaning])
        refused.may_pass = meaning is Meaning.READ_ONLY  # a failover may be under way
        return refused
    if meaning is Meaning.CONFLICT:
        return TransactionAborted(what, transactional_id=transactional_id, next_step="run the same work again")
    if meaning is Meaning.FAILED_TRANSACTION:
        return TransactionAborted(
            what,
            transactional_id=transactional_id,
            next_step="stop after a failed statement, or run it in a savepoint (begin_nested)",
            retryable=False,
        )
    if meaning is Meaning.POOL:
        return Unavailable(what, transactional_id=transactional_id, next_step=_POOL_STEP)
    if meaning is Meaning.UNPREPARED:  # it may be over with this connection, as after a failover behind a pooler
        return Unavailable(what, transactional_id=transactional_id, next_step=_PREPARED_STEP)
    if isinstance(error, exc.ResourceClosedError):
        return IllegalStateError("the connection is closed", transactional_id=transactional_id)
    return Unavailable(what, transactional_id=transactional_id)


_POOL_STEP: Final = (
    "raise the engine's pool_size or max_overflow: each dual write holds one connection, and needs another one for a moment "
    "when it settles; or find the code that keeps connections"
)

_PREPARED_STEP: Final = (
    "leave DEALLOCATE and DISCARD to the driver; behind a pooler that shares connections by transaction, give the database's "
    "URL, or an engine of asyncpg with connect_args statement_cache_size=0, prepared_statement_cache_size=0 and "
    "prepared_statement_name_func=str"
)
_ADVICE: Final = {
    Meaning.READ_ONLY: "connect to the primary, with a role and a file that may be written to",
    Meaning.LOGIN: "check the database's address, user and password",
    Meaning.POOLER: "a transaction needs one connection to its end: use pool_mode=transaction or session (PgBouncer)",
    Meaning.REJECTED: "the tables or the values do not fit this version of the library: check them",
}


# The statements that give the application's role the rights it lacks.


def grants_to_delete(url: URL, schema: str | None) -> str:
    """The GRANTs for deleting rows."""
    deleted = (STATE_TABLE, INCIDENT_TABLE, SLOT_TABLE, RUN_TABLE, LEASE_TABLE, OUTBOX_MODE_TABLE, ACTION_TABLE)
    rights = [("SELECT, DELETE", deleted), ("UPDATE", (RUN_TABLE,)), ("SELECT", (OUTBOX_TABLE,))]
    return _said(url, schema, rights, "the role")


_READ: Final = ("SELECT",)
_KEEP: Final = ("SELECT", "INSERT", "UPDATE")
_PASS_ON: Final = ("SELECT", "INSERT", "DELETE")
WRITER: Final = "a writer"
PURPOSES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    WRITER: {STATE_TABLE: _KEEP, INCIDENT_TABLE: _KEEP, VERSION_TABLE: _READ},
    "status and recover": {SLOT_TABLE: _READ, LEASE_TABLE: _READ},
    "fleets": {LEASE_TABLE: _KEEP},
    "consumers with offsets in the database": {CONSUMED_TABLE: _KEEP},
    "messages that wait": {OUTBOX_TABLE: _PASS_ON, OUTBOX_ASIDE_TABLE: _PASS_ON, OUTBOX_MODE_TABLE: _KEEP},
    "the history of actions": {ACTION_TABLE: _KEEP},
    "Spark": {SLOT_TABLE: _KEEP, LEDGER_TABLE: _KEEP, RUN_TABLE: _KEEP, BATCH_VIEW: _READ},
}
"""By purpose, the rights on each table. Messages that waited are deleted as they are sent."""


def grants_to_work(url: URL | None, schema: str | None, purposes: Collection[str] = tuple(PURPOSES)) -> str:
    """The GRANTs for these purposes; for everything but deleting what recovery may need if none is named."""
    of_table: dict[str, tuple[str, ...]] = {}
    for purpose in purposes:
        for name, rights in PURPOSES[purpose].items():
            of_table[name] = max(of_table.get(name, ()), rights, key=len)
    by_rights: dict[tuple[str, ...], list[str]] = {}
    for name, rights in of_table.items():
        by_rights.setdefault(rights, []).append(name)
    said = [(", ".join(rights), tuple(names)) for rights, names in by_rights.items()]
    return _said(url, schema, said, '"the application"', works=True)


def _said(
    url: URL | None,
    schema: str | None,
    rights: list[tuple[str, tuple[str, ...]]],
    nobody: str,
    *,
    works: bool = False,
) -> str:
    if url is not None and url.get_backend_name() in MYSQL:
        return "as the owner of the tables: " + "; ".join(_on_mysql(url, schema, rights, works=works))
    role = nobody if url is None or url.username is None else f'"{url.username}"'
    prefix = f'"{schema}".' if schema is not None else ""
    usage = f'GRANT USAGE ON SCHEMA "{schema}" TO {role}; ' if schema is not None and works else ""
    granted = [f"GRANT {what} ON {', '.join(f'{prefix}{name}' for name in names)} TO {role}" for what, names in rights]
    return f"as the owner of the tables: {usage}{'; '.join(granted)}"


def _on_mysql(url: URL, schema: str | None, rights: list[tuple[str, tuple[str, ...]]], *, works: bool) -> list[str]:
    """One statement for each table: there, GRANT takes only one. Witnesses of savepoints need a temporary table."""
    prefix = f"`{schema}`." if schema is not None else ""
    user = f"'{url.username or 'app'}'@'%'"
    database = f"`{url.database}`" if url.database else "*"
    granted = [f"GRANT {what} ON {prefix}{name} TO {user}" for what, names in rights for name in names]
    return [*granted, f"GRANT CREATE TEMPORARY TABLES ON {database}.* TO {user}"] if works else granted
