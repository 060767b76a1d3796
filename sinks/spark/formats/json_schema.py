"""JSON Schema: a schema derived from the columns' types, or a given one that validates each row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka.schema_registry import Schema
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from jsonschema import SchemaError
from jsonschema.validators import validator_for
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
from dualwrite.sinks.spark.sendable import json_converter, variant_json

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

Json: TypeAlias = object

# The JSON Schema of a simple Spark type, by the name of its class.
DERIVED: Final[Mapping[str, Mapping[str, str]]] = {
    "BooleanType": {"type": "boolean"},
    "ByteType": {"type": "integer"},
    "ShortType": {"type": "integer"},
    "IntegerType": {"type": "integer"},
    "LongType": {"type": "integer"},
    "FloatType": {"type": "number"},
    "DoubleType": {"type": "number"},
    "DecimalType": {"type": "number"},
    "StringType": {"type": "string"},
    "CharType": {"type": "string"},
    "VarcharType": {"type": "string"},
    "BinaryType": {"type": "string", "contentEncoding": "base64"},
    "DateType": {"type": "string", "format": "date"},
    "TimestampType": {"type": "string", "format": "date-time"},
    "TimestampNTZType": {"type": "string"},
    "TimeType": {"type": "string"},
    "VariantType": {},
}

_READY: Final = (spark.BooleanType, spark.IntegralType, spark.StringType)


def plan(part: Part, given: Given) -> PartSchema:
    """As :class:`FormatModule` has it."""
    derived = [_derived(part, name, data_type) for name, data_type in part.columns]
    if given.schema is None:
        found = _root(part, derived)
        text = json.dumps(found)
    else:
        text = given.schema
        found = _checked(part, text)
        if not part.whole:
            _require_properties(part, derived, found)
    title = found.get("title")
    return PartSchema(
        part,
        Format.JSON_SCHEMA,
        text,
        title if isinstance(title, str) else None,
        given,
        tuple(natural_arrow(data_type) for _, data_type in part.columns),
    )


def _root(part: Part, derived: list[dict[str, Json]]) -> dict[str, Json]:
    head: dict[str, Json] = {"$schema": "http://json-schema.org/draft-07/schema#", "title": part.name}
    if part.whole:
        return head | derived[0]
    return head | _object(zip((name for name, _ in part.columns), derived, strict=True))


def _object(properties: Iterable[tuple[str, dict[str, Json]]]) -> dict[str, Json]:
    # Closed: a registry refuses new properties in an open schema, because older rows may already have them with another type.
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _nullable(inner) for name, inner in properties},
    }


def _nullable(schema: dict[str, Json]) -> dict[str, Json]:
    return {**schema, "type": [schema["type"], "null"]} if schema else schema


def _derived(part: Part, column: str, data_type: spark.DataType) -> dict[str, Json]:
    if isinstance(data_type, spark.ArrayType):
        return {"type": "array", "items": _nullable(_derived(part, column, data_type.elementType))}
    if isinstance(data_type, spark.MapType) and isinstance(data_type.keyType, spark.StringType):
        values = _nullable(_derived(part, column, data_type.valueType))
        return {"type": "object", "additionalProperties": values or True}
    if isinstance(data_type, spark.StructType):
        return _object(
            (inner.name, _derived(part, f"{column}.{inner.name}", inner.dataType)) for inner in data_type.fields
        )
    found = DERIVED.get(type(data_type).__name__)
    if found is None:
        raise refused(part, column, data_type, "it has no JSON form", row_of(data_type).advice)
    return dict(found)


def _checked(part: Part, text: str) -> dict[str, Json]:
    what = f"the JSON Schema of the message's {part.field}"
    try:
        found = json.loads(text)
        validator_for(found).check_schema(found)
    except (ValueError, SchemaError) as error:
        raise ConfigurationError(f"{what} cannot be used: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{what} is not an object")
    return found


def _require_properties(part: Part, derived: list[dict[str, Json]], schema: Mapping[str, Json]) -> None:
    """Check names and types only; the validator later checks the rows one by one."""
    properties = cast("dict[str, Json]", schema.get("properties", {}))
    for (name, data_type), ours in zip(part.columns, derived, strict=True):
        if name not in properties:
            if schema.get("additionalProperties") is False:
                raise refused(part, name, data_type, "the schema has no such property", "leave it out with columns")
            continue
        wanted = properties[name].get("type") if isinstance(properties[name], dict) else None  # type: ignore[attr-defined]
        allowed = wanted if isinstance(wanted, list) else [wanted]
        if wanted is not None and ours and not {ours["type"], *_WIDER.get(str(ours["type"]), ())} & set(allowed):
            raise refused(part, name, data_type, f"the schema has {wanted!r} for it")
    missing = set(cast("list[str]", schema.get("required", []))) - {name for name, _ in part.columns}
    if missing:
        raise ConfigurationError(
            f"the JSON Schema of the message's {part.field} requires {min(missing)!r}, and no column goes into it"
        )


_WIDER: Final = {"integer": ("number",)}


def datums(schema: PartSchema, arrays: list[pa.Array]) -> Iterable[object]:
    """As :class:`FormatModule` has it."""
    columns = []
    for (name, data_type), array in zip(schema.part.columns, arrays, strict=True):
        if not _all_finite(array):
            raise ConfigurationError(
                f"a value of column {name!r} is NaN or infinite, and JSON Schema has no such number",
                next_step="make it null, or cast the column to a string",
            )
        columns.append(_values(array, data_type))
    return rows_of(schema, columns)


def _values(array: pa.Array, data_type: spark.DataType) -> Iterable[object]:
    if isinstance(data_type, _READY):
        return plain_values(array)
    return map(json_converter(data_type, _SCALARS), array.to_pylist())


_SCALARS: Final = {
    "DecimalType": lambda value: value,  # the validator accepts decimals as numbers
    "VariantType": lambda value: json.loads(variant_json(value)),
}


def _all_finite(array: pa.Array) -> bool:
    kind = array.type
    if pa.types.is_floating(kind):
        return pc.all(pc.is_finite(array)).as_py() is not False
    if pa.types.is_list(kind):
        return _all_finite(array.flatten())
    if pa.types.is_map(kind):
        return _all_finite(array.items)
    if pa.types.is_struct(kind):
        return all(_all_finite(inner) for inner in array.flatten())
    return True


def _encode(value: object) -> bytes:
    return orjson.dumps(value, default=_decimal)


def _decimal(value: object) -> object:
    assert isinstance(value, Decimal)
    return orjson.Fragment(str(value))


def registry_schema(schema: PartSchema) -> Schema:
    """As :class:`FormatModule` has it."""
    return Schema(schema.text, schema_type="JSON")


def serializer(schema: PartSchema, client: SchemaRegistryClient, conf: Mapping[str, object]) -> Serialize:
    """As :class:`FormatModule` has it. Validates only with a given schema: rows always match a derived one."""
    made = JSONSerializer(
        registry_schema(schema),
        client,
        conf={**conf, "validate": schema.given.schema is not None},
        json_encode=_encode,
    )
    return cast("Serialize", made)
