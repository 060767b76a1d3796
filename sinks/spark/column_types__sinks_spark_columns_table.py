"""The target table, as the database's catalog describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualwrite.sinks.spark.column_types import TypeRow, Wire


@dataclass(frozen=True)
class TableColumn:
    """One column of the table.

    Attributes:
        name: Its name, as the catalog has it.
        type_name: The internal name of its type in its database; for a domain, of the base type.
        shown_type: Its type as people write it.
        is_enum: Whether the type is an enumeration.
        scale: The digits after the point that a ``numeric`` column, or an array of them, keeps; None if it keeps all.
        longest: The characters that a ``varchar`` or ``char`` column of PostgreSQL keeps; None if it keeps all.
        element_type: The internal name of an array's element type.
        must_be_given: Whether a row without a value for it is refused.
        generated: Whether the database computes it.
    """

    name: str
    type_name: str
    shown_type: str
    is_enum: bool = False
    scale: int | None = None
    longest: int | None = None
    element_type: str | None = None
    must_be_given: bool = False
    generated: bool = False


@dataclass(frozen=True)
class Table:
    """A table: its exact names, and its columns by name.

    Attributes:
        schema: The schema that it is in.
        name: Its name.
        columns: Its columns.
        takes: By :attr:`TableColumn.type_name`, how values of a Spark type travel into columns of its database.
    """

    schema: str
    name: str
    columns: Mapping[str, TableColumn]
    takes: Callable[[TypeRow], Mapping[str, Wire]] = attrgetter("postgresql")
