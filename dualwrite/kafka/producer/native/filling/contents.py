"""The parts of one message as bytes, and the messages that can never be sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from dualwrite.kafka.producer.native.records.builder import Header
from dualwrite.kafka.producer.native.records.varints import varint
from dualwrite.kafka.producer.native.wire.answers import Code, code_name

Content: TypeAlias = str | bytes | None
Headers: TypeAlias = Mapping[str, Content] | Sequence[tuple[str, Content]]

OVERHEAD: Final = 36
"""librdkafka adds so much to each message before it compares it with ``message.max.bytes``: the longest varints."""
_MAX_TIMESTAMP_MS: Final = 2**63 - 1
_NO_HEADERS: Final[tuple[Header, ...]] = ()


class Unsendable(Exception):
    """A message that no broker would take: nothing of it was handed on.

    Attributes:
        code: The error code with which a broker would refuse it.
        detail: Why, in words that hold neither its key nor its value.
    """

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(f"{code_name(code)}: {detail}")
        self.code = code
        self.detail = detail


class NoPartition(Unsendable):
    """A message for a partition that its topic does not have."""


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


def as_headers(headers: Headers | None) -> Sequence[Header]:
    """Headers as the builder of a batch takes them, in their order.

    Raises:
        TypeError: They are neither a mapping nor pairs, a name is not text, or a value is neither text nor bytes nor None.
        UnicodeEncodeError: A text has a surrogate.
    """
    if not headers:
        return _NO_HEADERS
    found = []
    for pair in headers.items() if isinstance(headers, Mapping) else headers:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):  # noqa: PLR2004
            raise TypeError("headers are a mapping, or pairs, of a name (text) and a value (text, bytes or None)")
        name, value = pair
        if not name.isascii():
            name.encode()  # raises here what the builder would raise with the batch already open
        found.append((name, as_bytes(value, "header's value")))
    return found


def size_of(value: bytes | None, key: bytes | None, headers: Sequence[Header]) -> int:
    """The bytes of a message as librdkafka compares them with ``message.max.bytes``."""
    size = OVERHEAD + (0 if value is None else len(value)) + (0 if key is None else len(key))
    for name, content in headers:
        length = len(name.encode())
        size += len(varint(length)) + length
        size += 1 if content is None else len(varint(len(content))) + len(content)
    return size


def check_size(size: int, max_bytes: int, subject: str) -> None:
    """Refuse a message that is too large.

    Args:
        size: Its bytes, by :func:`size_of`.
        max_bytes: ``message.max.bytes``.
        subject: Which message.

    Raises:
        Unsendable: It is.
    """
    if size > max_bytes:
        raise Unsendable(Code.MESSAGE_TOO_LARGE, f"{subject} has {size} bytes, message.max.bytes is {max_bytes}")


def check_timestamp(timestamp_ms: int, subject: str) -> None:
    """Refuse a timestamp that Java's producer refuses.

    Raises:
        Unsendable: The timestamp is negative, or does not fit into 64 bits.
    """
    if not 0 <= timestamp_ms <= _MAX_TIMESTAMP_MS:
        raise Unsendable(Code.INVALID_TIMESTAMP, f"{subject} has the timestamp {timestamp_ms} ms")


def no_partition(topic: str, partition: int, count: int, subject: str = "") -> NoPartition:
    """The refusal of a partition that a topic does not have."""
    detail = f"{subject}topic {topic!r} has no partition {partition}, but {count} from 0"
    return NoPartition(Code.UNKNOWN_TOPIC_OR_PARTITION, detail)
