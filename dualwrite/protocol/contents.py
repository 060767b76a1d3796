"""The parts of a message as every engine takes them, and the messages that no engine sends.

One rule for all engines. A part of a wrong type raises ``TypeError``, a text with a surrogate ``UnicodeEncodeError``: nothing
was taken, and the transaction continues. A part whose value Kafka cannot have makes the message :class:`Unsendable`: the
transaction must abort, since the work would fail again as it is.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from dualwrite.errors import TransactionAborted
from dualwrite.protocol.partition_numbers import MAX_PARTITION

Content: TypeAlias = str | bytes | None
Header: TypeAlias = tuple[str, bytes | None]
Headers: TypeAlias = Mapping[str, Content] | Sequence[tuple[str, Content]]

OVERHEAD: Final = 36
"""librdkafka adds so much to each message before it compares it with ``message.max.bytes``: the longest varints."""
ANY_PARTITION: Final = -1
"""Stands for no partition, as in librdkafka."""
STEPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "INVALID_TOPIC_EXCEPTION": "correct the topic's name: 1 to 249 letters, digits, dots, underscores and hyphens",
        "UNKNOWN_TOPIC_OR_PARTITION": "create the topic, or correct its name",
        "MESSAGE_TOO_LARGE": "send a smaller message, or raise message.max.bytes here and max.message.bytes on the topic",
    }
)
"""By the name of the error with which a broker would refuse the message, the step that helps."""
NAME_A_PARTITION: Final = "name a partition that the topic has"
_NAME_THE_HEADER: Final = "give each header a name"
_GIVE_A_TIME: Final = "give milliseconds since 1970, from 1 on, or no timestamp for the current time"
_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_MAX_TIMESTAMP_MS: Final = 2**63 - 1


class Unsendable(Exception):
    """A message that no broker would take: nothing of it was handed on.

    Attributes:
        code: The protocol's name of the error with which a broker would refuse it.
        detail: Why, in words that hold neither its key nor its value.
        step: What helps.
    """

    def __init__(self, code: str, detail: str, step: str | None = None) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.step = STEPS[code] if step is None else step

    def refusal(self, topic: object, transactional_id: str) -> TransactionAborted:
        """The error for the caller.

        Args:
            topic: The topic of the message.
            transactional_id: The producer's id.
        """
        return TransactionAborted(
            f"produce ({topic}): {self.detail} ({self.code})",
            transactional_id=transactional_id,
            next_step=self.step,
            retryable=False,
        )


class Contents(NamedTuple):
    """The checked parts of one message. It shares nothing with the caller that the caller could change.

    Attributes:
        value: The value; None is a tombstone.
        key: The key.
        headers: The headers, in their order.
        partition: The partition; None if Kafka or the key chooses.
        timestamp_ms: When it was created (ms since 1970); None for the time at which it is sent.
        size: Its bytes as librdkafka compares them with ``message.max.bytes``.
    """

    value: bytes | None
    key: bytes | None
    headers: Sequence[Header]
    partition: int | None
    timestamp_ms: int | None
    size: int


def checked(
    topic: object,
    value: Content,
    key: Content = None,
    *,
    partition: int | None = None,
    headers: Headers | None = None,
    timestamp_ms: int | None = None,
    on_delivery: object = None,
    max_bytes: int,
    subject: str = "the message",
) -> Contents:
    """Check one message in every respect that needs no broker. Call it when the message is handed over.

    Args:
        topic: Its topic.
        value: Its value; text as UTF-8; None is a tombstone.
        key: Its key, likewise.
        partition: Its partition; None or -1 chooses.
        headers: Its headers, as a mapping or pairs.
        timestamp_ms: When it was created (ms since 1970).
        on_delivery: Its callback.
        max_bytes: ``message.max.bytes``.
        subject: Names the message in errors.

    Raises:
        Unsendable: No topic has such a name, no topic such a partition, the timestamp is below 1 or needs more than 64 bits,
            or the message is too large.
        TypeError: A part is of another type.
        UnicodeEncodeError: A text has a surrogate.
    """
    check_topic(topic)
    value_bytes, key_bytes = as_bytes(value, "value"), as_bytes(key, "key")
    encoded = as_headers(headers) if headers else ()
    if partition is not None:
        partition = as_partition(partition, subject)
    if timestamp_ms is not None:
        timestamp_ms = as_timestamp(timestamp_ms, subject)
    if on_delivery is not None and not callable(on_delivery):
        raise TypeError(f"on_delivery is a callable, not {type(on_delivery).__name__}")
    size = size_of(value_bytes, key_bytes, encoded)
    if size > max_bytes:
        raise too_large(size, max_bytes, subject)
    return Contents(value_bytes, key_bytes, encoded, partition, timestamp_ms, size)


@lru_cache(maxsize=4096)  # the same few topics come again and again
def check_topic(topic: object) -> None:
    """Refuse what cannot be a topic's name. Source: ``Topic.validate`` of Kafka.

    Raises:
        Unsendable: No topic has such a name.
        TypeError: It is no text.
    """
    if not isinstance(topic, str):
        raise TypeError(f"a topic is text, not {type(topic).__name__}")
    if _TOPIC.fullmatch(topic) is None or topic in {".", ".."}:
        raise Unsendable("INVALID_TOPIC_EXCEPTION", "no topic can have this name")


def as_bytes(content: Content, part: str) -> bytes | None:
    """A key or a value as bytes; text as UTF-8.

    Raises:
        TypeError: It is neither bytes nor text nor None.
        UnicodeEncodeError: The text has a surrogate.
    """
    if content is None or isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    raise TypeError(f"a {part} is text, bytes or None, not {type(content).__name__}")


def as_headers(headers: Headers) -> Sequence[Header]:
    """Headers as engines take them, in their order.

    Raises:
        TypeError: They are neither a mapping nor pairs, a name is not text, or a value is neither text nor bytes nor None.
        UnicodeEncodeError: A text has a surrogate.
    """
    found = []
    for pair in headers.items() if isinstance(headers, Mapping) else headers:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):  # noqa: PLR2004
            raise TypeError("headers are a mapping, or pairs, of a name (text) and a value (text, bytes or None)")
        name, value = pair
        if not name.isascii():
            name.encode()  # raises here what an engine would raise in the middle of a batch
        found.append((name, as_bytes(value, "header's value")))
    return found


def as_partition(partition: int, subject: str) -> int | None:
    """The number of a partition; None where -1 leaves the choice.

    Raises:
        Unsendable: No topic has such a partition.
        TypeError: It is no integer.
    """
    number = operator.index(partition)
    if ANY_PARTITION <= number <= MAX_PARTITION:
        return None if number == ANY_PARTITION else number
    raise Unsendable("UNKNOWN_TOPIC_OR_PARTITION", f"{subject} names the partition {number}", NAME_A_PARTITION)


def as_timestamp(timestamp_ms: int, subject: str) -> int:
    """When a message was created (ms since 1970).

    0 is none: librdkafka takes it for the current time, and nobody would notice. Java's producer refuses negative ones, too.

    Raises:
        Unsendable: It is below 1, or does not fit into 64 bits.
        TypeError: It is no integer.
    """
    created_ms = operator.index(timestamp_ms)
    if 0 < created_ms <= _MAX_TIMESTAMP_MS:
        return created_ms
    raise Unsendable("INVALID_TIMESTAMP", f"{subject} has the timestamp {created_ms} ms", _GIVE_A_TIME)


def size_of(value: bytes | None, key: bytes | None, headers: Sequence[Header]) -> int:
    """The bytes of a message as librdkafka compares them with ``message.max.bytes``."""
    size = OVERHEAD + (0 if value is None else len(value)) + (0 if key is None else len(key))
    for name, content in headers:
        length = len(name.encode())
        size += _varint_size(length) + length
        size += 1 if content is None else _varint_size(len(content)) + len(content)
    return size


def _varint_size(length: int) -> int:
    return max(1, (length.bit_length() + 7) // 7)  # zigzag takes one bit more


def too_large(size: int, max_bytes: int, subject: str) -> Unsendable:
    """The refusal of a message that is too large.

    Args:
        size: Its bytes, by :func:`size_of`.
        max_bytes: ``message.max.bytes``.
        subject: Which message.
    """
    return Unsendable("MESSAGE_TOO_LARGE", f"{subject} has {size} bytes, message.max.bytes is {max_bytes}")


def nameless_header(subject: str) -> Unsendable:
    """The refusal of a row whose header has no name, or is none.

    Args:
        subject: Which row.
    """
    return Unsendable("INVALID_RECORD", f"{subject} has a header without a name", _NAME_THE_HEADER)


def no_partition(topic: str, partition: int, count: int, subject: str = "") -> Unsendable:
    """The refusal of a partition that a topic does not have."""
    detail = f"{subject}topic {topic!r} has no partition {partition}, but {count} from 0"
    return Unsendable("UNKNOWN_TOPIC_OR_PARTITION", detail, NAME_A_PARTITION)
