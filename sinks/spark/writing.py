"""Arrow batches into Kafka messages: one for each row, in the dual write's Kafka transaction."""

from __future__ import annotations

from itertools import repeat
from types import NoneType
from typing import TYPE_CHECKING, Final, cast

import pyarrow as pa
import pyarrow.compute as pc

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.digests__sinks_spark_columns_row_names import lists_with

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dualwrite.sinks.spark.digests__sinks_spark_columns_row_names import RowNames
    from dualwrite.sinks.spark.formats.serializing import Serializing
    from dualwrite.sinks.spark.layout import Encoded, Layout, MessageColumns
    from dualwrite.writing.transaction import Transaction

_BYTES: Final = pa.binary()


def produce_batch(
    transaction: Transaction,
    batch: pa.RecordBatch,
    layout: Layout,
    topic: str | None,
    serializing: Serializing,
    *,
    names: RowNames | None = None,
) -> None:
    """Produce a message for each row of a projected batch. Waits while the producer's queue is full, so memory is bounded.

    Args:
        transaction: The dual write.
        batch: The rows.
        layout: The positions of a message's parts in the batch.
        topic: The topic of all messages; None if a column names it.
        serializing: Serializes the parts that have a schema.
        names: Names a row that is refused.

    Raises:
        TransactionAborted, ConfigurationError, Fenced, Unavailable: As ``Transaction.produce``; or a topic is null, a row
            does not fit its schema, or Kafka has no form for another part of a message.
    """
    message = layout.message
    _require_form(batch, message, names)
    if topic is not None and isinstance(message.value, int) and isinstance(message.key, (int, NoneType)):
        transaction.produce_arrow(
            topic,
            batch.column(message.value),
            _column(batch, message.key),
            _column(batch, message.headers),
            _column(batch, message.partition),
            timestamps=_column(batch, message.timestamp),
        )
        return
    topics = repeat(topic) if message.topic is None else cast("list[str]", batch.column(message.topic).to_pylist())
    keys = None if message.key is None else _part(batch, message.key, topics, serializing)
    values = _part(batch, message.value, topics, serializing)
    if topic is not None and message.headers is message.partition is message.timestamp is None:
        transaction.produce_many(topic, values, keys)
        return
    headers = repeat(None) if message.headers is None else _headers(batch, message.headers)
    partitions = _numbers(batch, message.partition)
    timestamps = _numbers(batch, message.timestamp)
    rows = zip(values, keys or repeat(None), topics, headers, partitions, timestamps, strict=False)
    for value, key, to, header, partition, timestamp in rows:
        assert to is not None
        transaction.produce(to, value, key, partition=partition, headers=header, timestamp_ms=timestamp)


def _require_form(batch: pa.RecordBatch, message: MessageColumns, names: RowNames | None) -> None:
    """Refuse what a producer would take for something else, or would refuse without the row.

    Raises:
        ConfigurationError: A row has a topic, partition, timestamp or header that no message can have.
    """
    for number, find in (
        (message.topic, _impossible_topics),
        (message.partition, _impossible_partitions),
        (message.timestamp, _impossible_timestamps),
        (message.headers, _impossible_headers),
    ):
        if number is None:
            continue
        column = batch.column(number)
        words, is_bad, step = find(column)
        index = pc.index(is_bad, True).as_py()
        if index >= 0:
            row = f"row {index + 1}" if names is None else names.in_batch(index)
            raise ConfigurationError(f"{words.format(column[index].as_py())} ({row})", next_step=step)


def _impossible_topics(column: pa.Array) -> tuple[str, pa.Array, str]:
    return "the topic of a row is null", pc.is_null(column), "fill the topic column, or filter such rows out"


def _impossible_partitions(column: pa.Array) -> tuple[str, pa.Array, str]:
    # A producer takes -1 for "none", and chooses one.
    step = "partitions count from 0; a row whose partition is null goes where its key says"
    return "the partition of a row is {}", pc.less(column, 0), step


def _impossible_timestamps(column: pa.Array) -> tuple[str, pa.Array, str]:
    # In a message -1 stands for "none"; librdkafka takes 0 for "now".
    step = "a message's timestamp is after 1970; a row whose timestamp is null gets the time at which it is sent"
    return "the timestamp of a row is {} ms since 1970", pc.less(column, 1), step


def _impossible_headers(column: pa.Array) -> tuple[str, pa.Array, str]:
    # Null where the name is, and where the whole entry is.
    is_bad = lists_with(column, pc.is_null(pc.struct_field(column.flatten(), 0)))
    return "a header of a row has no name", is_bad, "name it, or filter it out of the headers; its value may be null"


def _part(
    batch: pa.RecordBatch, part: int | Encoded, topics: Iterable[str | None], serializing: Serializing
) -> list[bytes | None]:
    return _bytes(batch, part) if isinstance(part, int) else serializing.part(batch, part, topics)


def _bytes(batch: pa.RecordBatch, number: int) -> list[bytes | None]:
    # Through numpy: five times as fast as to_pylist, which creates a scalar object for each value first.
    return cast("list[bytes | None]", batch.column(number).cast(_BYTES).to_numpy(zero_copy_only=False).tolist())


def _numbers(batch: pa.RecordBatch, number: int | None) -> Iterable[int | None]:
    return repeat(None) if number is None else cast("list[int | None]", batch.column(number).to_pylist())


def _column(batch: pa.RecordBatch, number: int | None) -> pa.Array | None:
    return None if number is None else batch.column(number)


def _headers(batch: pa.RecordBatch, number: int) -> list[list[tuple[str, bytes | None]] | None]:
    return [
        None if entries is None else [(entry["key"], entry["value"]) for entry in entries]
        for entries in batch.column(number).to_pylist()
    ]
