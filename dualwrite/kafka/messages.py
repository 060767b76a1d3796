"""The requests that are sent to brokers, as bytes, and what their answers say.

The requests of every dual write are packed here: Produce, EndTxn, and those that ask a leader how transactions have ended.
Each costs a few microseconds. So are consumed offsets, whose newest version kafka-python does not know, and the requests of a
connection's opening, which come before anything else; those of a writer's opening are in
:mod:`dualwrite.kafka.opening_messages`. All others are rare: kafka-python packs and reads them (:class:`Rare`), by the public
methods of its messages alone. Tests hold what is packed here equal to kafka-python's bytes, for every version that it knows, or
to the Java client's, and what is read equal to what they read.

Source: the Kafka protocol guide; KIP-482 (tagged fields), KIP-1319 (offsets by topic id).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeAlias

Answer: TypeAlias = Any
"""A value that a request reads from its answer: of another type for each request."""
Message: TypeAlias = Any
"""kafka-python's requests and responses, which have no types."""
Done = Callable[[Answer], object]
"""Called once, with the answer or the ``Exception`` that there is instead of one."""
Partition = tuple[str, int]

_HEAD: Final = struct.Struct(">ihhi")  # length, API key, version, correlation id
_HEAD_LENGTH: Final = 8  # of what the length counts in it
_INT16, _INT32, _INT64 = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")
_SEVEN_BITS, _MORE, _LAST_SHIFT = 127, 128, 28
NO_TAGS: Final = b"\0"
ID_ENDS: Final = 4

try:
    _OUR_VERSION = version("dualwrite")
except PackageNotFoundError:  # used from a tree that is not installed
    _OUR_VERSION = "0"


class NotOffered(Exception):
    """The broker does not offer a version of the request that this library can use."""


class Unreadable(Exception):
    """These bytes are no answer to the request."""


@dataclass(frozen=True)
class Client:
    """The client's name in the head of each request; ``flexible_head`` is for those with tagged fields."""

    name: str
    head: bytes = field(init=False)
    flexible_head: bytes = field(init=False)

    def __post_init__(self) -> None:
        encoded = self.name.encode()
        object.__setattr__(self, "head", _INT16.pack(len(encoded)) + encoded)
        object.__setattr__(self, "flexible_head", self.head + NO_TAGS)


class Offered:
    """The versions of requests that a broker offers: by API key, the lowest and the highest."""

    __slots__ = ("ranges",)

    def __init__(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        self.ranges = ranges

    def highest(self, name: str, api_key: int, lowest: int, highest: int) -> int:
        """The highest version of a request that both sides know; `NotOffered` if there is none."""
        theirs = self.ranges.get(api_key)
        if theirs is None or theirs[1] < lowest or theirs[0] > highest:
            raise NotOffered(f"it does not offer {name} {lowest}" + (f" to {highest}" if highest > lowest else ""))
        return min(highest, theirs[1])


class Request(Protocol):
    """One request, at whatever version the broker offers."""

    def version(self, offered: Offered) -> int:
        """The version to send; `NotOffered` if there is none. All requests of a class have the same, unless it is `Varying`."""
        ...

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        """The bytes to send: the length, the head and the body."""
        ...

    def read(self, answer: bytes, version: int) -> Answer:
        """Read the answer: its bytes from the correlation id on. Any ``Exception`` means that it is none."""
        ...


class OfOneKind:
    """A request that is packed here: by its name, its key, and the lowest and the highest version that it can have."""

    NAME: ClassVar[str]
    KEY: ClassVar[int]
    LOWEST: ClassVar[int]
    HIGHEST: ClassVar[int]
    __slots__ = ()

    def version(self, offered: Offered) -> int:
        return offered.highest(self.NAME, self.KEY, self.LOWEST, self.HIGHEST)


class Varying:
    """A request whose version depends on what it asks for, so that a connection chooses it each time."""

    __slots__ = ()


# Bytes.


@lru_cache(maxsize=1024)
def unsigned(number: int) -> bytes:
    """A varint: lengths and counts of tagged versions, each with 1 added to it."""
    made = bytearray()
    while number > _SEVEN_BITS:
        made.append(number & _SEVEN_BITS | _MORE)
        number >>= 7
    made.append(number)
    return bytes(made)


@lru_cache(maxsize=4096)
def compact(text: str) -> bytes:
    """A text of a tagged version."""
    encoded = text.encode()
    return unsigned(len(encoded) + 1) + encoded


def framed(api_key: int, version: int, correlation_id: int, client: Client, body: bytes) -> bytes:
    """A request of a tagged version: its length, its head and its body."""
    head = client.flexible_head
    return _HEAD.pack(_HEAD_LENGTH + len(head) + len(body), api_key, version, correlation_id) + head + body


class Cursor:
    """Reads the fields of an answer one after the other; `Unreadable` if the answer ends before a field does."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes, at: int) -> None:
        self.data = data
        self.at = at

    def raw(self, size: int) -> bytes:
        """This many bytes."""
        end = self.at + size
        if size < 0 or end > len(self.data):
            raise Unreadable("it ends too early")
        found, self.at = self.data[self.at : end], end
        return found

    def int16(self) -> int:
        """16 bits with a sign."""
        return int.from_bytes(self.raw(2), "big", signed=True)

    def int32(self) -> int:
        """32 bits with a sign."""
        return int.from_bytes(self.raw(4), "big", signed=True)

    def int64(self) -> int:
        """64 bits with a sign."""
        return int.from_bytes(self.raw(8), "big", signed=True)

    def unsigned(self) -> int:
        """A varint."""
        number = shift = 0
        while True:
            [byte] = self.raw(1)
            number |= (byte & _SEVEN_BITS) << shift
            if not byte & _MORE:
                return number
            shift += 7
            if shift > _LAST_SHIFT:
                raise Unreadable("a varint is too long")

    def count(self) -> int:
        """The number of things in a list of a tagged version; 0 for no list."""
        return max(0, self.unsigned() - 1)

    def text(self) -> str | None:
        """A text of a tagged version."""
        size = self.unsigned()
        return self.raw(size - 1).decode() if size else None

    def plain_text(self) -> str | None:
        """A text of a version without tagged fields."""
        size = self.int16()
        return self.raw(size).decode() if size >= 0 else None

    def plain_bytes(self) -> bytes:
        """Bytes of a version without tagged fields."""
        return self.raw(max(0, self.int32()))

    def skip_tags(self) -> None:
        """Tagged fields: none of them is known here."""
        for _ in range(self.unsigned()):
            self.unsigned()
            self.raw(self.unsigned())


def behind_head(answer: bytes) -> Cursor:
    """Reads an answer of a tagged version, from behind the time for which the broker throttles us."""
    read = Cursor(answer, ID_ENDS)
    read.skip_tags()
    read.int32()
    return read


# The opening of a connection.

API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE = 18, 17, 36


def opening_request(api_key: int, version: int, correlation_id: int, client: Client, content: bytes = b"") -> bytes:
    """A request of the opening: version 0 or 3 for ApiVersions, 1 for the others.

    ``content`` is the mechanism of a SaslHandshake, or the bytes of a SaslAuthenticate.
    """
    if api_key == API_VERSIONS:
        body = api_versions_body() if version else b""
        head = client.flexible_head if version else client.head
    else:
        head = client.head
        body = (_INT16 if api_key == SASL_HANDSHAKE else _INT32).pack(len(content)) + content
    return _HEAD.pack(_HEAD_LENGTH + len(head) + len(body), api_key, version, correlation_id) + head + body


def api_versions_body() -> bytes:
    """What an ApiVersions request says, from version 3 on."""
    return compact("dualwrite") + compact(_OUR_VERSION) + NO_TAGS


def skip_api_keys(read: Cursor) -> None:
    """Pass over the versions of an answer to ApiVersions, from version 3 on."""
    for _ in range(read.count()):
        read.raw(6)
        read.skip_tags()


def read_api_versions(answer: bytes, version: int) -> tuple[int, dict[int, tuple[int, int]]]:
    """The error code and, by API key, the lowest and the highest version offered. Its head never has tagged fields.

    A broker that does not know the request's version answers at version 0.
    """
    read = Cursor(answer, ID_ENDS)
    code = read.int16()
    is_tagged = version > 0 and code == 0
    found = {}
    for _ in range(read.count() if is_tagged else read.int32()):
        api_key = read.int16()
        found[api_key] = (read.int16(), read.int16())
        if is_tagged:
            read.skip_tags()
    return code, found


def read_sasl_handshake(answer: bytes) -> tuple[int, list[str]]:
    """The error code, and the mechanisms that the broker knows."""
    read = Cursor(answer, ID_ENDS)
    code = read.int16()
    return code, [read.plain_text() or "" for _ in range(read.int32())]


def read_sasl_authenticate(answer: bytes) -> tuple[int, str | None, bytes, int]:
    """The error code and its text, the mechanism's bytes, and for how long the login is good (ms; 0 without a limit)."""
    read = Cursor(answer, ID_ENDS)
    return read.int16(), read.plain_text(), read.plain_bytes(), read.int64()


# The messages of a transaction.


class TopicKey(NamedTuple):
    """A topic as requests name it: ``topic_id`` is zeros if it has none; ``name_field`` is for tagged versions."""

    name: str
    topic_id: bytes
    name_field: bytes

    @classmethod
    def of(cls, name: str, topic_id: bytes) -> TopicKey:
        """Make one."""
        return cls(name, topic_id, compact(name))


class Produce(OfOneKind):
    """Batches for the partitions of one leader, in a transaction.

    From version 12 on a Produce adds its partitions to the transaction by itself. From 13 on it names topics by their ids:
    a topic that was made again is refused. ``timeout_ms`` is how long the broker may wait for its replicas before it
    answers.
    """

    NAME, KEY, LOWEST, HIGHEST = "Produce", 0, 12, 13
    __slots__ = ("_timeout_ms", "batches", "transactional_id")

    def __init__(
        self, transactional_id: str, batches: Sequence[tuple[TopicKey, Sequence[tuple[int, bytes]]]], timeout_ms: int
    ) -> None:
        self.transactional_id = transactional_id
        self.batches = batches
        self._timeout_ms = timeout_ms

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        parts = [
            b"",
            client.flexible_head,
            compact(self.transactional_id),
            _ALL_REPLICAS.pack(-1, self._timeout_ms),
            unsigned(len(self.batches) + 1),
        ]
        for topic, partitions in self.batches:
            parts.append(topic.name_field if version < _BY_ID else topic.topic_id)
            parts.append(unsigned(len(partitions) + 1))
            for number, records in partitions:
                parts += (_INT32.pack(number), unsigned(len(records) + 1), records, NO_TAGS)
            parts.append(NO_TAGS)
        parts.append(NO_TAGS)
        parts[0] = _HEAD.pack(_HEAD_LENGTH + sum(map(len, parts)), self.KEY, version, correlation_id)
        return b"".join(parts)

    def read(self, answer: bytes, version: int) -> dict[Partition, tuple[int, int]]:
        """By partition, the error code and the base offset."""
        if len(self.batches) == 1:
            # One topic with one partition and nothing to tell, as of nearly every dual write.
            topic = self.batches[0][0]
            named = topic.name_field if version < _BY_ID else topic.topic_id
            at = len(named) + _ONE_TOPIC_AT
            if (
                len(answer) == at + _ONE_PARTITION.size
                and answer[ID_ENDS:_ONE_TOPIC_AT] == b"\0\2"
                and answer[_ONE_TOPIC_AT:at] == named
            ):
                ones, number, code, base_offset, nothing, tags = _ONE_PARTITION.unpack_from(answer, at)
                if ones == _ONE and nothing == b"\1\0\0\0" and not tags:
                    return {(topic.name, number): (code, base_offset)}
        return self._read_any(answer, version)

    def _read_any(self, answer: bytes, version: int) -> dict[Partition, tuple[int, int]]:
        names = {topic.topic_id: topic.name for topic, _ in self.batches}
        found = {}
        read = Cursor(answer, ID_ENDS)
        read.skip_tags()
        for _ in range(read.count()):
            name = names[read.raw(16)] if version >= _BY_ID else read.text()
            for _ in range(read.count()):
                number, code, base_offset = read.int32(), read.int16(), read.int64()
                read.raw(16)  # the time of the append, and where the log begins
                for _ in range(read.count()):  # records that the broker finds fault with
                    read.int32()
                    read.text()
                    read.skip_tags()
                read.text()
                read.skip_tags()
                found[name or "", number] = (code, base_offset)
            read.skip_tags()
        read.int32()  # for how long the broker throttles us
        read.skip_tags()
        return found


_ALL_REPLICAS: Final = struct.Struct(">hi")
_BY_ID: Final = 13
_ONE_TOPIC_AT: Final = ID_ENDS + 2
_ONE: Final = 2  # the count of a list is written with 1 added to it
# One partition: its number, code and offset; time of the append and beginning of the log; no faults, no text, no tags, no tags
# of the topic; for how long we are throttled; no tags.
_ONE_PARTITION: Final = struct.Struct(">Bihq16x4s4xB")


class TransactionEnded(NamedTuple):
    """The answer to an EndTxn. The ids are those of the next transaction; -1 if the answer names none."""

    error_code: int
    producer_id: int
    producer_epoch: int


class EndTxn(OfOneKind):
    """Ends the one transaction of a producer id and epoch: at version 5, which raises the epoch. Source: KIP-890."""

    NAME, KEY, LOWEST, HIGHEST = "EndTxn", 26, 5, 5
    __slots__ = ("committed", "producer_epoch", "producer_id", "transactional_id")

    def __init__(self, transactional_id: str, ids: tuple[int, int], *, committed: bool) -> None:
        self.transactional_id = transactional_id
        self.producer_id, self.producer_epoch = ids
        self.committed = committed

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        head, kafka_id = client.flexible_head, compact(self.transactional_id)
        length = _HEAD_LENGTH + len(head) + len(kafka_id) + _END.size
        end = _END.pack(self.producer_id, self.producer_epoch, self.committed, 0)
        return _HEAD.pack(length, self.KEY, version, correlation_id) + head + kafka_id + end

    def read(self, answer: bytes, version: int) -> TransactionEnded:  # noqa: ARG002 - there is one version
        """The answer."""
        if len(answer) == _ENDED.size:
            tags, _, code, producer_id, epoch, more_tags = _ENDED.unpack(answer)
            if not tags and not more_tags:
                return TransactionEnded(code, producer_id, epoch)
        read = behind_head(answer)
        ended = TransactionEnded(read.int16(), read.int64(), read.int16())
        read.skip_tags()
        return ended


_END: Final = struct.Struct(">qhBB")
_ENDED: Final = struct.Struct(">4xBihqhB")


class Group(NamedTuple):
    """A consumer's membership in its group, as it stood when the offsets were consumed. Source: KIP-447.

    ``generation`` is the member's epoch under KIP-848. A consumer without a subscription has generation -1 and no member
    id.
    """

    group_id: str
    generation: int = -1
    member_id: str = ""
    instance_id: str | None = None


class Offset(NamedTuple):
    """An offset to commit for a partition: the next one to consume.

    ``leader_epoch`` is that of the last record consumed, -1 if it is not known; ``metadata`` is the application's own text.
    """

    offset: int
    leader_epoch: int = -1
    metadata: str = ""


class TxnOffsetCommit(OfOneKind, Varying):
    """Consumed offsets, as a part of the transaction of a producer id and epoch.

    From version 5 on it adds the group's partition to the transaction by itself (KIP-890). Version 6 names topics by their
    ids, so that offsets of a topic that was made again are refused (KIP-1319); where the id of a topic is not in
    ``topic_ids``, the request stays at version 5.
    """

    NAME, KEY, LOWEST, HIGHEST = "TxnOffsetCommit", 28, 5, 6
    __slots__ = ("group", "ids", "offsets", "topic_ids", "transactional_id")

    def __init__(
        self,
        transactional_id: str,
        ids: tuple[int, int],
        group: Group,
        offsets: Mapping[Partition, Offset],
        topic_ids: Mapping[str, bytes],
    ) -> None:
        self.transactional_id = transactional_id
        self.ids = ids
        self.group = group
        self.offsets = offsets
        self.topic_ids = topic_ids

    def version(self, offered: Offered) -> int:
        by_id = all(name in self.topic_ids for name, _ in self.offsets)
        return offered.highest(self.NAME, self.KEY, self.LOWEST, self.HIGHEST if by_id else _OFFSETS_BY_ID - 1)

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        group, topics = self.group, by_topic(self.offsets)
        parts = [
            compact(self.transactional_id),
            compact(group.group_id),
            _COMMITTER.pack(*self.ids, group.generation),
            compact(group.member_id),
            _NO_TEXT if group.instance_id is None else compact(group.instance_id),
            unsigned(len(topics) + 1),
        ]
        for name, numbers in topics.items():
            parts += (self._topic(name, version), unsigned(len(numbers) + 1))
            for number in numbers:
                offset, leader_epoch, metadata = self.offsets[name, number]
                parts += (_OFFSET.pack(number, offset, leader_epoch), compact(metadata), NO_TAGS)
            parts.append(NO_TAGS)
        parts.append(NO_TAGS)
        return framed(self.KEY, version, correlation_id, client, b"".join(parts))

    def _topic(self, name: str, version: int) -> bytes:
        return self.topic_ids[name] if version >= _OFFSETS_BY_ID else compact(name)

    def read(self, answer: bytes, version: int) -> dict[Partition, int]:
        """By partition, the error code."""
        names = {topic_id: name for name, topic_id in self.topic_ids.items()}
        found = {}
        read = Cursor(answer, ID_ENDS)
        read.skip_tags()
        read.int32()  # for how long the broker throttles us
        for _ in range(read.count()):
            name = names[read.raw(16)] if version >= _OFFSETS_BY_ID else read.text() or ""
            for _ in range(read.count()):
                number = read.int32()
                found[name, number] = read.int16()
                read.skip_tags()
            read.skip_tags()
        read.skip_tags()
        return found


_OFFSETS_BY_ID: Final = 6
_COMMITTER: Final = struct.Struct(">qhi")
_OFFSET: Final = struct.Struct(">iqi")
_NO_TEXT: Final = b"\0"


# What the leader of a partition shows.


class ProducerState(NamedTuple):
    """A producer that a partition remembers."""

    producer_id: int
    epoch: int
    last_sequence: int  # of its newest record; -1 after a marker
    last_timestamp: int  # of its newest record, in ms since 1970
    coordinator_epoch: int  # of its newest marker
    open_from: int  # where its open transaction began; -1 if it has none open


class DescribeProducers(OfOneKind):
    """The producers that partitions of one leader remember. Followers answer it, too, and may lag behind. Source: KIP-664."""

    NAME, KEY, LOWEST, HIGHEST = "DescribeProducers", 61, 0, 0
    __slots__ = ("partitions",)

    def __init__(self, partitions: Collection[Partition]) -> None:
        self.partitions = partitions

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        topics = by_topic(self.partitions)
        parts = [b"", client.flexible_head, unsigned(len(topics) + 1)]
        for name, numbers in topics.items():
            parts += (compact(name), unsigned(len(numbers) + 1), struct.pack(f">{len(numbers)}i", *numbers), NO_TAGS)
        parts.append(NO_TAGS)
        parts[0] = _HEAD.pack(_HEAD_LENGTH + sum(map(len, parts)), self.KEY, version, correlation_id)
        return b"".join(parts)

    def read(self, answer: bytes, version: int) -> dict[Partition, tuple[int, Sequence[ProducerState]]]:  # noqa: ARG002 - there is one version
        """By partition, the error code and the producers."""
        try:
            return _read_short_states(answer)
        except (_Long, IndexError, UnicodeDecodeError, struct.error):
            return self._read_any(answer)

    @staticmethod
    def _read_any(answer: bytes) -> dict[Partition, tuple[int, Sequence[ProducerState]]]:
        found: dict[Partition, tuple[int, Sequence[ProducerState]]] = {}
        read = behind_head(answer)
        for _ in range(read.count()):
            name = read.text() or ""
            for _ in range(read.count()):
                number, code = read.int32(), read.int16()
                read.text()  # of the error
                found[name, number] = (code, _states(read))
                read.skip_tags()
            read.skip_tags()
        read.skip_tags()
        return found


class _Long(Exception):
    """An answer has a tagged field, or a length that takes more than one byte: it is read field by field."""


def _read_short_states(answer: bytes) -> dict[Partition, tuple[int, Sequence[ProducerState]]]:
    """An answer to DescribeProducers without tagged fields, whose lengths take one byte: as nearly every dual write sees it.

    It is read in one pass: a call for each field would take longer than all else about the known end.

    Raises:
        _Long, IndexError, UnicodeDecodeError, struct.error: It is another one, or none.
    """
    found: dict[Partition, tuple[int, Sequence[ProducerState]]] = {}
    tags, topics, at = answer[ID_ENDS], answer[ID_ENDS + _THROTTLED], ID_ENDS + _THROTTLED + 1
    lengths = topics  # all of them, bit by bit: the highest bit of one shows that it takes another byte
    for _ in range(topics - 1):
        name, partitions, at, bits = _topic_at(answer, at)
        lengths |= bits
        for _ in range(partitions - 1):
            number, code, text = _SHOWN.unpack_from(answer, at)
            at += _SHOWN.size + (text - 1 if text else 0)
            count = answer[at]
            begin, at = at + 1, at + 1 + (count - 1 if count else 0) * _TAGGED_STATE.size
            states = answer[begin:at]
            lengths |= text | count
            tags |= answer[at] | any(states[_STATE.size :: _TAGGED_STATE.size])
            found[name, number] = (code, list(map(_AS_STATE, _TAGGED_STATE.iter_unpack(states))))
            at += 1
        tags |= answer[at]
        at += 1
    if tags or lengths & _MORE or answer[at] or at + 1 != len(answer):
        raise _Long
    return found


def _topic_at(answer: bytes, at: int) -> tuple[str, int, int, int]:
    """The topic that begins there: its name, the count of its partitions as written, where they begin, its lengths' bits."""
    size = answer[at]
    name_ends = at + (size or 1)
    partitions = answer[name_ends]
    return answer[at + 1 : name_ends].decode(), partitions, name_ends + 1, size | partitions


_THROTTLED: Final = 5  # no tags, and for how long the broker throttles us
_SHOWN: Final = struct.Struct(">ihB")
_STATE: Final = struct.Struct(">qiiqiq")
_TAGGED_STATE: Final = struct.Struct(">qiiqiqx")
_AS_STATE: Final[Callable[[tuple[Any, ...]], ProducerState]] = partial(tuple.__new__, ProducerState)
"""As ``ProducerState._make``, without a frame of Python's for each: a busy partition remembers hundreds of producers."""


def _states(read: Cursor) -> Sequence[ProducerState]:
    count, begin = read.count(), read.at
    end = begin + count * _TAGGED_STATE.size
    # One is as long as the other unless one has tagged fields, which no broker sends.
    if end <= len(read.data) and not any(read.data[begin + _STATE.size : end : _TAGGED_STATE.size]):
        read.at = end
        return list(map(_AS_STATE, _TAGGED_STATE.iter_unpack(read.data[begin:end])))
    found = []
    for _ in range(count):
        found.append(ProducerState(*_STATE.unpack(read.raw(_STATE.size))))
        read.skip_tags()
    return found


class OffsetForLeaderEpoch(OfOneKind):
    """Where the logs of one broker's partitions end. Only the leader of the given epoch answers it."""

    NAME, KEY, LOWEST, HIGHEST = "OffsetForLeaderEpoch", 23, 4, 4
    __slots__ = ("epochs",)

    def __init__(self, epochs: Mapping[Partition, int]) -> None:
        self.epochs = epochs

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        topics = by_topic(self.epochs)
        parts = [b"", client.flexible_head, _AS_A_CONSUMER, unsigned(len(topics) + 1)]
        for name, numbers in topics.items():
            parts += (compact(name), unsigned(len(numbers) + 1))
            for number in numbers:
                epoch = self.epochs[name, number]
                parts.append(_LED.pack(number, epoch, epoch))
            parts.append(NO_TAGS)
        parts.append(NO_TAGS)
        parts[0] = _HEAD.pack(_HEAD_LENGTH + sum(map(len, parts)), self.KEY, version, correlation_id)
        return b"".join(parts)

    def read(self, answer: bytes, version: int) -> dict[Partition, tuple[int, int]]:  # noqa: ARG002 - there is one version
        """By partition, the error code and the offset at which its log ends, replicated or not."""
        try:
            return _read_short_ends(answer)
        except (_Long, IndexError, UnicodeDecodeError, struct.error):
            return self._read_any(answer)

    @staticmethod
    def _read_any(answer: bytes) -> dict[Partition, tuple[int, int]]:
        found = {}
        read = behind_head(answer)
        for _ in range(read.count()):
            name = read.text() or ""
            for _ in range(read.count()):
                code, number, _, end_offset = _EPOCH_END.unpack(read.raw(_EPOCH_END.size))
                found[name, number] = (code, end_offset)
                read.skip_tags()
            read.skip_tags()
        read.skip_tags()
        return found


def _read_short_ends(answer: bytes) -> dict[Partition, tuple[int, int]]:
    """An answer to OffsetForLeaderEpoch without tagged fields, in one pass. Raises as :func:`_read_short_states`."""
    found: dict[Partition, tuple[int, int]] = {}
    tags, topics, at = answer[ID_ENDS], answer[ID_ENDS + _THROTTLED], ID_ENDS + _THROTTLED + 1
    lengths = topics
    for _ in range(topics - 1):
        name, partitions, begin, bits = _topic_at(answer, at)
        lengths |= bits
        at = begin + (partitions - 1 if partitions else 0) * _TAGGED_EPOCH_END.size
        for code, number, _, end_offset, more_tags in _TAGGED_EPOCH_END.iter_unpack(answer[begin:at]):
            found[name, number] = (code, end_offset)
            tags |= more_tags
        tags |= answer[at]
        at += 1
    if tags or lengths & _MORE or answer[at] or at + 1 != len(answer):
        raise _Long
    return found


_AS_A_CONSUMER: Final = _INT32.pack(-2)  # which may see what is not replicated yet: the protocol's default
_LED: Final = struct.Struct(
    ">iiix"
)  # the partition; the epoch that its leader must have; the one to find the end of; no tags
_EPOCH_END: Final = struct.Struct(">hiiq")
_TAGGED_EPOCH_END: Final = struct.Struct(">hiiqB")


def by_topic(partitions: Collection[Partition]) -> dict[str, list[int]]:
    """The numbers of the partitions of each topic, in the order in which they come."""
    topics: dict[str, list[int]] = {}
    for name, number in partitions:
        topics.setdefault(name, []).append(number)
    return topics


# All others.


class Rare(Varying):
    """A message of kafka-python, which packs it and reads its answer. It may name ``min_version`` and ``max_version``."""

    __slots__ = ("message",)

    def __init__(self, message: Message) -> None:
        self.message = message

    def version(self, offered: Offered) -> int:
        import kafka.errors  # noqa: PLC0415 - loaded with the first rare request

        try:
            return int(_kafka_pythons(offered).api_version(self.message))
        except kafka.errors.IncompatibleBrokerVersion as error:
            raise NotOffered(str(error)) from error

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        self.message.with_header(correlation_id=correlation_id, client_id=client.name)
        return bytes(self.message.encode(version=version, header=True, framed=True))

    def read(self, answer: bytes, version: int) -> Message:  # noqa: ARG002 - the message's header has it
        """kafka-python's response."""
        response = self.message.header.get_response_class()
        if response is None:
            raise Unreadable("kafka-python does not know the answer to its request")
        return response.decode(answer, header=True)


@lru_cache(maxsize=256)
def _kafka_pythons(offered: Offered) -> Message:
    from kafka.protocol.broker_version_data import BrokerVersionData  # noqa: PLC0415 - as above

    return BrokerVersionData(api_versions=dict(offered.ranges))
