"""Arrow columns as literals of MariaDB: exact, and refused where the server would change a value without an error."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest

from dualwrite import ConfigurationError
from dualwrite.sinks.spark.databases.mariadb import literal_rows, statements
from dualwrite.sinks.spark.layout import Copied


def rows(*columns):
    """The rows of columns that are given as type and array."""
    copied = [Copied(f"c{number}", number, "", kind) for number, (kind, _) in enumerate(columns)]
    return literal_rows(copied, [array for _, array in columns], lambda index: f"row {index + 1}")


@pytest.mark.parametrize(
    ("kind", "array", "literals"),
    [
        ("varchar(9)", pa.array(["it's", "a\\b", "😀", "", None]), ["'it\\'s'", "'a\\\\b'", "'😀'", "''", "NULL"]),
        ("tinyint(1)", pa.array([True, False, None]), ["1", "0", "NULL"]),
        ("bigint(20)", pa.array([-(2**63), None]), ["-9223372036854775808", "NULL"]),
        ("blob", pa.array([b"\x00'\\\xff", b"", None]), ["X'00275cff'", "X''", "NULL"]),
        ("binary(2)", pa.array([b"ab", None]), ["X'6162'", "NULL"]),
        ("double", pa.array([0.1, 1e300, None]), ["'0.1'", "'1e+300'", "NULL"]),
        ("decimal(38,10)", pa.array([Decimal("1E-10"), None], pa.decimal128(38, 10)), ["'1E-10'", "NULL"]),
        ("date", pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31)]), ["'0001-01-01'", "'9999-12-31'"]),
        (
            "timestamp(6)",
            pa.array([dt.datetime(2020, 1, 2, 3, 4, 5, 6, dt.timezone.utc)], pa.timestamp("us", "UTC")),
            ["'2020-01-02 03:04:05.000006'"],
        ),
        ("datetime", pa.array([dt.datetime.fromisoformat("2020-01-02T03:04:05")]), ["'2020-01-02 03:04:05.000000'"]),
        ("time(3)", pa.array([dt.time(1, 2, 3, 4000)], pa.time64("us")), ["'01:02:03.004000'"]),
        ("enum('a','it''s')", pa.array(["it's", None]), ["'it\\'s'", "NULL"]),
    ],
)
def test_each_value_is_a_literal_of_its_own(kind, array, literals):
    assert rows((kind, array)) == literals


@pytest.mark.parametrize(
    ("kind", "array", "says"),
    [
        ("bigint(20) NOT NULL", pa.array([1, None]), "NULL, which the server would replace"),
        ("double", pa.array([1.0, float("nan")]), "not a finite number"),
        ("float", pa.array([1.0, float("-inf")], pa.float32()), "not a finite number"),
        ("datetime", pa.array([0, 1], pa.timestamp("us")), "more than 0 digits of a second"),
        ("timestamp(3)", pa.array([0, 1], pa.timestamp("us", "UTC")), "more than 3 digits of a second"),
        ("time(2)", pa.array([0, 1], pa.time64("us")), "more than 2 digits of a second"),
        ("datetime(6)", pa.array([0, 253402300800000000], pa.timestamp("us")), "year"),
        ("datetime(6)", pa.array([0, -62135596800000001], pa.timestamp("us")), "year"),
        ("date", pa.array([0, 2932897], pa.date32()), "year"),
        ("binary(2)", pa.array([b"ab", b"a"]), "it is not 2 bytes long"),
        ("char(9)", pa.array(["a", "a "]), "ends with a space"),
        ("enum('1','2')", pa.array(["1", "3"]), "the column does not list it"),
    ],
)
def test_a_value_that_the_server_would_change_is_refused_by_column_and_row(kind, array, says):
    with pytest.raises(ConfigurationError, match=rf"column 'c0' of type .*{says}.*\(row 2\)"):
        rows((kind, array))


def test_a_row_has_all_its_columns():
    assert rows(("int(11)", pa.array([1, 2])), ("text", pa.array(["a", None]))) == ["1,'a'", "2,NULL"]


def test_inserts_are_of_bounded_size_and_hold_each_row_once():
    given = ["x" * length for length in (10, 10, 10, 500, 1)]
    found = statements(given, 30)
    assert [row for start, end in found for row in given[start:end]] == given
    assert found == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert statements([], 30) == []


def test_a_row_may_be_excused_from_a_column():
    column, array = Copied("c0", 0, "", "timestamp(6) NOT NULL"), pa.array([0, None], pa.timestamp("us", "UTC"))
    assert literal_rows([column], [array], "row {}".format, [pa.array([False, True])])[1] == "NULL"
    with pytest.raises(ConfigurationError, match="NULL, which the server would replace"):
        literal_rows([column], [array], "row {}".format, [pa.array([True, False])])
