"""Spark's process that forks the Python workers, with everything imported that they need: a killed one costs little."""

import pandas as pd  # noqa: F401 - imported for the workers, as are the next two
import pyarrow as pa  # noqa: F401
from pyspark.daemon import manager

import dualwrite.sinks.spark.per_partition.task  # noqa: F401

if __name__ == "__main__":
    manager()
