"""Arrow batches into Kafka messages: one for each row, in the dual write's Kafka transaction."""

from __future__ import annotations

from itertools import repeat
from types import NoneType
from typing import TYPE_CHECKING, Final, cast

import pyarrow as pa
import pyarrow.compute as pc

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dualwrite.sinks.spark.columns.layout import Encoded, Layout
    from dualwrite.sinks.spark.formats.serializing import Serializing
    from dualwrite.writing.blocks.transaction import Transaction

_BYTES: Final = pa.binary()


def produce_batch(
    transaction: Transaction, batch: pa.RecordBatch, layout: Layout, topic: str | None, serializing: Serializing
) -> None:
    """Produce a message for each row of a projected batch. Waits while the producer's queue is full, so memory is bounded.

    Args:
        transaction: The dual write.
        batch: The rows.
        layout: The positions of a message's parts in the batch.
        topic: The topic of all messages; None if a column names it.
        serializing: Serializes the parts that have a schema.

    Raises:
        TransactionAborted, ConfigurationError, Fenced, Unavailable: As ``Transaction.produce``; or a topic is null, or a row
            does not fit its schema.
    """
    message = layout.message
    if topic is not None and isinstance(message.value, int) and isinstance(message.key, (int, NoneType)):
        transaction.produce_arrow(
            topic,
            batch.column(message.value),
            _column(batch, message.key),
            _column(batch, message.headers),
            None if message.partition is None else _checked_partitions(batch, message.partition),
            timestamps=_column(batch, message.timestamp),
        )
        return
    topics = repeat(topic) if message.topic is None else _topics(batch, message.topic)
    keys = None if message.key is None else _part(batch, message.key, topics, serializing)
    values = _part(batch, message.value, topics, serializing)
    if topic is not None and message.headers is message.partition is message.timestamp is None:
        transaction.produce_many(topic, values, keys)
        return
    headers = repeat(None) if message.headers is None else _headers(batch, message.headers)
    partitions = _partitions(batch, message.partition)
    timestamps = _numbers(batch, message.timestamp)
    rows = zip(values, keys or repeat(None), topics, headers, partitions, timestamps, strict=False)
    for value, key, to, header, partition, timestamp in rows:
        assert to is not None
        transaction.produce(to, value, key, partition=partition, headers=header, timestamp_ms=timestamp)


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


def _partitions(batch: pa.RecordBatch, number: int | None) -> Iterable[int | None]:
    return repeat(None) if number is None else cast("list[int | None]", _checked_partitions(batch, number).to_pylist())


def _checked_partitions(batch: pa.RecordBatch, number: int) -> pa.Array:
    column = batch.column(number)
    if (least := pc.min(column).as_py()) is not None and least < 0:
        # The producer would take -1 for "none", and choose one.
        raise ConfigurationError(
            f"the partition of a row is {least}",
            next_step="partitions count from 0; a row whose partition is null goes where its key says",
        )
    return column


def _topics(batch: pa.RecordBatch, number: int) -> list[str]:
    column = batch.column(number)
    if column.null_count:
        raise ConfigurationError(
            "the topic of a row is null", next_step="fill the topic column, or filter such rows out"
        )
    return cast("list[str]", column.to_pylist())


def _headers(batch: pa.RecordBatch, number: int) -> list[list[tuple[str, bytes | None]] | None]:
    return [
        None if entries is None else [(entry["key"], entry["value"]) for entry in entries]
        for entries in batch.column(number).to_pylist()
    ]
