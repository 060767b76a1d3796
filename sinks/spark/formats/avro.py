"""Avro: a schema derived from the columns' types, or a given one that they must match; rows in the form that fastavro takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import pyarrow as pa
from confluent_kafka.schema_registry import Schema
from confluent_kafka.schema_registry.avro import AvroSerializer
from fastavro.schema import SchemaParseException, UnknownType, expand_schema
from pyspark.sql import types as spark

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.column_types import row_of
from dualwrite.sinks.spark.options import Format
from dualwrite.sinks.spark.schema_parts import (
    Given,
    Part,
    PartSchema,
    Serialize,
    natural_arrow,
    plain_values,
    refused,
    rows_of,
)
from dualwrite.sinks.spark.sendable import unless_null, variant_json

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

Json: TypeAlias = object
Convert: TypeAlias = Callable[[object], object]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_NAME: Final = re.compile(r"[^A-Za-z0-9_]")

# Avro type and logical type of a simple Spark type, by the name of its class.
DERIVED: Final[Mapping[str, str]] = {
    "BooleanType": "boolean",
    "ByteType": "int",
    "ShortType": "int",
    "IntegerType": "int",
    "LongType": "long",
    "FloatType": "float",
    "DoubleType": "double",
    "StringType": "string",
    "CharType": "string",
    "VarcharType": "string",
    "BinaryType": "bytes",
    "DateType": "int date",
    "TimestampType": "long timestamp-micros",
    "TimestampNTZType": "long local-timestamp-micros",
    "TimeType": "long time-micros",
    "VariantType": "string",
}

# The types that a given schema may have instead, and the Arrow type whose cast fails for values that do not fit.
_ALSO: Final[Mapping[str, Mapping[str, pa.DataType | None]]] = {
    "ByteType": {"long": None},
    "ShortType": {"long": None},
    "IntegerType": {"long": None},
    "FloatType": {"double": None},
    "StringType": {"enum": None, "string uuid": None},
    "TimestampType": {"long timestamp-millis": pa.timestamp("ms", "UTC")},
    "TimestampNTZType": {"long local-timestamp-millis": pa.timestamp("ms")},
    "TimeType": {"int time-millis": pa.time32("ms")},
}

_TEMPORAL: Final = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_time)


def plan(part: Part, given: Given) -> PartSchema:
    """As :class:`FormatModule` has it."""
    text = given.schema if given.schema is not None else json.dumps(_derived_part(part))
    try:
        parsed = json.loads(text)
        if isinstance(parsed, str):
            # confluent-kafka's serializer does not take a schema that is only a name.
            parsed = {"type": parsed}
            text = json.dumps(parsed)
        schema = expand_schema(parsed)
    except (ValueError, SchemaParseException, UnknownType) as error:
        raise ConfigurationError(f"the Avro schema of the message's {part.field} cannot be used: {error!r}") from error
    if part.whole:
        [(name, data_type)] = part.columns
        if isinstance(data_type, spark.DecimalType):
            raise refused(part, name, data_type, "a decimal by itself has no Avro form that all clients read")
        arrow: tuple[pa.DataType, ...] = (_fit(part, name, data_type, schema),)
    else:
        if not isinstance(schema, dict) or schema.get("type") != "record":
            raise ConfigurationError(f"the Avro schema of the message's {part.field} is not a record")
        arrow = _fit_fields(part, "", part.columns, schema)
    record = schema.get("name") if isinstance(schema, dict) and schema.get("type") == "record" else None
    return PartSchema(part, Format.AVRO, text, record, given, arrow)


def _derived_part(part: Part) -> Json:
    name = _NOT_NAME.sub("_", part.name)
    if part.whole:
        [(column, data_type)] = part.columns
        return _derived(part, column, data_type, name, "")
    return _record(part, "", part.columns, name, "")


def _record(part: Part, column: str, fields: Iterable[tuple[str, spark.DataType]], name: str, space: str) -> Json:
    inner_space = f"{space}.{name}".lstrip(".")
    made = []
    for field, data_type in fields:
        path = f"{column}.{field}".lstrip(".")
        if not _NAME.fullmatch(field):
            raise refused(part, path, data_type, "Avro does not take its name", "rename it, or use another format")
        made.append(
            {"name": field, "type": ["null", _derived(part, path, data_type, field, inner_space)], "default": None}
        )
    # Named after its place, so that no two records have the same name.
    return {"type": "record", "name": name, **({"namespace": space} if space else {}), "fields": made}


def _derived(part: Part, column: str, data_type: spark.DataType, name: str, space: str) -> Json:
    if isinstance(data_type, spark.DecimalType):
        return {
            "type": "bytes",
            "logicalType": "decimal",
            "precision": data_type.precision,
            "scale": data_type.scale,
        }
    if isinstance(data_type, spark.ArrayType):
        return {"type": "array", "items": ["null", _derived(part, column, data_type.elementType, name, space)]}
    if isinstance(data_type, spark.MapType) and isinstance(data_type.keyType, spark.StringType):
        return {"type": "map", "values": ["null", _derived(part, column, data_type.valueType, name, space)]}
    if isinstance(data_type, spark.StructType):
        return _record(part, column, [(inner.name, inner.dataType) for inner in data_type.fields], name, space)
    kind, _, logical = DERIVED.get(type(data_type).__name__, "").partition(" ")
    if not kind:
        raise refused(part, column, data_type, "it has no Avro form", row_of(data_type).advice)
    return {"type": kind, "logicalType": logical} if logical else kind


def _fit(part: Part, column: str, data_type: spark.DataType, schema: Json) -> pa.DataType:
    if isinstance(schema, list):
        others = [branch for branch in schema if branch != "null"]
        if len(others) != 1:
            raise refused(part, column, data_type, "the Avro schema has a union of several types for it")
        return _fit(part, column, data_type, others[0])
    described = schema if isinstance(schema, dict) else {"type": schema}
    kind = described.get("type")
    if isinstance(kind, (list, dict)):
        return _fit(part, column, data_type, kind)
    if isinstance(data_type, spark.ArrayType) and kind == "array":
        return pa.list_(_fit(part, column, data_type.elementType, described["items"]))
    if isinstance(data_type, spark.MapType) and isinstance(data_type.keyType, spark.StringType) and kind == "map":
        return pa.map_(pa.string(), _fit(part, column, data_type.valueType, described["values"]))
    if isinstance(data_type, spark.StructType) and kind == "record":
        fields = tuple((inner.name, inner.dataType) for inner in data_type.fields)
        types = _fit_fields(part, column, fields, described)
        return pa.struct([(name, arrow) for (name, _), arrow in zip(fields, types, strict=True)])
    return _fit_simple(part, column, data_type, described)


def _fit_simple(part: Part, column: str, data_type: spark.DataType, schema: Mapping[str, Json]) -> pa.DataType:
    logical = schema.get("logicalType", "")
    if isinstance(data_type, spark.DecimalType) and logical == "decimal":
        precision, scale = cast("int", schema["precision"]), cast("int", schema.get("scale", 0))
        if scale >= data_type.scale and precision - scale >= data_type.precision - data_type.scale:
            return pa.decimal128(precision, scale)
    name, shown = type(data_type).__name__, f"{schema.get('type')} {logical}".strip()
    if shown == DERIVED.get(name):
        return natural_arrow(data_type)
    if shown in _ALSO.get(name, {}):
        return _ALSO[name][shown] or natural_arrow(data_type)
    raise refused(part, column, data_type, f"the Avro schema has {shown!r} for it")


def _fit_fields(
    part: Part, column: str, fields: Iterable[tuple[str, spark.DataType]], schema: Mapping[str, Json]
) -> tuple[pa.DataType, ...]:
    known = {field["name"]: field for field in cast("list[dict[str, Json]]", schema["fields"])}
    found = []
    given = list(fields)
    for name, data_type in given:
        path = f"{column}.{name}".lstrip(".")
        if name not in known:
            raise refused(part, path, data_type, "the Avro schema has no such field", "leave it out with columns")
        found.append(_fit(part, path, data_type, known[name]["type"]))
    missing = [name for name, field in known.items() if "default" not in field and name not in dict(given)]
    if missing:
        raise ConfigurationError(
            f"the Avro schema of the message's {part.field} has the field {missing[0]!r} without a default, and no column "
            "goes into it",
            next_step="add the column, or give the field a default",
        )
    return tuple(found)


def datums(schema: PartSchema, arrays: list[pa.Array]) -> Iterable[object]:
    """As :class:`FormatModule` has it."""
    types = [data_type for _, data_type in schema.part.columns]
    return rows_of(schema, [_values(array, data_type) for array, data_type in zip(arrays, types, strict=True)])


def _values(array: pa.Array, data_type: spark.DataType) -> Iterable[object]:
    if any(is_temporal(array.type) for is_temporal in _TEMPORAL):
        # fastavro takes the numbers as they are: do not convert them to dates and times first.
        return plain_values(array.view(pa.int32() if array.type.bit_width == 32 else pa.int64()))  # noqa: PLR2004 - bits
    convert = _converter(data_type)
    return plain_values(array) if convert is None else map(convert, array.to_pylist())


def _converter(data_type: spark.DataType) -> Convert | None:
    """The function that turns a value of Arrow's into one of fastavro's; None if they are the same."""
    if isinstance(data_type, spark.VariantType):
        return unless_null(variant_json)
    if isinstance(data_type, spark.ArrayType):
        element = _converter(data_type.elementType)
        return element and unless_null(lambda value: [element(item) for item in cast("list[object]", value)])
    if isinstance(data_type, spark.MapType):
        inner = _converter(data_type.valueType) or (lambda value: value)
        return unless_null(lambda value: {key: inner(item) for key, item in cast("list[tuple[str, object]]", value)})
    if isinstance(data_type, spark.StructType):
        parts = {field.name: _converter(field.dataType) for field in data_type.fields}
        made = {name: convert for name, convert in parts.items() if convert is not None}
        if made:
            return unless_null(
                lambda value: {
                    **cast("dict[str, object]", value),
                    **{name: convert(cast("dict[str, object]", value)[name]) for name, convert in made.items()},
                }
            )
    return None


def registry_schema(schema: PartSchema) -> Schema:
    """As :class:`FormatModule` has it."""
    return Schema(schema.text, schema_type="AVRO")


def serializer(schema: PartSchema, client: SchemaRegistryClient, conf: Mapping[str, object]) -> Serialize:
    """As :class:`FormatModule` has it."""
    return cast("Serialize", AvroSerializer(client, registry_schema(schema), conf=dict(conf)))
