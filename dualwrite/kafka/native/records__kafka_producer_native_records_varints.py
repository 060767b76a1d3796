"""Zigzag varints, one value at a time: the lengths and differences in a record (Kafka's ``varint`` and ``varlong``)."""

from __future__ import annotations

from typing import Final

MINUS_ONE: Final = b"\x01"
"""The length of what is null."""


def varint(value: int) -> bytes:
    """The varint of a value that fits into 64 bits with its sign."""
    rest = (value << 1) ^ (value >> 63)
    encoded = bytearray()
    while rest >> 7:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


SHORT: Final = (
    *(bytes((value << 1,)) for value in range(64)),
    *(bytes((value << 1 & 0x7F | 0x80, value >> 6)) for value in range(64, 2**12)),
)
"""The varints of the numbers from 0: looked up, they cost a fraction of being made."""
