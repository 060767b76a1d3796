"""The DataFrame as batches to send: from Arrow's columns, from rows, and as JSON."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import lru_cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row, functions
from pyspark.sql import types as spark

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.column_types import Form
from dualwrite.sinks.spark.layout import WHOLE_ROW, Layout

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dualwrite.sinks.spark.layout import Projected

Item = TypeVar("Item")
Make: TypeAlias = Callable[[pa.RecordBatch], pa.Array]

_ROWS_AT_ONCE: Final = 10_000
_BYTES_AT_ONCE: Final = 16 * 2**20


def awaited(batches: Iterable[Item]) -> Iterator[Item] | None:
    """Wait for the first batch. Returns all batches, that one included; None if there are none."""
    source = iter(batches)
    first = next(source, None)
    return None if first is None else chain([first], source)


def projected_batches(
    batches: Iterable[pa.RecordBatch], schema: spark.StructType, layout: Layout
) -> Iterator[pa.RecordBatch]:
    """Project the DataFrame's batches in parts: the rows of a part exist three times in memory while they are sent."""
    makers = [_maker_of_columns(schema, layout, column) for column in layout.projected]
    for batch in batches:
        rows_at_once = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * batch.num_rows // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, rows_at_once):
            rows = batch.slice(start, rows_at_once)
            wrong: list[str | None] | None = None if layout.whole_row is None else [None] * rows.num_rows
            arrays = [
                fitting(make(rows), column, schema, wrong)
                for make, column in zip(makers, layout.projected, strict=True)
            ]
            yield _with_wrong(arrays, wrong, layout)


def _with_wrong(arrays: list[pa.Array], wrong: list[str | None] | None, layout: Layout) -> pa.RecordBatch:
    if wrong is not None:
        arrays.append(pa.array(wrong, pa.string()))
    return pa.RecordBatch.from_arrays(arrays, schema=layout.arrow_schema)


def fitting(
    array: pa.Array, column: Projected, schema: spark.StructType, wrong: list[str | None] | None = None
) -> pa.Array:
    """Cast the array to the type that is sent. The error for a value that does not fit names the column.

    With a list of what is wrong with each row, that is noted there, and the value is null.
    """
    if column.source == WHOLE_ROW:
        return array.cast(column.arrow)  # it is made of columns that come here themselves
    try:
        return _cast(array, column.arrow)
    except pa.ArrowInvalid as error:
        words = _does_not_fit(column, schema)
        if wrong is None:
            step = 'fix the text, or send its bytes: cast("binary")' if pa.types.is_string(column.arrow) else None
            raise ConfigurationError(f"{words}: {error}", next_step=step) from error
        return _halves_that_fit(array, column.arrow, wrong, words, 0)


def _cast(array: pa.Array, arrow: pa.DataType) -> pa.Array:
    found = array if array.type == arrow else array.cast(arrow)
    if pa.types.is_string(arrow) or pa.types.is_nested(arrow):
        found.validate(full=True)  # Spark casts any bytes to a string
    return found


def _does_not_fit(column: Projected, schema: spark.StructType) -> str:
    return f"a value of column {schema.fields[column.source].name!r} does not fit {column.arrow}"


def _halves_that_fit(array: pa.Array, arrow: pa.DataType, wrong: list[str | None], words: str, first: int) -> pa.Array:
    try:
        return _cast(array, arrow)
    except pa.ArrowInvalid as error:
        if len(array) == 1:
            wrong[first] = wrong[first] or f"{words}: {error}"
            return pa.nulls(1, arrow)
        middle = len(array) // 2
        # Copies: a slice of lists, structs or maps shares their values, so that one row's would spoil all others.
        return pa.concat_arrays(
            [
                _halves_that_fit(array.take(pa.array(range(middle))), arrow, wrong, words, first),
                _halves_that_fit(array.take(pa.array(range(middle, len(array)))), arrow, wrong, words, first + middle),
            ]
        )


def used_columns(layouts: Iterable[Layout]) -> set[int]:
    """The numbers of the DataFrame's columns that at least one of the layouts takes."""
    used: set[int] = set()
    for layout in layouts:
        used.update(column.source for column in layout.projected if column.source != WHOLE_ROW)
        used.update(number for number, _ in layout.json_columns)
    return used


def without_unused(df: DataFrame, used: Collection[int]) -> DataFrame:
    """Replace all columns but those of the numbers in `used` by nulls, where they stand: Arrow may not know their types."""
    # By position: names may differ only in case, or contain dots and backticks.
    numbered = df.toDF(*(f"s{number}" for number in range(len(df.columns))))
    if set(used).issuperset(range(len(numbered.columns))):
        return numbered
    return numbered.select(
        *(name if number in used else functions.lit(None).alias(name) for number, name in enumerate(numbered.columns))
    )


def _maker_of_columns(schema: spark.StructType, layout: Layout, column: Projected) -> Make:
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
    if form is Form.ORDER:
        return lambda batch: _order(batch.column(number))
    if form is Form.JSON:
        name = schema.fields[number].name
        return lambda batch: _unless_null(batch.column(number), json_texts(name, batch.column(number), data_type))
    convert = converter(data_type, form)
    return lambda batch: pa.array(map(convert, batch.column(number).to_pylist()), column.arrow)


def _unless_null(array: pa.Array, texts: pa.Array) -> pa.Array:
    return pc.if_else(array.is_valid(), texts, None) if array.null_count else texts


def _order(array: pa.Array) -> pa.Array:
    return (array.cast(pa.int32()) if pa.types.is_date(array.type) else array).cast(pa.int64())


def _millis(array: pa.Array) -> pa.Array:
    micros = array.cast(pa.int64())
    # Round down, also before 1970, as Spark's unix_millis does.
    return pa.array(
        np.floor_divide(micros.fill_null(0).to_numpy(), 1000), mask=micros.is_null().to_numpy(zero_copy_only=False)
    )


# The projection of Spark's rows in Python: they become the same Arrow batches as its columns would.

Value: TypeAlias = object
Convert: TypeAlias = Callable[[Value], Value]

_ROWS_OF_PYTHON_AT_ONCE: Final = 2000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MS: Final = timedelta(milliseconds=1)
_US: Final = timedelta(microseconds=1)


def row_batches(rows: Iterable[Row], schema: spark.StructType, layout: Layout) -> Iterator[pa.RecordBatch]:
    """Turn rows into projected batches of a few thousand rows."""
    makers = [_maker_of_rows(schema, layout, column.source, column.form) for column in layout.projected]
    source = iter(rows)
    while chunk := list(islice(source, _ROWS_OF_PYTHON_AT_ONCE)):
        wrong: list[str | None] | None = None if layout.whole_row is None else [None] * len(chunk)
        arrays = [
            _converted([make(row) for row in chunk], column, schema, wrong)
            for make, column in zip(makers, layout.projected, strict=True)
        ]
        yield _with_wrong(arrays, wrong, layout)


def _converted(
    values: list[Value], column: Projected, schema: spark.StructType, wrong: list[str | None] | None
) -> pa.Array:
    """As :func:`fitting`, of Python's values."""
    try:
        return pa.array(values, column.arrow)
    except (pa.ArrowInvalid, OverflowError) as error:
        words = _does_not_fit(column, schema)
        if wrong is None:
            raise ConfigurationError(f"{words}: {error}") from error
    for number, value in enumerate(values):
        try:
            pa.array([value], column.arrow)
        except (pa.ArrowInvalid, OverflowError) as error:
            wrong[number] = wrong[number] or f"{words}: {error}"
            values[number] = None
    return pa.array(values, column.arrow)


def _maker_of_rows(schema: spark.StructType, layout: Layout, source: int, form: Form) -> Callable[[Row], Value]:
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
    if form is Form.ORDER:
        return unless_null(_ORDERS.get(type(data_type).__name__, _same))
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


_ORDERS: Final[dict[str, Convert]] = {
    "DateType": lambda value: (cast("date", value) - _EPOCH.date()).days,
    "TimestampType": lambda value: (_utc(value) - _EPOCH) // _US,
    "TimestampNTZType": lambda value: (cast("datetime", value) - _EPOCH.replace(tzinfo=None)) // _US,
}


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

    `instead` has other converters for some types, by the names of their classes.
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


# Turns Arrow columns into JSON texts with Arrow's kernels: a column at a time instead of a loop over rows.
#
# The texts are those of Spark's `to_json`, with times in UTC and six digits, and nulls written as `null`; numbers may
# be spelled differently.

# Name, values and type.
Column: TypeAlias = tuple[str, pa.Array, spark.DataType]

_QUOTE: Final = '"'
_FIRST_PRINTABLE: Final = 0x20
_AS_THEY_ARE: Final = "surrogateescape"
_ESCAPED: Final = (ord('"'), ord("\\"))
_BLOCK: Final = 1024
_FEWER_TEXTS: Final = 2
"""Integers are close together if there are this many rows for each number from the least to the greatest."""
_MOST_TEXTS: Final = 16 * _BLOCK
"""The cache of texts lasts as long as the process: some 30 MB at most."""
_FIRST, _LAST = "0001-01-01", "9999-12-31T23:59:59.999999"


def json_rows(columns: Sequence[Column], length: int) -> pa.Array:
    """Make a JSON object for each of `length` rows. The error for a value without a JSON form names the column."""
    return _objects(columns, length, _named)


def json_texts(name: str, array: pa.Array, data_type: spark.DataType) -> pa.Array:
    """The JSON text of each value of a column; ``null`` for nulls."""
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


def _objects(columns: Sequence[Column], length: int, make: Callable[..., tuple[pa.Array, str]]) -> pa.Array:
    """An object for each row. `make` gives the texts of a column and their quote, from its name, its values and its type."""
    if not columns or not length:
        return pa.array(["{}"] * length, pa.string())
    # Joining costs by the piece: of each row there are as few as possible.
    pieces: list[str | pa.Array] = []
    before = "{"
    for name, array, data_type in columns:
        before += f"{orjson.dumps(name).decode()}:"
        texts, quote = _close_integers(before, array) if isinstance(data_type, spark.IntegralType) else None, ""
        if texts is None:
            texts, quote = make(name, array, data_type)
            pieces.append(before + quote)
        pieces.append(texts)
        before = f"{quote},"
    return pc.binary_join_element_wise(*pieces, before[:-1] + "}", "")


def _close_integers(before: str, array: pa.Array) -> pa.Array | None:
    """The texts of integers that lie close together, each behind `before`; None if they are others.

    Each number between them has its text made once, and rows only copy it.
    """
    least, greatest = (bound.as_py() for bound in pc.min_max(array).values())
    if least is None:
        return None
    # Whole blocks: the next batch has about the same numbers, and then finds their texts made.
    first = least // _BLOCK * _BLOCK
    count = (greatest - first) // _BLOCK * _BLOCK + _BLOCK
    if count > min(len(array) // _FEWER_TEXTS, _MOST_TEXTS):
        return None
    places = pc.subtract(array.cast(pa.int64()), first)
    return _texts_of(before, first, count).take(places.fill_null(count) if array.null_count else places)


@lru_cache(maxsize=64)
def _texts_of(before: str, first: int, count: int) -> pa.Array:
    """Each of so many integers behind `before`, and ``null`` behind them."""
    numbers = pa.array(np.arange(count) + first).cast(pa.string())
    return pc.binary_join_element_wise(before, pa.concat_arrays([numbers, pa.array(["null"])]), "")


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
    try:
        values = cast("list[str | None]", array.to_numpy(zero_copy_only=False).tolist())
    except pa.ArrowException:
        return _strings_of_any_bytes(array)
    return pa.array([None if value is None else orjson.dumps(value)[1:-1] for value in values], pa.string())


def _strings_of_any_bytes(array: pa.Array) -> pa.Array:
    """As :func:`_strings`, with the bytes that are no UTF-8: :func:`fitting` finds them."""
    texts = [
        None if value is None else json.dumps(value.decode(errors=_AS_THEY_ARE), ensure_ascii=False)[1:-1]
        for value in array.cast(pa.large_binary()).to_pylist()
    ]
    escaped = [None if text is None else text.encode(errors=_AS_THEY_ARE) for text in texts]
    return pa.array(escaped, pa.binary()).cast(pa.string(), safe=False)


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
    columns = [(field.name, array.field(number), field.dataType) for number, field in enumerate(data_type.fields)]
    return _objects(columns, len(array), lambda _, inner, kind: _texts(inner, kind))


def _each(array: pa.Array, data_type: spark.DataType) -> pa.Array:
    convert = json_converter(data_type)
    return pa.array([orjson.dumps(convert(value)) for value in array.to_pylist()], pa.string())


_Make: TypeAlias = Callable[[pa.Array, spark.DataType], pa.Array]
# By the name of the type's class; other types are converted value by value.
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
