"""The Data Source's options: Spark passes texts, which are checked and turned into the sink's settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.values__protocol_naming import stream_name
from dualwrite.sinks.spark.options import SinkOptions, readable_url
from dualwrite.sinks.spark.options__sinks_spark_options_near_names import did_you_mean

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
}
"""For each option, the setting of `SinkOptions` that it sets."""
_OWN: Final = ("batchId", "upsertKeys", "truncate", "user", "password")
_CHECKPOINT: Final = "checkpointlocation"
_SPARKS: Final = frozenset({_CHECKPOINT, "queryname"})
"""Options that Spark itself adds for a stream."""
_WHOLE: Final = frozenset({"max_slots"})
_SECONDS: Final = frozenset({"lease_s", "timeout_s", "margin_s", "progress_s", "decide_within_s"})
_FLAGS: Final = {"true": True, "false": False}
_NEEDED: Final = ("sink", "url", "dbtable", "kafka.bootstrap.servers")


@dataclass(frozen=True)
class SourceOptions:
    """The options of ``format("dualwrite")``, checked. Case does not matter in names, as everywhere in Spark.

    Attributes:
        sink: The sink's settings.
        batch_id: Name of the batch; None if Spark names it.
        upsert_keys: Key columns of the table; empty if rows are only added.
        truncate: Whether mode("overwrite") empties the table by TRUNCATE.
        stream: Names the stream, the same in each of Spark's processes; None for a batch, and for a stream whose checkpoint
            is not among its options.
    """

    sink: SinkOptions
    batch_id: str | None
    upsert_keys: tuple[str, ...]
    truncate: bool
    stream: str | None

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
        present = {*options, *(f"{_KAFKA}{key}" for key in kafka)}
        for name in _NEEDED:
            if name not in present:
                raise ConfigurationError(f"the option {name} is missing", next_step=f'add .option("{name}", ...)')
        settings = {
            setting: _value(name, setting, options[name]) for name, setting in OPTION_NAMES.items() if name in options
        }
        settings["url"] = _url(options)
        return cls(
            sink=SinkOptions(kafka=kafka, schema_registry=registry or None, **settings),  # type: ignore[arg-type] # by name; SinkOptions checks them
            batch_id=options.get("batchId"),
            upsert_keys=tuple(_listed(options.get("upsertKeys", ""))),
            truncate=_flag("truncate", options.get("truncate", "false")),
            stream=_stream(given),
        )


def _stream(given: Mapping[str, str]) -> str | None:
    """Name the stream after its checkpoint, which is unique: Spark's processes share no other knowledge of a stream."""
    checkpoint = {key.lower(): value for key, value in given.items()}.get(_CHECKPOINT)
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
        return _columns(text)
    if setting == "keep_slots":
        return _flag(name, text)
    return text


def _flag(name: str, text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ConfigurationError(f"the option {name} must be true or false, not {text!r}")
    return _FLAGS[text.lower()]


def _columns(text: str) -> Mapping[str, str] | Sequence[str]:
    if not text.lstrip().startswith(("{", "[")):
        return _listed(text)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"the option columns is not JSON: {error}") from None
    if not all(isinstance(target, str) for target in (found.values() if isinstance(found, dict) else found)):
        raise ConfigurationError("the option columns must hold names of columns, or map them to names of columns")
    return found  # type: ignore[no-any-return] # checked above


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
