"""Rows of a partition, named in errors."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from dualwrite.sinks.spark import digests
from dualwrite.sinks.spark.column_types import Form
from dualwrite.sinks.spark.digests import RowNames, table_key
from dualwrite.sinks.spark.layout import Copied, MessageColumns, Projected


def layout(key):
    """The DataFrame's columns are ``id`` and ``name``; the key is the id as text."""
    message = MessageColumns(value=2, key=key, topic=None, headers=None, partition=None, timestamp=None)
    projected = (
        Projected(0, Form.TEXT, pa.string()),
        Projected(1, Form.PLAIN, pa.string()),
        Projected(-1, Form.JSON, pa.string()),
        Projected(0, Form.PLAIN, pa.int64()),
    )
    columns = (Copied("number", 3, "", "bigint"), Copied("title", 1, "", "text"))
    return SimpleNamespace(message=message, projected=projected, table_columns=columns)


def batch(*keys):
    return pa.RecordBatch.from_pydict({"c0": list(keys), "c1": ["x"] * len(keys)})


def test_rows_are_counted_over_all_batches_and_named_by_key():
    names = RowNames(3, layout(0))
    names.add(batch("a", "b"))
    assert names.in_batch(1) == "row 2 of partition 3, key 'b'"
    names.add(batch("c", "d"))
    assert names.in_batch(0) == "row 3 of partition 3, key 'c'"
    assert [names.of(number) for number in (1, 4)] == [
        "row 1 of partition 3, key 'a'",
        "row 4 of partition 3, key 'd'",
    ]
    assert names.of(5) == "row 5 of partition 3"


def test_keys_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(digests, "_MOST_BYTES", 10)
    names = RowNames(0, layout(0))
    for keys in (("a" * 20, "b"), ("c", "d")):
        names.add(batch(*keys))
    assert names.of(2) == "row 2 of partition 0, key 'b'"
    assert names.of(3) == "row 3 of partition 0"
    assert names.in_batch(0) == "row 3 of partition 0, key 'c'"


def test_long_keys_are_cut_and_messages_without_a_key_have_none():
    names = RowNames(0, layout(0))
    names.add(batch("k" * 100))
    assert names.of(1).endswith(f"key '{'k' * 64}...'")
    names = RowNames(0, layout(None))
    names.add(batch("a"))
    assert names.of(1) == names.in_batch(0) == "row 1 of partition 0"


@pytest.mark.parametrize(("key", "columns"), [(None, []), (0, ["number"]), (1, ["title"]), (2, [])])
def test_the_keys_column_of_the_table_is_found_by_the_column_that_both_are_made_of(key, columns):
    assert list(table_key(layout(key))) == columns
