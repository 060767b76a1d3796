"""An image of the newest value of each key."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from dualwrite.units.records import UnitRecord


class KeyedImage:
    """The newest value of each key, of published units only; a record without a value deletes its key.

    Any thread may look at it. Units become visible at one moment: a thread that needs several values of the same moment takes
    them by :meth:`contents`. Needs memory for the values, and for the keys that the unfinished unit has changed.

    Args:
        contents: What it begins with, as from a `Snapshot`.
    """

    def __init__(self, contents: Mapping[bytes, bytes] | None = None) -> None:
        self._shown: dict[bytes, bytes] = dict(contents or {})
        self._change: dict[bytes, bytes | None] = {}
        # A change that is published at the moment of its assignment, though it is not yet in `_shown`: if an exception (of a
        # signal handler) interrupts the copying, the next look finishes it, and no part of a unit is ever seen.
        self._published: dict[bytes, bytes | None] = {}
        self._lock = threading.Lock()

    def __getitem__(self, key: bytes) -> bytes:
        with self._lock:
            return self._whole()[key]

    def get(self, key: bytes) -> bytes | None:
        """The published value of a key; None if there is none."""
        with self._lock:
            return self._whole().get(key)

    def __len__(self) -> int:
        with self._lock:
            return len(self._whole())

    def contents(self) -> dict[bytes, bytes]:
        """A copy of what is published."""
        with self._lock:
            return dict(self._whole())

    def _whole(self) -> dict[bytes, bytes]:
        """The published values. Call it under the lock."""
        for key, value in self._published.items():
            if value is None:
                self._shown.pop(key, None)
            else:
                self._shown[key] = value
        self._published = {}
        return self._shown

    def apply(self, record: UnitRecord) -> None:
        """Take a record into the unpublished change. A record without a key is skipped."""
        if record.key is not None:
            self._change[record.key] = record.value

    def publish(self) -> None:
        """Show the change."""
        with self._lock:
            self._whole()
            self._published = self._change
            self._change = {}
            self._whole()

    def revert(self) -> None:
        """Forget the change."""
        self._change = {}
