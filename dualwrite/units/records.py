"""KIP-868's markers in the encoding of Kafka's metadata log, and the image of whole units that the records make. Pure.

Every record of a unit has the header ``dualwrite.unit``: ``begin``, ``end`` or ``abort`` on a marker, ``part`` on any other. A
marker has no key: a broker refuses it in a compacted topic, where compaction would tear units.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.errors import encoded as encoded_text
from dualwrite.kafka.messages import unsigned
from dualwrite.protocol.lives import Machine

HEADER: Final = "dualwrite.unit"
LONGEST_TEXT: Final = 255
"""The greatest length of a name or a reason in bytes of UTF-8, by the KIP."""

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]

_FRAME_VERSION: Final = 1
_MESSAGE_VERSION: Final = 0
_TEXT_TAG: Final = 0


# The life of the units in one partition, as its readers and its one writer see them (KIP-868).
#
# A unit is a begin marker, any number of records in any number of Kafka transactions, and an end or abort marker. Three
# rules keep it whole: one unit at a time, nothing between its records, no marker inside it. Every record of a unit says
# that it is one, so that a reader that begins in the middle of a unit, because retention has deleted its begin, knows
# that it does.


class UnitState(Enum):
    """Where a reader stands.

    ``START``: at the beginning of the log, or of what retention has left; nothing is read. ``CUT``: in a unit whose begin is
    deleted. ``OUTSIDE``: in no unit. ``INSIDE``: in a unit that may yet end or abort.
    """

    START = "start"
    CUT = "cut"
    OUTSIDE = "outside"
    INSIDE = "inside"


class UnitEvent(Enum):
    """The records that a reader may find.

    ``RECORD``: a record that belongs to no unit. ``BEGIN``, ``END``, ``ABORT``: the markers. ``PART``: a record of a unit.
    """

    RECORD = "record"
    BEGIN = "begin"
    PART = "part"
    END = "end"
    ABORT = "abort"


class Effect(Enum):
    """The effect of a record on what a reader shows.

    ``HOLD``: apply it where nobody sees it yet. ``SHOW``: apply it and publish. ``PUBLISH``: publish what was held. ``REVERT``:
    forget what was held. ``SKIP``: nothing.
    """

    HOLD = "hold"
    SHOW = "show"
    PUBLISH = "publish"
    REVERT = "revert"
    SKIP = "skip"


_UNIT, _OF_UNIT, _EFFECT = UnitState, UnitEvent, Effect

_RULES: Final = {
    _UNIT.START: {
        _OF_UNIT.RECORD: (_UNIT.OUTSIDE, _EFFECT.SHOW),
        _OF_UNIT.BEGIN: (_UNIT.INSIDE, _EFFECT.SKIP),
        _OF_UNIT.PART: (_UNIT.CUT, _EFFECT.SKIP),
        _OF_UNIT.END: (_UNIT.OUTSIDE, _EFFECT.SKIP),
        _OF_UNIT.ABORT: (_UNIT.OUTSIDE, _EFFECT.SKIP),
    },
    _UNIT.CUT: {
        _OF_UNIT.PART: (_UNIT.CUT, _EFFECT.SKIP),
        _OF_UNIT.END: (_UNIT.OUTSIDE, _EFFECT.SKIP),
        _OF_UNIT.ABORT: (_UNIT.OUTSIDE, _EFFECT.SKIP),
    },
    _UNIT.OUTSIDE: {
        _OF_UNIT.RECORD: (_UNIT.OUTSIDE, _EFFECT.SHOW),
        _OF_UNIT.BEGIN: (_UNIT.INSIDE, _EFFECT.SKIP),
    },
    _UNIT.INSIDE: {
        _OF_UNIT.PART: (_UNIT.INSIDE, _EFFECT.HOLD),
        _OF_UNIT.END: (_UNIT.OUTSIDE, _EFFECT.PUBLISH),
        _OF_UNIT.ABORT: (_UNIT.OUTSIDE, _EFFECT.REVERT),
    },
}
"""By state and record, the next state, and the effect of the record."""

UNIT_LIFE: Mapping[UnitState, Mapping[UnitEvent, UnitState]] = MappingProxyType(
    {state: {event: following for event, (following, _) in rules.items()} for state, rules in _RULES.items()}
)
EFFECTS: Mapping[UnitState, Mapping[UnitEvent, Effect]] = MappingProxyType(
    {state: {event: effect for event, (_, effect) in rules.items()} for state, rules in _RULES.items()}
)
"""The visibility rule, for every event that `UNIT_LIFE` allows."""


class UnitWriterState(Enum):
    """Where the writer of a partition stands.

    ``CLAIMED``: it owns the partition, and has not looked at the end of the log. ``BETWEEN``: no unit is unfinished.
    ``WITHIN``: a unit is begun in the log. ``BROKEN``: it does not know what the log holds.
    """

    CLAIMED = "claimed"
    BETWEEN = "between"
    WITHIN = "within"
    BROKEN = "broken"


class UnitWriterEvent(Enum):
    """The steps of a writer: its own records count once their Kafka transaction is complete.

    ``FIND_ENDED``, ``FIND_UNFINISHED``: what the last record of the log says. ``WHOLE``: a whole unit in one transaction.
    ``FAIL``: a transaction may or may not be in the log.
    """

    FIND_ENDED = "find ended"
    FIND_UNFINISHED = "find unfinished"
    BEGIN = "begin"
    PART = "part"
    END = "end"
    WHOLE = "whole unit"
    ABORT = "abort"
    FAIL = "fail"


_UNIT_WRITER, _OF_UNIT_WRITER = UnitWriterState, UnitWriterEvent

UNIT_WRITER_LIFE: Mapping[UnitWriterState, Mapping[UnitWriterEvent, UnitWriterState]] = MappingProxyType(
    {
        _UNIT_WRITER.CLAIMED: {
            _OF_UNIT_WRITER.FIND_ENDED: _UNIT_WRITER.BETWEEN,
            _OF_UNIT_WRITER.FIND_UNFINISHED: _UNIT_WRITER.WITHIN,
            _OF_UNIT_WRITER.FAIL: _UNIT_WRITER.BROKEN,
        },
        _UNIT_WRITER.BETWEEN: {
            _OF_UNIT_WRITER.BEGIN: _UNIT_WRITER.WITHIN,
            _OF_UNIT_WRITER.WHOLE: _UNIT_WRITER.BETWEEN,
            _OF_UNIT_WRITER.FAIL: _UNIT_WRITER.BROKEN,
        },
        _UNIT_WRITER.WITHIN: {
            _OF_UNIT_WRITER.PART: _UNIT_WRITER.WITHIN,
            _OF_UNIT_WRITER.END: _UNIT_WRITER.BETWEEN,
            _OF_UNIT_WRITER.ABORT: _UNIT_WRITER.BETWEEN,
            _OF_UNIT_WRITER.FAIL: _UNIT_WRITER.BROKEN,
        },
        _UNIT_WRITER.BROKEN: {_OF_UNIT_WRITER.FAIL: _UNIT_WRITER.BROKEN},
    }
)


def found_at_the_end(last: UnitEvent | None) -> UnitWriterEvent:
    """The failover rule: what the last record of the log, or None, tells its next writer. An unfinished unit must be aborted.

    Only the end of the log can hold an unfinished unit, since a writer begins none before the last one has ended.
    """
    unfinished = last in {UnitEvent.BEGIN, UnitEvent.PART}
    return UnitWriterEvent.FIND_UNFINISHED if unfinished else UnitWriterEvent.FIND_ENDED


# The records of units, and the image that they make.


class UnitRecord(NamedTuple):
    """A record of a topic, as a writer of units sends it and a reader gets it.

    Attributes:
        key: Its key; None if it has none.
        value: Its value; None for a tombstone.
        headers: Its headers, in their order.
    """

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


@dataclass(frozen=True)
class BeginTransaction:
    """Begins a unit.

    Args:
        name: A description for people, at most 255 bytes.

    Source: KIP-868, ``BeginTransactionRecord``.
    """

    name: str | None = None


@dataclass(frozen=True)
class EndTransaction:
    """Ends a unit: readers publish it.

    Source: KIP-868, ``EndTransactionRecord``.
    """


@dataclass(frozen=True)
class AbortTransaction:
    """Aborts a unit: readers forget it.

    Args:
        reason: Why, for people, at most 255 bytes.

    Source: KIP-868, ``AbortTransactionRecord``.
    """

    reason: str | None = None


Marker: TypeAlias = BeginTransaction | EndTransaction | AbortTransaction

# Kafka's api keys: BeginTransactionRecord.json and its neighbours.
_API_KEYS: Final[dict[type[Marker], int]] = {BeginTransaction: 23, EndTransaction: 24, AbortTransaction: 25}
_KINDS: Final = {number: kind for kind, number in _API_KEYS.items()}
_EVENTS: Final[dict[type[Marker], UnitEvent]] = {
    BeginTransaction: UnitEvent.BEGIN,
    EndTransaction: UnitEvent.END,
    AbortTransaction: UnitEvent.ABORT,
}
_WORDS: Final = {event.value.encode(): event for event in UnitEvent if event is not UnitEvent.RECORD}


def encoded(marker: Marker) -> bytes:
    """The marker as a record of Kafka's metadata log: frame version, api key, version, and the flexible fields."""
    text = _text(marker)
    head = unsigned(_FRAME_VERSION) + unsigned(_API_KEYS[type(marker)]) + unsigned(_MESSAGE_VERSION)
    if text is None:
        return head + unsigned(0)
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"the name or reason of a unit is no text: {error}") from error
    if len(raw) > LONGEST_TEXT:
        raise ConfigurationError(
            f"the name or reason of a unit has {len(raw)} bytes", next_step=f"use at most {LONGEST_TEXT}"
        )
    field = unsigned(len(raw) + 1) + raw
    return head + unsigned(1) + unsigned(_TEXT_TAG) + unsigned(len(field)) + field


def decoded(value: bytes) -> Marker:
    """The marker of :func:`encoded`. Tagged fields, which later versions of Kafka may add, are ignored."""
    try:
        frame, at = _read_varint(value, 0)
        api_key, at = _read_varint(value, at)
        version, at = _read_varint(value, at)
        if (frame, version) != (_FRAME_VERSION, _MESSAGE_VERSION) or api_key not in _KINDS:
            raise ValueError(f"frame version {frame}, api key {api_key}, version {version}")
        text, at = _read_text(value, at)
        if at != len(value):
            raise ValueError(f"{len(value) - at} bytes too many")
    except (ValueError, IndexError) as error:
        raise ConfigurationError(
            f"not the marker of a unit: {value[:40].hex()}: {error}",
            next_step=f"let nothing but a UnitWriter send records with the header {HEADER!r}",
        ) from None
    kind = _KINDS[api_key]
    return EndTransaction() if kind is EndTransaction else kind(text)  # type: ignore[call-arg] # the other two have a text


def marker_record(marker: Marker) -> UnitRecord:
    """The record that holds a marker."""
    return UnitRecord(None, encoded(marker), ((HEADER, _EVENTS[type(marker)].value.encode()),))


def part_of_unit(key: bytes | None, value: bytes | None, headers: Headers = ()) -> UnitRecord:
    """A user's record, marked as one of a unit. Its own headers may not hold the one that marks units."""
    if any(name == HEADER for name, _ in headers):
        raise ConfigurationError(f"the header {HEADER!r} is the library's own", next_step="name yours differently")
    return UnitRecord(key, value, (*headers, (HEADER, UnitEvent.PART.value.encode())))


def event_of(headers: Iterable[tuple[str, bytes | None]]) -> UnitEvent:
    """The meaning of a record with these headers to a reader. Refuses an unknown value of the header that marks units."""
    for name, word in headers:
        if name == HEADER:
            if word not in _WORDS:
                raise ConfigurationError(
                    f"the header {HEADER!r} holds {word!r}",
                    next_step="read with a newer version of dualwrite, or let nothing else set this header",
                )
            return _WORDS[word]
    return UnitEvent.RECORD


def shortened(text: str) -> str:
    """The text, truncated between characters to what a name or a reason may hold; a lone surrogate becomes its escape."""
    return encoded_text(text)[:LONGEST_TEXT].decode(errors="ignore")


def _text(marker: Marker) -> str | None:
    if isinstance(marker, BeginTransaction):
        return marker.name
    return marker.reason if isinstance(marker, AbortTransaction) else None


def _read_text(value: bytes, at: int) -> tuple[str | None, int]:
    text = None
    count, at = _read_varint(value, at)
    for _ in range(count):
        tag, at = _read_varint(value, at)
        size, at = _read_varint(value, at)
        field, at = value[at : at + size], at + size
        if len(field) != size:
            raise ValueError("cut off")
        if tag == _TEXT_TAG:
            length, begin = _read_varint(field, 0)
            if length and length - 1 != len(field) - begin:
                raise ValueError(f"a text of {length - 1} bytes in a field of {size}")
            text = field[begin:].decode() if length else None
    return text, at


def _read_varint(value: bytes, at: int) -> tuple[int, int]:
    read = shift = 0
    while True:
        byte = value[at]
        read |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return read, at
        if shift > 28:  # noqa: PLR2004 - a 32-bit number has five bytes
            raise ValueError("a number of more than five bytes")


# The ranges of offsets that a batch has written: the records of its unit in the unit topic, and how they follow each
# other.

Partition: TypeAlias = tuple[str, int]


class Offsets(NamedTuple):
    """Where a partition, or a part of it, begins and ends: the end is the offset after the last one."""

    begin: int
    end: int


class BatchRange(NamedTuple):
    """The part of one partition that one batch has written.

    Attributes:
        batch: Name of the batch.
        topic: The topic of the messages.
        partition: Its partition.
        begin: The offset where the batch before ended.
        end: The offset after the last message of the batch.
    """

    batch: str
    topic: str
    partition: int
    begin: int
    end: int

    def encoded(self) -> bytes:
        """The value of a record in the unit topic: a JSON object."""
        return json.dumps(self._asdict(), ensure_ascii=False).encode()

    @classmethod
    def decoded(cls, value: bytes | None) -> BatchRange:
        """The range of :meth:`encoded`; unknown fields are ignored.

        Raises:
            ConfigurationError: The value is no such range.
        """
        try:
            found = json.loads(value or b"")
            made = cls(*(found[name] for name in cls._fields))
            numbers = made.partition, made.begin, made.end
            if not all(type(one) is int for one in numbers) or not all(type(one) is str for one in made[:2]):
                raise ValueError("a field is of another type")
            if made.partition < 0 or not 0 <= made.begin <= made.end:
                raise ValueError("its numbers cannot be")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"not a record of a unit topic: {(value or b'')[:80]!r}: {error}",
                next_step="let nothing but the sink write to the unit topic",
            ) from None
        return made

    @property
    def name(self) -> Partition:
        """Topic and partition."""
        return self.topic, self.partition

    @property
    def offsets(self) -> Offsets:
        """Begin and end."""
        return Offsets(self.begin, self.end)


def following(batch: str, last: Sequence[BatchRange] | None, found: Mapping[Partition, Offsets]) -> list[BatchRange]:
    """The ranges of a batch: in each partition from the end of the last batch to the present end. Empty if nothing was added.

    Without a last batch this is the first one, which takes all that the topic holds. Refuses a partition that ends before the
    last batch does: it is another topic of the same name.
    """
    ends = {one.name: one.end for one in last or ()}
    made = [
        BatchRange(batch, *name, ends.get(name, offsets.begin), offsets.end) for name, offsets in sorted(found.items())
    ]
    for one in made:
        if one.end < one.begin:
            raise ConfigurationError(
                f"{one.topic}[{one.partition}] ends at {one.end}, before the end of the last batch, {one.begin}",
                next_step="the topic was created again: give it another unit topic",
            )
    return made if any(one.begin < one.end for one in made) else []


Contents = TypeVar("Contents")
Contents_co = TypeVar("Contents_co", covariant=True)


class UnitImage(Protocol[Contents_co]):
    """An application's state, to which a reader applies records: a change stays invisible until it is published.

    `KeyedImage` is one. Methods are called by one thread at a time, and must not raise: a reader cannot skip a record. If a
    signal handler raises in one of them, the reader calls none of them again.
    """

    def apply(self, record: UnitRecord) -> None:
        """Take a record into the change."""

    def publish(self) -> None:
        """Show the change, at one moment."""

    def revert(self) -> None:
        """Forget the change."""

    def contents(self) -> Contents_co:
        """All that is published, as a value that later records do not change."""


@dataclass(frozen=True)
class Snapshot(Generic[Contents]):
    """All that an image has published, and the position to resume reading from. It holds no markers and no part of a unit.

    Attributes:
        position: The offset of the first record that is not in it; None if that is the first one of the log.
        contents: As the image gives it.
    """

    position: int | None
    contents: Contents


class Follower(Generic[Contents]):
    """Applies the records of one partition to an image, so that it never shows a part of a unit. Does no I/O.

    It needs no memory besides the image's. Threads may take snapshots while one thread reads.

    Args:
        image: What to apply the records to.
        position: The position of the snapshot that the image begins with; None at the beginning of the log.
    """

    def __init__(self, image: UnitImage[Contents], position: int | None = None) -> None:
        self._image = image
        initial = UnitState.START if position is None else UnitState.OUTSIDE
        self._machine = Machine("reader", UNIT_LIFE, initial)
        self._position = position
        # Two numbers, not a flag: between them an exception of a signal handler may strike at any instruction.
        self._begun = self._applied = -1
        self._lock = threading.Lock()

    def read(self, offset: int, record: UnitRecord) -> Effect:
        """Take the next record of the partition, in order of offsets: only Kafka's own markers may be left out.

        If an exception leaves this call, or the caller before it asked for the next record, the record may be given again: it
        is refused if the image may have it already.

        Returns:
            What was done with it. After ``SHOW`` and ``PUBLISH`` the image shows more than before.

        Raises:
            ConfigurationError: The record cannot stand here: something other than one `UnitWriter` writes to the partition.
                Nothing was changed.
            IllegalStateError: An exception has interrupted a reader that had begun to apply this record.
        """
        if offset <= self._begun:
            raise self._interrupted()
        event, state = event_of(record.headers), self._machine.state
        if not self._machine.allows(event):
            raise ConfigurationError(
                f"offset {offset} holds {event.value!r}, which cannot stand there: the reader is at {state.value!r}",
                next_step="let one UnitWriter alone write to this partition. If its records were deleted under the reader, open"
                " another reader without a position",
            )
        effect = EFFECTS[state][event]
        with self._lock:
            self._begun = offset
            if effect in {Effect.HOLD, Effect.SHOW}:
                self._image.apply(record)
            if effect in {Effect.SHOW, Effect.PUBLISH}:
                self._image.publish()
            if effect is Effect.REVERT:
                self._image.revert()
            if self._machine.apply(event) is UnitState.OUTSIDE:
                self._position = offset + 1
            self._applied = offset
        return effect

    def _interrupted(self) -> IllegalStateError:
        return IllegalStateError(
            f"the reader was interrupted while it applied offset {self._begun}: it is not known whether the image has it",
            next_step="open another reader with the image and the position of an earlier snapshot, or with an empty image and"
            " no position",
        )

    @property
    def state(self) -> UnitState:
        """Where the reader stands: inside a unit or not."""
        return self._machine.state

    def snapshot(self) -> Snapshot[Contents]:
        """All that is published now, and where to resume: inside a unit, at its beginning.

        Raises:
            IllegalStateError: An exception has left the image in the middle of a record.
        """
        with self._lock:
            if self._applied != self._begun:
                raise self._interrupted()
            return Snapshot(self._position, self._image.contents())


# An image of the newest value of each key.


class KeyedImage:
    """The newest value of each key, of published units only; a record without a value deletes its key.

    Any thread may look at it. Units become visible at one moment: a thread that needs several values of the same moment takes
    them by :meth:`contents`. Needs memory for the values, and for the keys that the unfinished unit has changed.

    Args:
        contents: What it begins with, as from a `Snapshot`.
    """

    def __init__(self, contents: Mapping[bytes, bytes] | None = None) -> None:
        self._shown: dict[bytes, bytes] = dict(contents or {})
        self._change: dict[bytes, bytes | None] = {}
        # A change that is published at the moment of its assignment, though it is not yet in `_shown`: if an exception (of a
        # signal handler) interrupts the copying, the next look finishes it, and no part of a unit is ever seen.
        self._published: dict[bytes, bytes | None] = {}
        self._lock = threading.Lock()

    def __getitem__(self, key: bytes) -> bytes:
        with self._lock:
            return self._whole()[key]

    def get(self, key: bytes) -> bytes | None:
        """The published value of a key; None if there is none."""
        with self._lock:
            return self._whole().get(key)

    def __len__(self) -> int:
        with self._lock:
            return len(self._whole())

    def contents(self) -> dict[bytes, bytes]:
        """A copy of what is published."""
        with self._lock:
            return dict(self._whole())

    def _whole(self) -> dict[bytes, bytes]:
        """The published values. Call it under the lock."""
        for key, value in self._published.items():
            if value is None:
                self._shown.pop(key, None)
            else:
                self._shown[key] = value
        self._published = {}
        return self._shown

    def apply(self, record: UnitRecord) -> None:
        """Take a record into the unpublished change. A record without a key is skipped."""
        if record.key is not None:
            self._change[record.key] = record.value

    def publish(self) -> None:
        """Show the change."""
        with self._lock:
            self._whole()
            self._published = self._change
            self._change = {}
            self._whole()

    def revert(self) -> None:
        """Forget the change."""
        self._change = {}
