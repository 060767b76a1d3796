"""The projection of Spark's rows in Python: they become the same Arrow batches as its columns would."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import islice
from typing import Final, TypeAlias, cast

import numpy as np
import orjson
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql import types as spark

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.column_types import Form
from dualwrite.sinks.spark.layout import WHOLE_ROW, Layout

Value: TypeAlias = object
Convert: TypeAlias = Callable[[Value], Value]

_ROWS_AT_ONCE: Final = 2000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MS: Final = timedelta(milliseconds=1)


def row_batches(rows: Iterable[Row], schema: spark.StructType, layout: Layout) -> Iterator[pa.RecordBatch]:
    """Turn rows into projected batches of a few thousand rows.

    Raises:
        ConfigurationError: A value does not fit its column.
    """
    makers = [_maker(schema, layout, column.source, column.form) for column in layout.projected]
    source = iter(rows)
    while chunk := list(islice(source, _ROWS_AT_ONCE)):
        arrays = []
        for make, column in zip(makers, layout.projected, strict=True):
            try:
                arrays.append(pa.array([make(row) for row in chunk], column.arrow))
            except (pa.ArrowInvalid, OverflowError) as error:
                name = schema.fields[column.source].name
                raise ConfigurationError(f"a value of column {name!r} does not fit {column.arrow}: {error}") from error
        yield pa.RecordBatch.from_arrays(arrays, schema=layout.arrow_schema)


def _maker(schema: spark.StructType, layout: Layout, source: int, form: Form) -> Callable[[Row], Value]:
    """The function that makes one projected value from a row."""
    if source == WHOLE_ROW:
        parts = [(number, name, json_converter(schema.fields[number].dataType)) for number, name in layout.json_columns]
        return lambda row: orjson.dumps({name: make(row[number]) for number, name, make in parts}).decode()
    convert = converter(schema.fields[source].dataType, form)
    return lambda row: convert(row[source])


def converter(data_type: spark.DataType, form: Form) -> Convert:
    """The function that turns a value of Spark's or Arrow's into one of the projected column."""
    if form is Form.JSON:
        make = json_converter(data_type)
        return unless_null(lambda value: orjson.dumps(make(value)).decode())
    if form is Form.TEXT:
        return unless_null(str)
    if form is Form.MILLIS:
        return unless_null(lambda value: (_utc(value) - _EPOCH) // _MS)
    if form is Form.HEADERS:
        return unless_null(_headers)
    return _plain_converter(data_type)


def _plain_converter(data_type: spark.DataType) -> Convert:
    """The function that turns a value of Spark's into one that Arrow accepts."""
    if isinstance(data_type, spark.TimestampType):
        return unless_null(_utc)
    if isinstance(data_type, spark.ArrayType):
        element = _plain_converter(data_type.elementType)
        return unless_null(lambda value: [element(item) for item in cast("Sequence[Value]", value)])
    if isinstance(data_type, spark.MapType):
        inner = _plain_converter(data_type.valueType)
        return unless_null(lambda value: [(key, inner(item)) for key, item in cast("dict[str, Value]", value).items()])
    if isinstance(data_type, spark.StructType):
        parts = [(field.name, _plain_converter(field.dataType)) for field in data_type.fields]
        return unless_null(
            lambda value: {name: make(item) for (name, make), item in zip(parts, _fields(value), strict=True)}
        )
    if isinstance(data_type, spark.VariantType):
        return unless_null(_variant_parts)
    return _same


def _variant_parts(value: Value) -> Value:
    assert isinstance(value, spark.VariantVal)
    return {"value": value.value, "metadata": value.metadata}


def _same(value: Value) -> Value:
    return value


def unless_null(convert: Convert) -> Convert:
    """Extend a converter to values that may be null."""
    return lambda value: None if value is None else convert(value)


def _utc(value: Value) -> datetime:
    # Spark passes a ``timestamp`` to Python as local time without a zone.
    assert isinstance(value, datetime)
    return value.astimezone(timezone.utc)


def _headers(value: Value) -> list[dict[str, Value] | None]:
    entries = value.items() if isinstance(value, dict) else cast("Sequence[Value]", value)
    return [_header(entry) for entry in entries]


def _header(entry: Value) -> dict[str, Value] | None:
    if entry is None:
        return None  # `produce_batch` refuses it by its row
    key, value = _fields(entry)
    return {"key": key, "value": value.encode() if isinstance(value, str) else value}


def _fields(value: Value) -> Sequence[Value]:
    """The fields of a struct: Spark's rows are tuples, Arrow gives dictionaries."""
    return list(value.values()) if isinstance(value, dict) else cast("Sequence[Value]", value)


def json_converter(data_type: spark.DataType, instead: Mapping[str, Convert] | None = None) -> Convert:
    """The function that turns a value of Spark's or Arrow's into one that orjson writes as Spark's ``to_json`` does.

    Args:
        data_type: The value's type.
        instead: Other converters for some types, by the names of their classes.
    """
    if isinstance(data_type, spark.ArrayType):
        element = json_converter(data_type.elementType, instead)
        return unless_null(lambda value: [element(item) for item in cast("Sequence[Value]", value)])
    if isinstance(data_type, spark.MapType):
        inner = json_converter(data_type.valueType, instead)
        return unless_null(
            lambda value: {key: inner(item) for key, item in dict(cast("dict[str, Value]", value)).items()}
        )
    if isinstance(data_type, spark.StructType):
        parts = [(field.name, json_converter(field.dataType, instead)) for field in data_type.fields]
        return unless_null(
            lambda value: {name: make(item) for (name, make), item in zip(parts, _fields(value), strict=True)}
        )
    scalar = {**_SCALARS, **(instead or {})}.get(type(data_type).__name__)
    return _same if scalar is None else unless_null(scalar)


def _decimal(value: Value) -> Value:
    assert isinstance(value, Decimal)
    return orjson.Fragment(str(value))


def _double(value: Value) -> Value:
    assert isinstance(value, float)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _float(value: Value) -> Value:
    # The shortest digits that identify the 32-bit number, not the 64-bit one that Python stores it in.
    return _double(float(str(np.float32(cast("float", value)))))


def _timestamp(value: Value) -> Value:
    return _utc(value).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _timestamp_ntz(value: Value) -> Value:
    assert isinstance(value, datetime)
    return value.isoformat(timespec="microseconds")


def _time(value: Value) -> Value:
    assert isinstance(value, time)
    text = value.isoformat(timespec="microseconds")
    return text.rstrip("0").removesuffix(".") if value.microsecond else text[:8]


def _date(value: Value) -> Value:
    assert isinstance(value, date)
    return value.isoformat()


def variant_json(value: Value) -> str:
    """The JSON text of a variant of Spark's or Arrow's."""
    if isinstance(value, dict):
        value = spark.VariantVal(value["value"], value["metadata"])
    assert isinstance(value, spark.VariantVal)
    return value.toJson()


_SCALARS: Final[dict[str, Convert]] = {
    "FloatType": _float,
    "DoubleType": _double,
    "DecimalType": _decimal,
    "BinaryType": lambda value: base64.b64encode(cast("bytes", value)).decode(),
    "DateType": _date,
    "TimestampType": _timestamp,
    "TimestampNTZType": _timestamp_ntz,
    "TimeType": _time,
    "VariantType": lambda value: orjson.Fragment(variant_json(value)),
}
