"""The projection in the JVM: the DataFrame becomes exactly the columns that a task sends."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, functions
from pyspark.sql import types as spark

from dualwrite.sinks.spark.column_types import Form
from dualwrite.sinks.spark.layout import WHOLE_ROW, Layout

JSON_OPTIONS: Final = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "dateFormat": "yyyy-MM-dd",
    # The session's own time zone would make a message's bytes depend on who runs the batch.
    "timeZone": "UTC",
}


def project(df: DataFrame, layout: Layout) -> DataFrame:
    """The DataFrame with the layout's columns, named ``c0``, ``c1``, ... Nothing runs yet."""
    # By position: names may differ by case alone, or hold dots and backticks.
    numbered = df.toDF(*(f"s{number}" for number in range(len(df.columns))))
    return numbered.select(
        *(
            _column(layout, column.source, column.form, df.schema).alias(f"c{number}")
            for number, column in enumerate(layout.projected)
        )
    )


def _column(layout: Layout, source: int, form: Form, schema: spark.StructType) -> Column:
    if source == WHOLE_ROW:
        return functions.to_json(
            functions.struct(*(functions.col(f"s{number}").alias(name) for number, name in layout.json_columns)),
            JSON_OPTIONS,
        )
    column = functions.col(f"s{source}")
    if form is Form.TEXT:
        return column.cast("string")
    if form is Form.JSON:
        return functions.to_json(column, JSON_OPTIONS)
    if form is Form.MILLIS:
        return functions.unix_millis(column)
    if form is Form.HEADERS:
        entries = functions.map_entries(column) if isinstance(schema.fields[source].dataType, spark.MapType) else column
        return functions.transform(entries, _binary_entry)
    return column


def _binary_entry(entry: Column) -> Column:
    return functions.struct(entry["key"].alias("key"), entry["value"].cast("binary").alias("value"))
