"""Rows that meet others of the same key: which of them count, and by what statements a table takes them. Without I/O.

Rows wait in one staging table for each partition, beside two columns of ours: the number that orders the rows of a key, and
whether the row deletes. Statements then bring the newest row of each key into the target, deletes first: an inserted row may
need a unique value that a deleted one has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    from dualwrite.sinks.spark.layout import Layout

ORDER: Final = "dualwrite_order"
DELETED: Final = "dualwrite_deleted"
_PART: Final = "dualwrite_part"
_PLACE: Final = "dualwrite_place"
_RANK: Final = "dualwrite_rank"
# In the place of a null: databases do not agree on where nulls sort.
LEAST: Final = -(2**63)


@dataclass(frozen=True)
class Merge:
    """How the rows of a batch meet those of the same key, in the batch and in the table. Pickles.

    `keys` and `updated` are columns of the table. If no column is `updated`, a row whose key is present does nothing. With
    `newer_by`, a row counts only if it is greater there than the present one.

    `order` and `op` are positions among the projected columns: of the number that orders the rows of a key, and of the
    operation, one of the texts `upserts` or `deletes`. Without an order, no key may occur twice in a batch.
    """

    keys: tuple[str, ...]
    updated: tuple[str, ...]
    newer_by: str | None = None
    order: int | None = None
    op: int | None = None
    upserts: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    tombstones: bool = True

    @property
    def counts_rows(self) -> bool:
        """Whether each row that is sent must change the table, unless a newer one of its key is in the batch."""
        return bool(self.updated) and self.newer_by is None


def deleted_rows(layout: Layout, batch: pa.RecordBatch, name_row: Callable[[int], str]) -> pa.Array | None:
    """Which rows of a projected batch delete; None if rows have no operation. Refuses an unknown operation, and a null key.

    `name_row` names a row, counted from 0, for the error.
    """
    for words, is_bad, advice in impossible_changes(layout, batch):
        if (index := pc.index(is_bad, True).as_py()) >= 0:
            raise ConfigurationError(
                f"{words(index)} ({name_row(index)})",
                next_step=f"nothing of the partition was written on either side: {advice}",
            )
    return deletes_of(layout, batch)


def deletes_of(layout: Layout, batch: pa.RecordBatch) -> pa.Array | None:
    """Which rows of a projected batch delete, by their operations; None if they have none."""
    merge = layout.merge
    if merge is None or merge.op is None:
        return None
    return pc.is_in(batch.column(merge.op), value_set=pa.array(merge.deletes, pa.string()))


def impossible_changes(layout: Layout, batch: pa.RecordBatch) -> Iterator[tuple[Callable[[int], str], pa.Array, str]]:
    """What rows of change data cannot have: words for a row by its number, which rows have it, and the cure."""
    merge = layout.merge
    if merge is None or merge.order is None:
        return
    for column in layout.table_columns:
        if column.name in merge.keys:
            words = f"column {column.name!r} of upsert_keys is null"
            yield _always(words), batch.column(column.source).is_null(), "fill it, or filter such rows out"
    if merge.op is None:
        return
    found = batch.column(merge.op)
    known = pc.is_in(found, value_set=pa.array((*merge.upserts, *merge.deletes), pa.string()))
    every = ", ".join((*merge.upserts, *merge.deletes))
    yield (
        lambda index: f"the operation of a row is {_shown(found[index].as_py())}, and op_values knows {every}",
        pc.invert(known),
        "map it in op_values (opValues), or filter such rows out; Debezium's tombstones have no operation",
    )


def _always(words: str) -> Callable[[int], str]:
    return lambda _: words


def _shown(value: object) -> str:
    return "null" if value is None else repr(value)


def staged_arrays(layout: Layout, batch: pa.RecordBatch, deleted: pa.Array | None) -> list[pa.Array]:
    """The values of the layout's `staged_columns`. A row that deletes keeps those of its key, and how new it is."""
    arrays = [batch.column(column.source) for column in layout.table_columns]
    merge = layout.merge
    if merge is None:
        return arrays
    if deleted is not None:
        # What a deleted row was like matters to nobody, and a null may stand where the table takes none.
        kept = {*merge.keys, merge.newer_by}
        arrays = [
            array if column.name in kept else pc.if_else(deleted, pa.scalar(None, array.type), array)
            for column, array in zip(layout.table_columns, arrays, strict=True)
        ]
    if merge.order is not None:
        arrays.append(pc.fill_null(batch.column(merge.order), LEAST))
    return arrays if deleted is None else [*arrays, deleted]


class MergeStatements:
    """The statements that bring the rows of staging tables into one target; names are columns, tables come as SQL.

    `place` orders the rows of one staging table as they were sent; of equal rows the last counts, and of equal rows in two
    partitions that of the later one. Two forms: PostgreSQL's, with ``ON CONFLICT``; and MariaDB's, whose ``ON DUPLICATE KEY``
    would heed every unique key of the table.
    """

    def __init__(
        self,
        merge: Merge | None,
        columns: Sequence[str],
        target: str,
        staged: Sequence[str],
        *,
        quote: Callable[[str], str],
        place: str,
    ) -> None:
        self._merge = merge or Merge((), ())  # without one, rows can be counted
        self._columns = columns
        self._target = target
        self._staged = staged
        self._quote = quote
        self._place = place

    def counts(self) -> str:
        """The number of rows in each staging table, beside the table's number."""
        return " UNION ALL ".join(f"SELECT {n} AS part, count(*) FROM {table}" for n, table in enumerate(self._staged))

    def key_twice(self) -> str:
        """A key that occurs twice in the batch."""
        keys = self._listed(self._merge.keys)
        complete = " AND ".join(f"{self._quote(name)} IS NOT NULL" for name in self._merge.keys)
        every = " UNION ALL ".join(f"SELECT {keys} FROM {table} WHERE {complete}" for table in self._staged)
        return f"SELECT {keys} FROM ({every}) AS every_key GROUP BY {keys} HAVING count(*) > 1 LIMIT 1"

    def newest(self) -> str:
        """The rows that count: of each key the one with the greatest order."""
        columns = self._listed(self._columns)
        if self._merge.order is None:
            return " UNION ALL ".join(f"SELECT {columns} FROM {table}" for table in self._staged)
        if self._merge.op is not None:
            columns += f", {self._quote(DELETED)}"
        every = " UNION ALL ".join(
            f"SELECT {columns}, {self._quote(ORDER)}, {n} AS {_PART}, {self._place} AS {_PLACE} FROM {table}"
            for n, table in enumerate(self._staged)
        )
        rank = (
            f"row_number() OVER (PARTITION BY {self._listed(self._merge.keys)} "
            f"ORDER BY {self._quote(ORDER)} DESC, {_PART} DESC, {_PLACE} DESC) AS {_RANK}"
        )
        return f"SELECT {columns} FROM (SELECT every_row.*, {rank} FROM ({every}) AS every_row) AS ranked WHERE {_RANK} = 1"

    def newest_count(self) -> str:
        """The number of rows that count and do not delete."""
        return f"SELECT count(*) FROM ({self.newest()}) AS newest{self._where(self._live())}"

    def insert_or_update(self, overriding: str = "") -> str:
        """PostgreSQL's: insert the rows that count, or update those that are present."""
        merge, columns = self._merge, self._listed(self._columns)
        rows = f"SELECT {columns} FROM ({self.newest()}) AS newest{self._where(self._live())}"
        statement = f"INSERT INTO {self._target} AS present ({columns}) {overriding}{rows}"
        statement += f" ON CONFLICT ({self._listed(merge.keys)}) DO "
        if not merge.updated:
            return f"{statement}NOTHING"
        # Assigns the keys, too, so that every row counts as written even if there is no other column.
        values = ", ".join(f"{self._quote(name)} = excluded.{self._quote(name)}" for name in merge.updated)
        return f"{statement}UPDATE SET {values}{self._where(self._is_newer('excluded'))}"

    def delete_using(self) -> str:
        """PostgreSQL's: delete the present rows whose newest row deletes."""
        conditions = self._all(f"newest.{self._quote(DELETED)}", self._same(), self._is_newer("newest"))
        return f"DELETE FROM {self._target} AS present USING ({self.newest()}) AS newest WHERE {conditions}"

    def delete_joined(self) -> str:
        """MariaDB's form of :meth:`delete_using`."""
        conditions = self._all(f"newest.{self._quote(DELETED)}", self._is_newer("newest"))
        return f"DELETE present FROM {self._joined()} WHERE {conditions}"

    def lock_present(self) -> str:
        """MariaDB's: lock the present rows that :meth:`update_joined` updates, or that are newer, and count them."""
        return f"SELECT count(*) FROM {self._joined()}{self._where(self._live('newest.'))} FOR UPDATE"

    def update_joined(self) -> str:
        """MariaDB's: give the present rows the values of those that count."""
        values = ", ".join(f"present.{self._quote(name)} = newest.{self._quote(name)}" for name in self._merge.updated)
        conditions = self._all(self._live("newest."), self._is_newer("newest"))
        return f"UPDATE {self._joined()} SET {values}{self._where(conditions)}"

    def insert_missing(self) -> str:
        """MariaDB's: insert the rows that count and whose key is not present."""
        missing = f"NOT EXISTS (SELECT 1 FROM {self._target} AS present WHERE {self._same()})"
        columns = ", ".join(f"newest.{self._quote(name)}" for name in self._columns)
        return (
            f"INSERT INTO {self._target} ({self._listed(self._columns)}) SELECT {columns} "
            f"FROM ({self.newest()}) AS newest WHERE {self._all(self._live('newest.'), missing)}"
        )

    def _joined(self) -> str:
        # In this order: a scan of the target would wait for rows that other tasks have locked.
        return f"({self.newest()}) AS newest STRAIGHT_JOIN {self._target} AS present ON {self._same()}"

    def _same(self) -> str:
        return " AND ".join(f"present.{self._quote(name)} = newest.{self._quote(name)}" for name in self._merge.keys)

    def _live(self, of: str = "") -> str:
        return "" if self._merge.op is None else f"NOT {of}{self._quote(DELETED)}"

    def _is_newer(self, row: str) -> str:
        if self._merge.newer_by is None:
            return ""
        name = self._quote(self._merge.newer_by)
        return f"(present.{name} IS NULL OR {row}.{name} > present.{name})"

    def _listed(self, names: Sequence[str]) -> str:
        return ", ".join(map(self._quote, names))

    @staticmethod
    def _all(*conditions: str) -> str:
        return " AND ".join(filter(None, conditions))

    @staticmethod
    def _where(condition: str) -> str:
        return f" WHERE {condition}" if condition else ""
