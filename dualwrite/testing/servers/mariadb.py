"""A real MariaDB server for tests, from the binaries of the operating system's package (``apt install mariadb-server``)."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.engine import URL, make_url

from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.runtime.deadline import Deadline
from dualwrite.testing.servers.ports import LOOPBACK, ReservedPort
from dualwrite.testing.servers.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from typing_extensions import Self

SERVER_VARIABLE: Final = "DUALWRITE_TEST_MARIADB"
_DRIVER: Final = "mysql+pymysql"
_USER: Final = "dualwrite"
_PLACES: Final = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin")
_STEP: Final = "install MariaDB's server: apt install mariadb-server (its service need not run)"
_SETTINGS: Final = {
    # Small, so that it starts at once and leaves little on the disk.
    "innodb-buffer-pool-size": "32M",
    "innodb-log-file-size": "16M",
    "performance-schema": "OFF",
    "skip-name-resolve": "ON",
    # A killed server loses nothing. Only a crash of the machine would, after which nobody asks for the directory.
    "innodb-flush-method": "nosync",
    "sync-frm": "OFF",
    "local-infile": "ON",
}


def mariadb_binary(name: str) -> str | None:
    """The path of one of MariaDB's programs; None if it is not installed."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_PLACES))


class EmbeddedMariaDB:
    """One MariaDB server on a free port of the loopback interface. Deletes its directory on exit.

    If the environment variable ``DUALWRITE_TEST_MARIADB`` holds a SQLAlchemy URL, and ``settings`` is empty, that server is
    used: nothing is started, and it cannot be stopped. Its user must be allowed to create databases.

    Args:
        settings: Server settings to add or to override, by the names of the command line (``sync-binlog``).
        start_timeout_s: Seconds that a start may take.

    Raises:
        ConfigurationError: Raised by `start`: the server is not installed, or refuses its settings.
        Unavailable: Raised by `start`: the server was not ready in time.
    """

    def __init__(self, settings: Mapping[str, str] | None = None, *, start_timeout_s: float = 180.0) -> None:
        self._settings = dict(settings or {})
        self._start_timeout_s = start_timeout_s
        external = None if self._settings else os.environ.get(SERVER_VARIABLE) or None
        self._external = None if external is None else make_url(external)
        self._process: ServerProcess | None = None
        self._port: ReservedPort | None = None
        self._password = secrets.token_hex(16)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = self._external or (f"{LOOPBACK}:{self._port.number}" if self._port else "not started")
        return f"{type(self).__name__}({where})"

    @property
    def port(self) -> int:
        """The TCP port, the same after `restart`.

        Raises:
            IllegalStateError: Never started.
        """
        if self._external is not None:
            return self._external.port or 3306
        if self._port is None:
            raise IllegalStateError("the embedded MariaDB was never started, or is closed")
        return self._port.number

    def url_of(self, database: str) -> str:
        """The SQLAlchemy URL of a database on this server, for PyMySQL, password included."""
        return self._location(database).render_as_string(hide_password=False)

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the server, without a database."""
        return self._location(None).render_as_string(hide_password=False)

    def _location(self, database: str | None) -> URL:
        if self._external is not None:
            return self._external.set(database=database or "")
        return URL.create(_DRIVER, _USER, self._password, LOOPBACK, self.port, database)

    @property
    def running(self) -> bool:
        """Whether the server's process exists (a suspended one does); True for a server from the environment."""
        return self._external is not None or (self._process is not None and self._process.running)

    def start(self) -> None:
        """Start the server, the first time with a new port and an empty directory, and return when it answers.

        After a `kill` it returns once crash recovery is done.

        Raises:
            IllegalStateError: It is running.
            ConfigurationError: The server is not installed, or refuses its settings.
            Unavailable: It was not ready in time.
        """
        if self._external is not None:
            return
        if self._process is not None:
            self._run(self._process)
            return
        programs = [mariadb_binary(name) for name in ("mariadbd", "mariadb-install-db")]
        if None in programs:
            raise ConfigurationError("MariaDB's server is not installed", next_step=_STEP)
        self._server, install = map(str, programs)
        self._process = ServerProcess("mariadb")
        self._port = ReservedPort()
        try:
            self._initialise(self._process, install)
            self._run(self._process)
        except BaseException:
            self.close()
            raise

    def _initialise(self, process: ServerProcess, install: str) -> None:
        # A directory of its own for temporary tables: servers that are made at the same time give theirs the same names.
        (process.directory / "tmp").mkdir()
        arguments = ["--no-defaults", f"--datadir={process.directory / 'data'}", "--skip-test-db", *_as_root()]
        arguments += [f"--tmpdir={process.directory / 'tmp'}"]
        arguments += ["--auth-root-authentication-method=normal", "--innodb-log-file-size=16M"]
        # It need not wait for the disk, since the directory is deleted on exit; the server itself does.
        process.start([install, *arguments, "--innodb-flush-log-at-trx-commit=0"])
        code = process.exit_code(self._start_timeout_s)
        if code != 0:
            raise ConfigurationError(f"mariadb-install-db ended with {code}:\n{process.log_tail()}")
        first = process.directory / "first.sql"
        first.touch(mode=0o600)
        first.write_text(
            f"ALTER USER root@localhost IDENTIFIED BY '{self._password}';\n"
            f"CREATE USER IF NOT EXISTS {_USER} IDENTIFIED BY '{self._password}';\n"
            f"GRANT ALL ON *.* TO {_USER} WITH GRANT OPTION;\n",
            encoding="utf-8",
        )

    def _run(self, process: ServerProcess) -> None:
        deadline = Deadline(self._start_timeout_s)
        directory = process.directory
        settings = {
            "datadir": str(directory / "data"),
            "tmpdir": str(directory / "tmp"),
            "bind-address": LOOPBACK,
            "port": str(self.port),
            "socket": str(directory / "socket"),
            "pid-file": str(directory / "pid"),
            "init-file": str(directory / "first.sql"),
            **_SETTINGS,
            **self._settings,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        process.start([self._server, "--no-defaults", *_as_root(), *options])
        while not self._answers():
            code = process.exit_code(0.02)
            if code is not None:
                raise ConfigurationError(f"MariaDB ended with {code} while it started:\n{process.log_tail()}")
            if deadline.expired:
                raise Unavailable(f"MariaDB was not ready in {self._start_timeout_s} s:\n{process.log_tail()}")

    def _answers(self) -> bool:
        import pymysql  # noqa: PLC0415 - comes with the extra "mariadb"

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

    def _own(self, deed: str) -> ServerProcess:
        if self._external is not None:
            raise IllegalStateError(
                f"cannot {deed} the MariaDB server named by {SERVER_VARIABLE}",
                next_step=f"unset {SERVER_VARIABLE} to run this with an embedded server",
            )
        if self._process is None:
            raise IllegalStateError(f"cannot {deed} a MariaDB server that was never started")
        return self._process

    def stop(self, *, timeout_s: float = 180.0) -> None:
        """Stop the server, ending its sessions. `start` finds its data again.

        Raises:
            IllegalStateError: It is not running, or not ours.
            Unavailable: It still runs.
        """
        process = self._own("stop")
        process.signal(signal.SIGCONT)
        process.signal(signal.SIGTERM)
        if process.exit_code(timeout_s) is None:
            raise Unavailable(f"MariaDB still runs {timeout_s} s after SIGTERM:\n{process.log_tail()}")

    def kill(self) -> None:
        """SIGKILL the server, and return when it is gone. The data stays.

        Raises:
            IllegalStateError: It is not running, or not ours.
        """
        self._own("kill").kill()

    def restart(self) -> None:
        """`stop` the server if it runs, then `start` it: same port, same data."""
        if self._own("restart").running:
            self.stop()
        self.start()

    def close(self) -> None:
        """Kill the server if it runs, delete its directory, release its port. Idempotent."""
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._port is not None:
            self._port.release()
            self._port = None

    def log_tail(self, lines: int = 50) -> str:
        """The last lines of the server's log.

        Raises:
            IllegalStateError: Never started, or not ours.
        """
        return self._own("read the log of").log_tail(lines)

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
