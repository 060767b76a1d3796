"""The hashes of whole columns of keys, equal to those of ``partitioners``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualwrite.kafka.native.records__kafka_producer_native_records_partitioners import fnv1a, murmur2

Hashes = npt.NDArray[np.int64]
_Hash = Callable[[bytes], int]
_Words = npt.NDArray[np.uint32]
_LONG: Final = 256  # each step of the loop over bytes costs as much as the hash of a short key in Python
_MURMUR2_FACTOR: Final = np.uint32(0x5BD1E995)
_FNV_PRIME: Final = np.uint32(0x01000193)


def hashes(keys: pa.Array, one: _Hash) -> Hashes:
    """The hash of every key.

    Args:
        keys: Large binary, without nulls.
        one: The hash of one key, as a partitioner names it.
    """
    together = _TOGETHER.get(one)
    if together is None:
        return np.fromiter(map(one, keys.to_numpy(zero_copy_only=False)), np.int64, len(keys))
    _, offset_buffer, content_buffer = keys.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[keys.offset : keys.offset + len(keys) + 1]
    content = np.frombuffer(content_buffer or b"", np.uint8)
    starts, sizes = offsets[:-1], np.diff(offsets)
    short = np.flatnonzero(sizes <= _LONG)
    found = np.empty(len(keys), np.int64)
    found[short] = together(content, starts[short], sizes[short])
    for row in np.flatnonzero(sizes > _LONG):
        found[row] = one(content[offsets[row] : offsets[row + 1]].tobytes())
    return found


def _murmur2(content: npt.NDArray[np.uint8], starts: Hashes, sizes: Hashes) -> Hashes:
    found = np.uint32(0x9747B28C) ^ sizes.astype(np.uint32)
    words = sizes >> 2
    rows = np.flatnonzero(words)
    done = 0
    while len(rows):
        at = starts[rows] + (done << 2)
        word = _byte(content, at)
        for place in (1, 2, 3):
            word |= _byte(content, at + place) << np.uint32(8 * place)
        word *= _MURMUR2_FACTOR
        word ^= word >> np.uint32(24)
        word *= _MURMUR2_FACTOR
        found[rows] = found[rows] * _MURMUR2_FACTOR ^ word
        done += 1
        rows = rows[words[rows] > done]
    rest = sizes & 3
    ends = starts + (words << 2)
    for place in (2, 1, 0):
        rows = np.flatnonzero(rest > place)
        found[rows] ^= _byte(content, ends[rows] + place) << np.uint32(8 * place)
    found[rest > 0] *= _MURMUR2_FACTOR
    found ^= found >> np.uint32(13)
    found *= _MURMUR2_FACTOR
    found ^= found >> np.uint32(15)
    positive: Hashes = (found & np.uint32(0x7FFFFFFF)).astype(np.int64)
    return positive


def _fnv1a(content: npt.NDArray[np.uint8], starts: Hashes, sizes: Hashes) -> Hashes:
    found = np.full(len(sizes), 0x811C9DC5, np.uint32)
    rows = np.flatnonzero(sizes)
    done = 0
    while len(rows):
        found[rows] = (found[rows] ^ _byte(content, starts[rows] + done)) * _FNV_PRIME
        done += 1
        rows = rows[sizes[rows] > done]
    signed: Hashes = found.astype(np.int32).astype(np.int64)
    np.abs(signed, out=signed)
    return signed


def _byte(content: npt.NDArray[np.uint8], at: Hashes) -> _Words:
    return content[at].astype(np.uint32)


_TOGETHER: Final[dict[_Hash, Callable[[npt.NDArray[np.uint8], Hashes, Hashes], Hashes]]] = {
    murmur2: _murmur2,
    fnv1a: _fnv1a,
}
"""zlib's CRC-32 is missing: it takes less time for one key than numpy for its bytes."""
