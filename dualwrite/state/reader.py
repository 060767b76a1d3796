"""Reads of a store by other threads than the one that writes it.

A store publishes a snapshot with each commit. Readers take the newest one by a single assignment, so they neither wait for
the writer nor see half of a commit, however long its writes take to reach the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeAlias, cast

from dualwrite.errors import IllegalStateError, Unavailable
from dualwrite.interfaces import Closing
from dualwrite.state.entries import UNCHANGED, Change, Committed, Entry, Scan, end_of_prefix, merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rocksdict import RdictIter
    from rocksdict import Snapshot as RocksSnapshot

Isolation: TypeAlias = Literal["read_committed", "read_uncommitted"]
"""What a reader sees, by the names of Kafka's ``isolation.level``."""

_NO_SUCH_KEY: Final = "key not found"
_FIRST: Final = 16
_AT_ONCE: Final = 256
_AT_ONCE_BYTES: Final = 1 << 20


class Answer(NamedTuple):
    """A value, and the commit that it was read from.

    Attributes:
        value: The value; None if the key has none.
        committed: The store's last commit. The answer has everything of the changelog below its offset.
    """

    value: bytes | None
    committed: Committed


class View:
    """What one commit left, for any thread, until the store closes.

    The store may close while readers are at work, and RocksDB gives its lock back with the last reference. So only the view
    refers to ``snapshot`` and ``entries``, and `end` waits for a read that is under way. Scans share the one iterator: each
    reads a part of its range under the lock, and remembers its place.
    """

    def __init__(self, snapshot: RocksSnapshot, entries: RdictIter, committed: Committed) -> None:
        self.committed = committed
        self._snapshot: RocksSnapshot | None = snapshot
        self._entries: RdictIter | None = entries
        self._lock = threading.Lock()

    def get(self, key: bytes) -> bytes | None:
        """The value; None if there is none."""
        with self._lock:
            if self._snapshot is None:
                raise _closed()
            try:
                return cast("bytes", self._snapshot[key])
            except Exception as refused:  # rocksdict raises Exception itself, also for a key that is not there
                if type(refused) is not Exception:
                    raise
                if str(refused) == _NO_SUCH_KEY:
                    return None
                raise Unavailable(f"RocksDB: {refused}") from refused

    def range(self, lower: bytes | None, upper: bytes | None, *, reverse: bool) -> Generator[Entry, None, None]:
        """The entries with ``lower <= key < upper``."""
        at, many = (upper if reverse else lower), _FIRST
        while True:
            found = self._part(at, lower, upper, many, reverse=reverse)
            for entry in found:
                if self._entries is None:
                    raise _closed()
                yield entry
            if not found:
                return
            last = found[-1][0]
            # The least key above the last one. Backwards, the place itself is left out, as the upper bound is.
            at, many = (last if reverse else last + b"\0"), _AT_ONCE

    def _part(
        self, at: bytes | None, lower: bytes | None, upper: bytes | None, many: int, *, reverse: bool
    ) -> list[Entry]:
        """The next entries from this place on, as many or fewer; none at the end of the range."""
        found: list[Entry] = []
        with self._lock:
            if (entries := self._entries) is None:
                raise _closed()
            if at is None:
                (entries.seek_to_last if reverse else entries.seek_to_first)()
            else:
                (entries.seek_for_prev if reverse else entries.seek)(at)
                if reverse and entries.valid() and entries.key() == at:
                    entries.prev()
            step, size = (entries.prev if reverse else entries.next), 0
            while len(found) < many and size < _AT_ONCE_BYTES:
                if not entries.valid():
                    _require_end(entries)
                    break
                key, value = entries.key(), entries.value()
                if (lower is not None and key < lower) or (upper is not None and key >= upper):
                    break
                found.append((key, value))
                size += len(value)
                step()
        return found

    def end(self) -> None:
        """End it and its scans. Called by the store."""
        with self._lock:
            self._snapshot = self._entries = None


def _closed() -> IllegalStateError:
    return IllegalStateError(
        "the store was closed, or opened again after a failed commit", next_step="take a new snapshot of the open store"
    )


def _require_end(entries: RdictIter) -> None:
    """Check that an iterator stands behind the last entry, not before one that it could not read."""
    try:
        entries.status()
    except Exception as refused:  # rocksdict raises Exception itself
        raise Unavailable(f"RocksDB: {refused}") from refused


class Overlay(Protocol):
    """Writes that lie over what is committed."""

    def get(self, key: bytes) -> object:
        """The value, None if the key was deleted, `UNCHANGED` if it was not written."""

    def changes(
        self, lower: bytes | None = None, upper: bytes | None = None, *, reverse: bool = False
    ) -> Iterable[Change]:
        """The changes with ``lower <= key < upper``."""


Overlaid: TypeAlias = Callable[[], AbstractContextManager[tuple[View, "Sequence[Overlay]"]]]


class Reader:
    """Reads a store from any thread, while its own thread writes it. Made by :meth:`KeyValueStore.reader`.

    A ``read_committed`` reader sees the last commit; it never waits for the writer. While a store is restored it shows each
    part that was committed: compare the offset with the changelog's end where that matters.

    A ``read_uncommitted`` reader sees the writes of the open transaction too. A ``range`` copies those of them that lie in it,
    and makes the writer wait meanwhile.
    """

    def __init__(self, current: Callable[[], View], overlaid: Overlaid | None) -> None:
        self._current = current
        self._overlaid = overlaid

    @property
    def committed(self) -> Committed:
        """The store's last commit, with its offset and time.

        Raises:
            IllegalStateError: The store is closed.
        """
        return self._current().committed

    def get(self, key: bytes) -> Answer:
        """Return the value, with the commit that the answer belongs to.

        Raises:
            TypeError: The key is not bytes.
            IllegalStateError: The store is closed.
            Unavailable: RocksDB could not read.
        """
        _require_bytes(key)
        if self._overlaid is not None:
            with self._overlaid() as (view, over):
                for one in over:
                    if (found := one.get(key)) is not UNCHANGED:
                        return Answer(cast("bytes | None", found), view.committed)
                return Answer(view.get(key), view.committed)
        while True:
            view = self._current()
            try:
                return Answer(view.get(key), view.committed)
            except IllegalStateError:
                # The store was opened again in between: it has another view by now, or is closed.
                if self._current() is view:
                    raise

    def range(self, lower: bytes | None = None, upper: bytes | None = None, *, reverse: bool = False) -> Scan[Entry]:
        """Scan the entries with ``lower <= key < upper`` in the order of their keys, as they are now.

        The writer's commits do not change or end the scan; it ends when the store closes. Read it in one thread.

        Raises:
            TypeError: A bound is not bytes.
            IllegalStateError: The store is closed.
        """
        if self._overlaid is None:
            return self.snapshot().range(lower, upper, reverse=reverse)
        _require_bytes(*(bound for bound in (lower, upper) if bound is not None))
        with self._overlaid() as (view, over):
            copies = [list(one.changes(lower, upper, reverse=reverse)) for one in over]
        return Scan(merged([*copies, view.range(lower, upper, reverse=reverse)], reverse=reverse))

    def prefix(self, prefix: bytes, *, reverse: bool = False) -> Scan[Entry]:
        """Scan the entries whose keys begin with the prefix, as :meth:`range`."""
        _require_bytes(prefix)
        return self.range(prefix, end_of_prefix(prefix), reverse=reverse)

    def snapshot(self) -> Snapshot:
        """Return the last commit as it stays, whatever is committed later. Close it: RocksDB keeps old values for it.

        Raises:
            IllegalStateError: The store is closed, or the reader sees uncommitted writes, of which there is no snapshot.
        """
        if self._overlaid is not None:
            raise IllegalStateError(
                "uncommitted writes have no snapshot: they may still be discarded",
                next_step='take it from store.reader("read_committed")',
            )
        return Snapshot(self._current())


class Snapshot(Closing):
    """A store as one of its commits left it, for any number of threads. Made by :meth:`Reader.snapshot`.

    It stays whole while the store goes on, until it is closed or the store is. Use it as a context manager.

    Attributes:
        committed: The commit, with its offset and time.
    """

    def __init__(self, view: View) -> None:
        self._view: View | None = view
        self.committed = view.committed

    def get(self, key: bytes) -> bytes | None:
        """Return the value; None if there is none.

        Raises:
            TypeError: The key is not bytes.
            IllegalStateError: The snapshot or the store is closed.
            Unavailable: RocksDB could not read.
        """
        _require_bytes(key)
        return self._usable().get(key)

    def range(self, lower: bytes | None = None, upper: bytes | None = None, *, reverse: bool = False) -> Scan[Entry]:
        """Scan the entries with ``lower <= key < upper`` in the order of their keys. Read the scan in one thread.

        Raises:
            TypeError: A bound is not bytes.
            IllegalStateError: The snapshot or the store is closed.
        """
        _require_bytes(*(bound for bound in (lower, upper) if bound is not None))
        return Scan(self._usable().range(lower, upper, reverse=reverse))

    def prefix(self, prefix: bytes, *, reverse: bool = False) -> Scan[Entry]:
        """Scan the entries whose keys begin with the prefix, as :meth:`range`."""
        _require_bytes(prefix)
        return self.range(prefix, end_of_prefix(prefix), reverse=reverse)

    def _usable(self) -> View:
        if self._view is None:
            raise IllegalStateError("the snapshot is closed", next_step="take a new one")
        return self._view

    def close(self) -> None:
        """Give it up. Its scans continue. Closing it twice does nothing."""
        self._view = None


def _require_bytes(*given: object) -> None:
    for one in given:
        if not isinstance(one, bytes):
            raise TypeError(f"keys and bounds are bytes, not {type(one).__name__}")
