"""Turns Arrow columns into JSON texts with Arrow's kernels: a column at a time instead of a loop over rows.

The texts are those of Spark's ``to_json``, with times in UTC and six digits, and nulls written as ``null``; numbers may be
spelled differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, TypeAlias, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.sendable__sinks_spark_columns_from_rows import json_converter

Column: TypeAlias = tuple[str, pa.Array, spark.DataType]
"""Name, values and type."""

_QUOTE: Final = '"'
_FIRST_PRINTABLE: Final = 0x20
_ESCAPED: Final = (ord('"'), ord("\\"))
_FIRST, _LAST = "0001-01-01", "9999-12-31T23:59:59.999999"


def json_rows(columns: Sequence[Column], length: int) -> pa.Array:
    """Make a JSON object for each of `length` rows.

    Raises:
        ConfigurationError: A value has no JSON form. The error names the column.
    """
    return _objects([(name, *_named(name, array, data_type)) for name, array, data_type in columns], length)


def json_texts(name: str, array: pa.Array, data_type: spark.DataType) -> pa.Array:
    """The JSON text of each value of a column; ``null`` for nulls.

    Raises:
        ConfigurationError: As :func:`json_rows`.
    """
    return _quoted(*_named(name, array, data_type))


def _named(name: str, array: pa.Array, data_type: spark.DataType) -> tuple[pa.Array, str]:
    try:
        return _texts(array, data_type)
    except pa.ArrowInvalid as error:
        raise ConfigurationError(
            f"a value of column {name!r} has no form in JSON: {error}", next_step="cast the column, or leave it out"
        ) from error


def _texts(array: pa.Array, data_type: spark.DataType) -> tuple[pa.Array, str]:
    """The texts, and the quote still missing around each: it is joined together with the text between columns."""
    if not len(array):
        return pa.array([], pa.string()), ""
    make, quote = _MAKERS.get(type(data_type).__name__, (_each, ""))
    texts = make(array, data_type)
    if not array.null_count:
        return texts, quote
    return pc.if_else(array.is_valid(), _quoted(texts, quote), "null"), ""


def _quoted(texts: pa.Array, quote: str) -> pa.Array:
    return pc.binary_join_element_wise(quote, texts, quote, "") if quote else texts


def _objects(members: Sequence[tuple[str, pa.Array, str]], length: int) -> pa.Array:
    if not members or not length:
        return pa.array(["{}"] * length, pa.string())
    pieces: list[str | pa.Array] = []
    before = "{"
    for name, texts, quote in members:
        pieces += [f"{before}{orjson.dumps(name).decode()}:{quote}", texts]
        before = f"{quote},"
    return pc.binary_join_element_wise(*pieces, before[:-1] + "}", "")


def _plain(array: pa.Array, _: spark.DataType) -> pa.Array:
    return array.cast(pa.string())


def _numbers_with_point(array: pa.Array, _: spark.DataType) -> pa.Array:
    # Arrow would spell 2.0 as 2. The shortest digits that identify a 32-bit number differ from the 64-bit number's.
    numbers = np.ascontiguousarray(array.fill_null(0).to_numpy(zero_copy_only=False))
    text = orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].decode()
    texts = pc.split_pattern(pa.array([text]), ",").flatten()
    finite = np.isfinite(numbers)
    if finite.all():
        return texts
    names = np.where(np.isnan(numbers), '"NaN"', np.where(numbers > 0, '"Infinity"', '"-Infinity"'))
    return pc.if_else(pa.array(finite), texts, pa.array(names, pa.string()))


def _strings(array: pa.Array, _: spark.DataType) -> pa.Array:
    """Strings in the form that goes between quotes."""
    if not _must_escape(array):
        return array.cast(pa.string())
    values = cast("list[str | None]", array.to_numpy(zero_copy_only=False).tolist())
    return pa.array([None if value is None else orjson.dumps(value)[1:-1] for value in values], pa.string())


def _must_escape(array: pa.Array) -> bool:
    wide = pa.types.is_large_string(array.type)
    _, offsets, data = array.buffers()
    if data is None:
        return False
    bounds = np.frombuffer(offsets, np.int64 if wide else np.int32)[array.offset : array.offset + len(array) + 1]
    used = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]
    found = used < _FIRST_PRINTABLE
    for code in _ESCAPED:
        found |= used == code
    return bool(found.any())


def _dates(array: pa.Array, _: spark.DataType) -> pa.Array:
    _require_years(array.cast(pa.int32()), "D")
    return array.cast(pa.string())


def _times(array: pa.Array, _: spark.DataType) -> pa.Array:
    digits = pc.utf8_rtrim(array.cast(pa.time64("us")).cast(pa.string()), characters="0")
    return pc.utf8_rtrim(digits, characters=".")


def _local_timestamps(array: pa.Array, _: spark.DataType) -> pa.Array:
    # Through integers: those of a column with a time zone are in UTC.
    micros = array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64())
    _require_years(micros, "us")
    texts = micros.cast(pa.timestamp("us")).cast(pa.string()).cast(pa.binary())
    return pc.binary_replace_slice(texts, 10, 11, b"T").cast(pa.string())


def _timestamps(array: pa.Array, data_type: spark.DataType) -> pa.Array:
    return pc.binary_join_element_wise(_local_timestamps(array, data_type), "Z", "")


def _require_years(since_1970: pa.Array, unit: Literal["D", "us"]) -> None:
    first, last = (np.datetime64(text, unit).astype(np.int64) for text in (_FIRST, _LAST))
    least, greatest = (bound.as_py() for bound in pc.min_max(since_1970).values())
    if least is not None and not first <= least <= greatest <= last:
        raise pa.ArrowInvalid("it is not in the years 1 to 9999")


def _lists(array: pa.Array, data_type: spark.DataType) -> pa.Array:
    assert isinstance(data_type, spark.ArrayType)
    return _enclosed("[", array, _quoted(*_texts(_inner(array, array.values), data_type.elementType)), "]")


def _maps(array: pa.Array, data_type: spark.DataType) -> pa.Array:
    assert isinstance(data_type, spark.MapType)
    keys = _quoted(*_texts(_inner(array, array.keys), data_type.keyType))
    values = _quoted(*_texts(_inner(array, array.items), data_type.valueType))
    return _enclosed("{", array, pc.binary_join_element_wise(keys, ":", values, ""), "}")


def _inner(array: pa.Array, values: pa.Array) -> pa.Array:
    """The values that belong to a slice of lists or maps."""
    first = array.offsets[0].as_py()
    return values.slice(first, array.offsets[len(array)].as_py() - first)


def _enclosed(opening: str, array: pa.Array, texts: pa.Array, closing: str) -> pa.Array:
    offsets = pc.subtract(array.offsets, array.offsets[0]).cast(pa.int64())
    return pc.binary_join_element_wise(
        opening, pc.binary_join(pa.LargeListArray.from_arrays(offsets, texts), ","), closing, ""
    )


def _structs(array: pa.Array, data_type: spark.DataType) -> pa.Array:
    assert isinstance(data_type, spark.StructType)
    members = [
        (field.name, *_texts(array.field(number), field.dataType)) for number, field in enumerate(data_type.fields)
    ]
    return _objects(members, len(array))


def _each(array: pa.Array, data_type: spark.DataType) -> pa.Array:
    convert = json_converter(data_type)
    return pa.array([orjson.dumps(convert(value)) for value in array.to_pylist()], pa.string())


_Make: TypeAlias = Callable[[pa.Array, spark.DataType], pa.Array]
_MAKERS: Final[Mapping[str, tuple[_Make, str]]] = {
    "BooleanType": (_plain, ""),
    "ByteType": (_plain, ""),
    "ShortType": (_plain, ""),
    "IntegerType": (_plain, ""),
    "LongType": (_plain, ""),
    "DecimalType": (_plain, ""),
    "FloatType": (_numbers_with_point, ""),
    "DoubleType": (_numbers_with_point, ""),
    "StringType": (_strings, _QUOTE),
    "CharType": (_strings, _QUOTE),
    "VarcharType": (_strings, _QUOTE),
    "DateType": (_dates, _QUOTE),
    "TimeType": (_times, _QUOTE),
    "TimestampType": (_timestamps, _QUOTE),
    "TimestampNTZType": (_local_timestamps, _QUOTE),
    "ArrayType": (_lists, ""),
    "MapType": (_maps, ""),
    "StructType": (_structs, ""),
}
"""By the name of the type's class; other types are converted value by value."""
