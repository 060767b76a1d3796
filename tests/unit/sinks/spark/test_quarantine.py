"""Which rows are put aside, what is said of them, and what is left of the batch. Without servers."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, BinaryType, LongType, StringType, StructType

from dualwrite import ConfigurationError, TransactionAborted
from dualwrite.sinks.spark.column_types import Table, TableColumn
from dualwrite.sinks.spark.digests import hashed_columns
from dualwrite.sinks.spark.layout import plan_layout
from dualwrite.sinks.spark.options import SinkOptions
from dualwrite.sinks.spark.quarantine import Sieve, quarantine_target
from dualwrite.sinks.spark.sendable import projected_batches
from dualwrite.sinks.spark.targets import Target

OPTIONS = SinkOptions(
    sink="s", kafka={}, url="postgresql+psycopg://db/x", table="t", topic="t", key="name", quarantine_topic="aside"
)
TABLE = Table("public", "t", {"id": TableColumn("id", "int4", "integer"), "name": TableColumn("name", "text", "text")})
SCHEMA = StructType().add("id", LongType()).add("name", StringType())
TOO_LARGE = 2**40


class Database:
    """Refuses rows by their names."""

    def __init__(self, **refused):
        self.refused = refused
        self.asked = []

    def wrong_rows(self, layout, batch, *, most):  # noqa: ARG002 - its signature
        names = batch.column(layout.table_columns[1].source).to_pylist()
        self.asked.append(names)
        return {place: self.refused[name] for place, name in enumerate(names) if name in self.refused}


def sifted(database, *batches, options=OPTIONS):
    """The rows that the table takes, and what is put aside."""
    layout = plan_layout(SCHEMA, options, TABLE)
    targets = [Target.of(options, layout), quarantine_target(None, options, database)]
    sieve = Sieve(options, targets, database, "b", 2)
    rows = [pa.RecordBatch.from_pydict({"id": ids, "name": [f"n{number}" for number in ids]}) for ids in batches]
    taken, aside = [], []
    for number, batch in sieve.sift((0, one) for one in projected_batches(rows, SCHEMA, layout)):
        if number == 0:
            taken += batch.column(layout.table_columns[0].source).to_pylist()
        else:
            aside += [json.loads(text) for text in batch.column(targets[1].layout.message.value).to_pylist()]
    assert len(aside) == sieve.count
    return taken, aside


def test_rows_that_fit_no_type_are_put_aside_and_the_database_is_asked_about_the_others():
    database = Database(n3="not three")
    taken, aside = sifted(database, [1, TOO_LARGE, 3], [4])
    assert taken == [1, 4]
    assert database.asked == [["n1", "n3"], ["n4"]]
    [large, three] = aside
    assert large["row"] == {"id": TOO_LARGE, "name": f"n{TOO_LARGE}"}
    assert "column 'id' does not fit int32" in large["reason"]
    about = {
        "reason": "not three",
        "row": {"id": 3, "name": "n3"},
        "sink": "s",
        "batch_id": "b",
        "table_name": "public.t",
    }
    assert three == {**about, "partition_id": 2, "row_number": 3}


def test_a_list_with_a_text_that_is_none_spoils_its_own_row_alone():
    tags = TableColumn("tags", "_text", "text[]", element_type="text")
    schema = StructType().add("name", StringType()).add("tags", ArrayType(StringType()))
    columns = {"name": TABLE.columns["name"], "tags": tags}
    layout = plan_layout(schema, OPTIONS, Table("public", "t", columns))
    texts = pa.array([[b"a"], [b"b", b"\xff"], None, [b"c"]], pa.list_(pa.binary()))
    lists = pa.ListArray.from_arrays(texts.offsets, texts.values.cast(pa.string(), safe=False), mask=texts.is_null())
    rows = pa.RecordBatch.from_arrays([pa.array(["n1", "n2", "n3", "n4"]), lists], ["name", "tags"])
    [batch] = projected_batches([rows], schema, layout)
    assert batch.column(layout.table_columns[1].source).to_pylist() == [["a"], None, None, ["c"]]
    [none, wrong, no_list, last] = batch.columns[-1].to_pylist()
    assert (none, no_list, last) == (None, None, None)
    assert "column 'tags' does not fit list<" in wrong


def test_rows_are_numbered_in_their_partition():
    _, aside = sifted(Database(n1="x", n5="x"), [0, 1, 2], [3, 4, 5])
    assert [one["row_number"] for one in aside] == [2, 6]


def test_more_rows_than_the_limit_are_refused_with_the_first_one():
    options = replace(OPTIONS, quarantine_limit=1)
    assert len(sifted(Database(n1="x"), [0, 1, 2], options=options)[1]) == 1
    words = r"quarantine_limit \(1\) allows: partition 2 has at least 2 of them; row 4 of partition 2: y"
    with pytest.raises(TransactionAborted, match=words) as refused:
        sifted(Database(n1="x", n3="y"), [0, 1, 2], [3], options=options)
    assert not refused.value.retryable


def test_nothing_is_put_aside_where_nothing_is_wrong():
    assert sifted(Database(), [1, 2]) == ([1, 2], [])


def test_a_row_has_the_same_digest_with_a_quarantine_and_without_one():
    for options in (OPTIONS, replace(OPTIONS, value="name", value_format="raw")):
        without = replace(options, quarantine_topic=None)
        layouts = [plan_layout(SCHEMA, one, TABLE) for one in (options, without)]
        found, plain = ([layout.projected[place] for place in hashed_columns(layout)] for layout in layouts)
        assert found == plain


def test_without_a_quarantine_a_value_that_does_not_fit_is_refused():
    layout = plan_layout(SCHEMA, replace(OPTIONS, quarantine_topic=None), TABLE)
    rows = [pa.RecordBatch.from_pydict({"id": [TOO_LARGE], "name": ["x"]})]
    with pytest.raises(ConfigurationError, match="a value of column 'id' does not fit int32"):
        list(projected_batches(rows, SCHEMA, layout))


def test_bytes_that_are_no_text_go_into_a_topic_as_binary():
    options = replace(OPTIONS, key=None, value="name", value_format="raw", columns=["id"], quarantine_topic=None)
    names = pa.array([b"\xff"])
    rows = [pa.RecordBatch.from_arrays([pa.array([1]), names.cast(pa.string(), safe=False)], ["id", "name"])]
    with pytest.raises(ConfigurationError, match=r"'name' does not fit string: .*cast\(\"binary\"\)"):
        list(projected_batches(rows, SCHEMA, plan_layout(SCHEMA, options, TABLE)))
    schema = StructType().add("id", LongType()).add("name", BinaryType())
    layout = plan_layout(schema, options, TABLE)
    [batch] = projected_batches([pa.RecordBatch.from_arrays([pa.array([1]), names], ["id", "name"])], schema, layout)
    assert batch.column(layout.message.value).to_pylist() == [b"\xff"]
