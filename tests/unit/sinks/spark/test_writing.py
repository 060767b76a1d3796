"""Rows into messages: what is refused before librdkafka takes it for something else."""

from types import SimpleNamespace

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.writing import produce_batch


def produced(partitions):
    """The partitions that messages are produced to, of rows whose column says these."""
    found = []
    parts = SimpleNamespace(topic=None, key=None, value=0, headers=None, partition=1, timestamp=None)
    rows = {"value": [b"v"] * len(partitions), "partition": pa.array(partitions, pa.int32())}
    transaction = SimpleNamespace(
        produce_arrow=lambda _topic, _values, _keys, _headers, numbers, **_: found.extend(numbers.to_pylist())
    )
    produce_batch(transaction, pa.RecordBatch.from_pydict(rows), SimpleNamespace(message=parts), "topic", None)
    return found


def test_a_row_names_its_partition_or_none():
    assert produced([0, None, 3]) == [0, None, 3]
    assert produced([None]) == [None]


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.mark.parametrize(
    ("part", "kind", "values", "says"),
    [
        ("partition", pa.int32(), [0, None, -1], "the partition of a row is -1 "),
        ("timestamp", pa.int64(), [1, None, 0], "the timestamp of a row is 0 ms"),
        ("timestamp", pa.int64(), [1, None, -5], "the timestamp of a row is -5 ms"),
        ("topic", pa.string(), ["t", "", None], "the topic of a row is null "),
        ("headers", HEADERS, [[], None, [{"key": None, "value": b""}]], "a header of a row has no name "),
        ("headers", HEADERS, [[], None, [{"key": "a", "value": None}, None]], "a header of a row has no name "),
    ],
)
def test_what_a_producer_takes_for_something_else_is_refused_with_its_row(part, kind, values, says):
    """A producer takes the partition -1 for none, and librdkafka the timestamp 0 for now."""
    places = dict.fromkeys(("topic", "key", "headers", "partition", "timestamp"))
    rows = pa.RecordBatch.from_pydict({"value": [b"v"] * len(values), part: pa.array(values, kind)})
    message = SimpleNamespace(**{**places, "value": 0, part: 1})
    names = SimpleNamespace(in_batch=lambda index: f"row {index + 1} of partition 7")
    with pytest.raises(ConfigurationError, match=f"{says}.*row 3 of partition 7"):
        produce_batch(None, rows, SimpleNamespace(message=message), "topic", None, names=names)
