"""``RocksDatabase``: a RocksDB that decides dual writes."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from dualwrite.errors import ConfigurationError
from dualwrite.interfaces__ports_database import Traits
from dualwrite.stores.keyed.rocksdb__stores_rocksdb_batch import RocksHandle
from dualwrite.stores.keyed.rocksdb__stores_rocksdb_forgetting import RocksForgetting
from dualwrite.stores.keyed.rocksdb__stores_rocksdb_keys import RocksKeys
from dualwrite.stores.keyed.rocksdb_client import Client
from dualwrite.stores.keyed.rocksdb_client__stores_rocksdb_families import FAMILIES
from dualwrite.stores.keyed.store__stores_keyed_database import KeyedDatabase

if TYPE_CHECKING:
    from rocksdict import Rdict
    from typing_extensions import Self

_TRAITS: Final = Traits("RocksDB", "batch")


class RocksDatabase(KeyedDatabase):
    """A RocksDB as the database of dual writes: ``tx.batch`` and the decision are one synced ``WriteBatch``.

    The library's rows are in the column families ``kafka_transaction_state`` and ``dualwrite_incident``, which are made if they
    are missing. One process has a RocksDB open at a time; any number of its writers and threads may share this object.

    Args:
        rocksdb: A directory, or an open ``rocksdict.Rdict`` with options and column families of your own. A directory is opened
            at once, with the options that it was last opened with, and created if missing. After a failed write (a full
            disk) it is opened again; an ``Rdict`` of yours is not, see :attr:`rdict`.
        create: Whether to create a missing directory.

    Raises:
        ConfigurationError: rocksdict is not installed (``dualwrite[rocksdb]``), or the directory cannot be opened.
        Unavailable: Another process, or another object of this one, has it open; the message names the process if it is known.
    """

    def __init__(self, rocksdb: str | os.PathLike[str] | Rdict, *, create: bool = True) -> None:
        given = Path(rocksdb) if isinstance(rocksdb, (str, os.PathLike)) else rocksdb
        self._client = Client(given, create=create)

    @classmethod
    def from_url(cls, text: str) -> Self:
        """Open the RocksDB of a URL: ``rocksdb:///var/lib/orders``, ``rocksdb:relative/path``. It must be there already.

        Raises:
            ConfigurationError, Unavailable: As the class; or it is not such a URL, or there is no RocksDB.
        """
        parts = urlsplit(text)
        if parts.scheme != "rocksdb" or parts.netloc or not parts.path or parts.query:
            raise ConfigurationError(f"{text!r} does not name a RocksDB", next_step="write rocksdb:///the/directory")
        return cls(unquote(parts.path), create=False)

    @property
    def traits(self) -> Traits:
        """The traits of this kind of database."""
        return _TRAITS

    @property
    def rdict(self) -> Rdict:
        """The open ``Rdict``, for reads and writes outside of dual writes. Read the attribute for each use.

        After a failed write it is another object; an ``Rdict`` of yours must be closed and opened by you then.

        Raises:
            Unavailable: A write has failed, and the database could not be opened again.
            IllegalStateError: It is closed.
        """
        return self._client.db

    def check(self) -> None:
        """Make the column families that are missing, and refuse settings with which a decision could be lost.

        Raises:
            ConfigurationError: It is open for reading alone, or a setting is refused; the message says which.
            Unavailable: A write has failed, and it could not be opened again.
        """
        self._client.check_settings(())
        self._client.make_families(FAMILIES.values())
        self._client.check_settings(FAMILIES.values())

    @property
    def keys(self) -> RocksKeys:
        """See the port."""
        return RocksKeys(self._client)

    def new_handle(self) -> RocksHandle:
        """See the port."""
        return RocksHandle(self._client)

    def forgetting(self) -> RocksForgetting:
        """See the port."""
        return RocksForgetting(self.keys)

    def close(self) -> None:
        """Close it if this object has opened it. Call it when no writer uses it any more. Idempotent."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RocksDatabase {self._client.path}>"
