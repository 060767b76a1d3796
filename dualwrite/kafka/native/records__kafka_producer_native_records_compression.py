"""The codecs of record batches, with the levels that librdkafka's ``compression.level`` has.

Brokers and consumers of every client read what these write: lz4 as a frame of independent blocks of at most 64 KiB
(Kafka refuses linked ones), snappy as one raw block, as librdkafka writes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import cramjam
import lz4.frame

from dualwrite.errors import ConfigurationError

Buffer: TypeAlias = bytes | bytearray | memoryview
DEFAULT_LEVEL: Final = -1
_LEVELS: Final = range(-1, 13)
_GZIP_WINDOW: Final = 15 + 16  # zlib's largest window; the 16 asks for gzip's header


def _none(raw: Buffer, _: int) -> bytes:
    return bytes(raw)


def _gzip(raw: Buffer, level: int) -> bytes:
    made = zlib.compressobj(level, zlib.DEFLATED, _GZIP_WINDOW)
    return made.compress(raw) + made.flush()


def _snappy(raw: Buffer, _: int) -> bytes:
    return bytes(cramjam.snappy.compress_raw(raw))


def _lz4(raw: Buffer, level: int) -> bytes:
    return bytes(
        lz4.frame.compress(
            raw,
            compression_level=level,
            block_size=lz4.frame.BLOCKSIZE_MAX64KB,
            block_linked=False,
            store_size=False,
        )
    )


def _zstd(raw: Buffer, level: int) -> bytes:
    return bytes(cramjam.zstd.compress(raw, level))


_CODECS: Final[dict[str, tuple[int, Callable[[Buffer, int], bytes], int, int]]] = {
    "none": (0, _none, 0, 0),
    "gzip": (1, _gzip, -1, 9),
    "snappy": (2, _snappy, 0, 0),
    "lz4": (3, _lz4, 0, 12),
    "zstd": (4, _zstd, 3, 22),
}
"""By librdkafka's name: the number in a batch's attributes, the function, the default level and the highest."""


@dataclass(frozen=True)
class Codec:
    """A codec at a level, as librdkafka's ``compression.type`` and ``compression.level`` name it.

    Attributes:
        name: ``none``, ``gzip``, ``snappy``, ``lz4`` or ``zstd``.
        level: -1 (the codec's own default) to 12. Above the codec's highest level it means the highest; ``none`` and
            ``snappy`` have no levels, and ignore it.
        number: The number that a batch's attributes give the codec, 0 to 4.

    Raises:
        ConfigurationError: There is no such codec, or no such level.
    """

    name: str = "none"
    level: int = DEFAULT_LEVEL
    number: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.name not in _CODECS:
            raise ConfigurationError(f"compression.type {self.name!r} is none of {', '.join(_CODECS)}")
        if self.level not in _LEVELS:
            raise ConfigurationError(f"compression.level {self.level} is not from {_LEVELS[0]} to {_LEVELS[-1]}")
        object.__setattr__(self, "number", _CODECS[self.name][0])

    def compress(self, raw: Buffer) -> tuple[int, bytes]:
        """Compress the records of a batch; the same input gives the same bytes.

        Returns:
            The number for the batch's attributes, and the bytes. Records that would become larger stay as they are, under
            the number 0.
        """
        number, function, default, highest = _CODECS[self.name]
        made = function(raw, default if self.level == DEFAULT_LEVEL else min(self.level, highest))
        return (number, made) if number == 0 or len(made) <= len(raw) else (0, bytes(raw))
