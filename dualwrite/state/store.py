"""``KeyValueStore``: a persistent store whose writes become permanent together, at a commit."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from dualwrite.errors import ChangelogDiffers, ConfigurationError, IllegalStateError
from dualwrite.failpoints import hit
from dualwrite.state.entries import Change, Entry, Item, Scan, end_of_prefix, merged, merged_changes
from dualwrite.state.entries__state_committed import Committed, as_text, parsed
from dualwrite.state.entries__state_uncommitted import UNCHANGED, Uncommitted
from dualwrite.state.store__state_rocks import Rocks, disk_is_full, is_disk_full, put_all
from dualwrite.state.store__state_spilled import Spilled, delete_discarded, delete_undecided, is_undecided

if TYPE_CHECKING:
    from typing_extensions import Self

_COPIED_AT_ONCE_BYTES: Final = 4 << 20


class KeyValueStore:
    """A persistent key-value store of bytes with one open transaction.

    Reads see the transaction's own writes. `commit` makes all of them durable, together with the changelog's offset that they
    correspond to; a crash before it leaves none of them. They wait in memory up to a bound, and above it in a second RocksDB.

    One process has a store open at a time, and one thread uses it at a time.

    Args:
        path: Its directory; created if missing. Nothing else may be in it.
        max_memory_bytes: Uncommitted writes above this size move from memory to disk; 0 moves each of them.

    Raises:
        StoreInUse: Another store has the directory open.
        StoreUnreadable: The directory cannot be opened, or is of another version of this library.
        Unavailable: Its disk is full.
        ConfigurationError: The extra ``state`` is not installed, or an argument cannot work.

    Source: KIP-844, "Transactional State Stores".
    """

    def __init__(self, path: str | os.PathLike[str], *, max_memory_bytes: int = 64 << 20) -> None:
        if max_memory_bytes < 0:
            raise ConfigurationError("max_memory_bytes is negative")
        self.path = Path(path)
        self._max_memory_bytes = max_memory_bytes
        self._pid = os.getpid()
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
        self._uncommitted.clear()
        hit("state.spilled")

    # The transaction

    @staticmethod
    def transactional() -> bool:
        """Whether the store supports transactions: true."""
        return True

    @property
    def committed(self) -> Committed:
        """The last commit: its offset and time, and the changelog that the store follows."""
        return self._committed

    @property
    def has_uncommitted(self) -> bool:
        """Whether anything was written since the last commit."""
        return len(self._uncommitted) > 0 or self._spilled is not None

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

    def follow(self, changelog: str) -> None:
        """Record which changelog the store follows. Durable on return.

        Args:
            changelog: A text that identifies it permanently, such as its topic's id with the partition.

        Raises:
            ChangelogDiffers: The store follows another one.
            IllegalStateError: The store has uncommitted writes.
        """
        rocks = self._usable()
        if self._committed.changelog == changelog:
            return
        if self._committed.changelog is not None:
            raise ChangelogDiffers(
                f"the store {self.path} follows the changelog {self._committed.changelog}, not {changelog}: it is another"
                " topic, or the topic was made again",
                next_step="name the right topic, or move the store's directory away: the next start builds it again",
            )
        if self.has_uncommitted:
            raise IllegalStateError("the store has uncommitted writes")
        following = replace(self._committed, changelog=changelog)
        rocks.write(rocks.batch(), note=as_text(following))
        self._committed = following

    def commit(self, changelog_offset: int | None, *, as_of_ms: int | None = None) -> None:
        """Make all uncommitted writes durable, with the offset, and begin the next transaction. Ends all scans.

        All or nothing, also in a crash. Call it once the changelog's records of these writes are committed in Kafka.

        Args:
            changelog_offset: The changelog's next offset: one more than that of the last record of these writes. None for a
                store without a changelog.
            as_of_ms: The time at which the store equalled the changelog up to that offset: ms since 1970; now if not given.

        Raises:
            IllegalStateError: The offset lies before that of the last commit; or the store is closed, a commit has failed, or
                the store is in a block of a `StateTask` or a consumer, which commits it itself.
            Exception: RocksDB could not write. `recover`, or opening the store again, shows whether it has committed.
        """
        rocks = self._usable()
        self._refuse_if_held("commit")
        before = self._committed.offset
        if changelog_offset is not None and before is not None and changelog_offset < before:
            raise IllegalStateError(
                f"the store {self.path} is already at offset {before}, cannot commit {changelog_offset}"
            )
        self._end_scans()
        offset = before if changelog_offset is None else changelog_offset
        committing = replace(
            self._committed, offset=offset, at_ms=int(time.time() * 1000) if as_of_ms is None else as_of_ms
        )
        note = as_text(committing)
        with self._failing():
            if self._spilled is None:
                batch = rocks.batch()
                put_all(batch, self._uncommitted.changes())
                rocks.write(batch, note=note)
            else:
                self._spill()
                self._spilled.decide(note)
                hit("state.decided")
                self._copy(self._spilled, note)
                self._discard_spilled()
            self._committed = committing
            self._uncommitted.clear()
        hit("state.committed")

    @contextmanager
    def _failing(self) -> Generator[None, None, None]:
        """After an error in the block, the content on disk is unknown until it is read again."""
        try:
            yield
        except BaseException as failed:
            self._failed = failed
            raise

    def recover(self, changelog_offset: int) -> bool:
        """Discard all uncommitted writes. Ends all scans; also the way out of a commit that has failed.

        Args:
            changelog_offset: The offset that the store should have reached.

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
        self._uncommitted.clear()
        with self._failing():
            self._discard_spilled()
        return (self._committed.offset or 0) >= changelog_offset

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
                    hit("state.copied")
                    batch = self._rocks.batch()
        self._rocks.write(batch, note=note)
        self._committed = parsed(note, self.path)
        hit("state.finished")

    def _discard_spilled(self) -> None:
        if self._spilled is not None:
            spilled, self._spilled = self._spilled, None
            spilled.discard()

    def close(self) -> None:
        """Close the store; uncommitted writes are lost. Ends all scans. Closing it twice does nothing."""
        if self._rocks is not None and os.getpid() == self._pid:
            self._close()

    def _close(self) -> None:
        self._end_scans()
        self._uncommitted.clear()
        spilled, self._spilled = self._spilled, None
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        shown = "closed" if self._rocks is None else f"at offset {self._committed.offset}"
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
