"""The driver's use of the schema registry: reads the schemas given for the messages' parts, and registers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dualwrite.sinks.spark.formats.protobuf__sinks_spark_formats_descriptors import read_descriptor
from dualwrite.sinks.spark.layout import Encoded
from dualwrite.sinks.spark.options__sinks_spark_options_message_formats import REGISTERED, Format
from dualwrite.sinks.spark.schema_parts import Given, module_of

if TYPE_CHECKING:
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.options import SinkOptions


def given_schemas(options: SinkOptions) -> Mapping[str, Given]:
    """The schemas that the user gives for the parts, or the registry's latest ones if the settings ask for them.

    Raises:
        ConfigurationError: A package is missing, the descriptor set cannot be read, or a latest schema cannot be used.
        Unavailable: The registry does not answer.
    """
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
    """Register the layout's schemas, or find them in the registry: durable there on return.

    Raises:
        ConfigurationError: The registry refuses a schema.
        Unavailable: The registry does not answer.
    """
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
