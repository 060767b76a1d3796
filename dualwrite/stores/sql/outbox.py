"""Messages that wait, as rows of the user's SQL database: put with a decision, read in order, deleted as they are sent.

**Cheap to put.** On PostgreSQL a block's few messages go out with its decision, in one request; many go as binary arrays, in
statements of their own after it. MariaDB, MySQL and SQLite take them in their drivers' form for many rows.

**The count comes first.** A block raises the count in the row of its lane before its messages draw their numbers. So whoever
has numbers that are not committed yet holds the lock on that row, and :class:`Floor` can tell when nobody has.

**Fast to read, all day.** A table that is written and emptied all the time has its dead rows at the head of the index: while
any snapshot in the database is older than they are, a read that begins at the first number steps over every one of them. So
a read begins at a floor: a number below which nothing is, nor can come any more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from sqlalchemy import (
    BigInteger,
    and_,
    bindparam,
    case,
    delete,
    exc,
    func,
    insert,
    literal,
    or_,
    select,
    union,
    update,
)

from dualwrite.clock import now_s
from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.protocol.message import Message, MessageBatch, MessageColumns
from dualwrite.protocol.values import AsideMessage, FirstLook, OutboxMode, Waiting, WaitingMessages
from dualwrite.stores.sql.access import map_database_error
from dualwrite.stores.sql.drivers import CompiledOnce, execute_many_below
from dualwrite.stores.sql.tables import MAX_ID_LENGTH, check_not_gone_back, database_now, in_chunks

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Engine, Table

    from dualwrite.clock import Deadline
    from dualwrite.protocol.message import Header, Sendable
    from dualwrite.protocol.values import Decision, StateRow
    from dualwrite.stores.sql.dialect import Dialect
    from dualwrite.stores.sql.short_transactions import ShortTransactions
    from dualwrite.stores.sql.store import Decisions
    from dualwrite.stores.sql.tables import Tables

Result = TypeVar("Result")


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
        IllegalStateError: One of them cannot wait: consumed offsets belong to a transaction of Kafka's.
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
    """Arrow's columns, row by row: they are as the user gave them, and text is a string there."""
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
    """Headers as they stand in a record of Kafka's: a count, then names and values, each after its length (KIP-98)."""
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


# PostgreSQL's own ways: a text that goes out with the decision, and binary arrays.

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
    topics, partitions, keys, values, headers, timestamps = zip(*put.rows, strict=True)
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


# The floor of a writer's rows.

_WORTH: Final = 2000
"""So many rows may be dead behind the floor: a read steps over them in less time than it takes to prove another floor."""
_AGAIN_S: Final = 0.2


@dataclass
class Floor:
    """A number of one writer's below which nothing waits, nor can come any more; and what is known of the next one.

    *Claim.* A read that begins above the floor misses nothing.

    *Proof.* Take any number S that a read has shown: its row is committed. Numbers of a sequence grow, so every number up to S
    was drawn before that read. A transaction that draws numbers has, before the first of them, changed and so locked the row
    of its lane (``decide``), or locked the writer's mode alone (``replay``), and keeps that lock until it ends. After the read,
    the rows of all lanes, and of the mode, are looked at in other transactions. If a row can be locked, or is gone, or its
    count is another one than after the read, then whoever had locked it at the time of the read has ended: the count changes
    with the commit of such a transaction, or of a later one that had to wait for the lock. Lanes that are born later draw
    greater numbers. So once this was seen of each row, one after the other, no number up to S can be committed any more that
    is not committed already. A read whose snapshot is taken after that, and which begins at the former floor, shows all that is
    left of them; if its first row has the number m, nothing is left, nor can come, below the smaller of S + 1 and m. That is
    the next floor. What this read takes away counts only when a later one no longer shows it: the transaction may roll back.

    *Where it holds.* On the server that has said all this. After a failover to one that lags behind, numbers may be drawn once
    more; so the floor counts only where the server's mark is the same, which the statement that reads compares itself. A
    restored database is another server. `setval` by hand is not foreseen.

    It is one process's knowledge, found again in a moment by the next. One thread at a time reads a writer's rows.

    Attributes:
        number: The floor.
        server: The mark of the server that it holds on.
        candidate: The number S of the proof; None while none is under way.
        unseen: The rows that were locked each time since, with their counts after the read.
        proved_in: The transaction in which the last of them was seen; None before. Its own snapshot may be older.
        taken: The rows read since the floor was raised.
        asked_s: When the rows were looked at last.
    """

    number: int = 0
    server: str = ""
    candidate: int | None = None
    unseen: Mapping[str, object] = field(default_factory=dict)
    proved_in: object = None
    taken: int = 0
    asked_s: float = float("-inf")

    def read(self, transaction: object, numbers: Sequence[int]) -> None:
        """A read in that transaction, which began at this floor, has shown these numbers."""
        if self.proved_in is not None and self.proved_in is not transaction:
            assert self.candidate is not None
            self.number = min(self.candidate, numbers[0] - 1) if numbers else self.candidate
            self.candidate, self.proved_in, self.taken = None, None, 0
        self.taken += len(numbers)

    @property
    def is_due(self) -> bool:
        """Whether to look at the rows of the lanes, in another transaction than the one that reads."""
        if self.proved_in is not None:
            return False
        return (self.candidate is not None or self.taken >= _WORTH) and now_s() >= self.asked_s + _AGAIN_S

    def look(self, transaction: object, last: int, seen: Seen) -> None:
        """What the look has shown, after a read in that transaction whose last number was this."""
        self.asked_s = now_s()
        if seen.server != self.server:
            self.number, self.server, self.candidate = 0, seen.server, None
        if self.candidate is None:
            self.candidate, before = last, seen.counts
        else:
            before = self.unseen
        self.unseen = {
            name: count
            for name, count in before.items()
            if name not in seen.free and name in seen.counts and seen.counts[name] == count
        }
        self.proved_in = None if self.unseen else transaction


class Seen(NamedTuple):
    """The rows of a writer's lanes, and of its mode: their counts, and those that could be locked after that."""

    server: str
    counts: Mapping[str, object]
    free: Collection[str]


# The rows, in the caller's transaction and in our own.

_COLUMNS: Final = ("seq", "topic", "topic_partition", "key", "value", "headers", "timestamp_ms")
_SAMPLE: Final = 5000
_ASIDE: Final = (
    "writer",
    "transactional_id",
    "topic",
    "topic_partition",
    "key",
    "value",
    "headers",
    "timestamp_ms",
)
_MODE_KEY: Final = "#mode of "  # no lane has a name like that


LOCK_S: Final = 75.0


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
    *found, put = zip(*rows, strict=True)
    return as_messages(found, [int(moment.timestamp() * 1000) for moment in put], more=len(sizes) > fitting)


def _fitting(sizes: Sequence[int], asked: Asked) -> int:
    """How many of the messages with these sizes to take."""
    count = sum(until <= asked.max_bytes for until in accumulate(sizes))
    return min(max(count, 1), asked.limit, len(sizes))


def as_messages(columns: Sequence[Sequence[Any]], produced_ms: Sequence[int], *, more: bool) -> WaitingMessages:
    """The columns :data:`_COLUMNS` as messages."""
    numbers, topics, partitions, keys, values, headers, timestamps = columns
    size = sum(sum(map(len, filter(None, column))) for column in (keys, values, headers))
    decoded = None
    if any(headers):
        decoded = [() if part is None else decode_headers(part) for part in headers]
    return WaitingMessages(
        numbers=numbers,
        topics=topics,
        values=values,
        keys=keys,
        partitions=None if partitions.count(None) == len(partitions) else partitions,
        headers=decoded,
        timestamps_ms=None if timestamps.count(None) == len(timestamps) else timestamps,
        produced_ms=produced_ms,
        size=size,
        more=more,
    )


NOTHING: Final = WaitingMessages((), (), (), (), None, None, None, (), 0, more=False)


def delete_by_number(connection: Connection, table: Table, numbers: Sequence[int]) -> int:
    """Delete by SQLAlchemy: exactly these, as a range would take along what has come late."""
    return sum(connection.execute(delete(table).where(table.c.seq.in_(some))).rowcount for some in in_chunks(numbers))


def runs_of(numbers: Sequence[int]) -> Sequence[tuple[int, int]]:
    """Ascending numbers as runs of such that follow each other: the first and the last of each."""
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return [(numbers[0], numbers[-1])]
    ends = [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1]
    return [(numbers[start], numbers[end - 1]) for start, end in zip([0, *ends], [*ends, len(numbers)], strict=True)]


def put_by_driver(connection: Connection, statement: CompiledOnce, put: Put) -> None:
    """Put in the driver's form for many rows."""
    own = statement.text(connection)
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
def insert_of(table: Table) -> CompiledOnce:
    """The statement of :func:`put_by_driver`."""
    return CompiledOnce(insert(table).inline().values({name: bindparam(name) for name in _ASIDE}))


def _only(row: Sequence[Any] | None) -> Any:
    return None if row is None else row[0]


def _as_mode(found: str | None) -> OutboxMode:
    return OutboxMode.DIRECT if found is None else OutboxMode(found)


class SqlOutbox:
    """The messages that wait in a SQL database. Implements :class:`dualwrite.interfaces.OutboxRows`. Thread-safe.

    Writers of ``never`` use none of it, and work on tables that lack it.
    """

    def __init__(
        self, engine: Engine, tables: Tables, dialect: Dialect, decisions: Decisions, own: ShortTransactions
    ) -> None:
        self._engine = engine
        self._tables = tables
        self._dialect = dialect
        self._decisions = decisions
        self._own = own
        self._floors: dict[str, Floor] = {}
        mode = tables.mode
        named = mode.c.writer == bindparam("writer_")
        self._read_mode = CompiledOnce(select(mode.c.mode).where(named))
        self._share = CompiledOnce(select(mode.c.mode).where(named).with_for_update(read=True))
        self._lock = CompiledOnce(select(mode.c.mode).where(named).with_for_update())
        self._turn = CompiledOnce(update(mode).where(named).values(mode=bindparam("mode_"), changed_at=database_now()))

    # Inside the caller's transaction

    def read_first(
        self,
        connection: Connection,
        transactional_id: str,
        writer: str,
        *,
        namespace: str | None = None,
        known: StateRow | None = None,
    ) -> FirstLook:
        bound = {"id_": transactional_id, "namespace_": namespace, "writer_": writer}
        with self._mapped(transactional_id):
            first = self._dialect.read_first(connection, self._decisions.start_waiting, bound)
        mode, decisions, incarnation, prepared, *values = first
        self._dialect.check_start(connection, values)
        if incarnation is not None and known is not None:
            check_not_gone_back(known, int(incarnation), prepared)
        return FirstLook(
            None if incarnation is None else int(incarnation),
            _as_mode(mode),
            0 if decisions is None else int(decisions),
        )

    def mode(self, connection: Connection, writer: str) -> OutboxMode:
        with self._mapped():
            return _as_mode(_only(self._read_mode.execute(connection, {"writer_": writer})[0]))

    def share(self, connection: Connection, writer: str, *, within_s: float) -> OutboxMode:
        with self._mapped():
            return _as_mode(_only(self._dialect.ask_locked(connection, self._share, {"writer_": writer}, within_s)))

    def lock(self, connection: Connection, writer: str, *, within_s: float) -> OutboxMode:
        with self._mapped():
            row = self._dialect.ask_locked(connection, self._lock, {"writer_": writer}, within_s)
            if row is None:
                self._insert_mode(connection, writer, OutboxMode.DIRECT)
                row = self._dialect.ask_locked(connection, self._lock, {"writer_": writer}, within_s)
            return _as_mode(_only(row))

    def _insert_mode(self, connection: Connection, writer: str, mode: OutboxMode) -> None:
        connection.execute(self._dialect.insert_if_missing(self._tables.mode), {"writer": writer, "mode": mode.value})

    def turn(self, connection: Connection, writer: str, mode: OutboxMode) -> None:
        with self._mapped():
            self._turn.execute(connection, {"writer_": writer, "mode_": mode.value})

    def decide(
        self, connection: Connection, decision: Decision, writer: str, messages: Sequence[Sendable]
    ) -> tuple[bool, str | None]:
        transactional_id = decision.transactional_id
        if decision.waits is None or decision.state is not None:
            raise IllegalStateError("the decision has no number, or names a state", transactional_id=transactional_id)
        put = Put(self._tables.outbox, writer, transactional_id, rows_of(messages))
        with self._mapped(transactional_id), self._dialect.bounded(connection, decision.answer_s):
            row = self._decisions.decide(connection, decision, None, put)
            return self._decisions.ended(connection, transactional_id, row)

    def read(self, connection: Connection, writer: str, *, limit: int, max_bytes: int) -> WaitingMessages:
        floor = self._floors.setdefault(writer, Floor())
        with self._mapped():
            found = self._dialect.read_waiting(
                connection, self._tables, Asked(writer, floor.number, floor.server, limit, max_bytes)
            )
        transaction = connection.get_transaction()
        floor.read(transaction, found.numbers)
        mark = self._dialect.server_mark()
        if mark is not None and found.numbers and floor.is_due:
            floor.look(transaction, found.numbers[-1], self._own.run(lambda own: self._seen(own, writer, mark)))
        return found

    def _seen(self, connection: Connection, writer: str, mark: ColumnElement[Any]) -> Seen:
        state, mode = self._tables.state, self._tables.mode
        of_lanes = or_(
            state.c.transactional_id == writer,
            self._dialect.begins_with(state.c.transactional_id, f"{writer}#"),
        )
        of_mode = mode.c.writer == writer
        counts: dict[str, object] = {
            name: count or 0
            for name, count in connection.execute(
                select(state.c.transactional_id, state.c.outbox_decisions).where(of_lanes)
            )
        }
        counts.update((_MODE_KEY + name, None) for name in connection.scalars(select(mode.c.writer).where(of_mode)))
        # Only now: a lane that is locked later has drawn its numbers after the counts were read, or has been free since then.
        # With a column that no index holds: InnoDB would lock the index's record alone, which a decision does not.
        locked = select(state.c.transactional_id, state.c.outbox_decisions).where(of_lanes)
        free = {name for name, _ in connection.execute(locked.with_for_update(read=True, skip_locked=True))}
        locked = select(mode.c.writer, mode.c.changed_at).where(of_mode)
        free |= {
            _MODE_KEY + name for name, _ in connection.execute(locked.with_for_update(read=True, skip_locked=True))
        }
        return Seen(str(connection.scalar(select(mark))), counts, free)

    def delete(self, connection: Connection, writer: str, numbers: Sequence[int]) -> int:
        del writer  # no number is another's
        if not numbers:
            return 0
        with self._mapped():
            return self._dialect.delete_waiting(connection, self._tables.outbox, numbers)

    def move_aside(self, connection: Connection, writer: str, numbers: Sequence[int], reason: str) -> int:
        outbox, aside = self._tables.outbox, self._tables.aside
        moved = 0
        with self._mapped():
            for some in in_chunks(numbers):
                chosen = and_(outbox.c.writer == writer, outbox.c.seq.in_(some))
                names = ["seq", *_ASIDE, "put_at"]
                row = select(*(outbox.c[name] for name in names), literal(reason.replace("\x00", "?"))).where(chosen)
                connection.execute(insert(aside).from_select([*names, "reason"], row, include_defaults=False))
                moved += connection.execute(delete(outbox).where(chosen)).rowcount
        return moved

    def put_aside(self, connection: Connection, message: AsideMessage) -> None:
        # It takes its number from those of messages that wait, by which `replay` and people know it.
        values = {
            "writer": message.writer,
            "transactional_id": message.transactional_id,
            "topic": message.topic[:MAX_ID_LENGTH],
            "topic_partition": message.partition,
            "key": message.key,
            "value": message.value,
            "headers": encode_headers(message.headers) if message.headers else None,
            "timestamp_ms": message.timestamp_ms,
        }
        with self._mapped(message.transactional_id):
            made = connection.execute(insert(self._tables.outbox).values(values)).inserted_primary_key
        assert made is not None
        self.move_aside(connection, message.writer, [made[0]], message.reason)

    # In transactions of our own

    def writers(self) -> Sequence[str]:
        mode, aside = self._tables.mode, self._tables.aside
        both = union(select(mode.c.writer), select(aside.c.writer))
        return sorted(self._own.read(lambda connection: connection.scalars(both).all()))

    def mode_of(self, writer: str) -> OutboxMode:
        return self._own.read(lambda connection: self.mode(connection, writer))

    def topics(self, writer: str) -> Mapping[str, int]:
        outbox = self._tables.outbox
        first = select(outbox.c.topic).where(outbox.c.writer == writer).order_by(outbox.c.seq).limit(_SAMPLE).subquery()
        counted = select(first.c.topic, func.count()).group_by(first.c.topic)
        found = self._own.read(lambda connection: connection.execute(counted).all())
        return dict(sorted((topic, int(count)) for topic, count in found))

    def begin_later(self, writer: str) -> None:
        mode = self._tables.mode

        def work(connection: Connection) -> None:
            self._insert_mode(connection, writer, OutboxMode.LATER)
            found = connection.scalar(select(mode.c.mode).where(mode.c.writer == writer).with_for_update())
            if found != OutboxMode.LATER.value:
                self.turn(connection, writer, OutboxMode.LATER)

        self._own.run(work)

    def decisions_locked(self, transactional_id: str, namespace: str | None, deadline: Deadline) -> int:
        state = self._tables.state
        statement = select(state.c.outbox_decisions, state.c.namespace).where(
            state.c.transactional_id == transactional_id
        )
        row = self._own.run(
            lambda connection: connection.execute(statement.with_for_update()).one_or_none(),
            lock_timeout_s=deadline.remaining_s(),
            answer_s=deadline.remaining_s() + 2.0,  # the server answers when the wait for the lock ends
        )
        if row is None or namespace not in {None, row.namespace}:
            raise ConfigurationError(
                f"the row in {state.fullname} is gone, or is another one of that name",
                transactional_id=transactional_id,
                next_step="restore it",
            )
        return row.outbox_decisions or 0

    def waiting(self, writer: str) -> Waiting:
        return self._own.read(lambda connection: self._waiting(connection, writer))

    def _waiting(self, connection: Connection, writer: str) -> Waiting:
        outbox = self._tables.outbox
        floor = self._floors.get(writer, Floor())
        size = size_of_row(outbox)
        mine = and_(outbox.c.writer == writer, outbox.c.seq > self.above(floor))
        samples = []
        for order in (outbox.c.seq, outbox.c.seq.desc()):
            some = select(outbox.c.seq, size.label("size_")).where(mine).order_by(order).limit(_SAMPLE).subquery()
            summed = select(func.count(), func.sum(some.c.size_), func.min(some.c.seq), func.max(some.c.seq))
            samples.append(connection.execute(summed.select_from(some)).one())
            if samples[0][0] < _SAMPLE:
                break
        count, total, first, last = samples[0]
        if not count:
            return Waiting(0, 0, None, exact=True)
        oldest = connection.execute(select(outbox.c.put_at, database_now()).where(outbox.c.seq == first)).one_or_none()
        oldest_s = None if oldest is None else max(0.0, (oldest[1] - oldest[0]).total_seconds())
        if len(samples) == 1:
            return Waiting(int(count), int(total), oldest_s, exact=True)
        end_count, end_total, end_first, end_last = samples[1]
        if end_first <= last:  # the two meet
            between = select(func.count(), func.sum(size)).where(mine, outbox.c.seq.between(first, end_last))
            found, found_size = connection.execute(between).one()
            return Waiting(int(found), int(found_size), oldest_s, exact=True)
        density = (count + end_count) / (last - first + 1 + end_last - end_first + 1)
        between = (end_first - last - 1) * density
        mean = (int(total) + int(end_total)) / (count + end_count)
        return Waiting(
            int(count + end_count + between), int(total) + int(end_total) + int(between * mean), oldest_s, exact=False
        )

    def above(self, floor: Floor) -> Any:
        """The number above which rows may be: the floor, if it was proved on the server that executes this."""
        mark = self._dialect.server_mark()
        return literal(0) if mark is None or not floor.number else on_server(mark, floor.server, floor.number)

    def aside(self, writer: str, *, limit: int, after: int = 0) -> Sequence[AsideMessage]:
        aside = self._tables.aside
        statement = (
            select(aside).where(aside.c.writer == writer, aside.c.seq > after).order_by(aside.c.seq).limit(limit)
        )
        rows = self._own.read(lambda connection: connection.execute(statement).all())
        return [
            AsideMessage(
                number=row.seq,
                writer=row.writer,
                transactional_id=row.transactional_id,
                topic=row.topic,
                partition=row.topic_partition,
                key=row.key,
                value=row.value,
                headers=() if row.headers is None else decode_headers(row.headers),
                timestamp_ms=row.timestamp_ms,
                put_at=row.put_at,
                reason=row.reason,
                moved_at=row.moved_at,
            )
            for row in rows
        ]

    def count_aside(self, writer: str) -> int:
        statement = select(func.count()).select_from(self._tables.aside).where(self._tables.aside.c.writer == writer)
        return self._own.read(lambda connection: connection.scalar(statement) or 0)

    def replay(self, writer: str, numbers: Sequence[int] | None = None) -> int:
        outbox, aside = self._tables.outbox, self._tables.aside

        def work(connection: Connection) -> int:
            self.lock(connection, writer, within_s=LOCK_S)
            self.turn(connection, writer, OutboxMode.LATER)
            replayed = 0
            for chosen in self._chosen_aside(writer, numbers):
                row = select(*(aside.c[name] for name in _ASIDE)).where(chosen).order_by(aside.c.seq)
                connection.execute(insert(outbox).from_select(_ASIDE, row, include_defaults=False))
                replayed += connection.execute(delete(aside).where(chosen)).rowcount
            return replayed

        # Its row is there, committed, before numbers are drawn under its lock: see Floor.
        self._own.run(lambda connection: self._insert_mode(connection, writer, OutboxMode.DIRECT))
        return self._own.run(work)

    def drop(self, writer: str, numbers: Sequence[int] | None = None) -> int:
        aside = self._tables.aside
        return self._own.run(
            lambda connection: sum(
                connection.execute(delete(aside).where(chosen)).rowcount
                for chosen in self._chosen_aside(writer, numbers)
            )
        )

    def _chosen_aside(self, writer: str, numbers: Sequence[int] | None) -> Iterator[ColumnElement[bool]]:
        aside = self._tables.aside
        if numbers is None:
            yield aside.c.writer == writer
            return
        for some in in_chunks(sorted(set(numbers))):
            yield and_(aside.c.writer == writer, aside.c.seq.in_(some))

    @contextmanager
    def _mapped(self, transactional_id: str | None = None) -> Generator[None, None, None]:
        try:
            yield
        except exc.SQLAlchemyError as error:
            raise map_database_error(
                error, self._engine, self._tables.schema, transactional_id=transactional_id
            ) from error
