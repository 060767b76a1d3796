"""The projection in Python from Arrow: the DataFrame's own batches become those that are sent, column by column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import numpy as np
import orjson
import pyarrow as pa

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.column_types import Form
from dualwrite.sinks.spark.layout import WHOLE_ROW
from dualwrite.sinks.spark.rows import ROWS_AT_ONCE, converter, json_converter

if TYPE_CHECKING:
    from pyspark.sql import types as spark

    from dualwrite.sinks.spark.layout import Layout, Projected

Make: TypeAlias = Callable[[pa.RecordBatch], pa.Array]

_READY: Final = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)
"""Types whose values orjson writes as they are."""


def projected_batches(
    batches: Iterable[pa.RecordBatch], schema: spark.StructType, layout: Layout
) -> Iterator[pa.RecordBatch]:
    """The DataFrame's batches as projected ones, a few thousand rows at a time.

    Raises:
        ConfigurationError: A value does not fit its column.
    """
    makers = [_maker(schema, layout, column) for column in layout.projected]
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            rows = batch.slice(start, ROWS_AT_ONCE)
            arrays = [
                fitting(make(rows), column, schema) for make, column in zip(makers, layout.projected, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=layout.arrow_schema)


def cast_batch(batch: pa.RecordBatch, schema: spark.StructType, layout: Layout) -> pa.RecordBatch:
    """A batch that the JVM has projected, in the types that are sent.

    Raises:
        ConfigurationError: A value does not fit its column.
    """
    arrays = [fitting(array, column, schema) for array, column in zip(batch.columns, layout.projected, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=layout.arrow_schema)


def fitting(array: pa.Array, column: Projected, schema: spark.StructType) -> pa.Array:
    """The array in the type that is sent.

    Raises:
        ConfigurationError: A value does not fit; it names the column.
    """
    if array.type == column.arrow:
        return array
    try:
        return array.cast(column.arrow)
    except pa.ArrowInvalid as error:
        name = schema.fields[column.source].name
        raise ConfigurationError(f"a value of column {name!r} does not fit {column.arrow}: {error}") from error


def _maker(schema: spark.StructType, layout: Layout, column: Projected) -> Make:
    """What makes one projected column from a batch."""
    number, form = column.source, column.form
    if number == WHOLE_ROW:
        return _json_maker(schema, layout)
    if form in {Form.PLAIN, Form.TEXT}:
        return lambda batch: batch.column(number)
    if form is Form.MILLIS:
        return lambda batch: _millis(batch.column(number))
    convert = converter(schema.fields[number].dataType, form)
    return lambda batch: pa.array(map(convert, batch.column(number).to_pylist()), column.arrow)


def _millis(array: pa.Array) -> pa.Array:
    micros = array.cast(pa.int64())
    # Rounded down, also before 1970, as Spark's unix_millis does.
    return pa.array(
        np.floor_divide(micros.fill_null(0).to_numpy(), 1000), mask=micros.is_null().to_numpy(zero_copy_only=False)
    )


def _json_maker(schema: spark.StructType, layout: Layout) -> Make:
    names = [name for _, name in layout.json_columns]
    columns = [(number, json_converter(schema.fields[number].dataType)) for number, _ in layout.json_columns]

    def make(batch: pa.RecordBatch) -> pa.Array:
        values = [_json_values(batch.column(number), convert) for number, convert in columns]
        return pa.array(
            [orjson.dumps(dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)], pa.string()
        )

    return make


def _json_values(array: pa.Array, convert: Callable[[object], object]) -> Iterable[object]:
    if any(is_ready(array.type) for is_ready in _READY):
        if array.null_count and not pa.types.is_string(array.type):
            return cast("list[object]", array.to_pylist())
        # Through numpy: several times as fast as to_pylist, which makes a scalar object of each value first.
        return cast("list[object]", array.to_numpy(zero_copy_only=False).tolist())
    return map(convert, array.to_pylist())
