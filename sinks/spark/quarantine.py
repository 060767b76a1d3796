"""Rows that the table does not take: found before anything of them is sent, and put aside with the reason, in the same batch.

A row is put aside for what it is, never for what other rows are: its types, lengths, nulls and CHECK constraints, which the
database itself is asked about. A duplicate key or a missing row of another table fails the partition, or the batch, as ever:
whether there is one may change until the rows are decided, and a run that is repeated would put aside what it wrote before.

The rows that are put aside are one more target of the batch, behind all others: decided with them, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark

from dualwrite.errors import ConfigurationError, TransactionAborted
from dualwrite.sinks.spark.column_types import Table, TableColumn
from dualwrite.sinks.spark.layout import plan_layout
from dualwrite.sinks.spark.merging import deletes_of, impossible_changes
from dualwrite.sinks.spark.options import SinkOptions
from dualwrite.sinks.spark.sendable import projected_batches
from dualwrite.sinks.spark.targets import Target

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dualwrite.sinks.spark.databases.database import SinkDatabase
    from dualwrite.sinks.spark.layout import Layout

_REASON: Final = "reason"
_ROW: Final = "row"
_MESSAGE: Final = "dualwrite_message"
_SCHEMA: Final = (
    spark.StructType()
    .add(_REASON, spark.StringType())
    .add(_ROW, spark.StringType())
    .add("sink", spark.StringType())
    .add("batch_id", spark.StringType())
    .add("table_name", spark.StringType())
    .add("partition_id", spark.IntegerType())
    .add("row_number", spark.LongType())
    .add(_MESSAGE, spark.StringType())
)
_ARROW: Final = pa.schema(
    [
        (field.name, {"partition_id": pa.int32(), "row_number": pa.int64()}.get(field.name, pa.string()))
        for field in _SCHEMA
    ]
)
_NO_TABLE: Final = Table("", "", {name: TableColumn(name, "text", "text") for name in (_REASON, _ROW)})


def quarantine_target(connection: Connection, options: SinkOptions, database: SinkDatabase) -> Target | None:
    """Where rows go that a table does not take; None if they fail their partition. Refuses a table that cannot take them."""
    if not options.quarantines:
        return None
    table = _NO_TABLE
    if options.quarantine_table is not None:
        table = database.read_table(connection, options.quarantine_table)
        for name in (_REASON, _ROW):
            if name not in table.columns:
                raise ConfigurationError(
                    f"quarantine_table: table {table.name!r} has no column {name!r}",
                    next_step=f"it needs the text columns {_REASON} and {_ROW}; it may have "
                    f"{', '.join(_SCHEMA.names[2:-1])}, and others with defaults",
                )
    asked = SinkOptions(
        sink=options.sink,
        kafka={},
        url=options.url,
        table=table.name,
        topic=_MESSAGE,
        value=_MESSAGE,
        value_format="raw",
    )
    try:
        layout = plan_layout(_SCHEMA, asked, table, shared=True)
    except ConfigurationError as error:
        raise ConfigurationError(f"quarantine_table: {error.what}", next_step=error.next_step) from error
    return Target(
        layout, options.quarantine_topic, None, is_quarantine=True, in_table=options.quarantine_table is not None
    )


def require_checkable(database: SinkDatabase, targets: Iterable[Target]) -> None:
    """Refuse before a task runs what a task would refuse when it asks the database about rows."""
    for target in targets:
        if not target.is_quarantine:
            database.wrong_rows(target.layout, pa.RecordBatch.from_pylist([], target.layout.arrow_schema), most=0)


class Sieve:
    """Puts aside the rows of one task that their tables do not take. `count` is how many it has found so far."""

    def __init__(
        self, options: SinkOptions, targets: Sequence[Target], database: SinkDatabase, batch_id: str, partition: int
    ) -> None:
        self.count = 0
        self._options = options
        self._targets = targets
        self._database = database
        self._batch_id = batch_id
        self._partition = partition
        self._before: Counter[int] = Counter()
        self._aside: list[dict[str, object]] = []

    @property
    def silent(self) -> int:
        """How many of them have no message."""
        return 0 if self._options.quarantine_topic is not None else self.count

    def sift(self, routed: Iterable[tuple[int, pa.RecordBatch]]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Pass on the rows that their tables take, and then those that they do not, for the last target.

        Raises `TransactionAborted` once there are more than the limit; so what is put aside fits into memory.
        """
        for number, batch in routed:
            taken = self._taken(number, batch)
            if taken.num_rows:
                yield number, taken
        if self._aside:
            number = len(self._targets) - 1
            rows = pa.RecordBatch.from_pylist(self._aside, _ARROW)
            for batch in projected_batches([rows], _SCHEMA, self._targets[number].layout):
                yield number, batch

    def _taken(self, number: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        layout = self._targets[number].layout
        wrong = self._wrong(layout, batch)
        if wrong:
            self._put_aside(number, layout, batch, wrong)
            batch = batch.filter(pa.array([place not in wrong for place in range(batch.num_rows)]))
        self._before[number] += batch.num_rows + len(wrong)
        return batch

    def _wrong(self, layout: Layout, batch: pa.RecordBatch) -> dict[int, str]:
        """What is wrong with rows of a projected batch, by their places, in order."""
        found = {place: words for place, words in enumerate(batch.column(len(layout.projected)).to_pylist()) if words}
        for words, is_bad, _ in impossible_changes(layout, batch):
            for place in pc.indices_nonzero(is_bad).to_pylist():
                found.setdefault(place, words(place))
        deletes = deletes_of(layout, batch)
        # Of a row that deletes, only the key counts.
        asked = [place for place in range(batch.num_rows) if place not in found]
        if deletes is not None:
            asked = [place for place in asked if not deletes[place].as_py()]
        rows = batch if len(asked) == batch.num_rows else batch.take(pa.array(asked, pa.int64()))
        most = max(0, self._options.most_quarantined - self.count - len(found))
        found.update(
            (asked[place], words) for place, words in self._database.wrong_rows(layout, rows, most=most).items()
        )
        return dict(sorted(found.items()))

    def _put_aside(self, number: int, layout: Layout, batch: pa.RecordBatch, wrong: dict[int, str]) -> None:
        assert layout.whole_row is not None
        self.count += len(wrong)
        if self.count > self._options.most_quarantined:
            place, words = next(iter(wrong.items()))
            shown = f"row {self._before[number] + place + 1} of partition {self._partition}: {words}"
            raise over_limit(self._options, f"partition {self._partition} has at least {self.count} of them; {shown}")
        rows = batch.column(layout.whole_row).cast(pa.binary())  # a text of Spark's may hold any bytes
        for place, words in wrong.items():
            about: dict[str, object] = {
                _REASON: words,
                "sink": self._options.sink,
                "batch_id": self._batch_id,
                "table_name": ".".join(layout.table),
                "partition_id": self._partition,
                "row_number": self._before[number] + place + 1,
            }
            row = rows[place].as_py().decode(errors="ignore")
            message = orjson.dumps({**about, _ROW: orjson.Fragment(row)}).decode()
            self._aside.append({**about, _ROW: row, _MESSAGE: message})


def over_limit(options: SinkOptions, words: str) -> TransactionAborted:
    """The error for more rows than may be put aside."""
    return TransactionAborted(
        f"the table does not take more rows than quarantine_limit ({options.most_quarantined}) allows: {words}",
        next_step="nothing of these rows is written: correct them, or raise quarantine_limit (quarantineLimit)",
        retryable=False,
    )
