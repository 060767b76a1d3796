"""MariaDB 10.6 and newer, and MySQL 8.0.17 and newer, through PyMySQL or mysqlclient; all tables of a dual write in InnoDB.

A statement that fails leaves the transaction open, but a deadlock rolls back all of it, and the next statement silently
begins another one; many statements commit it. So the transaction begins with a savepoint, which only that transaction has: the
decision is not committed by itself (``@@autocommit``), and counts only if the savepoint can be released after it. PyMySQL also
shows the server's own word after each statement; no reading of statements could replace either, as procedures hide them.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, cast

from sqlalchemy import Boolean, ColumnElement, exc, literal_column, select, text
from sqlalchemy.dialects import mysql

from dualwrite.errors import ConfigurationError, IllegalStateError, TransactionAborted
from dualwrite.protocol import database_requirements as requirements
from dualwrite.protocol.findings import Status, Unasked, refuse
from dualwrite.stores.sql import access
from dualwrite.stores.sql.access import (
    LEFT_IN_AUTOCOMMIT,
    LEFT_OPEN,
    WATCHED,
    Meaning,
    at_read_committed,
    driver_words,
    fileno_of,
    meaning_of,
    number_of,
    version_of,
)
from dualwrite.stores.sql.dialect import DECIDES_NOTHING, Dialect, Identity, Standing, driver_of, name_of, put_rows
from dualwrite.stores.sql.drivers import (
    WATCHDOG,
    Watch,
    execute_below,
)
from dualwrite.stores.sql.savepoint_probe import mapped
from dualwrite.stores.sql.tables import OWN_TABLES

if TYPE_CHECKING:
    from sqlalchemy import Connection, Insert, Table, TextClause, Update
    from sqlalchemy.engine.interfaces import DBAPIConnection

    from dualwrite.stores.sql.drivers import CompiledOnce
    from dualwrite.stores.sql.savepoint_probe import Follower, Witness
    from dualwrite.stores.sql.tables import Tables
    from dualwrite.stores.sql.waiting_rows import Put


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

_OTHER_ENGINES: Final = (
    "(SELECT json_objectagg(table_name, engine) FROM information_schema.tables "
    "WHERE table_schema = coalesce(:schema, database()) AND engine <> 'InnoDB')"
)
# MySQL shows it only to roles with a special right, so `read_only` must be enough there.
_REPLICATES: Final = (
    "(SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'Slave_running')"
)
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
        asks_more = tables is not None and not self._checked
        facts, more = _asked(connection, tables if asks_more else None)
        check_facts(facts)
        doublewrite, charset, mode = map(str, facts[len(FACTS) :])
        refuse(requirements.charset(charset))
        if asks_more:
            refuse(*(requirements.other_engine(*found) for found in more.other_engines.items()))
            refuse(requirements.replica(is_replica=more.is_replica))
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


class _Costly(NamedTuple):
    """What is asked once: engines of the library's tables that are not InnoDB's, and whether the server is a replica."""

    other_engines: Mapping[str, str]
    is_replica: bool


def _asked(connection: Connection, tables: Tables | None) -> tuple[Sequence[object], _Costly]:
    """The values of :data:`FACTS` and :data:`_MORE_FACTS`; with the tables, the costly ones, too, in one statement."""
    columns = [*FACTS, *_MORE_FACTS]
    if tables is None:
        return connection.execute(select(*map(literal_column, columns))).one(), _Costly({}, is_replica=False)
    role = _REPLICATES if is_mariadb(connection) else "NULL"
    asked = text(f"SELECT {', '.join([*columns, _OTHER_ENGINES, role])}")
    *facts, engines, replicates = connection.execute(asked, {"schema": tables.schema}).one()
    found = json.loads(engines or "{}")
    return facts, _Costly({name: found[name] for name in found if name in OWN_TABLES}, replicates == "ON")


def facts_of(connection: Connection, tables: Tables) -> requirements.MariadbFacts:
    """What shows of the server, for the rules."""
    facts, more = _asked(connection, tables)
    writes, flush, logs, sync, _, doublewrite, charset, mode = map(str, facts)
    return requirements.MariadbFacts(
        is_mariadb=is_mariadb(connection),
        version=version_of(connection),
        durability=(writes, flush, logs, sync),
        doublewrite=doublewrite,
        charset=charset,
        sql_mode=mode,
        other_engines=more.other_engines,
        is_replica=more.is_replica,
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


_SAVEPOINT: Final = "dualwrite_transaction"
_MARKED: Final = "dualwrite.marked"
_CHANGED: Final = "dualwrite.changed_settings"
_NO_SAVEPOINT: Final = 1305
_FRESH: Final = frozenset({"READ COMMITTED", "READ UNCOMMITTED"})
_IDLE: Final = ("idle_transaction_timeout", "idle_write_transaction_timeout")
_LOCK: Final = "innodb_lock_wait_timeout"

_MARK: Final = "concat_ws(':', @@global.hostname, @@global.port, @@global.server_id)"

_KEEPS_TRANSACTIONS: Final[ColumnElement[bool]] = literal_column("@@session.autocommit = 0", Boolean())

# Errors in answer to COMMIT after which it certainly did not happen: those by which InnoDB rolls back, a refused COMMIT on a
# server that has become read-only, and a failed certification in a cluster (Galera, Group Replication).
_CERTAIN: Final = frozenset({1020, 1205, 1213, 1290, 1614, 1836, 3101})
_IDENTITY: Final = text(
    "SELECT @@global.hostname, @@global.port, @@global.datadir, @@global.server_id, coalesce(:schema, database()), "
    "(SELECT count(*) FROM information_schema.tables WHERE table_schema = coalesce(:schema, database()) "
    "AND table_name = :name)"
)


def _driver(connection: Connection) -> DBAPIConnection:
    driver = connection.connection.dbapi_connection
    assert driver is not None
    return driver


def _usable_driver(connection: Connection) -> DBAPIConnection:
    """The driver's connection, which commits by COMMIT alone."""
    driver = _driver(connection)
    if cast("Any", driver).get_autocommit():
        raise ConfigurationError(
            LEFT_IN_AUTOCOMMIT,
            next_step="use an engine without isolation_level='AUTOCOMMIT' and without autocommit=True",
        )
    return driver


def _in_transaction(connection: Connection) -> bool:
    """Whether a transaction has changed something, as far as the driver or MariaDB tells (mysqlclient and MySQL do not)."""
    status = status_of(_driver(connection))
    if status is not None:
        return bool(status & IN_TRANSACTION)
    return is_mariadb(connection) and _is_open_on_server(connection)


def _has_begun(connection: Connection) -> bool:
    """Whether the connection's transaction has a snapshot, or may have one: MySQL does not tell."""
    return _in_transaction(connection) or not is_mariadb(connection) or _is_open_on_server(connection)


def _is_open_on_server(connection: Connection) -> bool:
    # Past SQLAlchemy, which would begin a transaction of its own.
    with closing(_driver(connection).cursor()) as cursor:
        cursor.execute("SELECT @@in_transaction")
        found = cursor.fetchone()
    return bool(found and found[0])


_FORMER: Final = "{former}"


def _at_most(seconds: int) -> str:
    """The session's own limit if it is lower (0 means no limit)."""
    # MySQL makes the type of IF() one that the variable does not take.
    return f"CAST(IF({_FORMER} BETWEEN 1 AND {seconds}, {_FORMER}, {seconds}) AS UNSIGNED)"


def _idle_limits(connection: Connection, seconds: float | None) -> dict[str, str]:
    return {} if seconds is None or not is_mariadb(connection) else idle_limits(seconds)


def idle_limits(seconds: float) -> dict[str, str]:
    """The settings by which MariaDB ends a session that sends no statement for so long inside a transaction."""
    limit = max(1, int(seconds))  # whole seconds; 0 would be no limit
    return dict.fromkeys(_IDLE, _at_most(limit))


class MariaDB(Dialect):
    """The adapter for MariaDB and MySQL.

    After ``paused_owner_timeout_s`` without a statement MariaDB ends a dual write's session, so that a paused owner does not
    hold its locks forever. None keeps the session's own setting. MySQL has no such limit.
    """

    name = "mariadb"
    shows_statements = True
    quotes_keep_case = False

    def __init__(self, paused_owner_timeout_s: float | None) -> None:
        self._idle_s = paused_owner_timeout_s
        self._server = Server()

    def refuse_left_open(self, connection: Connection) -> None:
        if _in_transaction(connection):
            raise IllegalStateError(LEFT_OPEN)

    def begin(self, connection: Connection, tables: Tables) -> None:
        """:meth:`check_start` checks the server's part."""
        del tables
        driver = _usable_driver(connection)
        self.refuse_left_open(connection)
        connection.begin()
        queries = queries_of(driver)
        # PyMySQL does not see what a SELECT has begun: whatever it was, its snapshot is too old. A session of our own has begun
        # nothing since its COMMIT, and each of its transactions changes something, which begins it for the server, too.
        if queries.kept is None or not queries.commit_was_last:
            execute_below(connection, "START TRANSACTION")
        self._mark(connection, driver)

    def join(self, connection: Connection, tables: Tables) -> bool:
        """Refuses a snapshot that is too old."""
        del tables
        driver = _usable_driver(connection)
        late = _has_begun(connection)
        if late and (isolation := connection.get_isolation_level()) not in _FRESH:
            # A claim since the transaction's snapshot would not be seen: the owner could produce while it is settled.
            raise IllegalStateError(
                f"the transaction is {isolation}, and its snapshot is older than the dual write",
                next_step="join the session to the dual write before its first statement: call join(session); or use an "
                "engine with isolation_level='READ COMMITTED'",
            )
        if not late:
            execute_below(connection, "START TRANSACTION")
        self._mark(connection, driver, joined_late=late)
        return late

    def _mark(self, connection: Connection, driver: DBAPIConnection, *, joined_late: bool = False) -> None:
        queries = queries_of(driver)
        queries.begin()
        if not _decides_nothing(connection):
            execute_below(connection, f"SAVEPOINT {_SAVEPOINT}")
            connection.info[_MARKED] = True
        # A statement before the dual write may have opened a savepoint past SQLAlchemy.
        queries.doubtful = joined_late
        queries.watch()
        limits = _idle_limits(connection, self._idle_s)
        if queries.kept and _LOCK in queries.kept:
            limits[_LOCK] = _FORMER
        _change(connection, limits)

    def begin_own(self, connection: Connection, tables: Tables, *, lock_timeout_s: float, light: bool = False) -> None:
        at_read_committed(connection)
        queries = queries_of(_usable_driver(connection))
        queries.begin()
        connection.begin()
        limits = {}
        if not light:
            self._server.check(connection, tables)
            limits[_LOCK] = str(max(1, int(lock_timeout_s)))
        if queries.kept is None or _IDLE[0] not in queries.kept:  # that of a decision, which is lower, is enough
            limits.update(_idle_limits(connection, self._idle_s))
        _change(connection, limits)

    def own_checks(self) -> Sequence[ColumnElement[object]]:
        return self.start_columns()

    def check_own(self, values: Sequence[object]) -> None:
        check_facts(values)

    def begin_reading(self, connection: Connection, *, light: bool = False) -> None:
        at_read_committed(connection)
        if not light:
            self._server.check(connection)

    def start_columns(self) -> Sequence[ColumnElement[object]]:
        return [literal_column(fact) for fact in FACTS]

    def check_start(self, connection: Connection, values: Sequence[object]) -> None:
        check_facts(values)
        queries_of(_driver(connection)).timeout_rolls_back = rolls_back_on_timeout(values)

    def is_begun(self) -> Sequence[ColumnElement[bool]]:
        """:meth:`check_end` knows the rest."""
        return (_KEEPS_TRANSACTIONS,)

    def require_begun(self, connection: Connection) -> None:
        queries_of(_driver(connection)).require_not_rolled_back()
        if not connection.scalar(select(_KEEPS_TRANSACTIONS)):
            raise ended_inside()
        self._release(connection)

    def deciding(
        self,
        update: Update,
        *,
        idle_ms: ColumnElement[int | None] | None = None,
        within_ms: ColumnElement[int | None] | None = None,
    ) -> Update:
        """The statement itself: MySQL's UPDATE returns nothing."""
        del idle_ms, within_ms
        return update

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
        """Nothing is deferred; COMMIT has no limit."""
        del deferred_of
        if _decides_nothing(connection):
            raise IllegalStateError("this transaction was begun to be handed over undecided")
        if not decides:
            return statement.execute(connection, bound)[0]
        if statement.execute(connection, bound)[1] != 1:
            return None
        if put is not None:
            _require_room(connection, put)
            put_rows(connection, put)
            return ()
        idle_ms = bound["idle_ms_"]
        _change(connection, _idle_limits(connection, None if idle_ms is None else idle_ms / 1000))
        return ()

    def ask_locked(
        self, connection: Connection, statement: CompiledOnce, bound: Mapping[str, Any], within_s: float
    ) -> Sequence[Any] | None:
        """Waits at most so many whole seconds, here and until the transaction ends."""
        _change(connection, {_LOCK: _at_most(max(1, int(within_s)))})
        return statement.execute(connection, bound)[0]

    def server_mark(self) -> ColumnElement[Any]:
        return literal_column(_MARK)

    def delete_waiting(self, connection: Connection, table: Table, numbers: Sequence[int]) -> int:
        """Number by number: a look through the table, which the server prefers, would wait for what others are putting."""
        name = name_of(connection, table)
        given = ",".join(map(str, map(int, numbers)))
        return execute_below(
            connection,
            f"DELETE waits FROM JSON_TABLE('[{given}]', '$[*]' COLUMNS (seq BIGINT PATH '$')) AS taken "
            f"STRAIGHT_JOIN {name} AS waits ON waits.seq = taken.seq",
        )[1]

    def bounded(self, connection: Connection, seconds: float | None) -> AbstractContextManager[object]:
        """Shuts the connection when the time is up."""
        if seconds is None:
            return nullcontext()
        driver = _driver(connection)
        # If the answer comes at the last moment, the pool must not keep a shut connection.
        return Watch(WATCHDOG, fileno_of(driver), seconds, connection.invalidate)

    def check_end(self, connection: Connection, values: Sequence[object]) -> str | None:
        """There is no name: the row itself shows the outcome."""
        del values
        queries_of(_driver(connection)).require_not_rolled_back()
        self._release(connection)
        return None

    def _release(self, connection: Connection) -> None:
        if not connection.info.pop(_MARKED, False):
            return  # the transaction's first decision has released it
        try:
            execute_below(connection, f"RELEASE SAVEPOINT {_SAVEPOINT}")
        except exc.DBAPIError as error:
            if number_of(error.orig) != _NO_SAVEPOINT:
                raise
            queries_of(_driver(connection)).ended = True
            raise ended_inside() from error

    def restore(self, connection: Connection) -> None:
        """Discard a connection whose transaction was ended inside the dual write, or that is in another one already.

        The cause (autocommit, ``completion_type``, locks) is in the session, and would affect its next user.
        """
        driver = driver_of(connection)
        if driver is None:
            return
        queries, status = queries_of(driver), status_of(driver) or 0
        spoilt = queries.ended or status & IN_TRANSACTION or cast("Any", driver).get_autocommit()
        queries.begin()
        changed = connection.info.pop(_CHANGED, None)
        if spoilt:
            logger.warning("discarding a connection: a statement has ended the transaction of a dual write, or will")
            connection.invalidate()
            return
        if not changed:
            return
        committed = queries.commit_was_last
        try:
            with closing(driver.cursor()) as cursor:
                cursor.execute("SET " + ", ".join(f"SESSION {name} = @dualwrite_{name}" for name in sorted(changed)))
            queries.commit_was_last = committed
        except Exception as error:  # noqa: BLE001 - the outcome stands; the pool must not keep this connection
            logger.warning(
                "discarding a connection whose session limits could not be restored: %s", driver_words(error)
            )
            connection.invalidate()

    def require_not_rolled_back(self, connection: Connection) -> None:
        """The watch over the driver refuses its statements."""
        driver = driver_of(connection)
        if driver is not None:
            queries_of(driver).require_not_rolled_back()

    def begins_with(self, name: ColumnElement[str], prefix: str) -> ColumnElement[bool]:
        return name.like(re.sub(r"([/%_])", r"/\1", prefix) + "%", escape="/")  # not \, which a mode switches off

    def identity(self, connection: Connection, tables: Tables) -> Identity:
        """A transaction may span all schemas of a server."""
        bound = {"schema": tables.schema, "name": tables.state.name}
        *server, schema, found = connection.execute(_IDENTITY, bound).one()
        return Identity(tuple(server), schema if found else None)

    def witness(self, connection: Connection, follower: Follower) -> Witness:
        return QueryWitness(connection, follower)

    def insert_if_missing(self, table: Table) -> Insert:
        """IGNORE shortens values: callers check names."""
        return mysql.insert(table).prefix_with("IGNORE").execution_options(preserve_rowcount=True)

    def standing(self, driver: DBAPIConnection) -> Standing:
        if not cast("Any", driver).open:
            return Standing.BROKEN
        queries = queries_of(driver)
        if queries.rolled_back is not None:
            return Standing.FAILED
        status = status_of(driver)
        is_open = not queries.ended and (status is None or status & IN_TRANSACTION)
        return Standing.OPEN if is_open else Standing.ENDED

    def certainly_rolled_back(self, driver: DBAPIConnection, error: BaseException) -> bool:
        return number_of(getattr(error, "orig", None)) in _CERTAIN or not queries_of(driver).commit_sent


_SURELY_FIT: Final = 400_000
_BESIDE: Final = 4096
"""More than an INSERT takes in addition to the bytes of a message."""


def _require_room(connection: Connection, put: Put) -> None:
    """Refuse a message that does not fit into a packet: the server would end the connection, as if that were lost."""
    sizes = [sum(len(part) for part in row[2:5] if part) for row in put.rows]
    largest = max(sizes, default=0)
    if largest <= _SURELY_FIT:
        return
    most = int(connection.exec_driver_sql("SELECT @@session.max_allowed_packet").scalar() or 0)
    if 2 * largest + _BESIDE > most:  # PyMySQL sends bytes as hexadecimal digits
        raise TransactionAborted(
            f"a message of {largest} bytes for topic {put.rows[sizes.index(largest)].topic!r} cannot wait in the database: "
            f"the server's max_allowed_packet is {most}, and each byte may take two",
            transactional_id=put.transactional_id,
            next_step="raise max_allowed_packet on the server",
        )


def _decides_nothing(connection: Connection) -> bool:
    return DECIDES_NOTHING.keys() <= connection.get_execution_options().keys()


def _change(connection: Connection, settings: Mapping[str, str]) -> None:
    """Change settings of the session, keeping what they were, for :meth:`MariaDB.restore`.

    Only those that are not so already: a session of our own keeps them from transaction to transaction.
    """
    kept = queries_of(_driver(connection)).kept
    changed: dict[str, str] = connection.info.setdefault(_CHANGED, {}) if kept is None else kept
    new = {name: to for name, to in settings.items() if changed.get(name) != to}
    if new:
        execute_below(connection, f"SET {changing(new, changed)}")
        changed.update(new)


def changing(settings: Mapping[str, str], changed: Collection[str] = ()) -> str:
    """What follows SET in the statement that changes the settings, of which those of ``changed`` are kept already."""
    parts = [f"@dualwrite_{name} = @@session.{name}" for name in settings if name not in changed]
    for name, to in settings.items():
        former = f"@dualwrite_{name}" if name in changed else f"@@session.{name}"
        parts.append(f"SESSION {name} = {to.replace(_FORMER, former)}")
    return ", ".join(parts)


# Notices every statement that a connection of PyMySQL or mysqlclient executes, also past SQLAlchemy.
#
# Both drivers send every statement of a cursor through `Connection.query`, and COMMIT through `Connection.commit`.

ROLLED_BACK: Final = frozenset(
    {
        1213,  # a deadlock
        1020,  # a row changed after the snapshot (MariaDB's innodb_snapshot_isolation)
    }
)
"""Errors with which the server has rolled back the whole transaction: the next statement begins another one."""
LOCK_WAIT_TIMEOUT: Final = 1205
IN_TRANSACTION: Final = 1
_NO_TABLE: Final = 1146


class _Driver(Protocol):
    def query(self, *arguments: object, **options: object) -> object: ...

    def commit(self) -> object: ...

    def cursor(self) -> Any: ...


class Queries:
    """Watches one driver's connection for as long as it lives. Made by :func:`queries_of`.

    Attributes:
        doubtful: Whether a statement may have set or rolled back to a savepoint unseen.
        ended: Whether the server has shown that the dual write's transaction was ended. Nothing more is sent then: it would be
            committed by itself, or with the next transaction.
        timeout_rolls_back: Whether a lock wait that times out rolls back the whole transaction (innodb_rollback_on_timeout).
        rolled_back: The error with which the server rolled back the whole transaction; None if it did not.
        commit_sent: Whether COMMIT may have been sent in this transaction.
        commit_was_last: Whether the server has committed, and nothing was sent since, except for :meth:`MariaDB.restore`.
        kept: The limits that a session of our own was given by name, and keeps; None if they are restored after each
            transaction, as the session's next user may be another.
    """

    def __init__(self, driver: _Driver) -> None:
        self.follower: Follower | None = None
        self.has_table = False
        self.timeout_rolls_back = self.commit_was_last = False
        self.kept: dict[str, str] | None = None
        self.begin()
        self._driver = driver
        self._query = driver.query
        self._commit = driver.commit
        vars(driver).update(query=self._noticing, commit=self._committing)

    def begin(self) -> None:
        self.doubtful = False
        self.ended = False
        self.rolled_back: BaseException | None = None
        self.commit_sent = False
        self._watches = self._was_open = False

    def nothing_is_open(self) -> None:
        """Note that the session is outside a transaction, as after COMMIT: it was just set up, or has executed DDL."""
        self.commit_was_last = True

    def watch(self) -> None:
        """Notice from the server's status when the transaction is ended, until :meth:`begin` or COMMIT. PyMySQL tells it."""
        self._watches = True

    def _noticing(self, *arguments: object, **options: object) -> object:
        self.commit_was_last = False
        if self.ended:
            raise ended_inside()
        text = _statement_in(arguments)
        if self._watches:
            self.require_not_rolled_back()
            if text is not None:
                _refuse(text)
        moves = text is not None and self._moves(text)
        try:
            result = self._query(*arguments, **options)
        except BaseException as error:
            number = number_of(error)
            if number in ROLLED_BACK or (number == LOCK_WAIT_TIMEOUT and self.timeout_rolls_back):
                self.rolled_back = error
            if moves and self.follower is not None:
                self.follower.failed(cast("str", text), error)
            raise
        if moves and self.follower is not None:
            self.follower.after(without_comments(cast("str", text)), many=False)
        if self._watches and (status := status_of(self._driver)) is not None:
            # MySQL, which has none before the first statement on a table, does not show it at once.
            is_open = bool(status & IN_TRANSACTION)
            if self._was_open and not is_open:
                self.ended, self._watches = True, False
                raise ended_inside()
            self._was_open = is_open
        return result

    def _moves(self, text: str) -> bool:
        """Whether savepoints can be followed in it. Its text holds values, so words in the middle say nothing for certain."""
        if may_hide_savepoints(text):
            self.doubtful = True
            return False
        return moves_savepoints(text)

    def require_not_rolled_back(self) -> None:
        """Refuse to continue once the server has rolled back all: the next statement would begin another transaction."""
        if (lost := self.rolled_back) is not None:
            raise TransactionAborted(
                f"the database has rolled back the whole transaction: {access.driver_words(lost)}",
                next_step="run the same work again: not even a savepoint is left to go back to",
            ) from lost

    def _committing(self) -> object:
        self.commit_sent = True
        self._watches = self.commit_was_last = False
        answer = self._commit()
        self.commit_was_last = True
        return answer


def _refuse(statement: str) -> None:
    """Refuse a statement whose text shows that it ends the transaction. The server would tell it too late: rows would stay."""
    if (words := ddl_in(statement)) is not None:
        raise IllegalStateError(
            f"{words} would have committed the rows of the dual write without its messages: it was not sent",
            next_step="run DDL before or after the block; CREATE TEMPORARY TABLE is allowed in it",
        )
    if (words := end_in(statement)) is not None:
        raise IllegalStateError(
            f"{words} was sent as text inside the block", next_step="leave COMMIT and ROLLBACK to the dual write"
        )


def _statement_in(arguments: Sequence[object]) -> str | None:
    text = arguments[0] if arguments else None
    return (
        text
        if isinstance(text, str)
        else text.decode("utf-8", "replace")
        if isinstance(text, (bytes, bytearray))
        else None
    )


def status_of(driver: object) -> int | None:
    """The server's status after its last answer without rows; None if the driver does not tell (mysqlclient)."""
    status = getattr(driver, "server_status", None)
    return status if isinstance(status, int) else None


def ended_inside() -> IllegalStateError:
    """The error for a dual write whose transaction was ended inside it."""
    return access.ended_inside(
        "by a COMMIT or ROLLBACK sent as text or in a procedure, or by a statement that commits (DDL)",
        "leave COMMIT and ROLLBACK to the dual write, and run DDL outside of it",
    )


def queries_of(driver: DBAPIConnection) -> Queries:
    """The watch over that connection, which begins with the first call."""
    found: Queries | None = vars(driver).get(WATCHED)
    if found is None:
        found = vars(driver)[WATCHED] = Queries(cast("_Driver", driver))
    return found


_MAKE_WITNESS: Final = (
    "CREATE TEMPORARY TABLE IF NOT EXISTS dualwrite_witness (id INT PRIMARY KEY, number BIGINT NOT NULL) ENGINE=InnoDB"
)
_BEGIN_WITNESS: Final = "REPLACE INTO dualwrite_witness VALUES (1, {number})"
_RENEW_WITNESS: Final = "UPDATE dualwrite_witness SET number = {number} WHERE id = 1 AND number = {known}"
_SHOW_WITNESS: Final = "SELECT 1 FROM dualwrite_witness WHERE id = 1 AND number = {number}"


class QueryWitness:
    """The witness is a row of a temporary table, which commits nothing when it is made. A procedure may hide savepoints."""

    shown_all = False

    def __init__(self, connection: Connection, follower: Follower) -> None:
        driver = connection.connection.dbapi_connection
        assert driver is not None
        self._driver = cast("_Driver", driver)
        self._queries = queries_of(driver)
        self._queries.follower = follower
        # A rollback may bring back the row of an earlier transaction: no two of them use the same numbers.
        self._first = secrets.randbits(40) << 20

    @property
    def doubtful(self) -> bool:
        return self._queries.doubtful

    @doubtful.setter
    def doubtful(self, doubtful: bool) -> None:
        self._queries.doubtful = doubtful

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        with mapped(connection):
            if not known:
                self._store(number)
                self._queries.doubtful = False
                return True
            kept = self._changes(_RENEW_WITNESS.format(number=self._first + number, known=self._first + known))
        self._queries.doubtful = False
        return kept

    def shows(self, connection: Connection, number: int) -> bool:
        with mapped(connection):
            return self._changes(_SHOW_WITNESS.format(number=self._first + number))

    def _store(self, number: int) -> None:
        if not self._queries.has_table:
            self._run(_MAKE_WITNESS)
            self._queries.has_table = True
        self._run(_BEGIN_WITNESS.format(number=self._first + number))

    def _changes(self, statement: str) -> bool:
        try:
            return self._run(statement) == 1
        except Exception as error:
            if number_of(error) == _NO_TABLE:
                return False
            raise

    def _run(self, statement: str) -> int:
        follower, self._queries.follower = self._queries.follower, None  # its own savepoints are the caller's to follow
        try:
            with closing(self._driver.cursor()) as cursor:
                cursor.execute(statement)
                return int(cursor.rowcount)
        finally:
            self._queries.follower = follower

    def execute(
        self, connection: Connection, statements: Sequence[str], number: int | None, *, later: bool = False
    ) -> None:
        del later
        with mapped(connection):
            for statement in statements:
                self._run(statement)
            if number is not None:
                self._store(number)
        self._queries.doubtful = False

    def settle(self, connection: Connection) -> None:
        del connection

    def stop(self) -> None:
        self._queries.follower = None


# Statements by which MariaDB and MySQL end the transaction in which they are executed: DDL, and COMMIT by any name.
#
# For refusing them before they are sent. What the text does not show (procedures, prepared statements) only the server
# can tell.

_COMMENT: Final = re.compile(r"\s+|#[^\n]*(?:\n|$)|--(?=\s|$)[^\n]*(?:\n|$)|/\*(?!M?!).*?\*/|/\*M?!\d*", re.DOTALL)
"""All that may stand before a statement. The server executes what stands in ``/*! ... */`` and ``/*M! ... */``."""
_DDL: Final = re.compile(
    r"""
      alter | (?:create|drop)(?!\s+(?:or\s+replace\s+)?temporary\s+table\b) | rename | truncate
    | grant | revoke | set\s+(?:password|default\s+role) | (?:un)?install | backup
    | (?:analyze|check|optimize|repair)\s+(?:no_write_to_binlog\s+|local\s+)?tables?
    | (?:un)?lock\s+tables? | cache\s+index | load\s+index | flush | reset | change | start\s+(?:slave|replica|all|group) | stop
    """,
    re.VERBOSE | re.IGNORECASE,
)
_END: Final = re.compile(
    r"""
      commit | begin(?!\s+not\b) | start\s+transaction | rollback(?!\s+(?:work\s+)?to\b)
    | set\s+(?:[^;]*,\s*)?(?:session\s+|local\s+|@@(?:session\.|local\.)?)?autocommit\s*:?=(?!\s*(?:0|off|false)\b)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_AROUND: Final = re.compile(
    r"(?:set\s+statement|execute\s+immediate|begin\s+not|if|case|for|while|repeat|loop)\b", re.IGNORECASE
)
"""Statements that contain others."""
_CONTAINED: Final = re.compile(r"(?:;|\b(?:atomic|then|else|do|repeat|loop|for|immediate)\b)[\s'\"]*", re.IGNORECASE)
_SAVEPOINTS: Final = re.compile(r"(?:savepoint|release|rollback)\b", re.IGNORECASE)
_SAVEPOINT_WORDS: Final = re.compile(r"savepoint|release|rollback", re.IGNORECASE)
_UNREADABLE: Final = re.compile(r"call\b|execute\b|begin\b", re.IGNORECASE)


def _beginning(statement: str, at: int = 0) -> int:
    while (match := _COMMENT.match(statement, at)) is not None and match.end() > at:
        at = match.end()
    return at


def _words(pattern: re.Pattern[str], statement: str) -> str | None:
    first = _beginning(statement)
    places = [first]
    if _AROUND.match(statement, first):
        places += [_beginning(statement, found.end()) for found in _CONTAINED.finditer(statement, first)]
    for at in places:
        match = pattern.match(statement, at)
        if match is None:
            continue
        if match.group().endswith("="):
            return "SET AUTOCOMMIT"
        if not statement[match.end() : match.end() + 1].isidentifier():
            return " ".join(match.group().upper().split())
    return None


def ddl_in(statement: str) -> str | None:
    """The words with which a statement begins that commits the open transaction, such as ``ALTER``; None for others."""
    return _words(_DDL, statement)


def end_in(statement: str) -> str | None:
    """The words with which a statement begins that ends the transaction by itself, such as ``COMMIT``; None for others."""
    return _words(_END, statement)


def without_comments(statement: str) -> str:
    """The statement from its first word on."""
    return statement[_beginning(statement) :]


def moves_savepoints(statement: str) -> bool:
    """Whether it is a statement about savepoints."""
    return _SAVEPOINTS.match(statement, _beginning(statement)) is not None


def may_hide_savepoints(statement: str) -> bool:
    """Whether a statement may set or roll back to savepoints that its beginning does not show: it contains others."""
    at = _beginning(statement)
    if _UNREADABLE.match(statement, at) is not None or "#" in statement[:at] or "!" in statement[:at]:
        return True
    contains = ";" in statement or _AROUND.match(statement, at) is not None
    return contains and _SAVEPOINT_WORDS.search(statement, at) is not None
