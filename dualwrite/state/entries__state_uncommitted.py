"""Uncommitted writes in memory, in the order of their keys. Pure: no database, no clock."""

from __future__ import annotations

from typing import Final

from sortedcontainers import SortedDict

from dualwrite.state.entries import Change

UNCHANGED: Final = object()
"""Returned by `Uncommitted.get` for a key that was not written."""
_ENTRY_BYTES: Final = 180
"""Added to each entry's size for Python: two objects with their headers, the places in list and dictionary."""


class Uncommitted:
    """Writes and deletions since the last commit, the newest of each key.

    Attributes:
        size_bytes: About what they take in memory.
    """

    def __init__(self) -> None:
        self._changes: SortedDict[bytes, bytes | None] = SortedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._changes)

    def write(self, key: bytes, value: bytes | None) -> None:
        """Write the value, or delete the key if it is None."""
        former = self._changes.get(key, UNCHANGED)
        if former is UNCHANGED:
            self.size_bytes += _ENTRY_BYTES + len(key)
        elif isinstance(former, bytes):
            self.size_bytes -= len(former)
        self._changes[key] = value
        self.size_bytes += len(value or b"")

    def get(self, key: bytes) -> object:
        """The value, None if the key was deleted, `UNCHANGED` if it was not written."""
        return self._changes.get(key, UNCHANGED)

    def changes(self, lower: bytes | None = None, upper: bytes | None = None, *, reverse: bool = False) -> list[Change]:
        """The changes with ``lower <= key < upper``, as they are now: later writes do not change the list."""
        keys = self._changes.irange(lower, upper, inclusive=(True, False), reverse=reverse)
        return [(key, self._changes[key]) for key in keys]

    def clear(self) -> None:
        """Forget all changes."""
        self._changes.clear()
        self.size_bytes = 0
