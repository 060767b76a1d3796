"""Declarative Pipelines: a sink of the format is written once by each row, through Spark's own command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from harness.drivers import as_installed
from harness.patience import PATIENCE_S
from harness.spark import ROWS
from harness.spark import numbers as numbered
from harness.spark_source import nothing_is_left, options

pipelines = pytest.importorskip("pyspark.pipelines")

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.skipif(not hasattr(pipelines, "create_sink"), reason="this PySpark's pipelines have no sinks"),
]

DEFINITIONS = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

dp.create_sink("numbers", "dualwrite", {options})

@dp.append_flow(target="numbers")
def flow():
    return SparkSession.active().readStream.schema("id bigint, name string").parquet({source!r})
"""


def test_a_pipeline_writes_each_row_once(spark, numbers, tmp_path):
    source = tmp_path / "source"
    numbered(spark, ROWS, 2).write.parquet(str(source))
    (tmp_path / "definitions.py").write_text(
        DEFINITIONS.format(options=json.dumps(options(numbers)), source=str(source))
    )
    libraries = [{"glob": {"include": "definitions.py"}}]
    spec = {"name": "numbers", "storage": f"file://{tmp_path}/storage", "libraries": libraries}
    (tmp_path / "spark-pipeline.yml").write_text(json.dumps(spec))  # JSON is YAML
    path = as_installed(tmp_path)
    for _ in range(2):
        run(tmp_path, path)
        numbers.verify()
    nothing_is_left(numbers)


def run(directory, path):
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": path,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    ended = subprocess.run(
        [str(home / "bin" / "spark-pipelines"), "run", "--spec", str(directory / "spark-pipeline.yml")],
        env=environment, cwd=directory, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
