"""PostgreSQL 13 and newer through psycopg 3 or asyncpg, also behind PgBouncer with transaction pooling.

Nothing here depends on a session: settings last for one transaction, and travel in statements that are sent anyway.

The library's own statements go out below SQLAlchemy and below psycopg's cursors, which need five hundred calls for the three of
a dual write. A text that the server reads by itself (a *simple query*) may hold several: BEGIN goes out with the look at the
row, and SET CONSTRAINTS with the decision, in one request each, without a pipeline, and through poolers too.

Where psycopg may prepare statements, ours are prepared in the session (``PREPARE``), and from then on only named: the server
takes longer to read and plan one than to execute it. Not through a pooler, which gives each transaction another session: there
the process that answers is not the one that the connection was promised. psycopg forgets what it has prepared by ``DEALLOCATE
ALL``, at some statement after a rollback or DDL, and that takes ours along. A block that begins with a statement that is gone
begins once more. A decision cannot: it is named only if psycopg, which keeps the name among its own, still has it.

:mod:`~dualwrite.stores.sql.asyncpg_driver` says what is different in blocks on a connection of asyncpg. The library's own
transactions always go through psycopg.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol, cast

from psycopg import ClientCursor, IsolationLevel, errors, generators
from sqlalchemy import (
    AdaptedConnection,
    BigInteger,
    ColumnElement,
    Text,
    bindparam,
    case,
    exc,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.util import await_only

from dualwrite.clock import now_s
from dualwrite.errors import ConfigurationError, DualWriteError, IllegalStateError
from dualwrite.protocol import findings
from dualwrite.protocol.findings import Status, refuse
from dualwrite.protocol.process import DatabaseVerdict
from dualwrite.stores.sql import dialect
from dualwrite.stores.sql.access import (
    ASYNCPG,
    LEFT_IN_AUTOCOMMIT,
    LEFT_OPEN,
    Begun,
    begun_on,
    ended_inside,
    sqlstate_of,
    stand_alone,
    version_of,
)
from dualwrite.stores.sql.dialect import Dialect, Identity, Standing, name_of
from dualwrite.stores.sql.drivers import PREFIX, WATCHDOG, Watch, own_connection
from dualwrite.stores.sql.savepoint_probe import PsycopgWitness

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from sqlalchemy import Connection, Insert, Table, Update
    from sqlalchemy.engine.interfaces import DBAPIConnection
    from typing_extensions import Self

    from dualwrite.protocol.values import Decision, WaitingMessages
    from dualwrite.stores.sql.asyncpg_driver import Exchanges
    from dualwrite.stores.sql.commit_with_decision import CommitWithDecision
    from dualwrite.stores.sql.drivers import CompiledOnce, OwnText
    from dualwrite.stores.sql.savepoint_probe import Follower, Witness
    from dualwrite.stores.sql.tables import Tables
    from dualwrite.stores.sql.waiting_rows import Asked, Put

logger = logging.getLogger(__name__)

# libpq's PQtransactionStatus, by number: the driver that names the values may not be installed.
_STANDINGS: Final = {0: Standing.ENDED, 1: Standing.OPEN, 2: Standing.OPEN, 3: Standing.FAILED, 4: Standing.BROKEN}
_IDLE: Final = 0
_ACTIVE: Final = 1
IN_TRANSACTION: Final = 2

# SQLSTATE classes that leave a COMMIT in doubt, even if the connection survives: a proxy may have sent them, or the
# storage failed. Every other error in answer to COMMIT means a rollback: once the commit record is written, PostgreSQL
# reports no errors (it would panic).
_UNCERTAIN_CLASSES: Final = frozenset({"08", "57", "58", "XX", "F0"})
_UNCERTAIN: Final = frozenset(
    {
        "40003",
        "25P04",  # transaction_timeout: if it expires while the commit record is written, it is reported afterwards
    }
)
_CERTAIN: Final = frozenset(
    {
        "57014",  # cancelled: a COMMIT past its record continues, with a warning
        "25P03",  # idle_in_transaction_session_timeout: the session had ended before COMMIT arrived
    }
)

_KEPT_LIMIT: Final = "dualwrite.lock_timeout"
POOLED: Final = "leave COMMIT and ROLLBACK to the dual write; use PgBouncer with pool_mode=transaction"
IMMEDIATE: Final = "SET CONSTRAINTS ALL IMMEDIATE"
# now() is the time at which the transaction began: nothing changes it within one, and it costs nothing. As a number of
# microseconds, since the text or the driver's value of a timestamp depends on settings of the session.
NOW_TEXT: Final = "CAST(extract(epoch FROM now()) * 1000000 AS bigint)"
_NOW: Final[ColumnElement[Any]] = literal_column(NOW_TEXT, BigInteger())
IS_BEGUN: Final[ColumnElement[bool]] = bindparam("begun_", type_=BigInteger()) == _NOW
_FRESHLY: Final = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_FRESH: Final = frozenset({"read committed", "read uncommitted"})
_DURABLE: Final = (
    "CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END"
)
# The server's start time goes with the number: after a failover, the same number may be another transaction.
SERVER: Final = "extract(epoch FROM pg_postmaster_start_time())::text"
_NAME: Final = re.compile(r"([0-9]{1,20})@([0-9.]{1,32})")


_PREPARED: Final = text(
    "SELECT gid, prepared FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, :prefix) "
    "ORDER BY gid"
)


_IDENTITY: Final = text(
    f"SELECT {SERVER}, oid, to_regclass(:name)::oid FROM pg_database WHERE datname = current_database()"  # noqa: S608 - a constant
)


class _Driver(Protocol):
    """A connection of psycopg's; or what is exchanged on one of asyncpg's."""

    @property
    def closed(self) -> bool: ...

    @property
    def pgconn(self) -> _PGconn: ...

    def fileno(self) -> int: ...


class _PGconn(Protocol):
    @property
    def transaction_status(self) -> int: ...


def _driver(connection: Connection) -> _Driver:
    dbapi = connection.connection.dbapi_connection
    assert dbapi is not None
    return _watched(dbapi)


def _watched(dbapi: DBAPIConnection) -> _Driver:
    own: Any = dbapi if hasattr(dbapi, "pgconn") else own_connection(dbapi)
    driver: _Driver = own if hasattr(own, "pgconn") else _exchanges_of(own)
    return driver


def _exchanges_of(driver: Any) -> Exchanges:
    from dualwrite.stores.sql.asyncpg_driver import exchanges_of  # noqa: PLC0415 - only blocks of AsyncDualWriter use it

    return exchanges_of(driver)


def begun_of(connection: Connection) -> Begun:
    """What was begun on the connection, where something must have been."""
    begun = begun_on(connection)
    if begun is None:
        raise IllegalStateError("no dual write has begun on the connection")
    return begun


def _usable_driver(connection: Connection) -> _Driver:
    """The driver's connection, which commits by COMMIT alone and may write."""
    dbapi = connection.connection.dbapi_connection
    assert dbapi is not None
    driver = _watched(dbapi)
    is_adapted = connection.dialect.driver == ASYNCPG
    given: Any = dbapi if is_adapted else driver
    if given.autocommit:
        raise ConfigurationError(
            LEFT_IN_AUTOCOMMIT,
            next_step="use an engine without isolation_level='AUTOCOMMIT', or a psycopg connection with autocommit=False",
        )
    if given.readonly if is_adapted else given.read_only:
        raise ConfigurationError(
            "the connection is set to read-only", next_step="use a connection without postgresql_readonly"
        )
    return driver


def _limit(name: str, timeout_ms: int) -> str:
    """An expression that sets a time limit for this transaction, unless a lower one applies (0 means no limit)."""
    present = f"current_setting('{name}')::interval"
    limit = f"interval '{timeout_ms} milliseconds'"
    return (
        f"CASE WHEN {present} = interval '0' OR {present} > {limit} THEN set_config('{name}', '{timeout_ms}', true) END"
    )


def _set_lock_timeout(timeout_s: float) -> str:
    return f"set_config('lock_timeout', '{max(1, int(timeout_s * 1000))}', true)"  # 0 would mean forever


def _limit_idle(timeout_s: float | None) -> str:
    return "NULL" if timeout_s is None else _limit("idle_in_transaction_session_timeout", max(1, int(timeout_s * 1000)))


class _LimitedCursor(ClientCursor[Any]):
    """Sends its limits and a statement as one text, which is one request and one transaction.

    As part of the statement the limits would come too late: the server locks its tables before it evaluates anything.
    """

    def __init__(self, connection: Any, *, limits: str, row_factory: Any) -> None:
        super().__init__(connection, row_factory=row_factory)
        self._limits = limits

    def execute(self, query: Any, params: Any = None, **given: Any) -> Self:
        super().execute(self._limits + query, params, **given)
        while self.nextset():
            pass
        return self


@contextmanager
def _limited(connection: Connection, limits: str) -> Iterator[None]:
    driver: Any = _driver(connection)
    given, driver.cursor_factory = driver.cursor_factory, partial(_LimitedCursor, limits=limits)
    try:
        yield
    finally:
        driver.cursor_factory = given


_LOCAL: Final[ColumnElement[bool]] = literal_column("true")
_IDLE_NAME: Final[ColumnElement[str]] = literal_column("'idle_in_transaction_session_timeout'")
_LIMIT_NAME: Final[ColumnElement[str]] = literal_column("'transaction_timeout'")
_LEFT_MS: Final = (
    "nullif((extract(epoch FROM current_setting('transaction_timeout', true)::interval) * 1000)::bigint, 0)"
    " - (extract(epoch FROM clock_timestamp() - now()) * 1000)::bigint"
)


def _idle_ms(timeout_s: float | None) -> str:
    """An expression that limits a pause between two statements, and returns the limit in milliseconds: NULL for none."""
    limit = f"coalesce({_limit_idle(timeout_s)}, current_setting('idle_in_transaction_session_timeout'))"
    return f"nullif((extract(epoch FROM {limit}::interval) * 1000)::bigint, 0)"


class _Limits(NamedTuple):
    """The limits of a transaction, as its first statement has found them at ``asked_at``, in milliseconds; None for none."""

    idle_ms: int | None
    left_ms: int | None
    asked_at: float

    def lower(self, idle_ms: int | None, within_ms: int | None) -> tuple[int | None, int | None]:
        """The limits of a decision: these, unless the session's own are lower. None keeps what applies."""
        if idle_ms is not None and self.idle_ms is not None:
            idle_ms = min(idle_ms, self.idle_ms)
        if within_ms is not None and self.left_ms is not None:
            within_ms = max(1, min(within_ms, self.left_ms - int((now_s() - self.asked_at) * 1000)))
        return idle_ms, within_ms


# The server reads and plans the text of each decision, so these are short: which limit is the lowest is known here.


def _set_idle_limit(ms: ColumnElement[int | None]) -> ColumnElement[object]:
    return case((ms.is_not(None), func.set_config(_IDLE_NAME, ms.cast(Text()), _LOCAL)))


def durable_within(ms: ColumnElement[int | None]) -> Sequence[ColumnElement[object]]:
    """What a statement returns that makes the COMMIT behind it durable, and limits it on PostgreSQL 17 and newer."""
    return literal_column(_DURABLE).label("durable"), _set_limit(ms).label("limited")


def _set_limit(ms: ColumnElement[int | None]) -> ColumnElement[object]:
    """Ends the transaction after that time. Before PostgreSQL 17 there is no such setting: NULL.

    The server arms its timer only when the setting changes from 0. The condition of a CASE is evaluated first.
    """
    disarmed = func.set_config(_LIMIT_NAME, literal_column("'0'"), _LOCAL) == literal_column("'0'")
    armed = func.set_config(_LIMIT_NAME, case((disarmed, ms.cast(Text()))), _LOCAL)
    return case((func.current_setting(_LIMIT_NAME, _LOCAL).is_not(None) & ms.is_not(None), armed))


# The library's own statements on a connection of psycopg's.

_SESSION: Final = "dualwrite_session"
_DONE: Final = frozenset({1, 2})  # COMMAND_OK, TUPLES_OK
_NO_TRANSACTION: Final = "25P01"
"""The warning with which the server answers a COMMIT outside of a transaction. Nothing else in the answer shows it."""
WHICH_SERVER: Final = "SELECT pg_backend_pid()"
NOT_PREPARED: Final = "26000"


@dataclass
class Session:
    """The facts about one connection of psycopg's, kept for as long as it lives.

    Attributes:
        is_direct: Whether no pooler stands between us and the server; None if that is not known.
        prepared: By the names of their texts, the texts that execute the statements that the server has prepared for us.
        generation: Part of the names in the server. It grows when they are lost: perhaps not all of them are.
        commit_found_none: Whether the server has warned since that a COMMIT has found no transaction.
        is_primary: Whether the server was seen not to be a standby, without a pooler in between. It stays so: what makes a
            standby of a primary is a restart, which ends the connection.
    """

    is_direct: bool | None = None
    prepared: dict[str, str] = field(default_factory=dict)
    generation: int = 0
    commit_found_none: bool = False
    is_primary: bool = False

    def hear(self, notice: Any) -> None:
        if notice.sqlstate == _NO_TRANSACTION:
            self.commit_found_none = True

    def is_lost(self, own: OwnText, execution: str | None, error: BaseException) -> bool:
        """Whether the error says that the session has forgotten what was prepared in it.

        All statements are then prepared again, under other names; and also if it is not known whether this one was prepared.
        """
        lost = getattr(error, "sqlstate", None) == NOT_PREPARED
        if lost or (execution is not None and own.name not in self.prepared):
            self._forget()
        return lost

    def _forget(self) -> None:
        self.prepared.clear()
        self.generation += 1

    def look(self, answer: Any, driver: Any) -> None:
        """Learn from the answer to :data:`WHICH_SERVER` whether a pooler stands before it."""
        self.is_direct = answer.get_value(0, 0) == b"%d" % driver.pgconn.backend_pid

    def prepared_in(self, own: OwnText, texts: list[str]) -> str | None:
        """The text that executes a prepared statement, for :func:`literals`; None if it cannot be prepared.

        What must be sent before it is added to the texts: the one that prepares it, or the question who answers.
        """
        if not self.is_direct:
            if self.is_direct is None:
                texts.append(WHICH_SERVER)
            return None
        execution = self.prepared.get(own.name)
        if execution is None:
            execution = self._prepare(own, texts)
        return execution

    def _name_of(self, own: OwnText) -> str:
        return f"{own.name}_{self.generation}"

    def _prepare(self, own: OwnText, texts: list[str]) -> str:
        name = self._name_of(own)
        numbered = own.template % {one: f"${number}" for number, one in enumerate(own.names, 1)}
        texts.append(f"PREPARE {name} AS {numbered}")
        return f"EXECUTE {name}({', '.join(f'%({one})s' for one in own.names)})"

    def certainly_prepared_in(self, own: OwnText, driver: Any, texts: list[str]) -> str | None:
        """As :meth:`prepared_in`, for a statement whose transaction would be lost if it were gone. :meth:`keep` it then.

        psycopg sends ``DEALLOCATE ALL`` with another statement than the one that made it necessary. But it strikes all names
        off its own list at once, and the oldest of too many. So a name that it still has is still in the server.
        """
        manager = getattr(driver, "_prepared", None)
        names = getattr(manager, "_names", None)
        if not self.is_direct or driver.prepare_threshold is None or names is None:
            return None
        execution = self.prepared.get(own.name)
        if execution is not None:
            if (self._name_of(own).encode(), ()) in names:
                return execution
            self._forget()
        if getattr(manager, "_to_flush", True):
            return None  # what is prepared now goes with what is to be forgotten
        return self._prepare(own, texts)

    def keep(self, own: OwnText, driver: Any, execution: str) -> None:
        """Note that the server has prepared it, and that psycopg must tell when it is forgotten."""
        if own.name not in self.prepared:
            self.prepared[own.name] = execution
            name = self._name_of(own).encode()
            driver._prepared._names[name, ()] = name  # noqa: SLF001 - nothing public shows what it forgets


def session_of(driver: Any) -> Session:
    """The facts about that connection."""
    found: Session | None = vars(driver).get(_SESSION)
    if found is None:
        found = vars(driver)[_SESSION] = Session()
        driver.add_notice_handler(found.hear)
    return found


def _session(driver: Any) -> Session | Exchanges:
    """Where it is noted that a COMMIT has found no transaction."""
    return session_of(driver) if hasattr(driver, "pgconn") else _exchanges_of(driver)


_begins: Final[dict[tuple[int | None, bool | None, bool | None], str]] = {}


def begin_of(driver: Any) -> str:
    """The text by which this connection begins a transaction, as psycopg would: with the isolation that it was given."""
    given = (driver.isolation_level, driver.read_only, driver.deferrable)
    text = _begins.get(given)
    if text is None:
        isolation, read_only, deferrable = given
        words = ["BEGIN"]
        if isolation is not None:
            words.append(f"ISOLATION LEVEL {IsolationLevel(isolation).name.replace('_', ' ')}")
        if read_only is not None:
            words.append("READ ONLY" if read_only else "READ WRITE")
        if deferrable is not None:
            words.append("DEFERRABLE" if deferrable else "NOT DEFERRABLE")
        text = _begins[given] = " ".join(words)
    return text


def literals(bound: Mapping[str, object]) -> dict[str, object]:
    """The values as they stand in a text: numbers as they are, NULL, and strings quoted for any setting of the session."""
    quoted: dict[str, object] = {}
    for name, value in bound.items():
        if value is None:
            quoted[name] = "NULL"
        elif isinstance(value, int):
            quoted[name] = value
        else:
            text = str(value).replace("'", "''")
            # E'' reads backslashes in one way, whatever standard_conforming_strings is. The server converts the text to its own
            # encoding before it reads it, so that no byte of another character is taken for one.
            quoted[name] = "E'" + text.replace("\\", "\\\\") + "'" if "\\" in text else "'" + text + "'"
    return quoted


def exchange(driver: Any, text: str, results: list[Any], *, awaits: bool) -> None:
    """Send a text of several statements, and add the results to the list. An interruption cancels, as psycopg does."""
    command = text.encode() if text.isascii() else text.encode(driver.info.encoding)
    talking = talk(driver, results, driver.pgconn.send_query, command)
    # The class's own way of waiting: that of the instance may be the watch for statements of others.
    if awaits:
        await_only(awaited(driver, talking))
        return
    with driver.lock:
        type(driver).wait(driver, talking)


async def awaited(driver: AsyncConnection[Any], talking: Generator[Any, Any, None]) -> None:
    """Wait in a task for the end of a :func:`talk`."""
    async with driver.lock:
        await type(driver).wait(driver, talking)


def talk(driver: Any, results: list[Any], send: Callable[..., object], *arguments: object) -> Generator[Any, Any, None]:
    """Send, and add the results to the list, as far as they come."""
    send(*arguments)
    results += yield from generators.execute(driver.pgconn)
    if results[-1].status not in _DONE:
        raise errors.error_from_result(results[-1], encoding=driver.info.encoding)


def row_of(result: Any) -> Sequence[str | None] | None:
    """The one row of a result, as the server has written it; None if there is none."""
    row: list[str | None] = []
    for at in range(result.nfields if result.ntuples else 0):  # a comprehension would be one more call
        value = result.get_value(0, at)
        row.append(None if value is None else value.decode())
    return row or None


def _ask(  # noqa: C901 - the ways of one statement, side by side
    connection: Connection,
    statement: CompiledOnce,
    bound: Mapping[str, Any],
    *,
    first: bool = False,
    deferred_of: str | None = None,
    again: bool = False,
    put: Put | None = None,
) -> Sequence[object] | None:
    """Execute one of our own statements below SQLAlchemy, with the errors and events of its own executions, and return its row.

    If it is the ``first`` of the dual write, nothing is lost if its transaction is begun once more; ``again``: it is. Messages
    are ``put`` after it.
    """
    own = statement.text(connection)
    if own is None:
        return _ask_by_sqlalchemy(connection, statement, bound, deferred_of, put)
    begun = begun_on(connection)
    # SQLAlchemy's error if the connection is closed or lost. After a loss and a rollback it is another one than that of the
    # dual write, which is not begun there.
    if connection.connection is not (None if begun is None else begun.pooled):
        raise ended_inside(
            "by a rollback through SQLAlchemy, or by the loss of the connection", "leave both to the block"
        )
    if connection.dialect.driver == ASYNCPG:
        return _ask_by_sqlalchemy(connection, statement, bound, deferred_of, put)
    assert begun is not None
    driver = begun.driver
    session = begun.session or session_of(driver)
    status = driver.pgconn.transaction_status
    begins = again or (first and status == _IDLE)
    texts = ["ROLLBACK"] if again else []
    if begins:
        texts.append(begin_of(driver))
    elif (
        deferred_of is not None and status == IN_TRANSACTION
    ):  # in any other, ours reports what is wrong, with the cause
        texts.append(IMMEDIATE)
    execution = None
    # Only the first statement is named: if it is gone, nothing but its transaction is lost, which is begun once more.
    if begins and driver.prepare_threshold is not None:
        execution = session.prepared_in(own, texts)
    texts.append((execution or own.template) % literals({**own.constants, **bound}))
    if put is not None:
        from dualwrite.stores.sql.postgresql_outbox import ask_and_put  # noqa: PLC0415 - it uses this module

        return ask_and_put(connection, own, bound, texts, put, deferred_of)
    results: list[Any] = []
    try:
        exchange(driver, "; ".join(texts), results, awaits=begun.awaits)
    except BaseException as error:  # noqa: BLE001 - an interruption too, which SQLAlchemy passes on
        if session.is_lost(own, execution, error) and begins and not again:
            return _ask(connection, statement, bound, again=True)
        # The results end with the error: with that of the first text, if the constraints were it.
        deferred_failed = len(results) == 1 and texts[0] == IMMEDIATE
        raise_failed(connection, error, own, bound, deferred_of if deferred_failed else None)
    if execution is not None:
        session.prepared[own.name] = execution
    elif session.is_direct is None and len(results) > 1:
        session.look(results[-2], driver)
    return row_of(results[-1])


def ended_unseen() -> IllegalStateError:
    """The error for a decision in another transaction than the one that was begun, or in none."""
    return ended_inside(
        "by a COMMIT or ROLLBACK sent as text, by another process on its connection, or by a pooler that shares "
        "connections by statement",
        POOLED,
    )


def raise_mapped(connection: Connection, error: BaseException, statement: str, bound: Mapping[str, Any]) -> NoReturn:
    """Raise as SQLAlchemy does: it alone knows its events, and which connections are lost with this one."""
    connection._handle_dbapi_exception(error, statement, dict(bound), None, None)  # noqa: SLF001 - as above


def raise_failed(
    connection: Connection, error: BaseException, own: OwnText, bound: Mapping[str, Any], deferred_of: str | None
) -> NoReturn:
    """Raise the error of our own statement; or, if ``deferred_of`` is given, of what was deferred to COMMIT before it."""
    if deferred_of is None:
        raise_mapped(connection, error, own.template, bound)
    try:
        connection._handle_dbapi_exception(error, IMMEDIATE, None, None, None)  # noqa: SLF001 - as above
    except exc.SQLAlchemyError as mapped:
        raise dialect.deferred_failed(mapped, deferred_of) from mapped


def _ask_by_sqlalchemy(
    connection: Connection,
    statement: CompiledOnce,
    bound: Mapping[str, Any],
    deferred_of: str | None,
    put: Put | None = None,
) -> Sequence[object] | None:
    if deferred_of is not None and _driver(connection).pgconn.transaction_status == IN_TRANSACTION:
        try:
            connection.exec_driver_sql(IMMEDIATE)
        except exc.SQLAlchemyError as error:
            raise dialect.deferred_failed(error, deferred_of) from error
    row = statement.execute(connection, bound)[0]
    if row is not None:
        dialect.put_rows(connection, put)
    return row


class PostgreSQL(Dialect):
    """The adapter for PostgreSQL.

    After ``paused_owner_timeout_s`` without a statement the server ends a dual write's session, so that a paused owner does
    not hold its locks forever. None keeps the server's own setting.
    """

    name = "postgresql"
    shows_statements = True
    quotes_keep_case = True

    def __init__(self, paused_owner_timeout_s: float | None) -> None:
        self._limit_idle, self._idle_ms = _limit_idle(paused_owner_timeout_s), _idle_ms(paused_owner_timeout_s)
        self._warned = False

    def refuse_left_open(self, connection: Connection) -> None:
        if _driver(connection).pgconn.transaction_status in {1, 2, 3}:
            raise IllegalStateError(LEFT_OPEN)

    def begin(self, connection: Connection, tables: Tables) -> None:
        """:meth:`check_start` checks the server's part."""
        del tables
        if _usable_driver(connection).pgconn.transaction_status in {1, 2, 3}:
            raise IllegalStateError(LEFT_OPEN)
        connection.begin()

    def join(self, connection: Connection, tables: Tables) -> bool:
        """:meth:`check_start` refuses a snapshot that is too old."""
        del tables
        return _usable_driver(connection).pgconn.transaction_status != _IDLE

    def begin_own(self, connection: Connection, tables: Tables, *, lock_timeout_s: float, light: bool = False) -> None:
        """All in one statement, light or not."""
        del light
        connection.execution_options(isolation_level="READ COMMITTED")
        self.begin(connection, tables)
        self._check_server(connection, _DURABLE, _set_lock_timeout(lock_timeout_s), self._limit_idle)

    def begin_reading(self, connection: Connection, *, light: bool = False) -> None:
        del light
        if session_of(_driver(connection)).is_primary:
            stand_alone(connection)
            return
        connection.execution_options(isolation_level="READ COMMITTED")
        self._check_server(connection)

    def standing_alone(self, lock_timeout_s: float) -> Callable[[Connection], AbstractContextManager[object]]:
        """A standby refuses any UPDATE."""
        return partial(_limited, limits=f"{_FRESHLY}; SELECT {_set_lock_timeout(lock_timeout_s)}, {_DURABLE}; ")

    def _check_server(self, connection: Connection, *settings: str) -> None:
        refuse(findings.postgresql_version(version_of(connection)))
        facts = (
            "pg_is_in_recovery()",
            "current_setting('fsync')",
            "pg_backend_pid()",
            "current_setting('DateStyle')",
        )
        row: Sequence[object] = connection.execute(select(*map(literal_column, [*facts, *settings]))).one()
        if row[0]:
            refuse(findings.standby(is_standby=True))
        refuse(findings.date_style(str(row[3])))
        driver: Any = _driver(connection)
        session_of(driver).is_primary = row[2] == driver.pgconn.backend_pid
        if not self._warned and (finding := findings.fsync(str(row[1]))).status is Status.WARNING:
            self._warned = True
            logger.warning("%s; %s", finding, finding.remedy)

    def start_columns(self) -> Sequence[ColumnElement[object]]:
        """Whether the transaction is read-only, its isolation, when it began, and its limits; also limits its idle time."""
        return [
            literal_column("current_setting('transaction_read_only')"),
            literal_column("current_setting('transaction_isolation')"),
            _NOW,
            literal_column(self._idle_ms),
            literal_column(_LEFT_MS),
        ]

    def check_start(self, connection: Connection, values: Sequence[object]) -> None:
        read_only, isolation, started, _, _ = values
        begun = begun_on(connection) or begun_of(connection)
        if read_only == "on":
            refuse(findings.read_only("on"))
        if begun.joined_late and isolation not in _FRESH:
            # A claim since the transaction's snapshot would not be seen: the owner could produce while it is settled.
            raise IllegalStateError(
                f"the transaction is {str(isolation).upper()}, and its snapshot is older than the dual write",
                next_step="join the session to the dual write before its first statement: call join(session)",
            )
        begun.started = int(str(started))
        if isinstance(begun.session, Session) and begun.session.is_direct:
            begun.session.is_primary = True  # on a standby every transaction is read-only

    def is_begun(self) -> Sequence[ColumnElement[bool]]:
        """All of it can be said in SQL."""
        return (IS_BEGUN,)

    def begun(self, connection: Connection) -> Mapping[str, object]:
        return {"begun_": (begun_on(connection) or begun_of(connection)).started}

    def require_begun(self, connection: Connection) -> None:
        if not connection.scalar(select(IS_BEGUN), self.begun(connection)):
            raise ended_unseen()

    def end_columns(self) -> Sequence[ColumnElement[object]]:
        """The transaction's name; also makes its COMMIT durable."""
        return [
            literal_column(f"pg_current_xact_id()::text || '@' || {SERVER}"),
            literal_column(_DURABLE),
        ]

    def deciding(
        self,
        update: Update,
        *,
        idle_ms: ColumnElement[int | None] | None = None,
        within_ms: ColumnElement[int | None] | None = None,
    ) -> Update:
        """PostgreSQL 17 and newer also limit COMMIT."""
        if idle_ms is None or within_ms is None:
            return super().deciding(update)
        return update.returning(*self.end_columns(), _set_idle_limit(idle_ms), _set_limit(within_ms))

    def with_commit(
        self,
        update: Update,
        bound: Callable[[Connection, Decision], dict[str, Any]],
        mapped: Callable[[exc.SQLAlchemyError, str], DualWriteError],
    ) -> CommitWithDecision:
        from dualwrite.stores.sql.commit_with_decision import CommitWithDecision  # noqa: PLC0415 - it uses this module

        return CommitWithDecision(self, update, bound, mapped)

    def read_first(self, connection: Connection, statement: CompiledOnce, bound: Mapping[str, Any]) -> Sequence[object]:
        begun = begun_on(connection) or begun_of(connection)
        begun.session = _session(begun.driver)
        begun.session.commit_found_none = False
        asked_at = now_s()
        row = _ask(connection, statement, bound, first=True)
        assert row is not None  # it has no FROM
        *_, idle_ms, left_ms = row
        begun.limits = _Limits(
            None if idle_ms is None else int(str(idle_ms)), None if left_ms is None else int(str(left_ms)), asked_at
        )
        if connection.dialect.driver == ASYNCPG:
            cast("Exchanges", begun.session).in_block = True
        return row

    def ask_last(
        self,
        connection: Connection,
        statement: CompiledOnce,
        bound: Mapping[str, Any],
        *,
        decides: bool,
        deferred_of: str | None = None,
        put: Put | None = None,
    ) -> Sequence[object] | None:
        if decides and put is None:
            limits: _Limits = (begun_on(connection) or begun_of(connection)).limits
            idle_ms, within_ms = limits.lower(bound["idle_ms_"], bound["within_ms_"])
            bound = {**bound, "idle_ms_": idle_ms, "within_ms_": within_ms}
        return _ask(connection, statement, bound, deferred_of=deferred_of, put=put)

    def ask_locked(
        self, connection: Connection, statement: CompiledOnce, bound: Mapping[str, Any], within_s: float
    ) -> Sequence[Any] | None:
        """In one exchange with the limit, and with the one that applied before."""
        keep = f"SELECT set_config('{_KEPT_LIMIT}', current_setting('lock_timeout'), true), "
        limit = keep + _limit("lock_timeout", max(1, int(within_s * 1000)))
        give_back = f"SELECT set_config('lock_timeout', current_setting('{_KEPT_LIMIT}'), true)"
        own, begun = statement.text(connection), begun_on(connection)
        if own is None or begun is None or connection.dialect.driver == ASYNCPG:
            connection.exec_driver_sql(limit)
            row = statement.execute(connection, bound)[0]
            connection.exec_driver_sql(give_back)
            return row
        results: list[Any] = []
        texts = (limit, own.template % literals({**own.constants, **bound}), give_back)
        try:
            exchange(begun.driver, "; ".join(texts), results, awaits=begun.awaits)
        except BaseException as error:  # noqa: BLE001 - an interruption too, which SQLAlchemy passes on
            raise_failed(connection, error, own, bound, None)
        return row_of(results[1])

    def server_mark(self) -> ColumnElement[Any]:
        return literal_column(SERVER)

    def read_waiting(self, connection: Connection, tables: Tables, asked: Asked) -> WaitingMessages:
        """The columns in binary form, each in one piece. The server leaves out what does not fit."""
        driver = connection.connection.dbapi_connection
        if isinstance(driver, AdaptedConnection) or connection.get_execution_options().get("schema_translate_map"):
            return super().read_waiting(connection, tables, asked)
        from dualwrite.stores.sql.postgresql_outbox import read  # noqa: PLC0415 - it uses this module

        return read(connection, tables, asked)

    def delete_waiting(self, connection: Connection, table: Table, numbers: Sequence[int]) -> int:
        """By runs of numbers that follow each other, or one by one: a range would take along what has come late."""
        begun = begun_on(connection)
        if (
            begun is None
            or connection.dialect.driver == ASYNCPG
            or connection.get_execution_options().get("schema_translate_map")
        ):
            return super().delete_waiting(connection, table, numbers)
        from dualwrite.stores.sql.postgresql_outbox import delete  # noqa: PLC0415 - as above

        return delete(connection, begun, table, numbers)

    def restore(self, connection: Connection) -> None:
        """No setting outlives the transaction."""
        if connection.dialect.driver == ASYNCPG and (driver := dialect.driver_of(connection)) is not None:
            _exchanges_of(own_connection(driver)).in_block = False

    def run_deferred(self, connection: Connection) -> None:
        """No ``statement_timeout`` would limit them during COMMIT."""
        connection.exec_driver_sql(IMMEDIATE)

    def commit_found_none(self, driver: DBAPIConnection) -> bool:
        """The server warns, unless the session hides warnings."""
        return _session(own_connection(driver)).commit_found_none

    def bounded(self, connection: Connection, seconds: float | None) -> AbstractContextManager[object]:
        """Shuts the connection when the time is up."""
        begun = begun_on(connection)
        driver = _driver(connection) if begun is None or connection.dialect.driver == ASYNCPG else begun.driver
        if seconds is None or driver.closed:
            return nullcontext()
        # If the answer comes at the last moment, the pool must not keep a shut connection.
        return Watch(WATCHDOG, driver.fileno(), seconds, connection.invalidate)

    def check_end(self, connection: Connection, values: Sequence[object]) -> str | None:
        del connection
        return str(values[0])

    def begins_with(self, name: ColumnElement[str], prefix: str) -> ColumnElement[bool]:
        return name.like(re.sub(r"([\\%_])", r"\\\1", prefix) + "%")

    def identity(self, connection: Connection, tables: Tables) -> Identity:
        """Any role may read it; copies of a server started later."""
        name = name_of(connection, tables.state)
        started, database, table = connection.execute(_IDENTITY, {"name": name}).one()
        return Identity((started, database), table)

    def witness(self, connection: Connection, follower: Follower) -> Witness:
        if connection.dialect.driver == ASYNCPG:
            from dualwrite.stores.sql.asyncpg_driver import AsyncpgWitness  # noqa: PLC0415 - as in _exchanges_of

            return AsyncpgWitness(connection, follower, begun_on(connection))
        return PsycopgWitness(connection, follower, begun_on(connection))

    def insert_if_missing(self, table: Table) -> Insert:
        return postgresql.insert(table).on_conflict_do_nothing().execution_options(preserve_rowcount=True)

    def standing(self, driver: DBAPIConnection) -> Standing:
        return _STANDINGS[_watched(driver).pgconn.transaction_status]

    def certainly_rolled_back(self, driver: DBAPIConnection, error: BaseException) -> bool:
        state = sqlstate_of(getattr(error, "orig", None))
        if state in _CERTAIN:
            return True
        status = _watched(driver).pgconn.transaction_status
        if status == _ACTIVE:
            return False
        if _STANDINGS[status] in {Standing.OPEN, Standing.FAILED}:
            return True  # COMMIT was not sent: an engine listener failed before it
        if state is None or _STANDINGS[status] is not Standing.ENDED:
            return False
        return state[:2] not in _UNCERTAIN_CLASSES and state not in _UNCERTAIN

    def prepared_transactions(self, connection: Connection) -> Sequence[tuple[str, datetime]]:
        return [(name, prepared_at) for name, prepared_at in connection.execute(_PREPARED, {"prefix": PREFIX})]

    def verdict(self, connection: Connection, transaction: str) -> DatabaseVerdict:
        """``pg_xact_status``: exact while the transaction is recent and the server has not restarted."""
        match = _NAME.fullmatch(transaction)
        if match is None:
            raise IllegalStateError(f"{transaction!r} is not the name of a PostgreSQL transaction")
        status = connection.scalar(
            text(f"SELECT CASE WHEN {SERVER} = :server THEN pg_xact_status(CAST(:number AS xid8)) END"),
            {"server": match[2], "number": match[1]},
        )
        return {"committed": DatabaseVerdict.COMMITTED, "aborted": DatabaseVerdict.ABORTED}.get(
            status or "", DatabaseVerdict.UNKNOWN
        )


_UNLOGGED: Final = text("SELECT relpersistence <> 'p' FROM pg_class WHERE oid = to_regclass(:name)")


def refuse_unlogged(connection: Connection, tables: Tables) -> None:
    """Refuse tables for messages that wait which the server would empty after a crash, with what was committed in them."""
    for name in unlogged_tables(connection, tables):
        refuse(findings.unlogged(name))


def unlogged_tables(connection: Connection, tables: Tables) -> Iterator[str]:
    """Those of these tables that the server empties after a crash."""
    for table in (tables.state, tables.outbox, tables.aside, tables.mode):
        name = name_of(connection, table)
        if connection.scalar(_UNLOGGED, {"name": name}):
            yield name
