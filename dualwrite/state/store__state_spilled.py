"""Uncommitted writes that do not fit in memory, in a second RocksDB beside the store's own."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Final

from dualwrite.errors import DualWriteError
from dualwrite.state.entries import Change
from dualwrite.state.entries__state_uncommitted import UNCHANGED
from dualwrite.state.store__state_rocks import Rocks

_DELETED: Final = b""
_WRITTEN: Final = b"\x01"
"""In front of each value, so that it differs from a deletion."""


class Spilled:
    """The spilled writes of one transaction of a store, which `discard` deletes.

    Its note stands for the decision: once it is written, the writes belong to the store, and a crash before they are copied
    does not lose them.

    Args:
        path: Its directory; what an earlier process left there is read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rocks = Rocks(path)

    def add(self, changes: Iterable[Change]) -> None:
        """Add these changes. Nothing is durable on return."""
        batch = self._rocks.batch()
        for key, value in changes:
            batch.put(key, _DELETED if value is None else _WRITTEN + value)
        self._rocks.write(batch)

    def get(self, key: bytes) -> object:
        """The value, None if the key was deleted, `UNCHANGED` if it was not written."""
        found = self._rocks.get(key)
        return UNCHANGED if found is None else _change(found)

    def changes(
        self, lower: bytes | None = None, upper: bytes | None = None, *, reverse: bool = False
    ) -> Generator[Change, None, None]:
        """The changes with ``lower <= key < upper``."""
        return ((key, _change(found)) for key, found in self._rocks.entries(lower, upper, reverse=reverse))

    @property
    def decision(self) -> bytes | None:
        """The note under which the changes were committed; None if they are uncommitted."""
        return self._rocks.note()

    def decide(self, note: bytes) -> None:
        """Commit the changes under this note: it and they are durable on return."""
        self._rocks.write(self._rocks.batch(), note=note)

    def discard(self) -> None:
        """Delete the changes and close. A crash in the middle leaves them uncommitted or deletes them.

        Uncommitted changes, which may have filled the disk, are deleted without writing.
        """
        if self.decision is not None:
            self._rocks.erase_note()  # first, so that nothing is copied again after the store has moved on
        self.close()
        delete_undecided(self._path)

    def close(self) -> None:
        """Close it; the changes stay on disk."""
        self._rocks.close()


def is_undecided(path: Path) -> bool:
    """Whether a process has left writes there that it had not committed. Reads alone: they may have filled the disk."""
    try:
        found = Rocks(path, read_only=True)
    except DualWriteError:  # it died while it made the directory, perhaps: to open it for writing shows more
        return False
    try:
        return found.note() is None
    finally:
        found.close()


def delete_undecided(path: Path) -> None:
    """Delete a closed directory of writes that are not committed, or no longer needed."""
    path.rename(_discarded(path))  # RocksDB cannot open a partly deleted database
    delete_discarded(path)


def delete_discarded(path: Path) -> None:
    """Delete what an interrupted `Spilled.discard` of this directory has left behind."""
    if (left := _discarded(path)).exists():
        shutil.rmtree(left)


def _discarded(path: Path) -> Path:
    return path.with_name(f"{path.name}-discarded")


def _change(found: bytes) -> bytes | None:
    return None if found == _DELETED else found[len(_WRITTEN) :]
