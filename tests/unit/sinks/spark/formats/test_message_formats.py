"""Messages with a schema: the whole table of types, and every schema that cannot hold the columns is refused by name."""

import datetime as dt
import json
from decimal import Decimal

import pyarrow as pa
import pytest
from harness.messages import message_class, protobuf_file
from pyspark.sql import Row
from pyspark.sql import types as spark
from pyspark.sql.types import StructField, StructType

from dualwrite import ConfigurationError
from dualwrite.sinks.spark import descriptor_set, schema_parts
from dualwrite.sinks.spark.column_types import TYPE_TABLE, Form
from dualwrite.sinks.spark.options import Format
from dualwrite.sinks.spark.schema_parts import Given, Part, module_of, natural_arrow
from dualwrite.sinks.spark.sendable import converter

LONG, STRING = spark.LongType(), spark.StringType()
ROW = StructType([StructField("x", LONG)])
EXAMPLES = {
    "DecimalType": spark.DecimalType(10, 2),
    "CharType": spark.CharType(3),
    "VarcharType": spark.VarcharType(3),
    "ArrayType": spark.ArrayType(LONG),
    "MapType": spark.MapType(STRING, LONG),
    "StructType": ROW,
    "GeometryType": spark.GeometryType(4326),
    "GeographyType": spark.GeographyType(4326),
}
KINDS = ["bool", "int32", "sint32", "sfixed32", "uint32", "fixed32", "int64", "sint64", "sfixed64", "uint64", "fixed64",
         "float", "double", "string", "Mood", "bytes", "google.protobuf.Timestamp", "google.protobuf.Duration"]  # fmt: skip
WELL_KNOWN = ("google/protobuf/timestamp.proto", "google/protobuf/duration.proto")


def example(name):
    if name == "UserDefinedType":

        class Point(spark.UserDefinedType):
            @classmethod
            def sqlType(cls):  # noqa: N802 - Spark's name
                return ROW

        return Point()
    return EXAMPLES[name] if name in EXAMPLES else getattr(spark, name)()


def part(whole=False, field="value", **columns):
    return Part(field, "orders", tuple(columns.items()), whole)


def plan(part_format, given=None, whole=False, field="value", **columns):
    return module_of(Format(part_format)).plan(part(whole, field, **columns), given or Given())


def refused(says, part_format, given=None, whole=False, **columns):
    with pytest.raises(ConfigurationError, match=says):
        plan(part_format, given, whole, **columns)


def datums(schema, *rows):
    """As the task makes them of Spark's rows."""
    types = [data_type for _, data_type in schema.part.columns]
    arrays = [
        pa.array([converter(data_type, Form.PLAIN)(row[number]) for row in rows], natural_arrow(data_type)).cast(arrow)
        for number, (data_type, arrow) in enumerate(zip(types, schema.arrow, strict=True))
    ]
    return list(module_of(schema.format).datums(schema, arrays))


every_type = pytest.mark.parametrize("name", TYPE_TABLE)


@every_type
def test_avro_takes_what_the_table_says(name):
    row = TYPE_TABLE[name]
    if not row.avro:
        refused("'a' of type .* cannot be put into the message's value: it has no Avro form", "avro", a=example(name))
        return
    [field] = json.loads(plan("avro", a=example(name)).text)["fields"]
    null, found = field["type"]
    shown = f"{found['type']} {found.get('logicalType', '')}".strip() if isinstance(found, dict) else found
    assert (null, field["default"], shown) == ("null", None, row.avro)


@every_type
def test_json_schema_takes_what_the_table_says(name):
    row = TYPE_TABLE[name]
    if not row.json_schema:
        refused("'a' of type .*: it has no JSON form", "jsonschema", a=example(name))
        return
    found = json.loads(plan("jsonschema", a=example(name)).text)["properties"]["a"]
    kind = [*found.get("type", ["anything", "null"]), found.get("format"), found.get("contentEncoding")]
    assert ", ".join(text for text in kind if text and text != "null") == row.json_schema


def accepted(data_type, **fields):
    """Which of the fields take the type."""
    found = []
    for field, kind in fields.items():
        given = Given(message="test.M", descriptor=protobuf_file(imports=WELL_KNOWN, M={"a": kind}, Row={"x": "int64"}))
        try:
            plan("protobuf", given, a=data_type)
        except ConfigurationError:
            continue
        found.append(field)
    return ", ".join(found)


@every_type
def test_protobuf_takes_what_the_table_says(name):
    row, fields = TYPE_TABLE[name], {kind: kind for kind in KINDS}
    fields |= {"repeated": "repeated int64", "map<string, ...>": "map<int64>", "message": "Row"}
    assert accepted(example(name), **fields) == row.protobuf.replace("enum", "Mood")


def test_a_struct_goes_into_an_avro_record_named_by_where_it_stands():
    inner = StructType([StructField("b", ROW), StructField("c", spark.ArrayType(ROW))])
    schema = plan("avro", a=inner, b=ROW)
    assert schema.record == "orders"
    fields = {field["name"]: field["type"][1] for field in json.loads(schema.text)["fields"]}
    names = [
        fields["a"],
        fields["a"]["fields"][0]["type"][1],
        fields["a"]["fields"][1]["type"][1]["items"][1],
        fields["b"],
    ]
    assert [f"{one['namespace']}.{one['name']}" for one in names] == [
        "orders.a", "orders.a.b", "orders.a.c", "orders.b"
    ]  # fmt: skip


def test_maps_have_string_keys():
    for part_format in ("avro", "jsonschema"):
        refused("make its keys strings", part_format, a=spark.MapType(LONG, LONG))


@pytest.mark.parametrize("inner", [spark.NullType(), spark.DayTimeIntervalType(), spark.MapType(LONG, LONG)])
def test_what_is_refused_is_refused_at_any_depth(inner):
    nested = StructType([StructField("b", spark.ArrayType(spark.MapType(STRING, inner)))])
    for part_format in ("avro", "jsonschema"):
        refused(r"column 'a\.b'", part_format, a=nested)


def test_avro_refuses_a_name_that_it_does_not_take():
    refused("'a b' of type bigint .* Avro does not take its name", "avro", **{"a b": LONG})
    refused(r"'a\.b-c'", "avro", a=StructType([StructField("b-c", LONG)]))
    plan("jsonschema", **{"a b": LONG})


def avro(**fields):
    made = [
        {"name": name, **(kind if isinstance(kind, dict) and "default" in kind else {"type": kind})}
        for name, kind in fields.items()
    ]
    return Given(schema=json.dumps({"type": "record", "name": "R", "fields": made}))


@pytest.mark.parametrize(
    ("data_type", "taken"),
    [
        (spark.IntegerType(), ["int", "long", ["null", "long"], {"type": "int"}]),
        (LONG, ["long"]),
        (spark.FloatType(), ["float", "double"]),
        (
            STRING,
            ["string", {"type": "string", "logicalType": "uuid"}, {"type": "enum", "name": "E", "symbols": ["A"]}],
        ),
        (spark.TimestampType(), [{"type": "long", "logicalType": "timestamp-millis"}]),
        (spark.TimestampNTZType(), [{"type": "long", "logicalType": "local-timestamp-millis"}]),
        (spark.TimeType(), [{"type": "int", "logicalType": "time-millis"}]),
        (spark.DecimalType(4, 2), [{"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 3}]),
        (spark.ArrayType(LONG), [{"type": "array", "items": "long"}]),
    ],
)
def test_a_given_avro_schema_may_be_wider(data_type, taken):
    for kind in taken:
        plan("avro", avro(a=kind), a=data_type)


@pytest.mark.parametrize(
    ("data_type", "kind"),
    [
        (LONG, "int"),
        (LONG, "string"),
        (LONG, ["long", "string"]),
        (spark.TimestampType(), "long"),
        (spark.TimestampNTZType(), {"type": "long", "logicalType": "timestamp-micros"}),
        (spark.DecimalType(4, 2), {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 1}),
        (spark.DecimalType(4, 2), {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 3}),
        (spark.ArrayType(LONG), {"type": "array", "items": "int"}),
        (spark.StringType(), "bytes"),
    ],
)
def test_a_given_avro_schema_that_would_change_values_is_refused(data_type, kind):
    refused("'a' of type .* the Avro schema has", "avro", avro(a=kind), a=data_type)


def test_a_given_avro_schema_must_have_a_field_for_each_column_and_a_column_or_default_for_each_field():
    refused("'b' of type bigint .* has no such field", "avro", avro(a="long"), a=LONG, b=LONG)
    refused("has the field 'b' without a default", "avro", avro(a="long", b="long"), a=LONG)
    plan("avro", avro(a="long", b={"type": "long", "default": 1}), a=LONG)
    refused("is not a record", "avro", Given(schema='"long"'), a=LONG)
    refused("cannot be used", "avro", Given(schema="{"), a=LONG)
    refused("cannot be used", "avro", avro(a="Elsewhere"), a=LONG)


def test_milliseconds_are_not_rounded_to():
    schema = plan("avro", avro(a={"type": "long", "logicalType": "timestamp-millis"}), a=spark.TimestampType())
    moment = dt.datetime(2020, 1, 1, 0, 0, 0, 1000, dt.timezone.utc)
    assert datums(schema, (moment,)) == [{"a": 1577836800001}]
    with pytest.raises(pa.ArrowInvalid, match="would lose data"):
        datums(schema, (moment.replace(microsecond=1001),))


def test_times_in_avro_are_numbers():
    schema = plan("avro", t=spark.TimeType(), d=spark.DateType(), w=spark.TimestampNTZType())
    wall = dt.datetime.fromisoformat("1969-12-31T23:59:59.999999")
    assert datums(schema, (dt.time(0, 0, 1), dt.date(1969, 12, 31), wall), (None,) * 3) == [
        {"t": 1_000_000, "d": -1, "w": -1},
        {"t": None, "d": None, "w": None},
    ]


def test_json_schema_has_no_place_for_nan_at_any_depth():
    types = {
        "a": spark.DoubleType(),
        "b": spark.ArrayType(spark.FloatType()),
        "c": spark.MapType(STRING, spark.DoubleType()),
        "d": StructType([StructField("x", spark.DoubleType())]),
    }
    schema = plan("jsonschema", **types)
    assert datums(schema, (1.5, [0.5], {"k": 2.0}, Row(x=None)), (None,) * 4)[0]["b"] == [0.5]
    for name, bad in (
        ("a", float("nan")),
        ("b", [1, float("inf")]),
        ("c", {"k": float("-inf")}),
        ("d", Row(x=float("nan"))),
    ):
        row = [bad if name == other else None for other in types]
        with pytest.raises(ConfigurationError, match=f"column '{name}' is NaN or infinite"):
            datums(schema, row)


def test_decimals_keep_all_digits_in_json_schema():
    schema = plan("jsonschema", a=spark.DecimalType(38, 10))
    number = Decimal("1234567890123456789012345678.0123456789")
    [datum] = datums(schema, (number,))
    assert module_of(Format.JSON_SCHEMA)._encode(datum) == b'{"a":%s}' % str(number).encode()


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {"a": {"type": "string"}}}, "'a' of type bigint .* the schema has 'string' for it"),
        ({"properties": {}, "additionalProperties": False}, "'a' of type bigint .* has no such property"),
        ({"required": ["b"]}, "requires 'b', and no column goes into it"),
        ({"type": 7}, "cannot be used"),
        ([], "cannot be used|is not an object"),
    ],
)
def test_a_given_json_schema_that_no_row_can_fit_is_refused(schema, says):
    refused(says, "jsonschema", Given(schema=json.dumps(schema)), a=LONG)
    plan("jsonschema", Given(schema='{"properties": {"a": {"type": ["null", "number"]}}}'), a=LONG)


def proto(name="test.M", **messages):
    return Given(message=name, descriptor=protobuf_file(**messages))


def test_protobuf_refuses_a_null_that_a_reader_could_not_see():
    schema = plan("protobuf", proto(M={"a": "int64", "b": "optional int64", "c": "repeated int64"}),
                  a=LONG, b=LONG, c=spark.ArrayType(LONG))  # fmt: skip
    assert datums(schema, (0, None, [])) == [{"a": 0, "b": None, "c": []}]
    for row, field in (((None, 1, []), "test.M.a"), ((1, 1, None), "test.M.c")):
        with pytest.raises(ConfigurationError, match=f"is null, and a reader of the field {field} could not tell"):
            datums(schema, row)


def test_protobuf_messages_within_messages_and_signs_of_durations():
    messages = {"M": {"d": "google.protobuf.Duration", "s": "repeated S"}, "S": {"x": "int64", "m": "map<S>"}}
    given = Given(message="test.M", descriptor=protobuf_file(imports=WELL_KNOWN, **messages))
    inner = StructType([StructField("x", LONG), StructField("m", spark.MapType(STRING, ROW))])
    schema = plan("protobuf", given, d=spark.DayTimeIntervalType(), s=spark.ArrayType(inner))
    [datum] = datums(schema, (dt.timedelta(microseconds=-1_500_000), [Row(x=1, m={"k": Row(x=2)})]))
    message = message_class(given.descriptor, "test.M")(**datum)
    assert (message.d.seconds, message.d.nanos) == (-1, -500_000_000)
    assert message.s[0].m["k"].x == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (proto("test.N", M={"a": "int64"}), "has no message 'test.N'"),
        (Given(message="test.M", descriptor=b"\xff\xff"), "is not a descriptor set"),
        (
            Given(message="test.M", descriptor=protobuf_file(imports=("other.proto",), M={"a": "int64"})),
            "is incomplete",
        ),
        (proto(M={"b": "int64"}), "'a' of type bigint .* has no field of its name"),
        (proto(M={"a": "int32"}), "the field test.M.a is int32"),
        (proto(M={"a": "repeated int64"}), "the field test.M.a is repeated int64"),
    ],
)
def test_a_descriptor_that_does_not_fit_is_refused(given, says):
    refused(says, "protobuf", given, a=LONG)


def test_a_generated_class_is_taken_by_its_descriptors():
    from google.protobuf.api_pb2 import Api

    found = descriptor_set(Api)
    schema = plan("protobuf", Given(message="google.protobuf.Api", descriptor=found), name=STRING)
    assert schema.record == "google.protobuf.Api"
    with pytest.raises(ConfigurationError, match="is not a generated Protobuf message class"):
        descriptor_set(int)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(schema_parts._MODULES, Format.AVRO, "no_such_module")
    with pytest.raises(ConfigurationError, match=r"needs the package .*dualwrite\[schema-registry\]"):
        module_of(Format.AVRO)


def test_a_key_by_itself():
    assert json.loads(plan("avro", whole=True, field="key", k=LONG).text) == {"type": "long"}
    assert json.loads(plan("avro", Given(schema='"long"'), whole=True, k=LONG).text) == {"type": "long"}
    assert json.loads(plan("jsonschema", whole=True, field="key", k=LONG).text)["type"] == "integer"
    assert datums(plan("avro", whole=True, k=LONG), (1,), (None,)) == [1, None]
    refused("a decimal by itself", "avro", whole=True, k=spark.DecimalType(4, 2))
    assert datums(plan("protobuf", proto(M={"x": "int64"}), whole=True, k=ROW), (None,), (Row(x=1),)) == [
        None,
        {"x": 1},
    ]
    refused("a Protobuf message is a struct", "protobuf", proto(M={"a": "int64"}), whole=True, k=LONG)
