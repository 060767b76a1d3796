"""``KeyedDatabase``: a database without SQL, as the one that decides."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from contextlib import contextmanager

from dualwrite.interfaces__ports_database import PAUSED_OWNER_TIMEOUT_S, Database
from dualwrite.stores.keyed.store import KeyedStore
from dualwrite.stores.keyed.store__stores_keyed_handle import KeyedHandle
from dualwrite.stores.keyed.store__stores_keyed_keys import Keys


class KeyedDatabase(Database):
    """A subclass adds the primitives, the handle, and what :class:`Database` asks of every kind."""

    @property
    @abstractmethod
    def keys(self) -> Keys:
        """The primitives."""

    @abstractmethod
    def new_handle(self) -> KeyedHandle:
        """A new handle, for one dual write."""

    def store(self, *, paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S) -> KeyedStore:
        """See :meth:`Database.store`. A paused owner holds no lock that a server would have to take from it."""
        del paused_owner_timeout_s
        return KeyedStore(self.keys, self.traits.name)

    @contextmanager
    def connect(self) -> Generator[KeyedHandle, None, None]:
        """See :meth:`Database.connect`."""
        handle = self.new_handle()
        try:
            yield handle
        finally:
            handle.clear()
            handle.end()
