"""Rows a second, on one core, that each message format is made of flights' 19 columns: Arrow batches in, bytes out.

Run as ``PYTHONPATH=tests/proof python -m benchmarks.formats``. What produces, copies and computes the rows is not in it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import repeat
from pathlib import Path

from harness.messages import protobuf_file
from harness.schema_registry import schema_registry
from pyspark.sql.pandas.types import from_arrow_schema

from dualwrite.sinks.spark.column_types import Table, TableColumn
from dualwrite.sinks.spark.formats.serializing import given_schemas, registered_layout, serializing
from dualwrite.sinks.spark.layout import Encoded, plan_layout
from dualwrite.sinks.spark.options import SinkOptions
from dualwrite.sinks.spark.sendable import projected_batches
from dualwrite.sinks.spark.writing import _bytes

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from flights import read_flights  # the examples' own data

ROWS = 100_000
WAYS = {
    "json (from Arrow, in Python)": {"value_format": "json"},
    "avro": {"value_format": "avro"},
    "jsonschema, derived": {"value_format": "jsonschema"},
    "jsonschema, given: validated": {"value_format": "jsonschema"},
    "protobuf": {"value_format": "protobuf", "value_message": "test.Flight"},
}
POSTGRESQL = {"int": "int4", "bigint": "int8", "double": "float8", "string": "text", "timestamp": "timestamptz",
              "timestamp_ntz": "timestamp", "smallint": "int2"}  # fmt: skip
PROTOBUF = {"int": "int32", "bigint": "int64", "double": "double", "string": "string", "smallint": "int32",
            "timestamp": "google.protobuf.Timestamp", "timestamp_ntz": "string"}  # fmt: skip


def main() -> None:
    """Measure all ways, three times each; the best is printed."""
    flights = read_flights().slice(0, ROWS)
    schema = from_arrow_schema(flights.schema)
    kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    print(f"{flights.num_rows} rows, {len(kinds)} columns: {kinds}")
    columns = {name: TableColumn(name, POSTGRESQL[kind], kind) for name, kind in kinds.items()}
    table = Table("public", "flights", columns)
    fields = {name: PROTOBUF[kind] for name, kind in kinds.items()}
    flight = {name: kind if "." in kind else f"optional {kind}" for name, kind in fields.items()}
    descriptor = protobuf_file(imports=("google/protobuf/timestamp.proto",), Flight=flight)
    with schema_registry() as registry:
        derived = None
        for way, changes in WAYS.items():
            options = SinkOptions(
                sink="bench", kafka={"bootstrap.servers": "nowhere:1"}, url="postgresql+psycopg://nowhere/db", table="flights",
                topic="flights", schema_registry={"url": registry.url, "subject.name.strategy": "topic"},
                descriptor=descriptor, **changes,
            )  # fmt: skip
            if way.endswith("validated"):
                options = replace(options, value_schema=derived)
            layout = plan_layout(schema, options, table, given_schemas(options))
            registry.subjects.clear()
            layout = registered_layout(options, layout)
            value = layout.message.value
            if isinstance(value, Encoded) and value.schema.text:
                derived = value.schema.text
            rows = flights.slice(0, ROWS // 10) if way.endswith("validated") else flights
            best, length = 0.0, 0
            for _ in range(3):
                started = time.process_time()
                with serializing(options, layout) as made:
                    length = 0
                    for batch in projected_batches(rows.to_batches(10_000), schema, layout):
                        found = (
                            _bytes(batch, value)
                            if isinstance(value, int)
                            else made.part(batch, value, repeat("flights"))
                        )
                        length += sum(map(len, found))
                best = max(best, rows.num_rows / (time.process_time() - started))
            print(f"{way:32} {best:10,.0f} rows/s  {length / rows.num_rows:6.1f} bytes a row")


if __name__ == "__main__":
    main()
