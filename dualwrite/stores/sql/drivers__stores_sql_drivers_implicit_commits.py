"""Statements by which MariaDB and MySQL end the transaction in which they are executed: DDL, and COMMIT by any name.

For refusing them before they are sent. What the text does not show (procedures, prepared statements) only the server can tell.
"""

from __future__ import annotations

import re
from typing import Final

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
"""All that may stand before one of them."""
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
