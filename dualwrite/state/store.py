"""``KeyValueStore``: one open transaction over what is committed, kept in RocksDB; timestamps and windows over it.

Uncommitted writes stay in memory, or in a second RocksDB if they do not fit; a commit writes them together with a note that
says how far the changelog is contained.

Only the key-value store has transactions, scans and recovery; a task takes that store.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast
from weakref import WeakSet

from dualwrite import failpoints
from dualwrite.errors import (
    ChangelogDiffers,
    ConfigurationError,
    DualWriteError,
    IllegalStateError,
    StoreInUse,
    StoreUnreadable,
    Unavailable,
)
from dualwrite.interfaces import Closing
from dualwrite.state.entries import (
    UNCHANGED,
    Change,
    Committed,
    Entry,
    Item,
    Position,
    Scan,
    Uncommitted,
    as_text,
    end_of_prefix,
    merged,
    merged_changes,
    moved,
    only_position,
    parsed,
    position_in,
)
from dualwrite.state.reader import Isolation, Reader, View
from dualwrite.stores.keyed.rocksdb import is_open_elsewhere, opener_of, rocksdict_for

if TYPE_CHECKING:
    from rocksdict import Options, Rdict, RdictIter, Snapshot, WriteBatch


_COPIED_AT_ONCE_BYTES: Final = 4 << 20


class KeyValueStore(Closing):
    """A persistent key-value store of bytes with one open transaction.

    Reads see the transaction's own writes. `commit` makes all of them durable, together with the changelog's offset that they
    correspond to; a crash before it leaves none of them. They wait in memory up to a bound, and above it in a second RocksDB.

    One process has a store open at a time, and one thread uses it at a time. Other threads read through `reader`.

    Args:
        path: Its directory; created if missing. Nothing else may be in it.
        max_memory_bytes: Uncommitted writes above this size move from memory to disk; 0 moves each of them.
        sync: Whether a commit waits until the disk has it. Without, a crash of the process loses nothing, and a crash of the
            machine may take the last commits back, each as a whole: the changelog restores them. Commits that were spilled
            are always synced.
        rebuild_if_too_old: What a restore does with a store that is too old for its changelog: it moves the data aside, to
            ``too-old`` in the same directory, and builds the store from the whole changelog, instead of raising
            `StoreTooOld`. The copy of an earlier time is deleted then.

    Raises:
        StoreInUse: Another store has the directory open.
        StoreUnreadable: The directory cannot be opened, or is of another version of this library.
        Unavailable: Its disk is full.
        ConfigurationError: The extra ``state`` is not installed, or an argument cannot work.

    Source: KIP-892, "Transactional Semantics for StateStores", and KIP-1035, "StateStore managed changelog offsets".
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_memory_bytes: int = 64 << 20,
        sync: bool = True,
        rebuild_if_too_old: bool = False,
    ) -> None:
        if max_memory_bytes < 0:
            raise ConfigurationError("max_memory_bytes is negative")
        self.path = Path(path)
        self.rebuild_if_too_old = rebuild_if_too_old
        self._max_memory_bytes = max_memory_bytes
        self._sync = sync
        self._pid = os.getpid()
        # Held by this thread while the uncommitted writes change, and by readers of them in other threads.
        self._changing = threading.Lock()
        self._view: View | None = None
        self._views: WeakSet[View] = WeakSet()
        self._uncommitted = Uncommitted()
        self._scans: WeakSet[Scan[Entry] | Scan[Change]] = WeakSet()
        self._spilled: Spilled | None = None
        self._rocks: Rocks | None = None
        self._failed: BaseException | None = None
        self._held = False
        self._in_savepoint: Callable[[], bool] | None = None
        self._open()

    def _open(self) -> None:
        """Open the databases; finish a spilled commit that was decided, discard one that was not."""
        self._rocks = Rocks(self.path / "committed")
        try:
            self._committed = parsed(self._rocks.note(), self.path)
            delete_discarded(self.path / "uncommitted")
            left = self.path / "uncommitted"
            if left.exists() and is_undecided(left):
                delete_undecided(left)
            elif left.exists():
                self._spilled = Spilled(left)
                if self._spilled.decision is not None:
                    self._copy(self._spilled, self._spilled.decision)
                self._discard_spilled()
            self._publish(self._committed)
        except BaseException:
            self._close()
            raise

    # Reads

    def get(self, key: bytes) -> bytes | None:
        """Return the value, uncommitted writes included; None if there is none.

        Raises:
            TypeError: The key is not bytes.
            IllegalStateError: The store is closed, or a commit has failed.
        """
        rocks = self._usable()
        _require_bytes(key, "key")
        found = self._uncommitted.get(key)
        if found is UNCHANGED and self._spilled is not None:
            found = self._spilled.get(key)
        if found is UNCHANGED:
            return rocks.get(key)
        assert found is None or isinstance(found, bytes)
        return found

    def range(self, lower: bytes | None = None, upper: bytes | None = None, *, reverse: bool = False) -> Scan[Entry]:
        """Scan the entries with ``lower <= key < upper`` in the order of their keys, uncommitted writes included.

        Args:
            lower: None begins at the first key.
            upper: None ends with the last key.
            reverse: Whether to begin at the upper end.

        Raises:
            TypeError: A bound is not bytes.
            IllegalStateError: The store is closed, or a commit has failed.
        """
        rocks = self._usable()
        for bound in (lower, upper):
            if bound is not None:
                _require_bytes(bound, "bound")
        sources: list[Iterable[Change]] = [
            self._uncommitted.changes(lower, upper, reverse=reverse),
            *([self._spilled.changes(lower, upper, reverse=reverse)] if self._spilled else []),
            rocks.entries(lower, upper, reverse=reverse),
        ]
        return self._begun(Scan(merged(sources, reverse=reverse)))

    def prefix(self, prefix: bytes, *, reverse: bool = False) -> Scan[Entry]:
        """Scan the entries whose keys begin with the prefix, as :meth:`range`."""
        _require_bytes(prefix, "prefix")
        return self.range(prefix, end_of_prefix(prefix), reverse=reverse)

    def approximate_count(self) -> int:
        """Estimate the number of committed entries, as RocksDB does."""
        return self._usable().approximate_count()

    # Reads by other threads

    def reader(self, isolation: Isolation = "read_committed") -> Reader:
        """Return what other threads read the store through, as long as it is open. Any number of them may use it at a time.

        Args:
            isolation: ``read_committed`` shows what is committed, and never waits for the store. ``read_uncommitted`` shows
                the open transaction's writes as well, which may still be discarded.

        Raises:
            ConfigurationError: The isolation is neither of them.
        """
        if isolation not in {"read_committed", "read_uncommitted"}:
            raise ConfigurationError(f"isolation is read_committed or read_uncommitted, not {isolation!r}")
        return Reader(self._current, self._overlaid if isolation == "read_uncommitted" else None)

    def _current(self) -> View:
        """What is committed. Called by other threads."""
        view = self._view
        if view is None or os.getpid() != self._pid:
            raise IllegalStateError(f"the state store {self.path} is closed, or was opened by another process")
        return view

    @contextmanager
    def _overlaid(self) -> Generator[tuple[View, list[Uncommitted | Spilled]], None, None]:
        """What is committed, and what lies over it, the newest first; neither changes meanwhile. Called by other threads."""
        with self._changing:
            yield self._current(), [self._uncommitted, *([self._spilled] if self._spilled else [])]

    def _publish(self, committed: Committed) -> None:
        """Show other threads what is committed now, and no longer the writes that became so. Call it after each commit."""
        assert self._rocks is not None
        # Taken by the one thread that writes: data and note cannot belong to two commits.
        view = View(*self._rocks.snapshot(), committed)
        self._views.add(view)
        with self._changing:
            self._committed, self._view = committed, view
            self._uncommitted.clear()

    # Writes

    def put(self, key: bytes, value: bytes | None) -> None:
        """Write the value, or delete the key if it is None. Uncommitted until :meth:`commit`.

        Raises:
            TypeError: Key or value is not bytes.
            IllegalStateError: The store is closed, a commit has failed, or a savepoint of the block's database transaction is
                open: its rollback would not undo the write.
            Unavailable: The uncommitted writes do not fit into memory, and the disk is full: :meth:`recover` discards them.
        """
        self._usable()
        if self._in_savepoint is not None and self._in_savepoint():
            raise IllegalStateError(
                f"the state store {self.path} cannot be written inside a savepoint: a rollback would take its rows and messages"
                " back, and not this write",
                next_step="write the store before the savepoint, or after it was released",
            )
        _require_bytes(key, "key")
        if value is not None:
            _require_bytes(value, "value")
        with self._changing:
            self._uncommitted.write(key, value)
        if self._uncommitted.size_bytes > self._max_memory_bytes:
            self._spill()

    def put_all(self, entries: Iterable[Change]) -> None:
        """Write all of them, as :meth:`put` does."""
        for key, value in entries:
            self.put(key, value)

    def put_if_absent(self, key: bytes, value: bytes) -> bytes | None:
        """Write the value if the key has none; return the value that the key had."""
        former = self.get(key)
        if former is None:
            self.put(key, value)
        return former

    def delete(self, key: bytes) -> bytes | None:
        """Delete the key; return the value that it had."""
        former = self.get(key)
        self.put(key, None)
        return former

    def _spill(self) -> None:
        try:
            if self._spilled is None:
                self._spilled = Spilled(self.path / "uncommitted")
            self._spilled.add(self._uncommitted.changes())
        except Exception as refused:
            if type(refused) is Exception and is_disk_full(refused):  # rocksdict raises Exception itself
                raise disk_is_full(self.path, refused) from refused
            raise
        with self._changing:
            self._uncommitted.clear()
        failpoints.hit("state.spilled")

    # The transaction

    @staticmethod
    def transactional() -> bool:
        """Whether the store supports transactions: true."""
        return True

    @property
    def committed(self) -> Committed:
        """The last commit: how far it contains the changelog that the store follows, or each partition of it."""
        return self._committed

    @property
    def has_uncommitted(self) -> bool:
        """Whether anything was written since the last commit."""
        return len(self._uncommitted) > 0 or self._spilled is not None

    @property
    def approximate_uncommitted_bytes(self) -> int:
        """About what the writes since the last commit take, in memory and spilled. Any thread may ask."""
        spilled = self._spilled
        return self._uncommitted.size_bytes + (spilled.size_bytes if spilled is not None else 0)

    def uncommitted(self) -> Scan[Change]:
        """Scan what was written since the last commit: the newest value of each key, None if it was deleted.

        Raises:
            IllegalStateError: The store is closed, or a commit has failed.
        """
        self._usable()
        spilled = [self._spilled.changes()] if self._spilled else []
        return self._begun(Scan(merged_changes([self._uncommitted.changes(), *spilled])))

    def _begun(self, scan: Scan[Item]) -> Scan[Item]:
        self._scans.add(scan)
        return scan

    def follow(self, *changelogs: str) -> None:
        """Record which changelogs the store follows: one, or each partition of a topic. Durable on return.

        Further ones may be added; the store contains nothing of them yet.

        Args:
            changelogs: For each a text that identifies it permanently, such as its topic's id with the partition.

        Raises:
            ChangelogDiffers: The store follows another one, which is not among them.
            IllegalStateError: The store has uncommitted writes.
        """
        rocks = self._usable()
        followed = {one.changelog: one for one in self._committed.positions}
        if list(followed) == list(changelogs):
            return
        others = sorted(one for one in followed if one is not None and one not in changelogs)
        if others:
            raise ChangelogDiffers(
                f"the store {self.path} follows the changelog {', '.join(others)}, not {', '.join(changelogs)}: it is another"
                " topic or partition, or the topic was made again",
                next_step="name the right topic, or move the store's directory away: the next start builds it again",
            )
        if self.has_uncommitted:
            raise IllegalStateError("the store has uncommitted writes")
        if None in followed and len(changelogs) == 1:  # what it has committed so far is of this one
            followed[changelogs[0]] = replace(followed[None], changelog=changelogs[0])
        elif followed.get(None, Position()).offset is not None:
            raise IllegalStateError(
                f"the store {self.path} is at offset {followed[None].offset} of a changelog that was never named",
                next_step="name that one alone first",
            )
        following = Committed(tuple(followed.get(one, Position(changelog=one)) for one in changelogs))
        rocks.write(rocks.batch(), note=as_text(following))
        self._publish(following)

    def commit(self, changelog_offset: int | Mapping[str, int] | None, *, as_of_ms: int | None = None) -> None:
        """Make all uncommitted writes durable, with the offset, and begin the next transaction. Ends this thread's scans.

        All or nothing, also in a crash. Call it once the changelog's records of these writes are committed in Kafka. Readers
        in other threads see the commit on return; with ``sync=False`` it survives the process, and not yet the machine.

        Args:
            changelog_offset: The changelog's next offset: one more than that of the last record of these writes. None for a
                store without a changelog. Of a store that follows several, the offset of each that has moved.
            as_of_ms: The time at which the store equalled the changelog up to that offset: ms since 1970; now if not given.

        Raises:
            IllegalStateError: The offset lies before that of the last commit, or is of a changelog that the store does not
                follow; or the store is closed, a commit has failed, or the store is in a block of a `StateTask` or a
                consumer, which commits it itself.
            Exception: RocksDB could not write. `recover`, or opening the store again, shows whether it has committed.
        """
        rocks = self._usable()
        self._refuse_if_held("commit")
        offsets = self._offsets(changelog_offset)
        for changelog, offset in offsets.items():
            before = position_in(self._committed, changelog).offset
            if before is not None and offset is not None and offset < before:
                raise IllegalStateError(f"the store {self.path} is already at offset {before}, cannot commit {offset}")
        committing = moved(self._committed, offsets, int(time.time() * 1000) if as_of_ms is None else as_of_ms)
        if not self._sync and all(one.offset is None for one in committing.positions):
            raise IllegalStateError(
                f"the state store {self.path} does not sync its commits, and has no changelog that could restore them",
                next_step="commit with the changelog's offset, or open the store with sync=True",
            )
        self._end_scans()
        note = as_text(committing)
        with self._failing():
            if self._spilled is None:
                batch = rocks.batch()
                put_all(batch, self._uncommitted.changes())
                rocks.write(batch, note=note, sync=self._sync)
                self._publish(committing)
            else:
                self._spill()
                self._spilled.decide(note)
                failpoints.hit("state.decided")
                self._copy(self._spilled, note)
                self._publish(committing)
                self._discard_spilled()
        failpoints.hit("state.committed")

    def _offsets(self, given: int | Mapping[str, int] | None) -> dict[str | None, int | None]:
        """The offsets that the caller means, by changelog. None stays where the store is."""
        if isinstance(given, Mapping):
            return {changelog: offset for changelog, offset in given.items()}  # noqa: C416 - dict() keeps their types
        only = only_position(self._committed)
        return {only.changelog: only.offset if given is None else given}

    @contextmanager
    def _failing(self) -> Generator[None, None, None]:
        """After an error in the block, the content on disk is unknown until it is read again."""
        try:
            yield
        except BaseException as failed:
            self._failed = failed
            raise

    def recover(self, changelog_offset: int | Mapping[str, int] = 0) -> bool:
        """Discard all uncommitted writes. Ends all scans; also the way out of a commit that has failed.

        Args:
            changelog_offset: The offset that the store should have reached; of a store that follows several changelogs, the
                offset of each.

        Returns:
            Whether it has. If not, the changelog's committed records from ``committed.offset`` on must be applied and
            committed.

        Raises:
            StoreUnreadable: A commit had failed, and the directory cannot be opened again.
            Unavailable: Likewise, because the disk is full. Call it again once there is space.
            IllegalStateError: The store is closed, or in a block of a `StateTask` or a consumer.
        """
        self._refuse_if_held("recover")
        if self._failed is not None:
            self._close()
            self._open()
            self._failed = None
        self._usable()
        self._end_scans()
        with self._changing:
            self._uncommitted.clear()
        with self._failing():
            self._discard_spilled()
        if changelog_offset == 0:
            return True
        return all(
            (position_in(self._committed, changelog).offset or 0) >= (offset or 0)
            for changelog, offset in self._offsets(changelog_offset).items()
        )

    def _refuse_if_held(self, verb: str) -> None:
        if self._held:
            raise IllegalStateError(
                f"{verb}() in a block would part the store from its changelog", next_step="leave it to the block's end"
            )

    def flush(self) -> None:
        """Do nothing: deprecated by KIP-844 in favour of :meth:`commit`."""
        warnings.warn("flush() does nothing: use commit(changelog_offset)", DeprecationWarning, stacklevel=2)

    def _copy(self, spilled: Spilled, note: bytes) -> None:
        """Copy decided writes into the store. Repeating it changes nothing."""
        assert self._rocks is not None
        batch = self._rocks.batch()
        with closing(spilled.changes()) as changes:
            for change in changes:
                put_all(batch, [change])
                if batch.size_in_bytes() > _COPIED_AT_ONCE_BYTES:
                    self._rocks.write(batch)
                    failpoints.hit("state.copied")
                    batch = self._rocks.batch()
        self._rocks.write(batch, note=note)
        self._committed = parsed(note, self.path)
        failpoints.hit("state.finished")

    def _discard_spilled(self) -> None:
        with self._changing:
            spilled, self._spilled = self._spilled, None
        if spilled is not None:
            spilled.discard()

    def start_over(self) -> None:
        """Move the committed data aside, to ``too-old`` in the store's directory, and continue with an empty store.

        Ends all scans and snapshots; uncommitted writes are lost. Deletes what an earlier call has moved aside. A crash in
        the middle leaves the store as it was, or empty.

        Raises:
            IllegalStateError: The store is closed, a commit has failed, or it is in a block of a task or a consumer.
        """
        self._usable()
        self._refuse_if_held("start_over")
        self.recover()
        self._close()
        aside = self.path / "too-old"
        if aside.exists():
            shutil.rmtree(aside)
        (self.path / "committed").rename(aside)
        self._open()

    def close(self) -> None:
        """Close the store; uncommitted writes are lost. Ends all scans and snapshots. Closing it twice does nothing."""
        if self._rocks is not None and os.getpid() == self._pid:
            self._close()

    def _close(self) -> None:
        self._end_scans()
        with self._changing:
            self._view = None
            self._uncommitted.clear()
            spilled, self._spilled = self._spilled, None
        for view in list(self._views):
            view.end()
        self._views.clear()
        rocks, self._rocks = self._rocks, None
        if spilled is not None:
            spilled.close()
        if rocks is not None:
            rocks.close()

    def _end_scans(self) -> None:
        for scan in list(self._scans):
            scan.end()
        self._scans.clear()

    def _usable(self) -> Rocks:
        if self._failed is not None:
            raise IllegalStateError(
                f"a commit of the state store {self.path} has failed", next_step="call recover(), or open it again"
            ) from self._failed
        if self._rocks is None or os.getpid() != self._pid:
            raise IllegalStateError(f"the state store {self.path} is closed, or was opened by another process")
        return self._rocks

    def __repr__(self) -> str:
        offsets = ", ".join(str(position.offset) for position in self._committed.positions)
        shown = "closed" if self._rocks is None else f"at offset {offsets}"
        return f"<KeyValueStore {self.path} {shown}>"


def _require_bytes(given: object, name: str) -> None:
    if not isinstance(given, bytes):
        raise TypeError(f"the {name} is not bytes but {type(given).__name__}")


def hold(store: KeyValueStore, *, held: bool) -> None:
    """Refuse `commit` and `recover`, or allow them: for the library alone, while a block uses the store."""
    store._held = held  # noqa: SLF001 - of this module
    store._in_savepoint = None  # noqa: SLF001


def refuse_in_savepoints(store: KeyValueStore, in_savepoint: Callable[[], bool]) -> None:
    """Refuse writes while this says so, until the block ends: for the library alone."""
    store._in_savepoint = in_savepoint  # noqa: SLF001 - of this module


# One RocksDB that holds entries and, apart from them, one note; a batch writes both atomically.

logger = logging.getLogger(__name__)

_NOTES: Final = "notes"
_NOTE: Final = b"note"
_FULL: Final = ("No space left on device", "Disk quota exceeded")


class Rocks:
    """An open RocksDB, whose directory is created if missing. One thread at a time uses it.

    ``read_only`` needs no space on the disk, and no lock. Raises `StoreInUse` if it is open elsewhere,
    `StoreUnreadable` if RocksDB cannot open it, and `Unavailable` if its disk is full.
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
        # Data and note are flushed together: where commits are not synced, the machine's crash must not part them.
        options.set_atomic_flush(True)
        return options

    def get(self, key: bytes) -> bytes | None:
        """The value; None if there is none."""
        return cast("bytes | None", self._db.get(key))

    def entries(self, lower: bytes | None, upper: bytes | None, *, reverse: bool = False) -> Iterator[Entry]:
        """The entries with ``lower <= key < upper`` as they are now. Keeps the database open until dropped."""
        # Begun here, not at the first step: a scan must not show what is written in between.
        found = cast("Iterator[Entry]", self._db.items(backwards=reverse, from_key=upper if reverse else lower))
        return _within(found, lower, upper, reverse=reverse)

    def snapshot(self) -> tuple[Snapshot, RdictIter]:
        """The entries as they are now: to get and to scan. Any thread may read them; they keep the database open until dropped.

        The iterator is made here because rocksdict's snapshots make iterators that show what is written later.
        """
        return self._db.snapshot(), self._db.iter()

    def note(self) -> bytes | None:
        """The note; None if there is none."""
        return cast("bytes | None", self._notes.get(_NOTE))

    def batch(self) -> WriteBatch:
        """An empty batch, for `write`."""
        batch: WriteBatch = self._rocksdict.WriteBatch(raw_mode=True)
        return batch

    def write(self, batch: WriteBatch, *, note: bytes | None = None, sync: bool = True) -> None:
        """Write the batch, and the note with it if there is one: all or nothing, also in a crash.

        With a note, and unless ``sync`` is false, this batch and all earlier ones are durable on return; otherwise perhaps none
        is.
        """
        options = self._rocksdict.WriteOptions()
        if note is not None:
            batch.put(_NOTE, note, self._notes_handle)
            options.sync = sync
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


# Uncommitted writes that do not fit in memory, in a second RocksDB.

_DELETED: Final = b""
_WRITTEN: Final = b"\x01"
"""In front of each value, so that it differs from a deletion."""


class Spilled:
    """The spilled writes of one transaction of a store, which `discard` deletes. Reads what an earlier process left there.

    Its note stands for the decision: once it is written, the writes belong to the store, and a crash before they are copied
    does not lose them. ``size_bytes`` is what this process has added; a key that was written again counts again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rocks = Rocks(path)
        self.size_bytes = 0

    def add(self, changes: Iterable[Change]) -> None:
        """Add these changes. Nothing is durable on return."""
        batch = self._rocks.batch()
        for key, value in changes:
            batch.put(key, _DELETED if value is None else _WRITTEN + value)
        size_bytes = batch.size_in_bytes()
        self._rocks.write(batch)
        self.size_bytes += size_bytes

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
