"""``PreparedTxnState``: the identity of one prepared Kafka transaction, and its text form.

The text goes into the row in the same commit as the user's rows. That row is the decision, so the parser here is
strict: what it does not understand exactly, it refuses. Sets of partition numbers, which the text contains, are written
and read here too.

KIP-939 identifies a prepared transaction by ``producer_id:epoch``. That is unique only if every transaction
gets an epoch of its own (KIP-890, "TV2" clients). With librdkafka all transactions of one producer instance share
one producer id and epoch, so the identity here also holds what the broker can show of a single transaction: the
*first offset* that it wrote in each partition.

Text form, parsed strictly::

    42:0                                             KIP-939's own form
    42:0;i=3;t=1767225600000;orders@c2FtcGxl:0=17,1=33;payments:4=0

that is ``producer_id:epoch``, then the incarnation, the coordinator's start time of the transaction in ms, and for
each topic (with its topic id, where known) the first offset by partition. The empty text is the empty state: no
transaction.

The native engine's transactions do have an epoch each, so ``producer_id:epoch`` is their identity. Their text says so
(``n``), and names every partition with its topic's id, but at most eight of them with an offset: these are evidence for
the log's proof. The others follow as ranges or as a bitmap (:mod:`dualwrite.protocol.prepared_state`)::

    42:7;n;i=3;orders@c2FtcGxl:0=17,1=33,2-9999;payments@eFdRbTY3:~VVVVVVVVVVVVVVVV
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest
from typing import Final

from dualwrite.errors import ConfigurationError

MAX_TEXT_LENGTH = 1_000_000
MAX_NATIVE_OFFSETS = 8
MAX_NATIVE_PARTITIONS = 100_000
_MAX_INT16, _MAX_INT32, _MAX_INT64 = 2**15 - 1, 2**31 - 1, 2**63 - 1
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_TOPIC_ID = re.compile(r"[a-zA-Z0-9_-]{1,22}")
_NATIVE = "n"
_NOT_EMPTY = "the empty state has no incarnation, start time, engine or partitions"
_NAMES_TOPICS = "a native state names each topic once, with its id"


@dataclass(frozen=True, order=True)
class FirstOffset:
    """The offset of the first record that a transaction wrote in one partition.

    Attributes:
        topic: Topic name.
        partition: Partition number.
        offset: Offset of the transaction's first record there.
        topic_id: The topic's id as Kafka prints it (URL-safe base64), or None if it is not known.
    """

    topic: str
    partition: int
    offset: int
    topic_id: str | None = None


class Engine(Enum):
    """The producer engine that made a transaction, and so what identifies it.

    ``LIBRDKAFKA``: all transactions of one producer instance share producer id and epoch, and their first offsets tell them
    apart. ``NATIVE``: every transaction has an epoch of its own (transaction version 2, KIP-890).
    """

    __hash__ = object.__hash__  # Enum's own is slow Python code, and states are compared by it

    LIBRDKAFKA = "librdkafka"
    NATIVE = "native"


@dataclass(frozen=True, order=True)
class FurtherPartitions:
    """Partitions of one topic that a native transaction wrote to, named without an offset.

    The topic's id is as Kafka prints it (URL-safe base64). There is at least one number, and they are sorted.
    """

    topic: str
    topic_id: str
    numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", tuple(sorted(self.numbers)))


@dataclass(frozen=True, eq=False)
class PreparedTxnState:
    """The identity of one prepared transaction: equal states name the same transaction.

    A native transaction is identified by producer id and epoch alone, and two native states with the same ones are equal,
    whatever else they name. States of librdkafka's engine are equal if they also have the same incarnation and the same first
    offsets. States of different engines are never equal.

    Serialise with ``str(state)``, read back with :meth:`from_string`; pickles too. Source: KIP-939,
    ``KafkaProducer.PreparedTxnState``, whose two-number form is read and, for a state without evidence, written.

    Attributes:
        producer_id: The broker's producer id; -1 in the empty state.
        epoch: The producer epoch; -1 in the empty state.
        incarnation: The incarnation of the transactional id that prepared it; None outside a ``DualWriter``.
        first_offsets: The evidence: the first offset in every partition written, sorted. In a native state, in at most eight
            of them.
        started_ms: When the transaction began, according to the coordinator (ms since 1970); None if it was not asked.
            Not part of the identity.
        engine: The engine that made the transaction.
        further: In a native state, all other partitions written, sorted by topic. Empty otherwise.
        has_transaction: False for the empty state.
        is_native: Whether the native engine made it, so that producer id and epoch name it exactly.
    """

    producer_id: int = -1
    epoch: int = -1
    incarnation: int | None = None
    first_offsets: tuple[FirstOffset, ...] = ()
    started_ms: int | None = None
    engine: Engine = Engine.LIBRDKAFKA
    further: tuple[FurtherPartitions, ...] = ()
    has_transaction: bool = field(init=False, repr=False)
    is_native: bool = field(init=False, repr=False)
    _text: str | None = field(init=False, repr=False, default=None)
    _is_readable: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_transaction", self.producer_id >= 0)
        object.__setattr__(self, "is_native", self.engine is Engine.NATIVE)
        if len(self.first_offsets) > 1 or not isinstance(self.first_offsets, tuple):
            object.__setattr__(self, "first_offsets", tuple(sorted(self.first_offsets)))
        if len(self.further) > 1 or not isinstance(self.further, tuple):
            object.__setattr__(self, "further", tuple(sorted(self.further)))
        self._check()

    def _check(self) -> None:
        empty = self.producer_id == -1 and self.epoch == -1
        if not empty and not (0 <= self.producer_id <= _MAX_INT64 and 0 <= self.epoch <= _MAX_INT16):
            raise ConfigurationError(f"producer id {self.producer_id} with epoch {self.epoch} is out of range")
        if not self.first_offsets and not self.further:
            if empty and (self.incarnation is not None or self.started_ms is not None or self.is_native):
                raise ConfigurationError(_NOT_EMPTY)
            return
        if empty:
            raise ConfigurationError(_NOT_EMPTY)
        if not self.is_native and self.further:
            raise ConfigurationError("only a native state may name a partition without an offset")
        if len(self.first_offsets) == 1 and not self.further:  # as most: one partition cannot appear twice
            if self.is_native and self.first_offsets[0].topic_id is None:
                raise ConfigurationError(_NAMES_TOPICS)
            return
        if self.is_native:
            self._check_native()
        if len(self.partitions) != len(self.first_offsets) + sum(len(more.numbers) for more in self.further):
            raise ConfigurationError("a partition appears twice in the state")

    def _check_native(self) -> None:
        if len(self.first_offsets) > MAX_NATIVE_OFFSETS:
            raise ConfigurationError(f"a native state names more than {MAX_NATIVE_OFFSETS} offsets")
        if len(self.partitions) > MAX_NATIVE_PARTITIONS:
            raise ConfigurationError(
                f"the transaction wrote to more than {MAX_NATIVE_PARTITIONS} partitions",
                next_step="divide it into several transactions",
            )
        ids = {(first.topic, first.topic_id) for first in self.first_offsets}
        ids |= {(more.topic, more.topic_id) for more in self.further}
        if len(ids) != len({topic for topic, _ in ids}) or any(topic_id is None for _, topic_id in ids):
            raise ConfigurationError(_NAMES_TOPICS)
        for more in self.further:
            if not more.numbers or more.numbers[0] < 0 or more.numbers[-1] > _MAX_INT32:
                raise ConfigurationError(f"a native state names no partition of {more.topic!r}, or one out of range")

    @classmethod
    def native(
        cls,
        producer_id: int,
        epoch: int,
        incarnation: int | None,
        offsets: Mapping[tuple[str, int], int | None],
        topic_ids: Mapping[str, str],
    ) -> PreparedTxnState:
        """The state of a native transaction.

        Args:
            producer_id: Its producer id.
            epoch: Its epoch.
            incarnation: The incarnation of the transactional id that prepares it.
            offsets: Every (topic, partition) that the transaction was sent to, with the offset of its first record there, or
                None where that is unknown. The state keeps at most eight offsets, of as many topics as possible.
            topic_ids: The id of each topic, as Kafka prints it.

        Raises:
            ConfigurationError: A topic's id is missing, a number is out of range, or there are too many partitions.
        """
        if len(offsets) == 1:
            [((topic, number), offset)] = offsets.items()
            if offset is not None and (topic_id := topic_ids.get(topic)) is not None:
                return cls._of_one(producer_id, epoch, incarnation, FirstOffset(topic, number, offset, topic_id))
        by_topic: dict[str, list[int]] = {}
        for topic, partition in sorted(offsets):
            by_topic.setdefault(topic, []).append(partition)
        if missing := by_topic.keys() - topic_ids.keys():
            raise ConfigurationError(f"the id of topic {min(missing)!r} is not known")
        known = [
            [(topic, number) for number in numbers if offsets[topic, number] is not None]
            for topic, numbers in by_topic.items()
        ]
        # One of each topic first: retention and compaction work by topic, and so does a deletion.
        in_turn = [key for keys in zip_longest(*known) for key in keys if key is not None]
        witnesses = {key: offset for key in in_turn[:MAX_NATIVE_OFFSETS] if (offset := offsets[key]) is not None}
        rest = {
            topic: tuple(number for number in numbers if (topic, number) not in witnesses)
            for topic, numbers in by_topic.items()
        }
        return cls(
            producer_id,
            epoch,
            incarnation,
            tuple(
                FirstOffset(topic, number, offset, topic_ids[topic]) for (topic, number), offset in witnesses.items()
            ),
            engine=Engine.NATIVE,
            further=tuple(
                FurtherPartitions(topic, topic_ids[topic], numbers) for topic, numbers in rest.items() if numbers
            ),
        )

    @classmethod
    def _of_one(cls, producer_id: int, epoch: int, incarnation: int | None, first: FirstOffset) -> PreparedTxnState:
        """The native state with one partition: what most transactions are, so it is not rendered and parsed to check it."""
        state = cls(producer_id, epoch, incarnation, (first,), engine=Engine.NATIVE)
        named = first.topic_id is not None and _TOPIC_ID.fullmatch(first.topic_id) and _TOPIC.fullmatch(first.topic)
        if named and first.partition <= _MAX_INT32 and 0 <= first.offset <= _MAX_INT64:
            of = "" if incarnation is None else f";i={incarnation}"
            text = (
                f"{producer_id}:{epoch};{_NATIVE}{of};{first.topic}@{first.topic_id}:{first.partition}={first.offset}"
            )
            object.__setattr__(state, "_text", text)
            object.__setattr__(
                state, "_is_readable", first.partition >= 0 and (incarnation is None or incarnation >= 0)
            )
        return state

    @property
    def partitions(self) -> frozenset[tuple[str, int]]:
        """Every (topic, partition) that the state names, with an offset or without."""
        if len(self.first_offsets) == 1 and not self.further:
            return frozenset(((self.first_offsets[0].topic, self.first_offsets[0].partition),))  # as most transactions
        named = {(first.topic, first.partition) for first in self.first_offsets}
        return frozenset(named.union((more.topic, number) for more in self.further for number in more.numbers))

    @property
    def topic_ids(self) -> Mapping[str, str | None]:
        """The id of each topic that the state names; None where it is not known."""
        named = {first.topic: first.topic_id for first in self.first_offsets}
        return {**named, **{more.topic: more.topic_id for more in self.further}}

    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, PreparedTxnState) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[object, ...]:
        exact = (self.engine, self.producer_id, self.epoch)
        return exact if self.is_native else (*exact, self.incarnation, self.first_offsets)

    def __str__(self) -> str:
        text = self._text
        if text is None:
            text = self._rendered()
            object.__setattr__(self, "_text", text)
        return text

    def _rendered(self) -> str:
        if not self.has_transaction:
            return ""
        parts = [f"{self.producer_id}:{self.epoch}"]
        if self.is_native:
            parts.append(_NATIVE)
        if self.incarnation is not None:
            parts.append(f"i={self.incarnation}")
        if self.started_ms is not None:
            parts.append(f"t={self.started_ms}")
        by_topic: dict[tuple[str, str | None], list[str]] = {}
        for first in self.first_offsets:
            by_topic.setdefault((first.topic, first.topic_id), []).append(f"{first.partition}={first.offset}")
        for more in self.further:
            by_topic.setdefault((more.topic, more.topic_id), []).append(written(more.numbers))
        named = sorted(by_topic.items(), key=lambda item: item[0][0]) if self.further else by_topic.items()
        for (topic, topic_id), items in named:
            parts.append(f"{topic if topic_id is None else f'{topic}@{topic_id}'}:" + ",".join(items))
        return ";".join(parts)

    @classmethod
    def from_string(cls, text: str) -> PreparedTxnState:
        """Parse the text form, the exact inverse of ``str(state)``.

        Raises:
            ConfigurationError: The text is not a state; the message says where. It quotes only the first characters of
                the text.
        """
        if len(text) > MAX_TEXT_LENGTH:
            raise _malformed(text, f"it is longer than {MAX_TEXT_LENGTH} characters")
        if text == "":
            return cls()
        head, *parts = text.split(";")
        ids = head.split(":")
        if len(ids) != 2:
            raise _malformed(text, "it does not begin with producer_id:epoch")
        producer_id = _number(text, ids[0], "producer id", _MAX_INT64)
        epoch = _number(text, ids[1], "epoch", _MAX_INT16)
        incarnation = started_ms = None
        engine = Engine.NATIVE if parts and parts[0] == _NATIVE else Engine.LIBRDKAFKA
        if engine is Engine.NATIVE:
            parts.pop(0)
        if parts and parts[0].startswith("i="):
            incarnation = _number(text, parts.pop(0)[2:], "incarnation", _MAX_INT64)
        if parts and parts[0].startswith("t="):
            started_ms = _number(text, parts.pop(0)[2:], "start time", _MAX_INT64)
        firsts, further = _parse_topics(text, parts, MAX_NATIVE_PARTITIONS if engine is Engine.NATIVE else 0)
        try:
            state = cls(producer_id, epoch, incarnation, firsts, started_ms, engine, further)
        except ConfigurationError as error:
            raise _malformed(text, error.what) from error
        if str(state) != text:
            raise _malformed(text, "it is not in the canonical order")
        object.__setattr__(state, "_is_readable", True)
        return state


def stored_text(state: PreparedTxnState) -> str:
    """The text form, to be stored: it is certain that :meth:`PreparedTxnState.from_string` reads the state back.

    A text that the engine has made of parts that it knows, or that was parsed before, is not parsed again.
    """
    text = str(state)
    if not state._is_readable:  # noqa: SLF001 - of this module
        PreparedTxnState.from_string(text)
        object.__setattr__(state, "_is_readable", True)
    return text


def _parse_topics(
    text: str, parts: list[str], at_most: int
) -> tuple[tuple[FirstOffset, ...], tuple[FurtherPartitions, ...]]:
    firsts: list[FirstOffset] = []
    further: list[FurtherPartitions] = []
    for part in parts:
        of_topic, more = _parse_topic(text, part, at_most)
        firsts += of_topic
        if more is not None:
            further.append(more)
            at_most -= len(more.numbers)
    return tuple(firsts), tuple(further)


def _parse_topic(text: str, part: str, at_most: int) -> tuple[list[FirstOffset], FurtherPartitions | None]:
    """Parse one topic with its partitions, of which up to ``at_most`` may have no offset."""
    name, separator, items = part.partition(":")
    topic, at, topic_id = name.partition("@")
    if not separator or not _TOPIC.fullmatch(topic) or (at and not _TOPIC_ID.fullmatch(topic_id)):
        raise _malformed(text, "a part is not topic:partition=offset")
    pairs = items.split(",")
    count = next((index for index, pair in enumerate(pairs) if "=" not in pair), len(pairs))
    if count < len(pairs) and not at_most:
        raise _malformed(text, "a part is not topic:partition=offset")
    firsts = []
    for pair in pairs[:count]:
        partition, _, offset = pair.partition("=")
        firsts.append(
            FirstOffset(
                topic,
                _number(text, partition, "partition", _MAX_INT32),
                _number(text, offset, "offset", _MAX_INT64),
                topic_id or None,
            )
        )
    if count == len(pairs):
        return firsts, None
    try:
        numbers = parsed(",".join(pairs[count:]), at_most)
    except ValueError as error:
        raise _malformed(text, str(error)) from error
    return firsts, FurtherPartitions(topic, topic_id, tuple(numbers))


def _number(text: str, digits: str, what: str, maximum: int) -> int:
    # fullmatch on ASCII digits: int() would take blanks, underscores, signs and other alphabets' digits too.
    # The length check comes first: int() of a very long text is quadratic.
    if len(digits) > 19 or not _NUMBER.fullmatch(digits) or int(digits) > maximum:
        raise _malformed(text, f"the {what} is not a whole number from 0 to {maximum}")
    return int(digits)


def _malformed(text: str, why: str) -> ConfigurationError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return ConfigurationError(
        f"not a prepared transaction state: {shown!r}: {why}",
        next_step="the row was not written by this library, or was edited: restore it before anything is settled",
    )


# Sets of partition numbers as short text: ranges, or a bitmap where that is shorter.
#
# `2-9999` and `0,40-46` are ranges; `~VVU` is a bitmap in URL-safe base64 without padding, in which bit `n % 8` of byte
# `n // 8` stands for partition `n`. Each set has one text: the shorter form, and ranges if both are equally long.

MAX_PARTITION: Final = 2**31 - 1
_BITMAP: Final = "~"
_RANGE: Final = re.compile(r"(0|[1-9][0-9]{0,9})(?:-([1-9][0-9]{0,9}))?")
_BASE64: Final = re.compile(r"[A-Za-z0-9_-]+")


def written(numbers: Sequence[int]) -> str:
    """The text of a set of partition numbers: at least one, in ascending order, none twice."""
    ranges = ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in _runs(numbers))
    size = numbers[-1] // 8 + 1
    if len(_BITMAP) + (size * 4 + 2) // 3 >= len(ranges):  # the length comes first: a bitmap may be huge
        return ranges
    bits = bytearray(size)
    for number in numbers:
        bits[number // 8] |= 1 << number % 8
    return _BITMAP + base64.urlsafe_b64encode(bits).rstrip(b"=").decode()


def parsed(text: str, at_most: int) -> list[int]:
    """The numbers of a text, in its order. Does not require the shorter form: compare with :func:`written`.

    A `ValueError` says that the text is not such a set, or names more than ``at_most``: a short text could name billions.
    """
    if text.startswith(_BITMAP):
        return _bitmap(text[len(_BITMAP) :], at_most)
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError("a part is not a range of partitions")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if not first <= last <= MAX_PARTITION or (match[2] is not None and first == last):
            raise ValueError("a part is not a range of partitions")
        if len(numbers) + last - first + 1 > at_most:
            raise ValueError("it names too many partitions")
        numbers += range(first, last + 1)
    return numbers


def _bitmap(text: str, at_most: int) -> list[int]:
    if not _BASE64.fullmatch(text):
        raise ValueError("a bitmap is not base64")
    try:
        bits = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error as error:
        raise ValueError("a bitmap is not base64") from error
    if sum(byte.bit_count() for byte in bits) > at_most:
        raise ValueError("it names too many partitions")
    return [8 * index + bit for index, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last
