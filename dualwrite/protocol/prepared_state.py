"""``PreparedTxnState``: the identity of one prepared Kafka transaction, and its text form.

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
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dualwrite.errors import ConfigurationError

MAX_TEXT_LENGTH = 1_000_000
_MAX_INT16, _MAX_INT32, _MAX_INT64 = 2**15 - 1, 2**31 - 1, 2**63 - 1
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_TOPIC_ID = re.compile(r"[a-zA-Z0-9_-]{1,22}")


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


@dataclass(frozen=True)
class PreparedTxnState:
    """The identity of one prepared transaction: equal states name the same transaction.

    Serialise with ``str(state)``, read back with :meth:`from_string`; pickles too. Source: KIP-939,
    ``KafkaProducer.PreparedTxnState``, whose two-number form is read and, for a state without evidence, written.

    Attributes:
        producer_id: The broker's producer id; -1 in the empty state.
        epoch: The producer epoch; -1 in the empty state.
        incarnation: The incarnation of the transactional id that prepared it; None outside a ``DualWriter``.
        first_offsets: The evidence: the first offset in every partition written, sorted.
        started_ms: When the transaction began, according to the coordinator (ms since 1970); None if it was not asked.
            Not part of the identity.
    """

    producer_id: int = -1
    epoch: int = -1
    incarnation: int | None = None
    first_offsets: tuple[FirstOffset, ...] = ()
    started_ms: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_offsets", tuple(sorted(self.first_offsets)))
        empty = self.producer_id == -1 and self.epoch == -1
        if not empty and not (0 <= self.producer_id <= _MAX_INT64 and 0 <= self.epoch <= _MAX_INT16):
            raise ConfigurationError(f"producer id {self.producer_id} with epoch {self.epoch} is out of range")
        if empty and (self.incarnation is not None or self.first_offsets or self.started_ms is not None):
            raise ConfigurationError("the empty state has no incarnation, start time or offsets")
        keys = [(first.topic, first.partition) for first in self.first_offsets]
        if len(set(keys)) != len(keys):
            raise ConfigurationError("a partition appears twice in the state")

    @property
    def has_transaction(self) -> bool:
        """False for the empty state."""
        return self.producer_id >= 0

    def __str__(self) -> str:
        if not self.has_transaction:
            return ""
        parts = [f"{self.producer_id}:{self.epoch}"]
        if self.incarnation is not None:
            parts.append(f"i={self.incarnation}")
        if self.started_ms is not None:
            parts.append(f"t={self.started_ms}")
        by_topic: dict[str, list[FirstOffset]] = {}
        for first in self.first_offsets:
            topic = first.topic if first.topic_id is None else f"{first.topic}@{first.topic_id}"
            by_topic.setdefault(topic, []).append(first)
        for topic, firsts in by_topic.items():
            parts.append(f"{topic}:" + ",".join(f"{first.partition}={first.offset}" for first in firsts))
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
        if parts and parts[0].startswith("i="):
            incarnation = _number(text, parts.pop(0)[2:], "incarnation", _MAX_INT64)
        if parts and parts[0].startswith("t="):
            started_ms = _number(text, parts.pop(0)[2:], "start time", _MAX_INT64)
        firsts = [first for part in parts for first in _parse_topic(text, part)]
        if len({(first.topic, first.partition) for first in firsts}) != len(firsts):
            raise _malformed(text, "a partition appears twice")
        state = cls(producer_id, epoch, incarnation, tuple(firsts), started_ms)
        if str(state) != text:
            raise _malformed(text, "it is not in the canonical order")
        return state


def _parse_topic(text: str, part: str) -> list[FirstOffset]:
    name, separator, offsets = part.partition(":")
    topic, at, topic_id = name.partition("@")
    if not separator or not _TOPIC.fullmatch(topic) or (at and not _TOPIC_ID.fullmatch(topic_id)):
        raise _malformed(text, "a part is not topic:partition=offset")
    firsts = []
    for pair in offsets.split(","):
        partition, equals, offset = pair.partition("=")
        if not equals:
            raise _malformed(text, "a part is not topic:partition=offset")
        firsts.append(
            FirstOffset(
                topic,
                _number(text, partition, "partition", _MAX_INT32),
                _number(text, offset, "offset", _MAX_INT64),
                topic_id or None,
            )
        )
    return firsts


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
