"""Which columns go where: the whole table of types, and every mapping that cannot work is refused by name."""

import datetime as dt
import decimal
import inspect
import json
import re

import pyarrow as pa
import pytest
from harness.places import ROOT
from pyspark.sql import Row
from pyspark.sql import types as spark
from pyspark.sql.types import StructField, StructType

from dualwrite import ConfigurationError
from dualwrite.sinks.spark.column_types import ANY, LITERAL, TYPE_TABLE, VECTOR, Form, Table, TableColumn, row_of
from dualwrite.sinks.spark.layout import WHOLE_ROW, plan_layout
from dualwrite.sinks.spark.options import SinkOptions
from dualwrite.sinks.spark.sendable import row_batches

DOCUMENTATION = ROOT / "docs" / "spark-columns.md"
SQL_NAMES = {
    "bool": "boolean", "int2": "smallint", "int4": "integer", "int8": "bigint", "float4": "real",
    "float8": "double precision", "bpchar": "char",
}  # fmt: skip


def column(name, type_name, **more):
    return TableColumn(name, type_name, SQL_NAMES.get(type_name, type_name), **more)


def table(*columns):
    return Table("public", "target", {item.name: item for item in columns})


def plan(schema, target, **settings):
    options = SinkOptions(
        **{
            "sink": "s",
            "kafka": {"bootstrap.servers": "broker:9092"},
            "url": "postgresql+psycopg://db/shop",
            "table": "target",
            "topic": "t",
            **settings,
        }
    )
    return plan_layout(schema, options, target)


def fields(**types):
    return StructType([StructField(name, data_type) for name, data_type in types.items()])


def refused(pattern, schema, target, **settings):
    with pytest.raises(ConfigurationError, match=pattern):
        plan(schema, target, **settings)


@pytest.mark.parametrize(
    ("given", "target", "says"),
    [
        (spark.LongType(), column("c", "text"), "it takes string, char, varchar: cast it"),
        (spark.StringType(), column("c", "int4"), "it takes tinyint, smallint, int, bigint: cast it"),
        (spark.LongType(), column("c", "inet"), "it takes string, char, varchar: cast it"),
        (
            spark.ArrayType(spark.StringType()),
            column("c", "_int4", element_type="int4"),
            "it takes array<tinyint>, array<smallint>, array<int>, array<bigint>: cast it",
        ),
        (
            spark.ArrayType(spark.LongType()),
            column("c", "_inet", element_type="inet"),
            "it takes array<string, char, varchar>: cast it",
        ),
        (
            spark.ArrayType(spark.DoubleType()),
            column("c", "vector"),
            "it takes string, char, varchar, array<float>: cast it",
        ),
        (spark.LongType(), column("c", "hstore"), "it takes string, char, varchar, map<string,string>: cast it"),
        (spark.TimestampType(), column("c", "timestamp"), "or cast it to timestamp_ntz"),
    ],
)
def test_the_advice_says_what_a_column_takes_if_it_takes_anything(given, target, says):
    refused(re.escape(says), fields(c=given), table(target))


def test_every_type_of_spark_has_a_row():
    abstract = {
        "DataType",
        "AtomicType",
        "NumericType",
        "IntegralType",
        "FractionalType",
        "AnsiIntervalType",
        "DatetimeType",
    }
    abstract |= {"AnyTimeType", "SpatialType", "StructField"}
    kinds = {
        name
        for name, kind in inspect.getmembers(spark, inspect.isclass)
        if issubclass(kind, spark.DataType) and kind.__module__ == spark.__name__
    }
    assert kinds - abstract - TYPE_TABLE.keys() == set()


def test_the_documentation_shows_the_table():
    lines = []
    rows = {row.name: row for row in TYPE_TABLE.values()}.values()
    for row in rows:
        taken = ", ".join(f"`{SQL_NAMES.get(name, name)}`" for name in row.postgresql)
        taken = taken.replace(f"`{ANY}`", ANY)
        if row.name == "array<...>":
            taken += "; arrays of what its elements go into, in as many dimensions"
        refusal = f"refused: {row.advice}"
        formats = " | ".join(text or "refused" for text in (row.json, row.avro, row.json_schema, row.protobuf))
        on_mariadb = ", ".join(f"`{name}`" for name in row.mariadb if not name.endswith(" unsigned"))
        lines.append(f"| `{row.name}` | {formats} | {taken or refusal} | {on_mariadb or 'refused'} |")
    shown = DOCUMENTATION.read_text().partition("| Spark SQL |")[2].splitlines()
    documented = [line for line in shown[: shown.index("")] if line.startswith("| `")]
    assert documented == lines


@pytest.mark.parametrize("data_type", [
    spark.NullType(),
    spark.YearMonthIntervalType(),
    spark.CalendarIntervalType(),
    spark.GeometryType(4326),
    spark.GeographyType(4326),
    spark.ArrayType(spark.NullType()),
    spark.MapType(spark.IntegerType(), spark.StringType()),
    StructType([StructField("inner", spark.DayTimeIntervalType())]),
], ids=lambda data_type: data_type.simpleString())  # fmt: skip
def test_a_type_that_nothing_can_hold_is_refused_by_name(data_type):
    target = table(column("id", "int8"), column("bad", "jsonb"))
    refused(r"'bad' of type", fields(id=spark.LongType(), bad=data_type), target)
    refused(r"'bad' of type", fields(id=spark.LongType(), bad=data_type), target, key="bad", columns=["id"])


def test_a_type_of_a_newer_spark_is_refused_by_name():
    class QuaternionType(spark.DataType):
        pass

    assert row_of(QuaternionType()).postgresql == {}
    refused("'bad' of type quaternion", fields(bad=QuaternionType()), table(column("bad", "text")))


@pytest.mark.parametrize(
    ("data_type", "target"),
    [
        (spark.DoubleType(), "float4"),
        (spark.DoubleType(), "numeric"),
        (spark.LongType(), "float8"),
        (spark.StringType(), "int4"),
        (spark.StringType(), "bytea"),
        (spark.TimestampType(), "timestamp"),
        (spark.TimestampNTZType(), "timestamptz"),
        (spark.DateType(), "timestamptz"),
        (spark.BooleanType(), "int4"),
        (spark.IntegerType(), "jsonb"),
        (spark.BinaryType(), "text"),
        (spark.DecimalType(10, 2), "float8"),
        (spark.StringType(), "interval"),
        (spark.BinaryType(), "xml"),
        (spark.ArrayType(spark.DoubleType()), "vector"),
        (spark.MapType(spark.StringType(), spark.IntegerType()), "hstore"),
    ],
)
def test_a_column_that_would_change_the_values_is_refused_by_name(data_type, target):
    refused(
        rf"'a' of type {data_type.simpleString().replace('(', '.').replace(')', '.')} cannot be written into column 'a'",
        fields(a=data_type),
        table(column("a", target)),
    )


def test_a_decimal_is_not_rounded():
    schema = fields(a=spark.DecimalType(10, 3))
    refused(r"would be rounded", schema, table(column("a", "numeric", scale=2)))
    for scale in (3, 5, None):
        assert plan(schema, table(column("a", "numeric", scale=scale))).projected[0].arrow == pa.decimal128(10, 3)


def test_what_is_in_an_array_is_not_rounded_either():
    schema = fields(a=spark.ArrayType(spark.DecimalType(10, 3)))
    refused("would be rounded", schema, table(column("a", "_numeric", element_type="numeric", scale=2)))
    layout = plan(schema, table(column("a", "_numeric", element_type="numeric", scale=3)))
    assert layout.projected[0].arrow == pa.list_(pa.decimal128(10, 3))


@pytest.mark.parametrize("data_type", [spark.LongType(), spark.DecimalType(10, 0)])
def test_a_number_is_not_rounded_before_its_point(data_type):
    refused("would be rounded.*keeps its last digits", fields(a=data_type), table(column("a", "numeric", scale=-2)))


STRINGS, FLOATS = spark.ArrayType(spark.StringType()), spark.ArrayType(spark.FloatType())


def arrays(element, dimensions=1):
    for _ in range(dimensions):
        element = spark.ArrayType(element)
    return element


@pytest.mark.parametrize(
    ("data_type", "type_name", "element", "arrow", "encoding"),
    [
        (STRINGS, "_text", "text", pa.list_(pa.string()), ""),
        (arrays(spark.IntegerType()), "_int8", "int8", pa.list_(pa.int64()), ""),
        (arrays(spark.IntegerType(), 2), "_int4", "int4", pa.list_(pa.list_(pa.int32())), LITERAL),
        (STRINGS, "_varchar", "varchar", pa.list_(pa.string()), LITERAL),
        (STRINGS, "_uuid", "uuid", pa.list_(pa.string()), LITERAL),
        (STRINGS, "_mood", "enum", pa.list_(pa.string()), LITERAL),
        (STRINGS, "_inet", "inet", pa.list_(pa.string()), LITERAL),
        (arrays(spark.TimestampType()), "_timestamptz", "timestamptz", pa.list_(pa.timestamp("us", "UTC")), LITERAL),
        (spark.StringType(), "inet", None, pa.string(), LITERAL),
        (spark.StringType(), "vector", None, pa.string(), LITERAL),
        (FLOATS, "vector", None, pa.list_(pa.float32()), VECTOR),
        (
            spark.MapType(spark.StringType(), spark.StringType()),
            "hstore",
            None,
            pa.map_(pa.string(), pa.string()),
            LITERAL,
        ),
    ],
)
def test_what_has_no_binary_form_goes_as_sql_writes_it(data_type, type_name, element, arrow, encoding):
    layout = plan(fields(a=data_type), table(column("a", type_name, element_type=element)))
    [copied] = layout.table_columns
    assert (layout.projected[copied.source].arrow, copied.encoding) == (arrow, encoding)


def test_arrays_of_what_does_not_go_into_the_element_are_refused():
    for data_type, element in (
        (arrays(spark.TimestampType()), "timestamp"),
        (arrays(spark.DoubleType(), 2), "float4"),
        (arrays(spark.LongType()), "inet"),
        (arrays(fields(x=spark.LongType())), "jsonb"),
        (arrays(FLOATS), "vector"),
    ):
        refused("'a' of type array<", fields(a=data_type), table(column("a", f"_{element}", element_type=element)))


ORDER = fields(
    id=spark.LongType(),
    note=spark.StringType(),
    body=spark.BinaryType(),
    at=spark.TimestampType(),
    place=spark.IntegerType(),
    tags=spark.MapType(spark.StringType(), spark.BinaryType()),
)
ORDERS = table(column("id", "int8"), column("note", "text"), column("body", "bytea"))


def test_columns_used_for_kafka_alone_do_not_go_into_the_table():
    layout = plan(ORDER, ORDERS, key="note", headers="tags", partition="place", timestamp="at")
    assert list(layout.table_column_names) == ["id", "note", "body"]
    assert layout.json_columns == ((0, "id"), (1, "note"), (2, "body"))
    parts = layout.message
    assert layout.projected[parts.value].source == WHOLE_ROW
    assert layout.projected[parts.key].source == 1
    assert layout.projected[parts.timestamp].form is Form.MILLIS
    assert layout.projected[parts.partition].arrow == pa.int32()


def test_a_value_column_goes_into_the_table_only_if_it_is_named():
    assert list(plan(ORDER, ORDERS, value="body", columns=["id"]).table_column_names) == ["id"]
    layout = plan(fields(id=spark.LongType(), body=spark.StringType()), table(column("id", "int8")), value="body")
    assert list(layout.table_column_names) == ["id"]
    assert layout.projected[layout.message.value].source == 1


def test_a_key_and_a_table_column_of_the_same_column_travel_once():
    layout = plan(ORDER, ORDERS, key="note", columns=["note"])
    assert len(layout.projected) == 2  # the column, and the JSON value


def test_columns_can_be_renamed():
    layout = plan(
        ORDER, table(column("order", "int8"), column("Text", "text")), columns={"id": "order", "note": "Text"}
    )
    assert list(layout.table_column_names) == ["order", "Text"]
    assert layout.json_columns == ((0, "id"), (1, "note"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"key": "nope"}, "key names the column 'nope'"),
        ({"key": "at"}, "key names the column 'at' of type timestamp; it must be string or binary"),
        ({"value": "id"}, "value names the column 'id' of type bigint"),
        ({"headers": "note"}, "headers names the column 'note' of type string; it must be map"),
        ({"partition": "note"}, "partition names the column 'note' of type string; it must be int"),
        ({"timestamp": "id"}, "timestamp names the column 'id' of type bigint; it must be timestamp"),
        ({"topic": None, "topic_column": "id"}, "topic_column names the column 'id' of type bigint; it must be string"),
        ({"columns": ["id", "nope"]}, "columns names the column 'nope'"),
        ({"columns": {"id": "nope"}}, "table 'target' has no column 'nope' for the DataFrame's column 'id'"),
        ({"columns": []}, "no column goes into the table"),
        (
            {"columns": {"id": "id", "place": "id"}},
            "two columns of the DataFrame go into column 'id' of table 'target'",
        ),
        ({"columns": "id"}, "columns is a string"),
        ({}, "table 'target' has no column 'at'"),
    ],
)
def test_a_mapping_that_cannot_work_is_refused_by_name(settings, says):
    refused(says, ORDER, ORDERS, **settings)


@pytest.mark.parametrize("bad", [
    spark.MapType(spark.IntegerType(), spark.StringType()),
    spark.MapType(spark.StringType(), spark.IntegerType()),
    spark.ArrayType(fields(key=spark.StringType(), value=spark.DateType())),
    spark.ArrayType(fields(name=spark.StringType(), value=spark.StringType())),
    spark.ArrayType(spark.StringType()),
], ids=lambda data_type: data_type.simpleString())  # fmt: skip
def test_headers_of_another_shape_are_refused(bad):
    refused("headers names the column 'h'", fields(id=spark.LongType(), h=bad), ORDERS, headers="h")


def test_a_column_twice_in_the_dataframe_is_refused():
    schema = StructType([StructField("id", spark.LongType()), StructField("id", spark.LongType())])
    refused("two columns named 'id'", schema, ORDERS)


def test_a_column_that_needs_a_value_and_gets_none_is_refused():
    refused(
        "column 'must' of table 'target' is NOT NULL",
        fields(id=spark.LongType()),
        table(column("id", "int8"), column("must", "text", must_be_given=True)),
    )


def test_a_generated_column_is_refused():
    refused(
        "'id' of table 'target' is computed", fields(id=spark.LongType()), table(column("id", "int8", generated=True))
    )


def batches(schema, target, rows, **settings):
    return list(row_batches([Row(*row) for row in rows], schema, plan(schema, target, **settings)))


def test_a_value_that_does_not_fit_names_its_column():
    with pytest.raises(ConfigurationError, match="value of column 'a' does not fit int16"):
        batches(fields(a=spark.LongType()), table(column("a", "int2")), [(1,), (40000,)])


def test_rows_come_in_batches_of_bounded_size():
    found = batches(fields(a=spark.LongType()), table(column("a", "int8")), [(number,) for number in range(4001)])
    assert [batch.num_rows for batch in found] == [2000, 2000, 1]


def test_json_in_python():
    schema = fields(
        f=spark.FloatType(), d=spark.DoubleType(), n=spark.DecimalType(30, 10), b=spark.BinaryType(), day=spark.DateType(),
        at=spark.TimestampType(), wall=spark.TimestampNTZType(), clock=spark.TimeType(), nothing=spark.StringType(),
        a=spark.ArrayType(spark.DoubleType()), m=spark.MapType(spark.StringType(), spark.BinaryType()),
        s=fields(x=spark.DateType()),
    )  # fmt: skip
    target = table(column("k", "int4"))
    moment = dt.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone.utc)
    row = (
        1.100000023841858, float("-inf"), decimal.Decimal("12345678901234567890.0123456789"), bytearray(b"\x00\xff"),
        dt.date(1, 2, 3), moment.astimezone().replace(tzinfo=None), dt.datetime.fromisoformat("2020-01-02"), dt.time(1, 2, 3, 500000),
        None, [float("nan"), None], {"k": b"\x01"}, Row(dt.date(2020, 1, 1)), 1,
    )  # fmt: skip
    schema = StructType([*schema.fields, StructField("k", spark.IntegerType())])
    layout_table = Table(
        "public", "target", {**{f.name: column(f.name, "jsonb") for f in schema.fields}, **target.columns}
    )
    wanted = [f.name for f in schema.fields]
    with pytest.raises(ConfigurationError):
        plan(
            schema, layout_table, columns=wanted
        )  # scalars do not go into jsonb; the JSON value is what is looked at here
    good = {
        "f": "float4", "d": "float8", "n": "numeric", "b": "bytea", "day": "date", "at": "timestamptz", "wall": "timestamp",
        "clock": "time", "nothing": "text", "a": "jsonb", "m": "jsonb", "s": "jsonb", "k": "int4",
    }  # fmt: skip
    [batch] = batches(schema, table(*(column(name, kind) for name, kind in good.items())), [row])
    text = batch.column(batch.num_columns - 1)[0].as_py()
    assert '"n":12345678901234567890.0123456789' in text
    assert json.loads(text) == {
        "f": 1.1, "d": "-Infinity", "n": 12345678901234567890.0123456789, "b": "AP8=", "day": "0001-02-03",
        "at": "2020-01-02T03:04:05.000006Z", "wall": "2020-01-02T00:00:00.000000", "clock": "01:02:03.5", "nothing": None,
        "a": ["NaN", None], "m": {"k": "AQ=="}, "s": {"x": "2020-01-01"}, "k": 1,
    }  # fmt: skip
