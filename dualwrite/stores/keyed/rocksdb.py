"""RocksDB as the deciding database: the user's batch and the decision in one atomic write.

The write-ahead log must be on and synced: a decision that a crash can lose is none.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
import threading
from collections.abc import Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

from dualwrite.errors import (
    ConfigurationError,
    DualWriteError,
    IllegalStateError,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.interfaces import Traits
from dualwrite.stores.keyed.store import (
    Change,
    Entry,
    Key,
    KeyedDatabase,
    KeyedForgetting,
    KeyedHandle,
)

if TYPE_CHECKING:
    from types import ModuleType

    from rocksdict import ColumnFamily, Rdict, WriteBatch
    from typing_extensions import Self


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

_CONFIG_NAME: Final = "rocksdict-config.json"
_RAW: Final = {"rocksdict": False, "leveldb.BytewiseComparator": True}


def restore_config(path: Path) -> None:
    """Rewrite the file if it contradicts the database, before that is opened: nobody has it open."""
    raw = _raw_of(path)
    found = _read(path / _CONFIG_NAME)
    if raw is None or found.get("raw_mode") is raw:
        return
    partial = path / f"{_CONFIG_NAME}.partial"
    partial.write_text(json.dumps({"prefix_extractors": {}, **found, "raw_mode": raw}), encoding="utf-8")
    partial.replace(path / _CONFIG_NAME)
    logger.info("rewrote %s in %s: a process had died while writing it", _CONFIG_NAME, path)


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

    def forgetting(self) -> KeyedForgetting:
        return KeyedForgetting(self.keys)

    def close(self) -> None:
        """Close it if this object has opened it. Call it when no writer uses it any more. Idempotent."""
        self._client.close()

    def __repr__(self) -> str:
        return f"<RocksDatabase {self._client.path}>"


# `tx.batch`: what one dual write puts into the user's RocksDB.

Default = TypeVar("Default")
Plain = bytes | str | int | float | bool
_Place = tuple[str | None, type, Plain]
_PLAIN: Final = (bytes, str, bool, int, float)
"""A bool is an int, too, and another key."""
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
        # An Enum's member that is a str is the key that its text is.
        return column_family, next(kind for kind in _PLAIN if isinstance(key, kind)), key

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

    def erase(self, entries: Mapping[Key, Entry]) -> bool:
        batch = self._client.new_batch()
        with self._client.locks.writing:
            if not self._as_expected([Change(key, entry, None) for key, entry in entries.items()]):
                return False
            for table, name in entries:
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
