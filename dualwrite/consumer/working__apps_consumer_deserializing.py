"""Deserializers: callables that make objects of the keys and values that were read, as ``DeserializingConsumer`` has them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict

from dualwrite.errors import IllegalStateError, text_of
from dualwrite.waiting import elsewhere
from dualwrite.writing.dual_write__writing_blocks_serializing import check_callable, for_topic, key_and_value
from dualwrite.writing.retry import is_not_run

if TYPE_CHECKING:
    from confluent_kafka import Message
    from confluent_kafka.serialization import SerializationContext
    from typing_extensions import Self

Deserializer: TypeAlias = Callable[[Any, "SerializationContext"], Any]
"""Makes an object of the bytes of a key or a value: ``(bytes, SerializationContext) -> object``."""

ByTopic: TypeAlias = Deserializer | Mapping[str, Deserializer] | None
"""One for all topics, or one for each topic; the other topics then have none."""


class Deserializers(TypedDict, total=False):
    """The deserializers of a consumer: ``{"key": ..., "value": ...}``, or one of the two.

    Each is a callable ``(bytes, SerializationContext) -> object``, as those of confluent-kafka, or a dictionary with one for
    each topic that has one. All workers use them at once, and again after an abort.
    """

    key: ByTopic
    value: ByTopic


_ABOUT_THE_MESSAGE: Final = frozenset({404, 422})
"""The answers of a registry that are about the message: it has no such schema, or no valid one."""


class Unreadable(Exception):
    """A message could not be deserialized.

    Attributes:
        index: Its place among the messages.
        error: The deserializer's error, as confluent-kafka wraps it.
        cause: The deserializer's own error.
    """

    def __init__(self, index: int, error: Exception, cause: Exception) -> None:
        super().__init__(text_of(error))
        self.index = index
        self.error = error
        self.cause = cause


class Deserializing:
    """Deserializes messages. Many threads use it, and its deserializers, at once.

    Args:
        key: The deserializers of keys.
        value: The deserializers of values.

    Raises:
        ConfigurationError: One of them cannot be called.
    """

    def __init__(self, key: ByTopic = None, value: ByTopic = None) -> None:
        for name, given in (("the key deserializer", key), ("the value deserializer", value)):
            check_callable(name, given, "(bytes, SerializationContext) -> object")
        self._key = key
        self._value = value

    @classmethod
    def of(cls, given: Deserializers | None) -> Self:
        """Make it of what a consumer was given.

        Raises:
            ConfigurationError: There is another entry than ``key`` and ``value``, or one of them cannot be called.
        """
        return cls(**key_and_value("deserializers", given))

    @contextmanager
    def applied(self, messages: Sequence[Message]) -> Generator[None, None, None]:
        """Deserialize the messages in place. If the block fails, they have their bytes again: a dead letter needs them.

        Raises:
            Unreadable: A deserializer has failed.
            IllegalStateError: A deserializer is asynchronous.
        """
        if self._key is None and self._value is None:
            yield
            return
        raw = [(message.key(), message.value()) for message in messages]
        try:
            elsewhere(lambda: self._apply(messages))  # it may ask a schema registry
            yield
        except BaseException:
            for message, (key, value) in zip(messages, raw, strict=True):
                message.set_key(key)
                message.set_value(value)
            raise

    def _apply(self, messages: Sequence[Message]) -> None:
        from confluent_kafka.error import (  # noqa: PLC0415 - loads a driver
            KeyDeserializationError,
            ValueDeserializationError,
        )
        from confluent_kafka.serialization import MessageField, SerializationContext  # noqa: PLC0415 - as above

        for index, message in enumerate(messages):
            topic = message.topic() or ""
            # As DeserializingConsumer does it: the key first, and one context for both.
            context = SerializationContext(topic, MessageField.KEY, message.headers())
            wrap: Callable[..., Exception] = KeyDeserializationError
            try:
                if (by := for_topic(self._key, topic)) is not None:
                    message.set_key(_made(by, message.key(), context))
                context.field, wrap = MessageField.VALUE, ValueDeserializationError
                if (by := for_topic(self._value, topic)) is not None:
                    message.set_value(_made(by, message.value(), context))
            except IllegalStateError:
                raise
            except Exception as error:
                raise Unreadable(index, wrap(exception=error, kafka_message=message), error) from error


def _made(by: Deserializer, given: object, context: SerializationContext) -> object:
    made = by(given, context)
    if is_not_run(made):
        raise IllegalStateError(
            f"the {context.field} deserializer of {context.topic} is asynchronous, and was not run",
            next_step="give the deserializer that is a plain function",
        )
    return made


def registry_is_away(error: Exception) -> bool:
    """Whether a deserializer has failed because its schema registry was unavailable, which is no fault of the message.

    By names, so that no client of a registry is loaded here.
    """
    status = getattr(error, "http_status_code", None)
    if isinstance(status, int):
        return status not in _ABOUT_THE_MESSAGE
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or not kinds.isdisjoint(
        {"TransportError", "OAuthTokenError"}
    )
