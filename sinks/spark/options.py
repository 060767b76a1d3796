"""The settings of a sink: by keyword, by Spark's options, and those of a schema registry.

A name that is close to a known one is suggested; no setting is ignored silently.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypedDict, get_args, get_origin, get_type_hints
from urllib.parse import quote, unquote

from sqlalchemy import exc, make_url
from sqlalchemy.exc import ArgumentError

from dualwrite.errors import ConfigurationError, nearest
from dualwrite.kafka.config import ENGINE, EngineName, KafkaConfig, wanted_engine
from dualwrite.protocol.values import check_seconds, pool_of_sink, stream_name
from dualwrite.stores.sql.access import shown_url
from dualwrite.stores.sql.tables import check_name

if TYPE_CHECKING:
    from sqlalchemy import URL

# The formats of messages' keys and values.


class Format(str, Enum):
    """How a message's key or value is written."""

    JSON = "json"
    RAW = "raw"
    AVRO = "avro"
    JSON_SCHEMA = "jsonschema"
    PROTOBUF = "protobuf"

    def __str__(self) -> str:
        return self.value


REGISTERED: Final = frozenset({Format.AVRO, Format.JSON_SCHEMA, Format.PROTOBUF})
"""The formats that are written with a schema from the registry."""
KEY_FORMATS: Final = tuple(str(item) for item in Format if item is not Format.JSON)


_LONGEST_SINK_NAME: Final = 200
_REFERENCE: Final = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_DEFAULTS: Final = {
    # librdkafka's default of 1 GB suits one producer; a machine runs many tasks.
    "queue.buffering.max.kbytes": 64 * 1024,
    # Like Java's producers, including Spark's own: librdkafka's default would put the same key into another partition.
    "partitioner": "murmur2_random",
}
_FORMATS: Final = tuple(str(item) for item in Format)
_DRIVERS: Final = frozenset({("postgresql", "psycopg"), ("mysql", "pymysql"), ("mariadb", "pymysql")})


_KINDS: Final[Mapping[type, str]] = {
    str: "text", bytes: "bytes", int: "a whole number", float: "a number", bool: "True or False", Mapping: "a mapping",
    Sequence: "a list of names",
}  # fmt: skip

_QUARANTINE_LIMIT: Final = 1000
DATABASE_LEGS: Final = ("auto", "staging", "prepared")
ON_CONFLICT: Final = ("update", "nothing", "newer")
ON_DELETE: Final = ("tombstone", "record")
UPSERT: Final = "upsert"
DELETE: Final = "delete"
OPERATIONS: Final[Mapping[str, str]] = {"c": UPSERT, "r": UPSERT, "u": UPSERT, "d": DELETE}
"""Debezium's letters: create, read by a snapshot, update, delete."""


class _Needed(TypedDict):
    sink: str
    kafka: Mapping[str, object]
    url: str
    table: str


class SinkSettings(_Needed, total=False):
    """The keyword arguments of every sink. `SinkOptions` explains each of them."""

    topic: str | None
    topic_column: str | None
    key: str | None
    value: str | None
    headers: str | None
    partition: str | None
    timestamp: str | None
    key_format: str
    value_format: str | None
    key_schema: str | None
    value_schema: str | None
    key_message: str | None
    value_message: str | None
    descriptor: str | bytes | None
    schema_registry: Mapping[str, object] | None
    columns: Mapping[str, str] | Sequence[str] | None
    upsert_keys: Sequence[str] | None
    upsert_columns: Sequence[str] | None
    on_conflict: str
    order_column: str | None
    op_column: str | None
    op_values: Mapping[str, str] | None
    on_delete: str
    schema: str | None
    max_slots: int
    lease_s: float
    timeout_s: float
    margin_s: float
    progress_s: float
    decide_within_s: float
    database_leg: str
    keep_slots: bool
    producer_engine: EngineName
    allow_nondeterministic: bool
    unit_topic: str | None
    quarantine_table: str | None
    quarantine_topic: str | None
    quarantine_limit: int | None
    lineage_namespace: str | None
    lineage_kafka: str | None


TARGET_SETTINGS: Final = (
    "table", "topic", "topic_column", "key", "value", "headers", "partition", "timestamp", "key_format", "value_format",
    "key_schema", "value_schema", "key_message", "value_message", "descriptor", "columns", "upsert_keys",
    "upsert_columns", "on_conflict", "order_column", "op_column", "op_values", "on_delete",
)  # fmt: skip
"""The settings of which each target of a batch may have its own."""


@dataclass(frozen=True, repr=False)
class SinkOptions:
    """One sink's settings. Its ``repr`` shows no secret, and neither do this library's errors and log lines.

    It pickles, because the tasks connect too. The pickle masks values that may be secret, so that they cannot be read off a
    dump; this is not encryption. To keep a secret out of it altogether, write ``${env:NAME}`` in ``url`` or in a value of
    ``kafka``: the driver and each executor then read it from their own environment when they connect.

    Args:
        sink: Name of the sink: stable over restarts, unique among jobs that write at the same time. Sink, batch id and
            partition together identify what is already written. Kafka's transactional ids begin with it, for ACLs.
        kafka: librdkafka configuration; ``bootstrap.servers`` at least. Keys that run code are refused.
        url: SQLAlchemy URL of the database: ``postgresql+psycopg://...``, or ``mysql+pymysql://...`` for MariaDB and MySQL.
        table: The table to write into, as in SQL: ``flights``, ``sales.orders``, ``"Order"``. It must exist.
        topic: The topic of all messages; it must exist. Either this or ``topic_column``.
        topic_column: Column with each message's topic.
        key: Column with the message's key: text, binary, or whole numbers (their decimal text).
        value: Column with the message's value, text or binary. By default the value is the JSON object of the columns that
            go into the table, by their DataFrame names.
        headers: Column with headers: ``map<string,string|binary>`` or ``array<struct<key:string,value:string|binary>>``.
        partition: Column with the partition number.
        timestamp: Column of type ``timestamp`` with the message's time, in ms in Kafka.
        key_format: ``raw``, or with a schema registry ``avro``, ``jsonschema`` or ``protobuf``. The key is the column ``key``.
        value_format: ``json`` (the default), ``raw`` (the default if ``value`` is given), ``avro``, ``jsonschema`` or
            ``protobuf``. The last three write the columns that go into the table as one record, or the column ``value``.
        key_schema: Avro or JSON Schema of the key, as text. By default derived from the column's type.
        value_schema: Avro or JSON Schema of the value, as text. By default derived from the columns' types.
        key_message: Full name of the key's Protobuf message.
        value_message: Full name of the value's Protobuf message.
        descriptor: For Protobuf: the path of a descriptor set written by ``protoc --include_imports --descriptor_set_out``,
            read on the driver; or its bytes, which :func:`descriptor_set` makes from a generated class.
        schema_registry: ``url`` at least; see the documentation. Settings that run code are refused.
        columns: The columns that go into the table: a list of names, or a mapping from DataFrame column to table column. By
            default all that are not named by ``topic_column``, ``headers``, ``partition``, ``timestamp``, or ``value``,
            into columns of the same name. ``op_column`` and ``order_column`` go into the table if it has such a column.
        upsert_keys: The table's key columns: a row whose key is in the table replaces that row. They must be the columns of a
            primary key or unique constraint.
        upsert_columns: The table's columns that an upsert replaces in a row that is there; by default all that are written.
        on_conflict: What happens to a row whose key is in the table. ``update`` replaces the row there; ``nothing`` leaves it
            as it is; ``newer`` replaces it if the column `order_column`, which goes into the table, is greater than there, or
            null there.
        order_column: Column with a whole number, timestamp or date that orders rows of the same key. A key may then occur more
            than once in a batch: the table takes the row with the greatest value, and of equal ones the last. Null counts as
            the least. Without it, a batch that contains a key twice is refused. The topic gets a message for every row, in the
            order of the rows.
        op_column: Column with the operation of each row: the rows are change data, which insert, update and delete rows of the
            table. Needs `upsert_keys` and `order_column`.
        op_values: The operations by the texts in `op_column`, each ``upsert`` or ``delete``. By default Debezium's letters:
            ``c``, ``r`` and ``u`` upsert, ``d`` deletes. A row with another text fails its partition.
        on_delete: The message of a row that deletes. ``tombstone``: one without a value. ``record``: one with the row's value;
            values that are made of columns then include `op_column`, in every message.
        schema: The database schema of the library's own tables, if it is not the default one.
        max_slots: The most tasks of this sink that write at the same time.
        lease_s: How long a dead task's slot stays taken, in seconds.
        timeout_s: Limits settling, claiming, and the ending of each dual write, in seconds.
        margin_s: The time that must be left of the broker's transaction timeout at the decision, in seconds.
        progress_s: Time between two progress lines in the log of the driver, and of each task, in seconds.
        decide_within_s: For a batch decided as a whole: how long the part prepared first may wait for the last one, in
            seconds. The broker's transaction timeout limits it as well.
        database_leg: For a batch decided as a whole: where its tasks put rows before the decision. "staging": into tables
            beside the target; the decision moves the rows, and all of them show at once; works on every server. "prepared":
            into the target, by PREPARE TRANSACTION; nothing is moved, the rows show partition by partition, and the server
            needs max_prepared_transactions; not on MariaDB and MySQL. "auto": staging if tables may be created, otherwise
            prepared.
        keep_slots: Whether a Python worker that Spark reuses keeps its connections, slots and producers from task to task,
            so that they need no claim and no new producer. Spark ends workers that are idle for a minute.
        producer_engine: ``auto``, ``native`` or ``librdkafka``; see :class:`dualwrite.TransactionalProducer`.
        allow_nondeterministic: For a batch written partition by partition: accept a DataFrame whose plan may give other rows
            when it is computed again, and do not compare the rows of skipped partitions with those written earlier. A batch
            decided as a whole may give other rows each time.
        unit_topic: A topic in which each batch is announced once it is complete in Kafka, for `dualwrite.units.BatchReader`, to
            which it becomes visible at one moment. It must exist, be kept from compaction, and belong to this sink, as must
            ``topic``. Not for ``foreach_partition``.
        quarantine_table: A table for the rows that the table does not take, each with the reason. It has the text columns
            ``reason`` and ``row``, the row as JSON (``json`` and ``jsonb``, too). By default such a row fails its partition.
        quarantine_topic: A topic for messages about these rows, instead of the table or besides it. Their own messages are not
            sent.
        quarantine_limit: With more such rows nothing is written: of the batch if it is decided as a whole, otherwise of the
            partition. 1000 by default.
        lineage_namespace: Report each batch to OpenLineage, as a run of the job ``sink`` in this namespace. Its client must be
            installed on the driver, whose environment configures it. Not for ``foreach_partition``.
        lineage_kafka: Bootstrap servers of the cluster that the rows were read from, to name their topics as inputs.
        tables_revision: Set by the driver: the version that it has found of the library's tables, for its tasks.

    Raises:
        ConfigurationError: A setting is missing, wrong, or contradicts another one. The error names it.
    """

    sink: str
    kafka: Mapping[str, object]
    url: str
    table: str
    topic: str | None = None
    topic_column: str | None = None
    key: str | None = None
    value: str | None = None
    headers: str | None = None
    partition: str | None = None
    timestamp: str | None = None
    key_format: str = "raw"
    value_format: str | None = None
    key_schema: str | None = None
    value_schema: str | None = None
    key_message: str | None = None
    value_message: str | None = None
    descriptor: str | bytes | None = None
    schema_registry: Mapping[str, object] | None = None
    columns: Mapping[str, str] | Sequence[str] | None = None
    upsert_keys: Sequence[str] | None = None
    upsert_columns: Sequence[str] | None = None
    on_conflict: str = "update"
    order_column: str | None = None
    op_column: str | None = None
    op_values: Mapping[str, str] | None = None
    on_delete: str = "tombstone"
    schema: str | None = None
    max_slots: int = 1000
    lease_s: float = 60.0
    timeout_s: float = 120.0
    margin_s: float = 10.0
    progress_s: float = 5.0
    decide_within_s: float = 3600.0
    database_leg: str = "auto"
    keep_slots: bool = True
    producer_engine: EngineName = "auto"
    allow_nondeterministic: bool = False
    unit_topic: str | None = None
    quarantine_table: str | None = None
    quarantine_topic: str | None = None
    quarantine_limit: int | None = None
    lineage_namespace: str | None = None
    lineage_kafka: str | None = None
    tables_revision: str = ""

    def __post_init__(self) -> None:
        for name, kinds in _kinds().items():
            _check_kind(name, getattr(self, name), kinds)
        check_name(self.sink, "the name of a sink")
        if len(self.sink) > _LONGEST_SINK_NAME or "#" in self.sink:
            raise ConfigurationError(
                f"{self.sink!r} cannot be the name of a sink",
                next_step=f"use at most {_LONGEST_SINK_NAME} characters without '#'",
            )
        if (self.topic is None) == (self.topic_column is None):
            raise ConfigurationError("give either topic or topic_column")
        if self.unit_topic is not None and self.topic in {None, self.unit_topic}:
            raise ConfigurationError("unit_topic needs one topic for all messages, and must be another one than that")
        if not self.max_slots > 0:
            raise ConfigurationError("max_slots must be greater than 0")
        for name in ("lease_s", "timeout_s", "margin_s", "progress_s", "decide_within_s"):
            check_seconds(name, getattr(self, name))
        for name, choices in (("database_leg", DATABASE_LEGS), ("on_conflict", ON_CONFLICT), ("on_delete", ON_DELETE)):
            if (chosen := getattr(self, name)) not in choices:
                raise ConfigurationError(f"{name} cannot be {chosen!r}", next_step=f"use one of {', '.join(choices)}")
        wanted_engine(self.producer_engine)
        _parse_url(self.url)
        self._check_formats()
        self._check_upsert()
        self._check_operations()
        self._check_quarantine()

    def _check_quarantine(self) -> None:
        if self.quarantine_limit is not None and not self.quarantines:
            raise ConfigurationError(
                "quarantine_limit needs quarantine_table or quarantine_topic",
                next_step="name the table or the topic for rows that the table does not take",
            )
        if self.lineage_kafka is not None and self.lineage_namespace is None:
            raise ConfigurationError("lineage_kafka (lineageKafka) needs lineage_namespace (lineageNamespace)")
        if self.quarantine_limit is not None and self.quarantine_limit < 0:
            raise ConfigurationError("quarantine_limit must not be less than 0")
        if self.quarantine_topic is not None and self.quarantine_topic in {self.topic, self.unit_topic}:
            raise ConfigurationError(
                "quarantine_topic must be another topic than those of the messages and of the units",
                next_step="a reader of that topic would take what is wrong with a row for a row",
            )

    @property
    def quarantines(self) -> bool:
        """Whether rows that the table does not take are put aside."""
        return self.quarantine_table is not None or self.quarantine_topic is not None

    @property
    def most_quarantined(self) -> int:
        """How many rows may be put aside."""
        return _QUARANTINE_LIMIT if self.quarantine_limit is None else self.quarantine_limit

    def _check_formats(self) -> None:
        if self.value_format is not None and self.value_format not in _FORMATS:
            raise ConfigurationError(f"value_format must be one of {', '.join(_FORMATS)}")
        if self.key_format not in KEY_FORMATS:
            raise ConfigurationError(f"key_format must be one of {', '.join(KEY_FORMATS)}")
        if self.format_of_value is Format.RAW and self.value is None:
            raise ConfigurationError("value_format raw needs a column: name it with value")
        if self.format_of_value is Format.JSON and self.value is not None:
            raise ConfigurationError("value_format json is for whole rows: leave value out, or use raw")
        if self.key is None and Format(self.key_format) in REGISTERED:
            raise ConfigurationError(f"key_format {self.key_format} needs a column: name it with key")
        self._check_part("key", Format(self.key_format), self.key_schema, self.key_message)
        self._check_part("value", self.format_of_value, self.value_schema, self.value_message)
        if self.schema_registry is not None:
            self._check_registry(RegistrySettings.parse(self.schema_registry))

    def _check_upsert(self) -> None:
        for name in ("upsert_keys", "upsert_columns"):
            if isinstance(getattr(self, name), str):
                raise ConfigurationError(f"{name} is a string; give a list of names")
        used = {
            "upsert_columns": self.upsert_columns,
            "on_conflict": self.on_conflict != "update",
            "order_column": self.order_column,
            "op_column": self.op_column,
        }
        for name, is_used in used.items():
            if is_used and not self.upsert_keys:
                raise ConfigurationError(
                    f"{name} needs upsert_keys",
                    next_step="name the columns of the table's key in upsert_keys (upsertKeys)",
                )
        if self.on_conflict == "newer" and self.order_column is None:
            raise ConfigurationError(
                'on_conflict="newer" needs order_column', next_step="name the column that says which row is newer"
            )
        if self.on_conflict == "nothing" and (self.upsert_columns or self.op_column is not None):
            other = "op_column" if self.op_column is not None else "upsert_columns"
            raise ConfigurationError(
                f'on_conflict="nothing" and {other} contradict each other: nothing would be updated'
            )

    def _check_operations(self) -> None:
        if self.op_column is None:
            if self.op_values is not None or self.on_delete != ON_DELETE[0]:
                name = "op_values" if self.op_values is not None else "on_delete"
                raise ConfigurationError(f"{name} needs op_column", next_step="name the column with the operations")
            return
        if self.order_column is None:
            raise ConfigurationError(
                "op_column needs order_column",
                next_step="name a column that orders the changes of a key: the source's log position, or Kafka's offset",
            )
        if self.on_delete == "tombstone" and self.key is None:
            raise ConfigurationError(
                "a tombstone needs a key: name its column with key (keyColumn)",
                next_step='or set on_delete to "record"',
            )
        for letter, operation in self.operations.items():
            if operation not in {UPSERT, DELETE}:
                raise ConfigurationError(
                    f"op_values maps {letter!r} to {operation!r}", next_step=f"use {UPSERT} or {DELETE}"
                )

    @property
    def operations(self) -> Mapping[str, str]:
        """The operations by the texts in `op_column`."""
        return OPERATIONS if self.op_values is None else self.op_values

    def _check_part(self, part: str, part_format: Format, schema: str | None, message: str | None) -> None:
        if schema is not None and part_format not in {Format.AVRO, Format.JSON_SCHEMA}:
            raise ConfigurationError(f"{part}_schema is for {part}_format avro and jsonschema")
        if (message is not None) != (part_format is Format.PROTOBUF):
            raise ConfigurationError(f"{part}_message and {part}_format protobuf must be given together")
        if part_format is Format.PROTOBUF and self.descriptor is None:
            raise ConfigurationError(
                f"{part}_format protobuf needs a descriptor",
                next_step="give the path of what protoc --include_imports --descriptor_set_out has written",
            )
        if part_format in REGISTERED and self.schema_registry is None:
            raise ConfigurationError(f"{part}_format {part_format} needs schema.registry.url")

    def _check_registry(self, settings: RegistrySettings) -> None:
        if settings.use_latest and self.topic is None:
            raise ConfigurationError("use.latest.version needs one topic for all messages, and topic_column has many")
        if settings.use_latest and (self.key_schema is not None or self.value_schema is not None):
            raise ConfigurationError("use.latest.version and a schema of your own cannot be combined")

    @property
    def format_of_value(self) -> Format:
        """The value's format, also if none is given."""
        if self.value_format is None:
            return Format.JSON if self.value is None else Format.RAW
        return Format(self.value_format)

    def registry_settings(self) -> RegistrySettings:
        """The checked settings, references replaced by this process's environment.

        Raises:
            ConfigurationError: A variable is not set, or there are no settings.
        """
        return RegistrySettings.parse(_resolved_values(self.schema_registry or {}))

    @property
    def pool(self) -> str:
        """The pool of slots."""
        return pool_of_sink(self.sink)

    def kafka_config(self) -> KafkaConfig:
        """The checked configuration, references replaced by this process's environment.

        Raises:
            ConfigurationError: A key is refused, or a variable is not set.
        """
        return KafkaConfig.parse(self._kafka(), trusted=False)

    def kafka_settings(self) -> Mapping[str, object]:
        """The dictionary of :meth:`kafka_config`, for a writer of this process.

        Raises:
            ConfigurationError: As :meth:`kafka_config`.
        """
        self.kafka_config()
        return self._kafka()

    def _kafka(self) -> dict[str, object]:
        engine = {} if self.producer_engine == "auto" else {ENGINE: self.producer_engine}
        return {**_DEFAULTS, **_resolved_values(self.kafka), **engine}

    def database_url(self) -> URL:
        """The URL, references replaced by this process's environment.

        Raises:
            ConfigurationError: A variable is not set.
        """
        url = _parse_url(self.url)
        return url.set(
            username=_resolved(url.username),
            password=_resolved(url.password),
            host=_resolved(url.host and unquote(url.host)),
            database=_resolved(url.database),
            query={
                name: _resolve(value, "url") if isinstance(value, str) else [_resolve(one, "url") for one in value]
                for name, value in url.query.items()
            },
        )

    def __repr__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        shown["url"] = shown_url(readable_url(self.url))
        shown["kafka"] = f"<{len(self.kafka)} settings>"
        if self.schema_registry is not None:
            shown["schema_registry"] = f"<{len(self.schema_registry)} settings>"
        if isinstance(self.descriptor, bytes):
            shown["descriptor"] = f"<{len(self.descriptor)} bytes>"
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def __reduce__(self) -> tuple[object, ...]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        masked = {
            "kafka": _masked(self.kafka),
            "schema_registry": None if self.schema_registry is None else _masked(self.schema_registry),
            "url": Masked.of(self.url),
        }
        return _unmask, ({**plain, **masked},)


def settings_of(given: Mapping[str, object]) -> SinkOptions:
    """The settings that a caller has given by name; an unknown name, or a needed one that is missing, is refused."""
    known = {field.name: field.name for field in fields(SinkOptions)}
    for name in given:
        if name not in known:
            every = f"the settings are {', '.join(known)}"
            raise ConfigurationError(f"there is no setting {name!r}", next_step=did_you_mean(name, known, every))
    for name in _Needed.__annotations__:
        if name not in given:
            raise ConfigurationError(f"the setting {name} is missing", next_step=f"give {name}=...")
    return SinkOptions(**given)  # type: ignore[arg-type] # by name; it checks their types


@cache
def _kinds() -> Mapping[str, tuple[type, ...]]:
    """By setting, the types of its values; those that are one of a few texts are checked by their own functions."""
    hints = get_type_hints(SinkOptions)
    found = {
        name: get_args(hint) if get_origin(hint) is UnionType else (hint,)
        for name, hint in hints.items()
        if hint is not EngineName
    }
    return {name: tuple(get_origin(kind) or kind for kind in kinds) for name, kinds in found.items()}


def _check_kind(name: str, value: object, kinds: tuple[type, ...]) -> None:
    fits = isinstance(value, (*kinds, int) if float in kinds else kinds)
    if not fits or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(_KINDS[kind] for kind in kinds if kind in _KINDS)
        raise ConfigurationError(f"{name} must be {wanted}, not {type(value).__name__}")


@dataclass(frozen=True)
class Masked:
    """A text that cannot be read off a pickle: each of its bytes is changed by a random byte stored beside it."""

    pad: bytes
    body: bytes

    @classmethod
    def of(cls, value: object) -> object:
        """Mask a text; return any other value as it is."""
        if not isinstance(value, str):
            return value
        plain = value.encode()
        pad = secrets.token_bytes(len(plain))
        return cls(pad, bytes(left ^ right for left, right in zip(plain, pad, strict=True)))

    def text(self) -> str:
        """The text."""
        return bytes(left ^ right for left, right in zip(self.pad, self.body, strict=True)).decode()


def _masked(settings: Mapping[str, object]) -> dict[str, object]:
    return {key: Masked.of(value) for key, value in settings.items()}


def _unmask(settings: dict[str, object]) -> SinkOptions:
    return SinkOptions(**{name: _plain(value) for name, value in settings.items()})  # type: ignore[arg-type]


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.text() if isinstance(value, Masked) else value


def _resolved_values(settings: Mapping[str, object]) -> dict[str, object]:
    return {key: _resolve(value, key) if isinstance(value, str) else value for key, value in settings.items()}


def _resolve(text: str, setting: str) -> str:
    def value_of(match: re.Match[str]) -> str:
        value = os.environ.get(match[1])
        if value is None:
            raise ConfigurationError(
                f"{setting} refers to the environment variable {match[1]}, which is not set here",
                next_step="set it for the driver, and for the executors with spark.executorEnv",
            )
        return value

    return _REFERENCE.sub(value_of, text)


def _resolved(part: str | None) -> str | None:
    return None if part is None else _resolve(part, "url")


def readable_url(text: str) -> str:
    """Quote the braces and colons of references before the URL's path, so that SQLAlchemy can parse it."""
    scheme, mark, rest = text.partition("://")
    before_path, slash, path = rest.partition("/")
    return f"{scheme}{mark}{_REFERENCE.sub(lambda found: quote(found[0], safe=''), before_path)}{slash}{path}"


def _parse_url(text: str) -> URL:
    try:
        url = make_url(readable_url(text))
        dialect = url.get_dialect()
    except (exc.SQLAlchemyError, ValueError):  # ValueError: the port is not a number
        _refuse_url()
    if (dialect.name, dialect.driver) not in _DRIVERS:
        _refuse_url()
    return url


def _refuse_url() -> NoReturn:
    # Without its cause: SQLAlchemy's message repeats the URL, password included.
    raise ConfigurationError(
        "url is not the URL of a PostgreSQL database through psycopg 3, or of MariaDB or MySQL through PyMySQL",
        next_step="write postgresql+psycopg://user:password@host:port/database, or mysql+pymysql://...",
    ) from None


# The settings of one target of several.


def target_options(common: Mapping[str, object], given: Mapping[str, object], name: str) -> SinkOptions:
    """The settings of one target: its own, and those that all have in common. `name` is the target's, for errors."""
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{name}: its settings must be a mapping, not {type(given).__name__}")
    for setting in given:
        if setting not in TARGET_SETTINGS:
            _refuse_for_target(setting, name)
    try:
        options = settings_of({**common, **given})
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error.what}", next_step=error.next_step) from None
    if options.unit_topic is not None:
        raise ConfigurationError(
            "unit_topic announces batches of one topic, and this batch has several targets",
            next_step="leave unit_topic (unitTopic) out; or write the table whose topic has units in batches of its own",
        )
    return options


def _refuse_for_target(setting: str, name: str) -> None:
    if setting in {field.name for field in fields(SinkOptions)}:
        option = next((option for option, known in OPTION_NAMES.items() if known == setting), setting)
        raise ConfigurationError(
            f"{name}: {setting} ({option}) is for the batch, and not for one of its targets: they share one database, one "
            "cluster and one decision",
            next_step="give it next to the targets",
        )
    known = {one: one for one in TARGET_SETTINGS}
    every = f"a target's settings are {', '.join(known)}"
    raise ConfigurationError(f"{name}: there is no setting {setting!r}", next_step=did_you_mean(setting, known, every))


# The Data Source's options: Spark passes texts, which are checked and turned into the sink's settings.

_KAFKA: Final = "kafka."
_REGISTRY: Final = "schema.registry."
OPTION_NAMES: Final = {
    "sink": "sink",
    "url": "url",
    "dbtable": "table",
    "topic": "topic",
    "topicColumn": "topic_column",
    "keyColumn": "key",
    "valueColumn": "value",
    "headersColumn": "headers",
    "partitionColumn": "partition",
    "timestampColumn": "timestamp",
    "keyFormat": "key_format",
    "valueFormat": "value_format",
    "keySchema": "key_schema",
    "valueSchema": "value_schema",
    "keyMessage": "key_message",
    "valueMessage": "value_message",
    "descriptorFile": "descriptor",
    "columns": "columns",
    "upsertKeys": "upsert_keys",
    "upsertColumns": "upsert_columns",
    "onConflict": "on_conflict",
    "orderColumn": "order_column",
    "opColumn": "op_column",
    "opValues": "op_values",
    "onDelete": "on_delete",
    "stateSchema": "schema",
    "maxSlots": "max_slots",
    "leaseSeconds": "lease_s",
    "timeoutSeconds": "timeout_s",
    "marginSeconds": "margin_s",
    "progressSeconds": "progress_s",
    "decideWithinSeconds": "decide_within_s",
    "databaseLeg": "database_leg",
    "keepSlots": "keep_slots",
    "producerEngine": "producer_engine",
    "unitTopic": "unit_topic",
    "quarantineTable": "quarantine_table",
    "quarantineTopic": "quarantine_topic",
    "quarantineLimit": "quarantine_limit",
    "lineageNamespace": "lineage_namespace",
    "lineageKafka": "lineage_kafka",
}
_OWN: Final = ("batchId", "sources", "truncate", "replaceWhere", "user", "password", "tagColumn", "targets")
_CHECKPOINT: Final = "checkpointlocation"
# Spark itself adds these for a stream.
_SPARKS: Final = frozenset({_CHECKPOINT, "queryname"})
_WHOLE: Final = frozenset({"max_slots", "quarantine_limit"})
_SECONDS: Final = frozenset({"lease_s", "timeout_s", "margin_s", "progress_s", "decide_within_s"})
_LISTS: Final = frozenset({"upsert_keys", "upsert_columns"})
_FLAGS: Final = {"true": True, "false": False}
_NEEDED: Final = ("sink", "url", "dbtable", "kafka.bootstrap.servers")
_NEEDED_BY_TARGETS: Final = tuple(name for name in _NEEDED if name != "dbtable")


@dataclass(frozen=True)
class SourceOptions:
    """The options of ``format("dualwrite")``, checked. Case does not matter in names, as everywhere in Spark.

    Attributes:
        sink: The sink's settings.
        batch_id: Name of the batch; None if Spark names it.
        truncate: Whether mode("overwrite") empties the table by TRUNCATE.
        replace_where: The condition, in the database's SQL, for the rows that mode("overwrite") replaces; None for all.
        sources: What the batch is made of, for the ledger; None if it is not told.
        checkpoint: Where the stream's checkpoint is; None for a batch, and if it is not among the options.
        stream: Names the stream, the same in each of Spark's processes; None for a batch, and for a stream whose checkpoint
            is not among its options.
        tag_column: Column that marks each row's target; None if there is one target.
        targets: The settings of each target, by its tag, with those of the sink, whose own are those of the first one.
    """

    sink: SinkOptions
    batch_id: str | None
    truncate: bool
    replace_where: str | None
    sources: str | None
    checkpoint: str | None
    stream: str | None
    tag_column: str | None = None
    targets: tuple[tuple[str, SinkOptions], ...] = ()

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """Check the options that Spark has passed.

        Raises:
            ConfigurationError: An option is missing, unknown or wrong. The error names it, and shows no value that may be
                secret.
        """
        if not given:
            raise ConfigurationError(
                "there are no options: Spark passes those of a table of its catalog on to nobody "
                "(INSERT INTO, insertInto, writeTo)",
                next_step='write with df.write.format("dualwrite").options(...).mode("append").save()',
            )
        options, kafka, registry = _divided(given)
        present = {*options, *(f"{_KAFKA}{key}" for key in kafka)}
        if ("tagColumn" in options) != ("targets" in options):
            raise ConfigurationError("the options tagColumn and targets must be given together")
        for name in _NEEDED_BY_TARGETS if "targets" in options else _NEEDED:
            if name not in present:
                raise ConfigurationError(f"the option {name} is missing", next_step=f'add .option("{name}", ...)')
        settings = {
            setting: _value(name, setting, options[name]) for name, setting in OPTION_NAMES.items() if name in options
        }
        settings["url"] = _url(options)
        checkpoint = {key.lower(): value for key, value in given.items()}.get(_CHECKPOINT)
        truncate, replace_where = _flag("truncate", options.get("truncate", "false")), options.get("replaceWhere")
        if replace_where is not None and (truncate or "opColumn" in options):
            other = "truncate" if truncate else "opColumn"
            raise ConfigurationError(f"the options replaceWhere and {other} contradict each other")
        common = {"kafka": kafka, "schema_registry": registry or None, **settings}
        targets = _targets(options["targets"], common) if "targets" in options else ()
        return cls(
            sink=targets[0][1] if targets else SinkOptions(**common),  # type: ignore[arg-type] # by name; SinkOptions checks them
            batch_id=options.get("batchId"),
            truncate=truncate,
            replace_where=replace_where,
            sources=options.get("sources"),
            checkpoint=checkpoint,
            stream=_stream(checkpoint),
            tag_column=options.get("tagColumn"),
            targets=targets,
        )


def _divided(given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, object], dict[str, object]]:
    """The options by the names that we show, those of Kafka, and those of the schema registry."""
    known = {name.lower(): name for name in (*OPTION_NAMES, *_OWN)}
    options: dict[str, str] = {}
    kafka: dict[str, object] = {}
    registry: dict[str, object] = {}
    for key, value in given.items():
        lowered = key.lower()
        if lowered.startswith(_KAFKA):
            kafka[lowered[len(_KAFKA) :]] = value
        elif lowered.startswith(_REGISTRY):
            registry[lowered[len(_REGISTRY) :]] = value
        elif lowered in known:
            options[known[lowered]] = value
        elif lowered not in _SPARKS:
            _refuse(key, known)
    return options, kafka, registry


def _targets(text: str, common: Mapping[str, object]) -> tuple[tuple[str, SinkOptions], ...]:
    """The targets of the option `targets`: a JSON object of the options of each, by its tag."""
    example = (
        'write {"order": {"dbtable": "orders", "topic": "orders"}, "item": {"dbtable": "items", "topic": "items"}}'
    )
    found = _json("targets", text, example)
    if not isinstance(found, dict) or not found or not all(isinstance(one, dict) for one in found.values()):
        raise ConfigurationError("the option targets must map each tag to the options of its target", next_step=example)
    known = {option.lower(): option for option in OPTION_NAMES}
    targets = []
    for tag, given in found.items():
        settings: dict[str, object] = {}
        for key, value in given.items():
            option = known.get(key.lower())
            if option is None:
                _refuse(key, {name: shown for name, shown in known.items() if OPTION_NAMES[shown] in TARGET_SETTINGS})
            if value is None or OPTION_NAMES[option] in settings:
                what = "is null" if value is None else "is there twice"
                raise ConfigurationError(f"target {tag!r}: the option {option} {what}", next_step="leave it out")
            text_of_value = value if isinstance(value, str) else json.dumps(value)
            settings[OPTION_NAMES[option]] = _value(option, OPTION_NAMES[option], text_of_value)
        targets.append((tag, target_options(common, settings, f"target {tag!r}")))
    return tuple(targets)


def _stream(checkpoint: str | None) -> str | None:
    """Name the stream after its checkpoint, which is unique: Spark's processes share no other knowledge of a stream."""
    return None if checkpoint is None else stream_name(hashlib.sha256(checkpoint.encode()).hexdigest())


def _refuse(key: str, known: Mapping[str, str]) -> NoReturn:
    every = f"the options are {', '.join(known.values())}, kafka.*, schema.registry.*"
    raise ConfigurationError(f"there is no option {key!r}", next_step=did_you_mean(key.lower(), known, every))


def _value(name: str, setting: str, text: str) -> object:
    if setting in _WHOLE or setting in _SECONDS:
        try:
            return int(text) if setting in _WHOLE else float(text)
        except ValueError:
            raise ConfigurationError(f"the option {name} must be a number, not {text!r}") from None
    if setting == "columns":
        return _columns(name, text)
    if setting in _LISTS:
        return _names(name, text)
    if setting == "op_values":
        return _operations(text)
    if setting == "keep_slots":
        return _flag(name, text)
    return text


def _flag(name: str, text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ConfigurationError(f"the option {name} must be true or false, not {text!r}")
    return _FLAGS[text.lower()]


def _columns(name: str, text: str) -> Mapping[str, str] | Sequence[str]:
    if not text.lstrip().startswith(("{", "[")):
        return _listed(text)
    found = _json(name, text)
    if not all(isinstance(target, str) for target in (found.values() if isinstance(found, dict) else found)):
        raise ConfigurationError(f"the option {name} must hold names of columns, or map them to names of columns")
    return found  # type: ignore[no-any-return] # checked above


def _names(name: str, text: str) -> Sequence[str]:
    found = _columns(name, text)
    if isinstance(found, Mapping):
        raise ConfigurationError(f"the option {name} must be a list of columns, not a mapping")
    return found


def _operations(text: str) -> Mapping[str, str]:
    found = _json("opValues", text)
    if not isinstance(found, dict) or not all(isinstance(operation, str) for operation in found.values()):
        raise ConfigurationError(
            "the option opValues must map texts to operations", next_step=f'write {{"I": "{UPSERT}", "D": "{DELETE}"}}'
        )
    return found


def _json(name: str, text: str, next_step: str | None = None) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise ConfigurationError(f"the option {name} has {key!r} twice", next_step="leave one of them out")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except ValueError as error:
        raise ConfigurationError(f"the option {name} is not JSON: {error}", next_step=next_step) from None


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _url(options: Mapping[str, str]) -> str:
    text = options["url"]
    if text.lower().startswith("jdbc:"):
        raise ConfigurationError(
            "the option url is a JDBC URL",
            next_step="write postgresql+psycopg://host:port/database, with user and password as options of their own",
        )
    if "user" not in options and "password" not in options:
        return text
    try:
        url = make_url(readable_url(text))
    except (ArgumentError, ValueError):  # ValueError: the port is not a number
        # Without its cause: SQLAlchemy's message repeats the URL, password included.
        raise ConfigurationError("the option url is not a database URL") from None
    url = url.set(username=options.get("user", url.username), password=options.get("password", url.password))
    return url.render_as_string(hide_password=False)


# The settings of the schema registry: an allow-list of names, none of which loads code.

Setting: TypeAlias = str | int | float

_SECRET: Final = frozenset(
    {"basic.auth.user.info", "bearer.auth.token", "bearer.auth.client.secret", "ssl.key.password"}
)
_TEXTS: Final = _SECRET | {
    "url",
    "bearer.auth.credentials.source",
    "bearer.auth.logical.cluster",
    "bearer.auth.identity.pool.id",
    "bearer.auth.client.id",
    "bearer.auth.scope",
    "bearer.auth.issuer.endpoint.url",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "proxy",
}
_NUMBERS: Final = frozenset({"timeout", "max.retries", "retries.wait.ms", "retries.max.wait.ms"})
_REGISTRY_FLAGS: Final = {"auto.register.schemas": True, "use.latest.version": False, "normalize.schemas": False}
_STRATEGY: Final = "subject.name.strategy"
_TOPICS: Final = "topics"
REGISTRY_NAMES: Final = (*sorted(_TEXTS), *sorted(_NUMBERS), *_REGISTRY_FLAGS, _STRATEGY, _TOPICS)
STRATEGIES: Final = ("topic", "record", "topic_record")
_BEARERS: Final = frozenset({"OAUTHBEARER", "OAUTHBEARER_AZURE_IMDS", "STATIC_TOKEN"})
_TIMEOUT_S: Final = 30  # confluent-kafka's own default is to wait forever


@dataclass(frozen=True, repr=False)
class RegistrySettings:
    """The checked settings. Their ``repr`` shows no value.

    `client` is for confluent-kafka's ``SchemaRegistryClient``. `auto_register` lets the driver register a schema that its
    subject does not have; `use_latest` writes with the subject's latest. With a topic column, the driver does so for the
    subjects of `topics`.
    """

    client: Mapping[str, Setting]
    auto_register: bool
    use_latest: bool
    normalize: bool
    strategy: str
    topics: tuple[str, ...]

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> RegistrySettings:
        """Check the settings. Connects nowhere and reads no file; errors name a setting, and show no value."""
        for name in given:
            if name not in REGISTRY_NAMES:
                _refuse_registry_setting(name)
        if not given.get("url"):
            raise ConfigurationError(
                "the schema registry's setting url is missing", next_step="give schema.registry.url"
            )
        _check_url(_text("url", given["url"]))
        client: dict[str, Setting] = {name: _text(name, given[name]) for name in sorted(_TEXTS & given.keys())}
        client |= {"timeout": _TIMEOUT_S}
        client |= {name: _number(name, given[name]) for name in sorted(_NUMBERS & given.keys())}
        if client.get("bearer.auth.credentials.source", "STATIC_TOKEN") not in _BEARERS:
            raise ConfigurationError(
                "the schema registry's setting bearer.auth.credentials.source is none of "
                f"{', '.join(sorted(_BEARERS))}: others run code"
            )
        flags = {name: _registry_flag(name, given.get(name, default)) for name, default in _REGISTRY_FLAGS.items()}
        if (
            flags["use.latest.version"]
            and given.get("auto.register.schemas") is not None
            and flags["auto.register.schemas"]
        ):
            raise ConfigurationError("use.latest.version and auto.register.schemas cannot be combined")
        strategy = _text(_STRATEGY, given.get(_STRATEGY, "topic")).lower()
        if strategy not in STRATEGIES:
            raise ConfigurationError(f"{_STRATEGY} must be one of {', '.join(STRATEGIES)}")
        topics = given.get(_TOPICS, ())
        listed = topics.split(",") if isinstance(topics, str) else topics
        if not isinstance(listed, (list, tuple)):
            raise ConfigurationError("the schema registry's setting topics must be a list of names, or a,b,c")
        return cls(
            client=client,
            auto_register=flags["auto.register.schemas"] and not flags["use.latest.version"],
            use_latest=flags["use.latest.version"],
            normalize=flags["normalize.schemas"],
            strategy=strategy,
            topics=tuple(str(topic).strip() for topic in listed if str(topic).strip()),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<{len(self.client)} settings>)"


def _check_url(text: str) -> None:
    for part in text.split(","):
        if not part.strip().startswith(("http://", "https://", "${env:")):
            raise ConfigurationError("the schema registry's url must begin with http:// or https://")
        if "@" in part:
            # HTTP clients write whole addresses into their logs.
            raise ConfigurationError(
                "the schema registry's url holds a password", next_step="use schema.registry.basic.auth.user.info"
            )


def _refuse_registry_setting(name: str) -> None:
    known = {known_name: known_name for known_name in REGISTRY_NAMES}
    every = f"the settings are {', '.join(REGISTRY_NAMES)}"
    raise ConfigurationError(
        f"the schema registry has no setting {name!r}", next_step=did_you_mean(name, known, every, cutoff=0.5)
    )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"the schema registry's setting {name} is not text but {type(value).__name__}")
    return value


def _number(name: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = -1
    if not 0 <= number < float("inf"):
        raise ConfigurationError(f"the schema registry's setting {name} must be a number, and not less than 0")
    return int(number) if number.is_integer() else number


def _registry_flag(name: str, value: object) -> bool:
    text = str(value).lower()
    if text not in {"true", "false"}:
        raise ConfigurationError(f"the schema registry's setting {name} must be true or false")
    return text == "true"


# Suggestions for errors that refuse an unknown name.


def did_you_mean(given: str, known: Mapping[str, str], otherwise: str, *, cutoff: float = 0.6) -> str:
    """The next step for an error about an unknown name. `known` maps names as compared to names as shown."""
    near = nearest(given, known, cutoff=cutoff)
    return otherwise if near is None else f"did you mean {known[near]!r}?"
