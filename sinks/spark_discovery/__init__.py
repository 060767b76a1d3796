"""Lets Spark find the format ``dualwrite`` by itself: Spark imports every package whose name begins with ``pyspark_``.

What belongs here: this import alone. May use: ``dualwrite.sinks.spark``.
"""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # without dualwrite[spark]: this must not break other people's data sources
    from dualwrite.sinks.spark.source import DualWriteDataSource as DefaultSource

__all__ = ["DefaultSource"]
