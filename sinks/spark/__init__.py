"""Write a DataFrame into a Kafka topic and a PostgreSQL table: together or not at all, and once.

Install ``dualwrite[spark]``, on the driver and on the executors.
"""

from __future__ import annotations

from dualwrite.sinks.spark.api import foreach_batch, foreach_partition, write_batch
from dualwrite.sinks.spark.descriptors import descriptor_set
from dualwrite.sinks.spark.job import BatchReport
from dualwrite.sinks.spark.settings import SinkOptions, SinkSettings
from dualwrite.sinks.spark.source import DualWriteDataSource, register
from dualwrite.sinks.spark.source_options import SourceOptions
from dualwrite.sinks.spark.task_errors import JobFailed

__all__ = [
    "BatchReport",
    "DualWriteDataSource",
    "JobFailed",
    "SinkOptions",
    "SinkSettings",
    "SourceOptions",
    "descriptor_set",
    "foreach_batch",
    "foreach_partition",
    "register",
    "write_batch",
]
