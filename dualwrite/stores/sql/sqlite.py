"""SQLite through the standard library's driver, or aiosqlite over it: a file on a local disk.

All three of the driver's ways of transaction control work: the legacy one, SQLAlchemy's recipe with a ``begin`` event,
and ``autocommit=False`` (Python 3.12). Every transaction begins with the write lock (``BEGIN IMMEDIATE``): a deferred
one might read an old row and fail at its first write.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import exc, literal_column, update
from sqlalchemy.dialects import sqlite

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.stores.sql.access import LEFT_IN_AUTOCOMMIT, LEFT_OPEN, ended_inside
from dualwrite.stores.sql.dialect import Dialect, Identity, Standing, put_rows
from dualwrite.stores.sql.drivers import ask, execute_below, is_awaited, own_connection
from dualwrite.stores.sql.savepoint_probe import mapped

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Insert, Table
    from sqlalchemy.engine.interfaces import DBAPIConnection

    from dualwrite.stores.sql.drivers import CompiledOnce
    from dualwrite.stores.sql.savepoint_probe import Follower, Witness
    from dualwrite.stores.sql.tables import Tables
    from dualwrite.stores.sql.waiting_rows import Put

_OLDEST: Final = (3, 35, 0)  # RETURNING
_FULL: Final = 2
_SAVEPOINT: Final = "dualwrite_transaction"
_FILES_CHECKED: Final = "dualwrite.files_checked"
_CERTAIN: Final = ("database is locked", "database or disk is full")


def _driver(connection: Connection) -> sqlite3.Connection:
    return cast("sqlite3.Connection", connection.connection.dbapi_connection)


def _in_transaction(driver: DBAPIConnection | sqlite3.Connection) -> bool:
    return bool(cast("sqlite3.Connection", own_connection(driver)).in_transaction)


def _autocommit(driver: sqlite3.Connection) -> object:
    """The driver's ``autocommit`` attribute (Python 3.12): True, False, or a number for the legacy mode."""
    return getattr(driver, "autocommit", None)


class SQLite(Dialect):
    """The adapter for SQLite. It commits one transaction at a time, however many connections there are."""

    name = "sqlite"
    shows_statements = False
    quotes_keep_case = False

    def refuse_left_open(self, connection: Connection) -> None:
        """With ``autocommit=False`` the connection is always in a transaction."""
        driver = _driver(connection)
        if _in_transaction(driver) and ask(driver, _autocommit) is not False:
            raise IllegalStateError(LEFT_OPEN)

    def begin(self, connection: Connection, tables: Tables) -> None:
        """Waits for the write lock up to the driver's ``timeout``."""
        driver = _driver(connection)
        if ask(driver, _autocommit) is True:
            raise _in_autocommit()
        self.refuse_left_open(connection)
        self._check_settings(connection, tables)
        connection.begin()
        self._take_write_lock(connection, tables)

    def join(self, connection: Connection, tables: Tables) -> bool:
        """Refuse to join inside a savepoint.

        The driver's legacy mode sends no BEGIN before SAVEPOINT, and SQLite commits when such a savepoint is released.
        """
        if connection.in_nested_transaction():
            raise IllegalStateError(
                "on SQLite, a dual write cannot be joined inside a savepoint",
                next_step="call join(session), or produce, before begin_nested()",
            )
        driver = _driver(connection)
        if ask(driver, _autocommit) is True:
            raise _in_autocommit()
        self._check_settings(connection, tables)
        self._take_write_lock(connection, tables)
        return False

    def _take_write_lock(self, connection: Connection, tables: Tables) -> None:
        driver = _driver(connection)
        if _in_transaction(driver):
            # The driver or a listener has begun it, perhaps without the write lock.
            self._lock_by_write(connection, tables)
        elif driver.isolation_level is None:
            raise _in_autocommit()
        else:
            execute_below(connection, "BEGIN IMMEDIATE")
        execute_below(connection, f"SAVEPOINT {_SAVEPOINT}")

    def _check_settings(self, connection: Connection, tables: Tables) -> None:
        _check_settings(connection, _driver(connection), tables)

    def _lock_by_write(self, connection: Connection, tables: Tables) -> None:
        """Any write takes it, even one that changes no row."""
        state = tables.state
        connection.execute(update(state).where(literal_column("0")).values(incarnation=state.c.incarnation))

    def begin_own(self, connection: Connection, tables: Tables, *, lock_timeout_s: float, light: bool = False) -> None:
        """The driver's own ``timeout`` limits the wait."""
        del lock_timeout_s, light
        self.begin(connection, tables)

    def begin_reading(self, connection: Connection, *, light: bool = False) -> None:
        del light
        connection.begin()

    def is_begun(self) -> Sequence[ColumnElement[bool]]:
        """Nothing that SQL can express: :meth:`begun` checks it right before, in the one process that uses the connection."""
        return ()

    def begun(self, connection: Connection) -> Mapping[str, object]:
        self.require_begun(connection)
        return {}

    def require_begun(self, connection: Connection) -> None:
        """Only the transaction that was begun has the savepoint."""
        try:
            execute_below(connection, f"RELEASE {_SAVEPOINT}")
        except exc.OperationalError as error:
            if "no such savepoint" not in str(error.orig):
                raise
            raise ended_inside(
                "by a COMMIT or ROLLBACK sent as text or by executescript()",
                "leave COMMIT and ROLLBACK to the dual write",
            ) from error
        execute_below(connection, f"SAVEPOINT {_SAVEPOINT}")

    def check_end(self, connection: Connection, values: Sequence[object]) -> str | None:
        """Nothing: :meth:`begun` has checked. There is no name: the row itself shows the outcome."""
        del connection, values
        return None

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
        """Nothing is deferred: see :meth:`run_deferred`."""
        del decides, deferred_of
        row = statement.execute(connection, bound)[0]
        if row is not None:
            put_rows(connection, put)
        return row

    @contextmanager
    def bounded(self, connection: Connection, seconds: float | None) -> Generator[None, None, None]:
        """Limits waits for other users, not for the disk."""
        if seconds is None:
            yield
            return
        driver = _driver(connection)
        present_ms = int(_rows(driver, "PRAGMA busy_timeout")[0][0])
        _rows(driver, f"PRAGMA busy_timeout = {min(present_ms, int(seconds * 1000))}")
        try:
            yield
        finally:
            with suppress(sqlite3.ProgrammingError, sqlite3.OperationalError):  # closed meanwhile
                _rows(driver, f"PRAGMA busy_timeout = {present_ms}")

    def begins_with(self, name: ColumnElement[str], prefix: str) -> ColumnElement[bool]:
        """Not LIKE, which ignores case in SQLite."""
        return name.bool_op("GLOB")(re.sub(r"([*?\[])", r"[\1]", prefix) + "*")

    def identity(self, connection: Connection, tables: Tables) -> Identity:
        """Independent of the name or link that opened the file."""
        schema = tables.schema or "main"
        file = _files(_driver(connection)).get(schema)
        try:
            found = Path(file).stat() if file else None
        except OSError:
            found = None
        return Identity((found.st_dev, found.st_ino) if found else (file,), schema if file else None)

    def witness(self, connection: Connection, follower: Follower) -> Witness:
        del follower
        return SqliteWitness(connection)

    def insert_if_missing(self, table: Table) -> Insert:
        return sqlite.insert(table).on_conflict_do_nothing().execution_options(preserve_rowcount=True)

    def standing(self, driver: DBAPIConnection) -> Standing:
        try:
            return Standing.OPEN if _in_transaction(driver) else Standing.ENDED
        except (sqlite3.ProgrammingError, ValueError):  # closed
            return Standing.BROKEN

    def certainly_rolled_back(self, driver: DBAPIConnection, error: BaseException) -> bool:
        """A lock or constraint failure of COMMIT leaves the transaction open."""
        if is_awaited(driver) and not isinstance(error, Exception):
            return False  # the driver's thread continues the COMMIT that its task no longer awaits
        if self.standing(driver) is Standing.OPEN:
            return True
        orig = getattr(error, "orig", None)
        return isinstance(orig, sqlite3.IntegrityError) or str(orig).startswith(_CERTAIN)


def _check_settings(connection: Connection, driver: sqlite3.Connection, tables: Tables) -> None:
    if _pragma(driver, "query_only"):
        raise ConfigurationError("the connection is set to read-only", next_step="switch PRAGMA query_only off")
    names = connection.info.get(_FILES_CHECKED)
    if names is None:
        connection.info[_FILES_CHECKED] = names = _check_files(driver, tables)
    for name in names:
        _make_durable(driver, name)


def _make_durable(driver: sqlite3.Connection, name: str) -> None:
    """Raise ``synchronous`` to FULL: below that, a power failure may lose a commit."""
    if _pragma(driver, "synchronous", name) < _FULL and not _in_transaction(driver):
        _rows(driver, f"PRAGMA {_quoted(name)}.synchronous = FULL")
    if _pragma(driver, "synchronous", name) < _FULL:
        raise ConfigurationError(
            f"SQLite's synchronous is below FULL for {name!r}: committed data may be lost when the machine crashes",
            next_step="execute PRAGMA synchronous=FULL when the engine connects",
        )


def _check_files(driver: sqlite3.Connection, tables: Tables) -> list[str]:
    """Check that the attached databases keep decisions durably, and return their names."""
    if sqlite3.sqlite_version_info < _OLDEST:
        raise ConfigurationError(f"SQLite {sqlite3.sqlite_version} is too old", next_step="use SQLite 3.35 or newer")
    files = _files(driver)
    if not files.get(tables.schema or "main"):
        raise ConfigurationError(
            f"SQLite's database {tables.schema or 'main'!r} is not attached, or is in memory: its decisions die with "
            "the process",
            next_step="use a file, for example sqlite:////var/lib/app/app.db",
        )
    kept = [name for name, file in files.items() if file]
    for name in kept:
        journal = str(_rows(driver, f"PRAGMA {_quoted(name)}.journal_mode")[0][0])
        if journal in {"off", "memory"}:
            raise ConfigurationError(
                f"SQLite's journal_mode is {journal!r} for {name!r}: a crash in a commit would leave half of it",
                next_step="use journal_mode DELETE, TRUNCATE, PERSIST or WAL",
            )
        if journal == "wal" and len(kept) > 1:
            raise ConfigurationError(
                f"SQLite commits to several attached files one by one in WAL mode ({', '.join(kept)})",
                next_step="keep all tables of a dual write in one file, or use journal_mode DELETE",
            )
    return kept


def _files(driver: sqlite3.Connection) -> dict[str, str]:
    return {str(name): str(file) for _, name, file in _rows(driver, "PRAGMA database_list") if name != "temp"}


def _pragma(driver: sqlite3.Connection, pragma: str, name: str = "main") -> int:
    return int(_rows(driver, f"PRAGMA {_quoted(name)}.{pragma}")[0][0])


def _rows(driver: sqlite3.Connection, statement: str) -> list[tuple[Any, ...]]:
    """Through a cursor: an adapted connection of aiosqlite has no other way in all versions of SQLAlchemy."""
    with closing(driver.cursor()) as cursor:
        cursor.execute(statement)
        return cursor.fetchall()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _in_autocommit() -> ConfigurationError:
    return ConfigurationError(
        LEFT_IN_AUTOCOMMIT,
        next_step="use an engine without isolation_level='AUTOCOMMIT' and without autocommit=True",
    )


# Which savepoints still exist: see :mod:`dualwrite.stores.sql.savepoint_probe`.

_MAKE_WITNESS: Final = "CREATE TEMPORARY TABLE IF NOT EXISTS dualwrite_witness (id INTEGER PRIMARY KEY, number INTEGER)"
_BEGIN_WITNESS: Final = "INSERT OR REPLACE INTO temp.dualwrite_witness VALUES (1, ?)"
_RENEW_WITNESS: Final = "UPDATE temp.dualwrite_witness SET number = ? WHERE id = 1 AND number = ?"
_FIND_WITNESS: Final = "SELECT 1 FROM temp.dualwrite_witness WHERE id = 1 AND number = ?"


class SqliteWitness:
    """The witness is a row of a temporary table. The driver does not reveal its statements, so each message renews it.

    That costs microseconds: the database is in this process.
    """

    shown_all = False

    def __init__(self, connection: Connection) -> None:
        self.doubtful = True
        # A rollback may bring back the row of an earlier transaction: no two of them use the same numbers.
        self._first = secrets.randbits(40) << 20
        self._cursor = cast("sqlite3.Connection", connection.connection.dbapi_connection).cursor()

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        del connection
        if not known:
            self._cursor.execute(_MAKE_WITNESS)
            self._cursor.execute(_BEGIN_WITNESS, (self._first + number,))
            return True
        try:
            self._cursor.execute(_RENEW_WITNESS, (self._first + number, self._first + known))
        except sqlite3.OperationalError:  # the rollback also removed the table
            return False
        return self._cursor.rowcount == 1

    def shows(self, connection: Connection, number: int) -> bool:
        del connection
        try:
            self._cursor.execute(_FIND_WITNESS, (self._first + number,))
            return self._cursor.fetchone() is not None
        except sqlite3.OperationalError:
            return False

    def settle(self, connection: Connection) -> None:
        del connection

    def execute(
        self, connection: Connection, statements: Sequence[str], number: int | None, *, later: bool = False
    ) -> None:
        del later
        with mapped(connection):
            for statement in statements:
                self._cursor.execute(statement)
            if number is not None:
                self._cursor.execute(_MAKE_WITNESS)
                self._cursor.execute(_BEGIN_WITNESS, (self._first + number,))

    def stop(self) -> None:
        # An interrupted statement has closed the connection; ValueError is aiosqlite's.
        with suppress(sqlite3.ProgrammingError, ValueError):
            self._cursor.close()
