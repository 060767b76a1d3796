"""The schema registry: the driver registers schemas before anything is written, and ships their ids to the tasks."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

import pyarrow as pa
from confluent_kafka.schema_registry import (
    RegisteredSchema,
    Schema,
    SchemaRegistryClient,
    SchemaRegistryError,
    record_subject_name_strategy,
    topic_record_subject_name_strategy,
    topic_subject_name_strategy,
)
from confluent_kafka.schema_registry.error import OAuthTokenError
from confluent_kafka.serialization import MessageField, SerializationContext
from pyspark.sql import types as spark

from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.sinks.spark.options import Format

if TYPE_CHECKING:
    from dualwrite.sinks.spark.options import RegistrySettings


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


logger = logging.getLogger(__name__)

_STRATEGIES: Final = {
    "topic": topic_subject_name_strategy,
    "record": record_subject_name_strategy,
    "topic_record": topic_record_subject_name_strategy,
}
_KINDS: Final = {Format.AVRO: "AVRO", Format.JSON_SCHEMA: "JSON", Format.PROTOBUF: "PROTOBUF"}
_CLIENTS: Final = frozenset({"httpx", "httpx2", "httpcore", "httpcore2"})
_NOT_FOUND: Final = 404
_BUSY: Final = frozenset({408, 429})
_SERVER: Final = 500


@dataclass(frozen=True)
class Registered:
    """A schema that the driver has found in the registry, or registered there, with its text as sent to the registry.

    Its id is part of every message. The version is its number within the subject, if the registry returned one.
    """

    subject: str
    text: str
    schema_id: int
    version: int | None


class _Client(SchemaRegistryClient):
    """Asks the registry only for schemas that are not known yet, and remembers the answers."""

    def __init__(self, conf: dict[str, object], known: Iterable[Registered] = ()) -> None:
        super().__init__(conf)
        self.known = {(one.subject, one.text): one for one in known}

    def register_schema_full_response(
        self,
        subject_name: str,
        schema: Schema,
        normalize_schemas: bool = False,  # noqa: FBT001, FBT002 - confluent-kafka's signature
    ) -> RegisteredSchema:
        found = super().register_schema_full_response(subject_name, schema, normalize_schemas)
        self._remember(subject_name, schema, found)
        return found

    def lookup_schema(
        self,
        subject_name: str,
        schema: Schema,
        normalize_schemas: bool = False,  # noqa: FBT001, FBT002 - confluent-kafka's signature
        fmt: str | None = None,
        deleted: bool = False,  # noqa: FBT001, FBT002 - confluent-kafka's signature
    ) -> RegisteredSchema:
        one = self.known.get((subject_name, str(schema.schema_str)))
        # The answer to a registration may lack the version, which references need.
        if one is not None and one.version is not None:
            return RegisteredSchema(
                subject=subject_name, version=one.version, schema_id=one.schema_id, guid=None, schema=schema
            )
        found = super().lookup_schema(subject_name, schema, normalize_schemas, fmt, deleted)
        self._remember(subject_name, schema, found)
        return found

    def _remember(self, subject: str, schema: Schema, found: RegisteredSchema) -> None:
        assert found.schema_id is not None
        text = str(schema.schema_str)
        self.known[subject, text] = Registered(subject, text, found.schema_id, found.version)


@contextmanager
def _client(settings: RegistrySettings, known: Iterable[Registered] = ()) -> Generator[_Client, None, None]:
    try:
        client = _Client(dict(settings.client), known)
    except (ValueError, TypeError, OSError) as error:
        # Without its cause and its message: they may repeat the settings.
        raise ConfigurationError(
            f"the schema registry's settings do not fit together: {type(error).__name__}",
            next_step="check the files that they name, and what basic.auth.user.info or bearer.auth.* need",
        ) from None
    try:
        yield client
    finally:
        client.close()


@contextmanager
def _errors_mapped() -> Generator[None, None, None]:
    try:
        yield
    except SchemaRegistryError as error:
        if error.http_status_code >= _SERVER or error.http_status_code in _BUSY:
            raise Unavailable(f"the schema registry returned an unexpected answer: {error}") from error
        raise ConfigurationError(
            f"the schema registry refuses: {error}",
            next_step=_advice(error.http_status_code),
        ) from error
    except OAuthTokenError:
        # Without its cause and its message: they may repeat the request to the token's server.
        raise Unavailable("the schema registry's token could not be obtained") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENTS:
            raise
        raise Unavailable(f"the schema registry does not answer: {type(error).__name__}: {error}") from error


def _advice(status: int) -> str:
    if status == _NOT_FOUND:
        return (
            "register the schema under that subject; with a topic column, name its topics in schema.registry.topics, and the "
            "driver does it"
        )
    if status in {401, 403}:
        return "check the rights, and schema.registry.basic.auth.user.info"
    return "change the columns so that the schema fits the subject's earlier ones, or its compatibility level"


def latest(settings: RegistrySettings, field: str, part_format: Format, topic: str) -> Given:
    """The latest schema of the part's subject. Refuses another format, and features that this library does not support."""
    if part_format is Format.PROTOBUF or settings.strategy != "topic":
        raise ConfigurationError(
            "use.latest.version is for avro and jsonschema with the subject name strategy topic: a Protobuf message is "
            "described by its descriptor, and a record's name is not known before its schema"
        )
    subject = f"{topic}-{field}"
    with _client(settings) as client, _errors_mapped():
        found = client.get_latest_version(subject).schema
    if (found.schema_type or "AVRO") != _KINDS[part_format]:
        raise ConfigurationError(f"the latest schema of {subject!r} is {found.schema_type}, not {part_format}")
    if found.rule_set is not None or found.references:
        raise ConfigurationError(
            f"the latest schema of {subject!r} has rules, or refers to others: this library carries out neither",
            next_step="give a schema without them",
        )
    return Given(schema=found.schema_str)


def registered(settings: RegistrySettings, schema: PartSchema, topics: Iterable[str]) -> tuple[Registered, ...]:
    """Register a part's schema under the subject of each topic, or find it there. Durable there on return."""
    with _client(settings) as client, _errors_mapped():
        for topic in topics:
            _find(client, settings, schema, topic, register=settings.auto_register)
    found = tuple(client.known.values())
    for one in found:
        logger.info("schema %d, version %s of %r", one.schema_id, one.version, one.subject)
    return found


@contextmanager
def task_registry(settings: RegistrySettings, known: Iterable[Registered]) -> Generator[TaskRegistry, None, None]:
    """The registry for one task's serializers; closed when the block ends."""
    with _client(settings, known) as client:
        yield TaskRegistry(client, settings)


class TaskRegistry:
    """Creates serializers that know the driver's ids. Registers nothing."""

    def __init__(self, client: _Client, settings: RegistrySettings) -> None:
        self._client = client
        self._settings = settings

    def serializer(self, schema: PartSchema, topic: str) -> Callable[[object], bytes | None]:
        """The serializer of a part's rows for a topic. Asks the registry only for schemas that the driver did not look up."""
        with _errors_mapped():
            serialize = _find(self._client, self._settings, schema, topic, register=False)
        context = _context(schema, topic)
        return lambda row: serialize(row, context)


def _context(schema: PartSchema, topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField(schema.part.field))


def _find(client: _Client, settings: RegistrySettings, schema: PartSchema, topic: str, *, register: bool) -> Serialize:
    """Find the schema under the topic's subject, or register it there first. Returns the serializer, which knows the id."""
    context = _context(schema, topic)
    subject = _STRATEGIES[settings.strategy](context, schema.record)
    if subject is None:
        raise ConfigurationError(
            f"the schema of the message's {schema.part.field} has no name, and subject.name.strategy names subjects by it",
            next_step="use the strategy topic",
        )
    module = module_of(schema.format)
    content = module.registry_schema(schema)
    conf = {"normalize.schemas": settings.normalize, "subject.name.strategy": _STRATEGIES[settings.strategy]}
    if content is None:
        # With its first message, this serializer registers the message's file and those that it imports.
        module.serializer(schema, client, {**conf, "auto.register.schemas": register})({}, context)
    elif register:
        client.register_schema_full_response(subject, content, settings.normalize)
    serialize = module.serializer(schema, client, {**conf, "auto.register.schemas": False})
    if content is None:
        serialize({}, context)
    else:
        client.lookup_schema(subject, content, settings.normalize)
    return serialize
