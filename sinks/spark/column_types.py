"""Which types of columns can be written where, and the target table as both sides see it.

The documentation shows this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Final

import pyarrow as pa
from pyspark.sql import types as spark

from dualwrite.errors import ConfigurationError


class Form(Enum):
    """The conversion of a DataFrame's column before it is sent."""

    PLAIN = "as it is"
    TEXT = "its decimal text"
    JSON = "its JSON text"
    MILLIS = "milliseconds since 1970"
    HEADERS = "names with binary values"
    ORDER = "a number in the order of the values"


@dataclass(frozen=True)
class Wire:
    """How a column travels to the database: its conversion, then a cast, which fails for values that do not fit.

    `encoding` is ``jsonb`` or ``uuid``, whose binary forms in PostgreSQL have no Arrow type; `LITERAL` or `VECTOR` if the
    value is written as in SQL, and the server reads it; empty for all others.
    """

    form: Form
    arrow: pa.DataType
    encoding: str = ""


LITERAL: Final = "literal"
VECTOR: Final = "vector"
ANY: Final = "any type that is not in this table"
"""Stands among the names of types for those that no row of the table names."""

_TEXT: Final = {name: Wire(Form.PLAIN, pa.string()) for name in ("text", "varchar", "bpchar", "citext", "json")}
ENUM: Final = "enum"
# As pgpq writes arrays, with the element's own type in their heads.
_BINARY_ELEMENTS: Final = frozenset(
    {"bool", "int2", "int4", "int8", "float4", "float8", "numeric", "text", "bytea", "date", "timestamp"}
)
_NESTED: Final = {
    "json": Wire(Form.JSON, pa.string()),
    "jsonb": Wire(Form.JSON, pa.string(), "jsonb"),
}
_WHOLE: Final = {
    "int2": Wire(Form.PLAIN, pa.int16()),
    "int4": Wire(Form.PLAIN, pa.int32()),
    "int8": Wire(Form.PLAIN, pa.int64()),
}
_MARIADB_TEXT: Final = {
    name: Wire(Form.PLAIN, pa.string())
    for name in ("text", "varchar", "char", "tinytext", "mediumtext", "longtext", "enum", "json", "uuid")
}
_MARIADB_NESTED: Final = {"json": Wire(Form.JSON, pa.string())}
# An Arrow type that holds all values of the column; the server refuses those that are outside of it.
_MARIADB_WHOLE: Final = {
    "tinyint": Wire(Form.PLAIN, pa.int8()),
    **{name: Wire(Form.PLAIN, pa.int16()) for name in ("smallint", "tinyint unsigned")},
    **{name: Wire(Form.PLAIN, pa.int32()) for name in ("mediumint", "int", "smallint unsigned", "mediumint unsigned")},
    **{name: Wire(Form.PLAIN, pa.int64()) for name in ("bigint", "int unsigned", "bigint unsigned")},
}


_CAST: Final = "cast it"


@dataclass(frozen=True)
class TypeRow:
    """One row of the table: a Spark SQL type, and its form in each place where it may be written; empty where it is refused.

    `json`, `avro`, `json_schema` and `protobuf` are for people. `postgresql` and `mariadb` say by the database's internal type
    name how it travels there.
    """

    name: str
    json: str
    postgresql: Mapping[str, Wire] = field(default_factory=dict)
    advice: str = _CAST
    avro: str = ""
    json_schema: str = ""
    protobuf: str = ""
    mariadb: Mapping[str, Wire] = field(default_factory=dict)


_LONGS: Final = "int64, sint64, sfixed64"


def _whole(name: str, digits: int, avro: str = "int") -> TypeRow:
    return TypeRow(
        name,
        "number",
        {**_WHOLE, "numeric": Wire(Form.PLAIN, pa.decimal128(digits, 0))},
        avro=avro,
        mariadb={**_MARIADB_WHOLE, "decimal": Wire(Form.PLAIN, pa.decimal128(digits, 0))},
        json_schema="integer",
        protobuf=_LONGS if avro == "long" else f"int32, sint32, sfixed32, {_LONGS}",
    )


_STRING: Final = TypeRow(
    "string, char, varchar",
    "string",
    {
        **_TEXT,
        ENUM: _TEXT["text"],
        "jsonb": Wire(Form.PLAIN, pa.string(), "jsonb"),
        "uuid": Wire(Form.PLAIN, pa.string(), "uuid"),
        **dict.fromkeys(("hstore", "vector", ANY), Wire(Form.PLAIN, pa.string(), LITERAL)),
    },
    avro="string",
    json_schema="string",
    protobuf="string, enum",
    mariadb=_MARIADB_TEXT,
)
_REFUSED_EVERYWHERE: Final = "cast it to a string or to numbers, or leave it out"

# By the name of the type's class: older versions of Spark lack some of the classes.
TYPE_TABLE: Final[Mapping[str, TypeRow]] = {
    "BooleanType": TypeRow(
        "boolean",
        "true, false",
        {"bool": Wire(Form.PLAIN, pa.bool_())},
        avro="boolean",
        json_schema="boolean",
        protobuf="bool",
        mariadb={"tinyint": Wire(Form.PLAIN, pa.bool_())},
    ),
    "ByteType": _whole("tinyint", 3),
    "ShortType": _whole("smallint", 5),
    "IntegerType": _whole("int", 10),
    "LongType": _whole("bigint", 19, "long"),
    "FloatType": TypeRow(
        "float",
        "number; NaN and infinities as strings",
        {"float4": Wire(Form.PLAIN, pa.float32()), "float8": Wire(Form.PLAIN, pa.float64())},
        avro="float",
        json_schema="number",
        protobuf="float, double",
        mariadb={"float": Wire(Form.PLAIN, pa.float32()), "double": Wire(Form.PLAIN, pa.float64())},
    ),
    "DoubleType": TypeRow(
        "double",
        "number; NaN and infinities as strings",
        {"float8": Wire(Form.PLAIN, pa.float64())},
        avro="double",
        json_schema="number",
        protobuf="double",
        mariadb={"double": Wire(Form.PLAIN, pa.float64())},
    ),
    "DecimalType": TypeRow(
        "decimal(p,s)",
        "number, all digits",
        {"numeric": Wire(Form.PLAIN, pa.decimal128(38, 0))},
        avro="bytes decimal",
        json_schema="number",
        protobuf="string",
        mariadb={"decimal": Wire(Form.PLAIN, pa.decimal128(38, 0))},
    ),
    "StringType": _STRING,
    "CharType": _STRING,
    "VarcharType": _STRING,
    "BinaryType": TypeRow(
        "binary",
        "string, base64",
        {"bytea": Wire(Form.PLAIN, pa.binary())},
        avro="bytes",
        json_schema="string, base64",
        protobuf="bytes",
        mariadb={
            name: Wire(Form.PLAIN, pa.binary())
            for name in ("blob", "varbinary", "binary", "tinyblob", "mediumblob", "longblob")
        },
    ),
    "DateType": TypeRow(
        "date",
        'string, "2013-01-31"',
        {"date": Wire(Form.PLAIN, pa.date32())},
        avro="int date",
        json_schema="string, date",
        protobuf="string",
        mariadb={"date": Wire(Form.PLAIN, pa.date32())},
    ),
    "TimestampType": TypeRow(
        "timestamp",
        'string, UTC, "2013-01-31T23:59:59.123456Z"',
        {"timestamptz": Wire(Form.PLAIN, pa.timestamp("us", "UTC"))},
        advice="use a column of type timestamptz (MariaDB: timestamp), or cast it to timestamp_ntz",
        avro="long timestamp-micros",
        json_schema="string, date-time",
        protobuf="google.protobuf.Timestamp",
        mariadb={"timestamp": Wire(Form.PLAIN, pa.timestamp("us", "UTC"))},
    ),
    "TimestampNTZType": TypeRow(
        "timestamp_ntz",
        'string, "2013-01-31T23:59:59.123456"',
        {"timestamp": Wire(Form.PLAIN, pa.timestamp("us"))},
        advice="use a column of type timestamp without time zone (MariaDB: datetime), or cast it to timestamp",
        avro="long local-timestamp-micros",
        json_schema="string",
        protobuf="string",
        mariadb={"datetime": Wire(Form.PLAIN, pa.timestamp("us"))},
    ),
    "TimeType": TypeRow(
        "time",
        'string, "23:59:59.5", no trailing zeros',
        {"time": Wire(Form.PLAIN, pa.time64("us"))},
        avro="long time-micros",
        json_schema="string",
        protobuf="string",
        mariadb={"time": Wire(Form.PLAIN, pa.time64("us"))},
    ),
    "DayTimeIntervalType": TypeRow(
        "interval day to second",
        "",
        {"interval": Wire(Form.PLAIN, pa.duration("us"))},
        advice="cast it to a string or to a number of seconds, or give the value column yourself",
        protobuf="google.protobuf.Duration",
    ),
    "ArrayType": TypeRow(
        "array<...>",
        "array",
        {**_NESTED, "vector": Wire(Form.PLAIN, pa.list_(pa.float32()), VECTOR)},
        avro="array",
        json_schema="array",
        protobuf="repeated",
        mariadb=_MARIADB_NESTED,
    ),
    "MapType": TypeRow(
        "map<string,...>",
        "object",
        {**_NESTED, "hstore": Wire(Form.PLAIN, pa.map_(pa.string(), pa.string()), LITERAL)},
        advice="make its keys strings",
        avro="map",
        json_schema="object",
        protobuf="map<string, ...>",
        mariadb=_MARIADB_NESTED,
    ),
    "StructType": TypeRow(
        "struct<...>",
        "object",
        _NESTED,
        avro="record",
        json_schema="object",
        protobuf="message",
        mariadb=_MARIADB_NESTED,
    ),
    "VariantType": TypeRow(
        "variant",
        "what it holds",
        _NESTED,
        avro="string",
        json_schema="anything",
        protobuf="string",
        mariadb=_MARIADB_NESTED,
    ),
    "NullType": TypeRow("void", "", advice="cast it to the type it is meant to have"),
    "YearMonthIntervalType": TypeRow("interval year to month", "", advice=_REFUSED_EVERYWHERE),
    "CalendarIntervalType": TypeRow("interval", "", advice=_REFUSED_EVERYWHERE),
    "GeometryType": TypeRow("geometry", "", advice="convert it with ST_AsBinary"),
    "GeographyType": TypeRow("geography", "", advice="convert it with ST_AsBinary"),
    "UserDefinedType": TypeRow("user-defined", "", advice="convert it to the type that it is stored as"),
}


def row_of(data_type: spark.DataType) -> TypeRow:
    """The table's row for a type. A type that is not in the table (of a newer Spark) is refused everywhere."""
    for kind in type(data_type).__mro__:
        if kind.__name__ in TYPE_TABLE:
            return TYPE_TABLE[kind.__name__]
    return TypeRow(data_type.simpleString(), "", advice=_REFUSED_EVERYWHERE)


def wire_for(name: str, data_type: spark.DataType, target: TableColumn, table: Table) -> Wire:
    """How the DataFrame's column ``name`` travels into a column of the table. Refuses one that would change its values."""
    if isinstance(data_type, spark.ArrayType) and target.element_type is not None:
        wire = _array_wire(data_type, target.element_type, table)
    else:
        wire = _wire(data_type, _kind(target), table)
    if wire is None:
        raise ConfigurationError(
            f"column {name!r} of type {data_type.simpleString()} cannot be written into column {target.name!r} of type "
            f"{target.shown_type}",
            next_step=_instead(row_of(data_type), target, table),
        )
    digits = _digits_after_point(data_type)
    if target.scale is not None and digits is not None and digits > target.scale:
        raise ConfigurationError(
            f"column {name!r} of type {data_type.simpleString()} would be rounded by column {target.name!r} of type "
            f"{target.shown_type}",
            next_step=f"cast it to a decimal with {target.scale} digits after the point"
            if target.scale >= 0
            else "write it into a column that keeps its last digits",
        )
    if wire.form is Form.JSON:
        check_json(name, data_type)
    return Wire(wire.form, _exact(data_type, wire.arrow), wire.encoding)


def _kind(target: TableColumn) -> str:
    return ENUM if target.is_enum else target.type_name


def _wire(data_type: spark.DataType, kind: str, table: Table) -> Wire | None:
    wire = table.takes(row_of(data_type)).get(_known(kind, table))
    if wire is None or wire.form is not Form.PLAIN:
        return wire
    if isinstance(data_type, spark.ArrayType):
        return wire if isinstance(data_type.elementType, spark.FloatType) else None
    if isinstance(data_type, spark.MapType):
        return wire if isinstance(data_type.keyType, _TEXTUAL) and isinstance(data_type.valueType, _TEXTUAL) else None
    return wire


_TEXTUAL: Final = (spark.StringType, spark.CharType, spark.VarcharType)


def _known(kind: str, table: Table) -> str:
    return kind if any(kind in table.takes(one) for one in TYPE_TABLE.values()) else ANY


def _array_wire(data_type: spark.ArrayType, element: str, table: Table) -> Wire | None:
    """How an array travels into one whose elements have that type, of as many dimensions as the DataFrame's has."""
    inner, dimensions = data_type.elementType, 1
    while isinstance(inner, spark.ArrayType):
        inner, dimensions = inner.elementType, dimensions + 1
    wire = _wire(inner, element, table)
    if wire is None or wire.form is not Form.PLAIN:
        return None
    arrow = _exact(inner, wire.arrow)
    for _ in range(dimensions):
        arrow = pa.list_(arrow)
    is_binary = dimensions == 1 and not wire.encoding and element in _BINARY_ELEMENTS
    return Wire(Form.PLAIN, arrow, "" if is_binary else LITERAL)


def _instead(row: TypeRow, target: TableColumn, table: Table) -> str:
    """The next step for a column that does not take a type: the types that it takes, if there are any."""
    kind = _known(target.element_type or _kind(target), table)
    wires = [(one, wire) for one in TYPE_TABLE.values() if (wire := table.takes(one).get(kind)) is not None]
    shown = [_shown(one, wire) for one, wire in wires if target.element_type is None or wire.form is Form.PLAIN]
    taken = dict.fromkeys(shown if target.element_type is None else [f"array<{one}>" for one in shown])
    if not taken:
        return (
            f"no type of Spark goes into {target.shown_type}: leave the column out with `columns`, or write into one of "
            "another type, and let the database convert it (a generated column, a trigger)"
        )
    return row.advice if row.advice != _CAST else f"it takes {', '.join(taken)}: cast it"


def _shown(row: TypeRow, wire: Wire) -> str:
    if wire.form is Form.PLAIN and pa.types.is_list(wire.arrow):
        return "array<float>"
    return "map<string,string>" if pa.types.is_map(wire.arrow) else row.name


def _digits_after_point(data_type: spark.DataType) -> int | None:
    """The digits after the point of an exact number, or of an array's elements."""
    if isinstance(data_type, spark.ArrayType):
        return _digits_after_point(data_type.elementType)
    if isinstance(data_type, spark.DecimalType):
        return data_type.scale
    return 0 if isinstance(data_type, spark.IntegralType) else None


def _exact(data_type: spark.DataType, arrow: pa.DataType) -> pa.DataType:
    if isinstance(data_type, spark.DecimalType):
        return pa.decimal128(data_type.precision, data_type.scale)
    return arrow


def check_json(name: str, data_type: spark.DataType) -> None:
    """Refuse a type that has no JSON form, at any depth."""
    for inner in _parts(data_type):
        row = row_of(inner)
        if not row.json or (isinstance(inner, spark.MapType) and not isinstance(inner.keyType, spark.StringType)):
            raise ConfigurationError(
                f"column {name!r} of type {data_type.simpleString()} cannot be put into JSON: {inner.simpleString()}",
                next_step=row.advice,
            )


def _parts(data_type: spark.DataType) -> Iterator[spark.DataType]:
    yield data_type
    if isinstance(data_type, spark.ArrayType):
        yield from _parts(data_type.elementType)
    elif isinstance(data_type, spark.MapType):
        yield from _parts(data_type.valueType)
    elif isinstance(data_type, spark.StructType):
        for inner in data_type.fields:
            yield from _parts(inner.dataType)


# The target table, as the database's catalog describes it.


@dataclass(frozen=True)
class TableColumn:
    """One column of the table.

    `type_name` is the internal name of its type in its database; for a domain, of the base type. `shown_type` is as people
    write it. `scale` counts the digits after the point that a ``numeric`` column, or an array of them, keeps; `longest` the
    characters that a ``varchar`` or ``char`` column of PostgreSQL, or an array of them, keeps; None if it keeps all.
    `element_type` is the internal name of an array's element type, or `ENUM`. A row without a value is refused if
    `must_be_given`. A row that is there keeps its value if it is `set_once`.
    """

    name: str
    type_name: str
    shown_type: str
    is_enum: bool = False
    scale: int | None = None
    longest: int | None = None
    element_type: str | None = None
    must_be_given: bool = False
    generated: bool = False
    set_once: bool = False


@dataclass(frozen=True)
class Table:
    """A table: its exact names, and its columns by name.

    `takes` says by :attr:`TableColumn.type_name` how values of a Spark type travel into columns of its database; `defers`,
    whether a row may leave something to be done at COMMIT.
    """

    schema: str
    name: str
    columns: Mapping[str, TableColumn]
    takes: Callable[[TypeRow], Mapping[str, Wire]] = attrgetter("postgresql")
    defers: bool = False
