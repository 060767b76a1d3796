"""Both legs in one pass: each batch of rows goes into the table and into Kafka before the next one is taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pyarrow as pa

from dualwrite import failpoints
from dualwrite.sinks.spark.digests__sinks_spark_columns_row_names import RowNames
from dualwrite.sinks.spark.formats.serializing import serializing
from dualwrite.sinks.spark.writing import produce_batch

if TYPE_CHECKING:
    from dualwrite.sinks.spark.databases.database import SinkDatabase
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.writing__sinks_spark_writing_progress import Progress
    from dualwrite.writing.transaction import Transaction


def write_rows(
    transaction: Transaction,
    batches: Iterable[pa.RecordBatch],
    layout: Layout,
    table: tuple[str, str],
    options: SinkOptions,
    *,
    database: SinkDatabase,
    partition: int,
    progress: Progress,
) -> None:
    """Write projected rows on both sides of a dual write, a batch at a time.

    Args:
        transaction: The dual write.
        batches: The rows.
        layout: Which column goes where.
        table: Schema and name of the table that the rows go into: the target, or a staging table.
        options: The sink's settings.
        database: The database.
        partition: Number of the partition.
        progress: Counts each batch that is written.

    Raises:
        DualWriteError: One side refused a row, or is gone: leave the dual write, both sides abort.
    """
    names = RowNames(partition, layout)
    with (
        serializing(options, layout, names) as serializers,
        database.writing(transaction.connection, layout, table, names) as into,
    ):
        for batch in batches:
            names.add(batch)
            into.write(batch)
            produce_batch(transaction, batch, layout, options.topic, serializers, names=names)
            progress.add(batch)
    failpoints.hit("spark.rows_copied")
