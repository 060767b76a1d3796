"""Zigzag varints of whole columns, with numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]


def sizes(numbers: Numbers) -> Numbers:
    """How many bytes the varint of each number has."""
    zigzag = _zigzag(numbers)
    found = np.ones(len(numbers), np.int64)
    highest = int(zigzag.max(initial=0))
    for bits in range(7, highest.bit_length(), 7):
        found += zigzag >> np.uint64(bits) != 0
    return found


def rows(fields: Sequence[Numbers | bytes], count: int) -> tuple[Bytes, Numbers]:
    """Encode some fields of every row, one after another.

    Args:
        fields: A column of numbers, each written as a varint, or bytes that are the same in every row.
        count: The number of rows.

    Returns:
        The bytes of all rows, and where each row begins: one offset more than there are rows.
    """
    widths = [None if isinstance(field, bytes) else sizes(field) for field in fields]
    ends = np.full(count, sum(len(field) for field in fields if isinstance(field, bytes)), np.int64)
    for width in widths:
        if width is not None:
            ends += width
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(ends, out=offsets[1:])
    made = np.empty(int(offsets[-1]), np.uint8)
    at = offsets[:-1].copy()
    for field, width in zip(fields, widths, strict=True):
        if isinstance(field, bytes):
            for byte in field:
                made[at] = byte
                at += 1
        elif width is not None:
            _write(made, at, field, width)
            at += width
    return made, offsets


def _write(made: Bytes, at: Numbers, numbers: Numbers, widths: Numbers) -> None:
    zigzag = _zigzag(numbers)
    for place in range(int(np.max(widths, initial=0))):
        reaching = widths > place
        more = (widths > place + 1).astype(np.uint8) << 7
        content = (zigzag >> np.uint64(7 * place) & np.uint64(0x7F)).astype(np.uint8) | more
        if place == 0:
            made[at] = content
        else:
            made[at[reaching] + place] = content[reaching]


def _zigzag(numbers: Numbers) -> npt.NDArray[np.uint64]:
    # The shift to the left may lose the sign, which the other one brings back.
    return ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
