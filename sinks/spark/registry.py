"""The schema registry: the driver registers schemas before anything is written, and ships their ids to the tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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

from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.sinks.spark.options import Format
from dualwrite.sinks.spark.schema_parts import Given, module_of

if TYPE_CHECKING:
    from dualwrite.sinks.spark.options import RegistrySettings
    from dualwrite.sinks.spark.schema_parts import PartSchema, Serialize

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
