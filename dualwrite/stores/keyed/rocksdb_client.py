"""One RocksDB, opened with the settings that a decision needs, and shared by everything in the process.

The write-ahead log must be on and synced: a decision that a crash can lose is none.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import threading
from collections.abc import Collection, Generator, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from dualwrite.errors import ConfigurationError, DualWriteError, IllegalStateError, Unavailable

if TYPE_CHECKING:
    from types import ModuleType

    from rocksdict import ColumnFamily, Rdict, WriteBatch

logger = logging.getLogger(__name__)

_REOPEN: Final = (
    "close the Rdict, open it again, and give it to a new RocksDatabase: RocksDB writes no more after a failed write"
)


class WriteFailedError(Exception):
    """RocksDB could not write a batch. Only opening the database again shows whether it was written."""


class _Locks:
    """What all users of one RocksDB in this process share; ``writing`` is held from a condition's check to the write."""

    def __init__(self) -> None:
        self.writing = threading.Lock()
        self._free = threading.Condition()
        self._held: set[Hashable] = set()

    @contextmanager
    def held(self, keys: Iterable[Hashable], within_s: float) -> Generator[None, None, None]:
        """Hold all of these keys, as soon as nobody holds any of them."""
        wanted = set(keys)
        with self._free:
            if not self._free.wait_for(lambda: not wanted & self._held, within_s):
                raise Unavailable("another thread of this process is still settling the same ids")
            self._held |= wanted
        try:
            yield
        finally:
            with self._free:
                self._held -= wanted
                self._free.notify_all()


_locks: Final[WeakValueDictionary[str, _Locks]] = WeakValueDictionary()
"""By the path of the database: two objects over one database must not decide at the same time."""
_making_locks: Final = threading.Lock()


def _locks_of(path: Path) -> _Locks:
    with _making_locks:
        return _locks.setdefault(str(path), _Locks())


class Client:
    """An open RocksDB, for any number of threads; an ``Rdict`` that was given is closed by its owner."""

    def __init__(self, given: Path | Rdict, *, create: bool = True) -> None:
        self._rocksdict = rocksdict_for("databases of RocksDB", "rocksdb")
        self._pid = os.getpid()
        self._opens = isinstance(given, Path)
        self._failed: Exception | None = None
        self._opening = threading.Lock()
        self._families: dict[str, Rdict] = {}
        self._synced = self._rocksdict.WriteOptions()
        self._synced.sync = True
        self._db: Rdict | None = None
        if isinstance(given, Path):
            self.path = given.absolute()
            if not create and not (self.path / "CURRENT").exists():
                raise ConfigurationError(
                    f"there is no RocksDB in {self.path}", next_step="check the path; RocksDatabase(path) makes one"
                )
            self._db = self._open()
        else:
            self._db = given
            with self._mapped():
                self.path = Path(given.path()).absolute()
        with self._mapped():
            self.raw = _is_raw(self._db)
        self.locks = _locks_of(self.path.resolve())

    def _open(self) -> Rdict:
        try:
            fresh = not (self.path / "CURRENT").exists()
            if fresh:
                options, families = self._rocksdict.Options(), None
            else:
                restore_config(self.path)
                options, families = self._rocksdict.Options.load_latest(str(self.path))
            # The default, point in time, drops everything after a damaged record, synced or not.
            mode = self._rocksdict.DBRecoveryMode.tolerate_corrupted_tail_records()
            options.set_wal_recovery_mode(mode)
            opened: Rdict = self._rocksdict.Rdict(str(self.path), options, families)
        except Exception as refused:  # rocksdict raises Exception itself
            if is_open_elsewhere(refused):
                raise Unavailable(
                    f"{opener_of(self.path, refused)} has the RocksDB {self.path} open: one process has it at a time",
                    next_step="close it there, with the iterators and column families taken from it, or wait for its end",
                ) from refused
            raise ConfigurationError(
                f"the RocksDB {self.path} cannot be opened: {refused}",
                next_step="fix the cause; if the log is damaged, opening once with DBRecoveryMode.point_in_time() keeps what "
                "is before the damage, and the next writer reports what Kafka has and the database has lost",
            ) from refused
        return opened

    @property
    def db(self) -> Rdict:
        """The open database; opened again if a write has failed, and the directory is ours to open."""
        if os.getpid() != self._pid:
            raise IllegalStateError(
                "the RocksDB was opened in another process", next_step="open it after the fork, in one process"
            )
        with self._opening:
            if self._failed is not None:
                self._open_again(self._failed)
            if self._db is None:
                raise IllegalStateError(f"the RocksDB {self.path} is closed")
            return self._db

    def _open_again(self, failed: Exception) -> None:
        if not self._opens:
            raise Unavailable(f"a write to the RocksDB {self.path} has failed: {failed}", next_step=_REOPEN) from failed
        self._close()
        try:
            self._db = self._open()
        except DualWriteError as error:
            raise Unavailable(
                f"a write to the RocksDB has failed ({failed}), and so did opening it again: {error}"
            ) from error
        self._failed = None
        logger.warning("opened the RocksDB %s again after a failed write: %s", self.path, failed)

    def check_settings(self, families: Collection[str]) -> None:
        """Refuse settings with which a decision may be lost, and a database whose settings are not written down."""
        with self._mapped():
            # Refused by a database that is open for reading alone.
            self.db.write(self.new_batch(), self._synced)
        written = sorted(self.path.glob("OPTIONS-*[0-9]"), key=lambda file: int(file.name.rpartition("-")[2]))
        if not written:
            raise ConfigurationError(f"the RocksDB {self.path} has no OPTIONS file: its settings cannot be checked")
        for what, advice in refusals(parse(written[-1].read_text(encoding="utf-8")), families):
            raise ConfigurationError(f"the RocksDB {self.path} cannot hold decisions: {what}", next_step=advice)

    def make_families(self, names: Iterable[str]) -> None:
        """Make the column families that are missing. Durable on return."""
        with self._mapped(), self.locks.writing:
            db = self.db
            for name in names:
                try:
                    db.get_column_family_handle(name)
                except Exception:  # noqa: BLE001 - rocksdict raises Exception itself; making it tells what is wrong
                    db.create_column_family(name, self._rocksdict.Options(raw_mode=self.raw))

    def family(self, name: str) -> ColumnFamily:
        """The handle of a column family. It keeps the database open until it is dropped."""
        with self._mapped():
            return self.db.get_column_family_handle(name)

    def _in(self, family: str | None) -> Any:
        db = self.db
        if family is None:
            return db
        found = self._families.get(family)
        if found is None:
            found = self._families[family] = db.get_column_family(family)
        return found

    def get(self, key: object, family: str | None = None) -> Any:
        """The value as it was last written; None if there is none."""
        with self._mapped():
            return self._in(family).get(key)

    def items(self, family: str, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """The entries of a family of ours whose keys begin with the prefix, as they are at one moment."""
        found = []
        with self._mapped():
            for key, value in self._in(family).items(from_key=prefix):
                if not key.startswith(prefix):
                    break
                found.append((key, value))
        return found

    def new_batch(self) -> WriteBatch:
        batch: WriteBatch = self._rocksdict.WriteBatch(raw_mode=self.raw)
        return batch

    def write(self, batch: WriteBatch) -> None:
        """Write the batch: all or nothing, durable on return. It cannot be used again.

        Call it with ``locks.writing`` held, and take what the batch needs from this client under the same lock.

        Raises:
            WriteFailedError: Whether it was written shows once the database is open again; until then reads are refused.
            Unavailable, IllegalStateError: The database was not usable before: nothing was written.
        """
        db = self.db
        try:
            db.write(batch, self._synced)
        except Exception as error:
            # RocksDB still shows the old values, but its log may hold the batch: a reader would be misled.
            self._failed = error
            raise WriteFailedError(str(error)) from error

    @contextmanager
    def _mapped(self) -> Generator[None, None, None]:
        try:
            yield
        except DualWriteError:
            raise
        except Exception as error:  # rocksdict raises Exception itself
            raise _meant(error, self.path) from error

    def _close(self) -> None:
        self._families.clear()
        db, self._db = self._db, None
        if db is not None:
            try:
                db.close()
            except Exception as error:  # noqa: BLE001 - it closes nevertheless; after a failed write it cannot flush
                logger.info("closing the RocksDB %s: %s", self.path, error)

    def close(self) -> None:
        """Close what this client has opened. In a forked process it does nothing. Idempotent."""
        if os.getpid() != self._pid:
            return
        self._families.clear()
        self._failed = None
        if self._opens:
            self._close()
        self._db = None


def _meant(error: Exception, path: Path) -> DualWriteError:
    text = str(error)
    if type(error).__name__ == "DbClosedError":
        return IllegalStateError(f"the RocksDB {path} is closed", next_step="open it, and then the writer")
    if "does not exist" in text:
        return ConfigurationError(f"RocksDB: {text}", next_step="create the column family first")
    if "Not supported operation" in text:
        return ConfigurationError(
            f"the RocksDB {path} is not open for writing: {text}", next_step="open it for writing"
        )
    if text.startswith("Corruption"):
        return ConfigurationError(f"the RocksDB {path} is damaged: {text}", next_step="restore it")
    return Unavailable(f"RocksDB: {text}")


def _is_raw(db: Rdict) -> bool:
    """Whether keys and values are bytes alone: rocksdict's raw mode. Otherwise it encodes their types with them."""
    try:
        db.key_may_exist(0)
    except KeyError:
        return True
    return False


# The settings with which a RocksDB could lose a decision. Pure.

Sections = Mapping[str, Mapping[str, str]]

_SECTION: Final = re.compile(r'\[([^\s\]]+)(?: "(.*)")?\]')
_FATAL: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("wal_recovery_mode", "kSkipAnyCorruptedRecords"): (
        "skips damaged records of the write-ahead log and keeps later ones: a decision could be lost unseen",
        "use DBRecoveryMode.tolerate_corrupted_tail_records(), or point_in_time()",
    ),
    ("manual_wal_flush", "true"): ("leaves written records in the process's memory", "open it without"),
    ("paranoid_checks", "false"): (
        "continues after a failed write, on a damaged log: what is synced later may be lost in a crash",
        "leave set_paranoid_checks(True), the default",
    ),
    ("avoid_flush_during_recovery", "true"): (
        "shows records of the log after a crash that were never synced: the next crash may take them back",
        "open it without",
    ),
    ("best_efforts_recovery", "true"): (
        "opens an older state if files are missing, without an error",
        "open it without",
    ),
}


def parse(text: str) -> Sections:
    """The sections of a RocksDB ``OPTIONS`` file: ``DBOptions``, and ``CFOptions NAME`` for each column family."""
    sections: dict[str, dict[str, str]] = {}
    inside: dict[str, str] = {}
    for line in map(str.strip, text.splitlines()):
        if (begun := _SECTION.fullmatch(line)) is not None:
            inside = sections.setdefault(" ".join(part for part in begun.groups() if part), {})
        elif "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            inside[name] = value
    return sections


def refusals(sections: Sections, families: Collection[str]) -> Iterator[tuple[str, str]]:
    """Each setting that is refused for one of these column families, which hold the state: why, and what to do."""
    database = sections.get("DBOptions", {})
    for (name, value), (why, advice) in _FATAL.items():
        if database.get(name) == value:
            yield f"{name}={value} {why}", advice
    for family in families:
        options = sections.get(f"CFOptions {family}", {})
        if options.get("compaction_style") == "kCompactionStyleFIFO":
            yield f"FIFO compaction deletes the oldest rows of {family}", "create that column family without it"
        if any(_is_set(options.get(name)) for name in ("compaction_filter", "compaction_filter_factory")):
            yield (
                f"a compaction filter, such as that of a time to live, deletes rows of {family}",
                "open the database without AccessType.with_ttl()",
            )


def _is_set(value: str | None) -> bool:
    return value not in {None, "", "nullptr"}


# rocksdict, loaded where it is used, and who else has a RocksDB open.

_LOCKED_HERE: Final = "lock hold by current process"
_LOCKED_ELSEWHERE: Final = "While lock file"


def rocksdict_for(user: str, extra: str) -> ModuleType:
    """The package rocksdict."""
    try:
        return importlib.import_module("rocksdict")
    except ImportError as missing:
        raise ConfigurationError(f"{user} need rocksdict", next_step=f"pip install 'dualwrite[{extra}]'") from missing


def is_open_elsewhere(refused: Exception) -> bool:
    """Whether RocksDB refuses to open a directory because it is open already, in this process or in another one."""
    return any(words in str(refused) for words in (_LOCKED_HERE, _LOCKED_ELSEWHERE))


def opener_of(path: Path, refused: Exception) -> str:
    """The process that has the directory open, for people; the operating system may not say which."""
    if _LOCKED_HERE in str(refused):
        return "this process"
    holder = _holder_of(path / "LOCK")
    if holder is None:
        return "another process"
    try:
        name = Path(f"/proc/{holder}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return f"process {holder}"
    return f"process {holder} ({name})"


def _holder_of(lock: Path) -> int | None:
    """The id of the process that holds a lock on the file; Linux lists them.

    Never opens the file: a process gives up its own lock on a file as soon as it closes any descriptor of it.
    """
    try:
        inode = str(lock.stat().st_ino)
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for fields in map(str.split, lines):  # 1: POSIX ADVISORY WRITE 4711 fe:00:1234 0 EOF
        if len(fields) > 5 and fields[5].rpartition(":")[2] == inode and fields[4].isdigit() and int(fields[4]) > 0:  # noqa: PLR2004 - see above
            return int(fields[4])
    return None


# Restores the file by which rocksdict knows whether keys and values are bytes alone.
#
# rocksdict writes its `rocksdict-config.json` at every opening, in place. If the process is killed meanwhile the file
# is empty, and the next opening takes the database for one of bytes, writes that down, and fails. RocksDB's own
# options, which are replaced atomically, name the comparator, and databases of other values have one of their own.

_NAME: Final = "rocksdict-config.json"
_RAW: Final = {"rocksdict": False, "leveldb.BytewiseComparator": True}


def restore_config(path: Path) -> None:
    """Rewrite the file if it contradicts the database, before that is opened: nobody has it open."""
    raw = _raw_of(path)
    found = _read(path / _NAME)
    if raw is None or found.get("raw_mode") is raw:
        return
    partial = path / f"{_NAME}.partial"
    partial.write_text(json.dumps({"prefix_extractors": {}, **found, "raw_mode": raw}), encoding="utf-8")
    partial.replace(path / _NAME)
    logger.info("rewrote %s in %s: a process had died while writing it", _NAME, path)


def _raw_of(path: Path) -> bool | None:
    """Whether keys and values are bytes alone, by RocksDB's newest options; None if they do not say."""
    files = [(int(found[1]), one) for one in path.iterdir() if (found := re.fullmatch(r"OPTIONS-(\d+)", one.name))]
    if not files:
        return None
    newest = max(files)[1].read_text(encoding="utf-8", errors="replace")
    return _RAW.get(parse(newest).get("CFOptions default", {}).get("comparator", ""))


def _read(file: Path) -> dict[str, object]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# The column families of the library's rows.

FAMILIES: Final[Mapping[str, str]] = {"state": "kafka_transaction_state", "incident": "dualwrite_incident"}
OWN: Final = frozenset(FAMILIES.values())
