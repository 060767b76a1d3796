"""Several sorted sources of entries read as one. Pure: no database, no clock.

A source gives ``(key, value)`` in the order of its keys, each key once; a value of None deletes the key in all later sources.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

from dualwrite.errors import IllegalStateError

Entry = tuple[bytes, bytes]
Change = tuple[bytes, bytes | None]
Item = TypeVar("Item", Entry, Change)


def merged_changes(sources: Iterable[Iterable[Change]], *, reverse: bool = False) -> Generator[Change, None, None]:
    """The newest entry of each key, deletions included.

    Args:
        sources: The newest first. All in ascending order of keys; in descending order if ``reverse``.
        reverse: Whether the order is descending.
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
