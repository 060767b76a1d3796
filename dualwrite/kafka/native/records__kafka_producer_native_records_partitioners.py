"""The partition of a key: librdkafka's partitioners, by its names and with its results.

A key must land where librdkafka put it, or the messages of one key lose their order when a producer changes its engine.
``murmur2_random`` is what Java's producers do with keys.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from struct import unpack_from
from typing import Final

from dualwrite.errors import ConfigurationError

DEFAULT: Final = "consistent_random"
"""librdkafka's own."""
_WORD: Final = 0xFFFFFFFF
_MURMUR2_SEED: Final = 0x9747B28C
_MURMUR2_FACTOR: Final = 0x5BD1E995
_FNV_BASIS: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193


def murmur2(key: bytes) -> int:
    """Java's ``toPositive(murmur2(key))``: 0 to 2**31 - 1."""
    size = len(key)
    words = size >> 2
    found = _MURMUR2_SEED ^ size
    for word in unpack_from(f"<{words}I", key):
        mixed = word * _MURMUR2_FACTOR & _WORD
        mixed = (mixed ^ mixed >> 24) * _MURMUR2_FACTOR & _WORD
        found = found * _MURMUR2_FACTOR & _WORD ^ mixed
    if size & 3:
        found = (found ^ int.from_bytes(key[words << 2 :], "little")) * _MURMUR2_FACTOR & _WORD
    found = (found ^ found >> 13) * _MURMUR2_FACTOR & _WORD
    return (found ^ found >> 15) & 0x7FFFFFFF


def fnv1a(key: bytes) -> int:
    """The absolute value of the signed FNV-1a hash, as Sarama takes it: 0 to 2**31."""
    found = _FNV_BASIS
    for byte in key:
        found = (found ^ byte) * _FNV_PRIME & _WORD
    return found if found >> 31 == 0 else _WORD + 1 - found


@dataclass(frozen=True)
class Partitioner:
    """One of librdkafka's ``partitioner`` settings.

    Attributes:
        name: librdkafka's name.
        hash: The hash of a key, whose remainder is the partition; None if no key decides.
        null_is_any: Whether a message without a key may go anywhere; otherwise it goes where an empty key goes.
        empty_is_any: Whether the same holds for an empty key.
    """

    name: str
    hash: Callable[[bytes], int] | None
    null_is_any: bool
    empty_is_any: bool = False

    def partition(self, key: bytes | None, partition_count: int) -> int | None:
        """The partition of a key.

        Args:
            key: The message's key.
            partition_count: The topic's partitions, at least 1.

        Returns:
            0 to ``partition_count`` - 1; None if the message may go anywhere, and its sender chooses.
        """
        if self.hash is None or (self.empty_is_any and not key) or (self.null_is_any and key is None):
            return None
        return self.hash(key or b"") % partition_count


_PARTITIONERS: Final = {
    one.name: one
    for one in (
        Partitioner("random", None, null_is_any=True, empty_is_any=True),
        Partitioner("consistent", zlib.crc32, null_is_any=False),
        Partitioner("consistent_random", zlib.crc32, null_is_any=True, empty_is_any=True),
        Partitioner("murmur2", murmur2, null_is_any=False),
        Partitioner("murmur2_random", murmur2, null_is_any=True),
        Partitioner("fnv1a", fnv1a, null_is_any=False),
        Partitioner("fnv1a_random", fnv1a, null_is_any=True),
    )
}
NAMES: Final = tuple(_PARTITIONERS)


def partitioner(name: str = DEFAULT) -> Partitioner:
    """The partitioner that librdkafka calls so.

    Raises:
        ConfigurationError: There is none of this name.
    """
    found = _PARTITIONERS.get(name)
    if found is None:
        raise ConfigurationError(f"partitioner {name!r} is none of {', '.join(NAMES)}")
    return found
