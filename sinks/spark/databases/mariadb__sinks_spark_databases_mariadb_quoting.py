"""Names and texts in the SQL of MariaDB and MySQL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from sqlalchemy import Connection, CursorResult

_ONE: Final = r"(?:`((?:[^`]|``)+)`|([\w$]+))"
_NAME: Final = re.compile(rf"(?:{_ONE}\.)?{_ONE}")


def quoted(name: str) -> str:
    """A name in backticks."""
    return "`" + name.replace("`", "``") + "`"


def table_name(table: tuple[str, str]) -> str:
    """A table's schema and name."""
    return ".".join(map(quoted, table))


def listed(names: Sequence[str], of: str = "") -> str:
    """Names of columns, with commas between.

    Args:
        names: The names.
        of: The alias of their table.
    """
    return ", ".join(f"{of}.{quoted(name)}" if of else quoted(name) for name in names)


def text_literal(text: str) -> str:
    """A text as a literal, where backslashes escape."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def parsed_name(name: str) -> tuple[str | None, str] | None:
    """Schema and name from a table's name, written as in SQL; None if it is none."""
    match = _NAME.fullmatch(name.strip())
    if match is None:
        return None
    schema, table = (
        plain if in_ticks is None else in_ticks.replace("``", "`")
        for in_ticks, plain in ((match[1], match[2]), (match[3], match[4]))
    )
    return schema, cast("str", table)


def execute(connection: Connection, statement: str) -> CursorResult[tuple[object, ...]]:
    """Execute a statement that has no parameters."""
    return connection.exec_driver_sql(statement.replace("%", "%%"))
