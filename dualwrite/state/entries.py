"""Entries, changes and scans as values, and the note of a commit. Pure.

A source gives ``(key, value)`` in the order of its keys, each key once; a value of None deletes the key in all later sources.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Final, TypeVar

from sortedcontainers import SortedDict

from dualwrite.errors import IllegalStateError, StoreUnreadable

Entry = tuple[bytes, bytes]
Change = tuple[bytes, bytes | None]
Item = TypeVar("Item", Entry, Change)


def merged_changes(sources: Iterable[Iterable[Change]], *, reverse: bool = False) -> Generator[Change, None, None]:
    """The newest entry of each key, deletions included.

    The newest source comes first. All are in ascending order of keys; in descending order if ``reverse``.
    """

    def with_rank(source: Iterable[Change], rank: int) -> Iterator[tuple[bytes, int, bytes | None]]:
        # In descending order the newest must still come first among equal keys.
        return ((key, -rank if reverse else rank, value) for key, value in source)

    numbered = [with_rank(source, rank) for rank, source in enumerate(sources)]
    last: bytes | None = None
    for key, _, value in heapq.merge(*numbered, key=lambda entry: entry[:2], reverse=reverse):
        if key != last:
            last = key
            yield key, value


def merged(sources: Iterable[Iterable[Change]], *, reverse: bool = False) -> Generator[Entry, None, None]:
    """The existing entries: as `merged_changes`, without deletions."""
    return ((key, value) for key, value in merged_changes(sources, reverse=reverse) if value is not None)


def end_of_prefix(prefix: bytes) -> bytes | None:
    """The least key above all keys with this prefix; None if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


class Scan(Iterator[Item]):
    """The entries of a range as they were when the scan began. It ends with the transaction that it began in.

    After the store's next commit, recovery or closing it raises `IllegalStateError`. It holds resources of RocksDB until it is
    exhausted, closed or garbage-collected.
    """

    def __init__(self, entries: Generator[Item, None, None]) -> None:
        self._entries: Generator[Item, None, None] | None = entries
        self._ended = False

    def __next__(self) -> Item:
        if self._ended:
            raise IllegalStateError("the scan's transaction has ended", next_step="begin a new scan")
        if self._entries is None:
            raise StopIteration
        try:
            return next(self._entries)
        except StopIteration:
            self.close()
            raise

    def close(self) -> None:
        """End the scan and free its resources. It is then exhausted."""
        entries, self._entries = self._entries, None
        if entries is not None:
            entries.close()  # now, though the traceback of an exception still refers to it

    def end(self) -> None:
        """End the scan because its transaction ends. Called by the store."""
        self._ended = self._ended or self._entries is not None
        self.close()


# Uncommitted writes in memory, in the order of their keys. Pure: no database, no clock.

UNCHANGED: Final = object()
"""Returned by `Uncommitted.get` for a key that was not written."""
_ENTRY_BYTES: Final = 180
"""Added to each entry's size for Python: two objects with their headers, the places in list and dictionary."""


class Uncommitted:
    """Writes and deletions since the last commit, the newest of each key. ``size_bytes`` is about what they take in memory."""

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


# The note that a commit writes with the data, and its text on disk. Pure.

_FORMAT: Final = 1


@dataclass(frozen=True)
class Committed:
    """A store's last commit. It stands in the same batch as the data.

    Attributes:
        offset: The first offset of the changelog that is not in the store; None before the first commit with an offset.
        at_ms: When the store equalled its changelog up to the offset: ms since 1970, by this machine's clock.
        changelog: The changelog that the store follows, as given to :meth:`KeyValueStore.follow`; None without one.
        format: The version of the directory's format.
    """

    offset: int | None = None
    at_ms: int = 0
    changelog: str | None = None
    format: int = _FORMAT


def as_text(committed: Committed) -> bytes:
    """The note as it stands on disk."""
    return json.dumps(asdict(committed)).encode()


def parsed(note: bytes | None, path: object) -> Committed:
    """The note read from disk; that of an empty store if there is none. Raises `StoreUnreadable` for another version."""
    if note is None:
        return Committed()
    found = json.loads(note)
    if found.get("format") != _FORMAT:
        raise StoreUnreadable(f"the state store {path} is of format {found.get('format')}, not {_FORMAT}")
    return Committed(**found)
