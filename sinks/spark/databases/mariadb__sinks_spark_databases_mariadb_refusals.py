"""Errors of statements that write users' rows, on MariaDB and MySQL."""

from __future__ import annotations

import re
from typing import Final

from pymysql.err import MySQLError
from sqlalchemy import exc

from dualwrite.errors import TransactionAborted
from dualwrite.stores.sql.access__stores_sql_access_failures import Meaning, driver_words, meaning_of

_PASSING: Final = frozenset({Meaning.CONFLICT, Meaning.BUSY, Meaning.GONE, Meaning.FULL})
"""The same rows may be taken later."""
_OTHER_CAUSE: Final = _PASSING | {Meaning.READ_ONLY, Meaning.LOGIN, Meaning.PRIVILEGE, Meaning.SCHEMA}
_VALUE: Final = re.compile(r"(value: ?)'.*'(?= for column)", re.DOTALL)


def wrapped(error: MySQLError) -> exc.DBAPIError:
    """The driver's error as SQLAlchemy's, without the statement: it holds rows."""
    found = exc.DBAPIError.instance(None, None, error, MySQLError)
    return found if isinstance(found, exc.DBAPIError) else exc.DBAPIError(None, None, error)


def is_about_rows(error: exc.DBAPIError) -> bool:
    """Whether the database refuses just these rows."""
    return meaning_of(error) not in _OTHER_CAUSE


def refused(what: str, error: exc.DBAPIError, row: str | None = None) -> TransactionAborted:
    """The error for rows that a table refuses; it says whether a retry with the same rows may succeed.

    Args:
        what: First words of the message: what failed.
        error: The database's error.
        row: The name of the row, if it is known.
    """
    place = f" ({row})" if row is not None else ""
    words = _VALUE.sub(r"\1...", driver_words(error))  # no log may show values that are not a key
    return TransactionAborted(f"{what}: {words}{place}", retryable=meaning_of(error) in _PASSING)
