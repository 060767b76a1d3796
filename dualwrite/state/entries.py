"""Entries, changes and scans as values, and the note of a commit. Pure.

A source gives ``(key, value)`` in the order of its keys, each key once; a value of None deletes the key in all later sources.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

from dualwrite.errors import ConfigurationError, IllegalStateError, StoreUnreadable

if TYPE_CHECKING:
    from sortedcontainers import SortedDict

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
        try:
            from sortedcontainers import SortedDict  # noqa: PLC0415 - the extra "rocksdb" alone does not install it
        except ImportError as missing:
            raise ConfigurationError(
                "state stores need sortedcontainers", next_step="pip install 'dualwrite[state]'"
            ) from missing
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

_OF_ONE: Final = 1
"""The format of a store that follows one changelog, or none. It stays as it was: an older version of the library can go on."""
_OF_SEVERAL: Final = 2


@dataclass(frozen=True)
class Position:
    """How far a store contains one changelog.

    Attributes:
        offset: The first offset of the changelog that is not in the store; None before the first commit with an offset.
        at_ms: When the store equalled the changelog up to the offset: ms since 1970, by this machine's clock.
        changelog: What identifies the changelog, as given to :meth:`KeyValueStore.follow`; None without one.
    """

    offset: int | None = None
    at_ms: int = 0
    changelog: str | None = None


@dataclass(frozen=True)
class Committed:
    """A store's last commit. It stands in the same batch as the data.

    Attributes:
        positions: How far the store contains each changelog that it follows. A task's store has one; a store that follows
            all partitions of a topic has one for each of them.
    """

    positions: tuple[Position, ...] = (Position(),)

    @property
    def offset(self) -> int | None:
        """The first offset of the changelog that is not in the store; None before the first commit with an offset.

        Raises:
            IllegalStateError: The store follows several changelogs, or partitions of one: see `offsets`.
        """
        return only_position(self).offset

    @property
    def changelog(self) -> str | None:
        """What identifies the changelog; None without one. Raises as `offset`."""
        return only_position(self).changelog

    @property
    def at_ms(self) -> int:
        """When the store equalled its changelog up to the offset: ms since 1970. Of several, that of the oldest."""
        return min(position.at_ms for position in self.positions)

    @property
    def offsets(self) -> dict[str | None, int | None]:
        """By changelog, the first offset that is not in the store; None before the first commit with an offset."""
        return {position.changelog: position.offset for position in self.positions}

    def offset_of(self, partition: int) -> int | None:
        """Return the first offset of this partition of the changelog that is not in the store.

        Returns:
            The offset; None before the first commit with one, or if the store does not follow the partition.
        """
        end = f"/{partition}"
        return next((one.offset for one in self.positions if (one.changelog or "").endswith(end)), None)


def only_position(committed: Committed) -> Position:
    """That of a store which follows one changelog, or none. Raises `IllegalStateError` if it follows several."""
    if len(committed.positions) > 1:
        raise IllegalStateError(
            f"the store follows {len(committed.positions)} changelogs: it has no single offset",
            next_step="use offsets, or offset_of(partition)",
        )
    return committed.positions[0]


def position_in(committed: Committed, changelog: str | None) -> Position:
    """The position in this changelog. Raises `IllegalStateError` if the store does not follow it."""
    for position in committed.positions:
        if position.changelog == changelog:
            return position
    raise IllegalStateError(f"the store does not follow the changelog {changelog}")


def moved(committed: Committed, offsets: Mapping[str | None, int | None], at_ms: int) -> Committed:
    """With these offsets, reached at that time. Raises as `position_in`."""
    for changelog in offsets:
        position_in(committed, changelog)
    return Committed(
        tuple(
            replace(one, offset=offsets[one.changelog], at_ms=at_ms) if one.changelog in offsets else one
            for one in committed.positions
        )
    )


def as_text(committed: Committed) -> bytes:
    """The note as it stands on disk."""
    if len(committed.positions) == 1:
        return json.dumps({**asdict(committed.positions[0]), "format": _OF_ONE}).encode()
    return json.dumps({**asdict(committed), "format": _OF_SEVERAL}).encode()


def parsed(note: bytes | None, path: object) -> Committed:
    """The note read from disk; that of an empty store if there is none. Raises `StoreUnreadable` for another version."""
    if note is None:
        return Committed()
    found = json.loads(note)
    written_as = found.pop("format", None)
    if written_as == _OF_ONE:
        return Committed((Position(**found),))
    if written_as == _OF_SEVERAL:
        return Committed(tuple(Position(**position) for position in found["positions"]))
    raise StoreUnreadable(f"the state store {path} is of format {written_as}, not {_OF_ONE} or {_OF_SEVERAL}")
