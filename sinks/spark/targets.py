"""Several tables and topics in one batch: what is wanted of each, what is planned, and which row goes where.

A task brings the rows of all its targets into one database transaction and one Kafka transaction, so a decision about tasks
is one about all targets: it knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.batches import Destination
from dualwrite.sinks.spark.digests import row_name
from dualwrite.sinks.spark.sendable import projected_batches, used_columns

if TYPE_CHECKING:
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.options import SinkOptions

_TEXTUAL: Final = (spark.StringType, spark.CharType, spark.VarcharType)


@dataclass(frozen=True)
class Wanted:
    """One target as it is asked for: its settings, those of the sink included, and the rows' schema. `tag` marks its rows."""

    options: SinkOptions
    schema: spark.StructType
    tag: str | None = None


@dataclass(frozen=True)
class Target:
    """One target as it is planned. Pickles, and holds no secret.

    `topic` is None if a column names each message's topic. The last target `is_quarantine` if rows may be put aside: it takes
    those that the others do not, in the table if it is `in_table`, and with a message if it has a topic.
    """

    layout: Layout
    topic: str | None
    topic_column: str | None
    tag: str | None = None
    is_quarantine: bool = False
    in_table: bool = True

    @classmethod
    def of(cls, options: SinkOptions, layout: Layout, tag: str | None = None) -> Target:
        """The target of settings that are planned as `layout`."""
        return cls(layout, options.topic, options.topic_column, tag)

    @property
    def sends(self) -> bool:
        """Whether its rows have messages."""
        return self.topic is not None or not self.is_quarantine

    @property
    def recorded_topic(self) -> str:
        """The topic, or the column that names it, as a :class:`Destination` has it."""
        if self.topic is not None:
            return self.topic
        assert self.topic_column is not None
        return Destination.topics_of_column(self.topic_column)


def require_different(targets: Sequence[Target]) -> None:
    """Refuse a table that is there twice: each decides by its own settings which rows it replaces."""
    seen: set[tuple[str, str]] = set()
    for target in targets:
        if target.in_table and target.layout.table in seen:
            raise ConfigurationError(
                f"table {target.layout.table[1]!r} is the target of two parts of the batch",
                next_step="union their rows into one DataFrame, or give them one tag",
            )
        seen.add(target.layout.table)


def tag_number(schema: spark.StructType, name: str) -> int:
    """The number of the column that marks each row's target. It must be there, and a string."""
    if name not in schema.names:
        raise ConfigurationError(
            f"tag_column (tagColumn) names the column {name!r}, which the DataFrame does not have",
            next_step=f"its columns are {', '.join(schema.names)}",
        )
    kind = schema[name].dataType
    if not isinstance(kind, _TEXTUAL):
        raise ConfigurationError(
            f"tag_column (tagColumn) names the column {name!r} of type {kind.simpleString()}; it must be string",
            next_step="cast it",
        )
    return schema.names.index(name)


def require_all_used(schema: spark.StructType, targets: Sequence[Target], tag_column: str) -> None:
    """Refuse a column that no target takes: its name may be mistyped, and its values would go nowhere."""
    used = used_columns(target.layout for target in targets) | {tag_number(schema, tag_column)}
    unused = [name for number, name in enumerate(schema.names) if number not in used]
    if unused:
        raise ConfigurationError(
            f"no target takes the DataFrame's column {unused[0]!r}: none of the tables has a column of this name",
            next_step="drop it from the DataFrame, rename it, or say with `columns` of a target into which column it goes",
        )


def routed_batches(
    batches: Iterable[pa.RecordBatch], schema: spark.StructType, targets: Sequence[Target], tag: int, partition: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The target of each part of the rows, by its number, and the part as its layout projects it.

    The rows of a target keep their order. A row whose tag is null, or that of no target, is refused by its number.
    """
    targets = [target for target in targets if not target.is_quarantine]
    tags = pa.array([target.tag for target in targets], pa.string())
    before = 0
    for batch in batches:
        column = batch.column(tag)
        numbers = pc.index_in(column.cast(pa.string()), value_set=tags)
        if numbers.null_count:
            index = pc.index(numbers.is_null(), True).as_py()
            row = row_name(partition, before + index + 1)
            raise _unknown_tag(schema.names[tag], column[index].as_py(), row, tags.to_pylist())
        for number, target in enumerate(targets):
            rows = batch.filter(pc.equal(numbers, number))
            for projected in projected_batches([rows] if rows.num_rows else [], schema, target.layout):
                yield number, projected
        before += batch.num_rows


def _unknown_tag(column: str, found: str | None, row: str, known: Sequence[str]) -> ConfigurationError:
    words = "is null" if found is None else f"is {found!r}"
    return ConfigurationError(
        f"the tag column {column!r} {words} ({row}), and the targets are {', '.join(map(repr, known))}",
        next_step="nothing of the batch was written on either side: filter such rows out, or name a target for them",
    )
