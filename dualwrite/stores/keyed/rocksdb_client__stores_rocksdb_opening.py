"""rocksdict, loaded where it is used, and who else has a RocksDB open."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    from types import ModuleType

_LOCKED_HERE: Final = "lock hold by current process"
_LOCKED_ELSEWHERE: Final = "While lock file"
"""How RocksDB's messages name a lock that another opener holds."""


def rocksdict_for(user: str, extra: str) -> ModuleType:
    """The package rocksdict.

    Raises:
        ConfigurationError: It is not installed.
    """
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
