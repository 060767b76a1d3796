"""MariaDB's tests on servers that `make test` does not start: ``python -m harness.other_databases mysql tests/conformance``.

``mariadb-10.11`` is MariaDB's former long-term release. ``mysql`` is MySQL's own server, 8.0.31, as a jar bundles it; it needs
libaio (``apt install libaio1``). Maven fetches each once. A test that starts a server of its own starts MariaDB's usual one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from dualwrite.testing import EmbeddedMariaDB
from dualwrite.testing.servers.embedded import ServerProcess
from dualwrite.testing.servers.jars import fetched_jars
from dualwrite.testing.servers.mariadb import SERVER_VARIABLE

_BUNDLE = "mysql-Linux-amd64.tar.gz"


class FormerMariaDB(EmbeddedMariaDB):
    """One server of the former long-term release."""

    _POM = Path(__file__).with_name("mariadb-10.11-pom.xml")


class EmbeddedMySQL(EmbeddedMariaDB):
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
        pom = Path(__file__).with_name("mysql-pom.xml")
        software = fetched_jars(pom, "mysql", "a jar with MySQL", _unpack) / "server"
        self._server = str(software / "bin" / "mysqld")
        self._base: list[str] = []
        (process.directory / "tmp").mkdir()
        data = f"--datadir={process.directory / 'data'}"
        self._make_data(process, [self._server, "--no-defaults", "--user=root", "--initialize-insecure", data])
        self._write_first(process)


def _unpack(directory: Path) -> None:
    with (
        zipfile.ZipFile(next(directory.glob("*.jar"))) as jar,
        jar.open(_BUNDLE) as packed,
        tarfile.open(fileobj=packed, mode="r|gz") as bundle,
    ):
        # Its links lead to where it was packed.
        bundle.extractall(
            directory / "server", filter=lambda member, to: None if member.issym() else tarfile.data_filter(member, to)
        )


SERVERS = {"mysql": EmbeddedMySQL, "mariadb-10.11": FormerMariaDB}


def main() -> int:
    """Run pytest with another server in MariaDB's place."""
    name, *arguments = sys.argv[1:] or [""]
    if name not in SERVERS:
        sys.exit(f"usage: python -m harness.other_databases {'|'.join(SERVERS)} [arguments of pytest]")
    with SERVERS[name]() as server:
        command = [sys.executable, "-m", "pytest", "-k", "mariadb", *arguments]
        return subprocess.run(command, env={**os.environ, SERVER_VARIABLE: server.url}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
