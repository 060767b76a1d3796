"""The rows of Arrow's columns as librdkafka takes messages: one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, count, repeat
from typing import TYPE_CHECKING, Any

from dualwrite.protocol.message import Headers, Message, nameless_header

if TYPE_CHECKING:
    import pyarrow as pa

    from dualwrite.protocol.message import MessageColumns


def messages_of(columns: MessageColumns, max_bytes: int) -> Iterator[Message]:
    """The messages of the rows, each checked as it is taken.

    Args:
        columns: The rows.
        max_bytes: ``message.max.bytes``.

    Raises:
        TypeError: Values or keys are neither binary nor text, or numbers no integers.
        Unsendable: A row cannot be sent.
    """
    topic, values, keys, headers, partitions, timestamps = columns
    rows = zip(
        contents_of(values),
        repeat(None) if keys is None else contents_of(keys),
        repeat(None) if headers is None else map(_pairs, count(), headers.to_pylist()),
        _numbers(partitions, "partitions"),
        _numbers(timestamps, "timestamps"),
        strict=False,
    )
    for row, (value, key, pairs, partition, timestamp_ms) in enumerate(rows):
        yield Message.checked(
            topic,
            value,
            key,
            partition=partition,
            headers=pairs,
            timestamp_ms=timestamp_ms,
            max_bytes=max_bytes,
            subject=f"row {row}",
        )


def contents_of(column: pa.Array | pa.ChunkedArray) -> list[bytes | None]:
    """Keys or values; text as UTF-8.

    Raises:
        TypeError: They are neither binary nor text.
    """
    import pyarrow as pa  # noqa: PLC0415 - needed where columns are given, and not else

    try:
        cast = column.cast(pa.large_binary())
    except pa.ArrowNotImplementedError:
        raise TypeError(f"keys and values are binary or text, not {column.type}") from None
    # Through numpy: five times as fast as to_pylist, which creates a scalar object for each value first.
    chunks = cast.chunks if isinstance(cast, pa.ChunkedArray) else [cast]
    return list(chain.from_iterable(chunk.to_numpy(zero_copy_only=False).tolist() for chunk in chunks))


def _numbers(column: pa.Array | pa.ChunkedArray | None, name: str) -> Iterable[int | None]:
    import pyarrow as pa  # noqa: PLC0415 - as above

    if column is None:
        return repeat(None)
    if not (pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
        raise TypeError(f"{name} are integers, not {column.type}")
    numbers: list[int | None] = column.to_pylist()
    return numbers


def _pairs(row: int, entries: list[Any] | None) -> Headers | None:
    if entries is None:
        return None
    pairs = []
    for entry in entries:
        name, value = (
            entry if isinstance(entry, tuple) else (None, None) if entry is None else (entry["key"], entry["value"])
        )
        if name is None:
            raise nameless_header(f"row {row}")
        pairs.append((name, value))
    return pairs
