"""Which rows a partition has, in whatever order and in whatever batches."""

from datetime import date, datetime, timezone
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql import types as spark

from dualwrite.sinks.spark.column_types import Form, Table, TableColumn
from dualwrite.sinks.spark.digests import Fingerprint, Fingerprinted, hashed_columns, may_mix, other_rows, row_hashes
from dualwrite.sinks.spark.layout import WHOLE_ROW, plan_layout
from dualwrite.sinks.spark.options import SinkOptions

NUMBERS = list(range(1000))
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def batch(numbers):
    texts = pa.array([None if number % 7 == 0 else f"row {number}" for number in numbers], pa.string())
    return pa.RecordBatch.from_arrays([pa.array(numbers, pa.int64()), texts], ["c0", "c1"])


def fingerprint(*batches):
    return Fingerprinted(batches, (0, 1)).take_all()


def test_the_order_and_the_size_of_batches_do_not_matter():
    whole = fingerprint(batch(NUMBERS))
    assert whole == fingerprint(batch(NUMBERS[500:]), batch(NUMBERS[:0]), batch(NUMBERS[:500][::-1]))
    assert whole == fingerprint(batch([5, *NUMBERS, 6]).slice(1, 1000))
    assert whole.rows == 1000
    assert -(2**63) <= whole.digest < 2**63


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_a_value_has_the_same_hash_beside_short_values_and_beside_long_ones(kind):
    short = pa.array(["a", None, "", "ä" * 9], kind)
    (long,) = row_hashes([pa.array(["x" * 100_000], kind)], 1)
    together = row_hashes([pa.concat_arrays([short, pa.array(["x" * 100_000], kind)])], 5)
    assert together.tolist() == [*row_hashes([short], 4).tolist(), long]
    assert row_hashes([pa.concat_arrays([short, short]).slice(3, 4)], 4).tolist() == together[[3, 0, 1, 2]].tolist()


def test_every_row_matters_and_how_often_it_comes():
    whole = fingerprint(batch(NUMBERS))
    assert whole.differs_from(fingerprint(batch(NUMBERS[1:])))
    assert whole.differs_from(fingerprint(batch([*NUMBERS[1:], NUMBERS[1]])))
    assert whole.differs_from(fingerprint())
    assert not fingerprint().differs_from(fingerprint(batch([])))


def test_what_is_passed_on_is_what_came():
    given = [batch(NUMBERS[:3]), batch(NUMBERS[3:])]
    taken = Fingerprinted(given, (0, 1))
    assert list(taken) == given
    assert taken.fingerprint() == fingerprint(*given)


def test_rows_that_are_only_counted_differ_by_their_number_alone():
    counted = Fingerprinted([batch(NUMBERS)], None).take_all()
    assert counted == Fingerprint(1000, None)
    assert not counted.differs_from(fingerprint(batch([*NUMBERS[1:], 1])))
    assert counted.differs_from(fingerprint())


def test_a_digest_of_another_form_says_nothing_but_the_number_of_rows_does():
    ours = fingerprint(batch(NUMBERS))
    assert not ours.differs_from(Fingerprint(1000, ours.digest ^ 1))
    assert ours.differs_from(Fingerprint(1000, ours.digest ^ (1 << 16)))
    assert ours.differs_from(Fingerprint(999, ours.digest ^ 1))


def test_the_digest_of_the_same_rows_stays_the_same_from_version_to_version():
    """If this number must change, raise the form: a batch that the earlier version has begun holds the other one."""
    assert fingerprint(batch(NUMBERS)) == Fingerprint(1000, -7721434239243714558)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((["phone"], [None]), ([None], ["phone"])),
        ((["a"], ["bc"]), (["ab"], ["c"])),
        ((["a", "b"], ["x", "y"]), (["a", "b"], ["y", "x"])),
        (([""], ["a"]), ([None], ["a"])),
    ],
    ids=["a null", "a boundary", "values exchanged by two rows", "an empty text"],
)
def test_values_that_move_between_columns_or_rows_are_seen(one, other):
    def sum_of(columns):
        return row_hashes([pa.array(values, pa.string()) for values in columns], len(columns[0])).sum()

    assert sum_of(one) != sum_of(other)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.bool_(), [False, True]),
        (pa.int8(), [-1, 0, 1]),
        (pa.int32(), [-1, 0, 1 << 30]),
        (pa.float64(), [0.0, -0.0, float("nan"), float("inf"), 0.1]),
        (pa.decimal128(38, 2), [Decimal("0.01"), Decimal("-0.01"), Decimal(10**30)]),
        (pa.string(), ["", "a", "null", "\0"]),
        (pa.binary(), [b"", b"\0", b"\0\0"]),
        (pa.date32(), [date(1970, 1, 1), date(2020, 2, 29)]),
        (pa.timestamp("us", "UTC"), [datetime(1969, 12, 31, tzinfo=timezone.utc), datetime(1970, 1, 1, tzinfo=timezone.utc)]),
        (pa.list_(pa.int32()), [[], [None], [1, None], [None, 1], [1], [1, 1], [1, 2], [2, 1]]),
        (pa.list_(pa.list_(pa.string())), [[[]], [["a"], []], [[], ["a"]], [["a"]], [[], []], [None]]),
        (pa.map_(pa.string(), pa.int32()), [[], [("a", 1)], [("a", None)], [("a", 1), ("b", 2)], [("b", 2), ("a", 1)]]),
        (pa.struct([("a", pa.int32()), ("b", pa.int32())]), [{"a": 1, "b": None}, {"a": None, "b": 1}, {"a": None, "b": None}]),
        (HEADERS, [[], [{"key": "a", "value": b""}], [{"key": "a", "value": None}], [{"key": None, "value": None}], [None]]),
        (pa.null(), []),
    ],
    ids=str,
)  # fmt: skip
def test_each_value_of_each_type_has_a_hash_of_its_own_and_the_same_in_every_batch(kind, values):
    values = [None, *values]
    whole = pa.array(values, kind)
    hashes = row_hashes([whole], len(whole))
    assert len(set(hashes.tolist())) == len(values)
    for index in range(len(values)):
        assert row_hashes([whole.slice(index)], len(values) - index).tolist() == hashes[index:].tolist()
        assert row_hashes([pa.array(values[: index + 1], kind)], index + 1).tolist() == hashes[: index + 1].tolist()


def planned(**settings):
    schema = (
        spark.StructType().add("id", spark.LongType()).add("body", spark.StringType()).add("at", spark.TimestampType())
    )
    columns = {"id": TableColumn("id", "int8", "bigint"), "body": TableColumn("body", "text", "text")}
    given = {"sink": "s", "kafka": {"bootstrap.servers": "b:1"}, "url": "postgresql+psycopg://db/air", "topic": "t"}
    options = SinkOptions(**given, table="rows", timestamp="at", **settings)
    return plan_layout(schema, options, Table("public", "rows", columns))


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({"key": "id"}, [(WHOLE_ROW, Form.JSON), (2, Form.MILLIS)]),
        ({"columns": ["id"], "key": "body"}, [(WHOLE_ROW, Form.JSON), (1, Form.PLAIN), (2, Form.MILLIS)]),
        ({"columns": ["id"], "value": "body"}, [(0, Form.PLAIN), (1, Form.PLAIN), (2, Form.MILLIS)]),
        ({"columns": ["id", "body"], "value": "body"}, [(0, Form.PLAIN), (1, Form.PLAIN), (2, Form.MILLIS)]),
    ],
    ids=["json", "json and a key beside it", "a row that the message lacks", "a row that has the message"],
)
def test_the_row_is_hashed_as_well_as_the_message_and_nothing_twice(settings, seen):
    layout = planned(**settings)
    assert sorted((one.source, one.form) for one in (layout.projected[n] for n in hashed_columns(layout))) == seen


def test_the_error_tells_the_number_of_rows():
    assert "with 5 rows, and has 3 rows now" in str(other_rows("partition 0", Fingerprint(3, 1), Fingerprint(5, 2)))
    assert "with 5 rows, and has other rows now" in str(other_rows("partition 0", Fingerprint(5, 1), Fingerprint(5, 2)))


def test_a_warning_is_for_batches_that_two_runs_could_write():
    assert 'format("dualwrite")' in may_mix("x is not compared", 4, 3)
    for partition_count, written in ((0, 0), (1, 0), (4, 4)):
        assert may_mix("x is not compared", partition_count, written) is None
