"""Arrow batches into Kafka messages: one for each row, in the dual write's Kafka transaction."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Final, cast

import pyarrow as pa
import pyarrow.compute as pc

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dualwrite.sinks.spark.columns.layout import Encoded, Layout
    from dualwrite.sinks.spark.formats.serializing import Serializing
    from dualwrite.writing.transaction import Transaction

_BYTES: Final = pa.binary()


def produce_batch(
    transaction: Transaction, batch: pa.RecordBatch, layout: Layout, topic: str | None, serializing: Serializing
) -> None:
    """Produce a message for each row of a projected batch. Waits while librdkafka's queue is full, so memory is bounded.

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


def _partitions(batch: pa.RecordBatch, number: int | None) -> Iterable[int | None]:
    if number is not None and (least := pc.min(batch.column(number)).as_py()) is not None and least < 0:
        # librdkafka would take -1 for "none", and choose one.
        raise ConfigurationError(
            f"the partition of a row is {least}",
            next_step="partitions count from 0; a row whose partition is null goes where its key says",
        )
    return _numbers(batch, number)


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
