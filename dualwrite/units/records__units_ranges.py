"""The ranges of offsets that a batch has written: the records of its unit in the unit topic, and how they follow each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from dualwrite.errors import ConfigurationError

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

    Args:
        batch: Name of the batch.
        last: The ranges of the last batch; None if this is the first one, which takes all that the topic holds.
        found: Where the partitions begin and end now.

    Raises:
        ConfigurationError: A partition ends before the last batch does: it is another topic of the same name.
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
