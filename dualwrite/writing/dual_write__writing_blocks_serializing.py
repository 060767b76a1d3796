"""Serializers: callables that make the bytes of keys and values, as confluent-kafka's ``SerializingProducer`` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, TypeVar, cast

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka.serialization import SerializationContext
    from typing_extensions import Self

    from dualwrite.interfaces__ports_observer import Headers

Serializer: TypeAlias = Callable[[Any, "SerializationContext"], bytes | str | None]
"""Makes a key or a value from an object: ``(object, SerializationContext) -> bytes``. It may add to the context's headers."""

ByTopic: TypeAlias = Serializer | Mapping[str, Serializer] | None
"""One for all topics, or one for each topic; the other topics then have none."""


class Serializers(TypedDict, total=False):
    """The serializers of a writer: ``{"key": ..., "value": ...}``, or one of the two.

    Each is a callable ``(object, SerializationContext) -> bytes``, as those of confluent-kafka, or a dictionary with one for
    each topic that has one. Many threads use them at once.
    """

    key: ByTopic
    value: ByTopic


Bytes: TypeAlias = bytes | str | None

Called = TypeVar("Called")


class Serializing:
    """Makes the bytes of messages. Many threads use it, and its serializers, at once.

    Args:
        key: The serializers of keys.
        value: The serializers of values.

    Attributes:
        none: Whether there is no serializer for any topic.

    Raises:
        ConfigurationError: One of them cannot be called.
    """

    def __init__(self, key: ByTopic = None, value: ByTopic = None) -> None:
        for name, given in (("the key serializer", key), ("the value serializer", value)):
            check_callable(name, given, "(object, SerializationContext) -> bytes")
        self._key = key
        self._value = value
        self.none = key is None and value is None

    @classmethod
    def of(cls, given: Serializers | None) -> Self:
        """Make it of what a writer was given.

        Raises:
            ConfigurationError: There is another entry than ``key`` and ``value``, or one of them cannot be called.
        """
        return cls(**key_and_value("serializers", given))

    def message(self, topic: str, key: object, value: object, headers: Headers) -> tuple[Bytes, Bytes, Headers]:
        """The key, value and headers to produce. The caller's headers stay as they are. What has no serializer stays, too.

        Raises:
            KeySerializationError, ValueSerializationError: A serializer has failed. Nothing was produced.
        """
        key_by, value_by = for_topic(self._key, topic), for_topic(self._value, topic)
        if key_by is None and value_by is None:
            return cast("Bytes", key), cast("Bytes", value), headers
        pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers or ())
        made = _made(key_by, key, "key", topic, pairs), _made(value_by, value, "value", topic, pairs)
        return *made, pairs or None

    def many(
        self, topic: str, keys: Sequence[object] | None, values: Sequence[object]
    ) -> tuple[Sequence[Bytes] | None, Sequence[Bytes]]:
        """The keys and values of many messages of one topic, whose serializers get no headers.

        Raises:
            KeySerializationError, ValueSerializationError: As :meth:`message`. Nothing was produced.
        """
        key_by, value_by = for_topic(self._key, topic), for_topic(self._value, topic)
        return (
            None if keys is None else [_made(key_by, one, "key", topic, None) for one in keys],
            [_made(value_by, one, "value", topic, None) for one in values],
        )


def key_and_value(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries ``key`` and ``value`` of an argument.

    Raises:
        ConfigurationError: It is no dictionary, or has another entry.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or (given.keys() - {"key", "value"}):
        raise ConfigurationError(f"{name} is {given!r}", next_step='give a dictionary: {"key": ..., "value": ...}')
    return dict(given)


def check_callable(name: str, given: object, signature: str) -> None:
    """Refuse what is neither a callable, nor one for each topic, nor None.

    Raises:
        ConfigurationError: It cannot be called.
    """
    for one in given.values() if isinstance(given, Mapping) else [given]:
        if one is not None and not callable(one):
            raise ConfigurationError(
                f"{name} cannot be called: {one!r}",
                next_step=f"give a callable {signature}, or one for each topic in a dict",
            )


def for_topic(given: Called | Mapping[str, Called] | None, topic: str) -> Called | None:
    """The callable of a topic: the one for all topics, or its own, if it has one."""
    return given.get(topic) if isinstance(given, Mapping) else given


def _made(
    serializer: Serializer | None, given: object, field: str, topic: str, headers: list[tuple[str, Bytes]] | None
) -> Bytes:
    if serializer is None:
        return cast("Bytes", given)
    from confluent_kafka.error import KeySerializationError, ValueSerializationError  # noqa: PLC0415 - loads a driver
    from confluent_kafka.serialization import MessageField, SerializationContext  # noqa: PLC0415 - as above

    try:
        made = serializer(given, SerializationContext(topic, MessageField(field), headers))
        if made is None or isinstance(made, bytes | str):
            return made
        raise TypeError(
            f"the {field} serializer of {topic} made {type(made).__name__}, neither bytes nor text nor None"
        )
    except Exception as error:
        raise (KeySerializationError if field == "key" else ValueSerializationError)(error) from error


NO_SERIALIZERS: Final = Serializing()
