"""How Spark finds the format ``dualwrite`` by itself: it imports every package whose name begins with ``pyspark_``."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # without dualwrite[spark]: this must not break other people's data sources
    from dualwrite.sinks.spark.source import DualWriteDataSource as DefaultSource

__all__ = ["DefaultSource"]
