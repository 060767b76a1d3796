"""Arrow's columns as single messages."""

import pyarrow as pa
import pytest

from dualwrite.kafka.librdkafka.producer import contents_of, messages_of
from dualwrite.protocol.message import MessageColumns

ENTRY = pa.struct([("key", pa.string()), ("value", pa.binary())])


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.string(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_contents_are_bytes_or_none(kind):
    column = pa.array(["ä", None, ""], kind)
    assert contents_of(column) == ["ä".encode(), None, b""]
    assert contents_of(pa.chunked_array([column, column[:1]])) == ["ä".encode(), None, b"", "ä".encode()]


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"not list<"):
        contents_of(pa.array([[1]]))


@pytest.mark.parametrize("kind", [pa.list_(ENTRY), pa.map_(pa.string(), pa.binary())], ids=str)
def test_a_row_has_its_part_of_every_column(kind):
    entries = [[("a", b"1")], None]
    if not pa.types.is_map(kind):
        entries = [[{"key": "a", "value": b"1"}], None]
    columns = MessageColumns(
        "t", pa.array([b"v", b"w"]), None, pa.array(entries, kind), pa.array([3, None]), pa.array([None, 7])
    )
    found = [message[1:6] for message in messages_of(columns, 1000)]
    assert found == [(b"v", None, 3, [("a", b"1")], None), (b"w", None, None, (), 7)]
