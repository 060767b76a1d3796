"""Zigzag varints of whole columns, with numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
_Words: TypeAlias = npt.NDArray[np.uint64]

_WORD: Final = 8
_ZERO: Final = np.uint64(0)
_LOW: Final = np.uint64(0x7F)
_LITTLE: Final = np.dtype("<u8")
_MORE: Final = np.array(
    [sum(0x80 << 8 * place for place in range(width - 1)) for width in range(_WORD + 1)] + [0x8080808080808080] * 2,
    np.uint64,
)
"""By the width of a varint, the bits in its first eight bytes that announce another byte."""


def sizes(numbers: Numbers) -> Numbers:
    """How many bytes the varint of each number has."""
    zigzag = _zigzag(numbers)
    return _widths(zigzag, int(zigzag.max(initial=0)))


def _widths(zigzag: _Words, highest: int) -> Numbers:
    found = np.ones(len(zigzag), np.int64)
    for bits in range(7, highest.bit_length(), 7):
        found += zigzag >= np.uint64(1 << bits)
    return found


def rows(fields: Sequence[Numbers | bytes], count: int) -> tuple[Bytes, Numbers]:
    """Encode some fields of every row, one after another.

    Args:
        fields: Columns of numbers, each written as a varint, and bytes that are the same in every row.
        count: The number of rows.

    Returns:
        The bytes of all rows, and where each row begins: one offset more than there are rows.
    """
    words = list(_in_words(fields))
    offsets = np.zeros(count + 1, np.int64)
    ends = words[0].widths
    for word in words[1:]:
        ends = ends + word.widths
    offsets[1:] = ends
    np.cumsum(offsets, out=offsets)
    size = int(offsets[-1])
    made = np.empty(size + _WORD, np.uint8)
    # Any eight bytes as one number. Each write spoils bytes behind its own, which the next one sets: numpy writes in the
    # order of the indices.
    anywhere = np.ndarray((size + 1,), _LITTLE, made, 0, (1,))
    if len(words) == 1:
        anywhere[offsets[:-1]] = words[0].content
    else:
        at = np.empty((count, len(words)), np.int64)
        content = np.empty((count, len(words)), np.uint64)
        begin = offsets[:-1]
        for place, word in enumerate(words):
            at[:, place], content[:, place] = begin, word.content
            begin = begin + word.widths
        anywhere[at.ravel()] = content.ravel()
    return made[:size], offsets


@dataclass
class _Word:
    """Up to eight bytes of every row: the lowest ones of a number.

    Attributes:
        content: The bytes.
        widths: How many of them count.
        widest: The greatest width.
    """

    content: _Words | np.uint64 = _ZERO
    widths: Numbers | int = 0
    widest: int = 0

    def add(self, content: _Words | np.uint64, widths: Numbers | int, widest: int) -> None:
        """Put further bytes behind these."""
        if self.widest:
            content = self.content | content << (np.uint64(8) * np.asarray(self.widths, np.uint64))
        self.content, self.widths, self.widest = content, self.widths + widths, self.widest + widest


def _in_words(fields: Sequence[Numbers | bytes]) -> Iterator[_Word]:
    word = _Word()
    for field in fields:
        for content, widths, widest in _of_bytes(field) if isinstance(field, bytes) else _of_numbers(field):
            if word.widest + widest > _WORD:
                yield word
                word = _Word()
            word.add(content, widths, widest)
    yield word


def _of_bytes(field: bytes) -> Iterator[tuple[np.uint64, int, int]]:
    for first in range(0, len(field), _WORD):
        part = field[first : first + _WORD]
        yield np.uint64(int.from_bytes(part, "little")), len(part), len(part)


def _of_numbers(numbers: Numbers) -> Iterator[tuple[_Words, Numbers, int]]:
    zigzag = _zigzag(numbers)
    highest = int(zigzag.max(initial=0))
    widest = max(1, -(-highest.bit_length() // 7))
    if widest == 1:
        yield zigzag, np.ones(len(numbers), np.int64), 1
        return
    widths = _widths(zigzag, highest)
    content = _MORE.take(widths)
    for place in range(min(widest, _WORD)):
        content |= (zigzag >> np.uint64(7 * place) & _LOW) << np.uint64(8 * place)
    yield content, np.minimum(widths, _WORD) if widest > _WORD else widths, min(widest, _WORD)
    if widest > _WORD:
        rest = zigzag >> np.uint64(7 * _WORD)
        last = rest >> np.uint64(7)
        content = rest & _LOW | (last != 0).astype(np.uint64) << np.uint64(7) | last << np.uint64(8)
        yield content, np.maximum(widths - _WORD, 0), widest - _WORD


def _zigzag(numbers: Numbers) -> _Words:
    # The shift to the left may lose the sign, which the other one brings back.
    return ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
