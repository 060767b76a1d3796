"""Write a DataFrame into a Kafka topic and a PostgreSQL table: each partition on both sides or on neither, and once.

Install ``dualwrite[spark]``, on the driver and on the executors.
"""

from __future__ import annotations

from dualwrite.sinks.spark.api import foreach_batch, foreach_partition, write_batch
from dualwrite.sinks.spark.job import BatchReport
from dualwrite.sinks.spark.settings import SinkOptions, SinkSettings

__all__ = ["BatchReport", "SinkOptions", "SinkSettings", "foreach_batch", "foreach_partition", "write_batch"]
