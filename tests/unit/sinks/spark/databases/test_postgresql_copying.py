"""Values that PostgreSQL would take for others, refused before they are sent."""

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.databases.database import require_kept
from dualwrite.sinks.spark.databases.postgresql_copy import changes
from dualwrite.sinks.spark.layout import Copied

UTC = pa.timestamp("us", "UTC")
FIRST_DAY, LAST_DAY = -2440588, 2145042905
FIRST_MICROSECOND = -210866803200000000


def taken(kind, values, longest=None):
    column = Copied("c", 0, "", "the type", longest)
    require_kept(column, changes(column, pa.array(values, kind)), lambda index: f"row {index + 1}")


@pytest.mark.parametrize(
    ("kind", "values", "longest"),
    [
        (pa.string(), [None, "", "é😀x", "a  "], 3),
        (pa.string(), ["any length"], None),
        (pa.date32(), [None, FIRST_DAY, LAST_DAY], None),
        (UTC, [None, FIRST_MICROSECOND, 2**63 - 1], None),
        (pa.list_(pa.date32()), [None, [], [None, FIRST_DAY]], None),
        (pa.list_(pa.string()), [["any length"]], None),
        (pa.int64(), [-(2**63)], None),
    ],
)
def test_what_the_type_holds_is_taken(kind, values, longest):
    taken(kind, values, longest)


@pytest.mark.parametrize(
    ("kind", "values", "longest", "says"),
    [
        (pa.string(), [None, "abc", "abc "], 3, "it has more than 3 characters"),
        (pa.date32(), [None, 0, FIRST_DAY - 1], None, "it is not in the years that the type has"),
        (pa.date32(), [None, 0, LAST_DAY + 1], None, "it is not in the years that the type has"),
        (pa.date32(), [None, 0, -(2**31)], None, "it is not in the years that the type has"),
        (UTC, [None, 0, FIRST_MICROSECOND - 1], None, "it is not in the years that the type has"),
        (pa.timestamp("us"), [None, 0, -(2**63)], None, "it is not in the years that the type has"),
        (
            pa.list_(pa.timestamp("us")),
            [None, [0, None], [0, -(2**63)]],
            None,
            "it is not in the years that the type has",
        ),
    ],
)
def test_what_it_would_change_is_refused_with_its_row(kind, values, longest, says):
    with pytest.raises(ConfigurationError, match=rf"column 'c' of type the type would not keep .*{says} \(row 3\)"):
        taken(kind, values, longest)
