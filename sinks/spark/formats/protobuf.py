"""Messages in Protocol Buffers: checked against the columns, and built from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import pyarrow as pa
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
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
from dualwrite.sinks.spark.sendable import json_converter, unless_null, variant_json

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

Convert: TypeAlias = Callable[[object], object]

_WHOLE: Final = ("int32", "sint32", "sfixed32", "int64", "sint64", "sfixed64")
# The fields that take a simple Spark type, by the name of its class.
TAKEN: Final[Mapping[str, tuple[str, ...]]] = {
    "BooleanType": ("bool",),
    "ByteType": _WHOLE,
    "ShortType": _WHOLE,
    "IntegerType": _WHOLE,
    "LongType": ("int64", "sint64", "sfixed64"),
    "FloatType": ("float", "double"),
    "DoubleType": ("double",),
    "DecimalType": ("string",),
    "StringType": ("string", "enum"),
    "CharType": ("string", "enum"),
    "VarcharType": ("string", "enum"),
    "BinaryType": ("bytes",),
    "DateType": ("string",),
    "TimestampType": ("google.protobuf.Timestamp",),
    "TimestampNTZType": ("string",),
    "TimeType": ("string",),
    "DayTimeIntervalType": ("google.protobuf.Duration",),
    "VariantType": ("string",),
}

_KINDS: Final = {
    number: name.removeprefix("TYPE_").lower() for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_US: Final = timedelta(microseconds=1)
_MILLION: Final = 1_000_000
_PLAIN: Final = ("BooleanType", "StringType", "CharType", "VarcharType", "FloatType", "DoubleType", "BinaryType")
_PLAIN_TYPES: Final = frozenset({*_PLAIN, "ByteType", "ShortType", "IntegerType", "LongType"})


@lru_cache(maxsize=8)  # called for every batch of rows
def _message(given: Given) -> type[Message]:
    assert given.descriptor is not None
    assert given.message is not None
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(given.descriptor)
        pool = descriptor_pool.DescriptorPool()
        names = {file.name for file in files.file}
        for file in files.file:
            for dependency in file.dependency:
                if dependency not in names and dependency.startswith("google/protobuf/"):
                    _add_known(pool, dependency)
                    names.add(dependency)
            pool.Add(file)
        found = message_factory.GetMessageClass(pool.FindMessageTypeByName(given.message))
        return cast("type[Message]", found)
    except DecodeError as error:
        raise ConfigurationError(
            "the descriptor is not a descriptor set",
            next_step="make it with protoc --include_imports --descriptor_set_out",
        ) from error
    except KeyError as error:
        raise ConfigurationError(
            f"the descriptor set has no message {given.message!r}", next_step="write its full name, with its package"
        ) from error
    except TypeError as error:
        raise ConfigurationError(
            f"the descriptor set is incomplete: {error}", next_step="make it with protoc --include_imports"
        ) from error


def _add_known(pool: descriptor_pool.DescriptorPool, name: str) -> None:
    """Add one of Protobuf's own files, which a descriptor set without imports leaves out."""
    for module in ("timestamp_pb2", "duration_pb2"):
        __import__(f"google.protobuf.{module}")
    own = descriptor_pb2.FileDescriptorProto()
    descriptor_pool.Default().FindFileByName(name).CopyToProto(own)
    pool.Add(own)


def plan(part: Part, given: Given) -> PartSchema:
    """As :class:`FormatModule` has it."""
    descriptor = _message(given).DESCRIPTOR
    _converters(part, descriptor)
    return PartSchema(
        part,
        Format.PROTOBUF,
        "",
        descriptor.full_name,
        given,
        tuple(natural_arrow(data_type) for _, data_type in part.columns),
    )


def _converters(part: Part, descriptor: Descriptor) -> list[Convert]:
    if not part.whole:
        return [convert for _, convert in _fields(part, "", part.columns, descriptor)]
    [(name, data_type)] = part.columns
    if not isinstance(data_type, spark.StructType):
        raise refused(part, name, data_type, "a Protobuf message is a struct", "make it a struct")
    return [unless_null(_struct(part, name, data_type, descriptor))]


def _fields(
    part: Part, column: str, fields: Iterable[tuple[str, spark.DataType]], descriptor: Descriptor
) -> list[tuple[str, Convert]]:
    known = descriptor.fields_by_name
    given = list(fields)
    found = []
    for name, data_type in given:
        path = f"{column}.{name}".lstrip(".")
        if name not in known:
            why = f"the message {descriptor.full_name} has no field of its name"
            raise refused(part, path, data_type, why, "rename it, or leave it out with columns")
        convert = _converter(part, path, data_type, known[name])
        found.append((name, _present(path, convert, known[name])))
    required = [field.full_name for field in known.values() if field.is_required]
    if required:
        raise ConfigurationError(
            f"the field {required[0]} is required, as Protobuf 2 has it", next_step="declare it optional"
        )
    return found


def _present(column: str, convert: Convert, field: FieldDescriptor) -> Convert:
    if field.has_presence:
        return unless_null(convert)

    def made(value: object) -> object:
        if value is None:
            raise ConfigurationError(
                f"a value of column {column!r} is null, and a reader of the field {field.full_name} could not tell",
                next_step="declare the field optional, or fill the column",
            )
        return convert(value)

    return made


def _converter(part: Part, column: str, data_type: spark.DataType, field: FieldDescriptor) -> Convert:
    message = field.message_type
    is_map = message is not None and message.GetOptions().map_entry
    if isinstance(data_type, spark.MapType) and is_map and isinstance(data_type.keyType, spark.StringType):
        entry = message.fields_by_name
        if _kind(entry["key"]) == "string":
            inner = _single(part, column, data_type.valueType, entry["value"])
            return lambda value: {key: inner(item) for key, item in cast("list[tuple[str, object]]", value)}
    elif isinstance(data_type, spark.ArrayType) and field.is_repeated and not is_map:
        element = _single(part, column, data_type.elementType, field)
        return lambda value: [element(item) for item in cast("list[object]", value)]
    elif not field.is_repeated:
        return _single(part, column, data_type, field)
    raise _misfit(part, column, data_type, field)


def _single(part: Part, column: str, data_type: spark.DataType, field: FieldDescriptor) -> Convert:
    kind, name = _kind(field), type(data_type).__name__
    if isinstance(data_type, spark.StructType) and kind == "message":
        return _struct(part, column, data_type, field.message_type)
    shown = field.message_type.full_name if kind == "message" else kind
    if shown not in TAKEN.get(name, ()):
        raise _misfit(part, column, data_type, field)
    if name in _PLAIN_TYPES:
        return _same
    return _SCALARS.get(name) or json_converter(data_type)


def _struct(part: Part, column: str, data_type: spark.StructType, descriptor: Descriptor) -> Convert:
    fields = [(inner.name, inner.dataType) for inner in data_type.fields]
    made = _fields(part, column, fields, descriptor)
    return lambda value: {name: convert(cast("dict[str, object]", value)[name]) for name, convert in made}


def _misfit(part: Part, column: str, data_type: spark.DataType, field: FieldDescriptor) -> ConfigurationError:
    kind = _kind(field)
    shown = f"{'repeated ' if field.is_repeated else ''}{field.message_type.full_name if kind == 'message' else kind}"
    advice = row_of(data_type).advice if type(data_type).__name__ not in TAKEN else "cast it, or change the message"
    return refused(part, column, data_type, f"the field {field.full_name} is {shown}", advice)


def _kind(field: FieldDescriptor) -> str:
    return str(_KINDS[field.type])


def _same(value: object) -> object:
    return value


def _timestamp(value: object) -> object:
    assert isinstance(value, datetime)
    return _seconds((value - _EPOCH) // _US)


def _duration(value: object) -> object:
    assert isinstance(value, timedelta)
    us = value // _US
    if us < 0:  # both parts of a Duration have the same sign
        return {name: -number for name, number in _seconds(-us).items()}
    return _seconds(us)


def _seconds(us: int) -> dict[str, int]:
    seconds, rest = divmod(us, _MILLION)
    return {"seconds": seconds, "nanos": rest * 1000}


_SCALARS: Final[Mapping[str, Convert]] = {
    "TimestampType": _timestamp,
    "DayTimeIntervalType": _duration,
    "DecimalType": str,
    "VariantType": variant_json,
}


def datums(schema: PartSchema, arrays: list[pa.Array]) -> Iterable[object]:
    """As :class:`FormatModule` has it: each row's values by field."""
    converters = _converters(schema.part, _message(schema.given).DESCRIPTOR)
    columns = [map(convert, plain_values(array)) for array, convert in zip(arrays, converters, strict=True)]
    return rows_of(schema, columns)


def registry_schema(schema: PartSchema) -> None:
    """As :class:`FormatModule` has it: the serializer registers the message's file and its imports."""
    del schema


def serializer(schema: PartSchema, client: SchemaRegistryClient, conf: Mapping[str, object]) -> Serialize:
    """As :class:`FormatModule` has it."""
    message = _message(schema.given)
    made = cast("Serialize", ProtobufSerializer(cast("Message", message), client, conf=dict(conf)))
    return lambda row, context: None if row is None else made(message(**cast("dict[str, object]", row)), context)
