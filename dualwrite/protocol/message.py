"""Messages as values: made and checked once, then handed on whole to the savepoint that holds them, and to the engine.

One rule for all engines. A part of a wrong type raises ``TypeError``, a text with a surrogate ``UnicodeEncodeError``: nothing
was taken, and the transaction continues. A part whose value Kafka cannot have makes the message :class:`Unsendable`: the
transaction must abort, since the work would fail again as it is.

The savepoints of a dual write's database transaction, and the messages that wait for them.

Like a row, a message belongs to the savepoint that was open when it was produced: it is sent once the outermost savepoint
around it is released, and dropped when one around it is rolled back. It has to wait, as a sent message cannot be taken back.

Savepoints are read from the statements that the database has executed. A *witness* exposes those that nothing shows: a number
that the database keeps inside the transaction, and that a rollback to a savepoint reverts.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

from dualwrite.errors import TransactionAborted
from dualwrite.protocol.prepared_state import MAX_PARTITION

if TYPE_CHECKING:
    from typing_extensions import Self


Content: TypeAlias = str | bytes | None
Header: TypeAlias = tuple[str, bytes | None]
Headers: TypeAlias = Mapping[str, Content] | Sequence[tuple[str, Content]]
DeliveryCallback: TypeAlias = Callable[[Any, Any], None]
"""Called with ``(error or None, message)``: confluent-kafka's ``KafkaError`` and ``Message``."""

OVERHEAD: Final = 36
"""librdkafka adds this much to each message before it compares it with ``message.max.bytes``: the longest varints."""
ANY_PARTITION: Final = -1
"""Stands for no partition, as in librdkafka."""
STEPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "INVALID_TOPIC_EXCEPTION": "correct the topic's name: 1 to 249 letters, digits, dots, underscores and hyphens",
        "UNKNOWN_TOPIC_OR_PARTITION": "create the topic, or correct its name",
        "MESSAGE_TOO_LARGE": "send a smaller message, or raise message.max.bytes here and max.message.bytes on the topic",
    }
)
"""By the name of the error with which a broker would refuse the message, the step that helps."""
NAME_A_PARTITION: Final = "name a partition that the topic has"
_NAME_THE_HEADER: Final = "give each header a name"
_GIVE_A_TIME: Final = "give milliseconds since 1970, from 1 on, or no timestamp for the current time"
_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_MAX_TIMESTAMP_MS: Final = 2**63 - 1


class Unsendable(Exception):
    """A message that no broker would take. Nothing of it was handed on.

    ``code`` is the protocol's name of the error with which a broker would refuse it. ``detail`` says why, in words that hold
    neither its key nor its value, and ``step`` what helps.
    """

    def __init__(self, code: str, detail: str, step: str | None = None) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.step = STEPS[code] if step is None else step

    def refusal(self, topic: object, transactional_id: str) -> TransactionAborted:
        """The error for the caller."""
        error = TransactionAborted(
            f"produce ({topic}): {self.detail} ({self.code})",
            transactional_id=transactional_id,
            next_step=self.step,
            retryable=False,
        )
        error.refused_topic = str(topic)
        return error


class Message(NamedTuple):
    """One message as every engine takes it: made once, by :meth:`checked`, and handed on whole.

    It shares nothing with the caller that the caller could change, so it may wait for a savepoint as it is. ``size`` are its
    bytes as librdkafka compares them with ``message.max.bytes``.
    """

    topic: str
    value: bytes | None
    key: bytes | None
    partition: int | None
    headers: Sequence[Header]
    timestamp_ms: int | None
    on_delivery: DeliveryCallback | None
    size: int

    @classmethod
    def checked(
        cls,
        topic: str,
        value: Content,
        key: Content = None,
        *,
        partition: int | None = None,
        headers: Headers | None = None,
        timestamp_ms: int | None = None,
        on_delivery: DeliveryCallback | None = None,
        max_bytes: int,
        subject: str = "the message",
    ) -> Self:
        """Check one message in every respect that needs no broker. Call it when the message is handed over.

        Text becomes UTF-8; a value of None is a tombstone; a partition of None or -1 leaves the choice. ``max_bytes`` is
        ``message.max.bytes``, and ``subject`` names the message in errors.

        `Unsendable` says that no topic has such a name or partition, that the timestamp is below 1 or needs more than 64 bits,
        or that the message is too large. A part of another type is a `TypeError`, and a text with a surrogate a
        `UnicodeEncodeError`.
        """
        check_topic(topic)
        # Most parts are bytes already, or missing: a call for each part would cost more than the check.
        value_bytes = value if value is None or type(value) is bytes else as_bytes(value, "value")
        key_bytes = key if key is None or type(key) is bytes else as_bytes(key, "key")
        encoded: Sequence[Header] = as_headers(headers) if headers else ()
        if partition is not None:
            partition = as_partition(partition, subject)
        if timestamp_ms is not None:
            timestamp_ms = as_timestamp(timestamp_ms, subject)
        if on_delivery is not None and not callable(on_delivery):
            raise TypeError(f"on_delivery is a callable, not {type(on_delivery).__name__}")
        size = size_of(value_bytes, key_bytes, encoded)
        if size > max_bytes:
            raise too_large(size, max_bytes, subject)
        return cls(topic, value_bytes, key_bytes, partition, encoded, timestamp_ms, on_delivery, size)

    @property
    def messages(self) -> int:
        """One."""
        return 1

    @property
    def payload(self) -> int:
        """The bytes of its key and value."""
        return (0 if self.value is None else len(self.value)) + (0 if self.key is None else len(self.key))


class MessageBatch(NamedTuple):
    """Messages of one topic, given as a list of values and one of keys, which is None if they have none.

    The values are as they were given, and ``size`` is None: the engine checks each as it takes it. Or they are checked and
    copied, and ``size`` are their bytes together, likewise as :attr:`Message.size`.
    """

    topic: str
    values: Sequence[Content]
    keys: Sequence[Content] | None
    size: int | None = None

    @classmethod
    def of(cls, topic: str, values: Sequence[Content], keys: Sequence[Content] | None) -> Self:
        """The messages as they were given. Refuses other numbers of keys than of values."""
        if keys is not None and len(keys) != len(values):
            raise ValueError(f"{len(values)} values, {len(keys)} keys")
        return cls(topic, values, keys)

    def checked(self, max_bytes: int) -> MessageBatch:
        """These messages, checked as :meth:`Message.checked` does it, and copied. Call it before they wait."""
        if self.size is not None:
            return self
        rows = list(self.rows(max_bytes))
        keys = None if self.keys is None else [key for _, key, _ in rows]
        return MessageBatch(self.topic, [value for value, _, _ in rows], keys, sum(size for _, _, size in rows))

    def rows(self, max_bytes: int) -> Iterator[tuple[bytes | None, bytes | None, int]]:
        """Each message's value, key and size, checked one by one as they are taken; not again if they were."""
        pairs = zip(self.values, self.keys or repeat(None), strict=False)
        if self.size is not None:
            for value, key in cast("Iterator[tuple[bytes | None, bytes | None]]", pairs):
                yield value, key, size_of(value, key, ())
            return
        check_topic(self.topic)
        for row, (given_value, given_key) in enumerate(pairs):
            value, key = as_bytes(given_value, "value"), as_bytes(given_key, "key")
            size = size_of(value, key, ())
            if size > max_bytes:
                raise too_large(size, max_bytes, f"row {row}")
            yield value, key, size

    @property
    def messages(self) -> int:
        """How many they are."""
        return len(self.values)

    @property
    def payload(self) -> int:
        """The bytes of their keys and values, once they are checked; 0 before."""
        return 0 if self.size is None else self.size - OVERHEAD * len(self.values)


def columns_of(rows: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Rows as columns. Not by ``zip(*rows)``: it makes an iterator of each row, and the cycle collector visits them all."""
    return [list(map(operator.itemgetter(place), rows)) for place in range(len(rows[0]) if rows else 0)]


class MessageColumns(NamedTuple):
    """Messages of one topic, given as Arrow's columns, which nobody can change. Engines check the rows as they take them.

    Each column is a ``pyarrow.Array`` or ``ChunkedArray``; the values and keys are binary or text, and a null is a tombstone.
    All but the values may be None.
    """

    topic: str
    values: Any
    keys: Any = None
    headers: Any = None
    partitions: Any = None
    timestamps: Any = None

    def of_one_length(self) -> Self:
        """These messages. Refuses columns that differ in length."""
        for column in self[2:]:
            if column is not None and len(column) != len(self.values):
                raise ValueError(f"{len(self.values)} values, but {len(column)} rows of another column")
        return self

    @property
    def messages(self) -> int:
        """How many they are."""
        return len(self.values)

    @property
    def payload(self) -> int:
        """The bytes of their keys and values."""
        return int(self.values.nbytes) + (0 if self.keys is None else int(self.keys.nbytes))


class ConsumedOffsets(NamedTuple):
    """Consumed offsets that commit with the transaction: the next ones to consume, as confluent-kafka's ``TopicPartition``."""

    offsets: Sequence[Any]
    group_metadata: object

    @property
    def topic(self) -> None:
        """None: they go to no topic of the user's."""
        return

    @property
    def payload(self) -> int:
        """They count for nothing."""
        return 0


Sendable: TypeAlias = Message | MessageBatch | MessageColumns | ConsumedOffsets
"""The values that an engine sends, one method for each kind. The set is closed, so all of them can wait: for a savepoint or, as
rows, in the database."""


@lru_cache(maxsize=4096)  # the same few topics come again and again
def check_topic(topic: object) -> None:
    """Refuse what cannot be a topic's name. Source: ``Topic.validate`` of Kafka."""
    if not isinstance(topic, str):
        raise TypeError(f"a topic is text, not {type(topic).__name__}")
    if _TOPIC.fullmatch(topic) is None or topic in {".", ".."}:
        raise Unsendable("INVALID_TOPIC_EXCEPTION", "no topic can have this name")


def as_bytes(content: Content, part: str) -> bytes | None:
    """A key or a value as bytes; text as UTF-8."""
    if content is None or isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    raise TypeError(f"a {part} is text, bytes or None, not {type(content).__name__}")


def as_headers(headers: Headers) -> Sequence[Header]:
    """Headers as engines take them, in their order."""
    found = []
    for pair in headers.items() if isinstance(headers, Mapping) else headers:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):  # noqa: PLR2004
            raise TypeError("headers are a mapping, or pairs, of a name (text) and a value (text, bytes or None)")
        name, value = pair
        if not name.isascii():
            name.encode()  # raises here what an engine would raise in the middle of a batch
        found.append((name, as_bytes(value, "header's value")))
    return found


def as_partition(partition: int, subject: str) -> int | None:
    """The number of a partition; None where -1 leaves the choice."""
    number = operator.index(partition)
    if ANY_PARTITION <= number <= MAX_PARTITION:
        return None if number == ANY_PARTITION else number
    raise Unsendable("UNKNOWN_TOPIC_OR_PARTITION", f"{subject} names the partition {number}", NAME_A_PARTITION)


def as_timestamp(timestamp_ms: int, subject: str) -> int:
    """When a message was created (ms since 1970).

    0 is none: librdkafka takes it for the current time, and nobody would notice. Java's producer refuses negative ones, too.
    """
    created_ms = operator.index(timestamp_ms)
    if 0 < created_ms <= _MAX_TIMESTAMP_MS:
        return created_ms
    raise Unsendable("INVALID_TIMESTAMP", f"{subject} has the timestamp {created_ms} ms", _GIVE_A_TIME)


def size_of(value: bytes | None, key: bytes | None, headers: Sequence[Header]) -> int:
    """The bytes of a message as librdkafka compares them with ``message.max.bytes``."""
    size = OVERHEAD + (0 if value is None else len(value)) + (0 if key is None else len(key))
    for name, content in headers:
        length = len(name.encode())
        size += _varint_size(length) + length
        size += 1 if content is None else _varint_size(len(content)) + len(content)
    return size


def _varint_size(length: int) -> int:
    return max(1, (length.bit_length() + 7) // 7)  # zigzag takes one bit more


def too_large(size: int, max_bytes: int, subject: str) -> Unsendable:
    """The refusal of a message whose size, by :func:`size_of`, is above ``message.max.bytes``."""
    return Unsendable("MESSAGE_TOO_LARGE", f"{subject} has {size} bytes, message.max.bytes is {max_bytes}")


def nameless_header(subject: str) -> Unsendable:
    """The refusal of a row whose header has no name, or is none."""
    return Unsendable("INVALID_RECORD", f"{subject} has a header without a name", _NAME_THE_HEADER)


def no_partition(topic: str, partition: int, count: int, subject: str = "") -> Unsendable:
    """The refusal of a partition that a topic does not have."""
    detail = f"{subject}topic {topic!r} has no partition {partition}, but {count} from 0"
    return Unsendable("UNKNOWN_TOPIC_OR_PARTITION", detail, NAME_A_PARTITION)


# One message, as it is handed to a producer.


class ProducerRecord(NamedTuple):
    """One message as it is produced, by Kafka's name for it.

    Attributes:
        topic: Topic name.
        value: Payload: an object for the topic's value serializer; without a serializer, bytes, a string, or None.
        key: Key, likewise.
        headers: Headers, in order.
        partition: The partition; None if Kafka chooses it.
        timestamp_ms: The timestamp, in ms since 1970; None for the time at which it is produced.
    """

    topic: str
    value: object = None
    key: object = None
    headers: Sequence[tuple[str, str | bytes | None]] = ()
    partition: int | None = None
    timestamp_ms: int | None = None


Held = TypeVar("Held")

_LONGEST_NAME: Final = 63  # bytes: PostgreSQL truncates longer names, so two of them may become one


_ROLLED_BACK_ONCE: Final = "sa_savepoint_"
"""SQLAlchemy's savepoints: it rolls back to each once, and then leaves it open."""


class Move(Enum):
    """The effect of a statement on savepoints."""

    OPEN = "SAVEPOINT"
    RELEASE = "RELEASE SAVEPOINT"
    ROLL_BACK = "ROLLBACK TO SAVEPOINT"


class NotUnderstood(Exception):
    """It is no longer known which savepoints are open, or what happened to their messages: both sides must abort."""


# A text can affect savepoints only if it begins like this, or contains several statements.
_MAY_BEGIN: Final = re.compile(r"\s*(?:savepoint|release|rollback|--|/\*)", re.IGNORECASE)
_WORDS: Final = re.compile(r"savepoint|release|rollback", re.IGNORECASE)
_COMMENT: Final = re.compile(r"/\*|\*/")
_TOKEN: Final = re.compile(
    r"""
      (?P<skipped>\s+|--[^\n]*)
    | (?P<comment>/\*)
    | (?P<quoted>"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\])
    | (?P<text>[eE]'(?:[^'\\]|''|\\.)*'|'(?:[^']|'')*')
    | (?P<dollar>\$(?P<tag>(?:[^\W\d]\w*)?)\$.*?\$(?P=tag)\$)
    | (?P<word>[^\W\d][\w$]*)
    | (?P<end>;)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)


def moves_of(statement: str, *, quotes_keep_case: bool = True) -> Sequence[tuple[Move, str]]:
    """The effects on savepoints of a text of one or more SQL statements, once executed, in order.

    Words inside string literals, identifiers, comments and function bodies do not count. Quoted names that differ in case are
    different in PostgreSQL (``quotes_keep_case``), and the same in SQLite. Raises `NotUnderstood` if one of the statements
    affects savepoints in a way that this function cannot read.
    """
    if not may_move(statement):
        return ()
    found = (_move(tokens, quotes_keep_case=quotes_keep_case) for tokens in _statements(statement))
    return [move for move in found if move is not None]


def may_move(statement: str) -> bool:
    """Whether :func:`moves_of` may find something in the text: a quick look."""
    if ";" not in statement and _MAY_BEGIN.match(statement) is None:
        return False
    return _WORDS.search(statement) is not None


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.text.lower() in words


def _statements(text: str) -> Sequence[Sequence[_Token]]:
    statements: list[list[_Token]] = [[]]
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None  # the last alternative takes any character
        at = match.end()
        kind = match.lastgroup if match.lastgroup != "tag" else "dollar"
        if kind == "comment":
            at = _end_of_comment(text, at)
        elif kind == "end":
            statements.append([])
        elif kind not in {None, "skipped"}:
            statements[-1].append(_Token(str(kind), match.group()))
    return [tokens for tokens in statements if tokens]


def _end_of_comment(text: str, at: int) -> int:
    """Comments nest in PostgreSQL, but not in SQLite, where the witness catches a savepoint after nested ones."""
    depth = 1
    while depth and (match := _COMMENT.search(text, at)) is not None:
        depth += 1 if match.group() == "/*" else -1
        at = match.end()
    return at if not depth else len(text)


def _move(tokens: Sequence[_Token], *, quotes_keep_case: bool) -> tuple[Move, str] | None:
    if any(token.kind == "text" and "\\'" in token.text and token.text[0] == "'" for token in tokens):
        # Where the literal ends depends on PostgreSQL's standard_conforming_strings.
        raise NotUnderstood("a statement with savepoints and with a backslash before a quote")
    first, rest = tokens[0], list(tokens[1:])
    if first.is_word("savepoint"):
        move = Move.OPEN
    elif first.is_word("release"):
        move = Move.RELEASE
    elif first.is_word("rollback"):
        if rest and rest[0].is_word("work", "transaction"):
            rest.pop(0)
        if not (rest and rest[0].is_word("to")):
            return None  # rolls back the whole transaction: detected elsewhere
        rest.pop(0)
        move = Move.ROLL_BACK
    else:
        return None
    if move is not Move.OPEN and len(rest) > 1 and rest[0].is_word("savepoint"):
        rest.pop(0)
    if len(rest) != 1:
        raise NotUnderstood(f"{move.value} with a name that cannot be read")
    return move, _name(rest[0], quotes_keep_case=quotes_keep_case)


def _name(token: _Token, *, quotes_keep_case: bool) -> str:
    text = token.text
    if token.kind == "word":
        name = _lowered(text)
    elif token.kind in {"quoted", "text"} and not text[0].isalpha():
        quote = text[-1]
        name = text[1:-1].replace(quote * 2, quote)
        name = name if quotes_keep_case else _lowered(name)
    else:
        raise NotUnderstood(f"a savepoint's name that cannot be read: {text}")
    if len(name.encode()) > _LONGEST_NAME:
        raise NotUnderstood(f"a savepoint's name of more than {_LONGEST_NAME} bytes")
    return name


def _lowered(name: str) -> str:
    """Lower only ASCII letters, as databases do."""
    return name.encode().lower().decode()


@dataclass
class _Savepoint(Generic[Held]):
    name: str
    witness: int
    messages: list[Held] = field(default_factory=list)
    over: bool = False


class Savepoints(Generic[Held]):
    """The open savepoints, the messages that belong to each, and those that may be sent.

    ``witness`` is the number that the database must show now; 0 if it has none.
    """

    def __init__(self) -> None:
        self.witness = 0
        self._numbered = 0
        self._open: list[_Savepoint[Held]] = []
        self._free: list[Held] = []

    @property
    def idle(self) -> bool:
        """Whether a message may be sent at once: no savepoint is open, and no other message is queued before it."""
        return not self._open and not self._free

    @property
    def holds(self) -> bool:
        """Whether a new message would wait: a savepoint is open."""
        return bool(self._open)

    @property
    def may_roll_back(self) -> bool:
        """Whether what is done now may be rolled back to a savepoint."""
        return not all(savepoint.over for savepoint in self._open)

    @property
    def needs_witness(self) -> bool:
        """Whether an unseen rollback to the innermost savepoint would revert no witness, and so go unnoticed."""
        return bool(self._open) and self.witness == self._open[-1].witness

    @property
    def at_risk(self) -> bool:
        """Whether a message waits for a savepoint whose rollback, if it went unseen, would revert no witness."""
        return any(savepoint.messages and savepoint.witness == self.witness for savepoint in self._open)

    def new_witness(self) -> int:
        """Take the next number for the database, which becomes :attr:`witness`. No number is used twice."""
        self._numbered += 1
        self.witness = self._numbered
        return self.witness

    def add(self, message: Held) -> None:
        """Add a produced message."""
        (self._open[-1].messages if self._open else self._free).append(message)

    def apply(self, move: Move, name: str) -> None:
        """Apply a savepoint statement that the database has executed. Raises `NotUnderstood` if it was opened unseen."""
        if move is Move.OPEN:
            self._open.append(_Savepoint(name, self.witness))
            return
        at = next((n for n in reversed(range(len(self._open))) if self._open[n].name == name), None)
        if at is None:
            raise NotUnderstood(f"{move.value} {name}, which was opened unseen")
        if move is Move.RELEASE:
            self._release(at)
        else:
            # The savepoint itself stays open; those inside it are gone.
            self.witness = self._open[at].witness
            self._open[at].messages.clear()
            self._open[at].over = name.startswith(_ROLLED_BACK_ONCE)
            del self._open[at + 1 :]

    def _release(self, at: int) -> None:
        released = [message for savepoint in self._open[at:] for message in savepoint.messages]
        del self._open[at:]
        (self._open[-1].messages if self._open else self._free).extend(released)

    def take(self) -> Sequence[Held]:
        """The messages to send now, in the order in which they were produced; each is taken once."""
        taken, self._free = self._free, []
        return taken

    def end(self) -> None:
        """Release all savepoints that are still open, as the database commits."""
        if self._open:
            self._release(0)
