"""A schema registry's two parts: the driver registers schemas, the tasks serialize with them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from confluent_kafka.serialization import SerializationError

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.layout import Encoded
from dualwrite.sinks.spark.options import REGISTERED, Format
from dualwrite.sinks.spark.schema_parts import Given, module_of, read_descriptor

if TYPE_CHECKING:
    import pyarrow as pa

    from dualwrite.sinks.spark.digests import RowNames
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.registry import TaskRegistry

# The errors that the three formats' libraries raise for a value that they refuse.
_UNFIT: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SerializationError)


@contextmanager
def serializing(
    options: SinkOptions, layout: Layout, names: RowNames | None = None
) -> Generator[Serializing, None, None]:
    """A task's serializers; connections open at first use, and close when the block ends."""
    with ExitStack() as closed_later:
        yield Serializing(options, layout, closed_later, names)


class Serializing:
    """The serializers of one task: one for each part and topic (a shared one would write the last subject's id to all)."""

    def __init__(
        self, options: SinkOptions, layout: Layout, closed_later: ExitStack, names: RowNames | None = None
    ) -> None:
        self._options = options
        self._closed_later = closed_later
        self._names = names
        parts = (layout.message.key, layout.message.value)
        self._known = [one for part in parts if isinstance(part, Encoded) for one in part.registered]
        self._registry: TaskRegistry | None = None
        self._made: dict[tuple[str, str], Callable[[object], bytes | None]] = {}

    def part(self, batch: pa.RecordBatch, part: Encoded, topics: Iterable[str | None]) -> list[bytes | None]:
        """A batch's keys or values. Refuses a row that does not fit; may ask the registry for a topic's subject."""
        schema, field = part.schema, part.schema.part.field
        arrays = [batch.column(number) for number in part.columns]
        found: list[bytes | None] = []
        try:
            for datum, topic in zip(module_of(schema.format).datums(schema, arrays), topics, strict=False):
                assert topic is not None
                serialize = self._made.get((field, topic)) or self._make(part, topic)
                found.append(serialize(datum))
        except _UNFIT as error:
            row = "a row" if self._names is None else self._names.in_batch(len(found))
            raise ConfigurationError(
                f"{row} does not fit the {schema.format} schema of the message's {field}: "
                f"{str(error).partition(chr(10))[0] or type(error).__name__}",
                next_step="nothing of its partition was written; change the row, or the schema",
            ) from error
        return found

    def _make(self, part: Encoded, topic: str) -> Callable[[object], bytes | None]:
        from dualwrite.sinks.spark.registry import task_registry  # noqa: PLC0415 - an optional package

        if self._registry is None:
            settings = self._options.registry_settings()
            self._registry = self._closed_later.enter_context(task_registry(settings, self._known))
        made = self._registry.serializer(part.schema, topic)
        self._made[part.schema.part.field, topic] = made
        return made


# The driver's use of the schema registry: reads the schemas given for the messages' parts, and registers them.


def given_schemas(options: SinkOptions) -> Mapping[str, Given]:
    """The schemas that the user gives for the parts, or the registry's latest ones if the settings ask for them."""
    parts = {"key": Format(options.key_format), "value": options.format_of_value}
    return {
        field: _given(options, field, part_format) for field, part_format in parts.items() if part_format in REGISTERED
    }


def _given(options: SinkOptions, field: str, part_format: Format) -> Given:
    module_of(part_format)  # a missing package is reported before anything else
    settings = options.registry_settings()
    if settings.use_latest:
        from dualwrite.sinks.spark.registry import latest  # noqa: PLC0415 - an optional package

        assert options.topic is not None
        return latest(settings, field, part_format, options.topic)
    if part_format is not Format.PROTOBUF:
        return Given(schema=options.value_schema if field == "value" else options.key_schema)
    assert options.descriptor is not None
    message = options.value_message if field == "value" else options.key_message
    return Given(message=message, descriptor=read_descriptor(options.descriptor))


def registered_layout(options: SinkOptions, layout: Layout) -> Layout:
    """Register the layout's schemas, or find them in the registry: durable there on return."""
    message = layout.message
    value = _registered(options, message.value) if isinstance(message.value, Encoded) else message.value
    key = _registered(options, message.key) if isinstance(message.key, Encoded) else message.key
    return replace(layout, message=replace(message, value=value, key=key))


def _registered(options: SinkOptions, part: Encoded) -> Encoded:
    from dualwrite.sinks.spark.registry import registered  # noqa: PLC0415 - an optional package

    settings = options.registry_settings()
    if options.topic is not None:
        topics: tuple[str, ...] = (options.topic,)
    elif settings.strategy == "record":
        topics = ("",)  # the names of subjects contain no topic
    else:
        topics = settings.topics
    return replace(part, registered=registered(settings, part.schema, topics))
