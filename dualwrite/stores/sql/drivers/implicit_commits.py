"""Statements by which MariaDB and MySQL end the transaction in which they are executed: DDL, and COMMIT by any name."""

from __future__ import annotations

import re
from typing import Final

_COMMENT: Final = re.compile(r"\s+|#[^\n]*(?:\n|$)|--(?=\s|$)[^\n]*(?:\n|$)|/\*(?!M?!).*?\*/|/\*M?!\d*", re.DOTALL)
"""All that may stand before a statement. The server executes what stands in ``/*! ... */`` and ``/*M! ... */``."""
_DDL: Final = re.compile(
    r"""
      alter | (?:create|drop)(?!\s+(?:or\s+replace\s+)?temporary\s+table\b) | rename | truncate
    | grant | revoke | set\s+password | (?:un)?install
    | (?:analyze|check|optimize|repair)\s+(?:no_write_to_binlog\s+|local\s+)?tables?
    | (?:un)?lock\s+tables? | cache\s+index | load\s+index | flush | reset | change | start\s+(?:slave|replica|all|group) | stop
    """,
    re.VERBOSE | re.IGNORECASE,
)
_END: Final = re.compile(
    r"""
      commit | begin(?!\s+not\b) | start\s+transaction | rollback(?!\s+(?:work\s+)?to\b)
    | set\s+(?:session\s+|local\s+|@@(?:session\.|local\.)?)?autocommit\s*:?=(?!\s*(?:0|off|false)\b)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_UNREADABLE: Final = re.compile(r"call\b|execute\b|begin\b", re.IGNORECASE)


def _beginning(statement: str) -> int:
    at = 0
    while (match := _COMMENT.match(statement, at)) is not None and match.end() > at:
        at = match.end()
    return at


def _words(pattern: re.Pattern[str], statement: str) -> str | None:
    match = pattern.match(statement, _beginning(statement))
    if match is None or statement[match.end() : match.end() + 1].isidentifier():
        return None
    return " ".join(match.group().upper().rstrip(":=").split())


def ddl_in(statement: str) -> str | None:
    """The words with which a statement begins that commits the open transaction, such as ``ALTER``; None for others."""
    return _words(_DDL, statement)


def end_in(statement: str) -> str | None:
    """The words with which a statement begins that ends the transaction by itself, such as ``COMMIT``; None for others."""
    return _words(_END, statement)


def ends_transaction(statement: str) -> bool:
    """Whether a statement ends the open transaction, by itself or by being DDL."""
    return ddl_in(statement) is not None or end_in(statement) is not None


def may_hide_savepoints(statement: str) -> bool:
    """Whether a statement may set or roll back to savepoints that nobody sees in its text."""
    at = _beginning(statement)
    return _UNREADABLE.match(statement, at) is not None or "#" in statement[:at] or "!" in statement[:at]
