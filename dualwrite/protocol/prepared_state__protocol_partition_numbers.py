"""Sets of partition numbers as short text: ranges, or a bitmap where that is shorter.

``2-9999`` and ``0,40-46`` are ranges; ``~VVU`` is a bitmap in URL-safe base64 without padding, in which bit ``n % 8`` of byte
``n // 8`` stands for partition ``n``. Each set has one text: the shorter form, and ranges if both are equally long.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from typing import Final

MAX_PARTITION: Final = 2**31 - 1
_BITMAP: Final = "~"
_RANGE: Final = re.compile(r"(0|[1-9][0-9]{0,9})(?:-([1-9][0-9]{0,9}))?")
_BASE64: Final = re.compile(r"[A-Za-z0-9_-]+")


def written(numbers: Sequence[int]) -> str:
    """The text of a set of partition numbers.

    Args:
        numbers: At least one, in ascending order, none twice.
    """
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

    Args:
        text: The text.
        at_most: The largest number of partitions to accept: a short text could name billions.

    Raises:
        ValueError: The text is not such a set, or names too many; the message says which.
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
