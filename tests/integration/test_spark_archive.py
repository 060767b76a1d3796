"""Spark's JVM starts with the classes that `make archive` has kept."""

from pathlib import Path

import psutil
import pytest
from harness.spark_archive import ARCHIVE


@pytest.mark.skipif(not psutil.LINUX, reason="psutil tells what a process has mapped on Linux")
@pytest.mark.skipif(not ARCHIVE.exists(), reason="`make archive` has not made it")
def test_a_session_reads_the_classes_that_were_kept(spark):
    mapped = psutil.Process(spark.sparkContext._gateway.proc.pid).memory_maps()
    assert ARCHIVE in {Path(file.path) for file in mapped}
