"""The projection of Arrow batches in Python: turns the DataFrame's batches into those that are sent, column by column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.column_types import Form
from dualwrite.sinks.spark.layout import WHOLE_ROW
from dualwrite.sinks.spark.sendable__sinks_spark_columns_from_rows import converter
from dualwrite.sinks.spark.sendable__sinks_spark_columns_json_texts import json_rows, json_texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql import types as spark

    from dualwrite.sinks.spark.layout import Layout, Projected

Make: TypeAlias = Callable[[pa.RecordBatch], pa.Array]

_ROWS_AT_ONCE: Final = 10_000
_BYTES_AT_ONCE: Final = 16 * 2**20


def awaited(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch] | None:
    """Wait for the first batch. Returns all batches, that one included; None if there are none."""
    source = iter(batches)
    first = next(source, None)
    return None if first is None else chain([first], source)


def projected_batches(
    batches: Iterable[pa.RecordBatch], schema: spark.StructType, layout: Layout
) -> Iterator[pa.RecordBatch]:
    """Project the DataFrame's batches in parts: the rows of a part exist three times in memory while they are sent.

    Raises:
        ConfigurationError: A value does not fit its column.
    """
    makers = [_maker(schema, layout, column) for column in layout.projected]
    for batch in batches:
        rows_at_once = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * batch.num_rows // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, rows_at_once):
            rows = batch.slice(start, rows_at_once)
            arrays = [
                fitting(make(rows), column, schema) for make, column in zip(makers, layout.projected, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=layout.arrow_schema)


def fitting(array: pa.Array, column: Projected, schema: spark.StructType) -> pa.Array:
    """Cast the array to the type that is sent.

    Raises:
        ConfigurationError: A value does not fit. The error names the column.
    """
    if array.type == column.arrow:
        return array
    try:
        return array.cast(column.arrow)
    except pa.ArrowInvalid as error:
        name = schema.fields[column.source].name
        raise ConfigurationError(f"a value of column {name!r} does not fit {column.arrow}: {error}") from error


def without_unused(df: DataFrame, layout: Layout) -> DataFrame:
    """Replace the unused columns by nulls, where they stand: Arrow may not know their types."""
    # By position: names may differ only in case, or contain dots and backticks.
    numbered = df.toDF(*(f"s{number}" for number in range(len(df.columns))))
    used = {column.source for column in layout.projected} | {number for number, _ in layout.json_columns}
    if used.issuperset(range(len(numbered.columns))):
        return numbered
    return numbered.select(
        *(name if number in used else functions.lit(None).alias(name) for number, name in enumerate(numbered.columns))
    )


def _maker(schema: spark.StructType, layout: Layout, column: Projected) -> Make:
    """The function that makes one projected column from a batch."""
    number, form = column.source, column.form
    if number == WHOLE_ROW:
        parts = [(number, name, schema.fields[number].dataType) for number, name in layout.json_columns]
        return lambda batch: json_rows(
            [(name, batch.column(number), kind) for number, name, kind in parts], batch.num_rows
        )
    data_type = schema.fields[number].dataType
    if form in {Form.PLAIN, Form.TEXT}:
        return lambda batch: batch.column(number)
    if form is Form.MILLIS:
        return lambda batch: _millis(batch.column(number))
    if form is Form.JSON:
        name = schema.fields[number].name
        return lambda batch: _unless_null(batch.column(number), json_texts(name, batch.column(number), data_type))
    convert = converter(data_type, form)
    return lambda batch: pa.array(map(convert, batch.column(number).to_pylist()), column.arrow)


def _unless_null(array: pa.Array, texts: pa.Array) -> pa.Array:
    return pc.if_else(array.is_valid(), texts, None) if array.null_count else texts


def _millis(array: pa.Array) -> pa.Array:
    micros = array.cast(pa.int64())
    # Round down, also before 1970, as Spark's unix_millis does.
    return pa.array(
        np.floor_divide(micros.fill_null(0).to_numpy(), 1000), mask=micros.is_null().to_numpy(zero_copy_only=False)
    )
