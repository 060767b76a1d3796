"""Rows into messages: what is refused before librdkafka takes it for something else."""

from types import SimpleNamespace

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.writing.messages import produce_batch


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


@pytest.mark.parametrize("number", [-1, -2])
def test_a_negative_partition_is_refused(number):
    """A producer takes -1 for none, and chooses a partition."""
    with pytest.raises(ConfigurationError, match=f"partition of a row is {number}"):
        produced([0, number])
