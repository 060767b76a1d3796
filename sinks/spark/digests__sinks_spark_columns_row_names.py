"""Names a row in errors: by its number in its partition, and by its key if that is known without reading rows again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from dualwrite.sinks.spark.layout import Layout

_MOST_BYTES: Final = 4 * 2**20
_LONGEST: Final = 64


class RowNames:
    """Names the rows of one partition. Takes each batch before it is sent.

    The database reports a bad row only after all rows are sent, and by its number. So the keys are kept, up to a few megabytes.

    Args:
        partition: Number of the partition.
        layout: Which column goes where.
    """

    def __init__(self, partition: int, layout: Layout) -> None:
        self._partition = partition
        self._key = next(iter(_key_columns(layout)), None)
        self._kept: list[pa.Array] = []
        self._bytes = 0
        self._before = 0
        self._batch: pa.RecordBatch | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the next projected batch."""
        if self._batch is not None:
            self._before += self._batch.num_rows
        self._batch = batch
        if self._key is None or self._bytes > _MOST_BYTES:
            return
        keys = batch.column(self._key)
        keys = pa.concat_arrays([keys, keys.slice(0, 0)])  # a copy: a slice would keep Spark's whole batch
        self._kept.append(keys)
        self._bytes += keys.nbytes

    def in_batch(self, index: int) -> str:
        """The name of a row of the last batch, counted from 0."""
        assert self._batch is not None
        key = None if self._key is None else self._batch.column(self._key)[index]
        return row_name(self._partition, self._before + index + 1, () if key is None else (key.as_py(),))

    def of(self, number: int) -> str:
        """The name of a row of the partition, counted from 1."""
        index = number - 1
        for keys in self._kept:
            if index < len(keys):
                return row_name(self._partition, number, (keys[index].as_py(),))
            index -= len(keys)
        return row_name(self._partition, number)


def row_name(partition: int, number: int, key: Sequence[object] = ()) -> str:
    """A row's name, for people.

    Args:
        partition: Number of its partition.
        number: Number of the row, from 1.
        key: The values of its key; empty if they are not known.
    """
    name = f"row {number} of partition {partition}"
    return f"{name}, key {', '.join(map(_shown, key))}" if key else name


def lists_with(lists: pa.Array, is_bad: pa.Array) -> pa.Array:
    """Which lists have an entry that is bad.

    Args:
        lists: The lists.
        is_bad: For each of their entries, as ``flatten`` gives them.
    """
    found = pc.list_parent_indices(lists).filter(is_bad)
    return pc.is_in(pa.array(range(len(lists)), found.type), value_set=found)


def table_key(layout: Layout) -> Sequence[str]:
    """The table's columns that hold the message's key; empty if a part of the key is not in the table."""
    sources = [layout.projected[number].source for number in _key_columns(layout)]
    names = {layout.projected[column.source].source: column.name for column in layout.table_columns}
    return [names[source] for source in sources] if all(source in names for source in sources) else ()


def _key_columns(layout: Layout) -> Sequence[int]:
    key = layout.message.key
    if key is None:
        return ()
    return (key,) if isinstance(key, int) else key.columns


def _shown(value: object) -> str:
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return repr(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")
