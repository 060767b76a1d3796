"""Messages that wait, as rows: their encoding, and what databases share in handling many of them.

Nothing here knows a writer or a lane. The databases' modules build their statements with it, and ``outbox`` calls those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from sqlalchemy import BigInteger, and_, bindparam, case, delete, func, insert, literal, select

from dualwrite.errors import IllegalStateError
from dualwrite.protocol.message import Message, MessageBatch, MessageColumns, columns_of
from dualwrite.protocol.values import PackedColumn, WaitingMessages
from dualwrite.stores.sql.drivers import CompiledOnce, execute_many_below
from dualwrite.stores.sql.tables import in_chunks

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Table

    from dualwrite.protocol.message import Header, Sendable
    from dualwrite.stores.sql.tables import Tables


# Messages as rows.

_NULL_LENGTH: Final = -1


class Row(NamedTuple):
    """One message as it is put."""

    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: bytes | None
    timestamp_ms: int | None


@dataclass(frozen=True)
class Put:
    """Messages to put, all of one lane."""

    table: Table
    writer: str
    transactional_id: str
    rows: Sequence[Row]

    @property
    def size(self) -> int:
        """The bytes of all keys, values and headers."""
        return sum(len(part) for row in self.rows for part in row[2:5] if part is not None)


def rows_of(messages: Sequence[Sendable]) -> Sequence[Row]:
    """The messages as rows, in their order.

    Raises:
        IllegalStateError: One of them cannot wait: consumed offsets belong to a Kafka transaction.
    """
    rows: list[Row] = []
    for one in messages:
        if isinstance(one, Message):
            headers = encode_headers(one.headers) if one.headers else None
            rows.append(Row(one.topic, one.partition, one.key, one.value, headers, one.timestamp_ms))
        elif isinstance(one, MessageBatch):
            if one.size is None:
                raise IllegalStateError("messages that were not checked cannot wait")
            keys: Iterable[Any] = one.keys if one.keys is not None else [None] * len(one.values)
            rows += [
                Row(one.topic, None, key, value, None, None)
                for value, key in zip(cast("Any", one.values), keys, strict=True)
            ]
        elif isinstance(one, MessageColumns):
            rows += _rows_of_columns(one)
        else:
            raise IllegalStateError("consumed offsets cannot wait in the database")
    return rows


def _rows_of_columns(columns: MessageColumns) -> Iterator[Row]:
    """Arrow's columns, row by row, as the user gave them: text is a string."""
    count = len(columns.values)

    def listed(column: Any) -> Sequence[Any]:
        return [None] * count if column is None else column.to_pylist()

    def as_bytes(part: str | bytes | None) -> bytes | None:
        return part.encode() if isinstance(part, str) else part

    for value, key, pairs, partition, timestamp in zip(*map(listed, columns[1:]), strict=True):
        headers = None
        if pairs:
            named = [tuple(pair.values()) if isinstance(pair, dict) else pair for pair in pairs]
            headers = encode_headers([(name, as_bytes(content)) for name, content in named])
        yield Row(columns.topic, partition, as_bytes(key), as_bytes(value), headers, timestamp)


def encode_headers(headers: Sequence[Header]) -> bytes:
    """Headers as in a Kafka record: a count, then names and values, each after its length (KIP-98)."""
    parts = [_varint(len(headers))]
    for name, content in headers:
        encoded = name.encode()
        parts += [_varint(len(encoded)), encoded]
        parts += [_varint(_NULL_LENGTH)] if content is None else [_varint(len(content)), content]
    return b"".join(parts)


def decode_headers(encoded: bytes) -> Sequence[Header]:
    """The headers from :func:`encode_headers`."""
    at = 0

    def number() -> int:
        nonlocal at
        shift = zigzag = 0
        while True:
            byte = encoded[at]
            at += 1
            zigzag |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004 - the mark of the last byte
                return (zigzag >> 1) ^ -(zigzag & 1)
            shift += 7

    def content() -> bytes | None:
        nonlocal at
        length = number()
        if length == _NULL_LENGTH:
            return None
        at += length
        return encoded[at - length : at]

    return [((content() or b"").decode(), content()) for _ in range(number())]


def _varint(number: int) -> bytes:
    zigzag = (number << 1) ^ (number >> 63)
    out = bytearray()
    while zigzag > 0x7F:  # noqa: PLR2004 - seven bits go into a byte
        out.append(0x80 | (zigzag & 0x7F))
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)


# Reading, deleting and putting, as the drivers do it.

_COLUMNS: Final = ("seq", "topic", "topic_partition", "key", "value", "headers", "timestamp_ms")
PUT_COLUMNS: Final = (
    "writer",
    "transactional_id",
    "topic",
    "topic_partition",
    "key",
    "value",
    "headers",
    "timestamp_ms",
)


class Asked(NamedTuple):
    """What to read: of which writer, from above which floor (on which server), and how much."""

    writer: str
    floor: int
    server: str
    limit: int
    max_bytes: int


def on_server(mark: ColumnElement[Any], server: str, number: int) -> ColumnElement[int]:
    """The number if the server that executes this has that mark, else 0."""
    return case((mark == literal(server), literal(number, BigInteger())), else_=literal(0, BigInteger()))


def size_of_row(table: Table) -> ColumnElement[int]:
    """The bytes of a row's key, value and headers."""
    return (
        func.coalesce(func.length(table.c.key), 0)
        + func.coalesce(func.length(table.c.value), 0)
        + func.coalesce(func.length(table.c.headers), 0)
    )


def read_in_two(connection: Connection, tables: Tables, asked: Asked, above: ColumnElement[int]) -> WaitingMessages:
    """Read by SQLAlchemy, in two statements: what fits, by sizes alone, and then that."""
    outbox = tables.outbox
    mine = and_(outbox.c.writer == asked.writer, outbox.c.seq > above)
    sizes = connection.execute(
        select(outbox.c.seq, size_of_row(outbox)).where(mine).order_by(outbox.c.seq).limit(asked.limit + 1)
    ).all()
    fitting = _fitting([size for _, size in sizes], asked)
    if not fitting:
        return NOTHING
    columns = [outbox.c[name] for name in _COLUMNS]
    # Whatever has come in between the two statements moves others out: their sizes were not counted.
    chosen = select(*columns, outbox.c.put_at).where(mine, outbox.c.seq <= sizes[fitting - 1][0])
    rows = connection.execute(chosen.order_by(outbox.c.seq).limit(fitting)).all()
    *found, put = columns_of(rows)
    return as_messages(found, [int(moment.timestamp() * 1000) for moment in put], more=len(sizes) > fitting)


def _fitting(sizes: Sequence[int], asked: Asked) -> int:
    """How many of the messages with these sizes to take."""
    count = sum(until <= asked.max_bytes for until in accumulate(sizes))
    return min(max(count, 1), asked.limit, len(sizes))


def as_messages(columns: Sequence[Any], produced_ms: Sequence[int], *, more: bool) -> WaitingMessages:
    """The columns :data:`_COLUMNS` as messages. Those of partitions, headers and timestamps may be None."""
    numbers, topics, partitions, keys, values, headers, timestamps = columns
    decoded = None
    if headers is not None and any(headers):
        decoded = [() if part is None else decode_headers(part) for part in headers]
    return WaitingMessages(
        numbers=numbers,
        topics=topics,
        values=values,
        keys=keys,
        partitions=_unless_null(partitions),
        headers=decoded,
        timestamps_ms=_unless_null(timestamps),
        produced_ms=produced_ms,
        size=sum(map(_size_of, (keys, values, headers))),
        more=more,
    )


def _unless_null(column: Sequence[Any] | None) -> Sequence[Any] | None:
    return None if column is None or column.count(None) == len(column) else column


def _size_of(column: Sequence[bytes | None] | None) -> int:
    if isinstance(column, PackedColumn):
        return len(column.data)
    return sum(map(len, filter(None, column or ())))


NOTHING: Final = WaitingMessages((), (), (), (), None, None, None, (), 0, more=False)


def delete_by_number(connection: Connection, table: Table, numbers: Sequence[int]) -> int:
    """Delete by SQLAlchemy: exactly these, as a range would take along what has come late."""
    return sum(connection.execute(delete(table).where(table.c.seq.in_(some))).rowcount for some in in_chunks(numbers))


def put_by_driver(connection: Connection, put: Put) -> None:
    """Put in the driver's form for many rows."""
    own = _insert_of(put.table).text(connection)
    owner = {"writer": put.writer, "transactional_id": put.transactional_id}
    values: list[Any] = [
        {
            **owner,
            "topic": row.topic,
            "topic_partition": row.partition,
            "key": row.key,
            "value": row.value,
            "headers": row.headers,
            "timestamp_ms": row.timestamp_ms,
        }
        for row in put.rows
    ]
    if own is None:
        connection.execute(insert(put.table), values)
        return
    if own.order is not None:
        values = [tuple([row[name] for name in own.order]) for row in values]
    execute_many_below(connection, own.template, values)


@lru_cache(maxsize=64)
def _insert_of(table: Table) -> CompiledOnce:
    """The statement of :func:`put_by_driver`."""
    return CompiledOnce(insert(table).inline().values({name: bindparam(name) for name in PUT_COLUMNS}))
