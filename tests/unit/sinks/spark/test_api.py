"""Without Spark, the sink costs nothing; settings that cannot work are refused before anything connects."""

import subprocess
import sys

import pytest

from dualwrite import ConfigurationError
from dualwrite.sinks.spark import SinkOptions, foreach_partition, write_batch
from dualwrite.sinks.spark.per_partition import BatchJob
from dualwrite.sinks.spark.writing import whole_input

SETTINGS = {
    "sink": "orders",
    "kafka": {"bootstrap.servers": "broker:9092"},
    "url": "postgresql+psycopg://db/shop",
    "table": "orders",
    "topic": "orders",
}


def test_the_library_itself_imports_no_spark():
    code = "import dualwrite, dualwrite.sinks, sys; print({'pyspark', 'pyarrow', 'pandas', 'pgpq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("way", [write_batch, foreach_partition])
def test_spark_connect_is_refused(way):
    remote = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe"})()
    with pytest.raises(ConfigurationError, match="Spark Connect"):
        way(remote, batch_id="1", **SETTINGS)


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb"])
def test_a_name_that_cannot_be_a_batchs_is_refused(name):
    with pytest.raises(ConfigurationError, match="name of a batch"):
        BatchJob(SinkOptions(**SETTINGS), name)


def test_a_number_is_no_name_of_a_batch():
    with pytest.raises(ConfigurationError, match=r"the name of a batch is text, not int \(write '20260101'\)"):
        BatchJob(SinkOptions(**SETTINGS), 20260101)


def test_outside_a_spark_worker_nobody_can_tell_whether_an_input_is_whole():
    with pytest.raises(Exception, match="does not show where its input comes from"):
        list(whole_input([1, 2]))
