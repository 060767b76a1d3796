"""MariaDB: the ways to bring a DataFrame's rows into a table within one transaction.

``PYTHONPATH=tests/proof python -m benchmarks --only mariadb``
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import pyarrow as pa
import pyarrow.csv
from pyspark.sql.pandas.types import from_arrow_schema
from sqlalchemy import Connection

from benchmarks.servers import Ground, p50
from dualwrite.sinks.spark.databases.database import open_database
from dualwrite.sinks.spark.databases.mariadb import listed
from dualwrite.sinks.spark.layout import Layout, plan_layout
from dualwrite.sinks.spark.options import SinkOptions
from dualwrite.sinks.spark.sendable import projected_batches
from dualwrite.testing import EmbeddedMariaDB

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from flights import TABLE, read_flights  # the examples' own data

INSERTS = "INSERTs of many rows, from Arrow (the sink's)"
LOAD = "LOAD DATA LOCAL INFILE, of a file written by Arrow"
MANY = "PyMySQL's executemany"
Write: TypeAlias = Callable[[Connection, Layout, list[pa.RecordBatch]], None]
_BATCH = 10_000


def run(ground: Ground, *, rows: int = 50_000, rounds: int = 5) -> dict[str, Any]:
    """Each way in turn, in a transaction of its own that is committed; rows per second by way, medians."""
    del ground  # PostgreSQL's
    given = read_flights().slice(0, rows)
    with EmbeddedMariaDB({"innodb-buffer-pool-size": "512M", "innodb-log-file-size": "256M"}) as server:
        url = server.create_database() + "?local_infile=1"
        options = SinkOptions(sink="bench", kafka={"bootstrap.servers": "x:1"}, url=url, table="flights", topic="t")
        database = open_database(options)
        with database.engine.begin() as connection:
            connection.exec_driver_sql(
                TABLE.replace('"year"', "year").replace("time_hour timestamptz", "time_hour timestamp null")
            )
            table = database.read_table(connection, "flights")
        schema = from_arrow_schema(given.schema)
        layout = plan_layout(schema, options, table)
        batches = list(projected_batches(given.to_batches(_BATCH), schema, layout))

        def insert(connection: Connection, layout: Layout, batches: list[pa.RecordBatch]) -> None:
            with database.writing(connection, layout, layout.table) as into:
                for batch in batches:
                    into.write(batch)

        ways: Mapping[str, Write] = {INSERTS: insert, LOAD: _load, MANY: _many}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, way in ways.items():
                with database.engine.begin() as connection:
                    connection.exec_driver_sql("DELETE FROM flights")
                begun = time.perf_counter()
                with database.engine.begin() as connection:
                    way(connection, layout, batches)
                took = time.perf_counter() - begun
                with database.engine.begin() as connection:
                    assert connection.exec_driver_sql("SELECT count(*) FROM flights").scalar() == given.num_rows, name
                if number:  # the first one warms up
                    found[name].append(given.num_rows / took)
        database.engine.dispose()
    return {"rows": given.num_rows, "rounds": rounds, "per second": {name: p50(one) for name, one in found.items()}}


def _columns(layout: Layout, batch: pa.RecordBatch) -> list[pa.Array]:
    return [batch.column(one.source) for one in layout.table_columns]


def _load(connection: Connection, layout: Layout, batches: list[pa.RecordBatch]) -> None:
    names = list(layout.table_column_names)
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        tables = [pa.table(_plain(_columns(layout, batch)), names=names) for batch in batches]
        options = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")
        pyarrow.csv.write_csv(pa.concat_tables(tables), file.name, options)
        # An empty field is NULL in a column of numbers: what a text would need besides is not counted against this way.
        into = ", ".join(f"@v{number}" for number in range(len(names)))
        values = ", ".join(f"`{name}` = NULLIF(@v{number}, '')" for number, name in enumerate(names))
        _cursor(connection).execute(
            f"LOAD DATA LOCAL INFILE '{file.name}' INTO TABLE flights CHARACTER SET utf8mb4 FIELDS TERMINATED BY ',' "
            f"OPTIONALLY ENCLOSED BY '\"' ESCAPED BY '' LINES TERMINATED BY '\\n' ({into}) SET {values}"
        )


def _plain(arrays: list[pa.Array]) -> list[pa.Array]:
    return [array.cast(pa.timestamp("us")) if pa.types.is_timestamp(array.type) else array for array in arrays]


def _many(connection: Connection, layout: Layout, batches: list[pa.RecordBatch]) -> None:
    names = layout.table_column_names
    statement = f"INSERT INTO flights ({listed(names)}) VALUES ({', '.join(['%s'] * len(names))})"
    for batch in batches:
        columns = [array.to_pylist() for array in _plain(_columns(layout, batch))]
        _cursor(connection).executemany(statement, list(zip(*columns, strict=True)))


def _cursor(connection: Connection) -> Any:
    return cast("Any", connection.connection.dbapi_connection).cursor()


def section(figures: Mapping[str, Any]) -> list[str]:
    """The part of the page."""
    rates = figures["per second"]
    return [
        "## MariaDB: rows of a Spark task",
        "",
        f"{figures['rows']:,} flights with all their columns, from Arrow into a table of MariaDB, in one transaction each time. The "
        f"ways take turns; medians of {figures['rounds']}.",
        "",
        "| way | rows per second |",
        "|---|---:|",
        *(f"| {name} | {rate:,.0f} |" for name, rate in rates.items()),
        "",
        f"- The sink's INSERTs against `LOAD DATA LOCAL INFILE`: **{rates[INSERTS] / rates[LOAD]:.2f}** of the rows per second. "
        "LOAD needs `local_infile`, which MySQL switches off, and takes errors for warnings.",
        "",
    ]
