"""Maps database errors to ours: the class says what the caller must do, the text names the command or the GRANT.

Maps only errors of the library's own statements; errors of the user's statements are left to the user. No message holds
a password: addresses appear without password and query, and only the first line of the driver's message is shown.
"""

from __future__ import annotations

import shlex
import sqlite3
from enum import Enum
from typing import TYPE_CHECKING, Final

from sqlalchemy import exc, make_url

from dualwrite.errors import ConfigurationError, DualWriteError, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.stores.sql.access__stores_sql_access_grants import grants_to_work

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine


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
    **dict.fromkeys((1045, 1049, 1130, 1698, 2005, 2061), Meaning.LOGIN),
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
    """A retryable error to replace one of the user's statement, which ended a dual write that aborted on both sides.

    Returns:
        The error for a deadlock, a serialization failure, or a busy SQLite lock, even if the statement ran on the
        driver's own connection, or through Django; None for everything else: the user's error stays.
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
    """The error for a dual write whose database transaction was ended inside it. Nothing was decided.

    Args:
        by: What ends one.
        next_step: The advice.
    """
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
    return f"as the role that owns the tables, which {role} need not be: {migrate_command(owner, schema)}"


def map_database_error(
    error: exc.SQLAlchemyError,
    engine: Engine | None = None,
    schema: str | None = None,
    *,
    transactional_id: str | None = None,
) -> DualWriteError:
    """The error to raise, ``from error``, for a database error of one of our own statements.

    Not for errors of COMMIT: :func:`dualwrite.stores.sql.dialect__stores_sql_dialects_committing.commit` handles those.

    Args:
        error: SQLAlchemy's error.
        engine: The engine that raised it, to name the exact command.
        schema: The schema of the library's tables.
        transactional_id: The id that the statement concerned.

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
        return ConfigurationError(what, transactional_id=transactional_id, next_step=_ADVICE[meaning])
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
    if isinstance(error, exc.ResourceClosedError):
        return IllegalStateError("the connection is closed", transactional_id=transactional_id)
    return Unavailable(what, transactional_id=transactional_id)


_POOL_STEP: Final = (
    "raise the engine's pool_size or max_overflow: each dual write holds one connection, and needs another one for a moment "
    "when it settles; or find the code that keeps connections"
)

_ADVICE: Final = {
    Meaning.READ_ONLY: "connect to the primary, with a role and a file that may be written to",
    Meaning.LOGIN: "check the database's address, user and password",
    Meaning.POOLER: "a transaction needs one connection to its end: use pool_mode=transaction or session (PgBouncer)",
    Meaning.REJECTED: "the tables or the values do not fit this version of the library: check them",
}
