"""JSON of whole columns against JSON of one value after the other."""

import datetime as dt
import json
from decimal import Decimal
from itertools import product

import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import types as spark

from dualwrite import ConfigurationError
from dualwrite.sinks.spark.schema_parts import natural_arrow
from dualwrite.sinks.spark.sendable import json_converter, json_rows, json_texts

texts = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(['"', "\\", '",', "\n\x00", "\x7f", "😀"])
micros = st.datetimes()

LEAVES = [
    (spark.BooleanType(), st.booleans()),
    (spark.ByteType(), st.integers(-128, 127)),
    (spark.LongType(), st.integers(-(2**63), 2**63 - 1)),
    (spark.FloatType(), st.floats(width=32)),
    (spark.DoubleType(), st.floats()),
    (spark.DecimalType(12, 9), st.decimals(-999, 999, places=9)),
    (spark.StringType(), texts),
    (spark.VarcharType(9), texts),
    (spark.BinaryType(), st.binary(max_size=4)),
    (spark.DateType(), st.dates()),
    (spark.TimestampType(), micros.map(lambda one: one.replace(tzinfo=dt.timezone.utc))),
    (spark.TimestampNTZType(), micros),
]


def list_of(inner):
    data_type, values = inner
    return spark.ArrayType(data_type), st.lists(st.none() | values, max_size=3)


def map_of(inner):
    data_type, values = inner
    return spark.MapType(spark.StringType(), data_type), st.dictionaries(texts, st.none() | values, max_size=3)


def struct_of(inner):
    names = [f'a "{number}"' for number in range(len(inner))]
    rows = st.tuples(*(st.none() | values for _, values in inner))
    fields = [spark.StructField(name, data_type) for name, (data_type, _) in zip(names, inner, strict=True)]
    return spark.StructType(fields), rows.map(lambda row: dict(zip(names, row, strict=True)))


kinds = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: inner.map(list_of) | inner.map(map_of) | st.lists(inner, max_size=2).map(struct_of),
    max_leaves=4,
)


@st.composite
def columns(draw):
    data_type, values = draw(kinds)
    return data_type, draw(st.lists(st.none() | values, min_size=1, max_size=6)), draw(st.integers(0, 3))


def comparable(value):
    """Numbers by their value: 1.0 and 1, 1E+2 and 100.0 are the same in JSON."""
    if isinstance(value, list):
        return [comparable(one) for one in value]
    if isinstance(value, dict):
        return {name: comparable(one) for name, one in value.items()}
    return Decimal(value) if isinstance(value, int) and not isinstance(value, bool) else value


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=300)
@given(columns())
def test_a_column_is_written_as_its_values_are_one_by_one(column):
    data_type, values, start = column
    sliced = values[start:]
    found = json_texts("c", pa.array(values, natural_arrow(data_type)).slice(start), data_type)
    assert found.type == pa.string()
    assert [comparable(json.loads(text, parse_float=Decimal)) for text in found.to_pylist()] == [
        comparable(json.loads(orjson.dumps(json_converter(data_type)(value)), parse_float=Decimal)) for value in sliced
    ]


@pytest.mark.parametrize(
    ("data_type", "value", "text"),
    [
        (spark.DoubleType(), 2.0, "2.0"),
        (spark.FloatType(), 1.1, "1.1"),
        (spark.DoubleType(), float("nan"), '"NaN"'),
        (spark.DoubleType(), float("-inf"), '"-Infinity"'),
        (spark.DecimalType(38, 10), Decimal("1234567890123456789012345678.0123456789"),
         "1234567890123456789012345678.0123456789"),
        (spark.DecimalType(10, 2), Decimal("1.50"), "1.50"),
        (spark.TimestampType(), dt.datetime(1969, 12, 31, 23, 59, 59, 5, dt.timezone.utc), '"1969-12-31T23:59:59.000005Z"'),
        (spark.DateType(), dt.date(1, 1, 1), '"0001-01-01"'),
        (spark.StringType(), 'a "b" \\ \n ü', '"a \\"b\\" \\\\ \\n ü"'),
        (spark.StructType(), {}, "{}"),
    ],
)  # fmt: skip
def test_the_text_itself(data_type, value, text):
    assert json_texts("c", pa.array([value], natural_arrow(data_type)), data_type).to_pylist() == [text]


@pytest.mark.skipif(not hasattr(spark, "TimeType"), reason="this version of Spark has no times")
def test_times_have_no_trailing_zeros():
    times = pa.array([dt.time(23, 59, 59, 500000), dt.time(10), dt.time(0, 0, 0, 1)], pa.time64("us"))
    assert json_texts("c", times, spark.TimeType()).to_pylist() == ['"23:59:59.5"', '"10:00:00"', '"00:00:00.000001"']


def test_a_row_is_an_object():
    columns = [
        ("n", pa.array([1, None]), spark.LongType()),
        ("s", pa.array(["x", "y"]), spark.StringType()),
        ('q"', pa.array(["x", None]), spark.StringType()),
    ]
    assert json_rows(columns, 2).to_pylist() == ['{"n":1,"s":"x","q\\"":"x"}', '{"n":null,"s":"y","q\\"":null}']
    assert json_rows([], 2).to_pylist() == ["{}", "{}"]
    assert json_rows([(name, values.slice(0, 0), kind) for name, values, kind in columns], 0).to_pylist() == []


@pytest.mark.parametrize("data_type", [spark.ByteType(), spark.ShortType(), spark.IntegerType(), spark.LongType()])
@pytest.mark.parametrize(
    "is_null", [lambda _: False, lambda row: row % 3 == 0, lambda _: True], ids=["none", "some", "all"]
)
def test_integers_of_many_rows_are_written_as_those_of_few(data_type, is_null):
    last = 2 ** (natural_arrow(data_type).bit_width - 1) - 1
    columns = {'q"': (spark.StringType(), [f"row {row}" for row in range(5000)])}
    for first, count in product((-last - 1, -1500, -1024, 0, 1, 1024, last - 2399, last - 9), (10, 1025, 2400)):
        if -last - 1 <= first <= last - count + 1:
            numbers = [None if is_null(row) else first + row * 7 % count for row in range(5000)]
            columns[f"{count} from {first}"] = data_type, numbers
    members = [(name, pa.array(values, natural_arrow(kind)).slice(1), kind) for name, (kind, values) in columns.items()]
    rows = zip(*(values[1:] for _, values in columns.values()), strict=True)
    expected = [orjson.dumps(dict(zip(columns, row, strict=True))).decode() for row in rows]
    assert json_rows(members, 4999).to_pylist() == expected


def test_large_strings_are_strings():
    values = pa.array(["a", 'b"'], pa.large_string())
    assert json_texts("c", values, spark.StringType()).to_pylist() == ['"a"', '"b\\""']


def test_bytes_that_are_no_text_stay_as_they_are():
    """The projection finds them: a row's JSON shows what is wrong with it."""
    values = pa.array([b'"\xff\n', None, b"a"], pa.binary()).cast(pa.string(), safe=False)
    found = json_texts("c", values, spark.StringType()).cast(pa.binary())
    assert found.to_pylist() == [b'"\\"\xff\\n"', b"null", b'"a"']


@pytest.mark.parametrize(
    ("values", "data_type"),
    [
        (pa.array([253402300800_000_000]).cast(pa.timestamp("us", "UTC")), spark.TimestampType()),
        (pa.array([-62135596800_000_001]).cast(pa.timestamp("us")), spark.TimestampNTZType()),
        (pa.array([2932897], pa.int32()).cast(pa.date32()), spark.DateType()),
    ],
)
def test_years_that_json_has_no_form_for_are_refused(values, data_type):
    with pytest.raises(ConfigurationError, match="column 'when' has no form in JSON: it is not in the years 1 to 9999"):
        json_rows([("when", values, data_type)], 1)
