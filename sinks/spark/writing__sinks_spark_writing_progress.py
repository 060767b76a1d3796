"""Shows people a batch while it is written: lines in the logs, and a name in Spark's web interface."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext

logger = logging.getLogger(__name__)

LEVEL_VARIABLE: Final = "DUALWRITE_LOG"
_JOB_DESCRIPTION: Final = "spark.job.description"
_OWN_LOGGER: Final = "dualwrite"
_SINKS_LOGGER: Final = "dualwrite.sinks"


class Progress:
    """Counts the rows that one task has written so far, and logs the count from time to time.

    Args:
        name: The attempt's name.
        every_s: Time between two lines, in seconds.

    Attributes:
        rows: Number of rows so far.
        bytes: Their size in Arrow after the projection: the table's columns and the messages' parts.
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
