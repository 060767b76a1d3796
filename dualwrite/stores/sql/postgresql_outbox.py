"""Messages that wait, on PostgreSQL through psycopg: put with the decision, read as columns, deleted by runs of numbers.

Few messages go out as text with the decision; more of them as binary arrays. Loaded where messages wait.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from psycopg.rows import tuple_row
from psycopg.types.numeric import Int8BinaryLoader
from sqlalchemy.util import await_only

from dualwrite.protocol.message import columns_of
from dualwrite.protocol.values import PackedColumn
from dualwrite.stores.sql.access import ended_inside
from dualwrite.stores.sql.dialect import name_of
from dualwrite.stores.sql.postgresql import (
    IMMEDIATE,
    NOW_TEXT,
    POOLED,
    SERVER,
    awaited,
    begun_of,
    exchange,
    literals,
    raise_failed,
    row_of,
    talk,
)
from dualwrite.stores.sql.waiting_rows import NOTHING, Put, as_messages

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

    from dualwrite.protocol.values import WaitingMessages
    from dualwrite.stores.sql.access import Begun
    from dualwrite.stores.sql.drivers import OwnText
    from dualwrite.stores.sql.tables import Tables
    from dualwrite.stores.sql.waiting_rows import Asked

# Messages as a text that goes out with the decision, and as binary arrays.

_TEXT_BYTES: Final = 16 * 1024
"""Up to this size, messages go out as text with the decision: as hexadecimal digits, they take twice as much."""
_TEXT_ROWS: Final = 32
_CHUNK_BYTES: Final = 8 * 1024 * 1024
_CHUNK_ROWS: Final = 20_000
_OIDS: Final = {"text": 25, "int4": 23, "int8": 20, "bytea": 17}
_INSERTED: Final = "(writer, transactional_id, topic, topic_partition, key, value, headers, timestamp_ms)"


def fits_in_text(put: Put) -> bool:
    """Whether the messages are few and small enough to go out with the decision."""
    return len(put.rows) <= _TEXT_ROWS and put.size <= _TEXT_BYTES


def text_of(put: Put, table: str, begun: str, quoted: Callable[[Mapping[str, object]], Mapping[str, object]]) -> str:
    """The INSERT as a text with its values. ``begun`` is the condition under which it puts anything."""
    owner = quoted({"writer": put.writer, "lane": put.transactional_id})
    rows = []
    for number, row in enumerate(put.rows):
        shown = [
            quoted({"topic": row.topic})["topic"],
            "NULL" if row.partition is None else row.partition,
            *("NULL" if part is None else f"E'\\\\x{part.hex()}'" for part in row[2:5]),
            "NULL" if row.timestamp_ms is None else row.timestamp_ms,
        ]
        if number == 0 and len(put.rows) > 1:  # VALUES take their types from the first of them
            types = ("text", "int4", "bytea", "bytea", "bytea", "int8")
            shown = [f"{value}::{kind}" for value, kind in zip(shown, types, strict=True)]
        rows.append(", ".join(map(str, shown)))
    head = f"INSERT INTO {table} {_INSERTED} SELECT {owner['writer']}, {owner['lane']}, "
    if len(rows) == 1:
        return f"{head}{rows[0]} WHERE {begun}"
    return f"{head}m.* FROM (VALUES ({'), ('.join(rows)})) m WHERE {begun}"


def chunks_of(put: Put) -> Iterator[Put]:
    """The messages in parts that one statement takes."""
    start = size = 0
    for at, row in enumerate(put.rows):
        length = sum(len(part) for part in row[2:5] if part is not None)
        if at > start and (size + length > _CHUNK_BYTES or at - start >= _CHUNK_ROWS):
            yield Put(put.table, put.writer, put.transactional_id, put.rows[start:at])
            start, size = at, 0
        size += length
    yield Put(put.table, put.writer, put.transactional_id, put.rows[start:] if start else put.rows)


def array_statement(table: str, begun: str) -> str:
    """The INSERT that takes the values of :func:`arrays_of`."""
    return (
        f"INSERT INTO {table} {_INSERTED} SELECT $1, $2, m.* FROM "  # noqa: S608 - no value stands in it
        f"unnest($3, $4, $5, $6, $7, $8) AS m(topic, topic_partition, key, value, headers, timestamp_ms) WHERE {begun}"
    )


ARRAY_TYPES: Final = (25, 25, 1009, 1007, 1001, 1001, 1001, 1016)
"""text, text, text[], int4[], bytea[], bytea[], bytea[], int8[]: as numbers of PostgreSQL's types."""


def arrays_of(put: Put) -> list[bytes | None]:
    """The values of :func:`array_statement`, in PostgreSQL's binary form."""
    topics, partitions, keys, values, headers, timestamps = columns_of(put.rows)
    return [
        put.writer.encode(),
        put.transactional_id.encode(),
        byte_array([topic.encode() for topic in topics], "text"),
        _number_array(partitions, "int4", ">i"),
        byte_array(keys, "bytea"),
        byte_array(values, "bytea"),
        byte_array(headers, "bytea"),
        _number_array(timestamps, "int8", ">q"),
    ]


def byte_array(items: Sequence[bytes | None], kind: str) -> bytes:
    """A one-dimensional array of texts or bytes as PostgreSQL's ``array_recv`` reads it."""
    length = struct.Struct(">i").pack
    parts = [_array_head(len(items), kind, has_null=None in items)]
    for item in items:
        if item is None:
            parts.append(b"\xff\xff\xff\xff")
        else:
            parts += (length(len(item)), item)
    return b"".join(parts)


def _number_array(items: Sequence[int | None], kind: str, form: str) -> bytes | None:
    if all(item is None for item in items):
        return None  # unnest() fills up with NULL
    pack = struct.Struct(form).pack
    return byte_array([None if item is None else pack(item) for item in items], kind)


def number_array(numbers: Sequence[int]) -> bytes:
    """An ``int8[]`` without nulls."""
    flat = [part for number in numbers for part in (8, number)]
    return _array_head(len(numbers), "int8", has_null=False) + struct.pack(f">{'iq' * len(numbers)}", *flat)


def _array_head(count: int, kind: str, *, has_null: bool) -> bytes:
    if not count:
        return struct.pack(">iii", 0, 0, _OIDS[kind])
    return struct.pack(">iiiii", 1, has_null, _OIDS[kind], count, 1)


def runs_of(numbers: Sequence[int]) -> Sequence[tuple[int, int]]:
    """Ascending numbers as runs of such that follow each other: the first and the last of each."""
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return [(numbers[0], numbers[-1])]
    ends = [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1]
    return [(numbers[start], numbers[end - 1]) for start, end in zip([0, *ends], [*ends, len(numbers)], strict=True)]


# Putting, reading and deleting.

_BINARY: Final = 1
_NUMBERS: Final = 1016  # int8[]
_FEW: Final = 4  # numbers in a run, on the average, that make it worth a look-up of its own


def ask_and_put(  # noqa: PLR0917 - what the adapter has found
    connection: Connection, own: OwnText, bound: Mapping[str, Any], texts: list[str], put: Put, deferred_of: str | None
) -> Sequence[object] | None:
    """Execute a decision, and put the messages: in the same exchange if they are few, else after it."""
    begun = begun_of(connection)
    driver = begun.driver
    table = name_of(connection, put.table)
    # Sent in one text, both would be one transaction by themselves, if that which was begun is gone.
    condition = f"{begun.started} = {NOW_TEXT}"
    with_it = bool(put.rows) and fits_in_text(put)
    if with_it:
        texts.append(text_of(put, table, condition, literals))
    results: list[Any] = []
    try:
        exchange(driver, "; ".join(texts), results, awaits=begun.awaits)
        row = row_of(results[-2 if with_it else -1])
        if row is None or not put.rows:
            return row
        inserted = results[-1].command_tuples or 0 if with_it else 0
        if not with_it:
            statement = array_statement(table, condition).encode()
            for chunk in chunks_of(put):
                exchange_values(driver, statement, arrays_of(chunk), ARRAY_TYPES, results, awaits=begun.awaits)
                inserted += results[-1].command_tuples or 0
    except BaseException as error:  # noqa: BLE001 - an interruption too, which SQLAlchemy passes on
        deferred_failed = len(results) == 1 and texts[0] == IMMEDIATE
        raise_failed(connection, error, own, bound, deferred_of if deferred_failed else None)
    if inserted != len(put.rows):
        raise ended_inside(
            "by another process on its connection, or by a pooler that shares connections by statement", POOLED
        )
    return row


def exchange_values(
    driver: Any,
    statement: bytes,
    values: Sequence[bytes | None],
    types: Sequence[int],
    results: list[Any],
    *,
    awaits: bool,
) -> None:
    """Send one statement with values in binary form, and add its result to the list. Otherwise as :func:`exchange`."""
    binary = [_BINARY] * len(values)
    talking = talk(driver, results, driver.pgconn.send_query_params, statement, values, types, binary, _BINARY)
    if awaits:
        await_only(awaited(driver, talking))
        return
    with driver.lock:
        type(driver).wait(driver, talking)


_BY_INDEX: Final = (
    "SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), "
    "set_config('enable_sort', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true)"
)
"""Statistics are of a moment at which the table was full or empty; and a look through the whole table would meet dead rows."""
_FIRST: Final = f"""
FROM {{table}} WHERE writer = %(writer)s
AND seq > CASE WHEN {SERVER} = %(server)s THEN %(floor)s::int8 ELSE 0 END
ORDER BY seq
"""
_SIZE: Final = "coalesce(length(key), 0) + coalesce(length(value), 0) + coalesce(length(headers), 0) AS size"
_FITTING: Final = f"""
SELECT count(*) FROM (SELECT sum(size) OVER (ORDER BY seq ROWS UNBOUNDED PRECEDING) AS until FROM (SELECT seq, {_SIZE} {_FIRST}
LIMIT %(limit)s) first) summed WHERE until <= %(max_bytes)s
"""  # noqa: S608 - no value stands in it
_BEHIND: Final = "EXISTS (SELECT FROM {table} behind WHERE behind.writer = %(writer)s AND behind.seq > max(taken.seq))"
_READ: Final = f"""
WITH whole AS MATERIALIZED (SELECT sum(size)::int8 AS size FROM (SELECT {_SIZE} {_FIRST} LIMIT %(limit)s) first)
SELECT array_agg(seq), CASE WHEN min(topic) = max(topic) THEN ARRAY[min(topic)] ELSE array_agg(topic) END,
CASE WHEN count(topic_partition) > 0 THEN array_agg(topic_partition) END,
CASE WHEN count(key) > 0 THEN array_agg(coalesce(length(key), -1)) END, string_agg(key, ''),
array_agg(coalesce(length(value), -1)), string_agg(value, ''), CASE WHEN count(headers) > 0 THEN array_agg(headers) END,
CASE WHEN count(timestamp_ms) > 0 THEN array_agg(timestamp_ms) END, array_agg(put_at),
((SELECT size FROM whole) > %(max_bytes)s OR count(*) = %(limit)s) AND {_BEHIND}
FROM (
SELECT seq, topic, topic_partition, key, value, headers, timestamp_ms, put_at {_FIRST} LIMIT
CASE WHEN (SELECT size FROM whole) <= %(max_bytes)s THEN %(limit)s ELSE greatest(1, ({_FITTING})) END
) taken
"""  # noqa: S608 - as above
"""One row of columns: an object for each row would cost more than all else, and the collector of cycles again as much.

What fits is found first, by sizes alone: a row may hold a gigabyte. Aggregates take their input in its order.
"""
_TIMESTAMP: Final = 1184  # timestamptz
_EPOCH_MS: Final = 946_684_800_000  # 2000-01-01, from which PostgreSQL counts microseconds


def _fetch_binary(
    connection: Connection, statement: str, values: Mapping[str, object] | None
) -> Sequence[Sequence[Any]]:
    """Fetch by a prepared statement, unless the connection prepares none: to plan a read may take longer than the read."""
    driver: Any = connection.connection.dbapi_connection
    try:
        with driver.cursor(binary=True, row_factory=tuple_row) as cursor:
            # As the number that it is: a moment with a time zone takes longer to make than all else of its row.
            cursor.adapters.register_loader(_TIMESTAMP, Int8BinaryLoader)
            rows: Sequence[Sequence[Any]] = cursor.execute(statement, values, prepare=True).fetchall()
            return rows
    except BaseException as error:  # noqa: BLE001 - as above
        connection._handle_dbapi_exception(error, statement, None, None, None)  # noqa: SLF001 - it alone knows its events


def read(connection: Connection, tables: Tables, asked: Asked) -> WaitingMessages:
    """Read the first messages: the columns in binary form, each in one piece. The server leaves out what does not fit."""
    table = name_of(connection, tables.outbox).replace("%", "%%")
    values: dict[str, object] = asked._asdict()
    _fetch_binary(connection, _BY_INDEX, None)
    found = _fetch_binary(connection, _READ.format(table=table), values)[0]
    numbers, topics, partitions, key_lengths, keys, lengths, contents, headers, timestamps, put, more = found
    if numbers is None:
        return NOTHING
    count = len(numbers)
    return as_messages(
        (
            numbers,
            topics if len(topics) == count else topics * count,
            partitions,
            [None] * count if keys is None else PackedColumn(keys, key_lengths),
            PackedColumn(contents or b"", lengths),
            headers,
            timestamps,
        ),
        [microseconds // 1000 + _EPOCH_MS for microseconds in put],
        more=more,
    )


def delete(connection: Connection, begun: Begun, table: Table, numbers: Sequence[int]) -> int:
    """Delete by runs of numbers that follow each other, or one by one: a range would take along what has come late."""
    name = name_of(connection, table)
    runs = runs_of(numbers)
    if len(runs) * _FEW < len(numbers):
        statement = f"DELETE FROM {name} USING unnest($1, $2) AS run(low, high) WHERE seq BETWEEN low AND high"  # noqa: S608 - a table's name
        values = [number_array(side) for side in zip(*runs, strict=True)]
    else:
        statement = f"DELETE FROM {name} WHERE seq = ANY($1)"  # noqa: S608 - as above
        values = [number_array(numbers)]
    results: list[Any] = []
    try:
        exchange_values(
            begun.driver, statement.encode(), values, [_NUMBERS] * len(values), results, awaits=begun.awaits
        )
    except BaseException as error:  # noqa: BLE001 - as above
        connection._handle_dbapi_exception(error, statement, None, None, None)  # noqa: SLF001 - as above
    return results[-1].command_tuples or 0
