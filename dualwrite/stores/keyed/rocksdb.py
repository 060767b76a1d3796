"""RocksDB as the deciding database: the user's batch and the decision in one atomic write."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar, overload
from urllib.parse import unquote, urlsplit

from dualwrite.errors import (
    ConfigurationError,
    DualWriteError,
    IllegalStateError,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.interfaces import Traits
from dualwrite.stores.keyed.rocksdb_client import FAMILIES, OWN, Client, WriteFailedError
from dualwrite.stores.keyed.store import (
    INCIDENT,
    Change,
    Entry,
    Key,
    KeyedDatabase,
    KeyedHandle,
    decode_incident,
    decode_row,
    state_key,
)

if TYPE_CHECKING:
    from rocksdict import ColumnFamily, Rdict, WriteBatch
    from typing_extensions import Self

    from dualwrite.protocol.values import Incident, StateRow

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
        return RocksKeys(self._client)

    def new_handle(self) -> RocksHandle:
        return RocksHandle(self._client)

    def forgetting(self) -> RocksForgetting:
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


# `tx.batch`: what one dual write puts into the user's RocksDB.

Default = TypeVar("Default")
Plain = bytes | str | int | float | bool
_Place = tuple[str | None, type, Plain]
_PLAIN: Final = (bytes, str, int, float, bool)
_DELETED: Final = object()


class RocksBatch:
    """The writes of one dual write. They become durable together with its decision, in one synced ``WriteBatch``.

    Nothing is in the database before the block ends. Used by the block's thread, until the block ends.

    Keys and values are bytes; where the database is not in rocksdict's raw mode also ``str``, ``int``, ``float`` and ``bool``.
    Encode other objects yourself.
    """

    def __init__(self, writes: Writes) -> None:
        self._writes = writes

    def put(self, key: Plain, value: Plain, column_family: str | None = None) -> None:
        """Write the value. Not durable, and not visible to others, before the block has ended.

        Args:
            key: The key.
            value: The value.
            column_family: Its column family by name; the default one if not given.

        Raises:
            TypeError: The key or the value is of a type that cannot be stored.
            ConfigurationError: There is no such column family, or it is the library's own.
            IllegalStateError: The block has ended.
        """
        self._writes.put(key, value, column_family)

    def delete(self, key: Plain, column_family: str | None = None) -> None:
        """Delete the key, if it is there. Raises as :meth:`put`."""
        self._writes.delete(key, column_family)

    @overload
    def get(self, key: Plain, default: None = None, column_family: str | None = None) -> object: ...
    @overload
    def get(self, key: Plain, default: Default, column_family: str | None = None) -> object | Default: ...
    def get(self, key: Plain, default: object = None, column_family: str | None = None) -> object:
        """The value that this block has written, or else the newest one in the database.

        Another block may change it before this one commits; see :meth:`get_for_update`.

        Raises:
            Unavailable: RocksDB does not answer.
            TypeError, ConfigurationError, IllegalStateError: As :meth:`put`.
        """
        found = self._writes.get(key, column_family)
        return default if found is None else found

    def get_for_update(self, key: Plain, default: object = None, column_family: str | None = None) -> object:
        """Like :meth:`get`; in addition, the block commits only if the key still has that value then.

        Otherwise it ends with a retryable `TransactionAborted`, and :meth:`dualwrite.DualWriter.run` runs it again.

        Raises:
            TypeError: As :meth:`put`; or the stored value is of another type, and cannot be compared.
        """
        self._writes.expect(key, column_family)
        return self.get(key, default, column_family)

    def __len__(self) -> int:
        """The number of keys that this block has written or deleted."""
        return len(self._writes.written)


class Writes:
    """The contents of a block's batch, and the values that it expects in the database. Users get `RocksBatch` alone."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ended = False
        self._batch = client.new_batch()
        self.written: dict[_Place, object] = {}
        self._expected: dict[_Place, object] = {}

    def put(self, key: Plain, value: Plain, column_family: str | None) -> None:
        place = self._place(key, column_family)
        self._check(value, "value")
        self._batch.put(key, value, self._family(column_family))
        self.written[place] = value

    def delete(self, key: Plain, column_family: str | None) -> None:
        place = self._place(key, column_family)
        self._batch.delete(key, self._family(column_family))
        self.written[place] = _DELETED

    def get(self, key: Plain, column_family: str | None) -> object:
        """The value that this block sees; None if there is none."""
        place = self._place(key, column_family)
        found = self.written[place] if place in self.written else self._stored(place)
        return None if found is _DELETED else found

    def expect(self, key: Plain, column_family: str | None) -> None:
        """Commit only if the key still has the value that it has now, or that it had at the first call."""
        place = self._place(key, column_family)
        if place not in self._expected:
            stored = self._stored(place)
            if stored is not None:
                self._check(stored, "value")
            self._expected[place] = stored

    def _family(self, name: str | None) -> ColumnFamily | None:
        return None if name is None else self._client.family(name)

    def _place(self, key: Plain, column_family: str | None) -> _Place:
        if self._ended:
            raise IllegalStateError("the block has ended: its batch can no longer be used")
        self._check(key, "key")
        if column_family in OWN:
            raise IllegalStateError(f"the column family {column_family} is the library's own")
        return column_family, type(key), key

    def _check(self, given: object, what: str) -> None:
        allowed = (bytes,) if self._client.raw else _PLAIN
        if not isinstance(given, allowed):
            names = ", ".join(one.__name__ for one in allowed)
            raise TypeError(f"a {what} in this RocksDB is {names}, not {type(given).__name__}: encode it first")

    def _stored(self, place: _Place) -> object:
        column_family, _, key = place
        found: object = self._client.get(key, column_family)
        return found

    def check_expectations(self) -> None:
        """Abort unless the database still has what :meth:`get_for_update` has returned."""
        for place, expected in self._expected.items():
            if not _same(self._stored(place), expected):
                raise TransactionAborted(f"the value of {place[2]!r} has changed since get_for_update")

    def take(self) -> WriteBatch:
        """All writes, for RocksDB to write. Once; the batch is empty then."""
        batch = self._batch
        self._batch = self._client.new_batch()
        return batch

    def clear(self) -> None:
        self._batch = self._client.new_batch()
        self.written.clear()
        self._expected.clear()

    def end(self) -> None:
        self.clear()
        self._ended = True


class RocksHandle(KeyedHandle):
    """The batch of one dual write, with the changes of the library."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.writes = Writes(client)
        self.batch = RocksBatch(self.writes)

    def clear(self) -> None:
        self.writes.clear()

    def end(self) -> None:
        self.writes.end()


def _same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return one == other


# The library's rows as keys and values of two column families, written under a condition, or with the user's batch.


class RocksKeys:
    """Implements :class:`dualwrite.stores.keyed.store.Keys`. Thread-safe.

    One writes at a time: RocksDB has no conditional write, so the condition is checked under a lock of this process, which is
    the only one that has the database open.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def get(self, keys: Sequence[Key]) -> Mapping[Key, Entry]:
        found = {key: self._read(key) for key in keys}
        return {key: entry for key, entry in found.items() if entry is not None}

    def scan(self, table: str, prefix: str) -> Mapping[Key, Entry]:
        found = self._client.items(FAMILIES[table], prefix.encode())
        return {(table, name.decode()): _entry((table, name.decode()), value) for name, value in found}

    def write(self, changes: Sequence[Change]) -> bool:
        with self._client.locks.writing:
            if not self._as_expected(changes):
                return False
            batch = self._client.new_batch()
            self._put(batch, changes)
            self._write(batch)
        return True

    def _write(self, batch: WriteBatch) -> None:
        try:
            self._client.write(batch)
        except WriteFailedError as error:
            raise Unavailable(f"RocksDB could not write: {error}") from error

    def erase(self, found: Mapping[Key, Entry]) -> bool:
        """Delete these keys, if all of them are as they were read. Durable on return."""
        batch = self._client.new_batch()
        with self._client.locks.writing:
            if not self._as_expected([Change(key, entry, None) for key, entry in found.items()]):
                return False
            for table, name in found:
                batch.delete(name.encode(), self._client.family(FAMILIES[table]))
            self._write(batch)
        return True

    def commit(self, handle: KeyedHandle, changes: Sequence[Change], *, answer_s: float | None) -> bool:
        """Waits for an fsync that has begun, however long it takes."""
        assert isinstance(handle, RocksHandle)
        with self._writing(answer_s):
            try:
                handle.writes.check_expectations()
                if not self._as_expected(changes):
                    return False
                batch = handle.writes.take()
                self._put(batch, changes)
            except TransactionAborted:
                raise
            except DualWriteError as error:
                raise TransactionAborted(error.what, next_step=error.next_step) from error
            try:
                self._client.write(batch)
            except WriteFailedError as error:
                raise TransactionInDoubt(f"RocksDB could not write: {error}") from error.__cause__
            except DualWriteError as error:
                raise TransactionAborted(error.what, next_step=error.next_step) from error
            except BaseException as interruption:
                raise TransactionInDoubt("interrupted while RocksDB wrote") from interruption
        return True

    def locked(self, keys: Sequence[Key], within_s: float) -> AbstractContextManager[None]:
        return self._client.locks.held(keys, within_s)

    @contextmanager
    def _writing(self, within_s: float | None) -> Generator[None, None, None]:
        writing = self._client.locks.writing
        if not writing.acquire(timeout=-1 if within_s is None else within_s):
            raise TransactionAborted(f"RocksDB was still writing after {within_s:.1f} s")
        try:
            yield
        finally:
            writing.release()

    def _read(self, key: Key) -> Entry | None:
        table, name = key
        value = self._client.get(name.encode(), FAMILIES[table])
        return None if value is None else _entry(key, value)

    def _as_expected(self, changes: Sequence[Change]) -> bool:
        for change in changes:
            found = self._read(change.key)
            if (found is None) is not (change.expected is None):
                return False
            if found is not None and change.expected is not None and found.version != change.expected.version:
                return False
        return True

    def _put(self, batch: WriteBatch, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.value is not None:
                table, name = change.key
                batch.put(name.encode(), packed(change.value), self._client.family(FAMILIES[table]))


def _entry(key: Key, value: object) -> Entry:
    try:
        content = unpacked(value)
    except ValueError as error:
        table, name = key
        raise ConfigurationError(
            f"bad value of {name!r} in {FAMILIES[table]}: {error}",
            transactional_id=name if table == "state" else None,
            next_step="upgrade dualwrite if a newer version has written it; otherwise restore it before anything is settled",
        ) from error
    return Entry(content, version=content)  # no two values are the same


# Deletes rows of ids that never come back, and incidents acknowledged long ago.


class RocksForgetting:
    """Implements :class:`dualwrite.interfaces.Forgetting`. There are no leases and no runs."""

    def __init__(self, keys: RocksKeys) -> None:
        self._keys = keys

    def now(self) -> datetime:
        """This process's time, as that of all rows."""
        return datetime.now(timezone.utc)

    def leased(self) -> set[str]:
        return set()

    def forget(self, rows: Sequence[StateRow]) -> bool:
        """This fences a writer that is still open."""
        found = self._keys.get([state_key(row.transactional_id) for row in rows])
        if [decode_row(entry.value).row for entry in found.values()] != list(rows):
            return False
        return self._keys.erase(found)

    def forget_incidents(self, prefix: str, before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
        def is_old(incident: Incident) -> bool:
            owner = incident.transactional_id
            chosen = owner.startswith(prefix) if name is None else owner == name or owner.startswith(f"{name}#")
            return chosen and incident.acknowledged_at is not None and incident.acknowledged_at < before

        found = self._keys.scan(INCIDENT, prefix if name is None else name)
        old = {key: entry for key, entry in found.items() if is_old(decode_incident(entry.value))}
        if dry_run:
            return len(old)
        return sum(self._keys.erase({key: entry}) for key, entry in old.items())

    def forget_runs(self, prefix: str, before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
        del prefix, before, dry_run, name
        return 0

    def forget_actions(self, prefix: str, before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
        del prefix, before, dry_run, name
        return 0


# The form of the library's values: one line that names the format and its version, then JSON. Pure.

_NAME: Final = b"dualwrite"
_FORMAT: Final = b"1"


def packed(content: bytes) -> bytes:
    """The value to store, of JSON."""
    return b"%b %b\n%b" % (_NAME, _FORMAT, content)


def unpacked(value: object) -> bytes:
    """The content of a stored value; ``ValueError`` if this version of the library cannot have written it."""
    line, separator, content = value.partition(b"\n") if isinstance(value, bytes) else (b"", b"", b"")
    name, _, form = line.partition(b" ")
    if not separator or name != _NAME:
        raise ValueError("dualwrite has not written it")
    if form != _FORMAT:
        shown = form.decode(errors="replace")[:20]
        raise ValueError(f"it has format {shown!r}, and this version of dualwrite reads {_FORMAT.decode()!r}")
    return content
