"""Arrow columns as the literals of an INSERT, computed column by column; and values that a column would change, refused.

The literals suit a session whose character set is utf8mb4, whose time zone is UTC, and whose SQL mode is that of
:data:`dualwrite.sinks.spark.databases.mariadb__sinks_spark_databases_mariadb_database.SESSION`: backslashes escape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualwrite.sinks.spark.databases.database import require_kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from dualwrite.sinks.spark.layout import Copied

NULL_REPLACED: Final = " NOT NULL"
"""Ends the shown type of a column in which the server replaces NULL by a value of its own."""

_TYPE: Final = re.compile(r"(\w+)(?:\((.*)\))?")
_MEMBER: Final = re.compile(r"'((?:[^']|'')*)'")
_MOST_DIGITS: Final = 6
_FIRST: Final = {pa.date32(): -719162, pa.timestamp("us"): -62135596800000000}
_AFTER: Final = {pa.date32(): 2932897, pa.timestamp("us"): 253402300800000000}
"""The years 1 to 9999, in days and in microseconds since 1970."""


def literal_rows(columns: Sequence[Copied], arrays: Sequence[pa.Array], name_row: Callable[[int], str]) -> list[str]:
    """Each row's literals, with commas between.

    Args:
        columns: The table's columns.
        arrays: Their values.
        name_row: Names a row, counted from 0, for errors.

    Raises:
        ConfigurationError: A column would change a value, or has no place for it.
    """
    texts = [_literals(column, array, name_row) for column, array in zip(columns, arrays, strict=True)]
    rows: list[str] = pc.binary_join_element_wise(*texts, ",").to_pylist()
    return rows


def _literals(column: Copied, array: pa.Array, name_row: Callable[[int], str]) -> pa.Array:
    require_kept(column, _changes(column, array), name_row)
    return pc.fill_null(_as_text(array), "NULL")


def _as_text(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_boolean(kind):
        return array.cast(pa.int8()).cast(pa.string())
    if pa.types.is_integer(kind):
        return array.cast(pa.string())
    if pa.types.is_binary(kind):
        found = [None if value is None else f"X'{value.hex()}'" for value in array.to_pylist()]
        return pa.array(found, pa.string())
    if pa.types.is_timestamp(kind):
        array = array.cast(pa.timestamp("us"))  # without its zone, in UTC
    texts = array.cast(pa.string())
    if pa.types.is_string(kind):
        texts = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), "'", "\\'")
    return pc.binary_join_element_wise("'", texts, "'", "")


def _changes(column: Copied, array: pa.Array) -> list[tuple[str, pa.Array]]:
    """Values that the server would change without an error, even in strict mode: words for each kind, and the rows."""
    found = []
    kind, given = _parsed(column.shown_type)
    if column.shown_type.endswith(NULL_REPLACED):
        found.append(("NULL, which the server would replace", array.is_null()))
    if pa.types.is_floating(array.type):
        found.append(("it is not a finite number", pc.invert(pc.is_finite(array))))
    if kind in {"date", "datetime", "timestamp"}:
        plain = pa.date32() if kind == "date" else pa.timestamp("us")
        since = array.cast(plain).cast(pa.int32() if kind == "date" else pa.int64())
        outside = pc.or_(pc.less(since, _FIRST[plain]), pc.greater_equal(since, _AFTER[plain]))
        found.append(("its year is not one of 1 to 9999", outside))
    if kind in {"datetime", "timestamp", "time"} and (digits := int(given or 0)) < _MOST_DIGITS:
        micros = array.cast(pa.int64()).fill_null(0).to_numpy()
        found.append(
            (f"it has more than {digits} digits of a second", pa.array(micros % 10 ** (_MOST_DIGITS - digits) != 0))
        )
    if kind == "binary":
        found.append((f"it is not {given} bytes long", pc.not_equal(pc.binary_length(array), int(given or 1))))
    if kind == "char":
        found.append(("it ends with a space", pc.ends_with(array, pattern=" ")))
    if kind == "enum":
        members = pa.array([one.replace("''", "'") for one in _MEMBER.findall(given)], pa.string())
        found.append(
            ("the column does not list it", pc.and_(array.is_valid(), pc.invert(pc.is_in(array, value_set=members))))
        )
    return [(words, pc.fill_null(bad, False)) for words, bad in found]


def _parsed(shown_type: str) -> tuple[str, str]:
    """The name of a type, and what stands in its parentheses."""
    match = _TYPE.match(shown_type)
    return (match[1], match[2] or "") if match else ("", "")


def statements(rows: Sequence[str], most_bytes: int) -> list[tuple[int, int]]:
    """Divide rows into INSERTs of a bounded size: the first row of each, and the one after its last.

    Args:
        rows: The rows' literals.
        most_bytes: The most that the literals of one INSERT may take, unless it has one row only.
    """
    ends = np.cumsum([len(row.encode()) + 3 for row in rows])  # with parentheses and a comma
    found, start, sent = [], 0, 0
    while start < len(rows):
        end = max(start + 1, int(np.searchsorted(ends, sent + most_bytes, side="right")))
        found.append((start, end))
        start, sent = end, int(ends[end - 1])
    return found
