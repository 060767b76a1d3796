"""One RocksDB that holds entries and, apart from them, one note; a batch writes both atomically."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from dualwrite.errors import StoreInUse, StoreUnreadable, Unavailable
from dualwrite.stores.keyed.rocksdb_client__stores_rocksdb_opening import is_open_elsewhere, opener_of, rocksdict_for

if TYPE_CHECKING:
    from rocksdict import Options, Rdict, WriteBatch

    from dualwrite.state.entries import Change, Entry

logger = logging.getLogger(__name__)

_NOTES: Final = "notes"
_NOTE: Final = b"note"
_FULL: Final = ("No space left on device", "Disk quota exceeded")


class Rocks:
    """An open RocksDB. One thread at a time uses it.

    Args:
        path: Its directory; created if missing.
        read_only: Whether to read it alone, which needs no space on the disk, and no lock.

    Raises:
        StoreInUse: It is open elsewhere.
        StoreUnreadable: RocksDB cannot open it.
        Unavailable: Its disk is full.
        ConfigurationError: The extra ``state`` is not installed.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._rocksdict = rocksdict_for("state stores", "state")
        self._path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            kinds = self._rocksdict.AccessType
            access = kinds.read_only(False) if read_only else kinds.read_write()
            self._db: Rdict = self._rocksdict.Rdict(
                str(path), self._options(), {_NOTES: self._options()}, access_type=access
            )
        except Exception as refused:  # rocksdict raises Exception itself
            if is_open_elsewhere(refused):
                raise StoreInUse(
                    f"the state store {path} is open elsewhere, in {opener_of(path, refused)}"
                ) from refused
            if is_disk_full(refused):
                raise disk_is_full(path, refused) from refused
            raise StoreUnreadable(f"the state store {path} cannot be opened: {refused}") from refused
        self._notes: Rdict = self._db.get_column_family(_NOTES)
        self._notes_handle = self._db.get_column_family_handle(_NOTES)

    def _options(self) -> Options:
        options: Options = self._rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        options.set_keep_log_file_num(2)
        return options

    def get(self, key: bytes) -> bytes | None:
        """The value; None if there is none."""
        return cast("bytes | None", self._db.get(key))

    def entries(self, lower: bytes | None, upper: bytes | None, *, reverse: bool = False) -> Iterator[Entry]:
        """The entries with ``lower <= key < upper`` as they are now. Keeps the database open until dropped."""
        # Begun here, not at the first step: a scan must not show what is written in between.
        found = cast("Iterator[Entry]", self._db.items(backwards=reverse, from_key=upper if reverse else lower))
        return _within(found, lower, upper, reverse=reverse)

    def note(self) -> bytes | None:
        """The note; None if there is none."""
        return cast("bytes | None", self._notes.get(_NOTE))

    def batch(self) -> WriteBatch:
        """An empty batch, for `write`."""
        batch: WriteBatch = self._rocksdict.WriteBatch(raw_mode=True)
        return batch

    def write(self, batch: WriteBatch, *, note: bytes | None = None) -> None:
        """Write the batch, and the note with it if there is one: all or nothing, also in a crash.

        With a note, this batch and all earlier ones are durable on return; without one, perhaps none is.
        """
        options = self._rocksdict.WriteOptions()
        if note is not None:
            batch.put(_NOTE, note, self._notes_handle)
            options.sync = True
        self._db.write(batch, options)

    def erase_note(self) -> None:
        """Erase the note, durably."""
        batch = self.batch()
        batch.delete(_NOTE, self._notes_handle)
        options = self._rocksdict.WriteOptions()
        options.sync = True
        self._db.write(batch, options)

    def approximate_count(self) -> int:
        """RocksDB's estimate of the number of entries."""
        return self._db.property_int_value("rocksdb.estimate-num-keys") or 0

    def close(self) -> None:
        """Close it and release its lock, unless an iterator over it is still alive. Never raises."""
        # RocksDB flushes first, which a full disk refuses. What counts is in its log; the lock goes with the last reference.
        notes, db = self._notes, self._db
        del self._notes_handle, self._notes, self._db
        for one in (notes, db):
            try:
                one.close()
            except Exception as refused:  # noqa: BLE001 - rocksdict raises Exception itself
                logger.warning("the state store %s was closed without a flush: %s", self._path, refused)


def is_disk_full(refused: Exception) -> bool:
    """Whether RocksDB, or the operating system, has no space left."""
    return any(words in str(refused) for words in _FULL)


def disk_is_full(path: Path, refused: Exception) -> Unavailable:
    """The error for it: what was committed is safe, and the store continues once there is space."""
    return Unavailable(
        f"the disk of the state store {path} is full: {refused}", next_step="free space on it, and call again"
    )


def put_all(batch: WriteBatch, changes: list[Change]) -> None:
    """Put changes into a batch: values as puts, None as deletions."""
    for key, value in changes:
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)


def _within(
    found: Iterator[Entry], lower: bytes | None, upper: bytes | None, *, reverse: bool
) -> Generator[Entry, None, None]:
    for key, value in found:
        if reverse:
            if lower is not None and key < lower:
                return
            if key == upper:  # RocksDB's bound belongs to the range
                continue
        elif upper is not None and key >= upper:
            return
        yield key, value
