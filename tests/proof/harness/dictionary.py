"""A complete database without SQL: a dictionary. It shows how little the port needs, and survives the death of simulated owners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dualwrite.errors import IllegalStateError, TransactionAborted, Unavailable
from dualwrite.interfaces import Traits
from dualwrite.stores.keyed.store import Change, Entry, Key, KeyedDatabase, KeyedHandle


class Puts:
    """The user's part: pairs that commit with the messages."""

    def __init__(self) -> None:
        self.pairs: dict[str, str] = {}
        self.ended = False

    def put(self, name: str, value: str) -> None:
        if self.ended:
            raise IllegalStateError("the block has ended")
        self.pairs[name] = value


class DictionaryHandle(KeyedHandle):
    """A handle with the user's part."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = Puts()

    def clear(self) -> None:
        self.batch.pairs.clear()

    def end(self) -> None:
        self.batch.ended = True


class Dictionary:
    """Implements :class:`dualwrite.stores.keyed.store.Keys`.

    Attributes:
        pairs: What users have committed.
        planted: Called in the middle of the next commit, once: it may write something else, or raise instead of an answer.
    """

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}
        self.pairs: dict[str, str] = {}
        self.planted: Callable[[], None] | None = None
        self._lock = threading.RLock()
        self._locked = threading.Lock()
        self._version = 0

    def get(self, keys: Sequence[Key]) -> Mapping[Key, Entry]:
        with self._lock:
            return {key: self.entries[key] for key in keys if key in self.entries}

    def scan(self, table: str, prefix: str) -> Mapping[Key, Entry]:
        with self._lock:
            return {key: one for key, one in self.entries.items() if key[0] == table and key[1].startswith(prefix)}

    def write(self, changes: Sequence[Change]) -> bool:
        with self._lock:
            if any(self.entries.get(change.key) != change.expected for change in changes):
                return False
            for change in changes:
                if change.value is not None:
                    self._version += 1
                    self.entries[change.key] = Entry(change.value, self._version)
            return True

    def commit(self, handle: KeyedHandle, changes: Sequence[Change], *, answer_s: float | None) -> bool:
        del answer_s
        assert isinstance(handle, DictionaryHandle)
        if "refused" in handle.batch.pairs:
            raise TransactionAborted("a condition of the user's does not hold", retryable=False)
        planted, self.planted = self.planted, None
        if planted is not None and planted.__name__ == "before":
            planted()
        with self._lock:
            if not self.write(changes):
                return False
            self.pairs.update(handle.batch.pairs)
        if planted is not None and planted.__name__ != "before":
            planted()
        return True

    @contextmanager
    def locked(self, keys: Sequence[Key], within_s: float) -> Iterator[None]:
        del keys
        if not self._locked.acquire(timeout=max(within_s, 0)):
            raise Unavailable("another settler holds the lock")
        try:
            yield
        finally:
            self._locked.release()


class DictionaryDatabase(KeyedDatabase):
    """The database. Another object over the same dictionary is another process."""

    traits = Traits("Dictionary", "batch")

    def __init__(self, keys: Dictionary | None = None) -> None:
        self._keys = keys or Dictionary()
        self.closed = 0

    @property
    def keys(self) -> Dictionary:
        return self._keys

    def new_handle(self) -> DictionaryHandle:
        return DictionaryHandle()

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1
