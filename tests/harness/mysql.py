"""MySQL's own server, 8.0.31, as a jar bundles it; and MariaDB's tests on it: ``python -m harness.mysql tests/conformance``.

The server comes by Maven, once. It needs libaio (``apt install libaio1``). What starts a MariaDB of its own still does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from dualwrite.testing import EmbeddedMariaDB
from dualwrite.testing.servers.jars import fetched_jars
from dualwrite.testing.servers.mariadb import SERVER_VARIABLE
from dualwrite.testing.servers.server_process import ServerProcess

_BUNDLE = "mysql-Linux-amd64.tar.gz"


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
        jars = fetched_jars(Path(__file__).with_name("mysql-pom.xml"), "mysql", "a jar with MySQL")
        software = process.directory / "software"
        with (
            zipfile.ZipFile(next(jars.glob("*.jar"))) as jar,
            jar.open(_BUNDLE) as packed,
            tarfile.open(fileobj=packed, mode="r|gz") as bundle,
        ):
            # Its links lead to where it was packed.
            bundle.extractall(
                software, filter=lambda member, to: None if member.issym() else tarfile.data_filter(member, to)
            )
        self._server = str(software / "bin" / "mysqld")
        (process.directory / "tmp").mkdir()
        data = f"--datadir={process.directory / 'data'}"
        self._make_data(process, [self._server, "--no-defaults", "--user=root", "--initialize-insecure", data])
        self._write_first(process)


def main() -> int:
    """Run pytest with MySQL in MariaDB's place."""
    with EmbeddedMySQL() as server:
        command = [sys.executable, "-m", "pytest", "-k", "mariadb", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, SERVER_VARIABLE: server.url}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
