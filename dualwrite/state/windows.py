"""Stores with timestamps and with windows: encodings of keys and values over a key-value store.

Transactions, scans and recovery are left to the key-value store, which is what a task takes.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from contextlib import closing
from typing import Final, NamedTuple

from dualwrite.errors import ConfigurationError
from dualwrite.state.store import KeyValueStore

_TIME: Final = struct.Struct(">q")
_START: Final = struct.Struct(">Q")
_LENGTH: Final = struct.Struct(">I")


class Timestamped(NamedTuple):
    """A value with its time.

    Attributes:
        value: The value.
        timestamp_ms: ms since 1970.
    """

    value: bytes
    timestamp_ms: int


class TimestampedKeyValueStore:
    """A store that keeps a timestamp with each value.

    Args:
        store: Holds the entries; nobody else writes to it. Its values are the timestamp, as eight bytes, and the value.

    Source: KIP-844, ``persistentTimestampedKeyValueStore``; KIP-258 for the layout.
    """

    def __init__(self, store: KeyValueStore) -> None:
        self.store = store

    def get(self, key: bytes) -> Timestamped | None:
        """Return the value with its time; None if there is none. As :meth:`KeyValueStore.get`."""
        found = self.store.get(key)
        return None if found is None else _timestamped(found)

    def put(self, key: bytes, value: bytes | None, timestamp_ms: int) -> None:
        """Write the value with its time, or delete the key if it is None. As :meth:`KeyValueStore.put`."""
        self.store.put(key, None if value is None else _TIME.pack(timestamp_ms) + value)

    def range(
        self, lower: bytes | None = None, upper: bytes | None = None, *, reverse: bool = False
    ) -> Generator[tuple[bytes, Timestamped], None, None]:
        """Scan the entries with ``lower <= key < upper``. As :meth:`KeyValueStore.range`."""
        scan = self.store.range(lower, upper, reverse=reverse)
        return ((key, _timestamped(value)) for key, value in scan)


class WindowStore:
    """A store of one value for each key and window; a window is known by its start.

    Windows older than the retention are no longer read, and :meth:`expire` deletes them. Age is measured from the newest
    window that was written or expired through this object, not by a clock.

    Args:
        store: Holds the entries; nobody else writes to it. Its keys are the length of the key, the key, and the window's start.
        window_ms: The size of the windows, in ms.
        retention_ms: How long a window is kept after the newest one has begun, in ms; at least its size.

    Raises:
        ConfigurationError: The retention is smaller than the window, or the window is not positive.

    Source: KIP-844, ``persistentWindowStore``.
    """

    def __init__(self, store: KeyValueStore, *, window_ms: int, retention_ms: int) -> None:
        if not 0 < window_ms <= retention_ms:
            raise ConfigurationError("window_ms must be positive, and retention_ms at least as large")
        self.store = store
        self.window_ms = window_ms
        self.retention_ms = retention_ms
        self._newest_ms = 0

    @property
    def oldest_ms(self) -> int:
        """The earliest start of a window that is still read."""
        return max(0, self._newest_ms - self.retention_ms + 1)

    def put(self, key: bytes, value: bytes | None, start_ms: int) -> bool:
        """Write the value of the window that begins then, or delete it if it is None. As :meth:`KeyValueStore.put`.

        Returns:
            Whether it was written: a window older than the retention is not.

        Raises:
            ValueError: The start is negative.
        """
        if start_ms < 0:
            raise ValueError(f"a window begins at {start_ms}: before 1970")
        if start_ms < self.oldest_ms:
            return False
        self._newest_ms = max(self._newest_ms, start_ms)
        self.store.put(_key(key, start_ms), value)
        return True

    def get(self, key: bytes, start_ms: int) -> bytes | None:
        """Return the value of the window that begins then; None if there is none. As :meth:`KeyValueStore.get`."""
        return self.store.get(_key(key, start_ms)) if start_ms >= self.oldest_ms else None

    def fetch(
        self, key: bytes, from_ms: int, until_ms: int, *, reverse: bool = False
    ) -> Generator[tuple[int, bytes], None, None]:
        """Scan the windows of the key with ``from_ms <= start < until_ms``: their starts and values, in order of time.

        As :meth:`KeyValueStore.range`.
        """
        lower = max(from_ms, self.oldest_ms)
        if until_ms <= lower:
            return
        with closing(self.store.range(_key(key, lower), _key(key, until_ms), reverse=reverse)) as scan:
            for found, value in scan:
                yield _parts(found)[1], value

    def all(self) -> Generator[tuple[bytes, int, bytes], None, None]:
        """Scan all windows: key, start and value, ordered by the length of the key, the key and the start."""
        oldest = self.oldest_ms
        with closing(self.store.range()) as scan:
            for found, value in scan:
                key, start_ms = _parts(found)
                if start_ms >= oldest:
                    yield key, start_ms, value

    def expire(self, now_ms: int) -> int:
        """Delete windows that are older than the retention at that time. Uncommitted, like every write. Reads the whole store.

        The deletions go to the changelog. Call it inside a block, once in a while.

        Args:
            now_ms: The start of the newest window, in ms.

        Returns:
            The number of windows deleted.
        """
        self._newest_ms = max(self._newest_ms, now_ms)
        oldest, deleted = self.oldest_ms, 0
        with closing(self.store.range()) as scan:
            for found, _ in scan:
                if _parts(found)[1] < oldest:
                    self.store.put(found, None)
                    deleted += 1
        return deleted


def _timestamped(found: bytes) -> Timestamped:
    return Timestamped(found[_TIME.size :], _TIME.unpack_from(found)[0])


def _key(key: bytes, start_ms: int) -> bytes:
    # The length first: no key with a start is then the beginning of another key's.
    return _LENGTH.pack(len(key)) + key + _START.pack(start_ms)


def _parts(found: bytes) -> tuple[bytes, int]:
    return found[_LENGTH.size : -_START.size], _START.unpack(found[-_START.size :])[0]
