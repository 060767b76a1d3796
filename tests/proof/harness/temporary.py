"""Where the tests and their servers keep their files: in memory, if there is room.

PostgreSQL makes some 300 files for each new database, and every commit waits until its files are on the disk: on a disk, a
database server takes four times as much processor time for a test.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Final

VARIABLE: Final = "TMPDIR"
MEMORY: Final = Path("/dev/shm")
NEEDED_BYTES: Final = 4 << 30
"""Room for a whole run."""
_OURS: Final = "dualwrite-tests-"
"""What the names of such directories begin with; then come the process that has made it, and some letters."""


def use_memory(memory: Path = MEMORY, needed_bytes: int = NEEDED_BYTES) -> Callable[[], object] | None:
    """Let this process and those that it starts keep temporary files in memory, until it exits.

    Whoever sets the variable keeps them where it says, and those of failed tests, too: ``TMPDIR=/tmp make test``.

    Args:
        memory: A directory whose files are in memory; it need not exist.
        needed_bytes: The room that must be free there.

    Returns:
        What deletes them before the exit, if they are there.
    """
    if VARIABLE in os.environ or not _has_room(memory, needed_bytes):
        return None
    _sweep(memory)
    directory = tempfile.mkdtemp(prefix=f"{_OURS}{os.getpid()}-", dir=memory)
    Path(directory).chmod(0o711)  # if root runs the tests, PostgreSQL runs as another user
    os.environ[VARIABLE] = directory
    tempfile.tempdir = None  # the next one that is made looks at the variable
    # After multiprocessing, which deletes its own files at -100. A forked child leaves them.
    return util.Finalize(None, _delete, [directory], exitpriority=-200)


def _has_room(directory: Path, needed_bytes: int) -> bool:
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        return False
    found = os.statvfs(directory)
    room = min(found.f_bavail * found.f_frsize, _available_bytes())
    # Servers unpack libraries there, and load them.
    return not found.f_flag & getattr(os, "ST_NOEXEC", 0) and room >= needed_bytes


def _available_bytes() -> int:
    """The memory that programs can still have: other files in memory take it, too."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(kilobytes)


def _sweep(memory: Path) -> None:
    """Delete what runs have left that were killed."""
    for left in memory.glob(f"{_OURS}*"):
        process = left.name.removeprefix(_OURS).split("-")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)


def _delete(directory: str) -> None:
    os.environ.pop(VARIABLE, None)
    tempfile.tempdir = None
    shutil.rmtree(directory, ignore_errors=True)  # what a test has left behind may still be writing there
