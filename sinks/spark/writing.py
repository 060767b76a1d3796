"""Both legs of one partition in one pass: messages, rows, progress, and whether the input was whole."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat
from pathlib import PurePath
from types import FrameType, NoneType
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.serializers import SpecialLengths

from dualwrite.errors import ConfigurationError, IllegalStateError, TransactionAborted
from dualwrite.sinks.spark.digests import lists_with
from dualwrite.sinks.spark.formats.serializing import serializing
from dualwrite.sinks.spark.merging import deleted_rows

if TYPE_CHECKING:
    from pyspark import SparkContext

    from dualwrite.sinks.spark.databases.database import RowWriter, SinkDatabase
    from dualwrite.sinks.spark.digests import RowNames
    from dualwrite.sinks.spark.formats.serializing import Serializing
    from dualwrite.sinks.spark.layout import Encoded, Layout, MessageColumns
    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.targets import Target
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
    deleted: pa.Array | None = None,
) -> None:
    """Produce a message for each row of a projected batch. Waits while the producer's queue is full, so memory is bounded.

    It raises what ``Transaction.produce`` raises, and refuses a row that has no topic, does not fit its schema, or has no form
    in Kafka. `topic` is None if a column names it. `deleted` says which rows delete: their messages may be tombstones.
    """
    message = layout.message
    if deleted is not None and layout.merge is not None and not layout.merge.tombstones:
        deleted = None
    _require_form(batch, message, names)
    if topic is not None and isinstance(message.value, int) and isinstance(message.key, (int, NoneType)):
        transaction.produce_arrow(
            topic,
            _unless(deleted, batch.column(message.value)),
            _column(batch, message.key),
            _column(batch, message.headers),
            _column(batch, message.partition),
            timestamps=_column(batch, message.timestamp),
        )
        return
    topics = repeat(topic) if message.topic is None else cast("list[str]", batch.column(message.topic).to_pylist())
    keys = None if message.key is None else _part(batch, message.key, topics, serializing)
    values = _values(batch, message.value, topics, serializing, deleted)
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
    """Refuse what a producer would take for something else, or would refuse without naming the row."""
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


def _values(
    batch: pa.RecordBatch,
    part: int | Encoded,
    topics: Iterable[str | None],
    serializing: Serializing,
    deleted: pa.Array | None,
) -> list[bytes | None]:
    values = _part(batch, part, topics, serializing)
    if deleted is None:
        return values
    return [None if is_deleted else value for value, is_deleted in zip(values, deleted.to_pylist(), strict=True)]


def _unless(deleted: pa.Array | None, values: pa.Array) -> pa.Array:
    return values if deleted is None else pc.if_else(deleted, pa.scalar(None, values.type), values)


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


# Shows people a batch while it is written: lines in the logs, and a name in Spark's web interface.

logger = logging.getLogger(__name__)

LEVEL_VARIABLE: Final = "DUALWRITE_LOG"
_JOB_DESCRIPTION: Final = "spark.job.description"
_OWN_LOGGER: Final = "dualwrite"
_SINKS_LOGGER: Final = "dualwrite.sinks"


class Progress:
    """Counts the rows that one task has written so far, and logs the count from time to time.

    The bytes are the rows' size in Arrow after the projection: the table's columns and the messages' parts.
    """

    def __init__(self, name: str, every_s: float) -> None:
        self.rows = 0
        self.bytes = 0
        self._name = name
        self._every_s = every_s
        self._begun = self._told = time.monotonic()

    def add(self, batch: pa.RecordBatch) -> None:
        """Count a batch that was written on both sides."""
        self.rows += batch.num_rows
        self.bytes += batch.nbytes
        now = time.monotonic()
        if now - self._told >= self._every_s:
            self._told = now
            rate = self.rows / (now - self._begun)
            logger.info("%s: writing, %d rows, %s so far, %.0f rows/s", self._name, self.rows, shown(self.bytes), rate)


def shown(size: int) -> str:
    """A size for people."""
    return f"{size / 2**20:.1f} MiB"


@contextmanager
def described(context: SparkContext, description: str) -> Generator[None, None, None]:
    """Name the block's jobs in Spark's web interface, unless the caller or a stream has named them."""
    if context.getLocalProperty(_JOB_DESCRIPTION):
        yield
        return
    context.setLocalProperty(_JOB_DESCRIPTION, description)
    try:
        yield
    finally:
        context.setLocalProperty(_JOB_DESCRIPTION, None)  # type: ignore[arg-type] # None removes it


def log_to_stderr() -> None:
    """In a process that Spark has started beside the driver: send its log lines to the driver's standard error.

    Users cannot configure logging there, and without a handler Python drops lines below WARNING. Does nothing if Spark
    captures the lines itself (``spark.sql.pyspark.worker.logging.enabled``). Unless the environment asks for more, only the
    sink's lines are sent, a few for each batch: claiming and settling log several for each partition.
    """
    own = logging.getLogger(_OWN_LOGGER)
    if own.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    own.addHandler(handler)
    asked = os.environ.get(LEVEL_VARIABLE, "").upper()
    own.setLevel(asked or logging.WARNING)
    logging.getLogger(_SINKS_LOGGER).setLevel(asked or logging.INFO)


# Proves that a task's input was complete: Spark does not tell the function that consumes it.
#
# If no more rows can be computed (an error upstream, a cancelled job, an executor that dies), Spark closes the socket
# to the Python worker. If that happens between two batches, the function sees its input end as if it were complete, and
# would commit the rows so far as the whole partition. Spark writes an end marker only after the last row of a
# partition, so the marker, waiting to be read after the input, is the proof.

Item = TypeVar("Item")

_END: Final = SpecialLengths.END_OF_STREAM.to_bytes(4, "big", signed=True)
_WORKER: Final = ("pyspark", "worker.py")


class _Buffered(Protocol):
    """The part of a ``BufferedReader`` or ``BufferedRWPair`` that is used here."""

    def peek(self, size: int, /) -> bytes:
        """Return the next bytes without consuming them. Waits for at least one byte; empty at the end."""
        ...


def whole_input(items: Iterable[Item]) -> Iterator[Item]:
    """The input of the running task. Must be consumed by the thread that runs the task.

    At its end it raises `TransactionAborted` if it is not the whole partition, and `IllegalStateError` if this version of
    Spark does not show whether it is.
    """
    yield from items
    ahead = _worker_input().peek(len(_END))[: len(_END)]
    # A part of the marker is proof enough: Spark writes nothing else after the last row.
    if not ahead or not _END.startswith(ahead):
        raise TransactionAborted(
            "the rows of the partition ended before Spark's end marker: the job failed or was cancelled, or the executor died",
            next_step="nothing of the partition was written; see the job's own error",
        )


def _worker_input() -> _Buffered:
    """The stream that Spark's worker reads its input from: a local variable of the function that runs the task."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - Spark offers no other way to the stream
    while frame is not None:
        if frame.f_code.co_name == "main" and PurePath(frame.f_code.co_filename).parts[-2:] == _WORKER:
            stream = frame.f_locals.get("infile")
            if hasattr(stream, "peek"):
                return cast("_Buffered", stream)
        frame = frame.f_back
    raise IllegalStateError(
        "Spark's worker does not show where its input comes from, so an incomplete input would go unnoticed",
        next_step="use a version of PySpark that this library is tested with",
    )


# Both legs in one pass: each batch of rows goes into the table and into Kafka before the next one is taken.


def write_rows(
    transaction: Transaction,
    batches: Iterable[pa.RecordBatch],
    target: Target,
    table: tuple[str, str],
    options: SinkOptions,
    *,
    database: SinkDatabase,
    names: RowNames,
    progress: Progress,
    prepared: bool = False,
) -> None:
    """Write projected rows on both sides of a dual write, a batch at a time.

    The table is the target's, or a staging table; `prepared` says that the transaction will be prepared. `names` has had the
    rows of this partition that went to the target before. After an error leave the dual write: both sides abort.
    """
    layout = target.layout
    names.begin()
    writing: AbstractContextManager[RowWriter | None]
    if not target.in_table:
        writing = nullcontext()
    elif layout.merge is None or table != layout.table:
        writing = database.writing(transaction.connection, layout, table, names)
    else:
        writing = database.merging(transaction.connection, layout, names, prepared=prepared)
    with serializing(options, layout, names) as serializers, writing as into:
        for batch in batches:
            names.add(batch)
            deleted = deleted_rows(layout, batch, names.in_batch)
            if into is not None:
                into.write(batch, deleted)
            if target.sends:
                produce_batch(transaction, batch, layout, target.topic, serializers, names=names, deleted=deleted)
            progress.add(batch)
