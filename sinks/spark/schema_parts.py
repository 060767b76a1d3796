"""A message's key or value that is written with a schema, and what its format's module does. Needs no schema registry.

Every batch imports this chapter; :mod:`dualwrite.sinks.spark.registry` and the modules of the formats need the extra
``schema-registry``, and only a batch with a schema imports them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

import pyarrow as pa
from pyspark.sql import types as spark

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.options import Format

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
    from confluent_kafka.serialization import SerializationContext
    from google.protobuf.descriptor import Descriptor, FileDescriptor


Serialize: TypeAlias = "Callable[[object, SerializationContext], bytes | None]"


@dataclass(frozen=True)
class Part:
    """A message's key or value that is written with a schema. `name` is the default name of its record.

    `columns` has name and type of the DataFrame's columns that it is made of; `whole` says that its only column is the part
    itself rather than a field of a record.
    """

    field: str
    name: str
    columns: tuple[tuple[str, spark.DataType], ...]
    whole: bool


@dataclass(frozen=True)
class Given:
    """The schema that the user or the registry gives for a part; empty if it is derived.

    `schema` is Avro or JSON Schema. For Protobuf, `message` is a full name, and `descriptor` a serialized
    ``FileDescriptorSet``.
    """

    schema: str | None = None
    message: str | None = None
    descriptor: bytes | None = None


@dataclass(frozen=True)
class PartSchema:
    """A part's schema, planned on the driver and shipped to the tasks. Pickles.

    `text` is Avro or JSON Schema; empty for Protobuf. `record` is the record's full name, which subjects may be named after;
    None if it has none. The columns are cast to the types in `arrow`; a value that does not fit fails the task.
    """

    part: Part
    format: Format
    text: str
    record: str | None
    given: Given
    arrow: tuple[pa.DataType, ...]


class FormatModule(Protocol):
    """The functions that every format's module has."""

    def plan(self, part: Part, given: Given) -> PartSchema:
        """Match the part's columns with its schema. Connects to nothing.

        The error for a column that cannot be written with the schema names it and its type.
        """
        ...

    def datums(self, schema: PartSchema, arrays: list[pa.Array]) -> Iterable[object]:
        """The serializer's input, row by row."""
        ...

    def registry_schema(self, schema: PartSchema) -> Schema | None:
        """The schema to register; None if the serializer makes it itself."""
        ...

    def serializer(self, schema: PartSchema, client: SchemaRegistryClient, conf: Mapping[str, object]) -> Serialize:
        """One of confluent-kafka's serializers."""
        ...


_MODULES: Final = {
    Format.AVRO: "avro",
    Format.JSON_SCHEMA: "json_schema",
    Format.PROTOBUF: "protobuf",
}


def module_of(part_format: Format) -> FormatModule:
    """The module of a format that is written with a schema. Refuses one whose packages are not installed here."""
    try:
        found = importlib.import_module(f"dualwrite.sinks.spark.formats.{_MODULES[part_format]}")
    except ImportError as error:
        raise ConfigurationError(
            f"the format {part_format} needs the package {error.name!r}, which is not installed here",
            next_step="pip install 'dualwrite[schema-registry]', on the driver and on the executors",
        ) from error
    return cast("FormatModule", found)


_NATURAL: Final[Mapping[str, pa.DataType]] = {
    "BooleanType": pa.bool_(),
    "ByteType": pa.int8(),
    "ShortType": pa.int16(),
    "IntegerType": pa.int32(),
    "LongType": pa.int64(),
    "FloatType": pa.float32(),
    "DoubleType": pa.float64(),
    "StringType": pa.string(),
    "CharType": pa.string(),
    "VarcharType": pa.string(),
    "BinaryType": pa.binary(),
    "DateType": pa.date32(),
    "TimestampType": pa.timestamp("us", "UTC"),
    "TimestampNTZType": pa.timestamp("us"),
    "TimeType": pa.time64("us"),
    "DayTimeIntervalType": pa.duration("us"),
    "VariantType": pa.struct([("value", pa.binary()), ("metadata", pa.binary())]),
}


def natural_arrow(data_type: spark.DataType) -> pa.DataType:
    """The Arrow type that holds every value of a Spark type."""
    if isinstance(data_type, spark.DecimalType):
        return pa.decimal128(data_type.precision, data_type.scale)
    if isinstance(data_type, spark.ArrayType):
        return pa.list_(natural_arrow(data_type.elementType))
    if isinstance(data_type, spark.MapType):
        return pa.map_(natural_arrow(data_type.keyType), natural_arrow(data_type.valueType))
    if isinstance(data_type, spark.StructType):
        return pa.struct([(inner.name, natural_arrow(inner.dataType)) for inner in data_type.fields])
    return _NATURAL[type(data_type).__name__]


def refused(
    part: Part, column: str, data_type: spark.DataType, why: str, advice: str = "cast it"
) -> ConfigurationError:
    """The error for a column that cannot be written with a schema."""
    return ConfigurationError(
        f"column {column!r} of type {data_type.simpleString()} cannot be put into the message's {part.field}: {why}",
        next_step=advice,
    )


def plain_values(array: pa.Array) -> list[object]:
    """A column's values as Python objects."""
    kind = array.type
    if pa.types.is_string(kind) or (
        not array.null_count and (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_floating(kind))
    ):
        # Through numpy: several times as fast as to_pylist, which creates a scalar object for each value first.
        return cast("list[object]", array.to_numpy(zero_copy_only=False).tolist())
    return cast("list[object]", array.to_pylist())


def rows_of(schema: PartSchema, columns: Iterable[Iterable[object]]) -> Iterable[object]:
    """Columns of values as datums: records by name, or the one column itself."""
    if schema.part.whole:
        [only] = columns
        return only
    names = [name for name, _ in schema.part.columns]
    return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


# Reads Protobuf descriptors as data: from a file written by protoc, or from a generated class. Loads no code.


def descriptor_set(message: object) -> bytes:
    """Return the descriptors of a generated message class, with their imports: for the setting ``descriptor``.

    May be called anywhere; the bytes hold no code and no secret.

    Args:
        message: A class that protoc has generated.

    Raises:
        ConfigurationError: It is no such class.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet  # noqa: PLC0415 - an optional package

    descriptor = getattr(message, "DESCRIPTOR", None)
    if not hasattr(descriptor, "file"):
        raise ConfigurationError(f"{message!r} is not a generated Protobuf message class")
    found = FileDescriptorSet()
    seen: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name not in seen:
            seen.add(file.name)
            for dependency in file.dependencies:
                add(dependency)
            file.CopyToProto(found.file.add())

    add(cast("Descriptor", descriptor).file)
    return cast("bytes", found.SerializeToString())


def read_descriptor(descriptor: str | bytes) -> bytes:
    """Return a descriptor set; read it from its file if a path is given."""
    if isinstance(descriptor, bytes):
        return descriptor
    try:
        return Path(descriptor).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"the descriptor set cannot be read: {error}", next_step="the driver must be able to read that path"
        ) from error
