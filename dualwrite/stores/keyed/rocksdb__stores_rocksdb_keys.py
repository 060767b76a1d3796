"""The library's rows as keys and values of two column families, written under a condition, or with the user's batch."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from dualwrite.errors import ConfigurationError, DualWriteError, TransactionAborted, TransactionInDoubt, Unavailable
from dualwrite.stores.keyed.rocksdb__stores_rocksdb_batch import RocksHandle
from dualwrite.stores.keyed.rocksdb__stores_rocksdb_values import packed, unpacked
from dualwrite.stores.keyed.rocksdb_client import Client, WriteFailedError
from dualwrite.stores.keyed.rocksdb_client__stores_rocksdb_families import FAMILIES
from dualwrite.stores.keyed.store__stores_keyed_keys import Change, Entry, Key

if TYPE_CHECKING:
    from rocksdict import WriteBatch

    from dualwrite.stores.keyed.store__stores_keyed_handle import KeyedHandle


class RocksKeys:
    """Implements :class:`dualwrite.stores.keyed.store__stores_keyed_keys.Keys`. Thread-safe.

    One writes at a time: RocksDB has no conditional write, so the condition is checked under a lock of this process, which is
    the only one that has the database open.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def get(self, keys: Sequence[Key]) -> Mapping[Key, Entry]:
        """See the port."""
        found = {key: self._read(key) for key in keys}
        return {key: entry for key, entry in found.items() if entry is not None}

    def scan(self, table: str, prefix: str) -> Mapping[Key, Entry]:
        """See the port."""
        found = self._client.items(FAMILIES[table], prefix.encode())
        return {(table, name.decode()): _entry((table, name.decode()), value) for name, value in found}

    def write(self, changes: Sequence[Change]) -> bool:
        """See the port."""
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
        """Delete these keys, if all of them are as they were read. Durable on return.

        Raises:
            Unavailable: As :meth:`write`.
        """
        batch = self._client.new_batch()
        with self._client.locks.writing:
            if not self._as_expected([Change(key, entry, None) for key, entry in found.items()]):
                return False
            for table, name in found:
                batch.delete(name.encode(), self._client.family(FAMILIES[table]))
            self._write(batch)
        return True

    def commit(self, handle: KeyedHandle, changes: Sequence[Change], *, answer_s: float | None) -> bool:
        """See the port. An fsync that has begun is waited for, however long it takes."""
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
        """See the port."""
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
