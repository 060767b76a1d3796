"""An outbox table that another program fills: which of its columns make a message, and what message a row makes.

By default the columns and their meaning are those of Debezium's outbox event router, so that a table which its connector reads
today can be sent by a relay as it is: the same topics, keys, values and headers. Its terms and ours:

================================================  ====================================
``route.by.field``                                `OutboxTable.topic_column`
``route.topic.replacement``                       `OutboxTable.topic`
``table.field.event.id``, ``.key``, ``.payload``  ``id_column``, ``key_column``, ``value_column``
``table.field.event.timestamp``                   ``timestamp_column``
``table.fields.additional.placement``             ``placements``
``table.expand.json.payload``                     ``expand_json``
``route.tombstone.on.empty.payload``              ``tombstone_on_empty``
================================================  ====================================

Text, numbers, UUIDs and JSON go out as the database shows them as text; columns of bytes as they are.

Source: Debezium's documentation, "Outbox Event Router".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.message import as_bytes, columns_of
from dualwrite.protocol.prepared_state import MAX_PARTITION
from dualwrite.protocol.values import AsideMessage, check_not_empty

if TYPE_CHECKING:
    from typing_extensions import Self

    from dualwrite.protocol.message import Header

ROUTED_BY: Final = "${routedByValue}"
"""Stands for the value of the topic's column in the topic's name."""
_ID_HEADER: Final = "id"
_ENVELOPE_PAYLOAD: Final = "payload"
_PLACES: Final = ("header", "envelope", "partition")
_CHANNEL: Final = re.compile(r"[^a-z0-9_]+")
_LONGEST_CHANNEL: Final = 63


class Placement(NamedTuple):
    """One more column that goes into a message, as in Debezium's ``table.fields.additional.placement``.

    Attributes:
        column: The column.
        place: ``header``, ``envelope`` or ``partition``.
        alias: The name of the header or of the envelope's field; the column's own if not given.
    """

    column: str
    place: str
    alias: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``column:place`` or ``column:place:alias``."""
        column, _, rest = text.strip().partition(":")
        place, _, alias = rest.partition(":")
        if not column or place not in _PLACES:
            raise ConfigurationError(
                f"{text!r} does not say where a column goes",
                next_step="give COLUMN:header, COLUMN:envelope or COLUMN:partition, and :NAME behind it for another name",
            )
        return cls(column, place, alias or column)


@dataclass(frozen=True)
class OutboxTable:
    """An outbox table, and what its columns mean. By default as Debezium's outbox event router takes them.

    Args:
        name: The table, with its schema before a dot if that is not the connection's own.
        topic: The topic's name; ``${routedByValue}`` in it stands for the value of ``topic_column``.
        topic_column: The column that the topic's name is made of.
        key_column: The key of the message, and so what is in order; None for messages without a key.
        value_column: The value; null is a tombstone.
        id_column: Goes into the header ``id``; None for no such header.
        headers_column: JSON with further headers: an object, or a list of pairs.
        partition_column: The partition's number; where it is null, the key decides.
        timestamp_column: The record's timestamp: a time, or ms since 1970. By default it is the time at which a message is
            sent: by an older one, retention could delete what has waited for long.
        placements: Further columns in headers, in an envelope around the value, or as the partition.
        order_by: The columns that tell the order of insertion. By default the id column, if it holds integers.
        unordered: Send rows in any order.
        mark: Do not delete rows that were sent, but mark them in this column: a boolean, which becomes true, or a time.
        tombstone_on_empty: Whether an empty value, too, is a tombstone.
        expand_json: Whether the value stands in an envelope as JSON, not as text.

    Raises:
        ConfigurationError: Two settings contradict each other.
    """

    name: str = "outbox_events"
    topic: str = f"outbox.event.{ROUTED_BY}"
    topic_column: str = "aggregatetype"
    key_column: str | None = "aggregateid"
    value_column: str = "payload"
    id_column: str | None = "id"
    headers_column: str | None = None
    partition_column: str | None = None
    timestamp_column: str | None = None
    placements: Sequence[Placement] = ()
    order_by: Sequence[str] = ()
    unordered: bool = False
    mark: str | None = None
    tombstone_on_empty: bool = False
    expand_json: bool = False

    def __post_init__(self) -> None:
        for what in ("name", "topic", "topic_column", "value_column"):
            check_not_empty(what, getattr(self, what))
        if self.unordered and self.order_by:
            raise ConfigurationError(
                "the rows have an order, and none", next_step="give order_by or unordered, not both"
            )
        _partition_column(self)


def schema_and_name(table: OutboxTable) -> tuple[str | None, str]:
    """The schema, if one is given, and the table."""
    schema, dot, name = table.name.rpartition(".")
    return (schema if dot else None), name


def relay_id(table: OutboxTable) -> str:
    """The name of a relay that was not given one."""
    return f"relay-{table.name}"


def channel(table: OutboxTable) -> str:
    """The channel on which the table's trigger tells of new rows."""
    return _CHANNEL.sub("_", f"dualwrite_{table.name.lower()}")[:_LONGEST_CHANNEL]


def fields_of(table: OutboxTable) -> Sequence[Field]:
    """What is read of every row, in this order."""
    found = [Field("value", table.value_column)]
    if table.key_column is not None:
        found.append(Field("key", table.key_column))
    if ROUTED_BY in table.topic:
        found.append(Field("topic", table.topic_column))
    if (partition := _partition_column(table)) is not None:
        found.append(Field("partition", partition))
    if table.timestamp_column is not None:
        found.append(Field("timestamp", table.timestamp_column))
    if table.headers_column is not None:
        found.append(Field("headers", table.headers_column))
    if table.id_column is not None:
        found.append(Field("header", table.id_column, _ID_HEADER))
    return found + [Field(place, column, alias) for column, place, alias in table.placements if place != "partition"]


def _partition_column(table: OutboxTable) -> str | None:
    named = {one.column for one in table.placements if one.place == "partition"}
    named |= set() if table.partition_column is None else {table.partition_column}
    if len(named) > 1:
        raise ConfigurationError(f"the partition is in {' and in '.join(sorted(named))}", next_step="name one column")
    return next(iter(named), None)


class Field(NamedTuple):
    """One column that is read: what it becomes, and for headers and fields of an envelope, under which name."""

    use: str
    column: str
    alias: str = ""


class BadRow(Exception):
    """A row that makes no message. ``reason`` is for people, and holds neither its key nor its value."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row
        self.reason = reason


class Messages(NamedTuple):
    """Messages of one topic, as columns in their order. All but the values are None if no message has any.

    ``placed`` are the headers that every message has: a name and a column for each. ``headers`` are those that differ.
    """

    topic: str
    values: Sequence[Any]
    keys: Sequence[Any] | None
    partitions: Sequence[int | None] | None
    timestamps: Sequence[int | None] | None
    headers: Sequence[Sequence[Header]] | None
    placed: Sequence[tuple[str, Sequence[Any]]]

    def headers_of(self, row: int) -> Sequence[Header]:
        """All headers of one message."""
        placed = [(name, column[row]) for name, column in self.placed]
        return placed if self.headers is None else [*placed, *self.headers[row]]


class Mapping:
    """Makes messages of rows. ``rows`` hold the columns of :func:`fields_of`, in that order, and perhaps others behind."""

    def __init__(self, table: OutboxTable) -> None:
        self._table = table
        self._at: dict[str, int] = {}
        self._headers: list[tuple[int, str]] = []
        self._envelope: list[tuple[int, str]] = []
        for place, (use, _, alias) in enumerate(fields_of(table)):
            if use == "header":
                self._headers.append((place, alias))
            elif use == "envelope":
                self._envelope.append((place, alias))
            else:
                self._at[use] = place

        @cache
        def topic_of(value: object) -> str:
            return table.topic.replace(ROUTED_BY, text_of(value))

        self._topic_of: Callable[[object], str] = topic_of

    def messages(self, rows: Sequence[Sequence[Any]]) -> Iterator[Messages]:
        """The messages of the rows, topic by topic; those of one topic in the order of the rows.

        Raises:
            BadRow: A row has no topic, or its headers are none.
        """
        columns = columns_of(rows)
        topics = self._topics(columns, len(rows))
        values = self._values(columns)
        given = self._column(columns, "headers")
        headers = None if given is None else [_headers_in(one, row) for row, one in enumerate(given)]
        placed = [(alias, columns[place]) for place, alias in self._headers]
        keys, partitions, timestamps = (self._column(columns, use) for use in ("key", "partition", "timestamp"))
        if len(found := dict.fromkeys(topics)) == 1:
            yield Messages(topics[0], values, keys, partitions, timestamps, headers, placed)
            return
        places: dict[str, list[int]] = {topic: [] for topic in found}
        for place, topic in enumerate(topics):
            places[topic].append(place)
        for topic, its in places.items():
            its_values, its_keys, its_partitions, its_timestamps, its_headers = (
                _at(column, its) for column in (values, keys, partitions, timestamps, headers)
            )
            its_placed = [(name, _at(column, its) or ()) for name, column in placed]
            yield Messages(topic, its_values or (), its_keys, its_partitions, its_timestamps, its_headers, its_placed)

    def rows_of(self, topic: str, rows: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """Those of the rows whose messages are for this topic. All of them make messages."""
        topics = self._topics(list(zip(*rows, strict=True)), len(rows))
        return [row for row, of in zip(rows, topics, strict=True) if of == topic]

    def aside(self, row: Sequence[Any], writer: str, reason: str) -> AsideMessage:
        """What a row holds that could not be sent, as far as it can be told. Its number and its times are not known yet."""
        unknown = datetime.fromtimestamp(0, timezone.utc)
        try:
            (made,) = self.messages([row])
        except BadRow:
            key = self._column([(one,) for one in row], "key")
            content = row[self._at["value"]], None if key is None else key[0]
            made = Messages("", content[:1], content[1:], None, None, None, ())
        partition, timestamp = (None if one is None else one[0] for one in (made.partitions, made.timestamps))
        value, key_ = made.values[0], None if made.keys is None else made.keys[0]
        headers = [(name, as_bytes(content, "header's value")) for name, content in made.headers_of(0)]
        if partition is not None and not 0 <= partition <= MAX_PARTITION:
            partition = None
        return AsideMessage(
            number=0,
            writer=writer,
            transactional_id=writer,
            topic=made.topic,
            partition=partition,
            key=as_bytes(key_, "key"),
            value=as_bytes(value, "value"),
            headers=headers,
            timestamp_ms=timestamp,
            put_at=unknown,
            reason=reason,
            moved_at=unknown,
        )

    def _column(self, columns: Sequence[Sequence[Any]], use: str) -> Sequence[Any] | None:
        place = self._at.get(use)
        return None if place is None else columns[place]

    def _topics(self, columns: Sequence[Sequence[Any]], count: int) -> Sequence[str]:
        routed = self._column(columns, "topic")
        if routed is None:
            return [self._table.topic] * count
        if None in routed:
            raise BadRow(routed.index(None), f"{self._table.topic_column}, which names the topic, is null")
        return list(map(self._topic_of, routed))

    def _values(self, columns: Sequence[Sequence[Any]]) -> Sequence[Any]:
        values: Sequence[Any] = columns[self._at["value"]]
        if not self._envelope and not self._table.tombstone_on_empty:
            return values
        return [self._value(value, columns, row) for row, value in enumerate(values)]

    def _value(self, value: Any, columns: Sequence[Sequence[Any]], row: int) -> Any:
        if self._table.tombstone_on_empty and (value is None or not value.strip()):
            return None
        if not self._envelope:
            return value
        fields = [f"{json.dumps(_ENVELOPE_PAYLOAD)}:{self._payload(value)}"]
        for place, alias in self._envelope:
            shown = columns[place][row]
            plain = shown if shown is None or isinstance(shown, (int, float)) else text_of(shown)
            fields.append(f"{json.dumps(alias)}:{json.dumps(plain)}")
        return f"{{{','.join(fields)}}}".encode()

    def _payload(self, value: Any) -> str:
        if value is None:
            return "null"
        text = text_of(value)
        if self._table.expand_json and text[:1] in {"{", "["}:
            try:
                json.loads(text)
            except ValueError:
                return json.dumps(text)  # as Debezium: kept as it is
            return text
        return json.dumps(text)


def _at(column: Sequence[Any] | None, places: Sequence[int]) -> list[Any] | None:
    return None if column is None else [column[place] for place in places]


def _headers_in(given: object, row: int) -> Sequence[Header]:
    """The headers that a column of JSON holds."""
    if given is None:
        return ()
    try:
        found = json.loads(text_of(given))
    except ValueError:
        raise BadRow(row, "the column of headers does not hold JSON") from None
    pairs = list(found.items()) if isinstance(found, dict) else found
    if not isinstance(pairs, list):
        raise BadRow(row, "the column of headers holds neither an object nor a list of pairs")
    headers: list[Header] = []
    for pair in pairs:
        name, value = _pair(pair, row)
        shown = value if value is None or isinstance(value, str) else json.dumps(value)
        try:
            name.encode()
            headers.append((name, None if shown is None else shown.encode()))
        except UnicodeEncodeError:
            raise BadRow(row, "a header holds a surrogate, which is no text") from None
    return headers


def _pair(pair: object, row: int) -> tuple[str, Any]:
    if isinstance(pair, dict) and pair.keys() == {"key", "value"}:
        pair = (pair["key"], pair["value"])
    if isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str):  # noqa: PLR2004 - a pair
        return pair[0], pair[1]
    raise BadRow(row, "a header is neither a name with a value nor a pair")


def text_of(value: object) -> str:
    """A column's value as text. Bytes are UTF-8, or else shown as hexadecimal digits."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        content = bytes(value)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return content.hex()
    return str(value)
