"""A task's serializers: confluent-kafka's own, with the schema ids that the driver has found."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from confluent_kafka.serialization import SerializationError

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.layout import Encoded
from dualwrite.sinks.spark.schema_parts import module_of

if TYPE_CHECKING:
    import pyarrow as pa

    from dualwrite.sinks.spark.digests__sinks_spark_columns_row_names import RowNames
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.registry import TaskRegistry

_UNFIT: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SerializationError)
"""The errors that the three formats' libraries raise for a value that they refuse."""


@contextmanager
def serializing(
    options: SinkOptions, layout: Layout, names: RowNames | None = None
) -> Generator[Serializing, None, None]:
    """A task's serializers; connections open at first use, and close when the block ends.

    Args:
        options: The sink's settings.
        layout: Which column goes where.
        names: Names a row that cannot be serialized.
    """
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
        """A batch's keys or values.

        Raises:
            ConfigurationError: A row does not fit the schema, or the registry does not have it under the topic's subject.
            Unavailable: The registry does not answer a query for a topic's subject.
        """
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
