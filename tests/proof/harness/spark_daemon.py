"""Spark's process that forks the Python workers, with everything imported that they need: a killed one costs little."""

import gc

import pandas as pd  # noqa: F401 - imported for the workers, as are the next three
import pyarrow as pa  # noqa: F401
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import dualwrite.sinks.spark.partition_task  # noqa: F401
import harness.spark_source  # noqa: F401

if __name__ == "__main__":
    # A worker collects garbage after each task: it need not look through the modules, nor copy their pages.
    gc.freeze()
    manager()
