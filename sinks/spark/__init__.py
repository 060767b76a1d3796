"""Write a DataFrame into a Kafka topic and a table of PostgreSQL, MariaDB or MySQL: together or not at all, and once.

Install ``dualwrite[spark]``, on the driver and on the executors.

What belongs here: the calls and the Data Source that users see; the packages hold the rest. May use: all of them, and the
library but ``dualwrite.cli`` and ``dualwrite.testing``.
"""

from __future__ import annotations

from dualwrite.errors import extra_missing

try:
    from dualwrite.sinks.spark.api import foreach_batch, foreach_many, foreach_partition, write_batch, write_many
    from dualwrite.sinks.spark.observing import DualWriteListener, StreamProgress, sources_of
    from dualwrite.sinks.spark.options import SinkOptions, SinkSettings, SourceOptions
    from dualwrite.sinks.spark.partition_task import PartitionReport
    from dualwrite.sinks.spark.per_partition import BatchReport
    from dualwrite.sinks.spark.plan import JobFailed
    from dualwrite.sinks.spark.schema_parts import descriptor_set
    from dualwrite.sinks.spark.source import DualWriteDataSource, register
except ModuleNotFoundError as error:
    raise extra_missing("spark", error) from error

__all__ = [
    "BatchReport",
    "DualWriteDataSource",
    "DualWriteListener",
    "JobFailed",
    "PartitionReport",
    "SinkOptions",
    "SinkSettings",
    "SourceOptions",
    "StreamProgress",
    "descriptor_set",
    "foreach_batch",
    "foreach_many",
    "foreach_partition",
    "register",
    "sources_of",
    "write_batch",
    "write_many",
]
