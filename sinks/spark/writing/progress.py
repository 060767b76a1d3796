"""What people see of a batch while it is written: lines in the logs, and a name in Spark's own web interface."""

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
    """Counts what one task has written so far, and logs it from time to time.

    Args:
        name: Of the attempt.
        every_s: Time between two lines, in seconds.

    Attributes:
        rows: Rows so far.
        bytes: Their size as Arrow holds them, projected: columns of the table, and what goes into the message.
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
    """Name the jobs of the block in Spark's web interface, unless the caller, or a stream, has named them."""
    if context.getLocalProperty(_JOB_DESCRIPTION):
        yield
        return
    context.setLocalProperty(_JOB_DESCRIPTION, description)
    try:
        yield
    finally:
        context.setLocalProperty(_JOB_DESCRIPTION, None)  # type: ignore[arg-type] # None removes it


def log_to_stderr() -> None:
    """In a process that Spark has started beside the driver: let its log lines reach the driver's standard error.

    Nobody can configure logging there, and without a handler Python drops what is below WARNING. Where Spark captures the
    lines itself (``spark.sql.pyspark.worker.logging.enabled``), that is left to it. Unless the environment asks for more, it
    is the sink's lines: a few for each batch; those of claiming and settling are several for each partition.
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
