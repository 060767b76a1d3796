"""Proves that a task's input was complete: Spark does not tell the function that consumes it.

If no more rows can be computed (an error upstream, a cancelled job, an executor that dies), Spark closes the socket to the
Python worker. If that happens between two batches, the function sees its input end as if it were complete, and would commit
the rows so far as the whole partition. Spark writes an end marker only after the last row of a partition, so the marker,
waiting to be read after the input, is the proof.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from types import FrameType
from typing import Final, Protocol, TypeVar, cast

from pyspark.serializers import SpecialLengths

from dualwrite.errors import IllegalStateError, TransactionAborted

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

    Raises:
        TransactionAborted: At its end: it is not the whole partition.
        IllegalStateError: At its end: this version of Spark does not show whether it is.
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
