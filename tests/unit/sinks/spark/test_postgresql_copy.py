"""Values of Arrow as SQL writes them: each type, nested, and where a part of a batch is sent."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dualwrite.sinks.spark.column_types import LITERAL, VECTOR
from dualwrite.sinks.spark.databases.postgresql_copy import TextEncoder, changes, copy_into, literals
from dualwrite.sinks.spark.layout import Copied

UTC = dt.timezone.utc


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (pa.bool_(), True, "true"),
        (pa.int16(), -5, "-5"),
        (pa.float32(), 1.1, "1.1"),
        (pa.float64(), float("-inf"), "-inf"),
        (pa.decimal128(30, 2), Decimal("-12345678901234567890.10"), "-12345678901234567890.10"),
        (pa.string(), 'a "b" \\ ü', 'a "b" \\ ü'),
        (pa.binary(), b"\x00\xff", "\\x00ff"),
        (pa.binary(16), bytes(range(16)), "000102030405060708090a0b0c0d0e0f"),
        (pa.date32(), dt.date(1970, 1, 2), "J2440589"),
        (pa.timestamp("us"), dt.datetime.fromisoformat("1969-12-31T23:59:59.500000"), "J2440587 23:59:59.500000"),
        (pa.timestamp("us", "UTC"), dt.datetime(1970, 1, 1, tzinfo=UTC), "J2440588 00:00:00.000000+00"),
        (pa.time64("us"), dt.time(1, 2, 3), "01:02:03.000000"),
        (pa.duration("us"), dt.timedelta(days=-1), "-86400000000 microseconds"),
        (pa.list_(pa.int32()), [1, None, 3], "{1,NULL,3}"),
        (pa.list_(pa.string()), ["", 'a"\\', None, "NULL"], '{"","a\\"\\\\",NULL,"NULL"}'),
        (pa.list_(pa.list_(pa.int32())), [[1, 2], [3, None]], "{{1,2},{3,NULL}}"),
        (pa.list_(pa.binary()), [b"\x01"], '{"\\\\x01"}'),
        (pa.list_(pa.string()), [], "{}"),
        (pa.map_(pa.string(), pa.string()), [('k"', "v\\"), ("n", None)], '"k\\""=>"v\\\\","n"=>NULL'),
        (pa.list_(pa.map_(pa.string(), pa.string())), [[("k", "v")]], '{"\\"k\\"=>\\"v\\""}'),
        (pa.map_(pa.string(), pa.string()), [], ""),
    ],
)
def test_every_type_is_written_as_in_sql_and_null_stays_null(kind, value, text):
    array = pa.array([value, None, value], kind)
    assert literals(array).to_pylist() == [text, None, text]
    assert literals(array.slice(1)).to_pylist() == [None, text]
    assert literals(array.slice(0, 0)).to_pylist() == []


def column(encoding=LITERAL, longest=None):
    return Copied("c", 0, encoding, "text", longest)


def test_lines_keep_tabs_line_ends_and_nulls_apart():
    texts = pa.array(["a\tb", "\\N", None, "x\r\ny"])
    batch = pa.RecordBatch.from_arrays(
        [texts, pa.array([[1.0], [], None, [2.5, None]], pa.list_(pa.float32()))], ["a", "b"]
    )
    encoder = TextEncoder([column(""), column(VECTOR)])
    assert encoder.write_batch(batch) == b"a\\tb\t[1]\n\\\\N\t[]\n\\N\t\\N\nx\\r\\ny\t[2.5,NULL]\n"
    assert "FORMAT TEXT" in copy_into(("s", "t"), [column(""), column()]).as_string()
    assert "FORMAT BINARY" in copy_into(("s", "t"), [column("")]).as_string()


@pytest.mark.parametrize(
    ("kind", "values", "longest", "bad"),
    [
        (pa.list_(pa.list_(pa.int32())), [[[1]], [], None, [[1], None], [[]]], None, [3, 4]),
        (pa.list_(pa.list_(pa.string())), [[["abc"]], [["abc "]], [["a"], ["b", "abcd"]]], 3, [1, 2]),
        (pa.list_(pa.list_(pa.timestamp("us"))), [[[0]], [[0], [-(2**62)]], None], None, [1]),
    ],
)
def test_what_an_array_would_not_keep_is_found_at_any_depth(kind, values, longest, bad):
    found = changes(column(longest=longest), pa.array(values, kind))
    assert sorted({place for _, is_bad in found for place in pc.indices_nonzero(is_bad).to_pylist()}) == bad
