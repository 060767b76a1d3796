"""A disk of a few megabytes that a test can fill: a tmpfs, which only root may mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SIZE_MB = 24
_BALLAST = "ballast"


@contextmanager
def small_disk(directory: Path) -> Generator[Path, None, None]:
    """Mount one. The test is skipped where that is not allowed."""
    at = directory / "small disk"
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE_MB}m", "tmpfs", str(at)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as refused:
        why = getattr(refused, "stderr", b"").decode().strip() or refused
        pytest.skip(f"full disks need the right to mount a tmpfs (root): {why}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def fill_up(disk: Path, left_bytes: int = 0) -> None:
    """Let something else take the space of the disk."""
    with (disk / _BALLAST).open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, shutil.disk_usage(disk).free - left_bytes)


def make_room(disk: Path) -> None:
    """Give the space back."""
    (disk / _BALLAST).unlink()
